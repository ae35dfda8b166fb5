"""The run directory: append-only events and traces, atomic checkpoints, one writer at a time.

A checkpoint remembers how long the append-only files were. Resuming cuts them back to that length, so
whatever was written after it is written again, the same, and a resumed run ends with the same history as
one that was never interrupted. Nothing here is pickled.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from compound.errors import RunDirectoryError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SAID_FULL = ("No space left", "disk is full")  # by safetensors, and by SQLite
APPENDED = ("events.jsonl", "traces.jsonl", "memory.jsonl")


class RunDirectory:
    """One run's files.

    ``system.yaml`` as given, ``config.json`` resolved, ``events.jsonl``, ``traces.jsonl``, ``memory.jsonl``
    (what a method keeps from job to job), ``checkpoint.json``, ``cache.sqlite``, ``best.json``,
    ``report.md``, ``report.html``.

    Example:
        >>> import tempfile
        >>> run = RunDirectory.create(tempfile.mkdtemp() + "/run", "system: demo", {"seed": 0})
        >>> run.append("events.jsonl", {"event": "start"})
        >>> run.checkpoint({"phase": "search"})
        >>> list(run.read("events.jsonl")), run.restore()
        ([{'event': 'start'}], {'phase': 'search'})
        >>> run.close()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, IO[str]] = {}
        self._lock = self._acquire()
        self.step = 0

    @classmethod
    def create(cls, path: str | Path, text: str, config: Mapping[str, Any]) -> RunDirectory:
        """Make a new run directory.

        Raises:
            RunDirectoryError: the folder exists and holds something.
        """
        folder = Path(path)
        if folder.exists() and (not folder.is_dir() or not _just_begun(folder)):
            raise RunDirectoryError(
                f"{folder} already exists and is not an unfinished run",
                hint="choose another --run, or pass --new for a fresh numbered one",
            )
        folder.mkdir(parents=True, exist_ok=True)
        run = cls(folder)
        try:
            if text:  # a system declared in Python has none
                run.write("system.yaml", text)
            run.write_json("config.json", config)
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open an existing run directory for writing.

        Raises:
            RunDirectoryError: it is no run directory, is broken, or another process writes to it.
        """
        folder = Path(path)
        read_json(folder, "config.json")
        return cls(folder)

    def _acquire(self) -> IO[str]:
        lock = (self.path / "lock").open("w", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise RunDirectoryError(
                f"{self.path} is in use by another process", hint="wait for it, or choose another --run"
            ) from None
        return lock

    def write(self, name: str, text: str) -> None:
        """Replace a file atomically."""
        write_atomically(self.path / name, text)

    def write_json(self, name: str, value: Any) -> None:
        """Replace a JSON file atomically."""
        self.write(name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append one JSON line and hand it to the operating system."""
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = (self.path / name).open("a", encoding="utf-8")
        file.write(json.dumps(record, ensure_ascii=False) + "\n")
        file.flush()

    def read(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the records of an append-only file; a torn last line is left out."""
        return read_records(self.path / name)

    @staticmethod
    def read_only(path: Path, name: str) -> Iterator[dict[str, Any]]:
        """Yield the records of a run that somebody else may be writing."""
        return read_records(path / name)

    def checkpoint(self, state: Mapping[str, Any]) -> None:
        """Store the state and the lengths of the append-only files, durably and all at once."""
        for file in self._files.values():
            os.fsync(file.fileno())
        self.step += 1
        lengths = {name: _size(self.path / name) for name in APPENDED}
        self.write_json("checkpoint.json", {"step": self.step, "lengths": lengths, "state": state})

    def restore(self) -> Mapping[str, Any] | None:
        """Go back to the last checkpoint and return its state; ``None`` when there is none.

        Raises:
            RunDirectoryError: a file is shorter than the checkpoint says, or is unreadable.
        """
        if not (self.path / "checkpoint.json").exists():
            for name in APPENDED:
                self._cut(name, 0)
            return None
        stored = read_json(self.path, "checkpoint.json")
        try:
            step, state = int(stored["step"]), dict(stored["state"])
            sizes = {name: int(stored["lengths"][name]) for name in APPENDED}
        except (KeyError, TypeError, ValueError):
            raise RunDirectoryError(
                f"{self.path}/checkpoint.json is not a checkpoint of this version"
            ) from None
        for name, size in sizes.items():
            if not 0 <= size <= _size(self.path / name):
                raise RunDirectoryError(
                    f"{self.path}/{name} is shorter than its checkpoint says; it was changed"
                )
        for name, size in sizes.items():
            self._cut(name, size)
        self.step = step
        return state

    def _cut(self, name: str, size: int) -> None:
        path = self.path / name
        if _size(path) > size:
            with path.open("r+b") as file:
                file.truncate(size)

    def close(self) -> None:
        """Close the files and let others write."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._lock.close()


def _just_begun(folder: Path) -> bool:
    """Return whether nothing was recorded yet: the folder is empty, or a crash came before the config."""
    begun = {"lock", "system.yaml", ".system.yaml.tmp", ".config.json.tmp"}
    return {path.name for path in folder.iterdir()} <= begun


@contextmanager
def room(folder: Path) -> Iterator[None]:
    """Say so when there is no room left on the disk, whoever was writing.

    Raises:
        RunDirectoryError: the disk is full; what was stored before is as it was.
    """
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) in FULL or any(said in str(error) for said in SAID_FULL):
            raise RunDirectoryError(
                f"there is no room left on the disk of {folder}: {error}",
                hint="free some, then give the same command again: the run goes on from its last checkpoint",
            ) from error
        raise


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers, and a crash, see the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON object of a run directory.

    Raises:
        RunDirectoryError: the folder is no run directory, or the file is broken.
    """
    path = folder / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunDirectoryError(
            f"{folder} is not a run directory: it has no {name}", hint="`compound runs` lists run directories"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path} must hold a JSON object")
    return value


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of lines; a torn last line is left out.

    Raises:
        RunDirectoryError: another line is broken.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise RunDirectoryError(f"{path}:{number}: not a JSON line") from None
            yield record


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
