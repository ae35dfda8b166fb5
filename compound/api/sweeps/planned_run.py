"""One run of a sweep, and how it is executed in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.api.optimize import make_problem, optimize
from compound.errors import CompoundError, RunDirectoryError
from compound.optimization.problem import Problem
from compound.runs.directory import load_checkpoint
from compound.runs.recorder import STOP, Listener, Recorder
from compound.security.untrusted import UntrustedFolder
from compound.settings.optimize import OptimizeSettings

if TYPE_CHECKING:
    from compound.spec import Program

Watch = Callable[[Mapping[str, Any]], AbstractContextManager[Listener]]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep.

    Attributes:
        file: name of the system's file, without folder and suffix.
        method: name of the method.
        seed: seed of the random streams.
        path: the run directory.
        program: the program of the file; its method and seed are replaced by those above.
        inapplicable: why the method is not applicable to the system, or ``""``.
    """

    file: str
    method: str
    seed: int
    path: Path
    program: Program = field(repr=False, compare=False)
    inapplicable: str = ""

    @property
    def settings(self) -> OptimizeSettings:
        """The settings of the run."""
        return self.program.optimize.model_copy(
            update={"method": self.method, "seed": self.seed, "baselines": ()}
        )

    @property
    def finished(self) -> bool:
        """Whether the directory holds a finished run; a damaged one does not, and fails when it is run."""
        try:
            stored = load_checkpoint(self.path)
        except RunDirectoryError:
            return False
        return stored is not None and stored.state.done

    def problem(self) -> Problem | None:
        """Return the problem of the run; None if its data is missing or invalid, which the run reports."""
        program = self.program
        assert program.data is not None
        assert program.metric is not None
        try:
            return make_problem(
                program.system, program.data, program.metric, self.settings, program.find_engine,
                program.folder,
            )  # fmt: skip
        except CompoundError:
            return None

    def without_runner(self) -> PlannedRun:
        """Return the run, with its examples in the process that executes it."""
        optimize = self.program.optimize.model_copy(update={"runner": None})
        return replace(self, program=replace(self.program, optimize=optimize))

    def execute(self, folder: Path, watch: Watch, stopper: Stopper) -> None:
        """Execute or resume the run.

        Args:
            folder: the sweep's directory; a file named ``STOP`` in it stops the run after the current step.
            watch: returns a context manager of a listener for the run's events, given its limits.
            stopper: stops the run from outside.

        Raises:
            Interrupted: the run was stopped.
        """
        program, settings = self.program, self.settings
        assert program.data is not None
        assert program.metric is not None
        with watch(settings.budget.limits()) as listener:

            def listen(event: Mapping[str, Any]) -> None:
                if event["event"] != "call" and UntrustedFolder(folder).kind(STOP) is not None:
                    stopper.stop()
                listener(event)

            optimize(
                program.system, program.data, program.metric, settings,
                run_dir=self.path, engines=program.find_engine, folder=program.folder, text=program.text,
                listener=listen, on_start=stopper.attach,
            )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.file}, {self.method}, seed {self.seed}"


@dataclass
class Stopper:
    """Stops a sweep after the current step."""

    is_requested: bool = False
    recorder: Recorder | None = None

    def stop(self) -> None:
        """Request the sweep and the current run to stop."""
        self.is_requested = True
        if self.recorder is not None:
            self.recorder.stop()

    def attach(self, recorder: Recorder) -> None:
        """Set the current run."""
        self.recorder = recorder
        if self.is_requested:
            recorder.stop()


def error_text(error: Exception) -> str:
    """Return the message and the hint of an error, or its class and text if it is not of this package."""
    return str(error) if isinstance(error, CompoundError) else f"{type(error).__name__}: {error}"
