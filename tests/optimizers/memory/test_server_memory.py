"""Shares of vLLM servers on the GPU of a trainer, on a device of 80 GiB of which 78 GiB are free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from compound.components.engines.fleet.engine import FleetEngine
from compound.components.engines.local import footprint
from compound.components.engines.vllm.engine import VLLMEngine
from compound.errors import CompoundError
from compound.optimizers import server_memory
from compound.optimizers.memory_demand import Demand
from compound.optimizers.server_memory import ServerPlan, own_servers, plan_servers
from compound.registry.engines import with_gpu_shares

GIB = 2**30


@dataclass
class Sizes:
    """Sizes of a model of 16 GiB in a format of two bytes, with 144 KiB of keys and values per token."""

    parameters: int = 8 * GIB
    context: int = 40_960

    def weights(self, dtype: str) -> int:
        return self.parameters * footprint.BYTES[dtype]

    def cache(self, dtype: str) -> int:
        return 72 * 1024 * footprint.BYTES[dtype]


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(footprint, "free_memory", lambda _: 78 * GIB)
    monkeypatch.setattr(footprint, "total_memory", lambda _: 80 * GIB)
    monkeypatch.setattr(server_memory, "find_sizes", lambda _: (tmp_path, Sizes()))


def trainer(working: float = 20, device: str = "cuda:0") -> Demand:
    """Return a trainer of 18 GiB of weights and optimizer states."""
    return Demand("trainer", device, 18 * GIB, int(working * GIB), "lower micro_tokens", "use 4bit")


def plan(*servers: VLLMEngine, working: float = 20, others: tuple[Demand, ...] = ()) -> ServerPlan:
    return plan_servers(servers, [trainer(working)], others)


def test_a_server_gets_what_the_trainer_leaves() -> None:
    found = plan(VLLMEngine("m"))
    # 78 free - 6.4 kept free - 38 of the trainer = 33.6, of 80
    assert found.shares == {"0": 0.42}
    assert [(demand.device, demand.fixed, demand.working) for demand in found.servers] == [
        ("cuda:0", int(33.6 * GIB), 0)
    ]
    assert found.trainers == (trainer(),)
    # (33.6 - 16) GiB / 144 KiB
    assert found.notes == (
        "the vLLM server of 'm' gets 0.42 of the memory of cuda:0 (--gpu-memory-utilization), which the trainer "
        "leaves: 16.0 GiB of weights, and a cache of at most 128,159 tokens",
    )


def test_a_cache_that_is_too_small_for_the_longest_request_is_a_note() -> None:
    # 20 GiB are left, so that the cache has (20 - 16) GiB / 144 KiB = 29,127 tokens
    _, note = plan(VLLMEngine("m"), working=33.6).notes
    assert "longest request of 40,960 tokens; set --max-model-len" in note
    assert len(plan(VLLMEngine("m", args=["--max-model-len", "8192"]), working=33.6).notes) == 1


def test_a_sleeping_server_gets_all_but_the_weights_and_optimizer_states_of_the_trainer() -> None:
    found = plan(VLLMEngine("m", sleep=True), working=60)
    assert found.shares == {"0": 0.67}  # (78 - 6.4 - 18) / 80
    # of its 53.6 GiB it keeps 2 asleep, so the trainer needs 60 - 51.6 beside it
    (kept,) = found.trainers
    assert kept.fixed == 18 * GIB
    assert kept.working == pytest.approx(8.4 * GIB, abs=1)
    assert "sleep while the trainer computes" in found.notes[-1]
    assert plan(VLLMEngine("m", sleep=True), working=20).trainers[0].working == 0


def test_other_parts_of_the_run_are_subtracted() -> None:
    backbone = Demand("backbone", "cuda:0", 4 * GIB, GIB, "", "")
    elsewhere = Demand("engine", "cuda:1", 40 * GIB, 0, "", "")
    assert plan(VLLMEngine("m"), others=(backbone, elsewhere)).shares == {"0": 0.35}  # 28.6 / 80


def test_servers_of_one_gpu_get_equal_parts() -> None:
    fleet = FleetEngine(replicas=2, vllm={"model": "m"})
    found = plan(*own_servers([fleet]))
    assert found.shares == {"0": 0.21}  # 33.6 / 2 / 80
    assert len(found.servers) == 2


def test_shares_that_settings_determine_are_subtracted() -> None:
    small = VLLMEngine("small", gpu_memory=0.1)
    found = plan(VLLMEngine("m"), small)
    assert found.shares == {"0": 0.32}  # (33.6 - 8) / 80
    assert [demand.fixed for demand in found.servers] == [8 * GIB, int(25.6 * GIB)]
    by_arguments = VLLMEngine("small", args=["--gpu-memory-utilization", "0.1"])
    assert plan(VLLMEngine("m"), by_arguments).shares == {"0": 0.32}


def test_a_server_that_runs_already_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VLLMEngine, "started", True)
    assert plan(VLLMEngine("m")) == ServerPlan(trainers=(trainer(),))


@pytest.mark.parametrize(
    ("settings", "working", "needed"),
    [
        ({}, 42.0, "16.3 GiB: weights 16.0 GiB, cache 288 MiB"),  # leaves 11.6 GiB
        ({"args": ["--max-model-len", "131072"]}, 20.0, "34.0 GiB: weights 16.0 GiB, cache 18.0 GiB"),
        ({"args": ["--dtype", "float32"]}, 21.0, "32.6 GiB: weights 32.0 GiB, cache 576 MiB"),
        ({}, 90.0, "16.3 GiB"),  # leaves nothing
    ],
)
def test_a_share_below_the_weights_and_a_small_cache_is_refused(
    settings: dict[str, Any], working: float, needed: str
) -> None:
    with pytest.raises(CompoundError) as raised:
        plan(VLLMEngine("m", **settings), working=working)
    assert f"needs at least {needed}" in raised.value.message
    assert "of the memory of cuda:0" in raised.value.message
    for setting in ("sleep: true", "lower micro_tokens", "use 4bit", "gpu_memory"):
        assert setting in raised.value.hint


def test_with_sleep_activations_are_no_reason_to_refuse() -> None:
    assert plan(VLLMEngine("m", sleep=True), working=90).shares == {"0": 0.67}
    assert plan(VLLMEngine("m", gpu_memory=0.3), working=90).shares == {}


def test_weights_are_divided_among_the_gpus_of_a_server() -> None:
    plan(VLLMEngine("m", args=["-tp", "2"]), working=42)  # 8.1 GiB of 11.6
    with pytest.raises(CompoundError, match=r"weights 16\.0 GiB"):
        plan(VLLMEngine("m", args=["-dp", "2"]), working=42)


def test_weights_of_a_quantized_model_are_those_of_its_files(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(5 * GIB)  # without its content
    assert "5.0 GiB of weights" in plan(VLLMEngine("m")).notes[0]
    # quantized as it is loaded, to an unknown size
    assert "of weights" not in plan(VLLMEngine("m", args=["--quantization", "fp8"])).notes[0]


def test_gpus_are_compared_by_their_names_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    fleet = FleetEngine(devices=[[1], [3]], vllm={"model": "m"})
    found = plan_servers(fleet.processes, [trainer(device="cuda:1")], ())
    assert found.shares == {"3": 0.42}
    with_gpu_shares({"lm": fleet}, found.shares)
    assert [engine._gpu_memory_left for engine in fleet.processes] == [None, 0.42]
    find = with_gpu_shares(lambda lm: VLLMEngine(lm), {"5": 0.3})
    assert callable(find)
    made = find("m")
    assert isinstance(made, VLLMEngine)
    assert made._gpu_memory_left == 0.3


def test_sleep_without_a_trainer_on_the_gpu_has_no_effect_and_says_so() -> None:
    lm = VLLMEngine("m", sleep=True)
    for device in ("cuda:1", "cpu"):
        found = plan_servers([lm], [trainer(device=device)], ())
        assert found.shares == {}
        assert found.trainers == (trainer(device=device),)
        assert found.notes == (
            "sleep of the engine of 'm' has no effect: no trainer computes on its GPU (0)",
        )


def test_servers_that_others_started_are_not_planned() -> None:
    running = VLLMEngine("m", api_base="http://127.0.0.1:8000/v1")
    fleet = FleetEngine(["http://127.0.0.1:8000/v1"], vllm={"model": "m"})
    assert own_servers([running, fleet]) == []
