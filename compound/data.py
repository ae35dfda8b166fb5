"""Data sets: where examples come from, one row at a time, with every unusable row named.

A `Dataset` only says where the rows lie; reading happens in `Dataset.examples`. No row is ever dropped:
a row that cannot be used is a `DataError` at ``file:line``. Only blank lines are skipped.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from compound.contracts import Example
from compound.errors import DataError, DeclarationError, MissingExtra, nearest
from compound.limits import DATA, LINE
from compound.records import Damaged, parse
from compound.sanitize import storable
from compound.streams import generator
from compound.untrusted import named

Split = Literal["train", "valid", "test"]
Row = Mapping[str, Any]
ROLES: tuple[Split, ...] = ("train", "valid", "test")
EXTENSIONS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class Dataset:
    """Examples for training, validation and the final test, from files, the hub, or memory.

    Attributes:
        path: A folder of ``<split>.jsonl`` or ``.csv`` files (also ``.gz``), one such file with
            ``split_by``, or, if nothing lies there, the id of a data set on the Hugging Face hub.
        train, valid, test: The split each role reads: a file's stem, a value of the ``split_by``
            column, or a hub split. ``test=None`` says that there is no test split.
        fields: Names for columns: the system's input or the gold field, and the column it is read from;
            ``a.b`` reads entry ``b`` of column ``a``.
        id: The column that identifies a row; a row without it is called ``<split>-<line>``.
        split_by: For one file: the column that names the split, or the share of each role. A row's
            role then follows from its id alone, so that more rows move none of the others.
        subset: The hub's name of a part of the data set.
        rows: The rows of a data set in memory; see `of`.

    >>> data = Dataset.of(train=[{"q": "2 + 2?", "answer": "4"}], fields={"question": "q"})
    >>> data.examples("train", ["question"])[0].inputs["question"]
    '2 + 2?'
    """

    path: str | Path
    train: str = "train"
    valid: str = "dev"
    test: str | None = "test"
    fields: Mapping[str, str] = field(default_factory=dict)
    id: str = "id"
    split_by: str | Mapping[Split, float] | None = None
    subset: str | None = None
    rows: Mapping[Split, Sequence[Row]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.split_by, Mapping):
            shares = self.split_by
            if set(shares) - set(ROLES) or min(shares.values(), default=0) <= 0:
                raise DeclarationError(
                    f"split_by: give train, valid, test shares above 0, got {dict(shares)}"
                )
            if abs(sum(shares.values()) - 1) > 1e-9:
                raise DeclarationError(f"split_by: the shares must sum to 1, got {sum(shares.values())}")

    @classmethod
    def of(
        cls,
        train: Iterable[Row] = (),
        valid: Iterable[Row] = (),
        test: Iterable[Row] = (),
        fields: Mapping[str, str] = MappingProxyType({}),
        id: str = "id",  # noqa: A002 - the field's name
    ) -> Dataset:
        """Make a data set of rows in memory; a row's line is its position, counted from 1."""
        rows: dict[Split, Sequence[Row]] = {"train": tuple(train), "valid": tuple(valid), "test": tuple(test)}
        return cls("memory", "train", "valid", "test", fields, id, rows=rows)

    def has(self, role: Split) -> bool:
        """Return whether a role is declared at all; reads nothing."""
        if self.rows is not None:
            return bool(self.rows.get(role))
        if isinstance(self.split_by, Mapping):
            return role in self.split_by
        return getattr(self, role) is not None

    def examples(
        self, role: Split, inputs: Sequence[str], limit: int | None = None, seed: int | None = None
    ) -> list[Example]:
        """Return the examples of a role, in file order.

        Args:
            role: Which part to read.
            inputs: The system's inputs; each is read from the column of its name or from `fields`.
            limit: Return at most so many: the first ones or, with a seed, a random sample in file order.
                A sample is part of every larger sample of the same seed.
            seed: What the sample depends on, together with the role.

        Returns:
            Examples whose gold fields are all columns of the row and the names in `fields`, read-only.

        Raises:
            DataError: Something is missing, or a row is unusable; the message names file and line.
        """
        if role not in ROLES:
            raise DeclarationError(f"no role {role!r}", hint=f"roles: {', '.join(ROLES)}")
        if limit is not None and limit < 1:
            raise DeclarationError(f"limit >= 1 must hold, got {limit}")
        if not self.has(role):
            raise DataError(f"{self.path} has no {role} split", hint=f"give {role}= its name, or its rows")
        found = list(self.stream(role, inputs))
        return [found[i] for i in _sample(len(found), limit, seed, role)]

    def stream(self, role: Split, inputs: Sequence[str]) -> Iterator[Example]:
        """Yield all examples of a role, in file order, without holding them; raises like `examples`."""
        source, rows = self._read(role)
        wanted = role if isinstance(self.split_by, Mapping) else getattr(self, role)
        lines: dict[str, int] = {}
        splits: set[str] = set()
        found = False
        for line, row in rows:
            place = f"{source}:{line}"
            identity = self._identity(row, wanted, place, line)
            if identity in lines:
                raise DataError(
                    f"{place}: id {identity!r} was already used on line {lines[identity]}",
                    hint=f"ids must differ; they are read from column {self.id!r}",
                )
            lines[identity] = line
            splits.add(split := self._split(row, identity, wanted, place))
            if split == wanted:
                found = True
                yield self._example(identity, row, inputs, place)
        if not found:
            raise DataError(f"{source}: no rows of split {wanted!r}", hint=nearest(wanted, splits))

    def digest(self, role: Split) -> str:
        """Return the sha256 of the bytes a role is read from (of its rows as JSON, if it is no file)."""
        location = self._locate(role)
        if isinstance(location, Path):
            return file_digest(location)
        text = "\n".join(json.dumps(dict(row), sort_keys=True, default=str) for row in location)
        return hashlib.sha256(text.encode()).hexdigest()

    def _read(self, role: Split) -> tuple[str, Iterable[tuple[int, Row]]]:
        """Return the name of a role's source and its numbered rows."""
        location = self._locate(role)
        if isinstance(location, Path):
            return str(location), read_rows(location)
        return f"{self.path} {getattr(self, role)}", enumerate(location, 1)

    def _locate(self, role: Split) -> Path | Sequence[Row]:
        """Return the file a role is read from, or its rows if it is no file."""
        if self.rows is not None:
            return self.rows.get(role, ())
        path, split = Path(self.path), getattr(self, role)
        with named(path, DataError):
            is_folder, exists = path.is_dir(), path.exists()
        if is_folder:
            return _file_of_split(path, split)
        if not exists:
            return _hub_rows(str(self.path), self.subset, split)
        if self.split_by is None:
            raise DataError(
                f"{path} is one file, and nothing says which of its rows are for {role}",
                hint="give split_by: a column, or shares such as {train: 0.6, valid: 0.2, test: 0.2}",
            )
        return path

    def _identity(self, row: Row, split: str, place: str, line: int) -> str:
        # Only the default column may be missing: an id column that was named on purpose must exist.
        identity = row.get("id") if self.id == "id" else _value(row, self.id, "id", place)
        if identity is None:
            # With shares the split follows from the id, so the id cannot name the split.
            start = Path(self.path).name if isinstance(self.split_by, Mapping) else split
            return f"{start}-{line}"
        if not isinstance(identity, str | int | float) or identity == "":
            raise DataError(f"{place}: id column {self.id!r} must hold text or a number, got {identity!r}")
        return str(identity)

    def _split(self, row: Row, identity: str, default: str, place: str) -> str:
        """Return the split a row belongs to; ``default`` if the whole source is one split."""
        if isinstance(self.split_by, str):
            return str(_value(row, self.split_by, "split_by", place))
        return default if self.split_by is None else _role_of(identity, self.split_by)

    def _example(self, identity: str, row: Row, inputs: Sequence[str], place: str) -> Example:
        columns = {**{name: name for name in inputs}, **self.fields}
        values = {name: _value(row, column, name, place) for name, column in columns.items()}
        given = MappingProxyType({name: values[name] for name in inputs})
        return Example(identity, given, MappingProxyType({**row, **values}))


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every row of a ``.jsonl`` or ``.csv`` file, perhaps gzipped, with its line number.

    Rows of JSON lines are objects; cells of CSV files are text. Blank lines are skipped.

    Raises:
        DataError: The file is missing or damaged, a row cannot be read, or a limit of `compound.limits` is
            exceeded; ``file:line`` says where.
    """
    name = path.name.removesuffix(".gz")
    with named(path, DataError):
        is_file = path.is_file()
    if not is_file:
        raise DataError(f"no file {str(path)!r}")
    if not name.endswith((".jsonl", ".csv")):
        raise DataError(f"{path}: a data file must end in one of {', '.join(EXTENSIONS)}")
    yield from _csv_rows(path) if name.endswith(".csv") else _json_rows(path)


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    with named(path, DataError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield decoded lines with their numbers; decoding line by line is what lets errors say where."""
    number, total, longest = 0, 0, LINE.bytes
    packed = path.suffix == ".gz"
    most = DATA.bytes if packed else math.inf
    with named(path, DataError), gzip.open(path, "rb") if packed else path.open("rb") as file:
        try:
            while line := file.readline(longest + 1):
                number += 1
                total += len(line)
                if len(line) > longest:
                    raise DataError(f"{path}:{number}: the line is longer than {LINE}", hint=LINE.hint)
                if total > most:
                    raise DataError(f"{path}:{number}: decompresses to more than {DATA}", hint=DATA.hint)
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}:{number}: not UTF-8 ({error.reason})", hint="save the file as UTF-8"
            ) from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}:{number + 1}: the gzip file is damaged ({error})") from error


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = parse(line)
        except Damaged as error:
            raise DataError(
                f"{path}:{number}: {str(error).removeprefix('it is ')}", hint="each line must be one object"
            ) from None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: a row must be an object {{…}}, got {type(row).__name__}")
        yield number, storable(row)


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    header: list[str] = []
    while True:
        # A quoted cell may hold line breaks: a row is named by the line it starts on.
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise DataError(f"{path}:{number}: not CSV ({error})") from error
        if not "".join(cells).strip() and len(cells) < 2:
            continue
        if not header:
            header = cells
            if len(set(header)) < len(header):
                raise DataError(f"{path}:{number}: two columns have the same name: {', '.join(header)}")
        elif len(cells) != len(header):
            raise DataError(
                f"{path}:{number}: {len(cells)} cells, but the header names {len(header)} columns"
            )
        else:
            yield number, dict(zip(header, cells, strict=True))


def _file_of_split(folder: Path, split: str) -> Path:
    with named(folder, DataError):
        present = sorted(p.name for p in folder.iterdir() if p.name.endswith(EXTENSIONS) and p.is_file())
    fitting = [name for name in present if name in {split + extension for extension in EXTENSIONS}]
    if len(fitting) != 1:
        count = "several files" if fitting else "no file"
        none = "; without a test split, say test: null" if split == "test" and not fitting else ""
        raise DataError(
            f"{folder}: {count} of split {split!r}", hint=f"files: {', '.join(present) or 'none'}{none}"
        )
    return folder / fitting[0]


def _hub_rows(name: str, subset: str | None, split: str) -> Sequence[Row]:
    """Read a split of a data set on the hub."""
    missing = f"no file or folder {name!r} here"
    if not _HUB_ID.fullmatch(name) or name.endswith(EXTENSIONS):
        raise DataError(missing, hint="path is a local folder or file, or a hub id such as 'owner/name'")
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra(f"{missing}; reading it as a hub data set", "datasets", "hub") from error
    try:
        return [dict(row) for row in datasets.load_dataset(name, subset, split=split)]
    except Exception as error:
        raise DataError(
            f"{missing}, and the hub gave no data set of that id with a split {split!r}: {error}",
            hint="check the path, or the id, subset and split on the hub",
        ) from error


def _value(row: Row, column: str, name: str, place: str) -> Any:
    """Look up a column, or the entry of a column that a dotted path names."""
    if column in row:
        return row[column]
    value: Any = row
    for i, part in enumerate(parts := column.split(".")):
        if not isinstance(value, Mapping) or part not in value:
            entry = f"entry {part!r} in {'.'.join(parts[:i])!r}" if i else f"column {column!r}"
            hint = nearest(part, map(str, value)) if isinstance(value, Mapping) else "it is no object"
            raise DataError(f"{place}: no {entry}, which {name!r} is read from", hint=hint)
        value = value[part]
    return value


def _role_of(identity: str, shares: Mapping[Split, float]) -> Split:
    """Map an id to a point of [0, 1) by its hash, and the point to a role."""
    point = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big") / 2**64
    present = [role for role in ROLES if role in shares]
    bounds = np.cumsum([shares[role] for role in present])
    return present[min(int(np.searchsorted(bounds, point, side="right")), len(present) - 1)]


def _sample(n: int, limit: int | None, seed: int | None, role: str) -> list[int]:
    """Return which of ``n`` rows to keep: the head of one permutation, so that samples are nested."""
    if limit is None or limit >= n:
        return list(range(n))
    if seed is None:
        return list(range(limit))
    return sorted(generator(seed, "data", role).permutation(n)[:limit].tolist())
