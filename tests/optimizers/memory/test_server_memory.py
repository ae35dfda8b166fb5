"""Shares of vLLM servers on the GPU of a trainer, on a device of 80 GiB of which 78 GiB are free."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from compound.core.errors import CompoundError
from compound.engines.fleet import FleetEngine
from compound.engines.local import footprint
from compound.engines.vllm.engine import VLLMEngine
from compound.graph.registry.engines import with_gpu_shares
from compound.optimizers.memory_plan import Demand, MemoryPlan, own_servers, share_gpu

GIB = 2**30


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(footprint, "free_memory", lambda _: 78 * GIB)
    monkeypatch.setattr(footprint, "total_memory", lambda _: 80 * GIB)


def plan(
    *servers: VLLMEngine, working: int = 20, beside: int = 0, device: str = "cuda:0"
) -> MemoryPlan:
    found = MemoryPlan()
    share_gpu(found, trainer(working, device), servers, beside * GIB)
    return found


def trainer(working: int, device: str = "cuda:0") -> Demand:
    return Demand("trainer", device, 18 * GIB, working * GIB, "lower micro_tokens", "use 4bit")


def test_a_server_gets_what_the_trainer_and_other_parts_leave() -> None:
    found = plan(VLLMEngine("m"))
    # 78 free - 6.4 kept free - 38 of the trainer = 33.6, of 80
    assert found.gpu_shares == {"0": 0.42}
    assert [(demand.device, demand.fixed, demand.working) for demand in found.demands] == [
        ("cuda:0", int(33.6 * GIB), 0)
    ]
    assert found.notes == [
        "the vLLM server of 'm' gets 0.42 of the memory of cuda:0 (--gpu-memory-utilization), which the "
        "trainer leaves"
    ]
    assert plan(VLLMEngine("m"), beside=5).gpu_shares == {"0": 0.35}  # 28.6 / 80


def test_a_sleeping_server_gets_all_but_the_weights_and_optimizer_states_of_the_trainer() -> None:
    server, found = VLLMEngine("m", sleep=True), MemoryPlan()
    kept = share_gpu(found, trainer(60), [server], 0)
    assert found.gpu_shares == {"0": 0.67}  # (78 - 6.4 - 18) / 80
    assert found.notes[-1] == "the vLLM servers on cuda:0 sleep while the trainer computes"
    # of its 53.6 GiB it keeps 2 asleep, so the trainer needs 60 - 51.6 beside it
    assert kept.fixed == 18 * GIB
    assert kept.working == pytest.approx(8.4 * GIB, abs=1)
    assert share_gpu(MemoryPlan(), trainer(20), [server], 0).working == 0
    assert plan(server, working=90).gpu_shares == {"0": 0.67}  # activations are no reason to refuse
    # servers of one GPU take turns with the trainer together, or not at all
    one_awake = [VLLMEngine("awake"), server]
    assert share_gpu(MemoryPlan(), trainer(20), one_awake, 0) == trainer(20)


def test_servers_of_one_gpu_get_equal_parts() -> None:
    found = plan(*own_servers([FleetEngine(replicas=2, vllm={"model": "m"})]))
    assert found.gpu_shares == {"0": 0.21}  # 33.6 / 2 / 80
    assert len(found.demands) == 2


def test_shares_that_settings_determine_are_subtracted() -> None:
    found = plan(VLLMEngine("m"), VLLMEngine("small", gpu_memory=0.1))
    assert found.gpu_shares == {"0": 0.32}  # (33.6 - 8) / 80
    assert [demand.fixed for demand in found.demands] == [8 * GIB, int(25.6 * GIB)]
    by_arguments = VLLMEngine("small", args=["--gpu-memory-utilization", "0.1"])
    assert plan(VLLMEngine("m"), by_arguments).gpu_shares == {"0": 0.32}
    assert plan(VLLMEngine("m", gpu_memory=0.3), working=90).gpu_shares == {}


def test_servers_that_run_already_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "http://127.0.0.1:8000/v1"
    running = VLLMEngine("m", api_base=address)
    assert own_servers([running, FleetEngine([address], vllm={"model": "m"})]) == []
    monkeypatch.setattr(VLLMEngine, "started", True)
    assert plan(VLLMEngine("m")) == MemoryPlan()


def test_a_trainer_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(CompoundError, match="leaves no memory of cuda:0 for the vLLM") as raised:
        plan(VLLMEngine("m"), working=90)
    for setting in ("sleep: true", "lower micro_tokens", "use 4bit", "gpu_memory"):
        assert setting in raised.value.hint


def test_gpus_are_compared_by_their_names_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    fleet = FleetEngine(devices=[[1], [3]], vllm={"model": "m"})
    found = plan(*fleet.processes, device="cuda:1")
    assert found.gpu_shares == {"3": 0.42}
    with_gpu_shares({"lm": fleet}, found.gpu_shares)
    assert [engine._gpu_memory_left for engine in fleet.processes] == [None, 0.42]
    find = with_gpu_shares(lambda lm: VLLMEngine(lm), {"5": 0.3})
    assert callable(find)
    made = find("m")
    assert isinstance(made, VLLMEngine)
    assert made._gpu_memory_left == 0.3
