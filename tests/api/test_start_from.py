"""Runs that start from an earlier one: its configurations are candidates, its rewards are used if they hold."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.api.optimize import optimize
from compound.benchmarks.simulated.relays import Relay
from compound.errors import DataError, RunDirectoryError
from compound.evaluation.dataset import Dataset
from compound.evaluation.metrics.custom import custom
from compound.example import Example
from compound.graph.system import System
from compound.optimizers.search.sources import CandidateSources
from compound.rewards.feedback.earlier import read_earlier
from compound.settings.optimize import make_settings
from optimas_settings import guided_search, optimas

REWARDS = optimas(model="none")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compound.report.write", lambda _: None)


def rows(world: Relay, n: int, split: str = "") -> list[dict[str, Any]]:
    examples = world.examples(n, split) if split else world.examples(n)
    return [{"id": example.id, **example.inputs, **example.gold} for example in examples]


def run(
    folder: Path,
    runs: int = 150,
    *,
    seed: int = 0,
    train: int = 80,
    start_from: Path | None = None,
) -> cp.Result:
    world = Relay(4, 1)
    settings = make_settings({
        "method": "optimas", "seed": seed, "valid_size": 10, "optimas": REWARDS, "alpha": 0.3,
        "budget": {"system_runs": runs},
    })  # fmt: skip
    data = Dataset.of(train=rows(world, train), valid=rows(world, 10, "valid"))
    return optimize(
        world.system(), data, custom(world.score, thread="never"), settings, run_dir=folder,
        start_from=start_from,
    )  # fmt: skip


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> cp.Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compound.report.write", lambda _: None)
        return run(tmp_path_factory.mktemp("first") / "run", 300)


def test_the_start_of_the_run_says_what_it_uses(first: cp.Result, tmp_path: Path) -> None:
    result = run(tmp_path / "run", 60, seed=3, start_from=first.path)
    assert any(f"starts from {first.path}: " in note for note in result.notes)


def test_its_configurations_are_the_first_candidates(first: cp.Result, job: Any) -> None:
    world = Relay(4, 1)
    found = read_earlier(first.path, world.system(), world.examples(80))
    assert dict(first.best) in found.values
    made = job(world.system(), world, world.examples(80), keys=("a.option",), share=60)
    context = replace(made.task.context, earlier_values=[{"a.option": 6, "unknown.key": 1}])
    made.task = replace(made.task, context=context)
    states, _ = made.run(guided_search(REWARDS, CandidateSources(())))
    assert states[0]["candidates"][0]["values"] == {"a.option": 6}


def test_its_draws_are_copied_once_and_the_run_goes_on_without_it(first: cp.Result, tmp_path: Path) -> None:
    earlier = read_earlier(first.path, Relay(4, 1).system(), Relay(4, 1).examples(80))
    result = run(tmp_path / "run", 60, seed=3, start_from=first.path)
    records = [json.loads(line) for line in (result.path / "memory.jsonl").read_text().splitlines()]
    draws = [record["draw"] for record in records if "draw" in record]
    assert len(earlier.draws) > 20
    assert [draw["inputs"] for draw in draws[: len(earlier.draws)]] == [
        dict(draw.inputs) for draw in earlier.draws
    ]


def test_rows_that_are_no_train_examples_here_are_left_out(first: cp.Result) -> None:
    """A reward must not know a row that may now be a validation or test row; names do not matter."""
    world = Relay(4, 1)
    few = [Example(f"new{i}", example.inputs, example.gold) for i, example in enumerate(world.examples(10))]
    found = read_earlier(first.path, world.system(), few)
    assert {draw.example for draw in found.draws} <= {example.id for example in few}
    assert 0 < len(found.draws) < len(read_earlier(first.path, world.system(), world.examples(80)).draws)
    assert "are left out" in found.told


def test_draws_of_another_component_are_left_out(first: cp.Result) -> None:
    """A component of the same name but with other ports, and values that the parameter does not have."""

    def other(text: str, option: int) -> str:
        return text

    node = cp.Function("a", other, option=cp.Choice(100, 200))(text=cp.Input("text", str))
    with pytest.raises(RunDirectoryError, match="has nothing that this run could start from"):
        read_earlier(first.path, System("other", outputs={"y": node}), Relay(4, 1).examples(80))


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for folder in ("folder", "nowhere"):
        with pytest.raises(RunDirectoryError):
            run(tmp_path / "run", start_from=tmp_path / folder)


def test_damaged_draws_are_named(first: cp.Result, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(first.path, tmp_path / "copy"))
    lines = (copy / "memory.jsonl").read_text().splitlines()
    (copy / "memory.jsonl").write_text(
        "\n".join(line.replace('"draw"', '"drawn"') for line in lines[:1]) + "\n"
    )
    with pytest.raises((RunDirectoryError, DataError)):
        run(tmp_path / "run", start_from=copy)
