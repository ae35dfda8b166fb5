"""Write runs and feedback durably, without delaying runs.

A thread appends the lines. Runs are not waited for; feedback is acknowledged once it and all
earlier runs are on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
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


class FeedbackStore:
    """A feedback folder opened for writing, by one server at a time.

    Raises:
        CompoundError: the folder cannot be written, or another server writes to it.
    """

    def __init__(
        self,
        place: Path | UntrustedFolder,
        on_lost: Callable[[], object] = lambda: None,
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
        self._writer = ThreadPoolExecutor(1, "compound-feedback")

    def add_run(self, run: str, trace: Trace) -> None:
        """Record a run, soon."""
        document = to_json(trace)
        self._inputs[run] = digest(document["inputs"])
        for call in document["calls"]:
            call["tokens"] = []
            call.pop("exchanges", None)
        line = _line({"run": run, "time": _now(), "trace": document})
        self._writer.submit(self._write_run, run, line)

    def add_feedback(self, document: Mapping[str, object]) -> Future[None]:
        """Record feedback; the result is set once it is on the disk."""
        return self._writer.submit(self._write_feedback, _line({"time": _now(), **document}))

    def knows(self, run: str) -> bool:
        """Return whether a run was recorded."""
        return run in self._inputs

    def have_equal_inputs(self, one: str, other: str) -> bool:
        """Return whether two recorded runs had the same inputs."""
        return self._inputs[one] == self._inputs[other]

    def close(self) -> None:
        """Write what is left, and release the folder."""
        self._writer.shutdown()
        with contextlib.suppress(OSError):
            os.fsync(self._files[RUNS].fileno())
        self._release()

    def _release(self) -> None:
        for file in self._files.values():
            file.close()
        self._lock.release()

    def _write_run(self, run: str, line: bytes) -> None:
        try:
            self._append(RUNS, line)
        except OSError as error:
            self._warn(error)
            self._inputs.pop(run, None)  # feedback on it would be of no use
            self._on_lost()

    def _write_feedback(self, line: bytes) -> None:
        try:
            os.fsync(self._files[RUNS].fileno())
            self._append(FEEDBACK, line, sync=True)
        except OSError as error:
            self._warn(error)
            raise StoreError(f"the feedback cannot be written: {error.strerror}") from None

    def _warn(self, error: OSError) -> None:
        if str(error) != self._problem:
            LOG.warning("feedback in %s cannot be written: %s", self.path, error)
        self._problem = str(error)

    def _append(self, name: str, data: bytes, *, sync: bool = False) -> None:
        """Append a line to a file, and flush it to the disk if asked to."""
        size = sum(os.fstat(file.fileno()).st_size for file in self._files.values())
        if size + len(data) > self._most:
            raise OSError(errno.EDQUOT, f"it would exceed {self._most:,} bytes; see --max-feedback")
        descriptor = self._files[name].fileno()
        end = os.fstat(descriptor).st_size
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            if sync:
                os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, end)  # a part of a line would damage the next one
            raise


def _line(document: Mapping[str, object]) -> bytes:
    text = to_encodable_json(redact_values(dict(document)))  # keys may be escaped in the text
    return sanitize_text(text).encode() + b"\n"


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
