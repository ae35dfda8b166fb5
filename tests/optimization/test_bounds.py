"""Upper bounds: what the dry run says is never exceeded, by any method, and is not far off where it can be near."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compound.api.estimate import estimate
from compound.api.optimize import optimize
from compound.components.flow import Loop, Map
from compound.components.function import Function
from compound.components.index import BM25
from compound.components.llm import LLM
from compound.components.retriever import Retriever
from compound.engine import Engine, Message, Request
from compound.evaluation.dataset import Dataset
from compound.evaluation.metrics.built_in import exact_match
from compound.example import Example
from compound.graph.bounds import CallBound, Extent, extent_of_values
from compound.graph.component import CallContext, Input, Operation
from compound.graph.space import Choice, Demos, Text
from compound.graph.survey import RunLimits, survey
from compound.graph.system import System
from compound.graph.types import Port
from compound.optimization.bounds import Amount, JobBound, Outlook, amount_of
from compound.optimization.method import Job, Method, Progress, Proposal, Task
from compound.optimizers.methods import METHODS
from compound.optimizers.scheduling.scheduler import Uniform
from compound.report.forecast import forecast
from compound.settings.optimize import OptimizeSettings, make_settings
from compound.spec import Program
from compound.testing import ScriptedLM
from optimas_settings import proposals

WEIGHTS = ("ppo", "mappo", "mmgrpo", "mhgpo_is", "mhgpo_fof", "mhgpo_rr", "prompt_r1", "mygo", "distill")
PRICE = 0.001
ALL = ("demos", "edits", "opro")
SUMMARIES = ("have in common", "Condense them", "Describe the ")


def reply(message: str, rng: np.random.Generator) -> str:
    """Answer at length whatever is asked, so that every limit is reached."""
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


def system() -> System:
    question = Input("question", str)
    notes = LLM("noter", prompt=Text("Take notes."), max_tokens=12, temperature=0.5)(question=question)
    answer = LLM(
        "answerer", prompt=Text("Answer."), demos=Demos(max=2), max_tokens=9, temperature=0.5,
        lm=Choice("lm", "other"),
    )(notes=notes, question=question)  # fmt: skip
    return System("two", outputs={"answer": answer}, lm="lm")


def data(train: int = 24, valid: int = 10, test: int = 5) -> Dataset:
    def rows(n: int, name: str) -> list[dict[str, Any]]:
        return [{"id": f"{name}{i}", "question": f"{name} number {i}?", "answer": "right"} for i in range(n)]

    return Dataset.of(train=rows(train, "t"), valid=rows(valid, "v"), test=rows(test, "x"))


LEARNED = {
    "backbone": {"model": "none"},
    "pairs": {"inputs": 6, "samples": 2, "min_rollouts": 1, "max_rollouts": 1, "level": 1},
}


@dataclass(frozen=True, kw_only=True)
class Given(Program):
    """A program whose models are all one."""

    lm: ScriptedLM

    def find_engine(self, lm: str) -> Engine:
        """Return it by either of its names."""
        return {"lm": self.lm, "other": self.lm}[lm]


def program(method: str, lm: ScriptedLM, what: System | None = None, **settings: Any) -> Given:
    values = {
        "valid_size": 10, "minibatch": 3, "candidates": 3, "iterations": 2, "budget": {"system_runs": 90},
        **proposals(*ALL), "max_failed": 1.0,
        "optimas": LEARNED, "hbc": LEARNED,
        "better_together": {"stages": ["mipro", "gepa"]},
    }  # fmt: skip
    return Given(
        path=Path("system.yaml"), text="", engines={}, lm=lm,
        system=what or system(), data=data(), metric=exact_match("answer"),
        optimize=make_settings({**values, "method": method, **settings}),
    )  # fmt: skip


def run(given: Given, folder: Path) -> Any:
    assert given.data is not None
    assert given.metric is not None
    return optimize(
        given.system, given.data, given.metric, given.optimize, run_dir=folder / "run",
        engines=given.find_engine, folder=given.folder,
    )  # fmt: skip


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(WEIGHTS)))
def test_no_method_takes_more_than_the_dry_run_says(method: str, tmp_path: Path) -> None:
    lm = ScriptedLM(reply, price=PRICE)
    given = program(method, lm)
    most = estimate(given)["at_most"]
    unbounded = ["a request for a new prompt shows runs and rows of any length"]
    assert most["why"] == (unbounded if method in ("auto", "search") else [])
    assert not lm.requests
    spent = run(given, tmp_path).to_json()
    assert 0 < spent["calls"] <= most["calls"]
    assert len(lm.requests) == spent["calls"]
    if not most["why"]:
        assert spent["tokens"] <= most["tokens"]
        assert spent["cost"] <= most["cost"]
    assert spent["system_runs"] + spent["test_runs"] <= most["system_runs"]


@pytest.mark.parametrize("method", ["gepa", "textgrad", "opro", "llm_selector_diagnoser", "mipro"])
def test_requests_for_proposals_have_lines_of_their_own_that_hold(method: str, tmp_path: Path) -> None:
    lm = ScriptedLM(reply, price=PRICE)
    given = program(method, lm)
    rows = [
        row
        for row in estimate(given)["bounds"]
        if row["what"].startswith(f"{method.removesuffix('_diagnoser')}: ")
    ]
    run(given, tmp_path)
    marks = ("Is the step", "Write it between", "write a new instruction", "What is wrong with", *SUMMARIES)
    sent = [r for r in lm.requests if any(mark in r.messages[-1].content for mark in marks)]
    assert 0 < len(sent) <= sum(row["calls"] for row in rows)
    assert sum(r.max_tokens for r in sent) <= sum(row["completion_tokens"] for row in rows)
    longest = max(row["prompt_tokens"] / row["calls"] for row in rows)
    assert max(lm.worst_case(r).prompt_tokens for r in sent) <= longest


def test_baselines_and_repeats_are_in_the_bound(tmp_path: Path) -> None:
    lm = ScriptedLM(reply)
    given = program("search", lm, baselines=["random", "opro"], repeats=2, budget={"system_runs": 150})
    found = estimate(given)
    assert [row["method"] for row in found["bounds"] if row["what"] == "total"] == [
        "search",
        "random",
        "opro",
    ]
    run(given, tmp_path)
    assert len(lm.requests) <= found["at_most"]["calls"]


def test_the_bound_of_calls_of_a_single_model_call_is_the_number_of_runs() -> None:
    """Where every call of a run is one system run, nothing is added: 90 of the search and 2 x 5 of the test."""
    one = System(
        "one", {"answer": LLM("answerer", prompt=Text("Answer."))(question=Input("question"))}, lm="lm"
    )
    most = estimate(program("random", ScriptedLM(reply), one))["at_most"]
    assert most["calls"] == 90 + 10


def test_the_bound_of_tokens_counts_instruction_examples_and_answers() -> None:
    """One word is at least two bytes with its blank, so the bound of words is near half of the bytes."""
    one = System(
        "one",
        {"answer": LLM("answerer", prompt="Answer.", max_tokens=4)(question=Input("question"))},
        lm="lm",
    )
    (use,) = survey(one, RunLimits([Example("a", {"question": "who?"}, {})], ("lm",))).uses.values()
    assert use.requests is not None
    (request,) = use.requests
    component = one.components["answerer"]
    assert isinstance(component, LLM)
    messages = component.messages({"question": "who?"}, {"prompt": "Answer.", "demos": ()})
    length = sum(len(message.content) for message in messages) + len("\nAnswer:")
    assert length <= request.prompt.bytes <= length + 40
    assert request.max_tokens == 4


def test_a_model_in_a_loop_counts_with_every_turn_and_in_a_map_with_every_item() -> None:
    turn = LLM("turn", max_tokens=5)(text=Input("text", str))
    looped = Loop("looped", System("body", {"text": turn}), carry={"text": "text"}, max_turns=4)
    each = LLM("each", max_tokens=5)(item=Input("item", str))
    mapped = Map("mapped", System("one", {"said": each}), over="item")
    both = System(
        "both", {"a": looped(text=Input("start", str)), "b": mapped(item=Input("items", list[str]))}, lm="lm"
    )
    examples = [Example(str(i), {"start": "x", "items": ["y"] * i}) for i in (1, 3)]
    found = survey(both, RunLimits(examples, ("lm",)))
    assert (found.uses["turn"].calls, found.uses["each"].calls, found.counted) == (4, 3, 7)


def test_a_corpus_is_read_for_its_longest_passage(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "short"}\n{"text": "%s"}\n' % ("long " * 40))
    found = Retriever("searcher", BM25(tmp_path / "corpus.jsonl"), k=Choice(1, 3, value=1))(
        query=Input("q", str)
    )
    answer = LLM("answerer")(passages=found)
    what = System("rag", {"answer": answer}, lm="lm")
    examples = [Example("a", {"q": "long"})]
    (request,) = survey(what, RunLimits(examples, ("lm",), read_corpora=True)).uses["answerer"].requests or ()
    assert 3 * 200 <= request.prompt.bytes <= 3 * 300 + 100
    (unread,) = survey(what, RunLimits(examples, ("lm",))).uses["answerer"].requests or ()
    assert unread.prompt.unbounded_reason == "passages of 'searcher' can have any length"


def test_a_text_of_any_length_is_named_as_what_is_not_bounded() -> None:
    def twice(question: str) -> str:
        return question * 2

    made = Function("twice", twice)(question=Input("question"))
    one = System("one", {"answer": LLM("answerer", prompt=Text("Answer."))(question=made)}, lm="lm")
    given = program("random", ScriptedLM(reply), one)
    found = estimate(given)
    assert found["at_most"]["prompt_tokens"] is None
    assert found["at_most"]["calls"] == 100
    assert found["at_most"]["why"] == ["function 'twice' can return a value of any length"]
    assert "not bounded: function 'twice'" in forecast({"run": "runs/one", **found})
    limited = program("random", ScriptedLM(reply), one, budget={"system_runs": 90, "tokens": 5000})
    assert estimate(limited)["at_most"]["prompt_tokens"] == 5000


class Asking(Operation):
    """A component of another kind that asks a model and declares nothing."""

    name = "asking"
    inputs = {"question": Port(str)}  # noqa: RUF012
    outputs = {"answer": Port(str)}  # noqa: RUF012
    version = "asking:1"
    settings = {"prompt": Text("Answer.")}  # noqa: RUF012

    async def run(self, inputs: Any, values: Any, call: CallContext) -> Any:
        request = Request((Message("user", values["prompt"]),), max_tokens=3, seed=call.seed)
        return {"answer": (await call.generate("lm", request)).text}


def test_a_component_that_declares_nothing_is_not_bounded() -> None:
    one = System("one", {"answer": Asking()(question=Input("question"))}, lm="lm")
    found = estimate(program("random", ScriptedLM(reply), one))["at_most"]
    assert found["calls"] is None
    assert "component 'asking' does not declare its model requests" in found["why"][0]


class Careless:
    """An optimizer of somebody else's, which asks a model again and again."""

    asked = 0

    async def propose(self, task: Task) -> Any:
        request = Request((Message("user", "Write it between <prompt> and </prompt>"),), max_tokens=5)
        for number in range(40):
            if not task.scorer.may_ask():
                break
            await task.scorer.generate(Request(request.messages, 5, seed=number))
            type(self).asked += 1
            yield Progress({"done": number})
        yield Proposal({})


class Careful(Careless):
    """The same with a bound, which it would exceed if it could."""

    asked = 0

    def bound(self, outlook: Outlook) -> JobBound:
        return JobBound([CallBound("guesses", 7, Extent(60), 5)])


def careless(system: System, settings: OptimizeSettings) -> Method:
    return Method("careless", {"own": Careless()}, [Job("own", ("answerer.prompt",))], Uniform())


def careful(system: System, settings: OptimizeSettings) -> Method:
    return Method("careful", {"own": Careful()}, [Job("own", ("answerer.prompt",))], Uniform())


def test_an_optimizer_without_a_bound_is_reported() -> None:
    found = estimate(program(f"{__name__}:careless", ScriptedLM(reply)))
    assert found["at_most"]["calls"] is None
    assert found["at_most"]["why"] == ["optimizer 'own' declares no bound; set a budget of calls"]
    limited = program(f"{__name__}:careless", ScriptedLM(reply), budget={"system_runs": 90, "calls": 500})
    assert estimate(limited)["at_most"]["calls"] == 0.8 * 500 + 20  # the search has 80 %, the test needs 20


def test_an_optimizer_is_held_to_the_bound_that_it_declares(tmp_path: Path) -> None:
    given = program(f"{__name__}:careful", ScriptedLM(reply))
    rows = {row["what"]: row for row in estimate(given)["bounds"]}
    assert rows["own: guesses"]["calls"] == 14  # of two rounds
    run(given, tmp_path)
    assert Careful.asked == 14


def test_the_table_is_for_people_and_json_for_machines(tmp_path: Path) -> None:
    given = program("gepa", ScriptedLM(reply, price=PRICE), budget={"system_runs": 90, "cost": 2.0})
    text = forecast({"run": "runs/two", **estimate(given)})
    (heading,) = [line for line in text.splitlines() if line.startswith("at most")]
    assert heading.split("  ")[-1].strip() == "dollars"
    assert "gepa: reflections" in text
    assert "budget.system_runs: 90 system runs on train and validation examples" in text
    assert "proposal requests do not count" in text


@pytest.mark.parametrize("method", WEIGHTS)
def test_methods_that_train_weights_declare_that_they_ask_for_nothing(method: str) -> None:
    pytest.importorskip("torch")
    from compound.optimizers.weights.training import WeightTraining

    assert WeightTraining.bound(None, None) == JobBound()  # type: ignore[arg-type]


class TestAmounts:
    def test_the_price_is_the_engines_own(self) -> None:
        lm = ScriptedLM([], price=0.5)
        found = amount_of(lm, CallBound("x", 1, Extent(bytes=100, tokens=10), 7))
        assert (found.prompt_tokens, found.completion_tokens) == (60, 7)
        assert found.cost == pytest.approx(0.5 * 67)

    def test_a_model_without_a_price_has_no_cost(self) -> None:
        found = amount_of(ScriptedLM([], priced=False), CallBound("x", 1, Extent(10), 7))
        assert found.cost is None
        assert (found + Amount(cost=1.0)).cost is None

    def test_reasons_are_kept_once(self) -> None:
        endless = Amount(math.inf, why=("a",))
        assert (endless + endless.times(3)).why == ("a",)

    def test_columns_are_as_long_as_their_longest_value(self) -> None:
        assert extent_of_values(["é", "abc"]).bytes == 3
        assert extent_of_values([]).bytes == 0
