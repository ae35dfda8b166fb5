"""The trackers: MLflow, TensorBoard, and Weights & Biases.

The environment variables of each library state where runs are stored.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from compound.core.security.sanitize import sanitize_text
from compound.core.security.untrusted import UntrustedFolder

if TYPE_CHECKING:
    from mlflow.entities import Run

Status = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as its tracker shows it."""

    name: str
    system: str
    folder: Path
    parameters: Mapping[str, str] = field(default_factory=dict)


class Tracker(Protocol):
    """Connection to one run of an experiment tracker. All methods are called in one thread.

    An optional attribute ``server`` is the address of the server that receives the run. A
    connection to it is tried before the run starts and before it ends.
    """

    def start(self, run: TrackedRun, previous: str) -> str:
        """Start a run, or continue the run with the id ``previous`` if it exists, and return the id.

        Raises:
            DeclarationError: the tracker cannot be reached or is not configured.
        """
        ...

    def log(self, metrics: Mapping[str, float], system_runs: float, at: float) -> None:
        """Log metrics by name, at a number of system runs and a time in seconds since the epoch."""
        ...

    def finish(self, status: Status, files: Sequence[Path]) -> None:
        """Upload files, and end this part of the run."""
        ...


MLFLOW_TAG = "compound.run"  # tag of all runs that were started here
STATUSES: Mapping[Status, str] = {
    "finished": "FINISHED",
    "interrupted": "KILLED",
    "failed": "FAILED",
}
BATCH = 100  # maximum number of parameters per request
# no such run, or an id of another kind of store
ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")


class MLflowTracker:
    """Logs to a run of the experiment ``MLFLOW_EXPERIMENT_NAME``, by default named like the system."""

    def __init__(self) -> None:
        from mlflow import MlflowClient

        # by default it tries for minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        self._client = MlflowClient()

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
            tags = {MLFLOW_TAG: str(run.folder.absolute())}
            found = self._client.create_run(self._experiment(run), tags=tags, run_name=run.name)
        else:
            self._client.update_run(previous, status="RUNNING")
        self._id = str(found.info.run_id)
        # parameters cannot change: those of a resumed run keep their first values
        new = [Param(k, v) for k, v in run.parameters.items() if k not in found.data.params]
        for first in range(0, len(new), BATCH):
            self._client.log_batch(self._id, params=new[first : first + BATCH])
        return self._id

    def log(self, metrics: Mapping[str, float], system_runs: float, at: float) -> None:
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
        is_own = found.info.lifecycle_stage == "active" and MLFLOW_TAG in found.data.tags
        return found if is_own else None

    def _experiment(self, run: TrackedRun) -> str:
        """Return the id of the experiment, which is created if it does not exist."""
        if identity := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return identity
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or sanitize_text(run.system)
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))


FOLDER = "tensorboard"  # in the run directory
PARAMETERS = "parameters"  # tag of the table of parameters


class TensorboardTracker:
    """Logs to the folder ``tensorboard`` of the run directory, with a new event file in each session."""

    def start(self, run: TrackedRun, previous: str) -> str:
        """Create an event file; the id of a run is the name of its folder."""
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = UntrustedFolder(run.folder).below(FOLDER).make()
        name = f"events.out.tfevents.{time.time_ns():020d}.{secrets.token_hex(4)}"
        self._writer = RecordWriter(folder.appender(name))
        self._write(time.time(), file_version="brain.Event:2")
        if not previous:
            rows = [f"| {name} | {_cell(value)} |" for name, value in run.parameters.items()]
            table = "\n".join(["| parameter | value |", "| --- | --- |", *rows])
            self._write(time.time(), summary=text_pb(PARAMETERS, table))
        return FOLDER

    def log(self, metrics: Mapping[str, float], system_runs: float, at: float) -> None:
        """Write scalars at a step, the rounded number of system runs."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(at, step=round(system_runs), summary=Summary(value=values))

    def finish(self, status: Status, files: Sequence[Path]) -> None:
        """Close the event file; the other files stay where they are, in the run directory."""
        self._writer.close()

    def _write(self, at: float, **content: Any) -> None:  # noqa: ANN401
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=at, **content).SerializeToString())
        self._writer.flush()


def _cell(value: str) -> str:
    return sanitize_text(value).replace("|", "\\|").replace("\n", " ")


AXIS = "budget/system_runs"
WANDB_ID = re.compile(r"compound-[0-9a-f]{8}")
"""Ids of runs that were started here: W&B's own have no hyphen. Offline, no server could be asked."""
EXIT_CODES: Mapping[Status, int] = {"finished": 0, "interrupted": 130, "failed": 1}


class WandbTracker:
    """Logs to a run of the project ``WANDB_PROJECT``, by default named like the system."""

    def __init__(self) -> None:
        import wandb  # noqa: F401 - to report that it is missing before a connection is tried

    @property
    def server(self) -> str:
        """The address of the server, or ``""`` if runs are not sent."""
        sends = os.environ.get("WANDB_MODE", "online") in ("online", "shared")
        return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai") if sends else ""

    def start(self, run: TrackedRun, previous: str) -> str:
        """Start or continue a run.

        The id of a previous run is read from the run directory, whose author could name any run.
        """
        import wandb

        identity = previous if WANDB_ID.fullmatch(previous) else f"compound-{secrets.token_hex(4)}"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or run.system,
            id=identity,
            name=run.name,
            job_type="optimize",
            config=dict(run.parameters),
            resume="allow",
            reinit="create_new",  # the user may have a run of their own open
            save_code=False,
            dir=os.environ.get("WANDB_DIR"),
            settings=wandb.Settings(console="off", disable_git=True, silent=True),
        )
        self._run.define_metric("*", step_metric=AXIS)
        return str(self._run.id)

    def log(self, metrics: Mapping[str, float], system_runs: float, at: float) -> None:
        """Log metrics over system runs."""
        self._run.log({**metrics, AXIS: system_runs, "_timestamp": at})

    def finish(self, status: Status, files: Sequence[Path]) -> None:
        """Upload files as an artifact of type ``compound-run``, and end the run."""
        import wandb

        run = self._run
        if files:
            artifact = wandb.Artifact(f"run-{run.id}", type="compound-run")
            for path in files:
                artifact.add_file(str(path))
            run.log_artifact(artifact)
        run.finish(exit_code=EXIT_CODES[status])
