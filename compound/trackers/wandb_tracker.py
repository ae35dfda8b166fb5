"""Weights & Biases tracker. ``WANDB_PROJECT``, ``WANDB_MODE`` and the other variables of W&B apply."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compound.trackers.tracker import Status, TrackedRun

if TYPE_CHECKING:
    import wandb

AXIS = "budget/system_runs"
OWN = re.compile(r"compound-[0-9a-f]{8}")
"""Ids of runs that were started here: W&B's own have no hyphen. Offline, no server could be asked."""
EXIT_CODES: Mapping[Status, int] = {"finished": 0, "interrupted": 130, "failed": 1}


class WandbTracker:
    """Logs to a run of the project ``WANDB_PROJECT``, by default named like the system."""

    def __init__(self) -> None:
        import wandb  # noqa: F401 - to report that it is missing before a connection is tried

        self._run: wandb.Run | None = None

    @property
    def server(self) -> str:
        """The address of the server, or ``""`` if runs are not sent."""
        sends = os.environ.get("WANDB_MODE", "online") in ("online", "shared")
        return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai") if sends else ""

    def start(self, run: TrackedRun, previous: str) -> str:
        """Start or continue a run; baselines are in the group of their main run.

        The id of a previous run is read from the run directory, whose author could name any run.
        """
        import wandb

        identity = previous if OWN.fullmatch(previous) else f"compound-{secrets.token_hex(4)}"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or run.system,
            id=identity,
            name=run.name,
            group=run.parent or identity,
            job_type="baseline" if run.parent else "optimize",
            config=dict(run.parameters),
            resume="allow",
            reinit="create_new",  # baselines run while the main run is open
            save_code=False,
            dir=os.environ.get("WANDB_DIR"),
            settings=wandb.Settings(console="off", disable_git=True, silent=True),
        )
        self._run.define_metric("*", step_metric=AXIS)
        return str(self._run.id)

    def log(self, metrics: Mapping[str, float], system_runs: float, at: float, point: int) -> None:
        """Log metrics over system runs."""
        self._open.log({**metrics, AXIS: system_runs, "_timestamp": at})

    def finish(self, status: Status, files: Sequence[Path]) -> None:
        """Upload files as an artifact of type ``compound-run``, and end the run."""
        import wandb

        run = self._open
        if files:
            artifact = wandb.Artifact(f"run-{run.id}", type="compound-run")
            for path in files:
                artifact.add_file(str(path))
            run.log_artifact(artifact)
        run.finish(exit_code=EXIT_CODES[status])

    @property
    def _open(self) -> wandb.Run:
        if self._run is None:
            raise RuntimeError("the run was not started")
        return self._run
