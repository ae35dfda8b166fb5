"""The progress of every optimizer: what a checkpoint holds of it, and how it is read."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compound.optimizers
from compound import LLM, Choice, Demos, Example, Float, Input, System, Text
from compound.core.storage.state import StateError
from compound.ext import Optimizer, Progress, State, Task
from compound.metrics import custom
from compound.optimizers.baselines.evolution import GEPASettings
from compound.optimizers.baselines.gepa import GEPA, Evolution
from compound.optimizers.baselines.llm_selector import LLMSelector, Selection
from compound.optimizers.baselines.mipro import Mipro, MIPROProgress, MIPROSettings
from compound.optimizers.baselines.opro import OPRO, Generations
from compound.optimizers.baselines.random import Halving, RandomSearch
from compound.optimizers.baselines.textgrad import Descent, TextGrad
from compound.optimizers.optimas.local import CloningMemory, Collecting, LocalProgress
from compound.optimizers.search.candidates import JointProgress
from compound.optimizers.search.joint import JointSearch
from compound.optimizers.search.memory_part import MemoryPart
from compound.optimizers.search.ratings import RatingMemory
from compound.optimizers.search.rewarding import RewardAdapter, RewardMemory
from compound.optimizers.search.sources import CandidateSources
from compound.testing import PlainMemory, ScriptedLM
from optimas_settings import guided_search, local_search, offline_rewards, optimas

ADAPTER = RewardAdapter(name="9f", data="77")
PARTS = [
    RatingMemory(known={"0f": -0.5}),
    RewardMemory(iteration=2, inputs=9, adapter=ADAPTER, adapters={"c0": ADAPTER}),
    CloningMemory(start={"a.prompt": "Answer.\nBe brief.", "a.k": 3, "a.lm": None}),
]
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


@pytest.mark.parametrize("kind", sorted(declared(), key=str))
def test_every_state_refuses_other_formats_fields_and_types(kind: type[State]) -> None:
    assert kind.model_config["extra"] == "forbid"
    assert kind.model_config["strict"]
    with pytest.raises(StateError, match=f"^{kind.__name__} has format None"):
        kind.from_json({})
    for name in kind.model_fields:
        with pytest.raises(StateError, match=f"^{kind.__name__} cannot be read: ") as refused:
            kind.from_json({"format": kind.FORMAT, name: True, "surprise": 1})
        assert refused.value.hint


class TestMemoryPart:
    def test_nothing_stored_is_the_defaults(self, tmp_path: Path) -> None:
        memory = PlainMemory(tmp_path)
        assert RewardMemory.of(memory) == RewardMemory()
        assert memory.state == {}

    def test_parts_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        memory = PlainMemory(tmp_path)
        for part in PARTS:
            part.store(memory)
        memory.state = json.loads(json.dumps(memory.state))
        assert [type(part).of(memory) for part in PARTS] == PARTS

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
        for field in state.model_fields:
            with pytest.raises(StateError, match=rf"cannot be read: {field}[.:]"):
                state.from_json({**states[-1], field: True})

    def test_a_checkpoint_of_another_version_is_refused_before_anything_is_run(
        self, made: Callable[[str], Any], name: str
    ) -> None:
        optimizer, _, state = OPTIMIZERS[name]
        assignment = made(name)
        stored = replace(assignment.task, resume={"candidates": []})
        with pytest.raises(StateError, match=f"{state.__name__} has format None"):
            asyncio.run(events(optimizer, stored))
        assert assignment.spent == 0
