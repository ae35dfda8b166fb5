"""The runs of a folder, read when a page needs them, and kept while their files do not change."""

from __future__ import annotations

import math
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from compound.api.studio.traces import TraceIndex
from compound.api.sync import run_directories
from compound.core.errors import RunDirectoryError
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.locking import Owner
from compound.evaluation.evaluate import Evaluation, gain_interval
from compound.execution.rng import derive_seed
from compound.optimization.runs.candidate_record import CandidateRecord, read_candidates
from compound.optimization.runs.candidates import FILE as CANDIDATES
from compound.optimization.runs.directory import CHECKPOINT, CONFIG, inconsistency_errors
from compound.optimization.runs.recorder import EVENTS, STOP
from compound.report import summarize
from compound.report.record import SIDES, Facts, Record

State = Literal["finished", "running", "unfinished", "damaged"]
Value = TypeVar("Value")
MOST_OPEN = 8  # runs whose contents are kept, each with an index of its traces
IDLE = 60.0  # seconds without a request after which the contents of another run may be dropped


class Run:
    """A run directory.

    Args:
        name: path of the run relative to the folder of the page.
        folder: the run directory.
        database: file for the index of its traces.
    """

    def __init__(self, name: str, folder: UntrustedFolder, database: Path) -> None:
        self.name, self.folder = name, folder
        self.traces = TraceIndex(folder, database)
        self._kept: dict[str, tuple[object, object]] = {}
        self._lock = threading.Lock()

    def remember(self, name: str, files: Sequence[str], read: Callable[[], Value]) -> Value:
        """Return a value of some files, such as a figure, read again only after a change of them."""
        with self._lock:
            stamp = self.stamp(files)
            kept = self._kept.get(name)
            if kept is None or kept[0] != stamp:
                with inconsistency_errors(self.folder):
                    kept = self._kept[name] = stamp, read()
            return cast("Value", kept[1])

    def stamp(self, files: Sequence[str] = (CHECKPOINT, EVENTS, CANDIDATES)) -> tuple[object, ...]:
        """Return sizes and times of files, which differ after a change."""
        return tuple(_stamp(self.folder, name) for name in files)

    @property
    def record(self) -> Record:
        """The configuration, the events and the state of the run."""
        return self.remember(
            "record", (CONFIG, CHECKPOINT, EVENTS), partial(Record.read, self.folder)
        )

    @property
    def facts(self) -> Facts:
        """The facts of the run's report, without those of its traces."""
        files, record = (CONFIG, CHECKPOINT, EVENTS, CANDIDATES), self.record
        path = self.folder.path
        return self.remember("facts", files, lambda: summarize(path, traces=False, record=record))

    @property
    def candidates(self) -> list[CandidateRecord]:
        """The candidates so far: of a run in progress, up to its last job or decision."""
        return self.remember(
            CANDIDATES, (CANDIDATES, CHECKPOINT), partial(read_candidates, self.folder)
        )

    @property
    def known_candidates(self) -> tuple[list[CandidateRecord], str]:
        """The candidates, or none and the reason if they cannot be read."""
        try:
            return self.candidates, ""
        except RunDirectoryError as error:
            return [], str(error)

    @property
    def state(self) -> State:
        """Whether the run has ended, and otherwise whether a process of this machine writes to it."""
        return _state(self.folder, done=self.record.state.done)

    def sides(self) -> dict[str, tuple[str, str]]:
        """Return the initial and the best configuration of each split that both were run on."""
        found = {}
        for split, names in SIDES.items():
            before, after = map(self.record.evaluation, names)
            if before and after:
                found[split] = before.configuration, after.configuration
        return found

    def configurations(self) -> dict[str, str]:
        """Return a name for each known configuration by digest."""
        names = {self.record.start.digest: "initial"}
        best = self.record.best.digest
        for number, candidate in enumerate(self.known_candidates[0], 1):
            names.setdefault(candidate.digest, f"candidate {number}")
        return names if names.get(best) == "initial" else {**names, best: "result"}

    def stop(self) -> None:
        """Ask the process of the run to end after its next checkpoint.

        Raises:
            RunDirectoryError: no process writes to the run, or the file cannot be written.
        """
        if self.state != "running":
            raise RunDirectoryError(f"{self.name} is not running")
        self.folder.write(STOP, "")

    @property
    def is_stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self.folder.kind(STOP) is not None

    def summary(self) -> dict[str, Any]:
        """Return the row of the list of runs; that of a run that cannot be read holds the reason."""
        try:
            files = (CONFIG, CHECKPOINT, EVENTS)
            row = self.remember("summary", files, partial(_summary, self.name, self.folder))
            stopping = self.is_stopping
        except RunDirectoryError as error:
            return {"name": self.name, "state": "damaged", "problem": str(error)}
        return {**row, "state": _state(self.folder, done=row["done"]), "stopping": stopping}


class Runs:
    """The runs in a folder, or in one run directory.

    Args:
        folder: the folder.
        scratch: a folder for indexes, which is deleted by its owner.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self._scratch = folder, scratch
        self._is_run = UntrustedFolder(folder).kind(CONFIG) is not None
        self._known: dict[str, Run] = {}
        self._used: dict[str, float] = {}  # when a page of a run was last asked for
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Return the names of all runs, in order.

        Raises:
            RunDirectoryError: the folder cannot be read.
        """
        if self._is_run:
            return [self.folder.resolve().name]
        return sorted(str(path.relative_to(self.folder)) for path in run_directories(self.folder))

    def get(self, name: str) -> Run:
        """Return a run by name, for a page.

        Raises:
            RunDirectoryError: there is no such run in the folder.
        """
        run = self._find(name)
        with self._lock:
            now = time.monotonic()
            self._used.pop(name, None)
            self._used[name] = now  # at the end
            idle = [known for known, at in self._used.items() if now - at > IDLE]
            for other in idle[: max(0, len(self._used) - MOST_OPEN)]:
                del self._used[other]
                self._known.pop(other).traces.close()
        return run

    def _find(self, name: str) -> Run:
        folder = UntrustedFolder(self.folder)
        parts = [part for part in name.split("/") if part]
        for part in parts[1:] if self._is_run else parts:
            folder = folder.below(part)
        if not parts or folder.kind(CONFIG) is None:
            raise RunDirectoryError(f"there is no run {name!r} in {self.folder}")
        with self._lock:
            database = self._scratch / f"{derive_seed(name):x}.sqlite"
            return self._known.setdefault(name, Run(name, folder, database))

    def summaries(self) -> list[dict[str, Any]]:
        """Return the rows of all runs, the latest first."""
        rows = [self._summary(name) for name in self.names()]
        return sorted(rows, key=lambda row: -(row.get("began") or 0))

    def _summary(self, name: str) -> dict[str, Any]:
        try:
            name.encode()
            return self._find(name).summary()
        except UnicodeEncodeError:  # it could be in no address
            name = name.encode(errors="replace").decode()
            return {"name": name, "state": "damaged", "problem": f"{name!r} is not named in UTF-8"}
        except RunDirectoryError as error:  # such as a folder that cannot be inspected
            return {"name": name, "state": "damaged", "problem": str(error)}

    def close(self) -> None:
        """Close all runs."""
        with self._lock:
            while self._known:
                self._known.popitem()[1].traces.close()


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the runs in a folder, the latest last, with path and result in words."""
    rows = []
    for path in run_directories(folder):
        row = Run(str(path), UntrustedFolder(path), Path()).summary()
        result = row.get("problem", "")
        if row.get("after") is not None:
            result = f"{row['split']} {row['before']:.3f} -> {row['after']:.3f}"
        rows.append({"run": str(path), "status": row["state"], "result": result, **row})
    return sorted(rows, key=lambda row: row.get("began") or 0.0)


def _stamp(folder: UntrustedFolder, name: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(folder.path / name, follow_symlinks=False)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _state(folder: UntrustedFolder, *, done: bool) -> State:
    return "finished" if done else "running" if is_alive(folder) else "unfinished"


def is_alive(folder: UntrustedFolder) -> bool:
    """Return whether the process that last wrote to a run directory still exists on this machine.

    The lock itself is not tried: that could refuse a run that starts at this moment.
    """
    owner = Owner.read(folder)
    if owner is None or owner.host != platform.node():
        return False
    try:
        os.kill(owner.process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # it belongs to another user
    return True


def _summary(name: str, folder: UntrustedFolder) -> dict[str, Any]:
    """Return the row of a run in a list."""
    record = Record.read(folder)
    config, spent = record.config, record.spent
    split, before, after = compared_sides(record)
    gain = None
    if before is not None and after is not None and before.configuration != after.configuration:
        gain = gain_interval(before, after).to_json()
    times = [event["at"] for event in record.events if "at" in event]
    return {
        "name": name,
        "done": record.state.done,
        "system": str(config.get("system", "")),
        "method": record.method,
        "seed": config["optimize"]["seed"],
        "models": sorted({str(engine) for engine in config.get("engines", {}).values()}),
        "split": split,
        "before": before.mean if before else None,
        "after": after.mean if after else None,
        "gain": gain,
        "missing": record.missing,
        "cost": spent.get("cost"),
        "unpriced": spent.get("unpriced", 0),
        "tokens": spent.get("prompt_tokens", 0) + spent.get("completion_tokens", 0),
        "seconds": spent.get("seconds"),
        "began": times[0] if times else None,
        "data": config.get("data", {}).get(split, {}).get("digest"),
    }


def compared_sides(record: Record) -> tuple[str, Evaluation | None, Evaluation | None]:
    """Return the split that shows the result, and the evaluations before and after."""
    for split, names in SIDES.items():
        before, after = map(record.evaluation, names)
        if before is not None and (after is not None or split == "valid"):
            return split, before, after
    return "valid", None, None


def spending(run: Run) -> list[dict[str, Any]]:
    """Return the amounts spent, each with its limit, if there is one, and the fraction used."""
    record = run.record
    budget: Mapping[str, Any] = record.config["optimize"].get("budget", {})
    spent = record.events[-1]["spent"] if record.events else {}
    tokens = spent.get("prompt_tokens", 0) + spent.get("completion_tokens", 0)
    used = {
        "system_runs": ("system runs", spent.get("system_runs", 0)),
        "calls": ("model calls", spent.get("calls", 0)),
        "tokens": ("tokens", tokens),
        "cost": ("dollars", spent.get("cost", 0)),
        "minutes": ("minutes", spent.get("seconds", 0) / 60),
    }
    rows = []
    for key, (label, amount) in used.items():
        found = budget.get(key)
        limit = found if isinstance(found, int | float) and 0 < found < math.inf else None
        share = min(1.0, amount / limit) if limit else None
        rows.append({"label": label, "amount": amount, "limit": limit, "share": share})
    return rows


def seconds_left(run: Run) -> float | None:
    """Return an estimate of the time until the budget is spent, at the speed so far; ``None`` if unknown."""
    shares = [row["share"] for row in spending(run) if row["share"]]
    events = run.record.events
    if not shares or len(events) < 2:
        return None
    took = max(time.time(), events[-1]["at"]) - events[0]["at"]
    return float(took * (1 - max(shares)) / max(shares))
