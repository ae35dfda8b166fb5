"""The progress of every optimizer: what a checkpoint holds of it, and how it is read."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compound.optimizers
from compound.components.llm import LLM
from compound.core.example import Example
from compound.core.storage.state import State, StateError
from compound.evaluation.metrics.custom import custom
from compound.graph.component import Input
from compound.graph.space import Choice, Demo, Demos, Float, Text
from compound.graph.system import System
from compound.optimization.method import Optimizer, Progress, Task
from compound.optimizers.baselines.evolution import GEPASettings
from compound.optimizers.baselines.gepa import GEPA, Evolution, Scores
from compound.optimizers.baselines.llm_selector import LLMSelector, Selection
from compound.optimizers.baselines.mipro import Mipro, MIPROProgress, MIPROSettings
from compound.optimizers.baselines.mipro_trials import Trial, TrialPlan, TrialSearch
from compound.optimizers.baselines.opro import OPRO, Generations, ScoredText
from compound.optimizers.baselines.random import Halving, RandomSearch
from compound.optimizers.baselines.textgrad import Descent, TextGrad
from compound.optimizers.fast_slow import FastSlowState
from compound.optimizers.optimas.local import CloningMemory, Collecting, LocalProgress
from compound.optimizers.search.candidates import JointProgress, LocalCell, SearchCandidate
from compound.optimizers.search.joint import JointSearch
from compound.optimizers.search.memory_part import MemoryPart
from compound.optimizers.search.proposers.demos import Source, Sources
from compound.optimizers.search.ratings import RatingMemory
from compound.optimizers.search.rewarding import RewardAdapter, RewardMemory
from compound.optimizers.search.sources import CandidateSources
from compound.optimizers.weights.steps import TrainingState
from compound.testing import PlainMemory, ScriptedLM
from optimas_settings import guided_search, local_search, offline_rewards, optimas

DEMO = {"inputs": {"question": "q"}, "outputs": {"output": "a"}}
VALUES: dict[str, object] = {
    "a.prompt": "Answer.\nBe brief.",
    "a.k": 3,
    "a.t": 0.5,
    "a.demos": [DEMO],
    "a.lm": None,
}
TRIAL = Trial(point={"a.prompt": 1, "a.demos": 0}, mean=0.5)
TRIALS = TrialPlan(trials=9, batch=4, full=12)
JOINT = TrialSearch(values={"a.prompt": ["one", "two"]}, plan=TRIALS, trials=[TRIAL], full=[TRIAL])
DEMOS: list[Demo] = [{"inputs": {"x": "1"}, "outputs": {"y": 2}}]
TEXT = ScoredText(text="one", mean=0.5)
PAIRS = Collecting(iteration=2, proposals={"a": [{"prompt": "Be brief."}]}, inputs=4)
ADAPTER = RewardAdapter(name="9f", data="77")
SOURCE = Source(configuration=VALUES, examples=["e1"])
CELL = LocalCell(component="a", values={"a.k": 1}, context={}, rows=[0, 3], failed=[3])
COMPARED = SearchCandidate(
    values={"a.k": 1}, parent=0, rows=[0, 2], differences=[0.25, 0.5], failed=[2]
)
STATES: list[State] = [
    TRIAL,
    PAIRS,
    ADAPTER,
    SOURCE,
    Halving(
        candidates=[VALUES, {}],
        alive=[1, 0],
        rounds=2,
        price=0.25,
        seen=8,
        mean=0.5,
        incumbent=0.25,
    ),
    TRIALS,
    JOINT,
    TEXT,
    MIPROProgress(
        sets={"a.demos": [[], DEMOS]},
        shown={"a": DEMOS},
        plan=TRIALS,
        summary="rows",
        attempts=2,
        texts={"a.prompt": ["one"]},
        search=JOINT,
    ),
    Generations(
        size=8,
        each=2,
        generations=4,
        done=1,
        before=0.25,
        mean=0.5,
        tried=2,
        best={"a.prompt": "one"},
        history={"a.prompt": [TEXT]},
        exemplars={"a.prompt": ["Input: x: 1"]},
    ),
    Scores(scores=[0.5]),
    Evolution(
        answers=[Scores(scores=[0.5, 1.0]), None, "Another text.", Scores(scores=[0.0])],
        best={"a.prompt": "x"},
        mean=0.75,
    ),
    Descent(
        step=3,
        held=10,
        before=0.25,
        mean=0.5,
        tried=1,
        values={"a.prompt": "y"},
        written={"a.prompt": ["x", "y"]},
    ),
    Selection(
        rows=10, allocations=[{"a.k": 1}, {"a.k": 2}], means={'{"a.k":1}': 0.5, '{"a.k":2}': None}
    ),
    LocalProgress(iteration=2, proposals={}, inputs=4, candidates=[VALUES], gains=[0.5]),
    COMPARED,
    JointProgress(
        levels={"a.k": [1, 2]},
        origins={"a.k": ["", "edits"]},
        runs=50.0,
        width=4,
        block=6,
        candidates=[COMPARED],
        field=[0],
        steps=1,
        price=0.5,
        scores={"0": 0.5, "2": 0.0},
        failed=[2],
        variance=0.1,
        cells=[CELL],
    ),
    Sources(sources=[SOURCE]),
    FastSlowState(
        training=TrainingState(step=5),
        rounds=1,
        prompts=[{"a.prompt": "x"}, {}],
        rewards=[(2.5, 4), (1.0, 4)],
        best={"a.prompt": "x"},
        reflection={"mean": 0.5},
        started=40.0,
    ),
    RatingMemory(known={"0f": -0.5}),
    RewardMemory(iteration=2, inputs=9, adapter=ADAPTER, adapters={"c0": ADAPTER}),
    CloningMemory(start=VALUES),
    CELL,
]


def kind(state: State) -> str:
    return type(state).__name__


WEIGHTS = "compound.optimizers.weights"


def declared() -> set[type[State]]:
    """Every state that a module of the optimizers declares; those of weight training have tests of their own."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(compound.optimizers.__path__, "compound.optimizers.")
        if not module.ispkg and not module.name.startswith(WEIGHTS)
    ]
    found = {
        value for module in modules for value in vars(module).values() if inspect.isclass(value)
    }
    own = {
        each
        for each in found
        if issubclass(each, State)
        and each.__module__.startswith("compound.optimizers")
        and not each.__module__.startswith(WEIGHTS)
    }
    return own - {MemoryPart}


def test_every_state_is_tested_here() -> None:
    assert {type(state) for state in STATES} == declared()


@pytest.mark.parametrize("state", STATES, ids=kind)
class TestEveryState:
    def test_what_is_stored_is_read(self, state: State) -> None:
        stored = json.loads(json.dumps(state.to_json()))
        found = type(state).from_json(stored)
        assert found == state
        assert found.to_json() == stored

    def test_a_snapshot_does_not_change(self, state: State) -> None:
        copied = state.model_copy(deep=True)
        stored = copied.to_json()
        for name in type(state).model_fields:
            value = getattr(copied, name)
            if isinstance(value, list | dict):
                value.clear()
        assert stored == state.to_json()

    def test_an_unknown_field_is_refused_by_name(self, state: State) -> None:
        with pytest.raises(StateError, match=r"^\w+ cannot be read: surprise: "):
            type(state).from_json({**state.to_json(), "surprise": 1})

    def test_a_value_of_another_type_is_refused_by_the_name_of_its_field(
        self, state: State
    ) -> None:
        for name in type(state).model_fields:
            with pytest.raises(
                StateError, match=rf"^{kind(state)} cannot be read: {name}[.:]"
            ) as refused:
                type(state).from_json({**state.to_json(), name: True})
            assert refused.value.hint

    def test_a_missing_field_is_refused_by_name(self, state: State) -> None:
        for name, field in type(state).model_fields.items():
            if field.is_required():
                stored = {key: value for key, value in state.to_json().items() if key != name}
                with pytest.raises(StateError, match=rf"cannot be read: {name}: Field required"):
                    type(state).from_json(stored)

    @pytest.mark.parametrize("number", [None, 0, 99, "1"])
    def test_another_format_is_refused(self, state: State, number: object) -> None:
        with pytest.raises(
            StateError, match=rf"^{kind(state)} has format {number!r}, but this version reads"
        ):
            type(state).from_json({**state.to_json(), "format": number})


class TestNested:
    """A mistake inside a part is named by its place."""

    @pytest.mark.parametrize(
        ("part", "value", "place"),
        [
            ("plan", {"trials": "9"}, "search.plan.trials"),
            ("trials", [{"point": {}}], "search.trials.0.mean"),
        ],
    )
    def test_of_a_search(self, part: str, value: object, place: str) -> None:
        stored = MIPROProgress(sets={}, shown={}, plan=TRIALS, search=JOINT).to_json()
        search: Any = stored["search"]
        with pytest.raises(
            StateError, match=rf"^MIPROProgress cannot be read: {re.escape(place)}: "
        ):
            MIPROProgress.from_json({**stored, "search": {**search, part: value}})


class TestMemoryPart:
    """Parts of a method's memory."""

    def test_nothing_stored_is_the_defaults(self, tmp_path: Path) -> None:
        memory = PlainMemory(tmp_path)
        assert RewardMemory.of(memory) == RewardMemory()
        assert memory.state == {}

    def test_parts_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        memory = PlainMemory(tmp_path)
        parts = [state for state in STATES if isinstance(state, MemoryPart)]
        for part in parts:
            part.store(memory)
        memory.state = json.loads(json.dumps(memory.state))
        assert [type(part).of(memory) for part in parts] == parts

    def test_a_change_counts_once_it_is_stored(self, tmp_path: Path) -> None:
        memory = PlainMemory(tmp_path)
        kept = RewardMemory.of(memory)
        kept.adapters["here"] = ADAPTER
        assert RewardMemory.of(memory).adapters == {}
        kept.store(memory)
        kept.adapters["there"] = ADAPTER
        assert RewardMemory.of(memory).adapters == {"here": ADAPTER}

    def test_one_of_another_version_is_refused(self, tmp_path: Path) -> None:
        memory = PlainMemory(tmp_path)
        memory.state["rewards"] = {"iteration": 1}
        with pytest.raises(StateError, match="RewardMemory has format None"):
            RewardMemory.of(memory)


# --- restarting ----------------------------------------------------------------------------------------

TARGET = "Be exact."
WRITERS = ("Write one new instruction", "Rewrite the instruction", "new instruction")


def script(message: str, rng: np.random.Generator) -> str:
    """Write prompts of one of three styles; answer right with some luck, and more often when told to be exact."""
    if any(words in message for words in WRITERS):
        text = (
            f"Style {'abc'[int(rng.integers(3))]}. {TARGET if rng.random() < 0.6 else 'Be quick.'}"
        )
        return f"<prompt>{text}</prompt>\n```\n{text}\n```"
    if "What is wrong" in message:
        return "It is not exact."
    return "right" if rng.random() < (0.9 if TARGET in message else 0.4) else "wrong"


def two_steps() -> System:
    question = Input("question", str)
    plan = LLM("first", prompt=Text("Think."), temperature=1.0, max_tokens=Choice(8, 16))(
        question=question
    )
    step = LLM(
        "second",
        prompt=Text("Answer."),
        demos=Demos(max=2),
        temperature=Float(0.5, 1.0),
        max_tokens=Choice(8, 16, 32),
    )(plan=plan, question=question)
    return System("two", outputs={"answer": step}, lm="lm")


def is_right(outputs: Any, example: Example) -> float:
    return float(outputs["answer"] == "right")


REWARDS = optimas(
    model="none",
    samples=2,
    min_rollouts=1,
    max_rollouts=1,
    level=1,
    inputs=8,
    sufficient_accuracy=1.01,
)
SOURCES = CandidateSources(("describe", "reflect", "demos", "edits"))
TEXTS = ("first.prompt", "second.prompt")
SECOND = ("second.prompt", "second.demos")
OPTIMIZERS: dict[str, tuple[Optimizer, tuple[str, ...], type[State]]] = {
    "random": (RandomSearch(), (*TEXTS, "second.demos", "second.temperature"), Halving),
    "joint": (
        JointSearch(SOURCES),
        (*TEXTS, "second.demos", "second.temperature", "second.max_tokens"),
        JointProgress,
    ),
    "mipro": (
        Mipro(MIPROSettings(proposers=("llm", "edits"))),
        (*TEXTS, "second.demos"),
        MIPROProgress,
    ),
    "opro": (OPRO(), TEXTS, Generations),
    "textgrad": (TextGrad(), TEXTS, Descent),
    "gepa": (GEPA(GEPASettings(iterations=6)), TEXTS, Evolution),
    "llm_selector": (LLMSelector(), ("first.max_tokens", "second.max_tokens"), Selection),
    "guided": (guided_search(REWARDS, SOURCES), (*SECOND, "first.prompt"), JointProgress),
    "offline": (offline_rewards(REWARDS, SOURCES), (*SECOND, "first.prompt"), Collecting),
    "local": (local_search(REWARDS, SOURCES), SECOND, LocalProgress),
}


@pytest.fixture
def made(job: Callable[..., Any]) -> Callable[[str], Any]:
    rows = [Example(f"e{i}", {"question": f"what is {i}"}) for i in range(60)]

    def make(name: str) -> Any:
        keys = OPTIMIZERS[name][1]
        return job(
            two_steps(), custom(is_right), rows, lambda: ScriptedLM(script), share=200, keys=keys
        )

    return make


async def events(optimizer: Optimizer, task: Task) -> list[Progress]:
    return [event async for event in optimizer.propose(task) if isinstance(event, Progress)]


@pytest.mark.parametrize("name", OPTIMIZERS)
class TestStored:
    @pytest.mark.slow
    def test_every_checkpoint_is_read_as_what_it_was(
        self, made: Callable[[str], Any], name: str
    ) -> None:
        optimizer, _, state = OPTIMIZERS[name]
        states, _ = made(name).run(optimizer)
        assert all(state.from_json(stored).to_json() == stored for stored in states)

    def test_a_checkpoint_of_another_version_is_refused_before_anything_is_run(
        self, made: Callable[[str], Any], name: str
    ) -> None:
        optimizer, _, state = OPTIMIZERS[name]
        assignment = made(name)
        stored = replace(assignment.task, resume={"candidates": []})
        with pytest.raises(StateError, match=f"{state.__name__} has format None"):
            asyncio.run(events(optimizer, stored))
        assert assignment.spent == 0
