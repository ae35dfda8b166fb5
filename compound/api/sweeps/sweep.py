"""Sweeps: run several files, methods and seeds in sequence with equal budgets, and tabulate the results.

Every run has its own directory below the sweep's. Finished runs are skipped and interrupted runs resumed, so
the same command can be repeated until everything is done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.api.description import FOR_MEMORY, describe, list_changes
from compound.api.optimize import make_problem, optimize
from compound.api.sweeps.controls import CONSTANT, DIRECT, Control
from compound.errors import CompoundError, DeclarationError, RunDirectoryError
from compound.optimizers import methods
from compound.report import comparison
from compound.runs.directory import load_checkpoint, write_atomically
from compound.runs.recorder import STOP, Interrupted, Listener, Recorder
from compound.security.untrusted import UntrustedFolder
from compound.settings.optimize import OptimizeSettings

if TYPE_CHECKING:
    from compound.report.comparison import SweepFacts, SweepRun
    from compound.spec import Program

MAY_DIFFER = (
    "optimize.concurrency",
    "versions.",
    *FOR_MEMORY,
)  # settings that may differ between the runs of a sweep
Watch = Callable[[Mapping[str, Any]], AbstractContextManager[Listener]]
Log = Callable[[str], None]


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
    names = {method: re.sub(r"[^\w.-]", "-", method) for method in methods}  # user-defined ones have a colon
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
) -> SweepFacts:
    """Execute unfinished runs, and write ``sweep.md`` and ``sweep.json`` after every run.

    The controls of a file and seed (`compound.api.sweeps.controls`) follow its runs.

    Args:
        runs: the runs returned by `plan`.
        folder: the sweep's directory; a file named ``STOP`` in it ends the sweep after the current step.
        watch: returns a context manager of a listener for one run's events, given its limits.
        log: receives one-line messages about the start and end of each run.
        stopper: stops the sweep from outside.
        controls: whether to evaluate a constant answer and one direct call of the model on the test examples.

    Returns:
        The content of ``sweep.json``.

    Raises:
        Interrupted: the sweep was asked to stop; the same call resumes it.
    """
    UntrustedFolder(folder).make()
    stopper = stopper or Stopper()
    table = _Table(runs, folder, _plan_controls(runs, folder) if controls else [])
    facts = table.write()
    for number, run in enumerate(runs, 1):
        place = f"[{number} of {len(runs)}] {run}"
        if run.inapplicable or run.finished:
            log(f"{place}: {run.inapplicable or 'finished before'}")
        else:
            _stop_if_requested(stopper, folder)
            log(place)
            try:
                _run(run, folder, watch or (lambda _: nullcontext(lambda event: None)), stopper)
            except KeyboardInterrupt:
                table.write()
                raise
            except Interrupted:
                table.write()
                _stop_if_requested(stopper, folder, always=True)
            except Exception as error:  # noqa: BLE001 - one run's failure must not end the others
                table.failed[run] = _error_text(error)
                log(f"{place} failed: {table.failed[run]}")
            facts = table.write()
        for control in table.controls_after(run):
            _stop_if_requested(stopper, folder)
            if not control.is_stored:
                log(str(control))
            control.run()
            facts = table.write()
    return facts


@dataclass
class _Table:
    """The results of a sweep so far."""

    runs: Sequence[PlannedRun]
    folder: Path
    controls: Sequence[Control]
    failed: dict[PlannedRun, str] = field(default_factory=dict)

    def controls_after(self, run: PlannedRun) -> list[Control]:
        """Return the controls of a run's file and seed if it is the last run of them."""
        same = [other for other in self.runs if (other.file, other.seed) == (run.file, run.seed)]
        if same[-1] is not run or all(other.inapplicable for other in same):
            return []
        key = (run.file, run.seed)
        return [control for control in self.controls if (control.file, control.settings.seed) == key]

    def write(self) -> SweepFacts:
        """Write the table, and return its facts."""
        budgets = {run.file: run.settings.budget.limits() for run in self.runs}
        results = [result for control in self.controls if (result := control.result)]
        states = list(_states(self.runs, self.folder, self.failed))
        facts: SweepFacts = comparison.compare(states, self.folder, budgets, results)
        text = json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomically(self.folder / "sweep.json", text + "\n")
        write_atomically(self.folder / "sweep.md", comparison.markdown(facts))
        return facts


def _plan_controls(runs: Sequence[PlannedRun], folder: Path) -> list[Control]:
    """Return the controls of each file and seed."""
    first = {(run.file, run.seed): run for run in reversed(runs)}
    return [
        Control(name, run.program, run.settings, folder)
        for run in reversed(first.values())
        for name in (CONSTANT, DIRECT)
    ]


def _run(run: PlannedRun, folder: Path, watch: Watch, stopper: Stopper) -> None:
    program, settings = run.program, run.settings
    assert program.data is not None
    assert program.metric is not None
    with watch(settings.budget.limits()) as listener:

        def listen(event: Mapping[str, Any]) -> None:
            if event["event"] != "call" and UntrustedFolder(folder).kind(STOP) is not None:
                stopper.stop()
            listener(event)

        optimize(
            program.system, program.data, program.metric, settings,
            run_dir=run.path, engines=program.find_engine, folder=program.folder, text=program.text,
            listener=listen, on_start=stopper.attach,
        )  # fmt: skip


def _stop_if_requested(stopper: Stopper, folder: Path, *, always: bool = False) -> None:
    place = UntrustedFolder(folder)
    if always or stopper.is_requested or place.kind(STOP) is not None:
        place.remove(STOP)
        raise Interrupted(f"stopped; progress is saved in {folder}", hint="run the same command to resume")


def _states(runs: Sequence[PlannedRun], folder: Path, failed: Mapping[PlannedRun, str]) -> Iterator[SweepRun]:
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
    program = run.program
    assert program.data is not None
    assert program.metric is not None
    try:
        problem = make_problem(
            program.system, program.data, program.metric, run.settings, program.find_engine, program.folder
        )
    except CompoundError:
        return  # missing or invalid data is reported by the run, so that others continue
    keys = list_changes(run.path, describe(problem), MAY_DIFFER)
    if keys:
        raise RunDirectoryError(
            f"{run.path} was started with another configuration; changed: {'; '.join(keys)}",
            hint="all runs of a sweep use the file's settings; choose another --run, or remove that folder",
        )


def _error_text(error: Exception) -> str:
    return error.message if isinstance(error, CompoundError) else f"{type(error).__name__}: {error}"
