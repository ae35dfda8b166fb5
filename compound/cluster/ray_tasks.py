"""Tasks of a Ray cluster. Ray transmits their functions by name, and texts as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from compound.cluster.pool import WorkersLost
from compound.cluster.ray_cluster import RayCluster, losses
from compound.cluster.transport import WorkerLost

Function = Callable[[str], str]


class RayTasks:
    """Runs tasks on a Ray cluster; see `compound.cluster.tasks.Tasks`.

    Args:
        address: address of the cluster; see `RayCluster`.
        cpus: processors that each task reserves.
        start_seconds: maximum time in which every machine must answer the check.
        check: the function that checks a machine, of a module.
        run: the function of a task, of a module.

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
        """Check every machine that can run tasks."""
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
        """Run a task; see `Tasks.run`."""
        await self._cluster.connect()
        task = self._cluster.ray.remote(self._run)
        call = task.options(num_cpus=self._cpus, max_retries=0, scheduling_strategy="SPREAD").remote(text)
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
