"""Compare a metric, such as a judge, with human labels of given outputs."""

from __future__ import annotations

import asyncio
import math
import numbers
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import cast

from compound.api.arguments import Rows, to_rows
from compound.core.errors import DataError, DeclarationError, suggest_name
from compound.core.example import Example, Metric
from compound.core.loops import run_blocking
from compound.core.narrowing import report_wrong_arguments
from compound.core.storage.paths import cache_folder
from compound.evaluation.evaluate import EvaluationRules, raise_too_many_failures, score
from compound.evaluation.metrics.judges import Rubric
from compound.evaluation.metrics.scoring import check_rows
from compound.evaluation.rows import read_rows
from compound.evaluation.statistics import Agreement, Weights, agreement_of
from compound.execution.cache import DiskCache
from compound.execution.executor import Executor
from compound.execution.trace import Trace
from compound.graph.registry.engines import GivenEngines, engine_finder

CONCURRENCY = 32
Labelled = tuple[
    Example, Mapping[str, object], float
]  # an example, the outputs for it, and their label


@report_wrong_arguments
def agreement(
    metric: Metric,
    data: str | Path | Rows,
    label: str = "human",
    *,
    outputs: Mapping[str, str] | Collection[str] = (),
    inputs: Collection[str] = (),
    scale: tuple[float, float] | None = None,
    part: str = "",
    weights: Weights = "quadratic",
    engines: GivenEngines | None = None,
    cache: bool = True,
) -> Agreement:
    """Score given outputs with a metric, and return its agreement with human labels as Cohen's kappa.

    Do this before you optimize by a judge: a search finds what the judge likes, not what is good.

    Args:
        metric: the metric, such as `rubric` or `pairwise`.
        data: rows with outputs and labels: a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file,
            a list of dictionaries, or a data frame.
        label: the column with the label of a person.
        outputs: the outputs of the system, or a mapping from their names to columns; default: the
            output that the metric reads, from the column of its name.
        inputs: the columns that are inputs of the system; a judge reads them.
        scale: lowest and highest possible label; default: 1 and the scale of a rubric, else 0 and
            1.
        part: compare this part of the scores, such as a criterion of a rubric, instead of their
            value.
        weights: see `compound.evaluation.metrics.judges.agreement.agreement_of`.
        engines: engines by model name, as in `run`.
        cache: whether to read and write the cache of evaluations.

    Raises:
        DataError: a row lacks a column, or a label is not a number on the scale.
        TooManyFailures: more than half of the outputs could not be scored.

    >>> import compound as cp
    >>> rows = [{"said": "4", "answer": 4, "human": 1}, {"said": "5", "answer": 4, "human": 0}] * 5
    >>> cp.metrics.agreement(cp.metrics.numeric_match("said", "answer"), rows).kappa
    1.0
    """
    own = getattr(metric, "output", None)
    columns = dict(outputs) if isinstance(outputs, Mapping) else {name: name for name in outputs}
    if not columns and isinstance(own, str):
        columns = {own: own}
    if not columns:
        raise DeclarationError(
            f"metric {metric.name!r} does not declare the output it reads",
            hint="pass outputs=[NAME]",
        )
    usual = (1.0, float(metric.scale)) if isinstance(metric, Rubric) else (0.0, 1.0)
    low, high = scale or usual
    if not low < high:
        raise DeclarationError(f"scale must be the lowest and the highest label, got {(low, high)}")
    numbered = (
        read_rows(Path(data)) if isinstance(data, str | Path) else enumerate(to_rows(data), 1)
    )
    source = str(data) if isinstance(data, str | Path) else "row"
    rows = list(_labelled(numbered, source, label, columns, inputs, (low, high)))
    if not rows:
        raise DataError("there are no labelled outputs", hint="add rows")
    check_rows(metric, columns, [example for example, _, _ in rows])
    traces = run_blocking(
        _scored(metric, rows, engines, cache), interrupted="the comparison was interrupted"
    )
    return _compare(metric, traces, [value for _, _, value in rows], part, weights)


def _labelled(
    rows: Iterable[tuple[int, Mapping[str, object]]],
    source: str,
    label: str,
    columns: Mapping[str, str],
    inputs: Collection[str],
    scale: tuple[float, float],
) -> Iterable[Labelled]:
    """Yield the rows as examples, outputs and labels from 0 to 1."""
    low, high = scale
    for number, row in rows:
        place = f"{source}:{number}" if source != "row" else f"row {number}"
        for column in (label, *columns.values(), *inputs):
            if column not in row:
                named = "; set `label` to the column with the labels" if column == label else ""
                raise DataError(
                    f"{place}: no column {column!r}",
                    hint=f"{suggest_name(column, map(str, row))}{named}",
                )
        value = _number(row[label])
        if value is None or not low <= value <= high:
            raise DataError(
                f"{place}: label {label!r} must be a number from {low:g} to {high:g}, got {row[label]!r:.60}",
                hint="pass the scale of the labels",
            )
        given = {name: row[name] for name in inputs}
        example = Example(str(row.get("id", number)), given, row)
        yield (
            example,
            {name: row[column] for name, column in columns.items()},
            (value - low) / (high - low),
        )


def _number(value: object) -> float | None:
    if isinstance(value, numbers.Real):
        number = float(value)
    elif isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return None
    else:
        return None
    return number if math.isfinite(number) else None


async def _scored(
    metric: Metric, rows: list[Labelled], engines: GivenEngines | None, cache: bool
) -> list[Trace]:
    """Score the outputs of each row, in order."""
    store = DiskCache(cache_folder() / "evaluate.sqlite", shared=True) if cache else None
    executor = Executor(engine_finder(engines), cache=store)
    places, rules = asyncio.Semaphore(CONCURRENCY), EvaluationRules()

    async def one(example: Example, outputs: Mapping[str, object]) -> Trace:
        async with places:
            trace = Trace(example.id, "", 0, 0, example.inputs, (), outputs)
            return await score(executor, trace, metric, example, rules)

    try:
        with executor.sharing_failures():
            return list(
                await asyncio.gather(*(one(example, outputs) for example, outputs, _ in rows))
            )
    finally:
        await executor.aclose()
        if store is not None:
            store.close()


def _compare(
    metric: Metric, traces: list[Trace], labels: list[float], part: str, weights: Weights
) -> Agreement:
    scored = [
        (trace, label) for trace, label in zip(traces, labels, strict=True) if trace.failure is None
    ]
    failures = [trace.failure for trace in traces if trace.failure is not None]
    rules = EvaluationRules()
    if len(failures) > rules.max_failed * len(traces):
        counted = Counter(f"{failure.kind}: {failure.message}" for failure in failures)
        raise_too_many_failures(counted.most_common(), len(traces), rules, hint="fix the cause")
    if part and any(part not in trace.parts for trace, _ in scored):
        known = scored[0][0].parts
        raise DeclarationError(
            f"metric {metric.name!r} has no part {part!r}", hint=suggest_name(part, known)
        )
    judged = [trace.parts[part] if part else cast("float", trace.score) for trace, _ in scored]
    same = [trace.parts["consistent"] for trace, _ in scored if "consistent" in trace.parts]
    return agreement_of(
        judged,
        [label for _, label in scored],
        weights,
        failed=len(failures),
        consistent=sum(same) / len(same) if same else None,
    )
