"""Data sets: sources of examples, read row by row, with every invalid row reported.

A `Dataset` only describes the location of rows; `Dataset.examples` reads them. No row is dropped
silently: an invalid row raises a `DataError` with ``file:line``. Only blank lines are skipped.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np

from compound.core.errors import DataError, DeclarationError, InvalidRow, suggest_name
from compound.core.example import Example
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.trust import is_store
from compound.core.security.untrusted import UntrustedFolder, os_errors_as
from compound.core.storage.stores import StoreFolder
from compound.evaluation.feedback import IDENTITY, is_feedback_folder, read_feedback
from compound.evaluation.hub import HUB, hub_rows, missing_path_error
from compound.evaluation.rows import (
    DataFile,
    DataRow,
    Report,
    as_row,
    class_reader,
    data_file,
    digest_of,
    find_split_file,
    iterate_rows,
    plain_cell,
)
from compound.execution.rng import generator

Split = Literal["train", "valid", "test"]
ROLES: tuple[Split, ...] = ("train", "valid", "test")
MERGED = 50_000  # ids that are kept in a dictionary
VALID_NAMES = ("dev", "valid", "validation", "val")
"""Usual names of the validation split; the others substitute for the first, the default."""


@report_wrong_arguments
@dataclass(frozen=True)
class Dataset:
    """Examples for training, validation and the final test, from files, the hub, or memory.

    Attributes:
        path: A folder of ``<split>.jsonl``, ``.json`` or ``.csv`` files (also ``.gz``) or
            ``.parquet`` files, one such file with ``split_by``, a folder of feedback with shares in
            ``split_by``, or, if the path does not exist, the id of a data set on the Hugging Face
            hub, ``owner/name``; ``hf://datasets/owner/name`` always refers to the hub. The folder
            or file may be in a store: ``s3://bucket/folder``.
        train, valid, test: The split of each role: a file's stem, a value of the ``split_by``
            column, or a hub split. ``test=None`` means no test split. If there is no
            file or hub split ``dev``, ``valid``, ``validation`` or ``val`` is read instead.
        fields: Maps a system input or gold field to the column it is read from;
            ``a.b`` reads entry ``b`` of column ``a``.
        id: The column that identifies a row; a row without it is named ``<split>-<line>``.
        split_by: For a single file: the column with the split, or the share of each role. A row's
            role then depends only on its id, so that added rows do not move others.
        subset: Name of a subset on the hub.
        rows: The rows of a data set in memory; see `of`.
        within: A parent folder of ``path`` below which links are not followed: that of a YAML file.

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
    rows: Mapping[Split, Sequence[DataRow]] | None = field(default=None, repr=False)
    within: Path | None = field(default=None, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if "\0" in str(self.path):
            raise DeclarationError(
                f"the path of the data, {str(self.path)!r}, contains a NUL character"
            )
        if isinstance(self.split_by, Mapping):
            shares = self.split_by
            if set(shares) - set(ROLES) or min(shares.values(), default=0) <= 0:
                raise DeclarationError(
                    f"split_by: train, valid, test shares must be above 0, got {dict(shares)}"
                )
            if abs(sum(shares.values()) - 1) > 1e-9:
                raise DeclarationError(
                    f"split_by: the shares must sum to 1, got {sum(shares.values())}"
                )

    @classmethod
    def of(
        cls,
        train: Iterable[DataRow] = (),
        valid: Iterable[DataRow] = (),
        test: Iterable[DataRow] = (),
        fields: Mapping[str, str] = MappingProxyType({}),
        id: str = "id",  # noqa: A002 - the field's name
    ) -> Dataset:
        """Create a data set from rows in memory; the line of a row is its position, starting at 1.

        Raises:
            DataError: A row is neither a mapping nor an object with ``keys()`` and ``[]``.
        """
        given: dict[Split, Iterable[DataRow]] = {"train": train, "valid": valid, "test": test}
        rows: dict[Split, Sequence[DataRow]] = {
            role: _rows(part, role) for role, part in given.items()
        }
        return cls("memory", "train", "valid", "test", fields, id, rows=rows)

    def has(self, role: Split) -> bool:
        """Return whether a role is declared; reads nothing."""
        if self.rows is not None:
            return bool(self.rows.get(role))
        if isinstance(self.split_by, Mapping):
            return role in self.split_by
        return getattr(self, role) is not None

    def examples(
        self, role: Split, inputs: Sequence[str], limit: int | None = None, seed: int | None = None
    ) -> list[Example]:
        """Return the examples of a role, in file order; their gold fields are all columns and `fields`.

        Args:
            role: the split to read.
            inputs: the system's inputs; each is read from the column of its name or from `fields`.
            limit: maximum number of examples: the first ones or, with a seed, a random sample, which is
                contained in every larger one.
            seed: seed of the sample, combined with the role.

        Raises:
            DataError: data is missing or a row is invalid; the message names file and line.
        """
        if limit is not None and limit < 1:
            raise DeclarationError(f"limit >= 1 must hold, got {limit}")
        located = self._locate(role)
        if limit is None:
            return list(self._read(role, located, inputs))
        # read twice, so that only the sample is in memory
        count = sum(1 for _ in self._read(role, located, inputs))
        chosen = {*_sample(count, limit, seed, role)}
        rows = enumerate(self._read(role, located, inputs))
        return [example for number, example in rows if number in chosen]

    def stream(
        self, role: Split, inputs: Sequence[str], report: Report | None = None
    ) -> Iterator[Example]:
        """Yield all examples of a role, which may lack inputs if ``report`` receives the errors of rows."""
        return self._read(role, self._locate(role), inputs, report)

    def _read(
        self,
        role: Split,
        located: tuple[str, DataFile | Sequence[DataRow]],
        inputs: Sequence[str],
        report: Report | None = None,
    ) -> Iterator[Example]:
        split, location = located
        source = str(location.path) if isinstance(location, DataFile) else f"{self.path} {split}"
        rows: Iterable[tuple[int, DataRow]] = (
            iterate_rows(location, report)
            if isinstance(location, DataFile)
            else enumerate(location, 1)
        )
        wanted = role if isinstance(self.split_by, Mapping) else split
        lines = _Lines()
        splits: set[str] = set()
        found = False
        for line, row in rows:
            place = f"{source}:{line}"
            try:
                identity = self._identity(row, wanted, place, line)
                self._check_new(identity, line, lines, place)
                splits.add(split := self._split(row, identity, wanted, place))
            except InvalidRow as error:
                if report is None:
                    raise
                report(error)
                found = True
                continue
            if split == wanted:
                found = True
                yield self._example(identity, row, inputs, place, report)
        if not found:
            raise DataError(
                f"{source}: no rows of split {wanted!r}", hint=suggest_name(wanted, splits)
            )

    def digest(self, role: Split) -> str:
        """Return the SHA-256 of a role's file, or of its rows as JSON if it has no file."""
        _, location = self._locate(role)
        if isinstance(location, DataFile):
            return digest_of(location)
        text = "\n".join(json.dumps(dict(row), sort_keys=True, default=str) for row in location)
        return hashlib.sha256(text.encode()).hexdigest()

    def file(self, role: Split) -> Path | None:
        """Return the file of a role; None if it is read from the hub or from memory.

        Raises:
            DataError: There is no file, or several match.
        """
        found = self._local(role)
        return Path(found[1].path) if found else None

    def _locate(self, role: Split) -> tuple[str, DataFile | Sequence[DataRow]]:
        """Return the split of a role, and its file, or its rows if it has no file."""
        if role not in ROLES:
            raise DeclarationError(f"unknown role {role!r}", hint=f"roles: {', '.join(ROLES)}")
        if not self.has(role):
            raise DataError(
                f"{self.path} has no {role} split",
                hint=f"set {role}= to its name, or pass its rows",
            )
        if self.rows is not None:
            return getattr(self, role), self.rows.get(role, ())
        if (folder := self._feedback()) is not None:
            return getattr(self, role) or role, self._feedback_rows(folder)
        return self._local(role) or hub_rows(str(self.path), self.subset, self._names(role))

    def _names(self, role: Split) -> Sequence[str]:
        split = getattr(self, role)
        if role == "valid" and split == VALID_NAMES[0] and self.split_by is None:
            return VALID_NAMES
        return (split,)

    def _local(self, role: Split) -> tuple[str, DataFile] | None:
        """Return the split of a role and its file; None if it is read from the hub or from memory."""
        if self.rows is not None or str(self.path).startswith(HUB) or self._feedback() is not None:
            return None
        path = Path(self.path)
        folder, kind = self._folder()
        store = folder if isinstance(folder, StoreFolder) else None
        if kind == "folder":
            return find_split_file(folder, self._names(role))
        if kind is None and store is not None:
            raise DataError(f"no file or folder {store}")
        if kind is None and self.within is not None:
            raise missing_path_error(str(path), path.relative_to(self.within).as_posix())
        if kind is None:
            return None
        if self.split_by is None:
            raise DataError(
                f"{store or path} is a single file without split_by, so its rows for {role} are unknown",
                hint="set split_by to a column, or shares such as {train: 0.6, valid: 0.2, test: 0.2}",
            )
        if store is not None:
            above, _, name = str(store).rpartition("/")
            return getattr(self, role), DataFile(StoreFolder(above), name, str(store))
        return getattr(self, role), data_file(path, self.within)

    def _folder(self) -> tuple[UntrustedFolder | StoreFolder, str | None]:
        if is_store(self.path):
            store = StoreFolder(self.path)
            return store, store.kind()
        path = Path(self.path)
        if self.within is None:
            with os_errors_as(path, DataError):
                kind = "folder" if path.is_dir() else "file" if path.exists() else None
            return UntrustedFolder(path, error=DataError), kind
        if path == self.within:
            return UntrustedFolder(path, error=DataError), "folder"
        above = UntrustedFolder(self.within, error=DataError)
        name = path.relative_to(self.within).as_posix()
        return above.below(name), above.kind(name)

    def _feedback(self) -> UntrustedFolder | None:
        if self.rows is not None or str(self.path).startswith(HUB) or is_store(self.path):
            return None  # asks no server
        folder, kind = self._folder()
        if kind != "folder" or isinstance(folder, StoreFolder):
            return None
        return folder if is_feedback_folder(folder) else None

    def _feedback_rows(self, folder: UntrustedFolder) -> Sequence[DataRow]:
        if not isinstance(self.split_by, Mapping):
            raise DataError(
                f"{folder} is a folder of feedback, whose examples have no splits",
                hint="set split_by to shares, such as {train: 0.5, valid: 0.5}",
            )
        rows = read_feedback(folder).examples()
        if not rows:
            raise DataError(
                f"{folder} has no examples yet",
                hint="an example is a run with a corrected answer, or with score 1",
            )
        return rows

    def _identity(self, row: DataRow, split: str, place: str, line: int) -> str:
        # Only the default column may be missing: an explicitly configured id column must exist.
        identity = plain_cell(
            row.get(self._default_id) if self.id == "id" else _value(row, self.id, "id", place)
        )
        if identity is None:
            # With shares the split follows from the id, so the id cannot name the split.
            start = Path(self.path).name if isinstance(self.split_by, Mapping) else split
            return f"{start}-{line}"
        if not isinstance(identity, str | int | float) or identity == "":
            raise InvalidRow(
                place, f"id column {self.id!r} must hold text or a number, got {identity!r}"
            )
        return str(identity)

    def _check_new(self, identity: str, line: int, lines: _Lines, place: str) -> None:
        if (known := lines.add(identity, line)) is not None:
            problem = f"id {identity!r} is already used on line {known}"
            hint = f"ids must be unique; they are read from column {self.id!r}"
            raise InvalidRow(place, problem, hint=hint, key="id")

    @functools.cached_property
    def _default_id(self) -> str:
        return "id" if self._feedback() is None else IDENTITY

    def _split(self, row: DataRow, identity: str, default: str, place: str) -> str:
        """Return the split of a row; ``default`` if the whole source is one split."""
        if isinstance(self.split_by, str):
            return str(_value(row, self.split_by, "split_by", place))
        return default if self.split_by is None else _role_of(identity, self.split_by)

    def _example(
        self, identity: str, row: DataRow, inputs: Sequence[str], place: str, report: Report | None
    ) -> Example:
        columns = {**{name: name for name in inputs}, **self.fields}
        row = {name: plain_cell(value) for name, value in row.items()}
        values = {}
        for name, column in columns.items():
            try:
                values[name] = _value(row, column, name, place)
            except InvalidRow as error:
                if report is None:
                    raise
                report(error)
        given = MappingProxyType({name: values[name] for name in inputs if name in values})
        return Example(identity, given, MappingProxyType({**row, **values}), place=place)


class _Lines:
    """Lines of ids, in 16 bytes each: a dictionary takes 110, and a data set may have millions."""

    def __init__(self) -> None:
        self._recent: dict[int, int] = {}
        self._sorted = np.empty(0, [("id", "i8"), ("line", "i8")])

    def add(self, identity: str, line: int) -> int | None:
        """Add an id; return the line of an equal one before."""
        key = hash(identity)  # of a million ids, two share a hash with probability 3e-8
        at = int(np.searchsorted(self._sorted["id"], key))
        if at < len(self._sorted) and self._sorted["id"][at] == key:
            return int(self._sorted["line"][at])
        known = self._recent.setdefault(key, line)
        if len(self._recent) == MERGED:
            recent = np.array([*self._recent.items()], self._sorted.dtype)
            self._sorted = np.sort(np.concatenate([self._sorted, recent]), order="id")
            self._recent.clear()
        return None if known == line else known


def _rows(rows: Iterable[object], role: str) -> tuple[DataRow, ...]:
    found = []
    reader = class_reader(features) if (features := getattr(rows, "features", None)) else None
    for number, given in enumerate(rows, 1):
        row = as_row(reader(given) if reader else given)
        if row is None:
            raise DataError(
                f"memory {role}:{number}: a row must be a mapping, got {type(given).__name__}"
            )
        found.append(row)
    return tuple(found)


def _value(row: DataRow, column: str, name: str, place: str) -> object:
    """Look up a column, or a nested entry given by a dotted path."""
    if column in row:
        return row[column]
    value: object = row
    for i, part in enumerate(parts := column.split(".")):
        if not isinstance(value, Mapping) or part not in value:
            entry = f"entry {part!r} in {'.'.join(parts[:i])!r}" if i else f"column {column!r}"
            hint = (
                suggest_name(part, map(str, value))
                if isinstance(value, Mapping)
                else "it is not an object"
            )
            raise InvalidRow(place, f"no {entry} to read {name!r} from", hint=hint)
        value = value[part]
    return value


def _role_of(identity: str, shares: Mapping[Split, float]) -> Split:
    """Map an id to a point of [0, 1) by its hash, and the point to a role."""
    point = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big") / 2**64
    present = [role for role in ROLES if role in shares]
    bounds = np.cumsum([shares[role] for role in present])
    # rounding may leave the last bound below 1
    return present[min(int(np.searchsorted(bounds, point, side="right")), len(present) - 1)]


def _sample(n: int, limit: int | None, seed: int | None, role: str) -> list[int]:
    """Return indices of a sample of ``n`` rows: the head of one permutation, so that samples are nested."""
    if limit is None or limit >= n:
        return list(range(n))
    if seed is None:
        return list(range(limit))
    return sorted(generator(seed, "data", role).permutation(n)[:limit].tolist())
