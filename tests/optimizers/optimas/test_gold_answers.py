"""Gold answers in local rewards: read on train examples only, and in nothing that a run stores to be served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from benchmarks.simulated.relays import Relay
from compound.optimizers.search import local_gains
from compound.rewards.features import Reading
from compound.rewards.gains import GOLD, Critic, answers_of, gold_features

SIZES = {"train": 40, "valid": 16, "test": 4}


@pytest.fixture
def gold_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the examples whose gold answers the local rewards read."""
    found: list[str] = []

    def recorded(example: cp.Example) -> dict[str, object]:
        found.append(example.id)
        return answers_of(example)

    monkeypatch.setattr(local_gains, "answers_of", recorded)
    return found


@pytest.fixture
def features_read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the gold fields that features are computed from."""
    found: set[str] = set()

    def recorded(outputs: Mapping[str, object], gold: Mapping[str, object]) -> dict[str, float]:
        found.update(gold)
        return gold_features(outputs, gold)

    monkeypatch.setattr(local_gains, "gold_features", recorded)
    return found


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the examples that the rewards with gold answers score."""
    found: list[str] = []
    rewards = Critic.rewards

    def recorded(critic: Critic, readings: Sequence[Reading], examples: Sequence[str]) -> Any:
        found.extend(examples)
        return rewards(critic, readings, examples)

    monkeypatch.setattr(Critic, "rewards", recorded)
    return found


@pytest.fixture
def result(
    without_reports: None,  # they show the gold answers of test rows
    tmp_path: Path,
    gold_read: list[str],
    features_read: set[str],
    scored: list[str],
) -> cp.Result:
    """A run that accepts a change of one component, and evaluates the test split."""
    world = Relay(4, 1, options=4, skill=(0.05, 0.95))
    rows = {
        split: [{"id": e.id, **e.inputs, **e.gold} for e in world.examples(n, split)]
        for split, n in SIZES.items()
    }
    return cp.optimize(
        world.system(),
        rows,
        world.score,
        method="optimas",
        seed=1,
        budget=100,
        iterations=1,
        run_dir=tmp_path / "run",
        progress=False,
        optimas={"backbone": {"model": "none"}},
    )


def test_rewards_read_gold_answers_on_train_examples_only(
    result: cp.Result, gold_read: list[str], features_read: set[str], scored: list[str]
) -> None:
    """Columns of the inputs and the identifier are no gold answers; the result names no feature of them."""
    assert features_read == {"answer"}
    train = {f"train-{i}" for i in range(SIZES["train"])}
    assert result.accepted == 1
    assert result.test_after is not None
    assert gold_read
    assert scored
    assert set(gold_read) <= train
    assert set(scored) <= train
    for key, value in result.best.items():
        assert type(value) in (int, str), key
    files = {
        path.relative_to(result.path): path.read_bytes()
        for path in result.path.rglob("*")
        if path.is_file()
    }
    assert Path("best.json") in files
    named = {str(path) for path, content in files.items() if GOLD.encode() in content}
    assert "memory.jsonl" in named
    assert named <= {"memory.jsonl", "events.jsonl", "checkpoint.json"}
