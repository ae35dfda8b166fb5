"""Connect to a Ray cluster, and translate its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from compound.cluster.own_cluster import own_cluster
from compound.cluster.transport import WorkerLost
from compound.errors import CompoundError
from compound.extras import explain_missing

HINT = "start one with `ray start --head`, correct optimize.runner.ray.address, or use address: local"


class ClusterUnavailable(CompoundError):
    """There is no Ray cluster at the address, or it cannot start workers."""


class RayCluster:
    """A cluster, which this process is connected to on first use.

    Args:
        address: address of the cluster: ``auto`` for that of the user, ``local`` to start one on this
            machine, or ``host:port``.

    Attributes:
        ray: the library.

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
                self.ray.init, address=address, namespace="compound", log_to_driver=False,
                include_dashboard=None, logging_level="ERROR",
            )  # fmt: skip
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            raise ClusterUnavailable(
                f"no Ray cluster at address {address!r}: {_line(error, 0)}", hint=HINT
            ) from error
        self._own = True


@contextmanager
def losses() -> Iterator[None]:
    """Raise `WorkerLost` for errors of Ray."""
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        raise WorkerLost(_line(error, -1)) from error


def _line(error: Exception, at: int) -> str:
    """Return a line of an error's text, or its class if it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[at][:300]
