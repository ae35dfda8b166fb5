"""Synchronous Python API: run, evaluate, optimize and list."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.api.arguments import (
    GivenBudget,
    GivenData,
    GivenMetric,
    budget_settings,
    check_inputs,
    resolve_metric,
    to_dataset,
)
from compound.api.optimize import run_optimization
from compound.api.progress import Watched, progress_display
from compound.api.result import Result, read_result
from compound.api.runners import executor_opener
from compound.core.errors import DataError, DeclarationError, RunDirectoryError, suggest_name
from compound.core.loops import run_blocking
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.paths import cache_folder, run_folder, unused_path
from compound.evaluation.dataset import Split
from compound.evaluation.evaluate import Evaluation, EvaluationRules, OnTrace
from compound.evaluation.evaluate import evaluate as evaluate_async
from compound.evaluation.examples import from_text, read_examples, read_or_stream
from compound.evaluation.metrics.scoring import check_repeats, check_rows
from compound.execution.cache import DiskCache
from compound.execution.executor import Executor
from compound.execution.trace import Trace
from compound.graph.registry.engines import GivenEngines, for_system, resolve_engines
from compound.graph.registry.user_code import check_signature
from compound.graph.system import System
from compound.graph.types import format_type
from compound.optimization.runs.directory import (
    APPENDED,
    CHECKPOINT,
    CONFIG,
    load_checkpoint,
    read_json,
)
from compound.optimization.settings.optimize import (
    GivenSettings,
    OptimizeSettings,
    given_settings,
    make_settings,
)
from compound.yaml import Program
from compound.yaml import load as load_program

if TYPE_CHECKING:
    from compound.report.record import Facts

EVALUATION_SETTINGS = frozenset({"seed", "concurrency", "runner", "failure_score", "max_failed"})


@report_wrong_arguments
def run(
    system: System,
    inputs: Mapping[str, Any],
    *,
    engines: GivenEngines | None = None,
    seed: int = 0,
    sample: int = 0,
    check: bool = True,
) -> Trace:
    """Run ``system`` on one set of inputs and return its trace; use `Executor` inside async code.

    Args:
        system: the system to run, bound to a configuration.
        inputs: a value for each input of the system.
        engines: engines by model name, such as ``{"fast": cp.engines.LiteLLM("openai/gpt-4o-mini")}``.
            Other names are resolved by the system's file, or as in YAML (``smollm2``,
            ``openai/gpt-4o-mini`` …).
        seed: seed of the random streams.
        sample: sample index of the stochastic components.
        check: whether a failed run raises; if false, its trace is returned, without outputs.

    Raises:
        RunFailed: a component failed; the error's ``trace`` holds all calls.
        DeclarationError: an input is missing, unknown or of the wrong type, or a model has no
            engine.
    """
    find = resolve_engines(system, engines)
    values = check_inputs(system, inputs)

    async def once() -> Trace:
        executor = Executor(for_system(find, system), seed=seed)
        try:
            return await executor.run(system, values, sample=sample)
        finally:
            await executor.aclose()

    trace = run_blocking(once(), interrupted=f"the run of {system.name!r} was interrupted")
    return trace.check() if check else trace


@report_wrong_arguments
def evaluate(
    system: System,
    data: GivenData,
    metric: GivenMetric,
    split: Split = "valid",
    *,
    limit: int | None = None,
    repeats: int = 1,
    settings: GivenSettings | None = None,
    engines: GivenEngines | None = None,
    cache: bool = True,
    on_trace: OnTrace | None = None,
    progress: bool = False,
    **changes: object,
) -> Evaluation:
    """Run ``system`` on a split of ``data`` and score it.

    Call results are cached in the user's cache folder and shared between evaluations, unless
    ``cache`` is false, or an engine of your own does not set ``stable_name`` (see `Engine`).

    Args:
        system: the system to evaluate, bound to a configuration.
        data: a `Dataset` or its path, rows by split, or rows: a list of dictionaries or a data
            frame.
        metric: a metric, a function of outputs and example, or the name of a metric of the only
            output.
        split: the split to read; rows without splits, also the path of a single file, serve as any
            split.
        limit: maximum number of examples.
        repeats: number of runs per example.
        settings: seed, concurrency, runner and the treatment of failures; others have no effect.
        engines: engines by model name, as in `run`.
        cache: whether to read and write the cache.
        on_trace: called with each example and its scored trace, in input order.
        progress: show progress on stderr.
        **changes: individual settings: ``seed``, ``concurrency``, ``runner``, ``failure_score``,
            ``max_failed``.

    Raises:
        DataError: the split is empty, a value does not match the type of its input, or an example
            has no gold value for the metric.
        TooManyFailures: more runs failed than ``max_failed`` allows.
    """
    if unused := sorted(changes.keys() - EVALUATION_SETTINGS):
        raise DeclarationError(
            f"evaluate has no setting {unused[0]!r}",
            hint=suggest_name(unused[0], sorted(EVALUATION_SETTINGS)),
        )
    resolved = make_settings({**given_settings(settings), **changes})
    find, scoring = resolve_engines(system, engines), resolve_metric(metric, system)
    data = to_dataset(data, splits=False, role=split)
    examples = (
        read_or_stream(data, split, system.inputs)
        if limit is None
        else read_examples(data, split, system.inputs, limit=limit, seed=resolved.seed)
    )
    if not examples:
        raise DataError(f"the {split} split is empty")
    check_rows(scoring, system.outputs, examples)
    check_repeats(scoring, repeats)
    if on_trace is not None:
        check_signature(on_trace, "on_trace", "example", "trace")
    rules = EvaluationRules(
        resolved.concurrency, resolved.failure_score, resolved.max_failed, cache
    )

    opened = executor_opener(resolved, system, find)

    async def all_of_them(watched: Watched) -> Evaluation:
        store = DiskCache(cache_folder() / "evaluate.sqlite", shared=True) if cache else None
        executor = opened(
            for_system(find, system), cache=store, seed=resolved.seed, on_call=watched.on_call
        )
        watched.begin(executor, system)
        try:
            return await evaluate_async(
                executor,
                system,
                examples,
                scoring,
                samples=range(repeats),
                rules=rules,
                on_trace=watched.on_trace,
            )
        finally:
            await executor.aclose()
            if store is not None:
                store.close()

    kept = "; cached calls are reused if you repeat the call" if cache else ""
    with progress_display({}, quiet=not progress) as listener:
        watched = Watched(listener, len(examples) * repeats, on_trace)
        return run_blocking(
            all_of_them(watched), interrupted=f"the evaluation was interrupted{kept}"
        )


@report_wrong_arguments
def optimize(
    system: System,
    data: GivenData,
    metric: GivenMetric,
    *,
    budget: GivenBudget | None = None,
    settings: GivenSettings | None = None,
    run_dir: str | Path | None = None,
    engines: GivenEngines | None = None,
    progress: bool = True,
    new: bool = False,
    start_from: str | Path | None = None,
    **changes: object,
) -> Result:
    """Optimize a system, or resume an interrupted run in the same directory.

    Args:
        system: the system to optimize, bound to the initial configuration.
        data: train, validation and test examples: a `Dataset` or its path, or rows by split, each a
            list of dictionaries or a data frame.
        metric: the metric to maximize, a function of outputs and example, or the name of a
            metric of the only output.
        budget: hard limits; replaces ``settings.budget``. A number is a number of system runs.
        settings: all other settings, as `OptimizeSettings` or as a mapping like the section
            ``optimize`` of a file.
        run_dir: the run directory; default: ``runs/<system name>``.
        engines: engines by model name, as in `run`.
        progress: show progress on stderr.
        new: start a new run next to an existing one, in ``<run_dir>-2`` or the next free number.
        start_from: the directory of an earlier run: the search starts from its result, and uses its
            local rewards.
        **changes: individual settings, such as ``method="search"`` or ``seed=1``, and sections of
            methods.

    Raises:
        RunDirectoryError: the directory holds a finished run, or one of another configuration.
        KeyboardInterrupt: the run was interrupted; the same call resumes it.
    """
    resolved = _resolved(settings, budget, changes)
    find, scoring = resolve_engines(system, engines), resolve_metric(metric, system)
    data = to_dataset(data, splits=True)
    path = Path(run_dir) if run_dir is not None else run_folder(system.name)
    path = unused_path(path) if new else path
    with progress_display(resolved.budget.limits(), quiet=not progress) as listener:
        return run_optimization(
            system,
            data,
            scoring,
            resolved,
            run_dir=path,
            engines=find,
            listener=listener,
            start_from=start_from,
        )


@report_wrong_arguments
def sweep(
    system: System,
    data: GivenData,
    metric: GivenMetric,
    methods: Sequence[str],
    *,
    seeds: Sequence[int] = (0,),
    budget: GivenBudget | None = None,
    settings: GivenSettings | None = None,
    run_dir: str | Path | None = None,
    engines: GivenEngines | None = None,
    controls: bool = True,
    progress: bool = True,
    **changes: object,
) -> Facts:
    """Compare methods on a system, each with the same budget and with every seed, or resume the comparison.

    Args:
        system: the system to optimize, bound to the initial configuration.
        data: train, validation and test examples, as in `optimize`.
        metric: the metric to maximize, as in `optimize`.
        methods: the methods, such as ``["search", "optimas"]``.
        seeds: the seeds of the runs.
        budget: hard limits of each run.
        settings: all other settings of each run, as in `optimize`.
        run_dir: the folder of the sweep, which gets ``sweep.md`` and ``sweep.json``; default:
            ``runs/sweep``.
        engines: engines by model name, as in `run`.
        controls: whether to evaluate a constant answer and one direct call of the model on the test
            examples.
        progress: show progress on stderr.
        **changes: individual settings, and sections of methods.

    Returns:
        The content of ``sweep.json``: ``runs``, ``methods`` and more; a failed run has the status
        ``failed``.

    Raises:
        DeclarationError: a method does not exist.
        RunDirectoryError: the folder is a run, or holds runs with other settings.
        Interrupted: the sweep was asked to stop; the same call resumes it.
    """
    from compound.api.sweeps.sweep import plan
    from compound.api.sweeps.sweep import sweep as run_sweep

    program = Program(
        Path(f"{system.name}.yaml"),
        "",
        system,
        to_dataset(data, splits=True),
        resolve_metric(metric, system),
        _resolved(settings, budget, changes),
        resolve_engines(system, engines),
    )
    folder = Path(run_dir) if run_dir is not None else run_folder("sweep")
    return run_sweep(
        plan([program], methods, seeds, folder),
        folder,
        controls=controls,
        watch=lambda limits: progress_display(limits, quiet=not progress),
    )


def _resolved(
    settings: GivenSettings | None, budget: GivenBudget | None, changes: Mapping[str, object]
) -> OptimizeSettings:
    base = given_settings(settings)
    if budget is not None:
        base["budget"] = budget_settings(budget)
    return make_settings({**base, **changes})


@report_wrong_arguments
def load_result(path: str | Path) -> Result:
    """Return the result of a finished run, equal to the one that `optimize` returned.

    Only the run directory is read: it may be read-only, and neither data nor models are needed.

    Args:
        path: the run directory, such as ``runs/qa``.

    Raises:
        RunDirectoryError: it is not a run directory, one of its files is damaged, or the run is
            unfinished.
    """
    folder = UntrustedFolder(path)
    read_json(folder, "config.json")
    stored = load_checkpoint(folder)
    if stored is None or not stored.state.done:
        raise RunDirectoryError(
            f"{path} holds a run that is not finished",
            hint="resume it with the command that started it; `compound runs report` shows its "
            "results so far",
        )
    return read_result(path)


@report_wrong_arguments
def load_system(
    path: str | Path, *, allow_import: bool = True, trust: Collection[str] = ()
) -> System:
    """Load the system of a YAML file, with the engines that it names.

    ``allow_import=False`` rejects files that name Python code. ``trust`` lists trusted servers and
    keys named in the file, such as ``["LLM_KEY@llm.example.com"]``.
    """
    return load_program(Path(path), allow_import=allow_import, trust=trust).system


def read_inputs(system: System, arguments: Sequence[str]) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` arguments as the system's inputs.

    Raises:
        DeclarationError: an argument is malformed, its name is unknown or repeated, its value has
            the wrong type, or an input is missing.
    """
    values: dict[str, Any] = {}
    for argument in arguments:
        name, separator, text = argument.partition("=")
        if not separator:
            raise DeclarationError(
                f"{argument!r} must be NAME=VALUE", hint=f"inputs: {', '.join(system.inputs)}"
            )
        if name not in system.inputs:
            raise DeclarationError(f"unknown input {name!r}; {suggest_name(name, system.inputs)}")
        if name in values:
            raise DeclarationError(
                f"input {name!r} is given twice", hint="give one value for each input"
            )
        kind = system.inputs[name]
        try:
            values[name] = from_text(kind, text)
        except ValueError:
            raise DeclarationError(
                f"input {name!r} must be {format_type(kind)}, but got {text!r}"
            ) from None
    for name, kind in system.inputs.items():
        if name not in values:
            raise DeclarationError(
                f"system {system.name!r} needs input {name!r}: {format_type(kind)}",
                hint=f"write {name}=VALUE",
            )
    return values


def run_directories(folder: Path, levels: int = 4) -> list[Path]:
    """Return the run directories in a folder, and folders that cannot be inspected.

    Raises:
        RunDirectoryError: the folder cannot be read.
    """
    found = []
    parent = UntrustedFolder(folder)
    for name in parent.names():
        path = folder / name
        try:
            if UntrustedFolder(path).kind(CONFIG) is not None:
                found.append(path)
            elif levels > 1 and parent.kind(name) == "folder":
                found += run_directories(path, levels - 1)
        except RunDirectoryError:
            found.append(path)
    return found


def is_run(path: Path) -> bool:
    """Return whether a folder contains files of a run, or cannot be inspected."""
    folder = UntrustedFolder(path)
    try:
        return any(folder.kind(name) is not None for name in (CONFIG, CHECKPOINT, *APPENDED))
    except RunDirectoryError:
        return True
