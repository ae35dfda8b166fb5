"""MLflow tracker. ``MLFLOW_TRACKING_URI`` and the other variables of MLflow state where runs are stored."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compound.security.sanitize import sanitize_text
from compound.trackers.tracker import Status, TrackedRun

if TYPE_CHECKING:
    from mlflow.entities import Run

PARENT = "mlflow.parentRunId"  # shows the run below its parent
OWN = "compound.run"  # tag of all runs that were started here
STATUSES: Mapping[Status, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
BATCH = 100  # maximum number of parameters per request
ABSENT = (
    "RESOURCE_DOES_NOT_EXIST",
    "INVALID_PARAMETER_VALUE",
)  # no such run, or an id of another kind of store


class MLflowTracker:
    """Logs to a run of the experiment ``MLFLOW_EXPERIMENT_NAME``, by default named like the system."""

    def __init__(self) -> None:
        from mlflow import MlflowClient

        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # by default it tries for minutes
        self._client = MlflowClient()
        self._id = ""

    @property
    def server(self) -> str:
        """The address of the server, or ``""`` if runs are stored on this machine."""
        address = str(self._client.tracking_uri)
        return address if address.startswith(("http://", "https://")) else ""

    def start(self, run: TrackedRun, previous: str) -> str:
        """Start or continue a run."""
        from mlflow.entities import Param

        found = self._find(previous)
        if found is None:
            tags = {OWN: str(run.folder.absolute())}
            if run.parent:
                tags[PARENT] = run.parent
            found = self._client.create_run(self._experiment(run), tags=tags, run_name=run.name)
        else:
            self._client.update_run(previous, status="RUNNING")
        self._id = str(found.info.run_id)
        # parameters cannot change: those of a resumed run keep their first values
        new = [Param(k, v) for k, v in run.parameters.items() if k not in found.data.params]
        for first in range(0, len(new), BATCH):
            self._client.log_batch(self._id, params=new[first : first + BATCH])
        return self._id

    def log(self, metrics: Mapping[str, float], system_runs: float, at: float, point: int) -> None:
        """Log metrics at a step, the rounded number of system runs."""
        from mlflow.entities import Metric

        step = round(system_runs)
        rows = [Metric(name, value, int(1000 * at), step) for name, value in metrics.items()]
        for first in range(0, len(rows), BATCH):
            self._client.log_batch(self._id, metrics=rows[first : first + BATCH])

    def finish(self, status: Status, files: Sequence[Path]) -> None:
        """Upload files, and end the run."""
        for path in files:
            self._client.log_artifact(self._id, str(path))
        self._client.set_terminated(self._id, STATUSES[status])

    def _find(self, previous: str) -> Run | None:
        """Return the run with an id, unless it was deleted, belongs to another server, or is none of ours.

        The id is read from the run directory, whose author could name any run.
        """
        from mlflow.exceptions import MlflowException

        if not previous:
            return None
        try:
            found = self._client.get_run(previous)
        except MlflowException as error:
            if error.error_code in ABSENT:
                return None
            raise
        return found if found.info.lifecycle_stage == "active" and OWN in found.data.tags else None

    def _experiment(self, run: TrackedRun) -> str:
        """Return the id of the experiment, which is created if it does not exist."""
        if run.parent:
            return str(self._client.get_run(run.parent).info.experiment_id)
        if identity := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return identity
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or sanitize_text(run.system)
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))
