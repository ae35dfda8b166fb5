"""Read examples for a system: check the values of its inputs and, for CSV, convert them.

A data set has columns but no knowledge of the system. The rows are checked before budget is spent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from types import MappingProxyType

from compound.errors import DataError, InvalidRow, raise_all
from compound.evaluation.dataset import Dataset, Split
from compound.evaluation.rows import ClassName, Report, is_finite
from compound.example import Example
from compound.graph.types import accepts, as_declared, convert, format_type, holds_images
from compound.image import MAX_BYTES, Image
from compound.security.untrusted import UntrustedFolder

CSV = (".csv", ".csv.gz")


def read_examples(
    data: Dataset,
    role: Split,
    inputs: Mapping[str, object],
    *,
    limit: int | None = None,
    seed: int | None = None,
    report: Report | None = None,
) -> list[Example]:
    """Return the examples of a role, with values checked against the types of the inputs.

    Args:
        data: the data set.
        role: the split to read.
        inputs: types of the system's inputs by name.
        limit: as in `Dataset.examples`.
        seed: as in `Dataset.examples`.
        report: called with the errors of rows, as in `Dataset.stream`; only without ``limit``.

    Raises:
        DataError: a row is invalid, or a value does not match the type of its input.
    """
    names = list(inputs)
    if report is None:
        found = data.examples(role, names, limit=limit, seed=seed)
    else:
        found = list(data.stream(role, names, report))
    file = data.file(role)
    if file is not None and any(map(holds_images, inputs.values())):
        folder = UntrustedFolder(file.parent, error=DataError)
        found = [_with_images(example, inputs, folder, f"{data.path}, {role} split") for example in found]
    is_csv = file is not None and file.name.endswith(CSV)  # its cells are all strings
    return check_types(found, inputs, f"{data.path}, {role} split", text=is_csv, report=report)


def check_types(
    examples: Sequence[Example],
    inputs: Mapping[str, object],
    where: str,
    *,
    text: bool = False,
    report: Report | None = None,
) -> list[Example]:
    """Check the values of examples against the types of the inputs, converting CSV cells.

    Whole floats become integers where an input is one: a data frame stores a column of integers with missing
    values as floats. An empty CSV cell is ``None`` where an input is optional and not a text. NaN and
    infinity are no values, anywhere in an input, since they have no JSON form.

    Args:
        examples: the raw examples.
        inputs: types of the inputs by name.
        where: location that starts an error message.
        text: whether the values are cells of a CSV file, which are converted.
        report: called with the errors, which are not raised.

    Raises:
        DataError: a value does not match its type; for each input, the message names the first one and the
            number of such rows.

    >>> check_types([Example("a", {"n": "5"})], {"n": int}, "dev.csv", text=True)[0].inputs["n"]
    5
    """
    found: list[Example] = []
    wrong: dict[str, list[Example]] = {}
    for example in examples:
        values = {
            name: _fitting(kind, example.inputs[name], text)
            for name, kind in inputs.items()
            if name in example.inputs
        }
        problems = [
            n for n, kind in inputs.items()
            if n in values
            and (not accepts(kind, as_declared(kind, values[n])) or not is_finite(values[n]))
        ]  # fmt: skip
        for name in problems:
            wrong.setdefault(name, []).append(example)
        converted = any(value is not example.inputs[name] for name, value in values.items())
        found.append(replace(example, inputs=MappingProxyType(values)) if converted else example)
    errors = []
    for name, rows in wrong.items():
        example, kind, value = rows[0], inputs[name], rows[0].inputs[name]
        needed = f"{format_type(kind)}{'' if is_finite(value) else ' with finite numbers only'}"
        problem = f"input {name!r} must be {needed}, but got {value!r:.200}"
        hint = f"correct the data, or the type of {name!r} under inputs"
        said = f"{where}, row {example.id!r}: {problem}"
        count = {"rows": len(rows), "of": len(examples)}
        errors.append(InvalidRow(example.place, said, hint=hint, key=f"input {name!r}", **count))
    if report is None:
        raise_all(errors)
    else:
        for error in errors:
            report(error)
    return found


def _with_images(
    example: Example, inputs: Mapping[str, object], folder: UntrustedFolder, where: str
) -> Example:
    """Return an example in which paths of images are replaced by the images.

    Raises:
        DataError: a path leads out of the folder of the data file, or there is no image at it.
    """
    values = dict(example.inputs)
    for name, kind in inputs.items():
        if holds_images(kind):
            try:
                values[name] = _read_images(values[name], folder)
            except (ValueError, DataError) as error:
                raise DataError(f"{where}, row {example.id!r}: input {name!r}: {error}") from None
    return replace(example, inputs=MappingProxyType(values))


def _read_images(value: object, folder: UntrustedFolder) -> object:
    """Replace each path by the image at it; data URLs and JSON forms are converted later."""
    if isinstance(value, list):
        return [_read_images(item, folder) for item in value]
    if not isinstance(value, str) or value.startswith("data:"):
        return value
    name = PurePosixPath(value)
    if name.is_absolute() or ".." in name.parts:
        raise DataError(f"the path {value!r} must be below the folder of the data file")
    if folder.kind(value) != "file":
        raise DataError(f"there is no image {value!r} beside the data file")
    with folder.reader(value) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise DataError(f"{value!r} is larger than {MAX_BYTES // 2**20} MiB")
    return Image.from_bytes(data)


def _fitting(kind: object, value: object, text: bool) -> object:
    """Return a value, converting a CSV cell, a whole float or a class label to another type if possible."""
    if isinstance(value, ClassName):
        return str(value) if accepts(kind, str(value)) or not accepts(kind, value.number) else value.number
    if isinstance(value, list) and value and all(isinstance(item, ClassName) for item in value):
        names, found = [str(item) for item in value], [item.number for item in value]
        return names if accepts(kind, names) or not accepts(kind, found) else found
    if isinstance(value, float) and value.is_integer() and not accepts(kind, value):
        return int(value) if accepts(kind, int(value)) else value
    if not text or not isinstance(value, str) or accepts(kind, value):
        return value
    if not value and accepts(kind, None):
        return None
    try:
        return from_text(kind, value)
    except ValueError:
        return value


def from_text(kind: object, text: str) -> object:
    """Parse a value of a type from text: as JSON if possible, else from the text itself.

    >>> from_text(int, "5"), from_text(str, "5"), from_text(list[str], '["a"]')
    (5, '5', ['a'])

    Raises:
        ValueError: the text does not represent such a value.
    """
    if kind is str:
        return text
    try:
        return convert(kind, json.loads(text))
    except ValueError:
        return convert(kind, text)
