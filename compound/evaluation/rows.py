"""Rows of data files, one at a time, with every unusable row named.

Data may come from somebody else. A file is opened only where it is a regular file of its own: a link in a
data folder could lead to a secret, which would be sent to a model as a row. What a YAML file names below its
own folder is reached through no link at all.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from compound.errors import DataError
from compound.security.limits import DATA, LINE
from compound.security.sanitize import storable
from compound.security.untrusted import CHUNK, UntrustedFolder, named
from compound.storage.records import Damaged, parse

Row = Mapping[str, object]
EXTENSIONS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz")


@dataclass(frozen=True)
class DataFile:
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


def data_file(path: Path, within: Path | None) -> DataFile:
    """Return a file; by default its own folder may be reached through links, as the user named it."""
    root = path.parent if within is None else within
    return DataFile(UntrustedFolder(root, error=DataError), path.relative_to(root).as_posix(), path)


def read_rows(path: Path, within: Path | None = None) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield every row of a ``.jsonl`` or ``.csv`` file, perhaps gzipped, with its line number.

    Rows of JSON lines are objects; cells of CSV files are text. Blank lines are skipped.

    Args:
        path: The file. It may not be a link.
        within: A folder around it, below which no link is followed either.

    Raises:
        DataError: The file is missing or damaged, a row cannot be read, or a limit of
            `compound.security.limits` is exceeded; ``file:line`` says where.
    """
    return rows_of(data_file(path, within))


def file_digest(path: Path, within: Path | None = None) -> str:
    """Return the sha256 of a file's bytes; it is opened as `read_rows` does."""
    return digest_of(data_file(path, within))


def digest_of(file: DataFile) -> str:
    """Return the sha256 of a file's bytes."""
    hashed = hashlib.sha256()
    with named(file.path, DataError), file.opened() as opened:
        while chunk := opened.read(CHUNK):
            hashed.update(chunk)
    return hashed.hexdigest()


def rows_of(file: DataFile) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the rows of a file with their line numbers; raises as `read_rows`."""
    name = str(file.path).removesuffix(".gz")
    if not name.endswith((".jsonl", ".csv")):
        with file.opened():  # one that is missing has no wrong ending
            raise DataError(f"{file.path}: a data file must end in one of {', '.join(EXTENSIONS)}")
    yield from _csv_rows(file) if name.endswith(".csv") else _json_rows(file)


def _lines(file: DataFile) -> Iterator[tuple[int, str]]:
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


def _json_rows(file: DataFile) -> Iterator[tuple[int, dict[str, object]]]:
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


def _csv_rows(file: DataFile) -> Iterator[tuple[int, dict[str, object]]]:
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


def file_of_split(folder: UntrustedFolder, names: Sequence[str]) -> tuple[str, DataFile]:
    """Return the split of the first name that has files, or of the only other name that has, and its file."""
    with named(folder, DataError):
        present = [name for name in folder.names() if name.endswith(EXTENSIONS)]
    files = {split: [f for f in (split + end for end in EXTENSIONS) if f in present] for split in names}
    split = chosen_split(names, [split for split in names if files[split]], f"{folder}: no file of split")
    fitting = [name for name in files[split] if folder.kind(name) == "file"]
    if len(fitting) == 1:
        return split, DataFile(folder, fitting[0], folder.path / fitting[0])
    count, hint = "several files" if fitting else "no file", f"files: {', '.join(present) or 'none'}"
    if split in present:
        stem = split.removesuffix(next(end for end in EXTENSIONS if split.endswith(end)))
        hint = f"write it without its ending: {stem}"
    elif split == "test" and not fitting:
        hint += "; without a test split, say test: null"
    raise DataError(f"{folder}: {count} of split {split!r}", hint=hint)


def chosen_split(names: Sequence[str], present: Sequence[str], missing: str) -> str:
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
