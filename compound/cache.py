"""A content-addressed store of call outcomes, in memory or in one SQLite file.

A key digests what determines an outcome: component version, the values it reads, its inputs, and for
stochastic components their random stream (which names seed, example, address and sample). So an entry
is what executing again would give, and sharing it changes no result. Rows are JSON, never pickles, and have
checksums: a damaged row is reported and dropped, and its call is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from compound.errors import RunDirectoryError
from compound.records import Damaged, parse
from compound.untrusted import UntrustedFolder

FORMAT = 2  # rows have checksums; files of format 0 may hold rows without
BESIDE = ("", "-wal", "-shm", "-journal")  # files of one database
NO_FILE = ":memory:"
logger = logging.getLogger(__name__)


class Cache(Protocol):
    """Where the executor looks before it calls."""

    def get(self, key: str) -> Mapping[str, Any] | None:
        """Return the outcome stored under ``key``."""
        ...

    def put(self, key: str, outcome: Mapping[str, Any]) -> None:
        """Store an outcome."""
        ...

    def take_pending(self, key: str) -> bool:
        """Return once whether the entry was made after the checkpoint this attempt resumed from."""
        ...


class MemoryCache:
    """A cache that lives as long as its process.

    >>> cache = MemoryCache()
    >>> cache.put("k", {"outputs": {"a": 1}})
    >>> cache.get("k"), cache.get("other")
    ({'outputs': {'a': 1}}, None)
    """

    def __init__(self) -> None:
        self._rows: dict[str, str] = {}

    def get(self, key: str) -> Mapping[str, Any] | None:
        """Return the outcome stored under ``key``."""
        row = self._rows.get(key)
        return None if row is None else json.loads(row)

    def put(self, key: str, outcome: Mapping[str, Any]) -> None:
        """Store an outcome."""
        self._rows[key] = json.dumps(outcome, ensure_ascii=False)

    def take_pending(self, key: str) -> bool:
        """Return ``False``: a memory cache does not outlive a crash."""
        return False


class DiskCache:
    """A cache in one SQLite file, shared by threads and processes; each entry is durable once stored.

    ``step`` is the number of the checkpoint that will cover what is stored now. When a run resumes from
    checkpoint ``step``, entries stored at or after it are *pending*: the first time each is read it is
    charged to the budget as if it had just been called, so that a resumed run counts what an
    uninterrupted one would have counted.

    Args:
        path: the file, which is created where it does not exist.
        step: the checkpoint that a run resumes from.
        recorded: how many entries that checkpoint covers.

    Attributes:
        count: how many entries there are; only counted in a run.
        problems: what was found to be damaged or missing so far, in words.

    Raises:
        RunDirectoryError: the file is no cache, or cannot be written.
    """

    def __init__(self, path: str | Path, *, step: int | None = None, recorded: int = 0) -> None:
        self._path = Path(path)
        self.problems: list[str] = []
        if str(path) != NO_FILE:
            _refuse_links(self._path)
        try:
            self._db = _opened(self._path)
        except sqlite3.DatabaseError as error:
            raise _unusable(self._path, error) from None
        with self._reported():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            self._checked = version >= FORMAT
            self.step = 0 if step is None else step
            self._pending = set() if step is None else self._stored_since(step)
            self.count = 0 if step is None else self._count()
        if (lost := recorded - (self.count - len(self._pending))) > 0:
            self._report(
                f"{lost} of {recorded} recorded calls are missing, perhaps because {self._path.name}-wal was "
                "deleted; those that are needed are made again"
            )

    def _stored_since(self, step: int) -> set[str]:
        return {key for (key,) in self._db.execute("SELECT key FROM outcome WHERE step >= ?", (step,))}

    def _count(self) -> int:
        (count,) = self._db.execute("SELECT COUNT(*) FROM outcome").fetchone()
        return int(count)

    def get(self, key: str) -> Mapping[str, Any] | None:
        """Return the outcome stored under ``key``; one that is damaged is dropped, and counts as missing.

        Raises:
            RunDirectoryError: the file cannot be read.
        """
        with self._reported():
            row = self._db.execute(
                "SELECT step, value, checksum FROM outcome WHERE key = ?", (key,)
            ).fetchone()
            if row is None:
                return None
            try:
                return read_row(key, *row, checked=self._checked)
            except Damaged as error:
                self._db.execute("DELETE FROM outcome WHERE key = ?", (key,))
                self.count -= 1
                self._pending.discard(key)
                self._report(f"the recorded call {key[:16]}… is damaged ({error}); it is made again")
                return None

    def put(self, key: str, outcome: Mapping[str, Any]) -> None:
        """Store an outcome; an existing one stays.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        value = json.dumps(outcome, ensure_ascii=False)
        with self._reported():
            stored = self._db.execute(
                "INSERT OR IGNORE INTO outcome (key, step, value, checksum) VALUES (?, ?, ?, ?)",
                (key, self.step, value, row_checksum(key, self.step, value)),
            )
        self.count += stored.rowcount

    def take_pending(self, key: str) -> bool:
        """Return once whether the entry was made after the checkpoint this attempt resumed from."""
        if key in self._pending:
            self._pending.discard(key)
            return True
        return False

    def _report(self, problem: str) -> None:
        self.problems.append(f"{self._path}: {problem}")
        logger.warning("%s: %s", self._path, problem)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _unusable(self._path, error) from error

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def _refuse_links(path: Path) -> None:
    """Refuse a database of which a file is not a regular file of its own."""
    folder = UntrustedFolder(path.parent).make()
    for ending in BESIDE:
        if folder.kind(path.name + ending) == "folder":
            raise RunDirectoryError(
                f"{path}{ending} is not a usable cache: it is a folder",
                hint="delete the file to start an empty one",
            )
        folder.place(path.name + ending)


def _opened(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    db.text_factory = _text
    try:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        if tables:  # ask before anything is written into a database of something else
            db.execute("SELECT key, step, value FROM outcome LIMIT 0")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        if not tables:
            db.execute(
                "CREATE TABLE IF NOT EXISTS outcome"
                " (key TEXT PRIMARY KEY, step INTEGER, value TEXT, checksum TEXT) WITHOUT ROWID"
            )
            db.execute(f"PRAGMA user_version={FORMAT}")
        elif not _has_checksums(db):
            with suppress(sqlite3.OperationalError):  # another process may be adding it
                db.execute("ALTER TABLE outcome ADD COLUMN checksum TEXT")
            db.execute("SELECT checksum FROM outcome LIMIT 0")
    except sqlite3.DatabaseError:
        db.close()
        raise
    return db


def _has_checksums(db: sqlite3.Connection) -> bool:
    return "checksum" in [name for _, name, *_ in db.execute("PRAGMA table_info(outcome)")]


def _text(raw: bytes) -> str:
    return raw.decode(errors="surrogateescape")  # what is no UTF-8 will not match its checksum


def row_checksum(key: str, step: int, value: str) -> str:
    """Return the checksum of an entry; it covers the key, so that entries cannot change places."""
    text = f"{key} {step} {value}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def read_row(key: str, step: Any, value: Any, checksum: Any, *, checked: bool) -> dict[str, Any]:
    """Return what an entry holds.

    Args:
        key: the entry's key.
        step: the checkpoint it belongs to.
        value: the outcome as JSON.
        checksum: of all of them; ``None`` for entries of earlier versions.
        checked: whether the file has no such entries.

    Raises:
        Damaged: it is not what was stored.
    """
    if not isinstance(value, str) or not isinstance(step, int):
        raise Damaged("it is of another type")
    if checksum is not None or checked:
        if checksum != row_checksum(key, step, value):
            raise Damaged("it does not match its checksum")
        found = parse(value)
    else:
        found = parse(value)
        if not _is_outcome(found):
            raise Damaged("it is not the outcome of a call")
    if not isinstance(found, dict):
        raise Damaged("it must be a JSON object")
    return found


def _is_outcome(value: Any) -> bool:
    """Return whether an entry without a checksum has the form of a stored call, or of a stored answer."""
    match value:
        case {"text": str(), "usage": usage}:
            return _is_usage(usage)
        case {"outputs": dict(), "failure": None | [str(), str()], "usage": usage, "tokens": [*tokens],
              "attempts": int()}:  # fmt: skip
            return _is_usage(usage) and all(isinstance(t, list) and len(t) == 5 for t in tokens)
    return False


def _is_usage(value: Any) -> bool:
    """Return whether a value is stored usage: numbers by name, or the bare list of earlier versions."""
    values = list(value.values()) if isinstance(value, dict) else value
    return (
        isinstance(values, list)
        and len(values) >= 4
        and all(type(value) in (int, float) and value >= 0 for value in values)
    )


def _unusable(path: Path, error: sqlite3.Error) -> RunDirectoryError:
    """Return the error of a database that cannot be used now, with what to do."""
    said = str(error)
    if "is full" in said:
        hint = "free some space, then run the same command again: the run continues from its last checkpoint"
        return RunDirectoryError(f"there is no room left on the disk of {path}: {said}", hint=hint)
    if "readonly" in said or "unable to open" in said:
        hint = "change its permissions and those of its folder, or choose another place"
    elif "locked" in said:
        hint = "another process is using it: wait for that one to end"
    else:
        hint = "delete the file to start an empty one: recorded calls that are needed are then made again"
    return RunDirectoryError(f"{path} is not a usable cache: {said}", hint=hint)
