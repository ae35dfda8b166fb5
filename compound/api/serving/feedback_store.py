"""Write runs and feedback durably, without delaying runs.

A thread appends what has accumulated and calls ``fsync`` once for each file. Runs are not waited
for; feedback is acknowledged once it and all earlier runs are on the disk.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from compound.core.errors import CompoundError
from compound.core.security.sanitize import redact_values, sanitize_text
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.locking import Lock
from compound.core.storage.records import to_encodable_json
from compound.evaluation.feedback import FEEDBACK, RUNS
from compound.execution.trace import Trace, to_json
from compound.graph.configuration import digest

LOG = logging.getLogger("compound.api.serving")


class StoreError(CompoundError):
    """A feedback folder cannot be used."""


@dataclass(frozen=True)
class _Line:
    """A line to append, of a run or of feedback; ``done`` is set once feedback is on the disk."""

    data: bytes
    run: str = ""
    done: Future[None] | None = None


class FeedbackStore:
    """A feedback folder opened for writing, by one server at a time.

    Raises:
        CompoundError: the folder cannot be written, or another server writes to it.
    """

    def __init__(
        self,
        place: Path | UntrustedFolder,
        on_lost: Callable[[int], object] = lambda runs: None,
        most: int = 2**30,
    ) -> None:
        folder = UntrustedFolder(place, error=StoreError) if isinstance(place, Path) else place
        self.path, self._on_lost, self._most = folder.path, on_lost, most
        self._problem = ""
        try:
            self._lock = Lock(folder.make())
        except CompoundError as error:
            raise StoreError(
                f"feedback cannot be stored: {error.message}",
                hint="choose another --feedback folder",
            ) from error
        self._files: dict[str, BinaryIO] = {}
        try:
            folder = self._lock.folder
            for name in (RUNS, FEEDBACK):
                _remove_partial_line(folder, name)
                self._files[name] = folder.appender(name)
            self._inputs = _known_runs(folder)
        except BaseException:
            self._release()
            raise
        self._lines: SimpleQueue[_Line | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="compound-feedback", daemon=True)
        self._thread.start()

    def add_run(self, run: str, trace: Trace) -> None:
        """Record a run, soon."""
        document = to_json(trace)
        self._inputs[run] = digest(document["inputs"])
        for call in document["calls"]:
            call["tokens"] = []
            call.pop("exchanges", None)
        self._put({"run": run, "time": _now(), "trace": document}, run=run)

    def add_feedback(self, document: Mapping[str, object]) -> Future[None]:
        """Record feedback; the result is set once it is on the disk."""
        done: Future[None] = Future()
        self._put({"time": _now(), **document}, done=done)
        return done

    def knows(self, run: str) -> bool:
        """Return whether a run was recorded."""
        return run in self._inputs

    def have_equal_inputs(self, one: str, other: str) -> bool:
        """Return whether two recorded runs had the same inputs."""
        return self._inputs[one] == self._inputs[other]

    def close(self) -> None:
        """Write what is left, and release the folder."""
        self._lines.put(None)
        self._thread.join()
        self._release()

    def _release(self) -> None:
        for file in self._files.values():
            file.close()
        self._lock.release()

    def _put(
        self, document: Mapping[str, object], run: str = "", done: Future[None] | None = None
    ) -> None:
        text = to_encodable_json(redact_values(dict(document)))  # keys may be escaped in the text
        self._lines.put(_Line(sanitize_text(text).encode() + b"\n", run, done))

    def _work(self) -> None:
        open_ = True
        while open_:
            lines, open_ = self._waiting_lines()
            runs = [line for line in lines if line.run]
            try:
                self._append(RUNS, runs)
                runs = []
                self._append(FEEDBACK, [line for line in lines if line.done is not None])
            except OSError as error:
                if str(error) != self._problem:
                    LOG.warning("feedback in %s cannot be written: %s", self.path, error)
                self._problem = str(error)
                for line in runs:
                    self._inputs.pop(line.run, None)  # feedback on it would be of no use
                self._on_lost(len(runs))
                failed = StoreError(f"the feedback cannot be written: {error.strerror}")
                _finish(lines, failed)
            else:
                _finish(lines, None)

    def _waiting_lines(self) -> tuple[list[_Line], bool]:
        """Wait for a line; return all that wait, and whether more can follow."""
        lines: list[_Line] = []
        line = self._lines.get()
        while line is not None:
            lines.append(line)
            if self._lines.empty():
                return lines, True
            line = self._lines.get()
        return lines, False

    def _append(self, name: str, lines: list[_Line]) -> None:
        """Append lines to a file, and flush it to the disk."""
        data = b"".join(line.data for line in lines)
        if not data:
            return
        size = sum(os.fstat(file.fileno()).st_size for file in self._files.values())
        if size + len(data) > self._most:
            raise OSError(errno.EDQUOT, f"it would exceed {self._most:,} bytes; see --max-feedback")
        descriptor = self._files[name].fileno()
        end = os.fstat(descriptor).st_size
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, end)  # a part of a line would damage the next one
            raise


def _finish(lines: list[_Line], error: Exception | None) -> None:
    for line in lines:
        if line.done is None or line.done.cancelled():
            continue
        if error is None:
            line.done.set_result(None)
        else:
            line.done.set_exception(error)


def _remove_partial_line(folder: UntrustedFolder, name: str) -> None:
    """Remove a last line that a crash left incomplete."""
    size = folder.size(name)
    if size:
        with folder.reader(name) as file:
            whole = sum(len(line) for line in file if line.endswith(b"\n"))
        if whole < size:
            folder.truncate(name, whole)


def _known_runs(folder: UntrustedFolder) -> dict[str, str]:
    """Return the digests of the inputs of all recorded runs, by id."""
    known: dict[str, str] = {}
    with folder.reader(RUNS) as file:
        for number, line in enumerate(file, 1):
            try:
                document = json.loads(line)
                known[document["run"]] = digest(document["trace"]["inputs"])
            except (ValueError, TypeError, KeyError, RecursionError):
                raise StoreError(
                    f"{folder.path / RUNS}:{number} is damaged", hint="remove the line"
                ) from None
    return known


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
