"""Convert arguments of `run`, `evaluate` and `optimize` to typed values, before anything is called.

Unambiguous values are accepted: rows as a list of dictionaries or as a data frame, a metric by its
name, a number of system runs as a budget. Other values are rejected with a hint on the correct
form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, cast

from compound.core.errors import DeclarationError
from compound.core.example import Example, Metric
from compound.core.security.trust import is_store
from compound.evaluation.dataset import ROLES, Dataset, Split
from compound.evaluation.metrics.custom import Scoring, as_metric
from compound.evaluation.metrics.named import METRICS, metric_factory
from compound.evaluation.rows import EXTENSIONS, as_row, class_reader, plain_cell, table_classes
from compound.execution.budget import Budget
from compound.graph.system import System
from compound.optimization.settings.base import BudgetSettings

MAX_ROWS = 10_000_000  # of rows passed in memory


class PolarsFrame(Protocol):
    """A data frame with the interface of polars."""

    def to_dicts(self) -> list[dict[str, object]]:
        """Return the rows."""
        ...


class ArrowTable(Protocol):
    """A table with the interface of pyarrow."""

    def to_pylist(self) -> list[dict[str, object]]:
        """Return the rows."""
        ...


Rows = (
    Iterable[object] | PolarsFrame | ArrowTable
)  # dictionaries, `Example`s (also of DSPy), or a data frame
GivenData = Dataset | str | Path | Mapping[str, Rows] | Rows
GivenMetric = Metric | Scoring | Callable[[str], Metric] | str
GivenBudget = Budget | BudgetSettings | Mapping[str, object] | float


def to_dataset(data: GivenData, *, splits: bool, role: Split = "valid") -> Dataset:
    """Convert an argument to a data set.

    Args:
        data: a `Dataset` or its path, rows by split, or a single set of rows.
        splits: whether separate splits are required; if not, a single set of rows serves as every
            split.
        role: the split as which the path of a single file serves, where separate splits are not
            required.

    Raises:
        DeclarationError: the value has another type, or is a single set of rows where splits are
            required.
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, str | Path):
        is_file = str(data).endswith(EXTENSIONS) if is_store(data) else Path(data).is_file()
        is_single = not splits and is_file
        return Dataset(data, split_by={role: 1.0}) if is_single else Dataset(data)
    if isinstance(data, Mapping):  # a DatasetDict of Hugging Face is one, too
        usual = {} if "valid" in data else {"validation": "valid"}  # in data sets of Hugging Face
        found: dict[str, object] = {
            usual.get(str(name), str(name)): rows for name, rows in data.items()
        }
        unknown = [name for name in found if name not in ROLES]
        if unknown:
            raise DeclarationError(
                f"data has no split {unknown[0]!r}",
                hint="give {'train': rows, 'valid': rows, 'test': rows}",
            )
        read = {role: to_rows(rows, role) for role, rows in found.items()}
        return Dataset.of(read.get("train", ()), read.get("valid", ()), read.get("test", ()))
    rows = to_rows(data)
    if splits:
        raise DeclarationError(
            "data must be divided into splits, but is a single list of rows",
            hint="give {'train': rows, 'valid': rows, 'test': rows}, or cp.Dataset(path)",
        )
    return Dataset.of(train=rows, valid=rows, test=rows)


def to_rows(data: object, role: str = "") -> list[Mapping[str, object]]:
    """Return rows as dictionaries; missing values of a data frame become None."""
    reader = class_reader(features) if (features := getattr(data, "features", None)) else None
    if hasattr(data, "to_dicts"):  # polars
        data = data.to_dicts()
    elif hasattr(data, "collect") and hasattr(data, "collect_schema"):  # a lazy polars frame
        data = data.collect().to_dicts()
    elif hasattr(data, "to_pylist"):  # pyarrow
        reader = table_classes(getattr(data, "schema", None))
        data = data.to_pylist()
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        _check_columns(data.columns, role)
        records = data.to_dict("records")
        data = [{key: plain_cell(value) for key, value in row.items()} for row in records]
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise DeclarationError(
            f"data must be rows, but is {type(data).__name__} {data!r:.60}",
            hint="pass a list of dictionaries, a data frame, a data set of Hugging Face, or cp.Dataset(path)",
        )
    rows = [_row(reader(row) if reader else row, i) for i, row in enumerate(_bounded(data), 1)]
    if not rows:
        raise DeclarationError(
            f"the {role} split of the data has no rows" if role else "data has no rows",
            hint=f"add rows, or omit {role!r}" if role else "pass at least one row",
        )
    return rows


def _check_columns(columns: Iterable[object], role: str) -> None:
    """Reject columns of a data frame that cannot be fields of an example."""
    names = list(columns)
    where = f"the {role} split of the data" if role else "data"
    for name in names:
        if not isinstance(name, str):
            raise DeclarationError(
                f"{where}: column {name!r} must have a text as its name",
                hint="rename the columns: frame.columns = […]",
            )
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise DeclarationError(f"{where}: two columns have the same name: {double}")


def _bounded(rows: Iterable[object]) -> Iterator[object]:
    """Yield rows, at most `MAX_ROWS`: a streamed data set may have no end."""
    for number, row in enumerate(rows, 1):
        if number > MAX_ROWS:
            raise DeclarationError(
                f"data has more than {MAX_ROWS:,} rows",
                hint="pass a part of it, such as dataset.take(1000)",
            )
        yield row


def _row(row: object, number: int) -> Mapping[str, object]:
    if isinstance(row, Example):
        return {**row.gold, **row.inputs, "id": row.id}
    if (found := as_row(row)) is not None:
        return found
    raise DeclarationError(
        f"row {number} of the data must be a dictionary, but is {type(row).__name__} {row!r:.60}",
        hint="such as {'question': 'Which river crosses Lima?', 'answer': 'the Rímac'}",
    )


def resolve_metric(metric: GivenMetric, system: System) -> Metric:
    """Convert an argument to a metric; a name selects the metric of the system's only output.

    Raises:
        DeclarationError: the name is unknown, or the system has several outputs.
    """
    name = next((name for name, factory in METRICS.items() if factory is metric), metric)
    if not isinstance(name, str):
        if callable(metric) or isinstance(metric, Metric):
            return as_metric(
                cast("Scoring | Metric", metric)
            )  # metric factories were replaced by their names
        raise DeclarationError(
            f"metric must be a metric or a function of (outputs, example), but is {metric!r:.80}",
            hint=f"such as cp.metrics.{next(iter(METRICS))}('answer')",
        )
    make = metric_factory(name)
    parameters = inspect.signature(make).parameters
    required = [p for p, kind in parameters.items() if kind.default is kind.empty and p != "output"]
    if required:
        raise DeclarationError(
            f"metric {name!r} needs settings: {', '.join(required)}",
            hint=f"pass the metric itself, such as {'cp.metrics.' if name in METRICS else ''}{name}(…)",
        )
    if "output" not in parameters:
        return make()
    if len(system.outputs) > 1:
        outputs = ", ".join(system.outputs)
        raise DeclarationError(
            f"metric {name!r} needs the output to read: system {system.name!r} has {outputs}",
            hint=f"metric={'cp.metrics.' if name in METRICS else ''}{name}({next(iter(system.outputs))!r})",
        )
    return make(next(iter(system.outputs)))


def check_inputs(system: System, inputs: object) -> Mapping[str, object]:
    """Validate the inputs of one run.

    Raises:
        DeclarationError: they are not a dictionary.
    """
    if isinstance(inputs, Mapping):
        return inputs
    example = ", ".join(f"{name!r}: …" for name in system.inputs)
    raise DeclarationError(
        f"inputs must be a dictionary, but got {type(inputs).__name__}", hint=f"pass {{{example}}}"
    )


def budget_settings(budget: GivenBudget) -> dict[str, object]:
    """Return the limits of a budget by name; a bare number limits the system runs.

    >>> budget_settings(100)
    {'system_runs': 100}
    """
    if isinstance(budget, BudgetSettings):
        return budget.model_dump(exclude_unset=True)
    if isinstance(budget, Budget):
        return asdict(budget)
    if isinstance(budget, Mapping):
        return dict(budget)
    if isinstance(budget, int | float) and not isinstance(budget, bool):
        return {"system_runs": budget}
    raise DeclarationError(
        f"budget must be a Budget or a number of system runs, but is {budget!r:.60}",
        hint="such as cp.Budget(system_runs=400, minutes=20)",
    )
