"""Execute the runs of a sweep as tasks of a cluster, several at a time."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from compound.api.runners import source_of
from compound.api.sweeps.planned_run import PlannedRun, Stopper, error_text
from compound.api.sweeps.task import (
    TOKEN,
    MachineCheck,
    RunTask,
    SweepFile,
    TaskResult,
    check_machine,
    described,
    execute_run,
)
from compound.cluster.handshake import WorkerMismatch, facts_of
from compound.cluster.ray_tasks import RayTasks
from compound.cluster.tasks import Tasks
from compound.cluster.transport import WorkerLost
from compound.errors import DeclarationError, first_leaf
from compound.runs.recorder import STOP
from compound.security.untrusted import UntrustedFolder
from compound.settings.common import RaySettings

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


def open_tasks(settings: RaySettings) -> Tasks:
    """Return the tasks of a Ray cluster."""
    return RayTasks(settings.address, settings.cpus, settings.start_seconds, check_machine, execute_run)


class ClusterRuns:
    """Executes runs as tasks.

    Args:
        runs: the runs; their examples run in the process of their task.
        folder: the sweep's directory, which all machines share.
        settings: ``workers`` is the number of tasks at a time (default: one per machine), and
            ``max_restarts`` the number of lost tasks that are sent again.
        tasks: runs the tasks.
        report: called when a run ends, with the reason if it has failed.
        log: receives one-line messages about the start and end of each run.
        stopper: stops the runs from outside.
    """

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        folder: Path,
        settings: RaySettings,
        tasks: Tasks,
        report: Report,
        log: Callable[[str], None],
        stopper: Stopper,
    ) -> None:
        self._runs = runs
        self._folder, self._place = folder.absolute(), UntrustedFolder(folder)
        self._tasks, self._report, self._log, self._stopper = tasks, report, log, stopper
        self._workers = settings.workers
        self._resends_left = settings.max_restarts
        self._token = secrets.token_hex(16)
        self._files: dict[str, SweepFile] = {}

    async def execute(self) -> None:
        """Check all machines, and execute the unfinished runs.

        Raises:
            CompoundError: there is no cluster, or a machine of it cannot be used; nothing has been spent.
        """
        waiting = []
        for number, run in enumerate(self._runs, 1):
            place = f"[{number} of {len(self._runs)}] {run}"
            if run.inapplicable or run.finished:
                self._log(f"{place}: {run.inapplicable or 'finished before'}")
            else:
                waiting.append((run, place))
        if not waiting:
            return
        try:
            machines = await self._check({run.file: run for run, _ in waiting})
            places = asyncio.Semaphore(self._workers or machines)
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
            await self._tasks.aclose()
            self._place.remove(TOKEN)
            if self._stopper.is_requested:
                self._place.remove(STOP)  # else the same command would stop again instead of resuming

    async def _check(self, runs: dict[str, PlannedRun]) -> int:
        """Check all machines that can run tasks, and return their number."""
        for name, run in runs.items():
            source = source_of(run.program.find_engine)
            self._files[name] = SweepFile(
                source=source, facts=facts_of(run.program.system, run.program.folder)
            )
        self._place.write(TOKEN, self._token)
        check = self._machine_check(list(self._files.values()))
        answers = await self._tasks.check(check.model_dump_json())
        for machine, answer in answers.items():
            found = _read(answer)
            if found.status != "finished":
                raise WorkerMismatch(f"machine {machine} cannot be used: {found.message}", hint=found.hint)
        return len(answers)

    def _machine_check(self, files: list[SweepFile]) -> MachineCheck:
        return MachineCheck(folder=str(self._folder), token=self._token, files=files)

    async def _forward_stop(self) -> None:
        """Stop the tasks by a file in the sweep's directory when the sweep is asked to stop."""
        while not self._stopper.is_requested:
            if self._place.kind(STOP) is not None:
                self._stopper.stop()
            await asyncio.sleep(WATCH_SECONDS)
        self._place.write(STOP, "")

    async def _run(self, run: PlannedRun, place: str, places: asyncio.Semaphore) -> None:
        async with places:
            if self._stopper.is_requested:
                return
            self._log(place)
            try:
                text = await asyncio.to_thread(self._task, run)
                result = await self._result(text, place)
            except Exception as error:  # noqa: BLE001 - one run's failure must not end the others
                result = TaskResult(status="failed", message=error_text(error))
        if result.status == "interrupted":
            self._stopper.stop()
            return
        problem = result.text if result.status == "failed" else ""
        if not problem and not run.finished:
            problem = f"its task has ended, but {run.path} is not finished here: is the folder shared?"
        self._log(f"{place} failed: {problem}" if problem else f"{place}: finished")
        self._report(run, problem)

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
                return _read(await self._tasks.run(text))
            except WorkerLost as error:
                if self._resends_left == 0:
                    message = f"its task was lost ({error}), and max_restarts is used up"
                    return TaskResult(status="failed", message=message)
                self._resends_left -= 1
                self._log(f"{place} was lost ({error}), and will be resumed")
                await asyncio.sleep(RESEND_SECONDS)


def _read(answer: str) -> TaskResult:
    try:
        return TaskResult.model_validate_json(answer)
    except ValidationError as error:
        reason = " ".join(str(error).splitlines()[:3])[:300]
        return TaskResult(status="failed", message=f"its answer cannot be read: {reason}")
