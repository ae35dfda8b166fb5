"""Rows of data files, read one at a time, with every invalid row reported.

Only regular files are opened: a link in a data folder of someone else could lead to a secret, which
would be sent to a model. For paths in a YAML file, no link below the file's folder is followed.
"""

from __future__ import annotations

import csv
import functools
import gzip
import hashlib
import json
import math
import numbers
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from compound.core.errors import DataError, InvalidRow, MissingExtra
from compound.core.security.limits import DATA, LINE
from compound.core.security.sanitize import replace_surrogates
from compound.core.security.untrusted import CHUNK, UntrustedFolder, os_errors_as
from compound.core.storage.records import Damaged, parse
from compound.core.storage.stores import StoreFolder

DataRow = Mapping[str, object]
Reader = Callable[[object], object]
Report = Callable[[InvalidRow], None]
CSV_HINTS = {  # by a part of the message of Python's reader
    "field limit": "write rows with longer texts as JSON Lines (.jsonl)",
    "new-line character": "save the file with the line ends of Unix or Windows",
}
BATCH = 1_000  # rows of a Parquet file that are decoded at once
BUFFER = 2**22  # bytes of a column that are read at once
DECODED = 2**28  # bytes that a batch may have
EXTENSIONS = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".json", ".json.gz", ".parquet")


def as_row(row: object) -> DataRow | None:
    """Return an object with ``keys()`` and ``[]``, such as a `dspy.Example`, as a row; ``None`` for others.

    >>> as_row({"question": "2 + 2?"}), as_row("2 + 2?")
    ({'question': '2 + 2?'}, None)
    """
    if isinstance(row, Mapping):
        return row
    keys, read = getattr(row, "keys", None), getattr(row, "__getitem__", None)
    return {key: read(key) for key in keys()} if callable(keys) and callable(read) else None


class ClassName(str):
    """The name of a class label of Hugging Face; it equals its number, too, unless a name is a number.

    Attributes:
        number: the number that the data set stores.
        answers: the right answers: the name and the number, or only the name if a name is a number.
    """

    number: int
    answers: tuple[object, ...]

    def __new__(cls, names: Sequence[str] | str, number: int = 0) -> ClassName:
        """Return the name of a number; a text, which copies and pickles pass, is the name."""
        made = super().__new__(cls, names if isinstance(names, str) else names[number])
        made.number = number
        made.answers = (made, number)
        if not isinstance(names, str) and any(
            name.strip().lstrip("-").isdecimal() for name in names
        ):
            made.answers = (made,)
        return made

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return len(self.answers) > 1 and self.number == other
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __index__(self) -> int:
        return self.number

    __hash__ = str.__hash__


def class_reader(feature: object) -> Reader | None:
    """Return the function that replaces class numbers in values by names; None if there are no classes."""
    kind = feature.get("_type") if isinstance(feature, Mapping) else type(feature).__name__
    if isinstance(feature, Mapping) and not isinstance(kind, str):
        readers = {name: reader for name, part in feature.items() if (reader := class_reader(part))}
        return functools.partial(_read_members, readers) if readers else None
    inner, names = (
        feature.get(key) if isinstance(feature, Mapping) else getattr(feature, key, None)
        for key in ("feature", "names")
    )
    if (
        kind == "ClassLabel"
        and isinstance(names, list)
        and all(isinstance(name, str) for name in names)
    ):
        return functools.partial(_read_class, names)
    inner = feature[0] if isinstance(feature, list) and feature else inner
    reader = None if inner is None else class_reader(inner)
    return functools.partial(_read_items, reader) if reader else None


def _read_members(readers: Mapping[str, Reader], value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    return {name: readers[name](item) if name in readers else item for name, item in value.items()}


def _read_class(names: Sequence[str], value: object) -> object:
    value = plain_cell(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if value == -1:  # the number of an unknown class, such as in test splits
        return None
    return ClassName(names, value) if 0 <= value < len(names) else value


def _read_items(reader: Reader, value: object) -> object:
    value = plain_cell(value)
    return [reader(item) for item in value] if isinstance(value, list | tuple) else value


def plain_cell(value: object) -> object:
    """Return the value of a cell: that of an array or a scalar of numpy, and None for any missing value.

    >>> plain_cell(float("nan")), plain_cell(np.float32(0.5)), plain_cell(np.array([1, 2]))
    (None, 0.5, [1, 2])
    """
    if is_missing(value):
        return None
    shape = getattr(value, "shape", None)
    if shape == () and hasattr(value, "item"):
        return value.item()
    return value.tolist() if shape and hasattr(value, "tolist") else value


def is_missing(value: object) -> bool:
    """Return whether a value stands for a missing one: None, NaN of any type, or pandas' NA and NaT."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, Decimal):
        return value.is_nan()
    return isinstance(value, numbers.Number | np.datetime64 | np.timedelta64) and bool(
        value != value  # noqa: PLR0124
    )


def is_finite(value: object) -> bool:
    """Return whether no number in a value is NaN or infinite; ``None`` in a container is a value."""
    if value is None:
        return True
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_finite, value))
    if getattr(value, "shape", None) and hasattr(value, "tolist"):
        return is_finite(value.tolist())
    return not is_missing(value) and not (
        isinstance(value, float | Decimal | np.floating) and not math.isfinite(value)
    )


@dataclass(frozen=True)
class DataFile:
    """A data file: a regular file that is not reached through links below ``folder``.

    ``path`` is used in messages, and its suffix gives the format: files in the hub's cache have no
    suffix.
    """

    folder: UntrustedFolder | StoreFolder
    name: str
    path: Path | str

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open the file for the duration of the block."""
        if self.folder.kind(self.name) != "file":
            raise DataError(f"no file {str(self.path)!r}")
        with self.folder.reader(self.name) as file:
            yield file


def data_file(path: Path, within: Path | None) -> DataFile:
    """Return a local data file; without ``within``, the path to its folder may contain links."""
    root = path.parent if within is None else within
    return DataFile(UntrustedFolder(root, error=DataError), path.relative_to(root).as_posix(), path)


def read_rows(path: Path, within: Path | None = None) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield every row of a ``.jsonl``, ``.csv``, ``.json`` or ``.parquet`` file with its line number.

    All except Parquet files may be gzipped (``.gz``). Cells of CSV files are text; blank lines are
    skipped. The line of a row of an array or of a Parquet file is its position, starting at 1. No link
    below the parent folder ``within`` is followed.

    Raises:
        DataError: the file is missing or damaged, a row cannot be read, or a limit of
            `compound.core.security.limits` is exceeded; the message names ``file:line``.
        MissingExtra: pyarrow, which reads Parquet files, is not installed.
    """
    return iterate_rows(data_file(path, within))


def file_digest(path: Path, within: Path | None = None) -> str:
    """Return the SHA-256 of a file's bytes; opens it like `read_rows`."""
    return digest_of(data_file(path, within))


def digest_of(file: DataFile) -> str:
    """Return the SHA-256 of a file's bytes."""
    hashed = hashlib.sha256()
    with os_errors_as(file.path, DataError), file.opened() as opened:
        while chunk := opened.read(CHUNK):
            hashed.update(chunk)
    return hashed.hexdigest()


def iterate_rows(
    file: DataFile, report: Report | None = None
) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the rows of a file with their line numbers; raises like `read_rows`.

    With ``report``, it is called with the errors of lines that hold no row, which are skipped.
    """
    name = str(file.path).removesuffix(".gz")
    if not str(file.path).endswith(EXTENSIONS):
        with file.opened():  # report a missing file before a wrong suffix
            raise DataError(f"{file.path}: a data file must end in one of {', '.join(EXTENSIONS)}")
    if name.endswith(".parquet"):
        yield from parquet_rows(file)
    elif name.endswith(".json"):
        yield from _array_rows(file)
    else:
        for number, row in _csv_rows(file) if name.endswith(".csv") else _json_rows(file):
            if not isinstance(row, InvalidRow):
                yield number, row
            elif report is None:
                raise row
            else:
                report(row)


def _lines(file: DataFile) -> Iterator[tuple[int, str]]:
    """Yield decoded lines with their numbers; decodes line by line so that errors have line numbers."""
    path, number, total, longest = file.path, 0, 0, LINE.bytes
    packed = str(path).endswith(".gz")
    most = DATA.bytes if packed else math.inf
    with (
        os_errors_as(path, DataError),
        file.opened() as raw,
        gzip.open(raw, "rb") if packed else raw as lines,
    ):
        try:
            while line := lines.readline(longest + 1):
                number += 1
                total += len(line)
                if len(line) > longest:
                    raise DataError(
                        f"{path}:{number}: the line is longer than {LINE}", hint=LINE.hint
                    )
                if total > most:
                    raise DataError(
                        f"{path}:{number}: decompresses to more than {DATA}", hint=DATA.hint
                    )
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}:{number}: not UTF-8 ({error.reason})", hint="save the file as UTF-8"
            ) from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}:{number + 1}: the gzip file is damaged ({error})") from error


def _json_rows(file: DataFile) -> Iterator[tuple[int, dict[str, object] | InvalidRow]]:
    for number, line in _lines(file):
        if not line.strip():
            continue
        place = f"{file.path}:{number}"
        try:
            row = parse(line, unique=True)
        except Damaged as error:
            problem = str(error).removeprefix("it is ")
            hint = "each line must be one object"
            yield number, InvalidRow(place, problem, hint=hint, key="line")
            continue
        if isinstance(row, dict):
            yield number, replace_surrogates(row)
        else:
            kind = type(row).__name__
            yield number, InvalidRow(place, f"a row must be an object {{…}}, got {kind}")


def _array_rows(file: DataFile) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the objects of a JSON array; the whole file is read at once."""
    path, packed = file.path, str(file.path).endswith(".gz")
    with os_errors_as(path, DataError), file.opened() as raw:
        try:
            with gzip.open(raw, "rb") if packed else nullcontext(raw) as opened:
                text = opened.read(DATA.bytes + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: the gzip file is damaged ({error})") from error
    if len(text) > DATA.bytes:
        raise DataError(f"{path}: holds more than {DATA}", hint=DATA.hint)
    try:
        rows = parse(text.decode("utf-8-sig"), unique=True)
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: not UTF-8 ({error.reason})", hint="save the file as UTF-8"
        ) from error
    except Damaged as error:
        hint = "a file with one object per line must end in .jsonl"
        raise DataError(f"{path}: {str(error).removeprefix('it is ')}", hint=hint) from None
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: must hold an array of objects [{{…}}, …], got {type(rows).__name__}",
            hint="a file with one object per line must end in .jsonl",
        )
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(
                f"{path}:{number}: row {number} must be an object {{…}}, got {type(row).__name__}"
            )
        yield number, replace_surrogates(row)


def parquet_rows(file: DataFile) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the rows of a Parquet file as stored: media remain bytes and names, and are not opened."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra(f"{file.path}: reading Parquet", "pyarrow", "hub") from error
    path, total, number = file.path, 0, 0
    with os_errors_as(path, DataError), file.opened() as opened:
        try:
            raw = getattr(opened, "raw", opened)  # what pyarrow reads is not what comes next
            table = parquet.ParquetFile(raw, buffer_size=BUFFER)
            names = table.schema_arrow.names
            if len(set(names)) < len(names):
                raise DataError(f"{path}: two columns have the same name: {', '.join(names)}")
            reader = table_classes(table.schema_arrow)
            for batch in _batches(table, cast("BinaryIO", raw), path):
                total += sum(map(_decoded_bytes, batch.columns))
                if total > DATA.bytes:
                    raise DataError(f"{path}: holds more than {DATA}", hint=DATA.hint)
                for row in batch.to_pylist():
                    number += 1
                    found = cast("dict[str, object]", reader(row)) if reader else row
                    yield number, replace_surrogates(found)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{path}:{number + 1}: not a readable Parquet file ({error})"
            ) from error


def _batches(table: Any, file: BinaryIO, path: Path | str) -> Iterator[Any]:  # noqa: ANN401 - of pyarrow
    """Yield batches of rows of bounded memory, although a text that is stored once may be in every row.

    A text is at most as long as its column's dictionary, so that the number of rows is limited. Lists
    may repeat it within a row: where this could be too much, texts remain encoded.
    """
    from pyarrow import parquet

    for group in range(table.num_row_groups):
        facts, texts, size, longest, lists = table.metadata.row_group(group), list[str](), 0, 1, 0
        for index, column in enumerate(map(facts.column, range(facts.num_columns))):
            declared = table.schema.column(index)
            if column.physical_type != "BYTE_ARRAY":
                size += column.num_values * (declared.length or 8)
                continue
            texts.append(declared.path)
            most = _dictionary_bytes(file, column)
            if declared.max_repetition_level:
                lists += most * column.num_values
            else:
                longest += most
        if size > DATA.bytes:
            raise DataError(f"{path}: holds more than {DATA}", hint=DATA.hint)
        rows, reader = max(1, min(BATCH, DECODED // longest)), table
        if lists > DECODED:  # fewer batches, since each holds the dictionary of all earlier ones
            rows = max(BATCH, facts.num_rows // 16)
            reader = parquet.ParquetFile(file, read_dictionary=texts, buffer_size=BUFFER)
        yield from reader.iter_batches(batch_size=rows, row_groups=[group])


def _dictionary_bytes(file: BinaryIO, column: Any) -> int:  # noqa: ANN401 - of pyarrow
    """Return the decoded size of the dictionary of a column, which the header of its page states."""
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    file.seek(start)
    # in Thrift's compact form: the type of the page, 2 for a dictionary, and its decoded size; each
    # is a mark and twice the number, with seven bits in a byte
    found = re.match(rb"\x15(.)\x15([\x80-\xff]*[\0-\x7f])", file.read(16), re.DOTALL)
    if found is None:
        raise OSError("a page without a size")
    size = sum((byte & 127) << 7 * place for place, byte in enumerate(found[2])) >> 1
    return size if found[1] == b"\x04" else 0


def _decoded_bytes(array: Any) -> int:  # noqa: ANN401 - an array of pyarrow, which has no types
    """Return the bytes of the values of an array, in which equal texts may be stored once."""
    import pyarrow as pa
    from pyarrow import compute

    if pa.types.is_dictionary(array.type):
        lengths = compute.binary_length(array.dictionary).take(array.indices)
        return int(compute.sum(lengths.cast("int64")).as_py() or 0)
    if pa.types.is_struct(array.type):
        return sum(map(_decoded_bytes, array.flatten()))
    if pa.types.is_map(array.type):
        return _decoded_bytes(array.keys) + _decoded_bytes(array.items)
    if pa.types.is_nested(array.type):
        return _decoded_bytes(array.flatten())
    return int(array.nbytes)


def table_classes(schema: object) -> Reader | None:
    """Return the `class_reader` of a table of pyarrow, whose metadata `datasets` writes."""
    try:
        described = json.loads((getattr(schema, "metadata", None) or {}).get(b"huggingface", b"{}"))
        return class_reader(described["info"]["features"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None  # the metadata of another program


def _csv_rows(file: DataFile) -> Iterator[tuple[int, dict[str, object] | InvalidRow]]:
    path = file.path
    reader = csv.reader((line for _, line in _lines(file)), strict=True)
    header: list[str] = []
    while True:
        # A quoted cell may contain line breaks: a row is identified by its first line.
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            hint = next((hint for part, hint in CSV_HINTS.items() if part in str(error)), "")
            raise DataError(f"{path}:{number}: not CSV ({error})", hint=hint) from error
        if not "".join(cells).strip() and len(cells) < 2:
            continue
        if not header:
            header = cells
            if len(set(header)) < len(header):
                raise DataError(
                    f"{path}:{number}: two columns have the same name: {', '.join(header)}"
                )
        elif len(cells) != len(header):
            problem = f"{len(cells)} cells, but the header names {len(header)} columns"
            yield number, InvalidRow(f"{path}:{number}", problem, key="cells")
        else:
            yield number, dict(zip(header, cells, strict=True))


def find_split_file(
    folder: UntrustedFolder | StoreFolder, names: Sequence[str]
) -> tuple[str, DataFile]:
    """Return the first name that has a file, or the only other one that has, and its file."""
    with os_errors_as(folder, DataError):
        present = [name for name in folder.names() if name.endswith(EXTENSIONS)]
    files = {
        split: [f for f in (split + end for end in EXTENSIONS) if f in present] for split in names
    }
    split = choose_split(
        names, [split for split in names if files[split]], f"{folder}: no file of split"
    )
    fitting = [name for name in files[split] if folder.kind(name) == "file"]
    if len(fitting) == 1:
        return split, DataFile(folder, fitting[0], f"{folder}/{fitting[0]}")
    count = "several files" if fitting else "no file"
    hint = f"files: {', '.join(present) or 'none'}"
    if split in present:
        stem = split.removesuffix(next(end for end in EXTENSIONS if split.endswith(end)))
        hint = f"write it without the suffix: {stem}"
    elif split == "test" and not fitting:
        hint += "; if there is no test split, set test: null"
    raise DataError(f"{folder}: {count} of split {split!r}", hint=hint)


def choose_split(names: Sequence[str], present: Sequence[str], missing: str) -> str:
    """Return the first name if it is present or if none is, else the only present one."""
    if not present or names[0] in present:
        return names[0]
    if len(present) > 1:
        listed = " and ".join(sorted(present)) if len(present) == 2 else ", ".join(sorted(present))
        raise DataError(
            f"{missing} {names[0]!r}",
            hint=f"{listed} match: choose one, such as valid: {min(present)}",
        )
    return present[0]
