"""Content-addressed cache of call results, in memory or in one SQLite file.

A key is a digest of everything that determines a result: component version, values, inputs, and for
stochastic components their random stream (named by seed, example, address and sample). An entry
therefore equals the result of a new execution, and sharing it changes no result. Rows are JSON,
never pickles, with checksums: a damaged row is reported and dropped, and its call is repeated.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from compound.core.errors import RunDirectoryError
from compound.core.security.limits import LINE
from compound.core.security.sanitize import redact_values
from compound.core.security.untrusted import UntrustedFolder, os_errors_as
from compound.core.storage.records import Damaged, parse

FORMAT = 2  # rows have checksums; in earlier formats, some had none
SUFFIXES = ("", "-wal", "-shm", "-journal")  # suffixes of the files of a database
NO_FILE = ":memory:"
WAIT, PAUSE = 30.0, 0.01  # seconds to wait for another process, and between attempts
SPARE, BETWEEN = 10**6, 10**5  # SQLite steps: allowed beyond the file size, and between two checks
MEMORY = 2000  # KiB of cached pages; overrides larger values set in the file
MAGIC = bytes.fromhex("d9d505f920a163d7")  # start of a journal; also ends one that names a file
HEADER, SECTOR = 28, 2**16  # journal header in bytes; maximum with zero padding
TABLE = (
    "CREATE TABLE outcome "
    "(key TEXT PRIMARY KEY, step INTEGER, value TEXT, checksum TEXT) WITHOUT ROWID"
)
RESET_HINT = "delete the file to start an empty one: needed calls are then repeated"
logger = logging.getLogger(__name__)


class Cache(Protocol):
    """Storage of call results, queried before a call is made."""

    def get(self, key: str) -> Mapping[str, object] | None:
        """Return the result stored under ``key``, or ``None``."""
        ...

    def put(self, key: str, result: Mapping[str, object]) -> None:
        """Store a result."""
        ...

    def drop(self, key: str, why: str) -> None:
        """Delete an entry that is not what was stored, and report it."""
        ...

    def take_pending(self, key: str) -> bool:
        """Return True once if the entry was stored after the checkpoint this attempt resumed from."""
        ...


class MemoryCache:
    """A cache in the memory of the process."""

    def __init__(self) -> None:
        self._rows: dict[str, str] = {}

    def get(self, key: str) -> Mapping[str, object] | None:
        """Return the result stored under ``key``, or ``None``."""
        row = self._rows.get(key)
        return None if row is None else json.loads(row)

    def put(self, key: str, result: Mapping[str, object]) -> None:
        """Store a result."""
        self._rows[key] = json.dumps(result, ensure_ascii=False)

    def drop(self, key: str, why: str) -> None:
        """Delete an entry."""
        self._rows.pop(key, None)

    def take_pending(self, key: str) -> bool:
        """Return ``False``: a memory cache has no entries from an earlier attempt."""
        return False


class DiskCache:
    """A cache in one SQLite file, shared by threads and processes; each entry is durable once stored.

    ``step`` is the number of the checkpoint that will cover new entries. When a run resumes from
    checkpoint ``step``, entries stored at or after it are *pending*: the first read of each is
    charged to the budget like a new call, so that a resumed run counts the same usage as an
    uninterrupted one.

    Args:
        path: the file; created if missing.
        step: the checkpoint that the run resumes from.
        recorded: number of entries covered by that checkpoint.
        shared: whether other programs read the entries; only engines with a stable name are then
            cached.

    Attributes:
        count: number of entries; only maintained in a run.
        problems: messages about damaged or missing entries found so far.

    Raises:
        RunDirectoryError: the file is not a cache, or cannot be written.
    """

    def __init__(
        self, path: str | Path, *, step: int | None = None, recorded: int = 0, shared: bool = False
    ) -> None:
        self._path, self.shared = Path(path), shared
        self.problems: list[str] = []
        if str(path) != NO_FILE:
            check_files(UntrustedFolder(self._path.parent).make(), self._path.name)
        try:
            self._db = _open_database(self._path)
        except sqlite3.DatabaseError as error:
            raise _unusable_error(self._path, error) from None
        with self._report_errors(), limit_steps(self._db, self._path):
            self.step = 0 if step is None else step
            self._pending: set[str] = set()
            self.count = 0
            if step is not None:
                newer = "SELECT key FROM outcome WHERE step >= ?"
                self._pending = {key for (key,) in self._db.execute(newer, (step,))}
                # COUNT(*) would be a single step, which the progress handler could not interrupt
                (self.count,) = self._db.execute("SELECT COUNT(key) FROM outcome").fetchone()
        if (lost := recorded - (self.count - len(self._pending))) > 0:
            self._report(
                f"{lost} of {recorded} recorded calls are missing, perhaps because {self._path.name}-wal was "
                "deleted; needed calls are repeated"
            )

    def get(self, key: str) -> Mapping[str, object] | None:
        """Return the result stored under ``key``; drop a damaged one and return ``None``."""
        with self._report_errors():
            try:
                row = self._row(key)
                return None if row is None else read_row(key, *row)
            except Damaged as error:
                self.drop(key, str(error))
                return None

    def drop(self, key: str, why: str) -> None:
        """Delete an entry that is not what was stored, and report it."""
        with self._report_errors():
            self.count -= self._db.execute("DELETE FROM outcome WHERE key = ?", (key,)).rowcount
        self._pending.discard(key)
        self._report(f"the recorded call {key[:16]}… is damaged ({why}); the call is repeated")

    def _row(self, key: str) -> tuple[object, object, object] | None:
        query = "SELECT step, value, checksum FROM outcome WHERE key = ?"
        try:
            row: tuple[object, object, object] | None = self._db.execute(query, (key,)).fetchone()
        except sqlite3.DataError:
            raise Damaged(f"the entry is larger than {LINE}") from None
        return row

    def put(self, key: str, result: Mapping[str, object]) -> None:
        """Store a result; keep an existing entry, and only report an entry beyond the size limit.

        A result with a registered key is not stored: without the key, it would be another result.
        The texts of models have none.
        """
        plain = dict(result)
        if redact_values(plain) is not plain:
            return
        value = json.dumps(result, ensure_ascii=False)
        with self._report_errors():
            try:
                stored = self._db.execute(
                    "INSERT OR IGNORE INTO outcome (key, step, value, checksum) VALUES (?, ?, ?, ?)",
                    (key, self.step, value, row_checksum(key, self.step, value)),
                )
            except (sqlite3.DataError, OverflowError):  # OverflowError above 2 GiB
                self._report(
                    f"the call {key[:16]}… is larger than {LINE} and is not recorded; to record it, set "
                    f"{LINE.variable} to a larger number of mebibytes"
                )
                return
        self.count += stored.rowcount

    def take_pending(self, key: str) -> bool:
        """Return True once if the entry was stored after the checkpoint this attempt resumed from."""
        if key in self._pending:
            self._pending.discard(key)
            return True
        return False

    def _report(self, problem: str) -> None:
        self.problems.append(f"{self._path}: {problem}")
        logger.warning("%s: %s", self._path, problem)

    @contextmanager
    def _report_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _unusable_error(self._path, error) from error

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def check_files(folder: UntrustedFolder, name: str) -> bool:
    """Return whether the process that created a database was killed before completing it; it is then empty.

    SQLite recovers a database when it is opened. With a rollback journal, it does so before
    anything can be queried, and then deletes the file named in the journal, wherever it is. A
    write-ahead log, which a cache uses instead, names no file. Only the first page of a new
    database is written with a journal, which consists of a header without pages or names.
    """
    path = folder.path / name
    for ending in SUFFIXES:
        if folder.kind(name + ending) == "folder":
            raise RunDirectoryError(
                f"{path}{ending} is not a usable cache: it is a folder", hint=RESET_HINT
            )
        folder.place(name + ending)
    journal = _journal(folder, f"{name}-journal")
    if not journal:
        return False
    if _is_initial(journal) and folder.size(name) <= SECTOR:
        return True
    raise RunDirectoryError(
        f"{path}-journal does not belong to a cache: SQLite could delete other files because of it",
        hint="delete this file; if the cache is damaged without it, delete the cache too",
    )


def _journal(folder: UntrustedFolder, name: str) -> bytes:
    """Return the start of a journal, long enough to identify it; empty if there is none."""
    if folder.kind(name) is None:
        return b""
    try:
        with folder.reader(name) as file, os_errors_as(folder.path / name):
            return file.read(SECTOR + 1)
    except RunDirectoryError:
        if folder.kind(name) is None:  # another process has completed the database meanwhile
            return b""
        raise


def _is_initial(journal: bytes) -> bool:
    """Return whether a journal records only that the database was empty."""
    return (
        journal[: len(MAGIC)] in (MAGIC, bytes(len(MAGIC)))  # zeros until the journal is synced
        and not any(journal[16:20])  # initial number of pages
        and HEADER + len(MAGIC) <= len(journal) <= SECTOR
        and not any(journal[HEADER:])
    )


@contextmanager
def limit_steps(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Interrupt a read that takes more steps than the database files have bytes.

    A few pages that refer to each other repeatedly can hold arbitrarily many rows. A valid entry
    takes more bytes than steps.

    Raises:
        sqlite3.DatabaseError: the read was interrupted.
    """
    folder = UntrustedFolder(path.parent)
    size = (
        0 if str(path) == NO_FILE else sum(folder.size(path.name + ending) for ending in SUFFIXES)
    )
    left = (size + SPARE) // BETWEEN + 1

    def exceeds_limit() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    db.set_progress_handler(exceeds_limit, BETWEEN)
    try:
        yield
    except sqlite3.Error as error:
        if left < 0:
            raise sqlite3.DatabaseError("its pages refer to each other endlessly") from error
        raise
    finally:
        db.set_progress_handler(None, 0)


def restrict(db: sqlite3.Connection) -> None:
    """Prevent file content from running code on reading, and bound the memory used."""
    db.text_factory = _text
    # SQLite's default maximum is 10**9
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(LINE.bytes, 10**9))
    for setting in ("trusted_schema=OFF", "cell_size_check=ON", f"cache_size=-{MEMORY}"):
        db.execute(f"PRAGMA {setting}")


def check_schema(db: sqlite3.Connection, path: Path) -> bool:
    """Return whether a database has the table of entries; a new file has none.

    Triggers, views, indexes and other tables could make the storing of a call write or compute
    endlessly.

    Raises:
        RunDirectoryError: the file holds anything else, or was written by an earlier version.
    """
    found, reason = False, ""
    for kind, name, statement in db.execute("SELECT type, name, sql FROM sqlite_master"):
        if (kind, name) != ("table", "outcome"):
            known = kind if kind in ("table", "view", "index", "trigger") else "object"
            reason = f"it holds the {known} {str(name)[:80]!r}"
            break
        found = True
        if statement != TABLE:
            reason = "its table is not that of a cache"
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if found and not reason and version != FORMAT:
        reason = f"it has format {version}, but this version reads format {FORMAT}"
    if reason:
        raise RunDirectoryError(f"{path} is not a usable cache: {reason}", hint=RESET_HINT)
    return found


def _open_database(path: Path) -> sqlite3.Connection:
    # autocommit makes each entry durable; the connection is used from several threads
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=WAIT)
    try:
        with limit_steps(db, path):
            restrict(db)
            exists = check_schema(db, path)  # before writing: it may be another program's database
        _enable_wal(db)
        # with WAL, a power failure may lose the last entries but not damage the file
        db.execute("PRAGMA synchronous=NORMAL")
        if not exists:
            db.execute("BEGIN IMMEDIATE")
            # another process may have created it
            db.execute(TABLE.replace("TABLE", "TABLE IF NOT EXISTS", 1))
            db.execute(f"PRAGMA user_version={FORMAT}")
            db.execute("COMMIT")
    except BaseException:
        db.close()
        raise
    return db


def _enable_wal(db: sqlite3.Connection) -> None:
    """Switch a database to a write-ahead log; retry because SQLite does not wait for other processes here."""
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
    return raw.decode(errors="surrogateescape")  # invalid UTF-8 will not match its checksum


def row_checksum(key: str, step: int, value: str) -> str:
    """Return the checksum of an entry; it covers the key, so that swapped entries are detected."""
    text = f"{key} {step} {value}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def read_row(key: str, step: object, value: object, checksum: object) -> dict[str, object]:
    """Validate an entry, and return its content.

    Raises:
        Damaged: the entry is not what was stored.
    """
    if not isinstance(value, str) or not isinstance(step, int):
        raise Damaged("it has the wrong type")
    if checksum != row_checksum(key, step, value):
        raise Damaged("it does not match its checksum")
    found = parse(value)
    if not isinstance(found, dict):
        raise Damaged("it must be a JSON object")
    return found


def _unusable_error(path: Path, error: sqlite3.Error) -> RunDirectoryError:
    """Return the error for an unusable database, with a hint."""
    text = str(error)
    if "is full" in text:
        hint = "free some space, then run the same command again to resume from the last checkpoint"
        return RunDirectoryError(f"no space left on the disk of {path}: {text}", hint=hint)
    if "readonly" in text or "unable to open" in text:
        hint = "change its permissions and those of its folder, or choose another location"
    elif "locked" in text:
        hint = "another process is using it; wait until it ends"
    else:
        hint = RESET_HINT
    return RunDirectoryError(f"{path} is not a usable cache: {text}", hint=hint)
