"""Read examples for a system: check the values of its inputs, convert those of CSV, and find duplicates.

The rows are checked before budget is spent. Scores on examples that were used for learning say
nothing about new data: examples are compared exactly and after normalisation (`fold`), by digests.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import PurePosixPath
from types import MappingProxyType

from compound.core.errors import DataError, InvalidRow, raise_all
from compound.core.example import Example
from compound.core.image import MAX_BYTES, Image
from compound.core.security.trust import is_store
from compound.core.security.untrusted import UntrustedFolder
from compound.evaluation.dataset import ROLES, Dataset, Split
from compound.evaluation.metrics.text import fold
from compound.evaluation.rows import ClassName, Report, is_finite
from compound.graph.configuration import canonical_json, to_readable_json
from compound.graph.types import accepts, as_declared, convert, format_type, holds_images

CSV = (".csv", ".csv.gz")
CHECKED = 10_000  # examples whose errors are reported together; more are not kept in memory


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

    ``report`` is called with the errors of rows, as in `Dataset.stream`, without ``limit`` only.
    """
    if report is None:
        given = data.examples(role, [*inputs], limit=limit, seed=seed)
    else:
        given = list(data.stream(role, [*inputs], report))
    return list(_checked(data, role, inputs, given, report))


class LargeData(Collection[Example]):
    """The examples of a role, which are read again for each iteration; few of them are in memory."""

    def __init__(
        self, data: Dataset, role: Split, inputs: Mapping[str, object], count: int
    ) -> None:
        self._source, self._count = (data, role, inputs), count

    def __len__(self) -> int:
        return self._count

    def __contains__(self, example: object) -> bool:
        return any(example == other for other in self)

    def __iter__(self) -> Iterator[Example]:
        left = self._count
        for example in _checked(*self._source):
            left -= 1
            yield example
        if left:
            data, role, _ = self._source
            raise DataError(f"{data.path}, {role} split: it was changed while it was read")


def read_or_stream(data: Dataset, role: Split, inputs: Mapping[str, object]) -> Collection[Example]:
    """Return the checked examples of a role, which remain in their file if they are many."""
    examples = _checked(data, role, inputs)
    found = list(itertools.islice(examples, CHECKED))
    more = sum(1 for _ in examples)
    return LargeData(data, role, inputs, len(found) + more) if more else found


def _checked(
    data: Dataset,
    role: Split,
    inputs: Mapping[str, object],
    given: Sequence[Example] | None = None,
    report: Report | None = None,
) -> Iterator[Example]:
    """Yield examples with images and checked values; those of the file are read and checked in parts."""
    file = data.file(role)
    where = f"{data.path}, {role} split"
    is_csv = file is not None and file.name.endswith(CSV)  # its cells are all strings
    rows = iter(data.stream(role, [*inputs]) if given is None else given)
    while found := list(itertools.islice(rows, CHECKED if given is None else None)):
        if file is not None and any(map(holds_images, inputs.values())):
            if is_store(data.path):
                raise DataError(f"{where}: images beside data in a store are not read")
            folder = UntrustedFolder(file.parent, error=DataError)
            found = [_with_images(example, inputs, folder, where) for example in found]
        yield from check_types(found, inputs, where, text=is_csv, report=report)


def check_types(
    examples: Sequence[Example],
    inputs: Mapping[str, object],
    where: str,
    *,
    text: bool = False,
    report: Report | None = None,
) -> list[Example]:
    """Check the values of examples against the types of the inputs; ``report`` receives the errors, if given.

    With ``text``, values are cells of a CSV file, which are converted; an empty one is ``None`` where
    an input is optional and not a text. Whole floats become integers where an input is one, as data
    frames store columns with missing values. NaN and infinity are no values.

    Raises:
        DataError: a value does not match its type; for each input, the message names the first one.

    >>> check_types([Example("a", {"n": "5"})], {"n": int}, "dev.csv", text=True)[0].inputs["n"]
    5
    """
    found: list[Example] = []
    wrong: dict[str, list[Example]] = {}
    for example in examples:
        given = {name: kind for name, kind in inputs.items() if name in example.inputs}
        values = {n: _fitting(kind, example.inputs[n], text) for n, kind in given.items()}
        problems = [
            n
            for n, kind in inputs.items()
            if n in values
            and (not accepts(kind, as_declared(kind, values[n])) or not is_finite(values[n]))
        ]
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
        if accepts(kind, str(value)) or not accepts(kind, value.number):
            return str(value)
        return value.number
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


NAMES = {"train": "train", "valid": "validation", "test": "test"}


@dataclass(frozen=True)
class Overlap:
    """Examples of one split that duplicate examples of another, or earlier ones of the same split.

    ``normalised`` includes the exact ones; ``with_gold`` are those whose other columns are equal too.
    ``example`` are the ids of one pair.
    """

    first: str
    second: str
    exact: int
    normalised: int
    with_gold: int
    example: tuple[str, str]

    @property
    def across(self) -> bool:
        """Whether the splits differ."""
        return self.first != self.second

    def __str__(self) -> str:
        where = (
            f"of the {NAMES[self.second]} examples, {self.normalised} have the inputs of a "
            f"{NAMES[self.first]} example"
            if self.across
            else f"{self.normalised} {NAMES[self.first]} examples repeat the inputs of an earlier one"
        )
        same = f"{self.exact} exactly, {self.normalised - self.exact} after normalisation"
        other = self.normalised - self.with_gold
        gold = f"; {other} of them with different gold values" if other else ""
        return (
            f"{where} ({same}{gold}), such as {self.second} {self.example[1]!r} and {self.first} "
            f"{self.example[0]!r}"
        )


def find_overlaps(splits: Mapping[str, Iterable[Example]], id_column: str = "id") -> list[Overlap]:
    """Return duplicates across and within splits, in the order train, valid, test.

    >>> one, two = Example("a", {"q": "Lima?"}), Example("b", {"q": "  LIMA?"})
    >>> [(o.first, o.second, o.exact, o.normalised) for o in find_overlaps({"train": [one], "test": [two]})]
    [('train', 'test', 0, 1)]
    """
    # by split: for each of the three kinds of digests, the id of the first example that has it
    seen: dict[str, tuple[dict[bytes, str], ...]] = {}
    counts: Counter[tuple[str, str, int]] = Counter()
    examples: dict[tuple[str, str], tuple[str, str]] = {}
    for role in [role for role in ROLES if role in splits]:
        seen[role] = ({}, {}, {})
        for example in splits[role]:
            keys = _digests(example, id_column)
            for other, known in seen.items():
                for kind in range(3):
                    counts[other, role, kind] += keys[kind] in known[kind]
                if keys[1] in known[1]:
                    examples.setdefault((other, role), (known[1][keys[1]], example.id))
            for table, key in zip(seen[role], keys, strict=True):
                table.setdefault(key, example.id)
    pairs = [*combinations(seen, 2), *((role, role) for role in seen)]
    found = [pair for pair in pairs if pair in examples]
    return [Overlap(*p, counts[*p, 0], counts[*p, 1], counts[*p, 2], examples[p]) for p in found]


def _digests(example: Example, id_column: str) -> tuple[bytes, bytes, bytes]:
    inputs = to_readable_json(dict(example.inputs))
    other = {*example.inputs, id_column}
    gold = {name: value for name, value in example.gold.items() if name not in other}
    plain = _normalised(inputs)
    return _digest(inputs), _digest(plain), _digest([plain, _normalised(to_readable_json(gold))])


def _digest(value: object) -> bytes:
    return hashlib.blake2b(
        canonical_json(value).encode(errors="surrogatepass"), digest_size=16
    ).digest()


def _normalised(value: object) -> object:
    if isinstance(value, str):
        return fold(value)
    if isinstance(value, Mapping):
        return {key: _normalised(item) for key, item in value.items()}
    return [_normalised(item) for item in value] if isinstance(value, list) else value


def find_in_data(data: Dataset, inputs: list[str]) -> list[Overlap]:
    """Return the overlaps of all rows of a data set, including rows that a run would not read."""
    splits: dict[str, Iterator[Example]] = {
        role: data.stream(role, inputs) for role in ROLES if data.has(role)
    }
    return find_overlaps(splits, data.id)


def check_no_overlaps(found: list[Overlap]) -> None:
    """Raise an error if splits share examples."""
    shared = [str(overlap) for overlap in found if overlap.across]
    if shared:
        raise DataError(
            f"splits share examples: {'; '.join(shared)}",
            hint="remove them from one of the two splits, or omit --strict",
        )
