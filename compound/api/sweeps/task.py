"""A run of a sweep as a task of a cluster: check the machine, execute the run in its directory, report.

A task gets text and returns text. It rebuilds the system from its file, as workers do, and writes to the
sweep's directory, which all machines must share. A lost task is resumed from its last checkpoint.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from compound.api.description import describe
from compound.api.sweeps.planned_run import PlannedRun, Stopper, error_text
from compound.cluster.handshake import SAME, WorkerMismatch, facts_of, first_difference, rebuild
from compound.cluster.messages import Document, Facts, SystemFile, WorkerMessage
from compound.errors import CompoundError, RunDirectoryError
from compound.runs.recorder import Interrupted
from compound.security.untrusted import UntrustedFolder
from compound.spec.program import Program

TOKEN = "cluster-token"  # a file of the sweep's directory while its tasks run


class SweepFile(WorkerMessage):
    """A file of the sweep, and what must be equal on every machine that rebuilds it."""

    source: SystemFile
    facts: Facts


class MachineCheck(WorkerMessage):
    """Check that a machine has the sweep's directory, its code, and the data of its components.

    Attributes:
        folder: absolute path of the sweep's directory.
        token: content of the file `TOKEN` in it.
        files: the files of the sweep.
    """

    folder: str
    token: str
    files: list[SweepFile]


class RunTask(WorkerMessage):
    """Execute a run, after the check of its machine.

    Attributes:
        check: the check, with the run's file only.
        method: name of the method.
        seed: seed of the random streams.
        path: absolute path of the run directory.
        description: what `describe` returns on the driver; None if the data cannot be read there.
    """

    check: MachineCheck
    method: str
    seed: int
    path: str
    description: Document | None


class TaskResult(WorkerMessage):
    """What became of a task, or of a check; ``message`` and ``hint`` explain all but ``finished``."""

    status: Literal["finished", "failed", "interrupted"]
    message: str = ""
    hint: str = ""

    @property
    def text(self) -> str:
        """Message and hint, as in the text of an error."""
        return f"{self.message}; {self.hint}" if self.hint else self.message


def check_machine(text: str) -> str:
    """Answer a `MachineCheck`."""
    try:
        _rebuild(MachineCheck.model_validate_json(text))
    except Exception as error:  # noqa: BLE001 - code that the file names may raise anything
        return _result("failed", error)
    return TaskResult(status="finished").model_dump_json()


def execute_run(text: str) -> str:
    """Execute or resume the run of a `RunTask`."""
    try:
        task = RunTask.model_validate_json(text)
        with _naming_machine():
            (program,) = _rebuild(task.check)
            path = Path(task.path)
            run = PlannedRun(program.path.stem, task.method, task.seed, path, program).without_runner()
            _check_description(run, task.description)
        run.execute(Path(task.check.folder), lambda _: nullcontext(lambda event: None), Stopper())
    except Interrupted as error:
        return _result("interrupted", error)
    except Exception as error:  # noqa: BLE001 - one run's failure must not end the others
        return _result("failed", error)
    return TaskResult(status="finished").model_dump_json()


def described(run: PlannedRun) -> Document | None:
    """Return what must be equal where a run is planned and where it is executed, as JSON types."""
    problem = run.problem()
    if problem is None:
        return None
    found: Document = json.loads(json.dumps(describe(problem)))
    del found["versions"]  # of libraries; those that matter are compared by `first_difference`
    return found


@contextmanager
def _naming_machine() -> Iterator[None]:
    """Name this machine in errors about it: the driver does not know where a task runs."""
    try:
        yield
    except CompoundError as error:
        name = f"machine {platform.node()}"
        raise WorkerMismatch(f"{name} cannot be used: {error.message}", hint=error.hint) from error


def _rebuild(check: MachineCheck) -> list[Program]:
    """Return the programs of a check.

    Raises:
        CompoundError: the machine does not share the sweep's directory, or has other code or data.
    """
    place = UntrustedFolder(Path(check.folder))
    if place.kind(TOKEN) is None or place.read(TOKEN).decode() != check.token:
        raise RunDirectoryError(
            f"it does not share the sweep's directory, {check.folder}",
            hint="choose a --run in a folder that all machines of the cluster share",
        )
    programs = [rebuild(file.source) for file in check.files]
    for file, program in zip(check.files, programs, strict=True):
        if difference := first_difference(file.facts, facts_of(program.system, program.folder)):
            raise WorkerMismatch(difference, hint=SAME)
    return programs


def _check_description(run: PlannedRun, expected: Mapping[str, Any] | None) -> None:
    """Reject data, engines or settings that are not those of the driver.

    Raises:
        WorkerMismatch: they are not.
    """
    found = described(run)
    if found is None:
        return  # the run reports what is wrong with its data
    if expected is None:
        raise WorkerMismatch(
            "the machine of the command cannot read the data of this run, so it cannot compare them",
            hint=SAME,
        )
    changed = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if changed:
        raise WorkerMismatch(f"its {changed[0]} differ from the driver's", hint=SAME)


def _result(status: Literal["failed", "interrupted"], error: Exception) -> str:
    if isinstance(error, CompoundError):
        return TaskResult(status=status, message=error.message, hint=error.hint).model_dump_json()
    return TaskResult(status=status, message=error_text(error)).model_dump_json()
