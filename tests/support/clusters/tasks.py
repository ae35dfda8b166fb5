"""Tasks for tests of sweeps on clusters: in threads of this process, or in processes that can die."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping

from compound.api.sweeps.runs import check_machine, execute_run
from compound.cluster.messages import WorkerLost
from compound.cluster.ray_cluster import RayTasks

Edit = Callable[[str], str]


class ThreadTasks(RayTasks):
    """Tasks in threads.

    Args:
        edit: changes each text that a task gets.
        answer: changes each text that a task returns.
        losses: number of tasks that are lost before they begin.
    """

    def __init__(
        self, edit: Edit = lambda text: text, answer: Edit = lambda text: text, losses: int = 0
    ) -> None:
        self._edit, self._edited, self._losses = edit, answer, losses
        self.started = self.running = self.most = 0
        self.closed = False

    async def check(self, text: str) -> dict[str, str]:
        return {name: check_machine(self._edit(text)) for name in ("first", "second")}

    async def run(self, text: str) -> str:
        self.started += 1
        if self.started <= self._losses:
            raise WorkerLost("killed")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return self._edited(await self._execute(self._edit(text)))
        finally:
            self.running -= 1

    async def _execute(self, text: str) -> str:
        return await asyncio.to_thread(execute_run, text)

    async def aclose(self) -> None:
        self.closed = True


class ProcessTasks(ThreadTasks):
    """Tasks in processes, which are lost when they end without an answer.

    Args:
        environment: additional variables of the processes.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._environment = environment

    async def _execute(self, text: str) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "import sys; from compound.api.sweeps.runs import execute_run; "
            "answer = execute_run(sys.stdin.read()); print('\\n' + answer)",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd="/",
            env={
                **os.environ,
                **self._environment,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )
        found, _ = await process.communicate(text.encode())
        if process.returncode:
            raise WorkerLost("its process ended")
        return found.decode().splitlines()[-1]
