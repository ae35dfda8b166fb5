"""Optimizers and the scheduler: hand-computed plans, laws of each part, and the defects not to have."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compound import (
    LLM,
    Choice,
    Demos,
    Example,
    Executor,
    Float,
    Function,
    Input,
    Int,
    Retriever,
    System,
    Text,
    Trace,
)
from compound.components.index import PassageIndex
from compound.evaluation.evaluate import Evaluation, EvaluationRules, ScoredRun
from compound.execution.rng import generator
from compound.execution.trace import Call, Failure
from compound.ext import Completion, Job, Optimizer, Progress, Proposal, Request, Task
from compound.graph.configuration import canonical_json
from compound.metrics import custom, token_f1
from compound.optimization.method import JobContext, JobRecord
from compound.optimizers.baselines.random import RandomSearch
from compound.optimizers.scheduling import Uniform
from compound.optimizers.search.joint import JointSearch
from compound.optimizers.search.proposers import edits
from compound.optimizers.search.proposers.demos import (
    Correction,
    WeightedDemo,
    bootstrap,
    bootstrap_pools,
    correct_calls,
    draw_demos,
)
from compound.optimizers.search.proposers.edits import edit_prompt
from compound.optimizers.search.sources import CandidateSources
from compound.testing import PlainMemory, ScriptedLM

JOINT = JointSearch(CandidateSources())


def examples(n: int) -> list[Example]:
    return [Example(f"e{i}", {"question": f"q{i}"}, {"answer": f"a{i}"}) for i in range(n)]


@dataclass
class Simulated:
    """A scorer whose true scores are known: ``worth`` says the chance that a candidate is right.

    The same candidate on the same example always scores the same, as runs from the cache do. A run
    of the incumbent takes one system run, and that of a candidate ``price``, since the incumbent
    was run before.
    """

    worth: Any
    runs_left: float = math.inf
    has_free_repeats: bool = True
    price: float = 1.0
    written: Sequence[str] = ()
    asked: list[Request] = field(default_factory=list)
    asked_of: list[str | None] = field(default_factory=list)
    batches: list[list[str]] = field(default_factory=list)
    scored: list[dict[str, Any]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    known: set[tuple[str, str]] = field(default_factory=set)
    outcomes: list[str] = field(default_factory=list)
    spent: float = 0.0

    async def score(
        self,
        candidates: Sequence[Mapping[str, Any]],
        examples: Sequence[Example],
        *,
        record: bool = True,
    ) -> list[Evaluation]:
        self.batches.append([e.id for e in examples])
        self.scored += [dict(c) for c in candidates]
        return [self._evaluation(candidate, examples) for candidate in candidates]

    def _evaluation(self, candidate: Mapping[str, Any], examples: Sequence[Example]) -> Evaluation:
        text = canonical_json(candidate)
        rows, runs = [], 0.0
        for example in examples:
            right = generator("simulated", text, example.id).random() < self.worth(candidate)
            rows.append(ScoredRun(example.id, -1, float(right)))
            runs += self._pay(text, example)
        return Evaluation(text, tuple(rows), system_runs=runs)

    def _pay(self, text: str, example: Example) -> float:
        if (text, example.id) in self.known and self.has_free_repeats:
            return 0.0
        self.known.add((text, example.id))
        runs = self.price if text != "{}" and self.has_free_repeats else 1.0
        self.spent += runs
        self.runs_left = max(0.0, self.runs_left - runs)
        return runs

    def may_ask(self, lm: str | None = None) -> bool:
        return True

    def record_outcome(self, outcome: str, lm: str | None = None, reason: str = "") -> None:
        self.outcomes.append(outcome)

    def leaks(self, text: str, request: Any, lm: str | None = None) -> bool:
        return False

    async def traces(self, values: Mapping[str, Any], examples: Sequence[Example]) -> list[Trace]:
        self.shown += [e.id for e in examples]
        for example in examples:
            self._pay(canonical_json(values), example)
        return [trace(e, score=float(i % 3 != 0)) for i, e in enumerate(examples)]

    async def generate(self, request: Request, lm: str | None = None) -> Completion:
        self.asked.append(request)
        self.asked_of.append(lm)
        return Completion(self.written[(len(self.asked) - 1) % len(self.written)])


def trace(
    example: Example, score: float | None, *, failure: Failure | None = None, **call: Any
) -> Trace:
    made = Call(
        "answerer",
        "answerer",
        "answerer",
        (),
        **{"inputs": dict(example.inputs), "outputs": {"output": f"right {example.id}"}, **call},
    )
    return Trace(example.id, "digest", 0, 0, example.inputs, (made,), failure=failure, score=score)


QUESTION = Input("question", str)


def system(**settings: Any) -> System:
    given = {"prompt": Text("Answer the question."), "demos": Demos(max=3), "lm": "lm", **settings}
    return System("demo", outputs={"answer": LLM("answerer", **given)(question=QUESTION)})


def weigh(answer: str, a: float, k: int, mode: str) -> str:
    return answer


def numeric(**spaces: Any) -> System:
    given = {"a": Float(0, 1, value=0.5), "k": Int(1, 100), "mode": Choice("x", "y", "z"), **spaces}
    return System("demo", outputs={"answer": Function("weigh", weigh, **given)(answer=QUESTION)})


def task(target: System, scorer: Any, *, train: int = 120, **changes: Any) -> Task:
    given: dict[str, Any] = {
        "system": target,
        "keys": tuple(target.parameters),
        "train": examples(train),
        "scorer": scorer,
        "seed": 1,
        "pool_seed": 2,
        "minibatch": 8,
        "candidates": 8,
        "context": JobContext(
            Executor(),
            custom(lambda outputs, example: 0.0),
            EvaluationRules(),
            PlainMemory(Path("unused")),
        ),
        **changes,
    }
    return Task(**given)


def proposed(optimizer: Optimizer, assignment: Task) -> tuple[list[Progress], Proposal]:
    async def collect() -> list[Progress | Proposal]:
        return [event async for event in optimizer.propose(assignment)]

    *progress, last = asyncio.run(collect())
    assert isinstance(last, Proposal)
    assert all(isinstance(event, Progress) for event in progress)
    return [event for event in progress if isinstance(event, Progress)], last


def through_json(state: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(state))


class TestHalving:
    """Random search compares its candidates by sequential halving."""

    @staticmethod
    def sizes(scorer: Simulated, **changes: Any) -> list[int]:
        proposed(RandomSearch(), task(numeric(), scorer, **changes))
        return [len(batch) for batch in scorer.batches]

    def test_a_hopeless_candidate_is_not_measured_any_further(self) -> None:
        """It costs less than expected, so that the runs left would cover further examples."""
        hopeless, promising = (
            Simulated(lambda arm, own=own: own if arm else 1 - own, runs_left=100, price=0.0)
            for own in (0.1, 0.9)
        )
        few, many = (self.sizes(scorer, candidates=1) for scorer in (hopeless, promising))
        assert (few, many[:2]) == ([50], [50, 75])
        assert promising.runs_left < 10  # two runs for each of a twentieth of the examples

    def test_d3_scores_are_those_of_the_examples_of_the_last_round(self) -> None:
        scorer = Simulated(lambda arm: 0.7 if arm else 0.3, runs_left=144)
        _, last = proposed(RandomSearch(), task(numeric(), scorer))
        rows = [Example(name, {}) for name in scorer.batches[-1]]
        own, incumbent = asyncio.run(scorer.score([last.values, {}], rows))
        assert (last.after, last.before) == (own.mean, incumbent.mean)


OURS = [clause for clauses in edits.CLAUSES.values() for clause in clauses]
FILLED = [
    "Please answer.",
    "You should use the following passages.",
    "Make sure that you list all of the words.",
    "Write a very short answer.",
    "please",
    "Summarize as well as you can.",
    "Do it!",
    "Why?",
    "x",
]
PARTS = st.lists(st.sampled_from(OURS + FILLED), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**32)


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


class TestEdits:
    def test_shortening_breaks_no_sentence(self) -> None:
        kept = [
            "Do the following: sort.",
            "Write to please the reader.",
            "Add the tone you should use.",
            "List as well as you can.",
            "Choose all of the above.",
            "Rate it as very good, good or bad.",
            "You should not guess.",
            "Make sure you are right.",
            "x is a number.",
            "iPhone or Mac?",
        ]
        assert edits.shorten(kept, rng(0)) == kept
        assert edits.shorten(["Please sort in order to win.", "please stop."], rng(0)) == [
            "Sort to win.",
            "stop.",
        ]

    @pytest.mark.parametrize(
        ("output", "passages", "kinds", "never"),
        [
            (str, True, {"length", "format", "evidence", "care", "role"}, "option"),
            (str, False, {"length", "format", "care", "role"}, "passages"),
            (Literal["a", "b"], False, {"length", "format", "care", "role"}, "result"),
            (bool, False, {"care", "role"}, "option"),
            (list[str], False, {"care", "role"}, "result"),
        ],
    )
    def test_clauses_are_true_of_the_task(
        self, output: Any, passages: bool, kinds: set[str], never: str
    ) -> None:
        wires: dict[str, Any] = {"text": Input("text", str)}
        if passages:
            wires["context"] = Retriever("search", PassageIndex())(
                query=wires["text"], passages=Input("docs", list)
            )
        made = LLM("c", prompt=Text("Do it."), output=output)(**wires)
        found = edits.clauses_for(System("s", {"o": made}), "c.prompt")
        assert set(found) == kinds
        assert never not in " ".join(clause for clauses in found.values() for clause in clauses)

    @given(
        st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip) | PARTS.map(" ".join),
        SEEDS,
    )
    def test_an_edited_prompt_is_never_empty_and_the_same_for_the_same_seed(
        self, prompt: str, seed: int
    ) -> None:
        after = edit_prompt(prompt, rng(seed), 3)
        assert after.strip()
        assert after == edit_prompt(prompt, rng(seed), 3)


ANSWERER = LLM("answerer", prompt=Text("Answer."), demos=Demos(max=3))


class TestCorrected:
    """A right answer in too many words becomes a demonstration of the right one."""

    METRIC = token_f1("answer")

    def corrected(self, system: System, metric: Any, *scores: float) -> list[Correction]:
        rows = examples(len(scores))
        traces = [
            replace(trace(e, score), outputs={"answer": f"right {e.id}"})
            for e, score in zip(rows, scores, strict=True)
        ]
        return correct_calls(traces, system, metric, {e.id: e for e in rows})

    def of(self, gold: Any, system: System | None = None) -> list[Correction]:
        row = Example("e0", {"question": "q0"}, {"answer": gold})
        made = replace(trace(row, 0.5), outputs={"answer": "right e0"})
        return correct_calls([made], system or answering(), self.METRIC, {"e0": row})

    def test_what_scored_in_part_gets_the_right_answer_and_its_score(self) -> None:
        found = self.corrected(answering(), self.METRIC, 0.5, 0.0, 1.0)
        assert [score for score, _ in found] == [
            1.0
        ]  # one was wrong all over, one needs no correction
        assert found[0][1].outputs == {"output": "a0"}
        assert found[0][1].inputs == {"question": "q0"}
        (demo,) = bootstrap([], ANSWERER, found)
        assert (demo.demo["outputs"], demo.weight) == ({"output": "a0"}, 1.0)

    @pytest.mark.parametrize("metric", [custom(lambda o, e: 0.5), token_f1("other")])
    def test_a_metric_that_compares_no_output_with_an_answer_corrects_nothing(
        self, metric: Any
    ) -> None:
        assert self.corrected(answering(), metric, 0.5) == []

    def test_the_search_draws_from_them(self, job: Any) -> None:
        """All answers have two words too many."""
        lm = lambda: ScriptedLM(lambda message, rng: f"it is {asked(message)}")  # noqa: E731
        rows = [Example(f"e{i}", {"question": f"say a{i}"}, {"answer": f"a{i}"}) for i in range(20)]
        made = job(answering(), self.METRIC, rows, lm)
        pools = asyncio.run(bootstrap_pools(made.task, rows))
        shown = {found.demo["outputs"]["output"]: found.weight for found in pools["answerer.demos"]}
        assert shown["a3"] == 1.0
        assert shown["it is a3"] == pytest.approx(0.5**4)


def answering() -> System:
    return System("answering", outputs={"answer": ANSWERER(question=QUESTION)}, lm="lm")


def asked(message: str) -> str:
    return str(re.findall(r"say (a\d+)", message)[-1])


class TestDemos:
    def test_traces_that_score_become_demonstrations_weighed_by_their_scores(self) -> None:
        rows = examples(6)
        traces = [
            trace(e, score) for e, score in zip(rows, (1.0, 0.0, 0.6, 0.4, 0.5, None), strict=True)
        ]
        traces.append(
            trace(Example("broken", {"question": "q"}), 1.0, failure=Failure("error", "down"))
        )
        found = bootstrap(traces, ANSWERER)
        assert [f.demo["outputs"]["output"] for f in found] == [
            "right e0",
            "right e2",
            "right e4",
            "right e3",
        ]
        assert [f.weight for f in found] == pytest.approx([1.0, 0.1296, 0.0625, 0.0256])

    def test_demonstrations_show_inputs_and_no_settings(self) -> None:
        (example,) = examples(1)
        wired = trace(example, 1.0, inputs={"question": "q0", "temperature": 0.5})
        assert bootstrap([wired, trace(example, 1.0)], ANSWERER)[0].demo["inputs"] == {
            "question": "q0"
        }

    @given(st.integers(1, 10), st.integers(1, 6), SEEDS)
    def test_drawn_demonstrations_are_distinct_and_not_too_many(
        self, n: int, most: int, seed: int
    ) -> None:
        pool = [
            WeightedDemo({"inputs": {"q": i}, "outputs": {"a": i}}, 0.0 if i % 3 else 1.0)
            for i in range(n)
        ]
        drawn = draw_demos(pool, most, rng(seed))
        assert 1 <= len(drawn) <= min(n, most)
        assert len({canonical_json(d) for d in drawn}) == len(drawn)
        assert drawn == draw_demos(pool, most, rng(seed))

    @pytest.mark.slow
    @pytest.mark.parametrize("optimizer", [JOINT, RandomSearch()], ids=["joint", "random"])
    @pytest.mark.parametrize("left", [math.inf, 300, 60, 20])
    @pytest.mark.parametrize("train", [120, 20, 5, 2])
    def test_d12_examples_that_demonstrations_come_from_are_never_scored_on(
        self, optimizer: Optimizer, left: float, train: int
    ) -> None:
        seen: set[str] = set()
        scored: set[str] = set()
        for seed in range(4):  # several jobs of one run: what one showed, another must not score on
            scorer = Simulated(lambda _: 0.5, runs_left=left)
            proposed(optimizer, task(system(), scorer, train=train, seed=seed))
            seen |= set(scorer.shown)
            scored |= {name for batch in scorer.batches for name in batch}
        assert not seen & scored

    @pytest.mark.slow
    @pytest.mark.parametrize("left", [math.inf, 100])
    def test_d12_other_jobs_do_not_score_on_examples_the_system_shows(self, left: float) -> None:
        """The answers stand in the prompt: whatever copies them would win."""
        step = LLM("answerer", prompt=Text("Answer."), demos=Demos(max=3), lm="lm")(
            question=QUESTION
        )
        checked = LLM("checker", prompt=Text("Check."), lm="lm", temperature=Float(0, 1))(text=step)
        two = System("two", outputs={"answer": checked})
        shown: set[str] = set()
        scored: set[str] = set()
        jobs: list[tuple[Optimizer, tuple[str, ...]]] = [
            (JOINT, ("answerer.prompt", "answerer.demos")),
            (RandomSearch(), ("checker.prompt",)),
            (JOINT, ("checker.temperature",)),
        ]
        for seed, (optimizer, keys) in enumerate(jobs):
            scorer = Simulated(lambda _: 0.5, runs_left=left)
            proposed(optimizer, task(two, scorer, seed=seed, keys=keys))
            shown |= set(scorer.shown)
            scored |= {name for batch in scorer.batches for name in batch}
        assert shown
        assert not shown & scored


class TestLaws:
    def test_a_text_longer_than_allowed_is_not_proposed(self) -> None:
        tight = system(prompt=Text("Answer the question.", max_length=40), demos=())
        progress, _ = proposed(RandomSearch(), task(tight, Simulated(lambda _: 0.5)))
        assert progress[0].state["candidates"]
        for candidate in progress[0].state["candidates"]:
            tight.bind(candidate)

    @pytest.mark.slow
    @settings(max_examples=40)
    @given(
        st.integers(16, 400),
        st.integers(1, 12),
        st.integers(1, 12),
        st.integers(2, 150),
        st.booleans(),
    )
    def test_no_search_spends_more_than_its_share(
        self, left: int, minibatch: int, candidates: int, train: int, free: bool
    ) -> None:
        """A job gets two minibatches at least."""
        pairs: list[tuple[Optimizer, System]] = [
            (RandomSearch(), system(temperature=Float(0, 1))),
            (RandomSearch(), numeric()),
            (JOINT, system(temperature=Float(0, 1))),
            (JOINT, numeric(a=0.5, k=3)),
        ]
        for search, target in pairs:
            share = max(left, 2 * minibatch)
            scorer = Simulated(lambda _: 0.5, runs_left=share, has_free_repeats=free)
            assignment = task(
                target, scorer, minibatch=minibatch, candidates=candidates, train=train
            )
            proposed(search, assignment)
            assert scorer.spent <= share


@pytest.mark.slow
def test_d2_every_job_meets_fresh_examples() -> None:
    """The batches of two jobs differ, in their first rung already; the same job meets the same ones."""

    def first_batches(
        optimizer: Optimizer, target: System, seeds: Sequence[int]
    ) -> list[tuple[str, ...]]:
        batches = []
        for seed in seeds:
            scorer = Simulated(lambda _: 0.5)
            proposed(optimizer, task(target, scorer, seed=seed))
            batches.append(tuple(scorer.batches[0]))
        return batches

    for optimizer, target in ((JOINT, system()), (RandomSearch(), system())):
        fresh = first_batches(optimizer, target, range(10))
        assert len({frozenset(batch) for batch in fresh}) == 10
        assert first_batches(optimizer, target, range(3)) == fresh[:3]


JOBS = [Job("prompts", (f"c{i}.prompt",)) for i in range(4)] + [Job("numbers", ("n.k", "n.a"))]


def schedule(n: int, seed: int, jobs: Sequence[Job] = JOBS) -> list[Job]:
    history: list[JobRecord] = []
    chosen = []
    for _ in range(n):
        job = Uniform().choose(jobs, history, seed)
        chosen.append(job)
        history.append(recorded(job))
    return chosen


def recorded(job: Job) -> JobRecord:
    return JobRecord.from_json(
        through_json(JobRecord(job=0, optimizer=job.optimizer, keys=job.keys).to_json())
    )


def key(job: Job) -> tuple[str, tuple[str, ...]]:
    return job.optimizer, tuple(job.keys)


class TestUniform:
    @given(SEEDS, st.integers(1, 6))
    def test_every_job_comes_once_in_a_round(self, seed: int, rounds: int) -> None:
        chosen = [key(job) for job in schedule(rounds * len(JOBS), seed)]
        for i in range(rounds):
            one_round = chosen[i * len(JOBS) : (i + 1) * len(JOBS)]
            assert sorted(one_round) == sorted(map(key, JOBS))

    def test_d1_training_that_seeds_the_global_generator_changes_no_choice(self) -> None:
        """The reference seeded numpy in every iteration, and then chose one component for ever."""
        expected = [key(job) for job in schedule(20, seed=3)]
        history: list[JobRecord] = []
        chosen = []
        for _ in range(20):
            np.random.seed(42)
            job = Uniform().choose(JOBS, history, 3)
            chosen.append(key(job))
            history.append(recorded(job))
        assert chosen == expected
        assert len(set(chosen)) == len(JOBS)


def test_an_edit_leaves_the_other_lines_as_they_are() -> None:
    prompt = "Answer the question.\n\n  - Be brief.\n  - Use the passages.\n"
    for seed in range(60):
        after = edit_prompt(prompt, rng(seed), 1)
        lines, now = prompt.split("\n"), after.split("\n")
        assert len(now) == len(lines)
        changed = [i for i, (a, b) in enumerate(zip(lines, now, strict=True)) if a != b]
        assert len(changed) <= 1
        assert all(
            now[i].startswith(lines[i][: len(lines[i]) - len(lines[i].lstrip())]) for i in changed
        )
