"""A graph, a server, training, hot-swaps and sampling with what was trained: all of it real."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from compound import LLM, Dataset, Executor, Input, LoRA, System, Text
from compound.api.optimize import run_optimization
from compound.core.storage.artifacts import is_reference
from compound.engines.vllm.engine import VLLMEngine
from compound.metrics import custom
from training_settings import training

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft's
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
ASK = "Is it so? Answer with one word, Yes or No."
MARKERS = {"hopeful": "Yes", "doubtful": "No"}
THINGS = (
    "rain tomorrow",
    "a long winter",
    "a late train",
    "good bread",
    "an early spring",
    "a full moon",
)


class Lent:
    """An engine that others go on using: closing it is not ours to do."""

    def __init__(self, engine: VLLMEngine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def aclose(self) -> None:
        """Leave it open."""


def twins() -> System:
    """Two components that differ in nothing but their names."""

    def agent(name: str) -> LLM:
        return LLM(name, prompt=Text(ASK), max_tokens=3, temperature=1.0, weights=LoRA(rank=8))

    made = {name: agent(name)(thing=Input("thing", str)) for name in MARKERS}
    return System("twins", outputs=made, lm="lm")


def marked(outputs: Mapping[str, Any], example: Any) -> float:
    """Return how many of the two say their own marker."""
    right = [bool(outputs[name].strip().startswith(marker)) for name, marker in MARKERS.items()]
    return sum(right) / 2


def said(system: System, engine: Any) -> dict[str, list[str]]:
    """Return what each component says of every thing, greedily."""

    async def run() -> list[Any]:
        executor = Executor({"lm": engine})
        cold = {name: {"temperature": 0.0} for name in MARKERS}
        runs = (executor.run(system, {"thing": t}, example=t, settings=cold) for t in THINGS)
        return await asyncio.gather(*runs)

    traces = asyncio.run(run())
    return {name: [trace.outputs[name].strip() for trace in traces] for name in MARKERS}


def test_two_components_learn_two_markers_on_one_server_and_swapping_adapters_swaps_them(
    lm: VLLMEngine, tmp_path: Path
) -> None:
    engine = Lent(lm)
    rows = [{"id": thing, "thing": thing} for thing in THINGS]
    data = Dataset.of(train=rows, valid=[{**row, "id": f"valid {row['id']}"} for row in rows])
    weights = {"steps": 8, "examples": 4, "runs": 8, "lr": 1e-3}
    settings = training("mmgrpo", weights, alpha=0.25)
    system = twins()
    result = run_optimization(
        system,
        data,
        custom(marked, "marked"),
        settings,
        run_dir=tmp_path / "run",
        engines=lambda _: engine,
    )
    best = result.best.located(tmp_path / "run")
    trained = {name: best[f"{name}.weights"] for name in MARKERS}
    assert len({value["sha256"] for value in trained.values() if is_reference(value)}) == 2

    found = said(system.bind(best), engine)
    for name, marker in MARKERS.items():
        assert all(text.startswith(marker) for text in found[name]), found
    one, two = MARKERS
    swapped = {**best, f"{one}.weights": trained[two], f"{two}.weights": trained[one]}
    found = said(system.bind(swapped), engine)
    for name, marker in zip(MARKERS, reversed(MARKERS.values()), strict=True):
        assert all(text.startswith(marker) for text in found[name]), found
