"""An index of the traces of a run, for pages of examples that do not read the whole file.

The index is an SQLite database in a temporary folder: it holds the place of each trace in
``traces.jsonl`` and the values that tables show, sort and search. It is extended as the file grows,
and built anew if the file was truncated, as a resumed run does.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from compound.core.errors import RunDirectoryError
from compound.core.security.limits import LINE
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.records import Damaged, parse, read_lines
from compound.execution.trace import whole_amounts
from compound.optimization.runs.directory import inconsistency_errors
from compound.report.record import RecordedTrace, own_gold, recorded_trace

FILE = "traces.jsonl"
CELL = 300  # characters of a value in a table
SEARCHED = 4_000  # characters of each text that a search reads
PATIENCE = 0.25  # seconds that a request spends on extending the index
SCHEMA = """
CREATE TABLE run (
    split TEXT, configuration TEXT, example TEXT, sample INTEGER, position INTEGER, length INTEGER,
    score REAL, failure TEXT, input TEXT, gold TEXT, output TEXT, text TEXT,
    tokens INTEGER, usd REAL, seconds REAL, whole TEXT,
    PRIMARY KEY (split, configuration, example, sample)
) WITHOUT ROWID;
"""
SIDE = """
SELECT example, avg(score) AS score, min(sample) AS sample, max(failure) AS failure,
    min(input) AS input, min(gold) AS gold, min(output) AS output, min(text) AS text,
    avg(tokens) AS tokens, avg(usd) AS usd, avg(seconds) AS seconds, min(whole) AS whole
FROM run WHERE split = ? AND configuration = ? GROUP BY example
"""
BOTH = f"""
SELECT a.example AS example, a.score AS before, b.score AS after, b.score - a.score AS difference,
    coalesce(b.input, a.input) AS input, coalesce(b.gold, a.gold) AS gold,
    a.output AS output_before, b.output AS output_after,
    a.failure AS failure_before, b.failure AS failure_after,
    a.text || ' ' || b.text AS text, a.sample AS sample_before, b.sample AS sample_after,
    b.tokens AS tokens, b.usd AS usd, b.seconds AS seconds,
    a.whole AS whole_before, b.whole AS whole_after
FROM ({SIDE}) a JOIN ({SIDE}) b USING (example)
"""  # nosec B608  # constants
FILTERS = {
    "all": "1",
    "better": "difference > 0",
    "worse": "difference < 0",
    "equal": "difference = 0",
    "failed": "failure_before != '' OR failure_after != ''",
}
SORTS = {
    "difference": ("losses first", "difference, example"),
    "gain": ("gains first", "difference DESC, example"),
    "example": ("name", "example"),
    "before": ("score before", "before, example"),
    "after": ("score after", "after, example"),
    "tokens": ("most tokens", "tokens DESC, example"),
    "seconds": ("slowest", "seconds DESC, example"),
}


@dataclass(frozen=True)
class Query:
    """Which examples to list, of which two configurations, in which order."""

    split: str
    before: str
    after: str
    show: str = "all"
    sort: str = "difference"
    q: str = ""  # words to find

    @property
    def sql(self) -> tuple[str, list[object]]:
        """The condition with its parameters."""
        values: list[object] = [self.split, self.before, self.split, self.after]
        condition = FILTERS.get(self.show, "1")
        if self.q:
            words = self.q.split()[:8]
            condition = f"({condition})" + " AND text LIKE ? ESCAPE '\\'" * len(words)
            values += [f"%{_escape_like(word)}%" for word in words]
        return condition, values


@dataclass(frozen=True)
class Page:
    """A page of examples, and the number of examples by filter."""

    rows: Sequence[Mapping[str, Any]]
    total: int
    counts: Mapping[str, int]


class TraceIndex:
    """The traces of one run, by split, configuration, example and sample.

    Args:
        folder: the run directory.
        database: a new file for the index.
    """

    def __init__(self, folder: UntrustedFolder, database: Path) -> None:
        self._folder, self._path = folder, database
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._end, self._checksum = 0, ""

    def _reset(self) -> None:
        self._close()
        self._path.unlink(missing_ok=True)
        self._database = sqlite3.connect(self._path, check_same_thread=False)
        self._database.row_factory = sqlite3.Row
        self._database.executescript(f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; {SCHEMA}")
        self._end, self._checksum = 0, ""

    def close(self) -> None:
        """Close the index."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def extend(self, patience: float = PATIENCE) -> float:
        """Read further traces for a limited time, and return the fraction of the file that was read.

        Raises:
            RunDirectoryError: a trace is damaged.
        """
        with self._lock:
            size = self._folder.size(FILE) if self._folder.kind(FILE) is not None else 0
            if self._database is None or size < self._end:
                self._reset()  # new, or a resumed run returned to its last checkpoint
            if size == self._end:
                return 1.0
            try:
                self._read(time.monotonic() + patience)
            except RunDirectoryError:
                if not self._end:
                    raise
                self._reset()  # the file may have been truncated, and be longer again
                self._read(time.monotonic() + patience)
            return min(1.0, self._end / size) if self._more else 1.0

    def _read(self, until: float) -> None:
        """Index traces from the present end of the index until a time."""
        rows: list[tuple[object, ...]] = []
        self._more = False
        with self._folder.reader(FILE) as file, inconsistency_errors(self._folder):
            file.seek(self._end)
            start = self._end
            try:
                for line in read_lines(file, before=self._checksum):
                    end = start + line.end
                    rows.append(_row(recorded_trace(line.value), self._end, end))
                    self._end, self._checksum = end, line.checksum
                    if time.monotonic() > until:
                        self._more = True
                        break
            except Damaged as error:
                raise RunDirectoryError(f"{self._folder}/{FILE}: {error}") from None
            finally:
                marks = ", ".join("?" * 16)
                with self._connection() as connection:
                    connection.executemany(f"INSERT OR REPLACE INTO run VALUES ({marks})", rows)  # nosec B608  # constants

    def _connection(self) -> sqlite3.Connection:
        if self._database is None:
            raise RunDirectoryError(f"the index of {self._folder} is closed")
        return self._database

    def _rows(self, statement: str, values: Sequence[object]) -> list[Mapping[str, Any]]:
        with self._lock, closing(self._connection().execute(statement, values)) as cursor:
            return [dict(row) for row in cursor]

    def splits(self) -> dict[str, list[str]]:
        """Return the configurations with traces by split, those with the most examples first."""
        found: dict[str, list[str]] = {}
        for row in self._rows(
            "SELECT split, configuration, count(DISTINCT example) AS n FROM run "
            "GROUP BY split, configuration ORDER BY split, n DESC, configuration",
            (),
        ):
            found.setdefault(row["split"], []).append(row["configuration"])
        return found

    def page(self, query: Query, number: int, size: int) -> Page:
        """Return a page of the examples that both configurations were run on, from page 1."""
        condition, values = query.sql
        _, order = SORTS.get(query.sort, SORTS["difference"])
        rows = self._rows(
            f"SELECT * FROM ({BOTH}) WHERE {condition} ORDER BY {order} LIMIT ? OFFSET ?",  # nosec B608  # constants
            [*values, size, (number - 1) * size],
        )
        for row in rows:
            cast("dict[str, object]", row).pop("text")
        sums = ", ".join(f"sum({test}) AS {name!r}" for name, test in FILTERS.items())
        counts = self._rows(f"SELECT {sums} FROM ({BOTH})", values[:4])[0]  # nosec B608  # constants
        known = {name: int(counts[name] or 0) for name in FILTERS}
        total = known.get(query.show, known["all"])
        if query.q:
            found = self._rows(f"SELECT count(*) AS n FROM ({BOTH}) WHERE {condition}", values)  # nosec B608  # constants
            total = int(found[0]["n"])
        return Page(rows, total, known)

    def neighbors(self, query: Query, example: str) -> tuple[str, str]:
        """Return the examples before and after one in the order of a query, ``""`` at its ends."""
        condition, values = query.sql
        _, order = SORTS.get(query.sort, SORTS["difference"])
        statement = f"SELECT example FROM ({BOTH}) WHERE {condition} ORDER BY {order}"  # nosec B608  # constants
        names = ["", *(row["example"] for row in self._rows(statement, values)), ""]
        place = names.index(example) if example in names else 0
        return (names[place - 1], names[place + 1]) if place else ("", "")

    def pairs(self, query: Query) -> Iterator[tuple[str, int, int]]:
        """Yield the examples whose outputs differ, with the samples of both sides."""
        condition, values = query.sql
        for row in self._rows(
            f"SELECT example, sample_before, sample_after FROM ({BOTH}) WHERE {condition} "  # nosec B608  # constants
            "AND whole_before != whole_after ORDER BY example",
            values,
        ):
            yield row["example"], row["sample_before"], row["sample_after"]

    def samples(self, split: str, configuration: str, example: str) -> list[int]:
        """Return the samples of an example."""
        rows = self._rows(
            "SELECT sample FROM run WHERE split = ? AND configuration = ? AND example = ? "
            "ORDER BY sample",
            (split, configuration, example),
        )
        return [row["sample"] for row in rows]

    def trace(
        self, split: str, configuration: str, example: str, sample: int | None = None
    ) -> RecordedTrace | None:
        """Return a trace, by default that of the first sample; ``None`` if there is none.

        Raises:
            RunDirectoryError: the file has changed since it was indexed.
        """
        rows = self._rows(
            "SELECT position, length FROM run WHERE split = ? AND configuration = ? "
            "AND example = ? AND (? IS NULL OR sample = ?) ORDER BY sample LIMIT 1",
            (split, configuration, example, sample, sample),
        )
        if not rows:
            return None
        position, length = rows[0]["position"], rows[0]["length"]
        with self._folder.reader(FILE) as file:
            file.seek(position)
            raw = file.read(min(length, LINE.bytes))
        try:
            return recorded_trace(cast("Mapping[str, object]", parse(raw)))
        except Damaged as error:
            raise RunDirectoryError(
                f"{self._folder}/{FILE} has changed since it was opened: {error}",
                hint="load the page again",
            ) from None


def _row(trace: RecordedTrace, position: int, end: int) -> tuple[object, ...]:
    """Return the row of a trace."""
    failure = ": ".join(trace["failure"]) if trace["failure"] else ""
    gold, outputs = own_gold(trace), trace["outputs"]
    answers = {key: value for key, value in gold.items() if key in outputs}
    parts = [_text(trace["inputs"]), _text(answers or gold), failure or _text(outputs)]
    usage, seconds = whole_amounts(trace)
    return (
        trace["split"],
        trace["configuration"],
        str(trace["example"]),
        int(trace["sample"]),
        position,
        end - position,
        trace["score"],
        failure[:CELL],
        *(part[:CELL] for part in parts),
        " ".join([str(trace["example"]), *(part[:SEARCHED] for part in parts)]),
        usage.tokens,
        None if usage.unpriced else usage.cost,
        seconds,
        hashlib.sha256(
            parts[2].encode()
        ).hexdigest(),  # of the outputs, of which `output` is a part
    )


def _text(values: Mapping[str, object]) -> str:
    """Return values on one line, without the name of a single one."""
    named = [
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in values.values()
    ]
    if len(named) > 1:
        named = [f"{name}: {text}" for name, text in zip(values, named, strict=True)]
    text = " · ".join(" ".join(text.split()) for text in named)
    return text.encode(errors="replace").decode()


def _escape_like(word: str) -> str:
    return word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
