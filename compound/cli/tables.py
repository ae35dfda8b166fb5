"""Columns of a data file, as inputs and the answer of a system."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compound.core.errors import DataError
from compound.core.formatting import plural

GOLD = (
    "answer",
    "label",
    "gold",
    "target",
    "output",
    "expected",
    "category",
    "class",
    "response",
    "completion",
    "summary",
    "translation",
    "intent",
    "sentiment",
    "topic",
    "y",
)
IDS = ("id", "uid", "uuid", "guid", "key", "index", "idx", "row")
SPLITS = ("split", "fold", "set", "partition")
TRAIN, VALID, TEST = (
    ("train", "training"),
    ("dev", "valid", "validation", "val"),
    ("test", "testing"),
)
MOST_LABELS, MOST_LABEL, REPEATED = 20, 60, 3  # labels, their characters, and rows per label
NODE = "answerer"
SEEN = 1000  # different texts of a column that are told apart
SHARES = {"train": 0.5, "valid": 0.3, "test": 0.2}
HALVES = {"train": 0.5, "valid": 0.5}
FEWEST, LEAST = (
    60,
    10,
)  # rows of a file that is optimized, since fewer can show no gain; and of any file


@dataclass
class Column:
    """Different texts of a column, the types of its values, its filled rows, and its longest text."""

    name: str
    texts: dict[str, None] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    filled: int = 0
    longest: int = 0

    def add(self, value: object) -> None:
        """Count the value of a row."""
        if value is None or (isinstance(value, str) and not value.strip()):
            self.kinds.add("None" if value is None else "str")
            return
        self.kinds.add(type(value).__name__)
        self.filled += 1
        text = str(value)
        self.longest = max(self.longest, len(text))
        if len(self.texts) < SEEN:
            self.texts[text.strip()] = None

    @property
    def type(self) -> str:
        """Type of the values in YAML; ``Any`` if they differ."""
        kinds = self.kinds - {"None"}
        kinds = {"float"} if kinds == {"int", "float"} else kinds
        (found,) = kinds if len(kinds) == 1 else ("Any",)
        known = found if found in ("str", "int", "float", "bool", "list", "dict") else "Any"
        return f"{known} | None" if "None" in self.kinds and known != "Any" else known

    @property
    def labels(self) -> list[str]:
        """The values in order, if they are a few labels."""
        few = 2 <= len(self.texts) <= min(MOST_LABELS, self.filled / REPEATED)
        is_text = self.kinds <= {"str", "None"} and self.longest <= MOST_LABEL
        plain = all(text.isprintable() for text in self.texts)
        return sorted(self.texts) if few and is_text and plain else []


@dataclass(frozen=True)
class DataTable:
    """Columns of a data file: which ones are inputs, and which one is the answer.

    Attributes:
        columns: the inputs and the answer.
        gold: the column of the answer.
        output: its name as an output of a system.
        inputs: the other columns by their names as inputs.
        source: where the rows and splits are, as the entry ``data``.
        kind, metric, tokens: type of the answer, its metric, and its maximum number of tokens.
        rows: the number of rows.
    """

    columns: Sequence[Column]
    gold: Column
    output: str
    inputs: Mapping[str, Column]
    source: Mapping[str, object]
    kind: str
    metric: str
    tokens: int
    rows: int


def read_table(data: Path, path: str) -> DataTable:
    """Read the columns of a file or folder; see `system_file`, which describes the arguments."""
    from compound.yaml.text import Flow

    columns, rows = read_columns(data)
    usable = [column for column in columns if column.name.strip() and column.filled]
    splits = [column for column in usable if _is_split(column)]
    by = next((c for c in splits if _has_train_and_valid(c)), None) if not data.is_dir() else None
    identity = next((c for c in usable if c not in splits and _is_id(c, rows)), None)
    left = [column for column in usable if column not in (*splits, identity)]
    if len(left) < 2:
        separated = len(columns) == 1 and re.search(r"[;\t|]", columns[0].name)
        raise DataError(
            f"{data}: an input and an answer need two columns with names and values, but found: "
            f"{', '.join(repr(c.name) for c in columns) or 'none'}",
            hint="separate the columns by commas"
            if separated
            else "name the columns in the first row of a CSV file, or by the keys of JSON objects",
        )
    named = {column.name.strip().lower(): column for column in reversed(left)}
    gold = next((named[name] for name in GOLD if name in named), left[-1])
    names = port_names([column.name for column in left if column is not gold])
    output = port_names([gold.name], taken=names)[0]
    inputs = dict(zip(names, (column for column in left if column is not gold), strict=True))
    source: dict[str, object] = {"path": path, **_splits(data, by, rows)}
    source |= {"id": identity.name} if identity and identity.name != "id" else {}
    fields = {port: column.name for port, column in inputs.items() if port != column.name}
    fields |= {output: gold.name} if output != gold.name else {}
    source |= {"fields": Flow(fields)} if fields else {}
    return DataTable(left, gold, output, inputs, source, *_answer(gold), rows)


def read_columns(data: Path) -> tuple[list[Column], int]:
    """Return the columns of a data file, or of the train split of a folder, and the number of rows.

    Raises:
        DataError: the rows cannot be read, or there are too few.
    """
    from compound.core.security.untrusted import UntrustedFolder
    from compound.evaluation.rows import find_split_file, iterate_rows, read_rows

    found: dict[str, Column] = {}
    is_folder, count = data.is_dir(), 0
    lines: Iterable[tuple[int, Mapping[str, object]]] = (
        iterate_rows(find_split_file(UntrustedFolder(data, error=DataError), TRAIN[:1])[1])
        if is_folder
        else read_rows(data)
    )
    for _, row in lines:
        count += 1
        for name, value in row.items():
            found.setdefault(name, Column(name)).add(value)
    if not count:
        raise DataError(f"{data} has no rows")
    if count < LEAST and not is_folder:
        raise DataError(
            f"{data} has {plural(count, 'row')}",
            hint=f"at least {LEAST} are needed to divide them, better 100",
        )
    for column in found.values():
        if column.filled < count and column.kinds != {"str"}:
            column.kinds.add("None")
    return list(found.values()), count


def port_names(columns: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
    """Return distinct names of ports for columns: letters, digits and underscores, and no name of a setting.

    >>> port_names(["Ticket text", "prompt", "2nd", "ticket_text", "日本"])
    ['Ticket_text', 'prompt_column', 'column_2nd', 'ticket_text', 'column_5']
    """
    from compound.components.llm import LLM

    reserved = {*inspect.signature(LLM).parameters, "item", "previous", NODE, *taken}
    found: list[str] = []
    for number, column in enumerate(columns, 1):
        name = re.sub(r"[^A-Za-z0-9]+", "_", column).strip("_") or f"column_{number}"
        name = f"column_{name}" if name[0].isdigit() else name
        if name in reserved or keyword.iskeyword(name):
            name = f"{name}_column"
        while name in found or name in taken:
            name = f"{name}_{number}"
        found.append(name)
    return found


def _is_id(column: Column, rows: int) -> bool:
    name = column.name.strip().lower()
    is_named = name in IDS or name.endswith(("_id", " id", "-id"))
    return is_named and column.filled == rows and column.type in ("str", "int")


def _is_split(column: Column) -> bool:
    values = set(column.texts)
    return column.name.strip().lower() in SPLITS and values <= {*TRAIN, *VALID, *TEST}


def _has_train_and_valid(column: Column) -> bool:
    return not column.texts.keys().isdisjoint(TRAIN) and not column.texts.keys().isdisjoint(VALID)


def _splits(data: Path, by: Column | None, rows: int) -> dict[str, object]:
    """Return where the splits are: in files, in a column, or as shares."""
    if by is not None:
        roles = {"train": TRAIN, "valid": VALID, "test": TEST}
        found = {
            role: next((n for n in names if n in by.texts), None) for role, names in roles.items()
        }
        return {"split_by": by.name, **found}
    if data.is_dir():
        has_test = any(file.name.startswith("test.") for file in data.iterdir())
        return {} if has_test else {"test": None}
    return {"split_by": SHARES if rows >= FEWEST else HALVES}


def _answer(gold: Column) -> tuple[str, str, int]:
    """Return the type of the answer, its metric, and its maximum number of tokens."""
    if labels := gold.labels:
        is_plain = all(re.fullmatch(r"[\w ./&-]+", label) for label in labels)
        kind = (
            f"one of {', '.join(labels)}"
            if is_plain
            else f"Literal[{', '.join(map(repr, labels))}]"
        )
        return kind, "accuracy", max(16, gold.longest)
    if gold.type in ("int", "float", "bool"):
        return gold.type, "accuracy", 16
    return "str", "token_f1", max(32, min(1024, gold.longest))
