"""Data sets: where examples come from, one row at a time, with every unusable row named.

A `Dataset` only says where the rows lie; reading happens in `Dataset.examples`. No row is ever dropped:
a row that cannot be used is a `DataError` at ``file:line``. Only blank lines are skipped.

Data may come from somebody else. A file is opened only where it is a regular file of its own: a link in a
data folder could lead to a secret, which would be sent to a model as a row. What a YAML file names below its
own folder is reached through no link at all.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

import numpy as np

from compound.contracts import Example
from compound.errors import CompoundError, DataError, DeclarationError, MissingExtra, nearest
from compound.limits import DATA, LINE
from compound.records import Damaged, parse
from compound.sanitize import storable
from compound.streams import generator
from compound.untrusted import CHUNK, UntrustedFolder, named

Split = Literal["train", "valid", "test"]
Row = Mapping[str, Any]
ROLES: tuple[Split, ...] = ("train", "valid", "test")
EXTENSIONS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")
VALID = ("dev", "valid", "validation", "val")
"""Usual names of the validation split: the others stand in for the first, the default."""
HUB = "hf://datasets/"
"""What the path of a data set starts with that is on the Hugging Face hub, whatever lies on this machine."""
# With its owner only: a single name may be a folder or a kind of file, and then means something else.
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
# A split or subset: a name that leads nowhere else in a path, and stands for itself in a pattern.
_PART = re.compile(r"[^./\\*?\[\]][^/\\*?\[\]]*")
_EXPORT = "refs/convert/parquet"  # where the hub keeps its own copy of public data sets, by subset and split
_HUB_HINT = (
    "check the path, or the id, subset and split on the hub; what is kept there in another form must be "
    "downloaded, and its folder named"
)


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
        source = str(location.path) if isinstance(location, _File) else f"{self.path} {split}"
        rows: Iterable[tuple[int, Row]] = (
            _rows(location) if isinstance(location, _File) else enumerate(location, 1)
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
        if isinstance(location, _File):
            return _digest(location)
        text = "\n".join(json.dumps(dict(row), sort_keys=True, default=str) for row in location)
        return hashlib.sha256(text.encode()).hexdigest()

    def file(self, role: Split) -> Path | None:
        """Return the file that a role is read from; None where it is read from the hub or from memory.

        Raises:
            DataError: There is none, or several could be meant.
        """
        found = self._local(role)
        return Path(found[1].path) if found else None

    def _locate(self, role: Split) -> tuple[str, _File | Sequence[Row]]:
        """Return the split of a role, and the file it is read from, or its rows if it is no file."""
        if self.rows is not None:
            return getattr(self, role), self.rows.get(role, ())
        return self._local(role) or _hub_rows(str(self.path), self.subset, self._names(role))

    def _names(self, role: Split) -> Sequence[str]:
        """Return the split of a role, and the names that stand in for it."""
        split = getattr(self, role)
        return VALID if role == "valid" and split == VALID[0] and self.split_by is None else (split,)

    def _local(self, role: Split) -> tuple[str, _File] | None:
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
            file = _file(path, self.within)
            folder, kind = file.folder.below(file.name), file.folder.kind(file.name)
        if kind == "folder":
            return _file_of_split(folder, self._names(role))
        if kind is None and self.within is not None:
            raise _absent(str(path), path.relative_to(self.within).as_posix())
        if kind is None:
            return None
        if self.split_by is None:
            raise DataError(
                f"{path} is one file, and nothing says which of its rows are for {role}",
                hint="give split_by: a column, or shares such as {train: 0.6, valid: 0.2, test: 0.2}",
            )
        return getattr(self, role), _file(path, self.within)

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


@dataclass(frozen=True)
class _File:
    """A data file: a regular file, to which no link leads below the folder.

    ``path`` is for messages, and its ending says what the file holds: a file in the hub's cache has none.
    """

    folder: UntrustedFolder
    name: str
    path: Path | str

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open it while the block runs."""
        if self.folder.kind(self.name) != "file":
            raise DataError(f"no file {str(self.path)!r}")
        with self.folder.reader(self.name) as file:
            yield file


def _file(path: Path, within: Path | None) -> _File:
    """Return a file; by default its own folder may be reached through links, as the user named it."""
    root = path.parent if within is None else within
    return _File(UntrustedFolder(root, error=DataError), path.relative_to(root).as_posix(), path)


def read_rows(path: Path, within: Path | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every row of a ``.jsonl`` or ``.csv`` file, perhaps gzipped, with its line number.

    Rows of JSON lines are objects; cells of CSV files are text. Blank lines are skipped.

    Args:
        path: The file. It may not be a link.
        within: A folder around it, below which no link is followed either.

    Raises:
        DataError: The file is missing or damaged, a row cannot be read, or a limit of `compound.limits` is
            exceeded; ``file:line`` says where.
    """
    return _rows(_file(path, within))


def file_digest(path: Path, within: Path | None = None) -> str:
    """Return the sha256 of a file's bytes; it is opened as `read_rows` does."""
    return _digest(_file(path, within))


def _digest(file: _File) -> str:
    hashed = hashlib.sha256()
    with named(file.path, DataError), file.opened() as opened:
        while chunk := opened.read(CHUNK):
            hashed.update(chunk)
    return hashed.hexdigest()


def _rows(file: _File) -> Iterator[tuple[int, dict[str, Any]]]:
    name = str(file.path).removesuffix(".gz")
    if not name.endswith((".jsonl", ".csv")):
        with file.opened():  # one that is missing has no wrong ending
            raise DataError(f"{file.path}: a data file must end in one of {', '.join(EXTENSIONS)}")
    yield from _csv_rows(file) if name.endswith(".csv") else _json_rows(file)


def _lines(file: _File) -> Iterator[tuple[int, str]]:
    """Yield decoded lines with their numbers; decoding line by line is what lets errors say where."""
    path, number, total, longest = file.path, 0, 0, LINE.bytes
    packed = str(path).endswith(".gz")
    most = DATA.bytes if packed else math.inf
    with named(path, DataError), file.opened() as raw, gzip.open(raw, "rb") if packed else raw as lines:
        try:
            while line := lines.readline(longest + 1):
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


def _json_rows(file: _File) -> Iterator[tuple[int, dict[str, Any]]]:
    path = file.path
    for number, line in _lines(file):
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


def _csv_rows(file: _File) -> Iterator[tuple[int, dict[str, Any]]]:
    path = file.path
    reader = csv.reader((line for _, line in _lines(file)), strict=True)
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


def _file_of_split(folder: UntrustedFolder, names: Sequence[str]) -> tuple[str, _File]:
    """Return the split of the first name that has files, or of the only other name that has, and its file."""
    with named(folder, DataError):
        present = [name for name in folder.names() if name.endswith(EXTENSIONS)]
    files = {split: [f for f in (split + end for end in EXTENSIONS) if f in present] for split in names}
    split = _chosen(names, [split for split in names if files[split]], f"{folder}: no file of split")
    fitting = [name for name in files[split] if folder.kind(name) == "file"]
    if len(fitting) == 1:
        return split, _File(folder, fitting[0], folder.path / fitting[0])
    count, hint = "several files" if fitting else "no file", f"files: {', '.join(present) or 'none'}"
    if split in present:
        stem = split.removesuffix(next(end for end in EXTENSIONS if split.endswith(end)))
        hint = f"write it without its ending: {stem}"
    elif split == "test" and not fitting:
        hint += "; without a test split, say test: null"
    raise DataError(f"{folder}: {count} of split {split!r}", hint=hint)


def _chosen(names: Sequence[str], present: Sequence[str], missing: str) -> str:
    """Return the first name where it is present or none is, else the only one that is.

    Raises:
        DataError: several are, but not the first.
    """
    if not present or names[0] in present:
        return names[0]
    if len(present) > 1:
        listed = " and ".join(sorted(present)) if len(present) == 2 else ", ".join(sorted(present))
        raise DataError(
            f"{missing} {names[0]!r}",
            hint=f"{listed} could be meant: say which, such as valid: {min(present)}",
        )
    return present[0]


# --- the hub -------------------------------------------------------------------------------------------


def hub_id(path: str) -> str | None:
    """Return the id of the data set on the hub that a path can stand for, or None.

    >>> hub_id("owner/name"), hub_id("hf://datasets/owner/name"), hub_id("pandas"), hub_id("data/train.csv")
    ('owner/name', 'owner/name', None, None)
    """
    name = path.removeprefix(HUB)
    return name if _HUB_ID.fullmatch(name) and not name.endswith(EXTENSIONS) else None


def _absent(path: str, given: str) -> DataError:
    """Return the error of a path where there is nothing, and which is no id of the hub either."""
    example = f"owner/{given}" if re.fullmatch(r"[\w-]+", given) else "owner/name"
    return DataError(
        f"no file or folder {path!r} here",
        hint=f"path is a local folder or file, or a hub id with its owner, such as {example!r}",
    )


def _hub_rows(path: str, subset: str | None, splits: Sequence[str]) -> tuple[str, Sequence[Row]]:
    """Return which of some splits a data set on the hub has, and its rows.

    They are read by us: the library `datasets` would also read the working directory, and whatever places
    and kinds of files the data set names.
    """
    name, given = hub_id(path), path.removeprefix(HUB)
    if name is None:
        raise _absent(given, given)
    missing = _absent(given, given).message
    for part in (*splits, *([] if subset is None else [subset])):
        if not _PART.fullmatch(part):
            raise DataError(f"{name}: {part!r} is no name of a split or a subset on the hub")
    for library in ("huggingface_hub", "pyarrow"):
        try:
            importlib.import_module(library)
        except ImportError as error:
            raise MissingExtra(f"{missing}; reading it as a hub data set", library, "hub") from error
    what = f"{missing}, and the hub gave no data set of that id with a split"
    try:
        files = _hub_files(name, subset, splits)
        split = _chosen(splits, list(files), what)
        if split in files:
            return split, [row for file in files[split] for row in _hub_file_rows(file)]
    except CompoundError:
        raise
    except Exception as error:
        raise DataError(f"{what} {splits[0]!r}: {error}", hint=_HUB_HINT) from error
    raise DataError(
        f"{what} {splits[0]!r}: neither its copy in Parquet has one, nor is there a file {split}.jsonl, .csv "
        "or .parquet",
        hint=_HUB_HINT,
    )


def _hub_files(name: str, subset: str | None, splits: Sequence[str]) -> dict[str, list[_File]]:
    """Return the files by split, as far as there are any: of the hub's copy in Parquet, else its own."""

    def copied(part: str) -> dict[str, list[_File]]:
        return _downloaded(name, _EXPORT, {split: [f"{part}/{split}/*.parquet"] for split in splits})

    found = copied(subset or "default")
    if not found and subset is None and (part := _only_subset(name)) is not None:
        found = copied(part)
    folders = ("", "data/") if subset is None else (f"{subset}/", f"data/{subset}/")
    return found or _downloaded(name, None, {split: _own_names(folders, split) for split in splits})


def _own_names(folders: Sequence[str], split: str) -> list[str]:
    """Return patterns of where a data set keeps a split; the first that finds something counts."""
    endings = ("-*-of-*.parquet", ".parquet", *EXTENSIONS)
    return [f"{folder}{split}{ending}" for folder in folders for ending in endings]


def _downloaded(
    name: str, revision: str | None, patterns: Mapping[str, Sequence[str]]
) -> dict[str, list[_File]]:
    """Return the files of each split; none where the data set has no such revision."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError

    wanted = [pattern for of_split in patterns.values() for pattern in of_split]
    try:
        given = snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=wanted)
    except (RevisionNotFoundError, LocalEntryNotFoundError):
        if revision is None:
            raise
        return {}
    folder, found = Path(given), {}
    for split, of_split in patterns.items():
        files = next((files for pattern in of_split if (files := sorted(folder.glob(pattern)))), [])
        if files:
            found[split] = [_cached(file, f"{HUB}{name}/{file.relative_to(folder)}") for file in files]
    return found


def _cached(path: Path, shown: str) -> _File:
    """Return a file of the hub's cache, which the user trusts: it is a link to where its content is kept."""
    kept = path.resolve()
    return _File(UntrustedFolder(kept.parent, error=DataError), kept.name, shown)


def _only_subset(name: str) -> str | None:
    """Return the subset of a data set that has one only, or None where the hub has no copy of it.

    Raises:
        DataError: it has several.
    """
    from httpx import HTTPError
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError
    from huggingface_hub.hf_api import RepoFolder

    try:
        tree = HfApi().list_repo_tree(name, repo_type="dataset", revision=_EXPORT)
        parts = sorted(entry.path for entry in tree if isinstance(entry, RepoFolder))
    except RevisionNotFoundError:
        return None
    except (OSError, HTTPError):  # the hub is out of reach: those that were read before
        try:
            folder = snapshot_download(
                name, repo_type="dataset", revision=_EXPORT, allow_patterns=["none"], local_files_only=True
            )
        except LocalEntryNotFoundError:
            return None
        parts = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    if len(parts) > 1:
        raise DataError(
            f"{name} on the hub cannot be read as a whole: it has several parts",
            hint=f"give subset: one of {', '.join(parts)}",
        )
    return parts[0] if parts else None


def _hub_file_rows(file: _File) -> Iterator[Row]:
    if str(file.path).endswith(".parquet"):
        yield from _parquet_rows(file)
    else:
        yield from (row for _, row in _rows(file))


def _parquet_rows(file: _File) -> Iterator[Row]:
    """Yield the rows as they are stored: media stay bytes and names, and are not opened."""
    from pyarrow import parquet

    total = 0
    with file.opened() as opened:
        for batch in parquet.ParquetFile(opened).iter_batches():
            total += batch.nbytes
            if total > DATA.bytes:
                raise DataError(f"{file.path}: holds more than {DATA}", hint=DATA.hint)
            yield from map(storable, batch.to_pylist())


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
