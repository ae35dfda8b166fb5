"""The states of optimizers refuse what they do not declare, and parts of a memory do not disturb each other."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from pathlib import Path

import pytest

import compound.optimizers
from compound.core.storage.state import StateError
from compound.ext import State
from compound.optimizers.optimas.local import CloningMemory
from compound.optimizers.search.memory_part import MemoryPart
from compound.optimizers.search.ratings import RatingMemory
from compound.optimizers.search.rewarding import RewardAdapter, RewardMemory
from compound.testing import PlainMemory

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
