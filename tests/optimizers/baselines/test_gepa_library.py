"""GEPA beside `gepa.optimize` with a plain adapter: the same runs, requests and candidates, for every setting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from gepa.api import optimize
from gepa.core.adapter import EvaluationBatch

from compound import Example, Function, Input, Score, System, Text
from compound.execution.rng import derive_seed
from compound.metrics import custom
from compound.optimizers.baselines import gepa as module
from compound.optimizers.baselines.gepa import GEPA, GEPASettings
from compound.optimizers.search.sources import split
from compound.testing import ScriptedLM

START = {"one.prompt": "Start one.", "two.prompt": "Start two."}
FIRST, SECOND = ("alpha", "beta"), ("gamma", "delta")
Log = list[tuple[dict[str, str], list[str]]]


def prepared(question: str, prompt: str) -> str:
    """The first step is good at a question for which the prompt has its word."""
    return f"{question} {FIRST[int(question.split()[1]) % 2] in prompt}"


def answered(notes: str, prompt: str) -> str:
    """Each step contributes one half of the score."""
    number, ready = notes.split()[1:]
    return f"{(ready == 'True') / 2 + (SECOND[int(number) // 2 % 2] in prompt) / 2}"


def two_steps() -> System:
    first = Function("one", prepared, prompt=Text(START["one.prompt"]))(
        question=Input("question", str)
    )
    second = Function("two", answered, prompt=Text(START["two.prompt"]))(notes=first)
    return System("two_steps", outputs={"answer": second}, lm="lm")


def scored(answer: str) -> float:
    """Return a score between 0.05 and 0.95."""
    return 0.05 + 0.9 * float(answer)


async def graded(outputs: Any, example: Example) -> Score:
    return Score(scored(outputs["answer"]), f"{example.id} was graded")


def rewritten(prompt: str) -> str:
    """Add a word to the current text, chosen by the text and by the examples shown."""
    text = prompt.split("```")[1].strip()
    words = FIRST if " one." in text else SECOND
    shown = sorted(set(re.findall(r"number (\d+)", prompt)))
    return f"Because.\n```\n{text} {(*words, 'omega')[crc32(f'{text}{shown}'.encode()) % 3]}\n```"


def script(message: str, rng: np.random.Generator) -> str:
    return rewritten(message)


def rows(n: int) -> list[Example]:
    return [Example(f"e{i}", {"question": f"number {i}"}) for i in range(n)]


class PlainAdapter:
    """An adapter as a user of the library writes it, with records in our form."""

    propose_new_texts = None

    def __init__(self) -> None:
        self.log: Log = []

    def evaluate(
        self, batch: Sequence[Example], candidate: dict[str, str], capture_traces: bool = False
    ) -> Any:
        self.log.append((dict(candidate), [example.id for example in batch]))
        answers = []
        for example in batch:
            notes = prepared(str(example.inputs["question"]), candidate["one.prompt"])
            answers.append((notes, answered(notes, candidate["two.prompt"])))
        found = [scored(answer) for _, answer in answers]
        runs = [(e, *answer, value) for e, answer, value in zip(batch, answers, found, strict=True)]
        return EvaluationBatch(answers, found, runs)

    def make_reflective_dataset(self, candidate: Any, evaluated: Any, keys: Sequence[str]) -> Any:
        return {key: [self.record(key, *run) for run in evaluated.trajectories] for key in keys}

    def record(
        self, key: str, example: Example, notes: str, answer: str, value: float
    ) -> dict[str, str]:
        question = example.inputs["question"]
        one = (f"read question: {question}", f"wrote output: {notes}")
        two = (f"read notes: {notes}", f"wrote output: {answer}")
        own, name, other = (one, "two", two) if key == "one.prompt" else (two, "one", one)
        return {
            "Inputs and outputs": "\n".join(f"It {line}" for line in own),
            "Other steps of the run": "\n".join(f"{name} {line}" for line in other),
            "Result of the whole system": f"answer: {answer}",
            "Score": f"{value:.3f} ({example.id} was graded)",
        }


def by_the_library(
    settings: GEPASettings, pareto: Sequence[Example], feedback: Sequence[Example], seed: int
) -> tuple[Any, Log, list[str]]:
    """Run the library as its documentation shows; return its result, the evaluations, and the prompts."""
    prompts: list[str] = []

    def reflect(prompt: str) -> str:
        prompts.append(prompt)
        return rewritten(prompt)

    adapter = PlainAdapter()
    result = optimize(
        seed_candidate=dict(START),
        trainset=list(feedback),
        valset=list(pareto),
        adapter=adapter,
        reflection_lm=reflect,
        candidate_selection_strategy=settings.selection,
        module_selector=settings.components,
        use_merge=settings.merges > 0,
        max_merge_invocations=settings.merges,
        reflection_minibatch_size=settings.batch,
        stop_callbacks=lambda state: state.i + 1 >= settings.iterations,
        logger=type("Silent", (), {"log": staticmethod(lambda message: None)})(),
        seed=seed,
    )
    return result, adapter.log, prompts


VARIANTS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "merging": {"merges": 5, "iterations": 40},
    "all texts at once": {"components": "all"},
    "the best": {"selection": "current_best"},
    "mostly the best": {"selection": "epsilon_greedy"},
    "top of the frontier": {"selection": "top_k_pareto"},
    "larger batches": {"batch": 5},
}


def recorded(assignment: Any) -> Log:
    log: Log = []
    original = assignment.scorer.traces

    async def traces(values: Mapping[str, str], examples: Sequence[Example]) -> Any:
        log.append(({**START, **values}, [example.id for example in examples]))
        return await original(values, examples)

    assignment.scorer.traces = traces
    return log


class TestLibrary:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_runs_requests_and_candidates_are_those_of_the_library(
        self, job: Any, variant: str
    ) -> None:
        settings = GEPASettings(**{"iterations": 10, "held_out": 12, **VARIANTS[variant]})
        assignment = job(two_steps(), custom(graded), rows(48), lambda: ScriptedLM(script))
        log = recorded(assignment)
        _, proposal = assignment.run(GEPA(settings))

        _, examples = split(assignment.task)
        seed = derive_seed(assignment.task.seed, "gepa")
        result, expected, prompts = by_the_library(settings, examples[:12], examples[12:], seed)
        assert log == expected
        assert [request.messages[0].content for request in assignment.lm.requests] == prompts
        assert assignment.spent == result.total_metric_calls
        best = {key: text for key, text in result.best_candidate.items() if text != START[key]}
        assert dict(proposal.values) == best != {}
        assert proposal.after == pytest.approx(max(result.val_aggregate_scores))

    def test_settings_have_the_defaults_of_the_library(self) -> None:
        import inspect

        defaults = {name: p.default for name, p in inspect.signature(optimize).parameters.items()}
        settings = GEPASettings()
        assert settings.selection == defaults["candidate_selection_strategy"]
        assert settings.components == defaults["module_selector"]
        assert (settings.merges > 0) == defaults["use_merge"]
        assert defaults["sampling_strategy"] is defaults["selection_strategy"] is None


class TestMerging:
    def test_a_start_without_a_right_answer_is_merged(self) -> None:
        """The library alone fails: it draws a common ancestor in proportion to the mean scores, here 0."""
        assert int(merged_run(lowest=True).split()[0]) > 3

    @pytest.mark.slow
    def test_merges_do_not_depend_on_the_hash_of_strings(self) -> None:
        """A job resumed in another process replays its answers, so its search must be the same."""
        program = (
            "import sys; sys.path[:0] = sys.argv[1:]\n"
            "from test_gepa_library import merged_run\nprint(merged_run())"
        )
        found = set()
        for seed in ("1", "2", "3"):
            run = subprocess.run(
                [sys.executable, "-c", program, os.path.dirname(__file__), *sys.path],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            )
            found.add(run.stdout)
        assert len(found) == 1
        assert int(found.pop().split()[0]) > 3


def merged_run(*, lowest: bool = False) -> str:
    """Return the evaluations of a search in which many texts of merged candidates are tied.

    The key ``t0`` is rewritten rarely, so that there is something to merge. ``lowest`` says whether the
    start has no right answer.
    """
    log: list[str] = []

    def ask(question: Any) -> Any:
        if isinstance(question, list):
            return [f"{item.text}+{len(log)}" for item in question]
        if isinstance(question, module.Proceed):
            return question.iterations < 80
        texts, examples = question.texts, question.examples
        log.append(f"{len(examples)} {sorted(texts.items())}")
        records = [{key: {"Score": "0"} for key in texts} for _ in examples]
        return rank(texts, examples), records

    def rank(texts: Any, examples: Any) -> list[float]:
        """Half of the Pareto set is right, always; of a minibatch, any part."""
        if lowest and set(texts.values()) == {"x"}:
            return [0.0] * len(examples)
        chance = [crc32(f"{sorted(texts.items())}{example}".encode()) for example in examples]
        middle = sorted(chance)[len(chance) // 2] if len(chance) == 20 else 2**31
        return [float(number >= middle) for number in chance]

    module.search(
        ask,
        start={f"t{i}": "x" for i in range(5)},
        feedback=list(range(10)),  # type: ignore[arg-type]
        pareto=list(range(20)),  # type: ignore[arg-type]
        settings=GEPASettings(merges=50),
        lowest=0.0,
        perfect=1.0,
        seed=3,
    )
    merged = sum(row.startswith("5 ") for row in log)
    return f"{merged} merged: {log}"


class TestBudget:
    @pytest.mark.parametrize("share", [90, 200])
    @pytest.mark.parametrize("variant", ["default", "merging"])
    def test_it_resumes_from_every_iteration_within_its_share(
        self, job: Any, variant: str, share: int
    ) -> None:
        settings = GEPASettings(**{"iterations": 12, **VARIANTS[variant]})
        assignment = job(two_steps(), custom(graded), rows(48), lambda: ScriptedLM(script), share)
        checkpoints = assignment.check_resume(lambda: GEPA(settings))
        assert len(checkpoints) > 1
        assert assignment.spent <= share

    @pytest.mark.parametrize(
        ("settings", "runs", "texts", "expected"),
        [
            ({}, 44, 2, 30),
            ({}, float("inf"), 2, 100),
            ({"components": "all"}, 44, 2, 60),
            ({"batch": 5}, 44, 1, 18),
        ],
    )
    def test_reflections_are_declared(
        self, settings: dict[str, Any], runs: float, texts: int, expected: int
    ) -> None:
        assert GEPA(GEPASettings(**settings)).most_reflections(runs, texts) == expected
