"""Dry runs: counts that no method exceeds, what they do not know, and a pilot within its limit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compound import LLM, Choice, Dataset, Demos, Input, Retriever, System, Text
from compound.api.estimate import estimate
from compound.api.optimize import run_optimization
from compound.components import BM25
from compound.core.errors import BudgetExhausted, RunDirectoryError
from compound.ext import (
    Job,
    JobPlan,
    Message,
    Method,
    PlannedJob,
    Progress,
    Proposal,
    Request,
    Task,
)
from compound.metrics import exact_match
from compound.optimization.method import RequestCount
from compound.optimization.settings.optimize import OptimizeSettings, make_settings
from compound.optimizers.methods import METHODS
from compound.optimizers.scheduling import Uniform
from compound.report import forecast
from compound.testing import ScriptedLM
from compound.yaml import Program
from optimas_settings import proposals

pytestmark = pytest.mark.usefixtures("without_reports")

WEIGHTS = [
    "ppo",
    "mappo",
    "mmgrpo",
    "mhgpo_is",
    "mhgpo_fof",
    "mhgpo_rr",
    "prompt_r1",
    "mygo",
    "distill",
]
PRICE = 0.001
ALL = ("demos", "edits", "opro")
SUMMARIES = ("have in common", "Condense them", "Describe the ")
MARKS = (
    "Is the step",
    "Write it between",
    "write a new instruction",
    "What is wrong with",
    *SUMMARIES,
)


def reply(message: str, rng: np.random.Generator) -> str:
    """Answer at length whatever is asked."""
    filler = " ".join(f"w{rng.integers(1000)}" for _ in range(60))
    if "Is the step" in message:
        return f"{filler} [final answer: {'Yes' if rng.random() < 0.5 else 'No'}]"
    if "Write it between <prompt>" in message:
        return f"<prompt>Answer {filler}.</prompt>"
    if "write a new instruction for the assistant" in message:
        return f"```\nAnswer {filler}.\n```"
    if any(mark in message for mark in (*SUMMARIES, "What is wrong with")):
        return filler
    return "right" if rng.random() < 0.4 else filler


def two() -> System:
    question = Input("question", str)
    notes = LLM("noter", prompt=Text("Take notes."), max_tokens=12, temperature=0.5)(
        question=question
    )
    answer = LLM(
        "answerer",
        prompt=Text("Answer."),
        demos=Demos(max=2),
        max_tokens=9,
        temperature=0.5,
        lm=Choice("lm", "other"),
    )(notes=notes, question=question)
    return System("two", outputs={"answer": answer}, lm="lm")


def one() -> System:
    answer = LLM("answerer", prompt=Text("Answer."))(question=Input("question"))
    return System("one", {"answer": answer}, lm="lm")


def data(train: int = 24, valid: int = 10, test: int = 5) -> Dataset:
    def rows(n: int, name: str) -> list[dict[str, Any]]:
        return [
            {"id": f"{name}{i}", "question": f"{name} number {i}?", "answer": "right"}
            for i in range(n)
        ]

    return Dataset.of(train=rows(train, "t"), valid=rows(valid, "v"), test=rows(test, "x"))


LEARNED = {
    "backbone": {"model": "none"},
    "pairs": {"inputs": 6, "samples": 2, "min_rollouts": 1, "max_rollouts": 1, "level": 1},
}


def program(method: str, lm: ScriptedLM, what: System | None = None, **settings: Any) -> Program:
    values = {
        "valid_size": 10,
        "minibatch": 3,
        "candidates": 3,
        "iterations": 2,
        "budget": {"system_runs": 90},
        **proposals(*ALL),
        "max_failed": 1.0,
        "optimas": LEARNED,
        "hbc": LEARNED,
        "better_together": {"stages": ["mipro", "gepa"]},
    }
    return Program(
        path=Path("system.yaml"),
        text="",
        find_engine={"lm": lm, "other": lm}.__getitem__,
        system=what or two(),
        data=data(),
        metric=exact_match("answer"),
        optimize=make_settings({**values, "method": method, **settings}),
    )


def run(given: Program, folder: Path) -> Any:
    assert given.data is not None
    assert given.metric is not None
    return run_optimization(
        given.system,
        given.data,
        given.metric,
        given.optimize,
        run_dir=folder / "run",
        engines=given.find_engine,
        folder=given.folder,
    )


class TestCounts:
    @pytest.mark.slow
    @pytest.mark.parametrize("method", sorted(set(METHODS) - set(WEIGHTS)))
    def test_no_method_takes_more_than_the_dry_run_says(self, method: str, tmp_path: Path) -> None:
        lm = ScriptedLM(reply, price=PRICE)
        given = program(method, lm)
        found = estimate(given)
        assert not lm.requests
        spent = run(given, tmp_path).to_json()
        assert 0 < spent["calls"] <= found["model_calls"]
        runs = found["system_runs"]
        assert spent["system_runs"] <= runs["search"]
        assert spent["system_runs"] + spent["test_runs"] <= runs["total"]
        sent = [r for r in lm.requests if any(mark in r.messages[-1].content for mark in MARKS)]
        assert len(sent) <= sum(row["at_most"] for row in found["requests"])

    def test_a_single_call_per_run_counts_as_the_runs(self) -> None:
        """90 system runs of the search, and 2 x 5 of the test."""
        assert estimate(program("random", ScriptedLM(reply), one()))["model_calls"] == 90 + 10

    def test_the_text_explains_more_calls_of_models_than_whole_runs_make(
        self, tmp_path: Path
    ) -> None:
        """100 system runs may be 200 whose retrieval is cached, which count half each."""
        corpus = tmp_path / "corpus.jsonl"
        corpus.write_text('{"id": "1", "title": "Lima", "text": "Lima lies at the sea."}')
        question = Input("question", str)
        found = Retriever("searcher", index=BM25(corpus), k=1)(query=question)
        answer = LLM("answerer", prompt=Text("Answer."))(question=question, passages=found)
        texts = [
            forecast({"run": "runs/x", **estimate(program("random", ScriptedLM(reply), system))})
            for system in (one(), System("x", {"answer": answer}, lm="lm"))
        ]
        assert "calls of models in all: at most 100\n" in texts[0]
        assert "calls of models in all: at most 200, if the other calls" in texts[1]

    def test_without_a_limit_of_runs_no_total_is_stated(self) -> None:
        found = estimate(program("random", ScriptedLM(reply), one(), budget={"tokens": 5000}))
        assert found["system_runs"] == {"search": None, "test": 10, "total": None}
        assert found["model_calls"] is None

    def test_the_text_states_what_is_not_known_and_how_to_find_out(self) -> None:
        given = program(
            "gepa", ScriptedLM(reply, price=PRICE), budget={"system_runs": 90, "cost": 2}
        )
        text = forecast({"run": "runs/two", **estimate(given)})
        assert "two: dry run, no requests are sent" in text
        assert "gepa: reflections" in text
        assert "answerer                 1       lm, other" in text
        assert "not known: tokens, dollars and minutes; --pilot 3 measures them" in text
        assert (
            "budget.system_runs: 90 (maximum number of system runs on train and validation examples"
            in text
        )


class Careless:
    """An optimizer of somebody else's, which asks a model again and again."""

    asked = 0

    async def propose(self, task: Task) -> Any:
        request = Request((Message("user", "Guess."),), max_tokens=5)
        for number in range(40):
            if not task.scorer.may_ask():
                break
            await task.scorer.generate(Request(request.messages, 5, seed=number))
            type(self).asked += 1
            yield Progress({"done": number})
        yield Proposal({})


class Careful(Careless):
    """The same with a plan, which it would exceed if it could."""

    asked = 0

    def plan(self, job: PlannedJob) -> JobPlan:
        return JobPlan([RequestCount("guesses", 7)])


def careless(system: System, settings: OptimizeSettings) -> Method:
    return Method("careless", {"own": Careless()}, [Job("own", ("answerer.prompt",))], Uniform())


def careful(system: System, settings: OptimizeSettings) -> Method:
    return Method("careful", {"own": Careful()}, [Job("own", ("answerer.prompt",))], Uniform())


class TestOptimizersOfOthers:
    def test_one_that_states_no_requests_has_no_limit(self) -> None:
        found = estimate(program(f"{__name__}:careless", ScriptedLM(reply)))
        assert [row["at_most"] for row in found["requests"]] == [None]
        assert found["model_calls"] is None
        text = forecast({"run": "runs/two", **found})
        assert "own: requests                 no limit  lm" in text

    def test_one_is_held_to_the_requests_that_it_states(self, tmp_path: Path) -> None:
        given = program(f"{__name__}:careful", ScriptedLM(reply))
        (row,) = estimate(given)["requests"]
        assert (row["what"], row["at_most"]) == ("own: guesses", 14)  # of two rounds
        run(given, tmp_path)
        assert Careful.asked == 14


class TestPilot:
    def test_the_range_covers_the_run_that_follows(self, tmp_path: Path) -> None:
        lm = ScriptedLM(reply, price=PRICE)
        given = program("random", lm)
        found = estimate(given, pilot=3, run_dir=tmp_path / "run")
        pilot = found["pilot"]
        assert (pilot["examples"], pilot["runs"], pilot["spent"]["system_runs"]) == (3, 3, 3)
        assert pilot["limit"] == {"system_runs": 3}
        assert len(lm.requests) == 6
        assert found["not_known"] == []
        tokens = pilot["per_run"]["tokens"]
        assert tokens["lowest"] <= tokens["mean"] <= tokens["highest"]
        spent = run(given, tmp_path).to_json()
        assert 0 < spent["tokens"] <= pilot["total"]["tokens"]["to"]
        assert 0 < spent["cost"] <= pilot["total"]["dollars"]["to"]

    def test_the_run_uses_its_calls_and_charges_them(self, tmp_path: Path) -> None:
        """The run equals one without a pilot, but sends as many requests less as the pilot sent."""
        results, sent = [], []
        for pilot in (0, 3):
            lm = ScriptedLM(reply, price=PRICE)
            given = program("random", lm)
            folder = tmp_path / str(pilot)
            estimate(given, pilot=pilot, run_dir=folder / "run")
            before = len(lm.requests)
            found = run(given, folder).to_json()
            results.append({k: found[k] for k in ("calls", "tokens", "cost", "before", "after")})
            sent.append(len(lm.requests) - before)
        assert results[0] == results[1]
        assert sent == [results[0]["calls"], results[0]["calls"] - 6]

    def test_it_spends_at_most_a_tenth_of_every_limit(self, tmp_path: Path) -> None:
        lm = ScriptedLM(reply, price=PRICE)
        given = program("random", lm, budget={"system_runs": 90, "cost": 2.0})
        pilot = estimate(given, pilot=10, run_dir=tmp_path / "run")["pilot"]
        assert pilot["limit"] == {"system_runs": 10, "cost": 0.2}
        assert 0 < pilot["runs"] < 10
        assert pilot["spent"]["cost"] <= 0.2
        assert pilot["total"]["dollars"]["to"] <= 2.0

    def test_a_limit_of_which_a_tenth_holds_no_run_is_named(self, tmp_path: Path) -> None:
        given = program("random", ScriptedLM(reply), budget={"system_runs": 90, "tokens": 100})
        told = r"above the limit of 10 \(100 in total; a pilot spends at most 10%\)"
        with pytest.raises(BudgetExhausted, match=told):
            estimate(given, pilot=10, run_dir=tmp_path / "run")

    @pytest.mark.parametrize("planted", ["link", "file", "folder"])
    def test_what_is_no_cache_in_its_folder_is_refused(self, tmp_path: Path, planted: str) -> None:
        """Regression test: the run directory then stayed locked in this process."""
        lm = ScriptedLM(reply)
        given, folder = program("random", lm), tmp_path / "run" / "pilot"
        folder.mkdir(parents=True)
        place = folder / "cache.sqlite"
        if planted == "link":
            place.symlink_to(tmp_path / "elsewhere")
        elif planted == "file":
            place.write_text("not a database")
        else:
            place.mkdir()
        for attempt in (
            lambda: estimate(given, pilot=1, run_dir=folder.parent),
            lambda: run(given, tmp_path),
        ):
            with pytest.raises(RunDirectoryError, match=r"pilot/cache\.sqlite is"):
                attempt()
        assert not (tmp_path / "elsewhere").exists()
        assert not lm.requests
        shutil.rmtree(folder)
        assert run(given, tmp_path).to_json()["calls"]

    def test_unknown_prices_and_numbers_are_told(self, tmp_path: Path) -> None:
        lm = ScriptedLM(reply, priced=False)
        given = program("random", lm, one(), budget={"tokens": 50_000})
        found = estimate(given, pilot=2, run_dir=tmp_path / "run")
        pilot = found["pilot"]
        assert pilot["per_run"]["dollars"] is None
        assert "dollars" not in pilot["total"]
        assert pilot["total"]["tokens"] == {"from": 50_000, "to": 50_000}
        assert pilot["total"]["minutes"]["to"] is None
        text = forecast({"run": "runs/one", **json.loads(json.dumps(found))})
        assert "only the requests of the pilot are sent" in text
        assert "not known: dollars: a model has no known price" in text
        assert "not known: the number of system runs: optimize.budget.system_runs" in text
        assert (
            "extrapolated: system runs: all that are planned; from the least to the most expensive"
            in text
        )
        assert "limits: system_runs 2, tokens 5000" in text

    @pytest.mark.slow
    def test_failed_runs_are_a_warning(self, tmp_path: Path) -> None:
        lm = ScriptedLM([ConnectionError("no route")] * 50)
        found = estimate(program("random", lm, one()), pilot=1, run_dir=tmp_path / "run")
        assert found["pilot"]["failures"]
        assert "a run of the pilot failed" in forecast({"run": "runs/one", **found})
