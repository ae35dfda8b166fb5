"""The runs of a sweep, executed in this process or as tasks of a cluster.

A task gets text and returns text. It rebuilds the system from its file, as workers do, and writes
to the sweep's directory, which all machines must share. A lost task is resumed from its last
checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import platform
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from compound.api.description import describe
from compound.api.optimize import make_problem, run_optimization
from compound.api.runners import source_of
from compound.cluster.handshake import SAME, WorkerMismatch, facts_of, first_difference, rebuild
from compound.cluster.messages import Document, Facts, WorkerLost, WorkerMessage
from compound.cluster.ray_cluster import RayTasks
from compound.core.errors import CompoundError, DeclarationError, RunDirectoryError, first_leaf
from compound.core.security.untrusted import UntrustedFolder
from compound.optimization.method import Problem
from compound.optimization.runs.directory import load_checkpoint
from compound.optimization.runs.recorder import STOP, Interrupted, Listener, Recorder
from compound.optimization.settings.base import RaySettings
from compound.optimization.settings.optimize import OptimizeSettings
from compound.yaml.program import Program, SystemFile

Watch = Callable[[Mapping[str, Any]], AbstractContextManager[Listener]]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep."""

    file: str
    method: str
    seed: int
    path: Path
    program: Program = field(repr=False, compare=False)
    inapplicable: str = ""  # why the method is not applicable to the system

    @property
    def settings(self) -> OptimizeSettings:
        """The settings of the run."""
        return self.program.optimize.model_copy(update={"method": self.method, "seed": self.seed})

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
                program.system,
                program.data,
                program.metric,
                self.settings,
                program.find_engine,
                program.folder,
            )
        except CompoundError:
            return None

    def without_runner(self) -> PlannedRun:
        """Return the run, with its examples in the process that executes it."""
        optimize = self.program.optimize.model_copy(update={"runner": None})
        return replace(self, program=replace(self.program, optimize=optimize))

    def execute(
        self, folder: Path, watch: Watch, stopper: Stopper, calls_of: Sequence[Path] = ()
    ) -> None:
        """Execute or resume the run; a file ``STOP`` in the sweep's folder stops it after its step.

        Calls that runs in ``calls_of`` made are not made again, but charged.

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

            def start(recorder: Recorder) -> None:
                recorder.use_calls_of(*map(UntrustedFolder, calls_of))
                stopper.attach(recorder)

            run_optimization(
                program.system,
                program.data,
                program.metric,
                settings,
                run_dir=self.path,
                engines=program.find_engine,
                folder=program.folder,
                text=program.text,
                listener=listen,
                on_start=start,
            )

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


TOKEN = "cluster-token"  # a file of the sweep's directory while its tasks run


class SweepFile(WorkerMessage):
    """A file of the sweep, and what must be equal on every machine that rebuilds it."""

    source: SystemFile
    facts: Facts


class MachineCheck(WorkerMessage):
    """Check that a machine has the sweep's directory, its code, and the data of its components."""

    folder: str
    token: str
    files: list[SweepFile]


class RunTask(WorkerMessage):
    """Execute a run, after the check of its machine."""

    check: MachineCheck
    method: str
    seed: int
    path: str
    description: Document | None  # from the driver, unless it cannot read the data


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
        try:
            (program,) = _rebuild(task.check)
            place = program.path.stem, task.method, task.seed, Path(task.path)
            run = PlannedRun(*place, program).without_runner()
            _check_description(run, task.description)
        except CompoundError as error:  # the driver does not know where a task runs
            name = f"machine {platform.node()}"
            problem = f"{name} cannot be used: {error.message}"
            raise WorkerMismatch(problem, hint=error.hint) from error
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


def _rebuild(check: MachineCheck) -> list[Program]:
    """Return the programs of a check."""
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
    """Reject data, engines or settings that are not those of the driver."""
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


WATCH_SECONDS = 0.2  # between two looks at the request to stop
RESEND_SECONDS = 1.0  # until a lost process has released its lock of the run directory
Report = Callable[[PlannedRun, str], None]


def cluster_settings(runs: Sequence[PlannedRun]) -> RaySettings:
    """Return the cluster of a sweep.

    Raises:
        DeclarationError: a file names none, or another one.
    """
    runners = {run.file: run.program.optimize.runner for run in runs}
    found = next(iter(runners.values()))
    if found is None or any(runner != found for runner in runners.values()):
        raise DeclarationError(
            "a sweep on a cluster needs the same optimize.runner.ray in every file",
            hint='pass --set "optimize.runner={ray: {workers: 4}}"',
        )
    return found.ray


def open_tasks(settings: RaySettings) -> RayTasks:
    """Return the tasks of a Ray cluster."""
    return RayTasks(
        settings.address, settings.cpus, settings.start_seconds, check_machine, execute_run
    )


@dataclass
class ClusterRuns:
    """Executes runs as tasks: ``settings.workers`` at a time, by default one per machine."""

    runs: Sequence[PlannedRun]
    folder: Path
    settings: RaySettings
    tasks: RayTasks
    report: Report
    log: Callable[[str], None]
    stopper: Stopper

    def __post_init__(self) -> None:
        self._place = UntrustedFolder(self.folder)
        self._resends_left = self.settings.max_restarts
        self._token = secrets.token_hex(16)
        self._files: dict[str, SweepFile] = {}

    async def execute(self) -> None:
        """Check all machines, and execute the unfinished runs.

        Raises:
            CompoundError: there is no cluster, or a machine of it cannot be used; nothing has been
                spent.
        """
        waiting = []
        for number, run in enumerate(self.runs, 1):
            place = f"[{number} of {len(self.runs)}] {run}"
            if run.inapplicable or run.finished:
                self.log(f"{place}: {run.inapplicable or 'finished before'}")
            else:
                waiting.append((run, place))
        if not waiting:
            return
        try:
            machines = await self._check({run.file: run for run, _ in waiting})
            places = asyncio.Semaphore(self.settings.workers or machines)
            watching = asyncio.create_task(self._forward_stop())
            try:
                async with asyncio.TaskGroup() as group:
                    for run, place in waiting:
                        group.create_task(self._run(run, place, places))
            except BaseExceptionGroup as errors:
                raise first_leaf(errors) from None
            finally:
                watching.cancel()
        finally:
            await self.tasks.aclose()
            self._place.remove(TOKEN)
            if self.stopper.is_requested:
                self._place.remove(
                    STOP
                )  # else the same command would stop again instead of resuming

    async def _check(self, runs: dict[str, PlannedRun]) -> int:
        """Check all machines that can run tasks, and return their number."""
        for name, run in runs.items():
            source = source_of(run.program.find_engine)
            self._files[name] = SweepFile(
                source=source, facts=facts_of(run.program.system, run.program.folder)
            )
        self._place.write(TOKEN, self._token)
        check = self._machine_check(list(self._files.values()))
        answers = await self.tasks.check(check.model_dump_json())
        for machine, answer in answers.items():
            found = _read(answer)
            if found.status != "finished":
                raise WorkerMismatch(
                    f"machine {machine} cannot be used: {found.message}", hint=found.hint
                )
        return len(answers)

    def _machine_check(self, files: list[SweepFile]) -> MachineCheck:
        return MachineCheck(folder=str(self.folder.absolute()), token=self._token, files=files)

    async def _forward_stop(self) -> None:
        """Stop the tasks by a file in the sweep's directory when the sweep is asked to stop."""
        while not self.stopper.is_requested:
            if self._place.kind(STOP) is not None:
                self.stopper.stop()
            await asyncio.sleep(WATCH_SECONDS)
        self._place.write(STOP, "")

    async def _run(self, run: PlannedRun, place: str, places: asyncio.Semaphore) -> None:
        async with places:
            if self.stopper.is_requested:
                return
            self.log(place)
            try:
                text = await asyncio.to_thread(self._task, run)
                result = await self._result(text, place)
            except Exception as error:  # noqa: BLE001 - one run's failure must not end the others
                result = TaskResult(status="failed", message=error_text(error))
        if result.status == "interrupted":
            self.stopper.stop()
            return
        problem = result.text if result.status == "failed" else ""
        if not problem and not run.finished:
            problem = (
                f"its task has ended, but {run.path} is not finished here: is the folder shared?"
            )
        self.log(f"{place} failed: {problem}" if problem else f"{place}: finished")
        self.report(run, problem)

    def _task(self, run: PlannedRun) -> str:
        task = RunTask(
            check=self._machine_check([self._files[run.file]]),
            method=run.method,
            seed=run.seed,
            path=str(run.path.absolute()),
            description=described(run),
        )
        return task.model_dump_json()

    async def _result(self, text: str, place: str) -> TaskResult:
        """Run a task, and again if it is lost."""
        while True:
            try:
                return _read(await self.tasks.run(text))
            except WorkerLost as error:
                if self._resends_left == 0:
                    message = f"its task was lost ({error}), and max_restarts is used up"
                    return TaskResult(status="failed", message=message)
                self._resends_left -= 1
                self.log(f"{place} was lost ({error}), and will be resumed")
                await asyncio.sleep(RESEND_SECONDS)


def _read(answer: str) -> TaskResult:
    try:
        return TaskResult.model_validate_json(answer)
    except ValidationError as error:
        reason = " ".join(str(error).splitlines()[:3])[:300]
        return TaskResult(status="failed", message=f"its answer cannot be read: {reason}")
