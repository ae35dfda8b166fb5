"""A selector whose value is a learned reward chooses for each request, also after a reload."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compound as cp
from compound.rewards.alignment import Accuracy
from compound.rewards.features import FeatureMap, NoBackbone, Template
from compound.rewards.heads import Head
from compound.rewards.model import LocalReward, RewardModel, store_reward
from served import client_of

pytest.importorskip("fastapi")


def selecting() -> cp.System:
    tool = cp.Selector("tool", "low", "high", per_input=True)
    return cp.System("selecting", {"tool": tool(x=cp.Input("x", float))})


def configured(folder: Path, slopes: Mapping[str, float]) -> cp.Configuration:
    """Return a configuration whose reward prefers the option with the higher slope times x."""
    selector = selecting().components["tool"]
    template = Template.of(selector)
    readings = [template.read({"x": 1.0}, {"choice": option}) for option in slopes]
    features = FeatureMap.of(template, readings, 0)
    by_name = {f"choice={option}*x": slope for option, slope in slopes.items()}
    weights = np.array([by_name.get(column, 0.0) for column in features.columns])
    head = Head(weights, np.zeros(len(weights)), np.ones(len(weights)))
    reward = LocalReward(features, head, 1.0, Accuracy(1.0, 1.0, 1.0, 9, 9), inputs=("x",))
    folder.mkdir()
    reference = store_reward(RewardModel("none", NoBackbone(), {"tool": reward}), "tool", folder)
    located = {**reference, "path": str(folder / reference["path"])}
    return selecting().bind({"tool.choice": located}).configuration


def test_a_selector_follows_its_head_for_each_request(tmp_path: Path) -> None:
    best = tmp_path / "best" / "best.json"
    selecting().configuration.save(best)
    with client_of(selecting(), config=best) as client:

        def ask(x: float) -> Any:
            return client.post("/v1/run", json={"inputs": {"x": x}}).json()

        assert {ask(x)["outputs"]["tool"] for x in (-1.0, 1.0)} == {"low"}
        for number, slopes in enumerate([{"low": -1.0, "high": 1.0}, {"low": 1.0, "high": -1.0}]):
            configuration = configured(tmp_path / f"rewards-{number}", slopes)
            configuration.save(best)
            deadline = time.monotonic() + 120
            while ask(0.0)["configuration"] != configuration.digest:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            expected = ["low", "high"] if slopes["high"] > 0 else ["high", "low"]
            assert [ask(x)["outputs"]["tool"] for x in (-1.0, 1.0)] == expected
