"""Interface of an experiment tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

Status = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as its tracker shows it.

    Attributes:
        name: name of the run.
        system: name of the system; the default name of the experiment or project.
        folder: the run directory.
        parameters: settings, models, sizes and versions, by dotted name.
        parent: id of the main run in the tracker, if this run is a baseline.
    """

    name: str
    system: str
    folder: Path
    parameters: Mapping[str, str] = field(default_factory=dict)
    parent: str = ""


class Tracker(Protocol):
    """Connection to one run of an experiment tracker. All methods are called in one thread.

    An optional attribute ``server`` is the address of the server that receives the run. A connection to it is
    tried before the run starts and before it ends.
    """

    def start(self, run: TrackedRun, previous: str) -> str:
        """Start a run, or continue the run with the id ``previous`` if it exists, and return the id.

        Raises:
            DeclarationError: the tracker cannot be reached or is not configured.
        """
        ...

    def log(self, metrics: Mapping[str, float], system_runs: float, at: float, point: int) -> None:
        """Log metrics.

        Args:
            metrics: values by name.
            system_runs: system runs spent so far, the horizontal axis.
            at: time in seconds since the epoch.
            point: number of the point in the run, from 0. If the process is killed after a call and before
                its position is stored, the resumed run repeats the call with the same number.
        """
        ...

    def finish(self, status: Status, files: Sequence[Path]) -> None:
        """Upload files, and end this part of the run."""
        ...
