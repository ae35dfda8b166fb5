"""The laws of `tests/cluster` on a real cluster, with workers killed by Ray and by the system."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

import compound as cp
from clusters.program import FILE, evaluated, local_result, remote_executor, requests, write_program
from compound.api.sweeps.runs import ClusterRuns, MachineCheck, SweepFile
from compound.api.sweeps.sweep import plan, sweep
from compound.cluster.handshake import WorkerMismatch, rebuild
from compound.cluster.messages import WorkerConnection
from compound.cluster.pool import WorkersLost
from compound.cluster.ray_cluster import ClusterUnavailable, RayTransport
from compound.execution.cache import MemoryCache
from compound.optimization.settings.base import RaySettings, RunnerSettings
from compound.yaml.program import SystemFile, load

SWEEP = (
    FILE
    + """
data: {path: rows.jsonl, split_by: {train: 0.4, valid: 0.3, test: 0.3}}
metric: {custom: {call: "parts:score", bounds: [0, 1]}}
optimize: {iterations: 2, candidates: 3, minibatch: 4, valid_size: 6, budget: {system_runs: 40}}
"""
).replace(
    "temperature: 1.0}, in: {text", "temperature: {float: [0.5, 1.5], value: 1.0}}, in: {text"
)

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
    ),
]


@pytest.fixture
def source(tmp_path: Path) -> SystemFile:
    return write_program(tmp_path, seconds=0.01, local=True)


class Watched(RayTransport):
    """Keeps the connections, so that a test can kill actors."""

    def __init__(self) -> None:
        super().__init__("auto", 1.0)
        self.connections: list[WorkerConnection] = []

    async def connect(self, number: int) -> WorkerConnection:
        self.connections.append(await super().connect(number))
        return self.connections[-1]


@pytest.mark.parametrize("workers", [1, 3])
def test_every_number_of_workers_gives_the_results_of_one_process(
    source: SystemFile, workers: int
) -> None:
    evaluations, traces, meter = local_result(source)
    alone = requests(Path(source.path).parent)
    executor = remote_executor(source, RayTransport(), workers, cache=MemoryCache())
    assert asyncio.run(evaluated(executor, rebuild(source).system)) == (evaluations, traces)
    assert requests(Path(source.path).parent) == 2 * alone
    assert executor.meter.usage.calls == meter.usage.calls


def test_by_default_each_node_has_a_worker(source: SystemFile) -> None:
    import ray

    transport = Watched()
    executor = remote_executor(source, transport, None, cache=MemoryCache())
    evaluations, traces, _ = local_result(source)
    nodes = set[str]()

    async def work() -> object:
        await executor.pool.start()
        for connection in transport.connections:
            actor = connection._actor._actor_id.hex()  # type: ignore[attr-defined]
            nodes.add(ray._private.state.actors(actor)["Address"]["NodeID"])
        return await evaluated(executor, rebuild(source).system)

    assert asyncio.run(work()) == (evaluations, traces)
    assert (len(transport.connections), len(nodes)) == (3, 3)


@pytest.mark.parametrize("workers", [1, 3])
def test_killed_workers_change_nothing(source: SystemFile, workers: int) -> None:
    folder = Path(source.path).parent
    evaluations, traces, meter = local_result(source)
    alone = requests(folder)
    transport, notices = Watched(), list[str]()
    executor = remote_executor(
        source, transport, workers, cache=MemoryCache(), notify=notices.append
    )

    async def kill() -> None:
        for number in range(2):
            while requests(folder) < alone + 15 + 20 * number:  # noqa: ASYNC110 - other processes write it
                await asyncio.sleep(0.005)
            await transport.connections[number].aclose()

    async def both() -> object:
        killing = asyncio.create_task(kill())
        try:
            return await evaluated(executor, rebuild(source).system)
        finally:
            killing.cancel()

    assert asyncio.run(both()) == (evaluations, traces)
    assert any("was lost" in notice for notice in notices)
    assert executor.meter.usage.tokens == meter.usage.tokens
    assert executor.meter.system_runs == meter.system_runs


def test_a_worker_that_ends_its_process_is_replaced(tmp_path: Path) -> None:
    source = write_program(tmp_path, local=True)
    expected = local_result(source)[:2]
    code = (tmp_path / "parts.py").read_text()
    (tmp_path / "parts.py").write_text(
        code.replace(
            "def answer(message, rng):",
            f"def answer(message, rng):\n    if os.getpid() != {os.getpid()} and 'topic 7' in message:\n"
            "        try:\n            os.mkdir(LOG + '.died')\n"
            f"            os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
            "        except FileExistsError:\n            pass",
        )
    )
    notices = list[str]()
    executor = remote_executor(
        source, RayTransport(), 2, cache=MemoryCache(), notify=notices.append
    )
    assert asyncio.run(evaluated(executor, rebuild(source).system)) == expected
    assert any("was lost" in notice for notice in notices)


def test_a_worker_without_the_code_is_refused_before_anything_is_spent(
    source: SystemFile, tmp_path: Path
) -> None:
    other = source.model_copy(update={"path": str(tmp_path / "elsewhere" / "system.yaml")})
    executor = remote_executor(source, RayTransport(), 2)
    executor.pool._hello = executor.pool._hello.model_copy(update={"program": other})
    with pytest.raises(WorkerMismatch, match="cannot load the system"):
        asyncio.run(evaluated(executor, rebuild(source).system))
    assert requests(tmp_path) == 0


def test_a_cluster_without_a_free_place_is_reported(source: SystemFile, tmp_path: Path) -> None:
    executor = remote_executor(source, RayTransport("auto", 100.0), 1, start_seconds=2)
    with pytest.raises(WorkersLost, match="did not start within 2 s"):
        asyncio.run(evaluated(executor, rebuild(source).system))
    assert requests(tmp_path) == 0


def test_a_dead_address_is_reported(source: SystemFile, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = RayTransport("127.0.0.1:1")
    monkeypatch.setattr(transport._cluster.ray, "is_initialized", lambda: False)

    def init(**_: object) -> None:
        raise ConnectionError("Could not connect to 127.0.0.1:1")

    monkeypatch.setattr(transport._cluster.ray, "init", init)
    with pytest.raises(ClusterUnavailable, match="no Ray cluster at address '127.0.0.1:1'"):
        asyncio.run(evaluated(remote_executor(source, transport, 1), rebuild(source).system))


def test_evaluate_runs_a_file_on_the_cluster(source: SystemFile, tmp_path: Path) -> None:
    system = cp.load_system(source.path)
    rows = [{"topic": f"topic {i}", "kind": "k", "answer": f"word{i % 5} 1"} for i in range(8)]
    metric = cp.metrics.exact_match("answer")
    expected = cp.evaluate(system, rows, metric, cache=False)
    settings = cp.OptimizeSettings(runner=RunnerSettings(ray=RaySettings(workers=2)))
    assert cp.evaluate(system, rows, metric, cache=False, settings=settings).rows == expected.rows


def test_the_runs_of_a_sweep_are_tasks_and_a_killed_one_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path, SWEEP)
    rows = [
        {"id": f"e{i}", "topic": f"topic {i}", "kind": f"kind {i % 4}", "answer": ""}
        for i in range(60)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = (tmp_path / "parts.py").read_text()
    dies = f"""
    if os.getpid() != {os.getpid()} and len(open(LOG).readlines()) > 200:
        try:
            os.mkdir(LOG + ".died")
            os.kill(os.getpid(), {int(signal.SIGKILL)})
        except FileExistsError:
            pass
"""
    (tmp_path / "parts.py").write_text(
        code.replace('    if "Name the kind"', dies + '    if "Name the kind"')
    )
    said = list[str]()

    def swept(name: str, *, cluster: bool) -> list[tuple[object, ...]]:
        runner = ("optimize.runner", "{ray: {workers: 2}}")
        programs = [load(tmp_path / "system.yaml", overrides=[runner] if cluster else [])]
        planned = plan(programs, ["random", "search"], [0, 1], tmp_path / name)
        facts = sweep(planned, tmp_path / name, cluster=cluster, controls=False, log=said.append)
        return [
            (
                run["method"],
                run["seed"],
                run["status"],
                run["test_before"],
                run["test_after"],
                run["accepted"],
            )
            for run in facts["runs"]
        ]

    expected = swept("here", cluster=False)
    (tmp_path / "requests.log").unlink()
    assert swept("there", cluster=True) == expected
    assert sum("was lost" in line for line in said) == 1
    assert [run[2] for run in expected] == ["finished"] * 4


def test_machines_that_do_not_share_the_folder_of_a_sweep_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program(tmp_path, SWEEP)
    (tmp_path / "rows.jsonl").write_text(
        '{"id": "e", "topic": "t", "kind": "k", "answer": ""}\n' * 9
    )
    program = load(tmp_path / "system.yaml", overrides=[("optimize.runner", "{ray: {workers: 2}}")])
    # a machine that finds another token in the folder, as it would in a folder of its own
    monkeypatch.setattr(ClusterRuns, "_machine_check", _of_another_folder)
    with pytest.raises(
        WorkerMismatch, match=r"machine .* cannot be used: it does not share the sweep's dir"
    ):
        sweep(plan([program], ["random"], [0], tmp_path / "out"), tmp_path / "out", cluster=True)
    assert requests(tmp_path) == 0


def _of_another_folder(self: ClusterRuns, files: list[SweepFile]) -> MachineCheck:
    return MachineCheck(folder=str(self.folder.absolute()), token="another", files=files)
