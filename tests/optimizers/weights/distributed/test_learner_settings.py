"""What a machine cannot run is refused before anything is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from compound.api.description import MAY_CHANGE
from compound.api.estimate import estimate
from compound.core.errors import CompoundError, DeclarationError, SpecError
from compound.engines.local import devices
from compound.engines.local.devices import Placement
from compound.optimizers.weights.distributed.learner import LearnerSettings, placed
from compound.optimizers.weights.methods import POLICY_METHODS
from compound.yaml import load

ATLAS = Path(__file__).parents[4] / "benchmarks" / "atlas.yaml"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"cuda": 2, "xpu": 2, "mps": 0}
    monkeypatch.setattr(devices, "device_count", lambda kind: counts[kind])


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("given", "placement", "told"),
    [
        (
            {"processes": 4},
            Placement("cuda"),
            r"processes is 4, but PyTorch finds 2 CUDA devices.*to 2",
        ),
        (
            {"processes": 2},
            Placement("cuda:1"),
            r"names one device, cuda:1.*base.device to cuda: .*cuda:0 to",
        ),
        ({"processes": 2}, Placement("xpu"), "several processes on xpu are not supported"),
        (
            {"machines": 2, "address": "10.0.0.1:29500"},
            Placement("cpu"),
            "machines is 2, but the environment variable COMPOUND_LEARNER_KEY is not set",
        ),
        (
            {"processes": 2, "sharding": "fsdp"},
            Placement("cpu", quantization="4bit"),
            "does not divide weights quantized to 4bit",
        ),
    ],
)
def test_devices_that_do_not_suffice_are_refused(
    given: Any, placement: Placement, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMPOUND_LEARNER_KEY", raising=False)
    with pytest.raises(DeclarationError, match=told):
        LearnerSettings(**given).check(placement, "optimize.ppo")


@pytest.mark.usefixtures("gpus")
def test_one_device_for_each_process_suffices() -> None:
    LearnerSettings(processes=4).check(Placement("cpu"), "optimize.ppo")
    LearnerSettings().check(Placement("xpu"), "optimize.ppo")
    assert [placed(Placement("cuda"), rank).device for rank in range(2)] == ["cuda:0", "cuda:1"]
    chosen = [LearnerSettings.backend_on(kind) for kind in ("cuda", "cpu")]
    assert chosen == ["nccl", "gloo"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"processes": 0}, "processes"),
        ({"sharding": "fsdp"}, "processes is 1; set processes to 2 or more"),
        ({"sharding": "tensor"}, "sharding"),
        ({"machines": 2}, "machines above 1 need an address"),
        ({"ranks": 2}, "unknown key"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        load(ATLAS, overrides=[("optimize.mmgrpo", json.dumps({"learner": given}))])


@pytest.mark.parametrize("method", [*POLICY_METHODS, "optimas"])
def test_too_few_devices_are_refused_before_a_run(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every method that trains weights, in the check that precedes the first call."""
    monkeypatch.setattr(devices, "resolve_device", lambda *_: "cuda")
    monkeypatch.setattr(devices, "device_count", lambda kind: 1)
    monkeypatch.setattr(devices, "supports_bfloat16", lambda device: True)
    learner: dict[str, Any] = {"learner": {"processes": 2}}
    section = {"training": {"ppo": learner}} if method == "optimas" else learner
    if method == "distill":
        section = {**learner, "prompts": {"answerer": "Answer."}}
    overrides = [("optimize.method", method), (f"optimize.{method}", json.dumps(section))]
    with pytest.raises(
        CompoundError, match=r"learner.processes is 2, but PyTorch finds 1 CUDA device,"
    ):
        estimate(load(ATLAS, overrides=overrides))


def test_the_number_of_processes_may_change_when_a_run_is_resumed() -> None:
    """Results are equal up to rounding."""
    for setting in ("processes", "machines", "address", "sharding"):
        assert f"optimize.*.learner.{setting}" in MAY_CHANGE
