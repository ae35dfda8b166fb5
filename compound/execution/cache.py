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
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from compound.errors import RunDirectoryError
from compound.security.limits import LINE
from compound.security.untrusted import UntrustedFolder, named
from compound.storage.records import Damaged, parse

FORMAT = 2  # rows have checksums; files of format 0 may hold rows without
BESIDE = ("", "-wal", "-shm", "-journal")  # files of one database
NO_FILE = ":memory:"
WAIT, PAUSE = 30.0, 0.01  # seconds: for another process, and between two attempts
SPARE, BETWEEN = 10**6, 10**5  # steps of SQLite: allowed beyond the size of a file, and between two counts
MEMORY = 2000  # kibibytes of pages; a file may ask for more
MAGIC = bytes.fromhex("d9d505f920a163d7")  # what journals begin with; one that names a file ends with it, too
HEADER, SECTOR = 28, 2**16  # bytes of a journal's header, and the most that it has with the zeros after it
_TABLE = "CREATE TABLE outcome (key TEXT PRIMARY KEY, step INTEGER, value TEXT{}) WITHOUT ROWID"
CURRENT, UNCHECKED = _TABLE.format(", checksum TEXT"), _TABLE.format("")  # format 0 may have either
AGAIN = "delete the file to start an empty one: recorded calls that are needed are then made again"
logger = logging.getLogger(__name__)


class Cache(Protocol):
    """Where the executor looks before it calls."""

    def get(self, key: str) -> Mapping[str, object] | None:
        """Return the outcome stored under ``key``."""
        ...

    def put(self, key: str, outcome: Mapping[str, object]) -> None:
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

    def get(self, key: str) -> Mapping[str, object] | None:
        """Return the outcome stored under ``key``."""
        row = self._rows.get(key)
        return None if row is None else json.loads(row)

    def put(self, key: str, outcome: Mapping[str, object]) -> None:
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
            check_files(UntrustedFolder(self._path.parent).make(), self._path.name)
        try:
            self._db = _opened(self._path)
        except sqlite3.DatabaseError as error:
            raise _unusable(self._path, error) from None
        with self._reported(), bounded(self._db, self._path):
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
        # COUNT(*) would be one step, which nothing interrupts
        (count,) = self._db.execute("SELECT COUNT(key) FROM outcome").fetchone()
        return int(count)

    def get(self, key: str) -> Mapping[str, object] | None:
        """Return the outcome stored under ``key``; one that is damaged is dropped, and counts as missing.

        Raises:
            RunDirectoryError: the file cannot be read.
        """
        with self._reported():
            try:
                row = self._row(key)
                return None if row is None else read_row(key, *row, checked=self._checked)
            except Damaged as error:
                self._db.execute("DELETE FROM outcome WHERE key = ?", (key,))
                self.count -= 1
                self._pending.discard(key)
                self._report(f"the recorded call {key[:16]}… is damaged ({error}); it is made again")
                return None

    def _row(self, key: str) -> tuple[object, object, object] | None:
        query = "SELECT step, value, checksum FROM outcome WHERE key = ?"
        try:
            row: tuple[object, object, object] | None = self._db.execute(query, (key,)).fetchone()
        except sqlite3.DataError:
            raise Damaged(f"it is larger than {LINE}") from None
        return row

    def put(self, key: str, outcome: Mapping[str, object]) -> None:
        """Store an outcome; an existing one stays, and one beyond the limit is only reported.

        Raises:
            RunDirectoryError: the file cannot be written.
        """
        value = json.dumps(outcome, ensure_ascii=False)
        with self._reported():
            try:
                stored = self._db.execute(
                    "INSERT OR IGNORE INTO outcome (key, step, value, checksum) VALUES (?, ?, ?, ?)",
                    (key, self.step, value, row_checksum(key, self.step, value)),
                )
            except (sqlite3.DataError, OverflowError):  # the latter beyond 2 GiB
                self._report(
                    f"the call {key[:16]}… is larger than {LINE} and is not recorded; to record it, set "
                    f"{LINE.variable} to a larger number of mebibytes"
                )
                return
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


def check_files(folder: UntrustedFolder, name: str) -> bool:
    """Return whether the process that made a database was killed before it was done; it is then empty.

    SQLite itself brings a database into order when it is opened. By a journal it does so before anything of
    the database can be asked, and then deletes the file that the journal names, wherever that is. A
    write-ahead log, which a cache has instead, names no file. Only the first page of a new database is
    written with a journal: a header, to which no page and no name has been added.

    Raises:
        RunDirectoryError: a file of the database is not one of its own, or could lead to another file.
    """
    path = folder.path / name
    for ending in BESIDE:
        if folder.kind(name + ending) == "folder":
            raise RunDirectoryError(f"{path}{ending} is not a usable cache: it is a folder", hint=AGAIN)
        folder.place(name + ending)
    journal = _journal(folder, f"{name}-journal")
    if not journal:
        return False
    if _is_first(journal) and folder.size(name) <= SECTOR:
        return True
    raise RunDirectoryError(
        f"{path}-journal is no file of a cache: by such a journal SQLite could delete files elsewhere",
        hint="delete this file; where the cache turns out to be damaged without it, delete that too",
    )


def _journal(folder: UntrustedFolder, name: str) -> bytes:
    """Return as much of a journal as tells what it is; nothing where there is none."""
    if folder.kind(name) is None:
        return b""
    try:
        with folder.reader(name) as file, named(folder.path / name):
            return file.read(SECTOR + 1)
    except RunDirectoryError:
        if folder.kind(name) is None:  # another process has made the database meanwhile
            return b""
        raise


def _is_first(journal: bytes) -> bool:
    """Return whether a journal says that the database was empty, and nothing else."""
    return (
        journal[: len(MAGIC)] in (MAGIC, bytes(len(MAGIC)))  # zeros until the journal is on the disk
        and not any(journal[16:20])  # the number of pages there were
        and HEADER + len(MAGIC) <= len(journal) <= SECTOR
        and not any(journal[HEADER:])
    )


@contextmanager
def bounded(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Interrupt reading that takes more steps than the files of a database have bytes.

    A few pages that name each other several times hold as many rows as somebody likes. An entry of a cache
    takes more bytes than steps.

    Raises:
        sqlite3.DatabaseError: the reading was interrupted.
    """
    folder = UntrustedFolder(path.parent)
    size = 0 if str(path) == NO_FILE else sum(folder.size(path.name + ending) for ending in BESIDE)
    left = (size + SPARE) // BETWEEN + 1

    def is_enough() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    db.set_progress_handler(is_enough, BETWEEN)
    try:
        yield
    except sqlite3.Error as error:
        if left < 0:
            raise sqlite3.DatabaseError("its pages repeat without end") from error
        raise
    finally:
        db.set_progress_handler(None, 0)


def restrict(db: sqlite3.Connection) -> None:
    """Let nothing in a file decide what is run when it is read, or how much memory that takes."""
    db.text_factory = _text
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(LINE.bytes, 10**9))
    for setting in ("trusted_schema=OFF", "cell_size_check=ON", f"cache_size=-{MEMORY}"):
        db.execute(f"PRAGMA {setting}")


def table(db: sqlite3.Connection, path: Path) -> str | None:
    """Return the statement that made the table of entries; ``None`` in a new file.

    Raises:
        RunDirectoryError: there is anything else: triggers, views, indexes and other tables could make the
            storing of one call write or compute without end.
    """
    made = None
    for kind, name, statement in db.execute("SELECT type, name, sql FROM sqlite_master"):
        if (kind, name) != ("table", "outcome"):
            known = kind if kind in ("table", "view", "index", "trigger") else "object"
            reason = f"it holds the {known} {str(name)[:80]!r}"
        elif statement not in (CURRENT, UNCHECKED):
            reason = "its table is not the one of a cache"
        else:
            made = str(statement)
            continue
        raise RunDirectoryError(f"{path} is not a usable cache: {reason}", hint=AGAIN)
    return made


def _opened(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=WAIT)
    try:
        with bounded(db, path):
            restrict(db)
            made = table(db, path)  # before anything is written into a database of something else
        _keep_log(db)
        db.execute("PRAGMA synchronous=NORMAL")
        if made is None:
            db.execute("BEGIN IMMEDIATE")
            db.execute(CURRENT.replace("TABLE", "TABLE IF NOT EXISTS", 1))  # another process may have made it
            db.execute(f"PRAGMA user_version={FORMAT}")
            db.execute("COMMIT")
        elif made == UNCHECKED:
            with suppress(sqlite3.OperationalError):  # another process may be adding it
                db.execute("ALTER TABLE outcome ADD COLUMN checksum TEXT")
            db.execute("SELECT checksum FROM outcome LIMIT 0")
    except BaseException:
        db.close()
        raise
    return db


def _keep_log(db: sqlite3.Connection) -> None:
    """Let a database have a write-ahead log; SQLite itself does not wait for a process that is doing so."""
    end = time.monotonic() + WAIT
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
        else:
            return
        time.sleep(PAUSE)


def _text(raw: bytes) -> str:
    return raw.decode(errors="surrogateescape")  # what is no UTF-8 will not match its checksum


def row_checksum(key: str, step: int, value: str) -> str:
    """Return the checksum of an entry; it covers the key, so that entries cannot change places."""
    text = f"{key} {step} {value}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def read_row(key: str, step: object, value: object, checksum: object, *, checked: bool) -> dict[str, object]:
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


def _is_outcome(value: object) -> bool:
    """Return whether an entry without a checksum has the form of a stored call, or of a stored answer."""
    match value:
        case {"text": str(), "usage": usage}:
            return _is_usage(usage)
        case {"outputs": dict(), "failure": None | [str(), str()], "usage": usage, "tokens": [*tokens],
              "attempts": int()}:  # fmt: skip
            return _is_usage(usage) and all(isinstance(t, list) and len(t) == 5 for t in tokens)
    return False


def _is_usage(value: object) -> bool:
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
        hint = AGAIN
    return RunDirectoryError(f"{path} is not a usable cache: {said}", hint=hint)
