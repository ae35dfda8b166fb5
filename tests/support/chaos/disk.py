"""Simulate a full disk during a run, then free it and repeat the command.

The disk is simulated by a limit of the file size (``RLIMIT_FSIZE``), which is available on every
machine. The first file that reaches it fails: the cache, the traces or the events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos.launcher import Launcher
from chaos.observe import ending
from chaos.server import FaultyServer
from chaos.workloads import Workload, answer

COMMAND = ("optimize", "system.yaml", "--run-dir", "run", "--quiet")


@dataclass(frozen=True)
class FullDisk:
    """A run that met a full disk of `limit` bytes for each file and was resumed."""

    limit: int
    codes: tuple[int, ...]
    problems: tuple[str, ...]


def full_disks(
    launcher: Launcher,
    workload: Workload,
    limits: Sequence[int],
    folder: Path,
    model: Path | None = None,
) -> Iterator[FullDisk]:
    with FaultyServer(answer=answer) as server:
        workload.write(folder / "free", server.url, model)
        free = launcher.run(COMMAND, folder / "free")
        assert free.code == 0, free.err
        expected = ending(folder / "free" / "run")
        for limit in limits:
            place = folder / f"limit-{limit}"
            workload.write(place, server.url, model)
            full = launcher.run(COMMAND, place, file_size=limit)
            freed = launcher.run(COMMAND, place)
            problems = []
            if full.code != 2 or full.has_traceback or "disk" not in full.err:
                problems.append(f"exit code {full.code} on a full disk: {full.err[-500:]}")
            if freed.code != 0:
                problems.append(f"exit code {freed.code} afterwards: {freed.err[-500:]}")
            elif ending(place / "run").best != expected.best:
                problems.append("another configuration was found")
            yield FullDisk(limit, (full.code, freed.code), tuple(problems))
