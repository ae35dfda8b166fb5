"""Data sets: where examples come from, one row at a time, with every unusable row named.

A `Dataset` only says where the rows lie; reading happens in `Dataset.examples`. No row is ever dropped:
a row that cannot be used is a `DataError` at ``file:line``. Only blank lines are skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np

from compound.errors import DataError, DeclarationError, nearest
from compound.evaluation.hub import HUB, absent, hub_rows
from compound.evaluation.rows import DataFile, Row, data_file, digest_of, file_of_split, rows_of
from compound.example import Example
from compound.execution.rng import generator
from compound.security.untrusted import UntrustedFolder, named

Split = Literal["train", "valid", "test"]
ROLES: tuple[Split, ...] = ("train", "valid", "test")
VALID = ("dev", "valid", "validation", "val")
"""Usual names of the validation split: the others stand in for the first, the default."""


@dataclass(frozen=True)
class Dataset:
    """Examples for training, validation and the final test, from files, the hub, or memory.

    Attributes:
        path: A folder of ``<split>.jsonl`` or ``.csv`` files (also ``.gz``), one such file with
            ``split_by``, or, if nothing lies there, the id of a data set on the Hugging Face hub,
            ``owner/name``; ``hf://datasets/owner/name`` is never looked for on this machine.
        train, valid, test: The split each role reads: a file's stem, a value of the ``split_by``
            column, or a hub split. ``test=None`` says that there is no test split. Where there is no
            file or hub split ``dev``, the one called ``valid``, ``validation`` or ``val`` is read.
        fields: Names for columns: the system's input or the gold field, and the column it is read from;
            ``a.b`` reads entry ``b`` of column ``a``.
        id: The column that identifies a row; a row without it is called ``<split>-<line>``.
        split_by: For one file: the column that names the split, or the share of each role. A row's
            role then follows from its id alone, so that more rows move none of the others.
        subset: The hub's name of a part of the data set.
        rows: The rows of a data set in memory; see `of`.
        within: A folder around ``path``, below which no link is followed: a YAML file's own.

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
    within: Path | None = field(default=None, repr=False, compare=False, kw_only=True)

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
        split, location = self._locate(role)
        source = str(location.path) if isinstance(location, DataFile) else f"{self.path} {split}"
        rows: Iterable[tuple[int, Row]] = (
            rows_of(location) if isinstance(location, DataFile) else enumerate(location, 1)
        )
        wanted = role if isinstance(self.split_by, Mapping) else split
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
        _, location = self._locate(role)
        if isinstance(location, DataFile):
            return digest_of(location)
        text = "\n".join(json.dumps(dict(row), sort_keys=True, default=str) for row in location)
        return hashlib.sha256(text.encode()).hexdigest()

    def file(self, role: Split) -> Path | None:
        """Return the file that a role is read from; None where it is read from the hub or from memory.

        Raises:
            DataError: There is none, or several could be meant.
        """
        found = self._local(role)
        return Path(found[1].path) if found else None

    def _locate(self, role: Split) -> tuple[str, DataFile | Sequence[Row]]:
        """Return the split of a role, and the file it is read from, or its rows if it is no file."""
        if self.rows is not None:
            return getattr(self, role), self.rows.get(role, ())
        return self._local(role) or hub_rows(str(self.path), self.subset, self._names(role))

    def _names(self, role: Split) -> Sequence[str]:
        """Return the split of a role, and the names that stand in for it."""
        split = getattr(self, role)
        return VALID if role == "valid" and split == VALID[0] and self.split_by is None else (split,)

    def _local(self, role: Split) -> tuple[str, DataFile] | None:
        """Return the split of a role and its file, None where it is read from the hub or from memory."""
        if self.rows is not None or str(self.path).startswith(HUB):
            return None
        path = Path(self.path)
        if self.within is None:
            with named(path, DataError):
                kind = "folder" if path.is_dir() else "file" if path.exists() else None
            folder = UntrustedFolder(path, error=DataError)
        elif path == self.within:
            folder, kind = UntrustedFolder(path, error=DataError), "folder"
        else:
            file = data_file(path, self.within)
            folder, kind = file.folder.below(file.name), file.folder.kind(file.name)
        if kind == "folder":
            return file_of_split(folder, self._names(role))
        if kind is None and self.within is not None:
            raise absent(str(path), path.relative_to(self.within).as_posix())
        if kind is None:
            return None
        if self.split_by is None:
            raise DataError(
                f"{path} is one file, and nothing says which of its rows are for {role}",
                hint="give split_by: a column, or shares such as {train: 0.6, valid: 0.2, test: 0.2}",
            )
        return getattr(self, role), data_file(path, self.within)

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


def _value(row: Row, column: str, name: str, place: str) -> object:
    """Look up a column, or the entry of a column that a dotted path names."""
    if column in row:
        return row[column]
    value: object = row
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
