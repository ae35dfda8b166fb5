"""Joint search: the model of gains, the design of candidates, and what a job finds within its runs."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks.simulated.systems import Simulated, world
from compound import (
    LLM,
    Choice,
    Demos,
    Example,
    Float,
    Function,
    Input,
    Int,
    System,
    Text,
    optimize,
)
from compound.ext import Progress, Proposal, Task
from compound.graph.configuration import canonical_json
from compound.graph.space import Space
from compound.metrics import custom, exact_match, rubric
from compound.optimizers.baselines.random import RandomSearch
from compound.optimizers.search import free
from compound.optimizers.search.candidates import balanced_design, free_keys
from compound.optimizers.search.gain_model import GainModel, Observation, similarities
from compound.optimizers.search.joint import JointSearch
from compound.optimizers.search.sources import CandidateSources
from compound.testing import ScriptedLM

SPACES: dict[str, Space] = {"a.x": Choice(0, 1, 2), "b.y": Choice(0, 1, 2)}
START = {"a.x": 0, "b.y": 0}
SEARCH = JointSearch(CandidateSources(()))


def model(*observations: Observation) -> GainModel:
    return GainModel(SPACES, START, observations, score_variance=0.25)


def seen(x: int, y: int, gain: float, n: int = 20) -> Observation:
    return Observation({"a.x": x, "b.y": y}, gain, 0.25 * (n - 1), tuple(range(n)))


class Capture:
    task: Task

    async def propose(self, task: Task) -> AsyncIterator[Progress | Proposal]:
        self.task = task
        yield Proposal({})


def task_of(assignment: Any) -> Task:
    capture = Capture()
    assignment.run(capture)
    return capture.task


def simulated_job(job: Any, made: Simulated, share: float, seed: int = 0, **changes: Any) -> Any:
    keys = tuple(f"{name}.option" for name in made.names)
    rows = made.examples(100)
    return job(made.system(), made, rows, keys=keys, share=share, seed=seed, minibatch=8, **changes)


class TestGainModel:
    def test_the_incumbent_gains_nothing(self) -> None:
        mean, covariance = model(seen(1, 1, 0.4), seen(2, 0, -0.1)).predict([START])
        assert mean == pytest.approx([0.0], abs=1e-12)
        assert covariance == pytest.approx(np.zeros((1, 1)), abs=1e-12)

    def test_one_observation_by_hand(self) -> None:
        """Noise of two scores of variance 1/4, prior weight 2: (19/4 + 2 · 1/2) / (19 + 2) per example.

        The gain of one changed value has the prior variance 2 · 1/2 times the share of single
        values (each parameter is half of the sum), and 2 · (1 − 1/e) times the rest. The posterior
        mean is the observed gain times prior / (prior + noise / n).
        """
        found = model(seen(1, 0, 0.4))
        noise = (0.25 * 19 + 2 * 0.5) / 21
        assert found.noise == pytest.approx(noise)
        ratios = []
        for amplitude in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0):
            for single in (0.9, 0.5):
                prior = amplitude * noise * (single * 2 * 0.5 + (1 - single) * 2 * (1 - np.exp(-1)))
                ratios.append((prior, prior + noise / 20))
        # the likelihood of 0.4 under a normal distribution with the total variance
        prior, total = max(ratios, key=lambda row: -0.5 * 0.4**2 / row[1] - 0.5 * np.log(row[1]))
        assert found.means([{"a.x": 1, "b.y": 0}]) == pytest.approx([0.4 * prior / total], rel=1e-6)

    def test_two_good_values_are_expected_to_be_better_together(self) -> None:
        """The combination was never run."""
        found = model(seen(1, 0, 0.3), seen(0, 1, 0.3), seen(2, 0, -0.2), seen(0, 2, -0.2))
        single, both, bad = found.means(
            [{"a.x": 1, "b.y": 0}, {"a.x": 1, "b.y": 1}, {"a.x": 2, "b.y": 2}]
        )
        assert bad < 0 < single < both


@pytest.mark.parametrize(
    ("space", "one", "other", "expected"),
    [
        (Choice("a", "b"), "a", "b", 0.0),
        (Int(0, 8), 0, 2, float(np.exp(-0.5))),
        (Float(0.01, 1.0, log=True), 0.01, 0.1, float(np.exp(-2.0))),
        (Text("Ask."), "Ask. Be kind.", "Be kind. Stop.", 1 / 3),
        (Demos(max=2), (), ({"inputs": {}, "outputs": {}},), 0.0),
        (
            Demos(max=2),
            ({"inputs": {}, "outputs": {}},),
            ({"inputs": {}, "outputs": {"a": 1}},),
            0.5,
        ),
        (Float(0.5, 0.5), 0.5, 0.5, 1.0),
    ],
)
def test_similarity(space: Space, one: object, other: object, expected: float) -> None:
    assert similarities(space, [one, other]) == pytest.approx(
        np.array([[1.0, expected], [expected, 1.0]])
    )


class TestDesign:
    def test_the_options_of_a_parameter_occur_equally_often(self, job: Any) -> None:
        made = world("chain", 0, options=4)
        task = task_of(simulated_job(job, made, 400, candidates=8))
        design = balanced_design(task, {key: [1, 2, 3] for key in task.keys}, 8, 0.5)
        assert len(design) == 8
        for key in task.keys:
            assert sorted(Counter(values[key] for values in design).values()) in (
                [2, 2, 2, 2],
                [1, 2, 2, 3],
            )


class TestJobs:
    @pytest.mark.slow
    def test_a_joint_search_beats_a_random_one_at_equal_runs(self, job: Any) -> None:
        """Shares of the optimum of five components with 16 options."""
        reached: dict[str, list[float]] = {"joint": [], "random": []}
        for seed in range(6):
            made = world("five", seed)
            for name, optimizer in (("joint", SEARCH), ("random", RandomSearch())):
                assignment = simulated_job(job, made, 200, seed)
                _, proposal = assignment.run(optimizer)
                assert assignment.spent <= 200 + 1e-6
                reached[name].append(value(made, proposal))
        assert np.mean(reached["joint"]) > np.mean(reached["random"]) + 0.03

    @pytest.mark.parametrize("share", [20, 60, 200])
    def test_the_share_is_spent(self, job: Any, share: float) -> None:
        assignment = simulated_job(job, world("chain", 1), share)
        assignment.run(SEARCH)
        assert 0.8 * share <= assignment.spent <= share + 1e-6

    def test_no_candidate_is_proposed_if_none_can_gain(self, job: Any) -> None:
        """All options are equal: what is proposed is noise, whose expected gain stays near zero."""
        made = world("chain", 0, spread=(0.0, 0.0, 0.0))
        gains = []
        for seed in range(6):
            _, proposal = simulated_job(job, made, 200, seed).run(SEARCH)
            gains.append((proposal.after or 0.0) - (proposal.before or 0.0))
        assert np.mean(gains) < 0.1


def value(made: Simulated, proposal: Proposal) -> float:
    """Return the expected score of a proposal, as a share of the optimum's."""
    options = {key.partition(".")[0]: option for key, option in proposal.values.items()}
    return made.value({**dict.fromkeys(made.names, 0), **options}) / made.optimum()[1]


class TestWrittenPrompts:
    """Prompts that a model writes, among the texts of a joint search."""

    @staticmethod
    def requests(method: str, path: Path, search: Mapping[str, Any], **engine: Any) -> list[str]:
        """Return the requests for prompts of a run, by a scripted engine with these settings."""
        rows = [{"question": f"What is {i}?", "answer": f"It is {i}."} for i in range(60)]
        node = LLM("answerer", prompt=Text("Answer."))(question=Input("question"))
        lm, reply = (
            "lm",
            (lambda message: "<prompt>Be brief.</prompt>" if "<prompt>" in message else "7"),
        )
        model = ScriptedLM(reply, **engine)
        settings: Mapping[str, Any] = search
        if method == "optimas":
            settings = {**search, "backbone": {"model": "none"}}
        optimize(
            System("qa", {"answer": node}, lm=lm),
            {"train": rows[:40], "valid": rows[40:]},
            "exact_match",
            method=method,
            budget=80,
            valid_size=20,
            run_dir=path,
            engines={lm: model, "writer": model},
            progress=False,
            **{method: settings},  # type: ignore[arg-type]
        )
        asked = [request.messages[-1].text for request in model.requests]
        return [
            text
            for text in asked
            if re.search("Instructions tried so far|Its current instruction", text)
        ]

    @pytest.mark.parametrize(
        ("writes", "search", "expected"),
        [
            (True, {}, True),
            (False, {}, False),
            (False, {"lm": "writer"}, True),
            (False, {"writer": True}, True),
            (True, {"writer": False}, False),
            (True, {"sources": ["edits"]}, False),
            (False, {"sources": ["reflect"]}, True),
        ],
    )
    def test_engines_that_write_prompts_are_asked_by_default(
        self, writes: bool, search: dict[str, Any], expected: bool, tmp_path: Path
    ) -> None:
        asked = self.requests("search", tmp_path / "run", search, writes_prompts=writes)
        assert bool(asked) == expected


@pytest.mark.parametrize("seed", range(3))
def test_an_edit_without_effect_is_not_proposed(job: Any, seed: int) -> None:
    """Only the number matters; the texts of the best candidate were edited all the same."""
    prompt = Text("Answer the question. Think of the reader.")
    node = LLM("answerer", prompt=prompt, max_tokens=Choice(1, 2, 3))(
        question=Input("question", str)
    )
    rows = [Example(f"e{i}", {"question": f"what is {i}"}) for i in range(40)]
    longer = custom(
        lambda outputs, example: len(outputs["answer"].split()) / 3, "longer", bounds=(0, 1)
    )
    made = job(
        System("qa", {"answer": node}, lm="lm"),
        longer,
        rows,
        lambda: ScriptedLM(lambda _: "a b c"),
        share=80,
        seed=seed,
    )
    states, proposal = made.run(JointSearch(CandidateSources(("edits",))))
    assert proposal.values == {"answerer.max_tokens": 3}
    edited = [c["values"]["answerer.prompt"] for c in states[-1]["candidates"] if c["rows"]]
    assert any(text != prompt.value for text in edited)


class TestFreeParameters:
    """Numbers that no model call depends on: their values cost no runs."""

    BEST: ClassVar = {"a": 0.8, "b": 0.3, "c": 0.6, "d": 0.1}

    def system(self) -> System:
        def weigh(answer: str, a: float, b: float, c: float, d: float) -> float:
            pairs = zip((a, b, c, d), self.BEST.values(), strict=True)
            distance = max(abs(number - best) for number, best in pairs)
            return (1 - distance) ** 2 * len(answer) / 16

        node = LLM("answerer", prompt=Text("Answer the question."))(question=Input("question", str))
        numbers: Any = {
            name: Float(0.0, 1.0, value=round(1 - x, 1)) for name, x in self.BEST.items()
        }
        return System("weighed", {"y": Function("weigh", weigh, **numbers)(answer=node)}, lm="lm")

    def job(self, job: Any, system: System, **options: Any) -> Any:
        score = custom(lambda outputs, example: outputs["y"], "score", bounds=(0, 1))
        rows = [Example(f"e{i}", {"question": f"what is {i}"}) for i in range(60)]
        answers = ScriptedLM(
            lambda text: "x" * (1 + len(text) % 7 + int(re.findall(r"\d", text)[-1]))
        )
        return job(system, score, rows, lambda: answers, **options)

    def test_they_are_tuned_beside_the_prompt_at_no_run(self, job: Any) -> None:
        """Without their variants, the mean distance is 0.08."""
        distances = []
        for seed in range(3):
            made = self.job(job, self.system(), share=40, seed=seed)
            states, proposal = made.run(JointSearch(CandidateSources(("edits",))))
            assert made.spent <= 40
            assert 0 < states[-1]["compared"] < 6 * states[-1]["paid"]
            recorded = {canonical_json(each.values) for each in made.scorer.snapshot()}
            candidates = [each["values"] for each in states[-1]["candidates"] if each["rows"]]
            assert recorded >= set(map(canonical_json, candidates))
            found = [abs(proposal.values[f"weigh.{name}"] - x) for name, x in self.BEST.items()]
            distances.append(max(found))
        assert np.mean(distances) < 0.05

    def test_a_small_region_of_good_values_is_found(self, job: Any) -> None:
        """It is 0.75 % of the space; values chosen by the model of gains alone find it with one of these seeds."""

        def is_good(a: float, b: float, c: float) -> bool:
            return a < 0.15 and b > 0.5 and c < 0.1

        def weigh(answer: str, a: float, b: float, c: float) -> str:
            return "yes" if is_good(a, b, c) and len(answer) > 2 else "no"

        node = LLM("answerer", prompt=Text("Answer the question."))(question=Input("question", str))
        numbers: Any = {"a": 1.0, "b": 0.1, "c": 0.5}
        spaces: Any = {name: Float(0.0, 1.0, value=x) for name, x in numbers.items()}
        system = System("sharp", {"y": Function("weigh", weigh, **spaces)(answer=node)}, lm="lm")
        rows = [Example(f"e{i}", {"question": f"what is {i}"}, {"y": "yes"}) for i in range(60)]
        found = 0
        for seed in range(2):
            answers = ScriptedLM(lambda text: "x" * (1 + len(text) % 7))
            made = job(system, exact_match("y"), rows, lambda a=answers: a, share=48, seed=seed)
            _, proposal = made.run(JointSearch(CandidateSources(("edits",))))
            values = {k.partition(".")[2]: x for k, x in proposal.values.items()}
            found += is_good(**{name: values.get(name, x) for name, x in numbers.items()})
        assert found == 2

    def test_parameters_of_slow_functions_are_not_free(
        self, job: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(free, "SLOWEST", 0.0)
        made = self.job(job, self.system(), share=16)
        states, _ = made.run(JointSearch(CandidateSources(("edits",))))
        assert states[-1]["free"] == []
        assert states[-1]["compared"] == 0

    def test_a_search_resumes_within_them(self, job: Any) -> None:
        made = self.job(job, self.system(), share=16)
        made.check_resume(lambda: JointSearch(CandidateSources(("edits",))))

    def test_where_a_call_fails_its_variants_fail(self, job: Any) -> None:
        """Otherwise, a prompt that often fails would seem better with other numbers."""

        def weigh(answer: str, a: float) -> float:
            if len(answer) % 2:
                raise ValueError(answer)
            return 1 - abs(a - 0.8)

        node = LLM("answerer", prompt=Text("Answer the question."))(question=Input("question", str))
        weighed = Function("weigh", weigh, a=Float(0.0, 1.0, value=0.1))(answer=node)
        made = self.job(job, System("failing", {"y": weighed}, lm="lm"), share=40, minibatch=8)
        states, _ = made.run(JointSearch(CandidateSources(("edits",))))
        groups = defaultdict(list)
        for each in states[-1]["candidates"]:
            groups[each["values"]["answerer.prompt"]].append(each)
        pairs = [pair for group in groups.values() for pair in itertools.combinations(group, 2)]
        failing = [(one, other) for one, other in pairs if one["failed"] and other["failed"]]
        assert failing
        for one, other in pairs:
            assert {*one["failed"]} & {*other["rows"]} == {*other["failed"]} & {*one["rows"]}

    def test_a_threshold_of_a_later_call_is_not_free(self, job: Any) -> None:
        """Its values may let calls run that no run has made yet."""

        def doubt(answer: str, least: float) -> bool:
            return len(answer) < 100 * least

        node = LLM("answerer", prompt="Answer.")(question=Input("question", str))
        doubts = Function("doubt", doubt, least=Float(0.0, 1.0, value=0.0))(answer=node)
        again = LLM("again", prompt="Answer well.")(question=node, when=doubts)
        system = System("escalating", {"y": node, "again": again}, lm="lm")
        assert free_keys(self.job(job, system).task) == []
        assert free_keys(self.job(job, self.system()).task) == [
            f"weigh.{name}" for name in self.BEST
        ]

    def test_a_metric_that_asks_a_model_makes_nothing_free(self, job: Any) -> None:
        judge = rubric("y", "lm", {"correct": "The answer is true."})
        rows = [Example(f"e{i}", {"question": "what"}) for i in range(4)]
        assert free_keys(job(self.system(), judge, rows).task) == []


def test_configurations_with_the_same_calls_share_most_of_their_noise() -> None:
    """By hand: 4 rows, noise 1; the configurations have equal calls, which are not the incumbent's."""
    space = {"a.x": Choice(0, 1), "b.y": Float(0.0, 1.0)}
    seen = [Observation({"a.x": 1, "b.y": y}, 0.0, 3.0, (0, 1, 2, 3)) for y in (0.2, 0.4)]
    start = {"a.x": 0, "b.y": 0.0}
    fitted = GainModel(space, start, seen, score_variance=0.5, free=["b.y"])
    expected = [[0.25, 0.125 * 1.8], [0.125 * 1.8, 0.25]]
    assert fitted._noise_covariance(seen) == pytest.approx(np.array(expected) * fitted.noise)
    own = [Observation({"a.x": 0, "b.y": y}, 0.0, 0.6, (0, 1, 2, 3)) for y in (0.2, 0.4)]
    fitted = GainModel(space, start, own, score_variance=0.5, free=["b.y"])
    expected = [[0.25 * 0.2, 0.125 * 0.2], [0.125 * 0.2, 0.25 * 0.2]]
    assert fitted._noise_covariance(own) == pytest.approx(np.array(expected) * fitted.noise)
    assert fitted.noise == pytest.approx(1.0)
