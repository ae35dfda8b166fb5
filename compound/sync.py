"""The sync doors: run, evaluate, optimize and list from ordinary code."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compound.blocking import blocking
from compound.budget import Budget
from compound.cache import DiskCache
from compound.calls import Engines
from compound.contracts import Metric
from compound.data import Dataset, Split
from compound.engines import find_engine
from compound.errors import DataError, DeclarationError, RunDirectoryError, nearest
from compound.evaluation import Evaluation, OnTrace, Rules
from compound.evaluation import evaluate as evaluate_async
from compound.executor import Executor
from compound.metrics import Scoring, as_metric
from compound.optimizing import Result, read_result
from compound.optimizing import optimize as run_optimization
from compound.paths import cache_folder
from compound.ports import convert, spell
from compound.progress import watching
from compound.settings import OptimizeSettings, make_settings
from compound.store import read_json
from compound.system import System
from compound.trace import Trace


def run(
    system: System,
    inputs: Mapping[str, Any],
    *,
    engines: Engines | None = None,
    seed: int = 0,
    sample: int = 0,
) -> Trace:
    """Run ``system`` on one set of inputs and return its trace; use `Executor` inside async code.

    ``engines`` gives models by name; without it, names are resolved as in YAML (``smollm2``,
    ``openai/gpt-4o-mini`` …).
    """

    async def once() -> Trace:
        executor = Executor(engines or find_engine, seed=seed)
        try:
            return await executor.run(system, inputs, sample=sample)
        finally:
            await executor.aclose()

    return blocking(once())


def evaluate(
    system: System,
    data: Dataset,
    metric: Metric | Scoring,
    split: Split = "valid",
    *,
    limit: int | None = None,
    repeats: int = 1,
    settings: OptimizeSettings | None = None,
    engines: Engines | None = None,
    cache: bool = True,
    on_trace: OnTrace | None = None,
) -> Evaluation:
    """Run and score ``system`` on a split of ``data``.

    Outcomes of equal calls are kept in the user's cache folder and shared between evaluations, unless
    ``cache`` is false.

    Raises:
        DataError: the split is empty.
        TooManyFailures: more runs failed than ``settings.max_failed`` allows.
    """
    settings = settings or OptimizeSettings()
    examples = data.examples(split, list(system.inputs), limit=limit, seed=settings.seed)
    if not examples:
        raise DataError(f"the {split} split is empty")
    rules = Rules(settings.concurrency, settings.failure_score, settings.max_failed, cache)

    async def all_of_them() -> Evaluation:
        store = DiskCache(cache_folder() / "evaluate.sqlite") if cache else None
        executor = Executor(engines or find_engine, cache=store, seed=settings.seed)
        try:
            return await evaluate_async(
                executor,
                system,
                examples,
                as_metric(metric),
                samples=range(repeats),
                rules=rules,
                on_trace=on_trace,
            )
        finally:
            await executor.aclose()
            if store is not None:
                store.close()

    return blocking(all_of_them())


def optimize(
    system: System,
    data: Dataset,
    metric: Metric | Scoring,
    *,
    budget: Budget | None = None,
    settings: OptimizeSettings | None = None,
    run_dir: str | Path | None = None,
    engines: Engines | None = None,
    progress: bool = True,
    **changes: Any,
) -> Result:
    """Optimize a system, or go on with an interrupted run in the same directory.

    Args:
        system: what to optimize, bound to the configuration to start from.
        data: train, validation and test examples.
        metric: the number to raise, or a function of outputs and example that returns it.
        budget: hard limits; replaces ``settings.budget``.
        settings: everything else; see `OptimizeSettings`.
        run_dir: where the run is recorded; ``runs/<system name>`` by default.
        engines: models by name; resolved by convention when left out.
        progress: show progress on stderr.
        **changes: single settings, such as ``method="search"`` or ``seed=1``.

    Raises:
        RunDirectoryError: the directory holds a finished run, or one of another configuration.
    """
    base = (settings or OptimizeSettings()).model_dump(exclude_unset=True)
    if budget is not None:
        base["budget"] = asdict(budget)
    resolved = make_settings({**base, **changes})
    with watching(resolved.budget.model_dump(), quiet=not progress) as listener:
        return run_optimization(
            system, data, as_metric(metric), resolved, run_dir=run_dir, engines=engines, listener=listener
        )


def load_system(path: str | Path, *, allow_import: bool = True) -> System:
    """Read the system of a YAML file; ``allow_import=False`` refuses files that name Python code."""
    program = importlib.import_module("compound.spec").load(Path(path), allow_import=allow_import)
    system: System = program.system
    return system


def read_inputs(system: System, arguments: Sequence[str]) -> dict[str, Any]:
    """Turn ``NAME=VALUE`` arguments into the system's inputs.

    Raises:
        DeclarationError: an argument has another form, names no input, or does not fit its type.
    """
    values: dict[str, Any] = {}
    for argument in arguments:
        name, separator, text = argument.partition("=")
        if not separator:
            raise DeclarationError(
                f"{argument!r} must be NAME=VALUE", hint=f"inputs: {', '.join(system.inputs)}"
            )
        if name not in system.inputs:
            raise DeclarationError(f"no input {name!r}", hint=nearest(name, system.inputs))
        values[name] = _value(name, text, system.inputs[name])
    return values


def _value(name: str, text: str, kind: Any) -> Any:
    if kind is str:
        return text
    try:
        return convert(kind, json.loads(text))
    except ValueError:
        try:
            return convert(kind, text)
        except ValueError:
            raise DeclarationError(f"input {name!r} must be {spell(kind)}, but got {text!r}") from None


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the run directories in a folder: where, finished or not, and the result."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not (path / "config.json").exists():
            continue
        try:
            config = read_json(path, "config.json")
            done = read_json(path, "checkpoint.json")["state"].get("done", False)
            result = read_result(path)
        except (RunDirectoryError, KeyError):
            found.append({"run": str(path), "system": "", "status": "begun", "result": ""})
            continue
        before, after = result.test_before or result.before, result.test_after or result.after
        split = "test" if result.test_after else "valid"
        found.append(
            {
                "run": str(path),
                "system": config.get("system", ""),
                "status": "finished" if done else "unfinished",
                "result": f"{split} {before.mean:.3f} -> {after.mean:.3f}, {result.accepted} accepted",
            }
        )
    return found
