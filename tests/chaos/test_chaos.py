"""A short form of the fault-injection harness in `chaos`; `make chaos` runs the long one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("litellm")

from chaos.corruption import damaged_runs
from chaos.disk import full_disks
from chaos.faults import faulty_run, healthy_ending
from chaos.kills import killed_runs
from chaos.launcher import Launcher
from chaos.observe import Ending
from chaos.server import Fault
from chaos.workloads import Workload, workloads

WORKLOADS = {workload.name: workload for workload in workloads()}
SMALL = Workload("random", "random", optimize={"budget": {"system_runs": 50}})


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(first_wait=0.05) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def healthy(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Ending:
    return healthy_ending(launcher, SMALL, tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from benchmarks.simulated.toy_model import make_toy_model

    return make_toy_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("search", 24),  # SIGINT, SIGKILL, SIGHUP
        ("gepa", 13),  # SIGHUP, SIGKILL
        ("optimas", 16),  # SIGKILL, SIGTERM
        ("mmgrpo", 12),  # SIGINT, SIGKILL
    ],
)
def test_a_killed_run_ends_as_one_that_was_not(
    name: str, seed: int, launcher: Launcher, model: Path, tmp_path: Path
) -> None:
    for record in killed_runs(launcher, [WORKLOADS[name]], 1, tmp_path, model, seed=seed):
        assert not record.problems, record


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        Fault.RATE_LIMIT,
        Fault.UNAVAILABLE,
        Fault.RESET,
        Fault.TRUNCATED,
        Fault.NULL_CONTENT,
        Fault.SURROGATE,
        Fault.CONTROL,
        Fault.INVALID_JSON,
        Fault.NEGATIVE_USAGE,
        Fault.KEY_IN_ANSWER,
        Fault.KEY_IN_ERROR,
        Fault.QUOTA,
    ],
)
def test_a_faulty_server_is_survived(
    kind: Fault, launcher: Launcher, healthy: Ending, tmp_path: Path
) -> None:
    record = faulty_run(launcher, SMALL, kind, 0.2, tmp_path, healthy, seed=0)
    assert record.injected > 0
    assert not record.problems, record


@pytest.mark.slow
def test_a_damaged_run_directory_is_named_or_makes_no_difference(
    launcher: Launcher, tmp_path: Path
) -> None:
    records = list(damaged_runs(launcher, WORKLOADS["random"], 10, tmp_path, seed=7))
    assert len(records) >= 30
    assert [record for record in records if record.problems] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "limits"),
    [("random", [1_000, 60_000]), ("mmgrpo", [30_000])],  # which optimizer states exceed
)
def test_a_full_disk_loses_nothing(
    name: str, limits: list[int], launcher: Launcher, model: Path, tmp_path: Path
) -> None:
    for record in full_disks(launcher, WORKLOADS[name], limits, tmp_path, model):
        assert not record.problems, record
