"""Workers and tasks on a Ray cluster. Ray transmits functions by name, and texts as they are."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from compound.cluster.messages import WorkerConnection, WorkerLost
from compound.cluster.pool import WorkersLost
from compound.cluster.worker import CallWorker
from compound.core.errors import CompoundError, explain_missing

ADDRESS = "RAY_ADDRESS"  # the environment variable that Ray reads
FILE = Path("ray", "ray_current_cluster")  # written by `ray start`, below Ray's temporary folder
LONGEST = 300  # bytes of an address


def own_cluster() -> str | None:
    """Return the address of the cluster that the environment names, or that this user's ``ray start`` wrote.

    Ray's own ``auto`` would also take the cluster of any other user on the machine. Its answers
    could execute code in this process, so that a file must not lead to it.
    """
    if address := os.environ.get(ADDRESS, "").strip():
        return address
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    try:
        descriptor = os.open(Path(folder) / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return None
        return os.read(descriptor, LONGEST).decode("ascii", "replace").strip() or None
    finally:
        os.close(descriptor)


HINT = (
    "start one with `ray start --head`, correct optimize.runner.ray.address, or use address: local"
)


class ClusterUnavailable(CompoundError):
    """There is no Ray cluster at the address, or it cannot start workers."""


class RayCluster:
    """A cluster, which this process is connected to on first use.

    Its address is ``auto`` for that of the user, ``local`` to start one on this machine, or
    ``host:port``. The attribute ``ray`` is the library.

    Raises:
        MissingExtra: Ray is not installed.
    """

    def __init__(self, address: str) -> None:
        with explain_missing("optimize.runner.ray"):
            import ray
        self.ray = ray
        self._address = address
        self._opening = asyncio.Lock()
        self._own = False

    async def connect(self) -> None:
        """Connect to the cluster, unless this process is connected.

        Raises:
            ClusterUnavailable: there is none at the address.
        """
        async with self._opening:
            if not self.ray.is_initialized():
                await self._open()

    async def machines(self, cpus: float) -> dict[str, str]:
        """Return the machines with at least a number of processors: the id of each by its name.

        Raises:
            ClusterUnavailable: there is none, or no cluster.
        """
        await self.connect()
        found = {
            f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})": str(node["NodeID"])
            for node in await asyncio.to_thread(self.ray.nodes)
            if node["Alive"] and node["Resources"].get("CPU", 0.0) >= cpus
        }
        if not found:
            raise ClusterUnavailable(
                f"no machine of the cluster has {cpus:g} processors, which each worker reserves",
                hint="lower optimize.runner.ray.cpus, or add a machine",
            )
        return found

    async def aclose(self) -> None:
        """Disconnect from the cluster, unless the caller was connected before."""
        if self._own:
            self._own = False
            await asyncio.to_thread(self.ray.shutdown)

    async def _open(self) -> None:
        address = self._address
        if address == "auto":
            if (found := own_cluster()) is None:
                raise ClusterUnavailable(
                    "no Ray cluster of this user was found: neither RAY_ADDRESS nor `ray start` names one",
                    hint=HINT,
                )
            address = found
        try:
            await asyncio.to_thread(
                self.ray.init,
                address=address,
                namespace="compound",
                log_to_driver=False,
                include_dashboard=None,
                logging_level="ERROR",
            )
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            raise ClusterUnavailable(
                f"no Ray cluster at address {address!r}: {_line(error, 0)}", hint=HINT
            ) from error
        self._own = True


@contextmanager
def losses() -> Iterator[None]:
    """Raise `WorkerLost` for errors of Ray."""
    from ray.exceptions import OutOfMemoryError, RayError

    try:
        yield
    except OutOfMemoryError as error:  # its text is a page of advice for Ray's own settings
        raise WorkerLost("its machine ran out of memory") from error
    except RayError as error:
        raise WorkerLost(_line(error, -1)) from error


def _line(error: Exception, at: int) -> str:
    """Return a line of an error's text, or its class if it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[at][:300]


Function = Callable[[str], str]


class RayTasks:
    """Runs tasks on a Ray cluster: functions that receive a text and return one.

    ``check`` runs on every machine, ``run`` on one with a free place.

    Raises:
        MissingExtra: Ray is not installed.
    """

    def __init__(
        self, address: str, cpus: float, start_seconds: float, check: Function, run: Function
    ) -> None:
        self._cluster = RayCluster(address)
        self._cpus, self._start_seconds = cpus, start_seconds
        self._check, self._run = check, run
        self._running: set[object] = set()

    async def check(self, text: str) -> dict[str, str]:
        """Run the check on every machine; return the answers by name, or raise `CompoundError`."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        machines = await self._cluster.machines(self._cpus)
        function, answers = self._cluster.ray.remote(self._check), dict[str, str]()
        pending = {}
        for name, node in machines.items():
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            options = function.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            pending[name] = options.remote(text)
        for name, call in pending.items():
            try:
                async with asyncio.timeout(self._start_seconds):
                    answers[name] = await self._answer(call)
            except TimeoutError:
                raise WorkersLost(
                    f"machine {name} did not answer within {self._start_seconds:g} s",
                    hint="check that Ray can start processes on it, or raise start_seconds",
                ) from None
            except WorkerLost as error:
                raise WorkersLost(f"machine {name} cannot run tasks: {error}") from error
        return answers

    async def run(self, text: str) -> str:
        """Run a task, or raise `WorkerLost` if its machine is gone."""
        await self._cluster.connect()
        task = self._cluster.ray.remote(self._run)
        call = task.options(
            num_cpus=self._cpus, max_retries=0, scheduling_strategy="SPREAD"
        ).remote(text)
        return await self._answer(call)

    async def aclose(self) -> None:
        """End the tasks that are running, and disconnect unless the caller was connected before."""
        for call in self._running:
            with suppress(Exception):  # the cluster may be gone
                await asyncio.to_thread(self._cluster.ray.cancel, call, force=True)
        await self._cluster.aclose()

    async def _answer(self, call: Awaitable[str]) -> str:
        self._running.add(call)
        with losses():
            answer = await call
        self._running.discard(call)
        return answer


class _RayConnection:
    def __init__(self, actor: Any) -> None:  # noqa: ANN401 - an actor, for which Ray has no types
        self._actor = actor

    async def call(self, text: str) -> str:
        import ray

        answer = self._actor.call.remote(text)
        try:
            with losses():
                found: str = await answer
                return found
        except asyncio.CancelledError:
            with suppress(Exception):  # the cluster may be gone
                ray.cancel(answer)
            raise

    async def aclose(self) -> None:
        import ray

        with suppress(Exception):  # the cluster may be gone
            await asyncio.to_thread(ray.kill, self._actor)


class RayTransport:
    """Starts workers on a Ray cluster.

    Raises:
        MissingExtra: Ray is not installed.
    """

    def __init__(self, address: str = "auto", cpus: float = 1.0) -> None:
        self._cluster, self._cpus = RayCluster(address), cpus

    async def machines(self) -> int:
        """Return the number of machines with the processors that a worker reserves."""
        return len(await self._cluster.machines(self._cpus))

    async def connect(self, number: int) -> WorkerConnection:
        """Start a worker; Ray spreads them over machines. See `Transport.connect`."""
        await self._cluster.connect()
        worker = self._cluster.ray.remote(CallWorker)
        actor = worker.options(num_cpus=self._cpus, max_restarts=0, scheduling_strategy="SPREAD")
        return _RayConnection(actor.remote())

    async def aclose(self) -> None:
        """Disconnect from the cluster, unless the caller was connected before."""
        await self._cluster.aclose()
