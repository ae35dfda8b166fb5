"""Sweeps: run several files, methods and seeds with equal budgets, and tabulate the results.

Every run has its own directory below the sweep's. Finished runs are skipped and interrupted runs
resumed, so the same command can be repeated until everything is done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from compound.api.description import FOR_MEMORY, describe
from compound.api.sweeps.controls import CONSTANT, DIRECT, Control
from compound.api.sweeps.runs import (
    ClusterRuns,
    PlannedRun,
    Stopper,
    Watch,
    cluster_settings,
    error_text,
    open_tasks,
)
from compound.core.errors import DeclarationError, RunDirectoryError
from compound.core.loops import run_blocking
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.locking import Lock
from compound.optimization.runs.changes import list_changes
from compound.optimization.runs.directory import write_atomically
from compound.optimization.runs.recorder import STOP, Interrupted
from compound.optimizers import methods
from compound.report.record import Facts
from compound.report.sweep import compare, sweep_page
from compound.yaml import Program

if TYPE_CHECKING:
    from compound.report.sweep import ControlRun, SweepRun

MAY_DIFFER = (
    "optimize.concurrency",
    "optimize.runner",
    "versions.",
    *FOR_MEMORY,
)  # settings that may differ between the runs of a sweep
Log = Callable[[str], None]


def plan(
    programs: Sequence[Program], methods: Sequence[str], seeds: Sequence[int], folder: Path
) -> list[PlannedRun]:
    """Return the runs of a sweep, ordered by seed first, so that every row of the table fills early.

    Raises:
        DeclarationError: a method does not exist, or two files have the same name.
        RunDirectoryError: the folder is a run, or holds runs with other settings.
    """
    if UntrustedFolder(folder).kind("config.json") is not None:
        raise RunDirectoryError(f"{folder} is a run, not a sweep", hint="choose another --run")
    files = [program.path.stem for program in programs]
    for what, given in (("file name", files), ("method", methods), ("seed", seeds)):
        if not given or len(set(given)) < len(given):
            raise DeclarationError(
                f"a sweep needs at least one {what}, and no duplicates, "
                f"but got {', '.join(map(str, given)) or 'none'}"
            )
    # user-defined methods have a colon
    names = {method: re.sub(r"[^\w.-]", "-", method) for method in methods}
    runs = [
        PlannedRun(file, method, seed, folder / file / names[method] / str(seed), program, reason)
        for seed in seeds
        for file, program in zip(files, programs, strict=True)
        for method in methods
        for reason in [_inapplicable_reason(program, method)]
    ]
    for run in runs:
        _check_same_configuration(run)
    return runs


def sweep(
    runs: Sequence[PlannedRun],
    folder: Path,
    *,
    watch: Watch | None = None,
    log: Log = lambda _: None,
    stopper: Stopper | None = None,
    controls: bool = True,
    cluster: bool = False,
) -> Facts:
    """Execute unfinished runs, and write ``sweep.md`` and ``sweep.json`` after every run.

    The controls of a file and seed (`compound.api.sweeps.controls`) follow its runs. A file named
    ``STOP`` in the folder ends the sweep after the current step. On a ``cluster``, which
    ``optimize.runner`` of the files names, each run is a task, several run at a time, and ``watch``
    is not used.

    Raises:
        Interrupted: the sweep was asked to stop; the same call resumes it.
        RunDirectoryError: another sweep uses the folder.
        CompoundError: there is no cluster, or a machine of it does not share the folder, or has
            other code.
    """
    if cluster:
        settings, runs = cluster_settings(runs), [run.without_runner() for run in runs]
        tasks = open_tasks(settings)
    UntrustedFolder(folder).make()
    lock = Lock(UntrustedFolder(folder))  # of two sweeps, each would overwrite the other's table
    try:
        stopper = stopper or Stopper()
        table = _Table(runs, folder, lock, controls)
        table.write()
        if not cluster:
            return _execute_here(
                table, watch or (lambda _: nullcontext(lambda event: None)), log, stopper
            )
        _stop_if_requested(stopper, folder)
        on_cluster = ClusterRuns(runs, folder, settings, tasks, table.report, log, stopper)
        saved = f"stopped; progress is saved in {folder}; run the same command to resume"
        run_blocking(on_cluster.execute(), interrupted=saved)
        for control in chain.from_iterable(map(table.controls_after, runs)):
            _stop_if_requested(stopper, folder)
            table.evaluate(control, log)
        _stop_if_requested(stopper, folder)
        return table.write()
    finally:
        lock.release()


def _execute_here(table: _Table, watch: Watch, log: Log, stopper: Stopper) -> Facts:
    """Execute the unfinished runs and the controls in this process, one after the other."""
    runs, folder = table.runs, table.folder
    facts = table.write()
    for number, run in enumerate(runs, 1):
        place = f"[{number} of {len(runs)}] {run}"
        if run.inapplicable or run.finished:
            log(f"{place}: {run.inapplicable or 'finished before'}")
        else:
            _stop_if_requested(stopper, folder)
            log(place)
            try:
                run.execute(folder, watch, stopper, table.finished_beside(run))
            except KeyboardInterrupt:
                table.write()
                raise
            except Interrupted:
                table.write()
                _stop_if_requested(stopper, folder, always=True)
            except Exception as error:  # noqa: BLE001 - one run's failure must not end the others
                table.failed[run] = error_text(error)
                log(f"{place} failed: {table.failed[run]}")
            facts = table.write()
        for control in table.controls_after(run):
            _stop_if_requested(stopper, folder)
            facts = table.evaluate(control, log)
    return facts


@dataclass
class _Table:
    """The results of a sweep so far."""

    runs: Sequence[PlannedRun]
    folder: Path
    lock: Lock
    has_controls: bool
    failed: dict[PlannedRun, str] = field(default_factory=dict)
    evaluated: list[ControlRun] = field(default_factory=list)

    def report(self, run: PlannedRun, problem: str) -> None:
        """Write the table after the end of a run, which has failed if there is a problem."""
        if problem:
            self.failed[run] = problem
        self.write()

    def evaluate(self, control: Control, log: Log) -> Facts:
        """Evaluate a control, and write the table."""
        log(str(control))
        self.evaluated.append(control.run())
        return self.write()

    def finished_beside(self, run: PlannedRun) -> list[Path]:
        """Return the finished runs whose calls a run may use: those of the same file and seed."""
        if run.settings.budget.minutes is not None:
            return []  # calls of others take no time
        place = run.file, run.seed
        return [r.path for r in self.runs if (r.file, r.seed) == place and r.finished]

    def controls_after(self, run: PlannedRun) -> list[Control]:
        """Return the controls of a run's file and seed if it is the last run of them."""
        same = [other for other in self.runs if (other.file, other.seed) == (run.file, run.seed)]
        is_last = same[-1] is run and not all(other.inapplicable for other in same)
        names = (CONSTANT, DIRECT) if self.has_controls and is_last else ()
        return [Control(name, run.program, run.settings, self.folder) for name in names]

    def write(self) -> Facts:
        """Write the table, and return its facts.

        Raises:
            RunDirectoryError: another sweep may use the folder.
        """
        self.lock.check()
        budgets = {run.file: run.settings.budget.limits() for run in self.runs}
        states = list(_states(self.runs, self.folder, self.failed))
        facts: Facts = compare(states, self.folder, budgets, self.evaluated)
        text = json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomically(self.folder / "sweep.json", text + "\n")
        write_atomically(self.folder / "sweep.md", sweep_page(facts))
        return facts


def _stop_if_requested(stopper: Stopper, folder: Path, *, always: bool = False) -> None:
    place = UntrustedFolder(folder)
    if always or stopper.is_requested or place.kind(STOP) is not None:
        place.remove(STOP)
        raise Interrupted(
            f"stopped; progress is saved in {folder}", hint="run the same command to resume"
        )


def _states(
    runs: Sequence[PlannedRun], folder: Path, failed: Mapping[PlannedRun, str]
) -> Iterator[SweepRun]:
    """Yield each run with its state: ``finished``, ``failed``, ``not applicable`` or ``unfinished``."""
    for run in runs:
        if run.inapplicable:
            status = "not applicable"
        elif run in failed:
            status = "failed"
        else:
            status = "finished" if run.finished else "unfinished"
        yield {
            "file": run.file,
            "method": run.method,
            "seed": run.seed,
            "run": run.path.relative_to(folder).as_posix(),
            "status": status,
            "reason": run.inapplicable or failed.get(run, ""),
        }


def _inapplicable_reason(program: Program, method: str) -> str:
    """Return why a method is not applicable to a system, or ``""``."""
    methods.factory(method, program.folder)
    try:
        methods.method(method, program.system, program.optimize, program.folder)
    except DeclarationError as error:
        return error.message
    return ""


def _check_same_configuration(run: PlannedRun) -> None:
    """Reject a directory whose run has other settings, since the table would compare different things."""
    if run.inapplicable or UntrustedFolder(run.path).kind("config.json") is None:
        return
    problem = run.problem()
    if problem is None:
        return  # missing or invalid data is reported by the run, so that others continue
    keys = list_changes(run.path, describe(problem), MAY_DIFFER)
    if keys:
        raise RunDirectoryError(
            f"{run.path} was started with another configuration; changed: {'; '.join(keys)}",
            hint="all runs of a sweep use the file's settings; choose another --run, or remove that folder",
        )
