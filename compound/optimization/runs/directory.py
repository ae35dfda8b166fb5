"""The run directory: append-only events and traces, atomic checkpoints, one writer at a time.

A checkpoint stores the lengths of the append-only files. Resuming truncates them to these lengths,
so that later records are written again identically, and a resumed run ends with the same history as
an uninterrupted one. Nothing is pickled, everything has a checksum
(`compound.core.storage.records`), and nothing in a run directory can refer to files outside it
(`compound.core.security.untrusted`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from compound.core.errors import FRESH, CompoundError, RunDirectoryError
from compound.core.security.untrusted import FULL, UntrustedFolder, os_errors_as
from compound.core.storage.locking import FILE as LOCK
from compound.core.storage.locking import Lock
from compound.core.storage.records import Damaged, read_document, read_lines, to_document, to_line
from compound.optimization.runs.state import FORMAT, Checkpoint, OptimizationState, read_checkpoint

FULL_MESSAGES = ("No space left", "disk is full")  # messages of safetensors and SQLite
APPENDED = ("events.jsonl", "traces.jsonl", "memory.jsonl")
CONFIG, CHECKPOINT = "config.json", "checkpoint.json"
PILOT = "pilot"  # folder with the calls of a dry run, which a run uses
_BEFORE_CONFIG = re.compile(r"lock|pilot|system\.yaml|\.(system\.yaml|config\.json)(\..+)?\.tmp")
_WRITER = ThreadPoolExecutor(thread_name_prefix="checkpoint")
UNREADABLE = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
    ArithmeticError,
    RecursionError,
)


class RunDirectory:
    """Files of one run.

    ``system.yaml`` as given, ``config.json`` resolved, ``events.jsonl``, ``candidates.jsonl``,
    ``traces.jsonl``, ``memory.jsonl`` (data that a method stores across jobs), ``checkpoint.json``,
    ``cache.sqlite``, ``best.json``, ``report.md``, ``report.html``.

    Attributes:
        path: path of the directory.
        folder: safe access to its files.
        step: number of the last checkpoint.
        cached: number of calls covered by the last checkpoint.

    Raises:
        RunDirectoryError: another process writes to it, it cannot be written, or it holds a link or
            similar.

    Example:
        >>> import tempfile
        >>> run = RunDirectory.create(tempfile.mkdtemp() + "/run", "system: demo", {"seed": 0})
        >>> run.append("events.jsonl", {"event": "start"})
        >>> run.checkpoint(OptimizationState(announced=1))
        >>> run.restore().announced, list(run.read("events.jsonl"))
        (1, [{'event': 'start'}])
        >>> run.close()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, BinaryIO] = {}
        self._checksums = dict.fromkeys(APPENDED, "")
        self._lock = Lock(UntrustedFolder(path))
        self.folder = self._lock.folder
        self.step = 0
        self.cached = 0
        self._storing: Future[None] | None = None
        try:
            self.folder.check()
            self.folder.remove_temporaries()
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: str | Path, text: str, config: Mapping[str, Any]) -> RunDirectory:
        """Create a new run directory.

        Raises:
            RunDirectoryError: the folder exists and is not empty, or cannot be written.
        """
        folder = UntrustedFolder(path)
        _check_unused(folder)
        run = cls(folder.make().path)
        try:
            _check_unused(folder)  # again, now locked: another process may have created it
            if text:  # empty for a system declared in Python
                run.write("system.yaml", text)
            run.write_json(CONFIG, config)
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open an existing run directory for writing.

        Raises:
            RunDirectoryError: it is not a run directory, is damaged, or another process writes to
                it.
        """
        read_json(path, CONFIG)
        return cls(Path(path))

    def write(self, name: str, text: str) -> None:
        """Replace a file atomically."""
        self._lock.check()
        self.folder.write(name, text)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace a JSON file atomically, with a checksum."""
        self.write(name, to_document(value))

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append a JSON line with its checksum, and flush it to the operating system.

        Raises:
            RunDirectoryError: it cannot be written, for example because the disk is full; no part
                of it is left in the file.
        """
        self._lock.check()
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = self.folder.appender(name)
        line, checksum = to_line(record, self._checksums[name])
        with os_errors_as(self.path / name):
            end = os.fstat(file.fileno()).st_size
            try:
                file.write(line)
                file.flush()
            except OSError:
                self._remove_partial_line(name, end)
                raise
        self._checksums[name] = checksum

    def _remove_partial_line(self, name: str, end: int) -> None:
        with suppress(OSError):
            self._files.pop(name).close()
        with suppress(RunDirectoryError):
            self.folder.truncate(name, end)

    def read(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the records of an append-only file; an incomplete last line is ignored."""
        return read_records(self.folder, name)

    def checkpoint(
        self,
        state: OptimizationState,
        cached: int = 0,
        written: Callable[[], None] | None = None,
    ) -> None:
        """Store the state and the lengths of the append-only files, durably and atomically.

        With ``written``, a thread stores them when it returns; the next checkpoint, or `flush`, waits for
        that and raises its error.
        """
        self.flush()
        self.step += 1
        self.cached = cached
        lengths = {name: self.folder.size(name) for name in APPENDED}
        stored = {
            "format": FORMAT,
            "step": self.step,
            "lengths": lengths,
            "checksums": dict(self._checksums),
            "cached": cached,
            "state": state.to_json(),
        }
        if written is None:
            self._store(stored)
        else:
            self._storing = _WRITER.submit(self._store, stored, written)

    def _store(self, stored: Mapping[str, Any], written: Callable[[], None] = lambda: None) -> None:
        written()
        # sync first: the checkpoint must not cover records that are not on the disk
        for name, file in [*self._files.items()]:
            with os_errors_as(self.path / name):
                os.fsync(file.fileno())
        self.write_json(CHECKPOINT, stored)

    def flush(self) -> None:
        """Wait until the last checkpoint is stored."""
        storing, self._storing = self._storing, None
        if storing is not None:
            storing.result()

    def restore(self) -> OptimizationState | None:
        """Return to the last checkpoint and return its state, or ``None`` if there is none.

        Raises:
            RunDirectoryError: a file is shorter than in the checkpoint, damaged, or unreadable, or
                the run was written by another version.
        """
        stored = load_checkpoint(self.folder)
        sizes = stored.lengths if stored else dict.fromkeys(APPENDED, 0)
        # check all files before truncating any
        checksums = {name: last_checksum(self.folder, name, sizes[name]) for name in APPENDED}
        for name, checksum in checksums.items():
            if stored and stored.checksums.get(name, checksum) != checksum:
                raise _damaged_error(
                    self.folder, name, "its last record does not match the checkpoint"
                )
        for name in APPENDED:
            if self.folder.size(name) > sizes[name]:
                self.folder.truncate(name, sizes[name])
        self._checksums = checksums
        if stored is None:
            return None
        self.step, self.cached = stored.step, stored.cached
        return stored.state

    def discard(self) -> None:
        """Delete the run's files and close it; subfolders and everything around it are kept."""
        for name in self.folder.names():
            if name != LOCK and self.folder.kind(name) == "file":
                self.folder.remove(name)
        if self.folder.names() == [LOCK]:
            with suppress(OSError):
                self.folder.remove(LOCK)
                self.path.rmdir()
        self.close()

    def close(self) -> None:
        """Close the files and release the lock."""
        with suppress(Exception):  # the previous checkpoint remains
            self.flush()
        for file in self._files.values():
            with suppress(OSError):  # `append` flushes each line, and has raised the error
                file.close()
        self._files.clear()
        self._lock.release()


def _check_unused(folder: UntrustedFolder) -> None:
    """Reject a location with more than what a crash before writing the config leaves behind."""
    path = folder.path
    with os_errors_as(path):
        used = path.exists() and (
            not path.is_dir() or not all(map(_BEFORE_CONFIG.fullmatch, folder.names()))
        )
    if used:
        raise RunDirectoryError(
            f"{path} already exists and is not an unfinished run: it has no {CONFIG}", hint=FRESH
        )


def _check_history(folder: UntrustedFolder) -> None:
    """Reject a run without a checkpoint if its events show that it had one."""
    events = read_records(folder, "events.jsonl")
    if sum(1 for _ in zip(events, range(2), strict=False)) > 1:
        raise RunDirectoryError(
            f"{folder}/{CHECKPOINT} is missing, but {folder}/events.jsonl shows that the run had one",
            hint="restore it from a copy, or delete events.jsonl to run again with the recorded calls",
        )


@contextmanager
def report_full_disk(folder: Path) -> Iterator[None]:
    """Report a full disk with a clear error, whichever library was writing.

    Raises:
        RunDirectoryError: the disk is full; stored files are unchanged.
    """
    try:
        yield
    except CompoundError:
        raise
    except Exception as error:
        if getattr(error, "errno", None) in FULL or any(
            message in str(error) for message in FULL_MESSAGES
        ):
            raise RunDirectoryError(
                f"no space left on the disk of {folder}: {error}",
                hint="free some space, then run the same command to resume from the last checkpoint",
            ) from error
        raise


@contextmanager
def inconsistency_errors(path: object) -> Iterator[None]:
    """Report the run directory if its files, each readable by itself, are inconsistent.

    Raises:
        RunDirectoryError: the block failed on a missing key, a wrong type or similar.
    """
    try:
        yield
    except CompoundError:
        raise
    except UNREADABLE as error:
        raise RunDirectoryError(
            f"the files in {path} are damaged or inconsistent: {type(error).__name__}: {error}",
            hint="`compound runs verify` names the damaged file; --debug shows the traceback",
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers, also after a crash, see either the old or the new content.

    Raises:
        RunDirectoryError: the name belongs to something other than a file, or it cannot be written.
    """
    UntrustedFolder(path.parent).write(path.name, text)


def as_folder(place: str | Path | UntrustedFolder) -> UntrustedFolder:
    """Return the folder of a path."""
    return place if isinstance(place, UntrustedFolder) else UntrustedFolder(place)


def read_json(place: str | Path | UntrustedFolder, name: str) -> dict[str, Any]:
    """Read a JSON object from a run directory.

    Raises:
        RunDirectoryError: the folder is not a run directory, or the file is damaged.
    """
    folder = as_folder(place)
    if folder.kind(name) is None:
        raise RunDirectoryError(
            f"{folder} is not a run directory: it has no {name}",
            hint="`compound runs list` lists run directories",
        )
    try:
        return read_document(folder.read(name))
    except Damaged as error:
        raise RunDirectoryError(f"{folder}/{name} cannot be read: {error}") from None


def load_checkpoint(place: str | Path | UntrustedFolder) -> Checkpoint | None:
    """Read the last checkpoint of a run; ``None`` if there is none yet.

    Raises:
        RunDirectoryError: it is damaged or deleted, or a file is shorter than it states.
    """
    folder = as_folder(place)
    if folder.kind(CHECKPOINT) is None:
        _check_history(folder)
        return None
    try:
        found = read_checkpoint(read_json(folder, CHECKPOINT), APPENDED)
    except Damaged as error:
        raise RunDirectoryError(f"{folder}/{CHECKPOINT} cannot be read: {error}") from None
    for name in APPENDED:
        _check_length(folder, name, found.lengths[name])
    return found


def _check_length(folder: UntrustedFolder, name: str, size: int) -> None:
    if size > folder.size(name):
        raise RunDirectoryError(
            f"{folder}/{name} is shorter than stated in its checkpoint; it was changed"
        )


def read_records(place: str | Path | UntrustedFolder, name: str = "") -> Iterator[dict[str, Any]]:
    """Yield the records of a JSON lines file; an incomplete last line is ignored.

    Without a name, ``place`` is the file.

    Raises:
        RunDirectoryError: another line is damaged.
    """
    if not name:
        path = Path(str(place))
        place, name = path.parent, path.name
    folder = as_folder(place)
    if folder.kind(name) is None:
        return
    with folder.reader(name) as file:
        try:
            for line in read_lines(file):
                yield line.value
        except Damaged as error:
            raise RunDirectoryError(f"{folder}/{name}:{error}") from None
        except OSError as error:
            raise RunDirectoryError(f"{folder}/{name} cannot be read: {error.strerror}") from error


def last_checksum(folder: UntrustedFolder, name: str, size: int) -> str:
    """Return the checksum of the last record within a length, after validating all records before it.

    Raises:
        RunDirectoryError: a record is damaged, or no record ends at that length.
    """
    _check_length(folder, name, size)
    end, checksum = 0, ""
    if size:
        with folder.reader(name) as file:
            try:
                for line in read_lines(file):
                    if line.end > size:
                        break
                    end, checksum = line.end, line.checksum
            except Damaged as error:
                if end != size:
                    raise RunDirectoryError(f"{folder}/{name}:{error}") from None
    if end != size:
        raise _damaged_error(
            folder, name, f"no record ends at byte {size:,}, where the checkpoint expects one"
        )
    return checksum


def _damaged_error(folder: UntrustedFolder, name: str, why: str) -> RunDirectoryError:
    return RunDirectoryError(f"{folder}/{name} was changed: {why}")
