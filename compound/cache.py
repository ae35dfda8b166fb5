"""A content-addressed store of call outcomes, in memory or in one SQLite file.

A key digests what determines an outcome: component version, the values it reads, its inputs, and for
stochastic components their random stream (which names seed, example, address and sample). So an entry
is what executing again would give, and sharing it changes no result. Rows are JSON, never pickles.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from compound.errors import RunDirectoryError


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
    """

    def __init__(self, path: str | Path, *, step: int | None = None) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = self._open()
        except sqlite3.DatabaseError as error:
            raise RunDirectoryError(
                f"{self._path} is not a usable cache: {error}", hint="delete the file to start an empty one"
            ) from None
        self.step = 0 if step is None else step
        self._pending = set() if step is None else self._stored_since(step)

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=30)
        try:
            tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            if tables:  # ask before anything is written into a database of something else
                db.execute("SELECT key, step, value FROM outcome LIMIT 0")
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute(
                "CREATE TABLE IF NOT EXISTS outcome"
                " (key TEXT PRIMARY KEY, step INTEGER, value TEXT) WITHOUT ROWID"
            )
        except sqlite3.DatabaseError:
            db.close()
            raise
        return db

    def _stored_since(self, step: int) -> set[str]:
        return {key for (key,) in self._db.execute("SELECT key FROM outcome WHERE step >= ?", (step,))}

    def get(self, key: str) -> Mapping[str, Any] | None:
        """Return the outcome stored under ``key``."""
        row = self._db.execute("SELECT value FROM outcome WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def put(self, key: str, outcome: Mapping[str, Any]) -> None:
        """Store an outcome; an existing one stays."""
        self._db.execute(
            "INSERT OR IGNORE INTO outcome VALUES (?, ?, ?)",
            (key, self.step, json.dumps(outcome, ensure_ascii=False)),
        )

    def take_pending(self, key: str) -> bool:
        """Return once whether the entry was made after the checkpoint this attempt resumed from."""
        if key in self._pending:
            self._pending.discard(key)
            return True
        return False

    def close(self) -> None:
        """Close the file."""
        self._db.close()
