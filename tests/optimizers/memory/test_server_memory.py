"""Shares of vLLM servers on the GPU of a trainer, on a device of 80 GiB of which 78 GiB are free."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from compound.core.errors import CompoundError
from compound.engines.fleet import FleetEngine
from compound.engines.local import footprint
from compound.engines.vllm.engine import VLLMEngine
from compound.graph.registry.engines import with_gpu_shares
from compound.optimizers.memory_plan import Demand, ServerPlan, own_servers, plan_servers

GIB = 2**30


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(footprint, "free_memory", lambda _: 78 * GIB)
    monkeypatch.setattr(footprint, "total_memory", lambda _: 80 * GIB)


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
    assert found.trainers == [trainer()]
    assert found.notes == [
        "the vLLM server of 'm' gets 0.42 of the memory of cuda:0 (--gpu-memory-utilization), which the "
        "trainer leaves"
    ]


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
    assert plan(VLLMEngine("m")) == ServerPlan(trainers=[trainer()])


def test_a_trainer_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(CompoundError, match="leaves no memory of cuda:0 for the vLLM") as raised:
        plan(VLLMEngine("m"), working=90)
    for setting in ("sleep: true", "lower micro_tokens", "use 4bit", "gpu_memory"):
        assert setting in raised.value.hint


def test_with_sleep_activations_are_no_reason_to_refuse() -> None:
    assert plan(VLLMEngine("m", sleep=True), working=90).shares == {"0": 0.67}
    assert plan(VLLMEngine("m", gpu_memory=0.3), working=90).shares == {}


def test_gpus_are_compared_by_their_names_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
        assert found.trainers == [trainer(device=device)]
        assert found.notes == [
            "sleep of the engine of 'm' has no effect: no trainer computes on its GPU (0)"
        ]


def test_servers_that_others_started_are_not_planned() -> None:
    running = VLLMEngine("m", api_base="http://127.0.0.1:8000/v1")
    fleet = FleetEngine(["http://127.0.0.1:8000/v1"], vllm={"model": "m"})
    assert own_servers([running, fleet]) == []
