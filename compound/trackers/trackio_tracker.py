"""Trackio tracker. It writes to Trackio's local store, in ``TRACKIO_DIR``: ``trackio show`` shows it.

``trackio.log`` writes in a thread of its own, prints to the standard output and asks the Hub for the name of
the user. Points are therefore passed to Trackio's storage directly, which returns once they are stored and
ignores a point that it already has.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from compound.security.sanitize import sanitize_text
from compound.trackers.tracker import Status, TrackedRun

OWN = "compound.run"  # parameter of all runs that were started here


class TrackioTracker:
    """Logs to a run of the project ``TRACKIO_PROJECT``, by default named like the system."""

    def __init__(self) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self._storage = SQLiteStorage
        self._id = ""
        self._name = ""
        self._project = ""
        self._config: Mapping[str, str | None] | None = None  # stored with the next point

    def start(self, run: TrackedRun, previous: str) -> str:
        """Start or continue a run; baselines are in the group of their main run."""
        self._project = os.environ.get("TRACKIO_PROJECT") or sanitize_text(run.system)
        self._storage.validate_project_name(self._project)
        self._storage.init_db(self._project)
        self._name = run.name
        if previous and self._is_own(previous):
            self._id = previous
            return previous
        self._id = secrets.token_hex(16)
        reserved = {"_Group": run.parent or self._id, "_Created": _text(datetime.now(UTC)), "_Username": None}
        self._config = {**run.parameters, OWN: str(run.folder.absolute()), **reserved}
        return self._id

    def log(self, metrics: Mapping[str, float], system_runs: float, at: float, point: int) -> None:
        """Log metrics at a step, the rounded number of system runs."""
        self._storage.bulk_log(
            self._project,
            self._name,
            [dict(metrics)],
            steps=[round(system_runs)],
            timestamps=[_text(datetime.fromtimestamp(at, UTC))],
            config=dict(self._config) if self._config is not None else None,
            log_ids=[f"{self._id}-{point}"],
            run_id=self._id,
        )
        self._config = None

    def finish(self, status: Status, files: Sequence[Path]) -> None:
        """Do nothing: all points are stored, and the files stay where they are, in the run directory."""

    def _is_own(self, identity: str) -> bool:
        """Return whether a run exists and was started here.

        The id is read from the run directory, whose author could name any run.
        """
        return OWN in (self._storage.get_run_config(self._project, run_id=identity) or {})


def _text(moment: datetime) -> str:
    return moment.isoformat()
