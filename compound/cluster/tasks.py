"""Interface to run functions of texts on the machines of a cluster: by Ray, and in tests in one process."""

from __future__ import annotations

from typing import Protocol


class Tasks(Protocol):
    """Runs tasks: a task receives a text and returns one."""

    async def check(self, text: str) -> dict[str, str]:
        """Run the check on every machine that can run tasks; return the answer of each by its name.

        Raises:
            CompoundError: there is no such machine, or one does not answer.
        """
        ...

    async def run(self, text: str) -> str:
        """Run a task on a machine with a free place and return its answer.

        Raises:
            WorkerLost: its process or its machine is gone.
        """
        ...

    async def aclose(self) -> None:
        """End the tasks that are running, and release what was opened."""
        ...
