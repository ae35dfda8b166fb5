"""Main entry point of optimization: takes a problem, writes a run directory, returns a result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from compound import report as reports
from compound.api.description import describe, open_run, stored_valid_size
from compound.api.result import Result, read_result
from compound.api.runners import executor_opener
from compound.core.errors import FRESH, CompoundError, DataError, RunDirectoryError
from compound.core.example import Example, Metric
from compound.core.loops import run_blocking
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.artifacts import is_reference, leads_outside
from compound.core.storage.paths import run_folder
from compound.core.storage.state import StateError
from compound.evaluation.dataset import Dataset, Split
from compound.evaluation.examples import check_no_overlaps, find_overlaps, read_examples
from compound.evaluation.metrics.custom import check_failure_score
from compound.evaluation.metrics.scoring import check_repeats, check_rows
from compound.execution.executor import Executor
from compound.execution.rng import generator
from compound.execution.sender import Engines
from compound.graph.configuration import Configuration
from compound.graph.registry.engines import find_engine, for_system, with_gpu_shares
from compound.graph.system import System
from compound.optimization.budget_plan import check_budget, check_decidable
from compound.optimization.loop.loop import OptimizationLoop, final_configuration
from compound.optimization.loop.loop import retry_failed as retry_rows
from compound.optimization.method import EarlierRun, Problem
from compound.optimization.preflight import check_libraries, check_prices, outlook
from compound.optimization.runs.directory import UNREADABLE, report_full_disk
from compound.optimization.runs.recorder import MEMORY_FOLDER, Interrupted, Listener, Recorder
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimizers import methods
from compound.optimizers.memory_plan import check_trainable, plan_memory
from compound.report.trackers.tracking import tracked
from compound.rewards.buffer import read_earlier, row_digest

SET_ASIDE = 0.2  # of the train examples, at most, for second looks


def run_optimization(
    system: System,
    data: Dataset,
    metric: Metric,
    settings: OptimizeSettings | None = None,
    *,
    run_dir: str | Path | None = None,
    engines: Engines | None = None,
    folder: Path = Path(),
    text: str = "",
    listener: Listener | None = None,
    on_start: Callable[[Recorder], None] | None = None,
    on_result: Callable[[Result], None] | None = None,
    strict: bool = False,
    retry_failed: bool = False,
    start_from: str | Path | None = None,
) -> Result:
    """Optimize a system, or resume an interrupted run in the same directory.

    Args:
        system, data, metric, settings, run_dir, engines, start_from: see `compound.optimize`.
        folder: folder searched first for code and files named in the settings.
        text: content of the system's YAML file, stored in the run directory.
        listener: receives events during the run.
        on_start: receives the recorder, whose `Recorder.stop` ends the run after the next step.
        on_result: receives the result, before the end of the run is sent to trackers.
        strict: whether to reject examples that occur in several splits; otherwise they are only
            reported.
        retry_failed: whether to rerun the failed test rows of a finished run
            (`compound.optimization.loop.loop`), instead of rejecting it.
    """
    settings = settings or OptimizeSettings()
    path = Path(run_dir) if run_dir is not None else run_folder(system.name)
    size = stored_valid_size(path)
    problem = make_problem(
        system,
        data,
        metric,
        settings,
        engines or find_engine,
        folder,
        valid_size=size,
        start_from=start_from,
    )
    valid = [*problem.valid, *problem.further]
    splits = {"train": problem.train, "valid": valid, "test": problem.test}
    equal = find_overlaps(splits, data.id)
    if strict:
        check_no_overlaps(equal)
    memory = plan_memory(problem)
    memory.check()
    problem = replace(
        problem,
        engines=with_gpu_shares(problem.engines, memory.gpu_shares),
        open_executor=executor_opener(settings, problem.system, engines, problem.method),
    )
    duplicates = [str(item) for item in equal]
    problem = replace(problem, outlook={**outlook(problem), "duplicates": duplicates})
    config = describe(problem)
    new = UntrustedFolder(path).kind("config.json") is None
    with report_full_disk(path):
        run = open_run(path, text, config)
        recorder = Recorder(run, listener=listener)
        if retry_failed:
            _retry(problem, recorder, on_result)
        else:
            _run(problem, recorder, on_start, on_result, new=new)
    return read_result(path)


def _run(
    problem: Problem,
    recorder: Recorder,
    on_start: Callable[[Recorder], None] | None,
    on_result: Callable[[Result], None] | None,
    *,
    new: bool,
) -> None:
    """Run the search, and write the report; always close the recorder.

    A ``new`` run that fails before its first call is deleted, since it would be listed as started.
    """
    state, path = recorder.state, str(recorder.run.path)
    try:
        if on_start is not None:
            on_start(recorder)
        if state.done and state.reported:  # a kill may occur between the two
            raise RunDirectoryError(
                f"{path} holds a finished run",
                hint=f"its report is {recorder.run.path / 'report.md'}; to run again, {FRESH}",
            )
        with tracked(problem.settings.trackers, recorder):
            if not state.done:
                stopped = f"stopped; progress is saved in {path}; optimize with run_dir={path!r} to resume"
                check_stored_folders(problem, recorder)
                with resume_errors(recorder):
                    run_blocking(OptimizationLoop(problem, recorder).run(), interrupted=stopped)
                save_best(problem, recorder)
                recorder.state.done = True
                recorder.event("done")
            _report(recorder, on_result)
    except CompoundError as error:
        if new and recorder.has_no_calls and not isinstance(error, Interrupted):
            recorder.discard()
        raise
    finally:
        recorder.close()


@contextmanager
def resume_errors(recorder: Recorder) -> Iterator[None]:
    """Name the checkpoint if a run cannot be resumed from it.

    The state of a method is validated by the method, which does not know the location of the
    checkpoint.

    Raises:
        RunDirectoryError: the block failed before anything new was recorded.
    """
    step = recorder.run.step
    try:
        yield
    except StateError as error:
        where = f"{recorder.run.path}/checkpoint.json"
        raise RunDirectoryError(
            f"{where} cannot be read: {error.message}", hint=error.hint
        ) from error
    except CompoundError:
        raise
    except UNREADABLE as error:
        if not recorder.resumed or recorder.run.step != step:
            raise
        raise RunDirectoryError(
            f"{recorder.run.path}/checkpoint.json holds a state from which the run cannot be resumed: "
            f"{type(error).__name__}: {error}",
            hint=f"it was damaged, or written by another version: {FRESH}; --debug shows the traceback",
        ) from error


def check_stored_folders(problem: Problem, recorder: Recorder) -> None:
    """Reject a state that refers to a folder outside of the run, unless the system started from it.

    Raises:
        RunDirectoryError: the state does; the message names the entry.
    """
    started = [
        value["sha256"] for value in problem.system.configuration.values() if is_reference(value)
    ]
    search = recorder.state.search
    parts = {"best": search.best, "working": search.working} if search else {}
    for part, values in parts.items():
        for key, value in values.items():
            if (
                is_reference(value)
                and leads_outside(value["path"])
                and value["sha256"] not in started
            ):
                raise RunDirectoryError(
                    f"state.search.{part}.{key} in {recorder.run.path}/checkpoint.json refers to "
                    f"{value['path']!r}, which is outside of the run",
                    hint=f"the run was changed, or moved without that folder: {FRESH}",
                )


def _report(recorder: Recorder, on_result: Callable[[Result], None] | None) -> None:
    """Write the report of a finished run, record that it exists, and pass the result on."""
    reports.write(recorder.run.path)
    recorder.state.reported = True
    recorder.save()
    if on_result is not None:
        on_result(read_result(recorder.run.path))


def _retry(
    problem: Problem, recorder: Recorder, on_result: Callable[[Result], None] | None
) -> None:
    """Rerun the failed test rows of a finished run, and rewrite the report."""
    with closing(recorder):
        if not recorder.state.done:
            raise RunDirectoryError(
                f"{recorder.run.path} is not finished: there are no rows to rerun",
                hint="resume it first: run the same command without --retry-failed",
            )
        with tracked(problem.settings.trackers, recorder):
            with resume_errors(recorder):
                run_blocking(retry_rows(problem, recorder))
            _report(recorder, on_result)


def make_problem(
    system: System,
    data: Dataset,
    metric: Metric,
    settings: OptimizeSettings,
    engines: Engines,
    folder: Path = Path(),
    *,
    valid_size: int | None = None,
    start_from: str | Path | None = None,
) -> Problem:
    """Read the data, bind the system to the result of an earlier run, and resolve the method.

    The arguments are those of `run_optimization`; ``valid_size`` is the number of validation
    examples if the settings leave it open (default: by the budget).

    Raises:
        DataError: the train or the validation split is empty, a value does not match the type of
            its input, or an example has no gold value for the metric.
        DeclarationError: the budget of system runs is too small to try anything, or the cost is
            limited and a model has no price.
    """
    if valid_size is None or settings.valid_size != "auto":
        valid_size = settings.valid_examples
    sizes: Mapping[Split, int | None] = {
        "train": settings.train_size,
        "valid": valid_size,
        "test": settings.test_size,
    }
    splits: dict[str, Sequence[Example]] = {}
    for role, size in sizes.items():
        found = data.has(role) and read_examples(
            data, role, system.inputs, limit=size, seed=settings.seed
        )
        splits[role] = found or []
        if not found and role != "test":
            raise DataError(
                f"the {role} split is empty", hint="an optimization needs train and valid examples"
            )
    for rows in splits.values():
        check_rows(metric, system.outputs, rows)
    check_repeats(metric, settings.repeats)
    check_failure_score(metric, settings.failure_score)
    train, further = _further_examples(system, data, settings, splits)
    check_rows(metric, system.outputs, further)
    earlier = EarlierRun()
    if start_from is not None:
        held_out = [*splits["valid"], *further, *splits["test"]]
        earlier = read_earlier(Path(start_from), system, train, held_out)
        system = system.bind({**system.configuration, **earlier.result})
    method = methods.method(settings.method, system, settings, folder, engines)
    check_trainable(method, system, Executor(engines).engine)
    engines = for_system(engines, system)
    given = (system, train, splits["valid"], splits["test"], metric, settings, method, engines)
    problem = Problem(*given, folder, earlier=earlier, further=further).with_method(method)
    for check in (check_decidable, check_budget, check_libraries, check_prices):
        check(problem)
    return problem


def _further_examples(
    system: System,
    data: Dataset,
    settings: OptimizeSettings,
    splits: Mapping[str, Sequence[Example]],
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Return the train examples, and the examples of second looks at a change; see `Problem.further`.

    These are validation examples beyond `valid_size`. If they are too few and a run may only return
    what a test supports, a part of the train examples is set aside for it: of those whose inputs
    occur once only.
    """
    train, valid = splits["train"], splits["valid"]
    known = {example.id for example in valid}
    more = read_examples(data, "valid", system.inputs, limit=2 * len(valid), seed=settings.seed)
    further = [example for example in more if example.id not in known]
    lacking = min(len(valid) - len(further), int(SET_ASIDE * len(train)))
    if settings.accept == "best" or lacking <= 0:
        return train, further
    order = generator(settings.seed, "further").permutation(len(train)).tolist()
    times = Counter(row_digest(example) for rows in splits.values() for example in rows)
    single = [i for i in order if train[i].id not in known and times[row_digest(train[i])] == 1]
    apart = {*single[:lacking]}
    kept = [example for i, example in enumerate(train) if i not in apart]
    return kept, [*further, *(train[i] for i in sorted(apart))]


def save_best(problem: Problem, recorder: Recorder) -> None:
    """Write ``best.json``, and ``promising.json`` if a change scored higher that the run does not return."""
    folder, search = recorder.run.path / MEMORY_FOLDER, recorder.state.search
    found = {"best.json": final_configuration(recorder.state, folder)}
    if search is not None and search.promising is not None and search.promising != search.best:
        found["promising.json"] = Configuration(search.promising).located(folder)
    for name, configuration in found.items():
        configuration.save(
            recorder.run.path / name, system=problem.system.name, signature=problem.system.signature
        )
