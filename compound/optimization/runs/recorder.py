"""Record a run: events, traces, checkpoints, and notifications for listeners.

A run writes an event for every step, with its kind as ``event``, the time as ``at``, and the amounts
spent so far as ``spent``; its file has a checksum per line (`compound.core.storage.records`):

- ``outlook``: the prospects of the run; see `compound.optimization.preflight`.
- ``start``: the initial configuration was evaluated.
- ``progress``: a job advanced by a step, or by an evaluation of its result so far.
- ``job``: a job ended; see `compound.optimization.method.JobRecord`.
- ``decision``: the working configuration was compared with the last supported one, if the budget
  allowed. ``verdict`` is ``supported`` if the test supports the change, ``promising`` if it only
  scored higher, with the ``probability`` that it is better and about how many ``examples`` would
  support it, ``feasible`` if it meets the limits, which the best configuration so far does not.
  ``over`` are limits that it exceeds. ``lost`` is the number of examples with runs of the reference
  that were lost to transient failures; they are no evidence for the change. ``level`` is that of the
  last of the ``looks``. If a loss of up to ``margin`` is accepted, verdict, ``p`` and
  ``probability`` are about larger losses.
- ``retry``: failed rows of an evaluation were rerun.
- ``round``, ``proposals``, ``note``, ``test_before``, ``test_after``, ``done``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compound.core.errors import CompoundError
from compound.core.example import Example
from compound.core.security.sanitize import redact_values
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.artifacts import discard_temporaries
from compound.evaluation.evaluate import OnTrace
from compound.execution.budget import Meter
from compound.execution.cache import Cache, DiskCache
from compound.execution.exchange import is_stored
from compound.execution.trace import Call, Trace, to_json, without_messages
from compound.optimization.runs.directory import PILOT, RunDirectory, read_records
from compound.optimization.runs.state import OptimizationState

Listener = Callable[[Mapping[str, Any]], None]
Event = Mapping[str, Any]
EVENTS, MEMORY, MEMORY_FOLDER = "events.jsonl", "memory.jsonl", "memory"
CACHE, STOP = "cache.sqlite", "STOP"


class Interrupted(CompoundError):
    """The user requested a stop; all progress is saved."""


class Recorder:
    """Writes a run's record and holds its state.

    Every event appends a line and checkpoints the state, so that a run can be killed at any time. It
    ends after the next checkpoint if `stop` is called, or a file ``STOP`` is in the run directory.

    Args:
        run: the run directory; closed if it cannot be restored.
        listener: receives each event, and ``call``, ``notice`` and ``phase``, which are not recorded.

    Attributes:
        resumed: whether the state was restored from a checkpoint.
        on_record: called with each further record of the method's memory.
        written: what the next checkpoint waits for; see `compound.optimization.method.Progress`.
    """

    def __init__(self, run: RunDirectory, *, listener: Listener | None = None) -> None:
        self.run = run
        self._others: list[DiskCache] = []
        try:
            stored = run.restore()
            if run.folder.kind(MEMORY_FOLDER) == "folder":
                discard_temporaries(run.path / MEMORY_FOLDER)
            self._disk = DiskCache(run.path / CACHE, step=run.step, recorded=run.cached)
            self.cache: Cache = self._disk
            self.use_calls_of(run.folder.below(PILOT))
        except BaseException:
            run.close()
            raise
        self.state = stored or OptimizationState()
        self._listeners = [listener] if listener is not None else []
        self.on_record: list[Listener] = []
        self.written: Callable[[], None] | None = None
        self._stop = False
        self._reported_problems = 0
        self.resumed = stored is not None
        self._meters: tuple[Meter, ...] = ()

    def attach_meters(self, search: Meter, test: Meter) -> None:
        """Restore the budget meters from the state, and store them in all further checkpoints."""
        self._meters = (search, test)
        for meter, stored in zip(self._meters, self.state.meters, strict=False):
            meter.restore(stored)

    def use_calls_of(self, *folders: UntrustedFolder) -> None:
        """Make no calls that other runs have recorded, but charge them like new ones."""
        found = [folder for folder in folders if folder.kind(CACHE) is not None]
        self._others += [DiskCache(folder.path / CACHE) for folder in found]
        if self._others:
            self.cache = _Layered(self._disk, self._others)

    def stop(self) -> None:
        """Stop the run after the next checkpoint."""
        self._stop = True

    def event(self, event: str, **facts: object) -> None:
        """Record an event and checkpoint the state, after notes about damaged cache entries."""
        spent = self._spent()
        problems = self._disk.problems[self._reported_problems :]
        rows: list[dict[str, object]] = [{"event": "note", "note": problem} for problem in problems]
        rows.append({"event": event, **facts})
        recorded = [{**row, "spent": spent, "at": time.time()} for row in rows]
        for row in recorded:
            self.run.append(EVENTS, row)
        self._reported_problems = len(self._disk.problems)
        self.save()
        for row in recorded:
            self._notify(row)
        self._stop_if_requested()

    def subscribe(self, listener: Listener, *, on_record: Listener | None = None) -> None:
        """Add a listener of all further events, and of further records of the method's memory."""
        self._listeners.append(listener)
        if on_record is not None:
            self.on_record.append(on_record)

    def _notify(self, event: Mapping[str, Any]) -> None:
        for listener in self._listeners:
            listener(event)

    def save(self) -> None:
        """Checkpoint the current state."""
        self.state.meters = [meter.snapshot() for meter in self._meters]
        written, self.written = self.written, None
        self.run.checkpoint(self.state, self._disk.count, written)
        self._disk.step = self.run.step

    def _stop_if_requested(self) -> None:
        is_requested = self._stop or self.run.folder.kind(STOP) is not None
        if is_requested and not self.state.done:
            self.run.flush()
            self.run.folder.remove(STOP)
            raise Interrupted(
                f"stopped; progress is saved in {self.run.path}",
                hint="run the same command to resume",
            )

    @property
    def memory(self) -> RunMemory:
        """Storage of the method across jobs."""
        return RunMemory(self)

    def trace(self, split: str, *, again: bool = False) -> OnTrace:
        """Return a function that records traces of a split; ``again`` marks those of reruns."""
        kind = {"split": split, "again": True} if again else {"split": split}

        def record(example: Example, trace: Trace) -> None:
            gold = {  # the fields that are short enough to display
                k: v
                for k, v in example.gold.items()
                if isinstance(v, str | int | float) and len(str(v)) <= 300
            }
            row = to_json(trace if is_stored() else without_messages(trace))
            self.run.append("traces.jsonl", {**kind, "gold": redact_values(gold), **row})

        return record

    def on_call(self, call: Call) -> None:
        """Notify the listener of a finished call."""
        self.tell("call", component=call.component)

    def tell(self, event: str, **facts: object) -> None:
        """Notify the listener of something outside of the record, such as a wait for a rate limit."""
        if self._listeners:
            self._notify({"event": event, **facts, "spent": self._spent()})

    def _spent(self) -> dict[str, Any]:
        if not self._meters:
            return {}
        usage = self._meters[0].usage + self._meters[1].usage
        judged = self._meters[0].metric_usage + self._meters[1].metric_usage
        # a part of the numbers below; only metrics that ask a model have any
        own = {
            "metric_calls": judged.calls,
            "metric_tokens": judged.tokens,
            "metric_cost": round(judged.cost, 9),
        }
        return {
            **(own if judged.calls else {}),
            "system_runs": round(self._meters[0].system_runs, 6),
            "test_runs": round(self._meters[1].system_runs, 6),
            "calls": usage.calls,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "unpriced": usage.unpriced,
            "cost": round(
                usage.cost, 9
            ),  # the order of summation varies: the last digits are not significant
            "seconds": round(sum(meter.seconds for meter in self._meters), 3),
        }

    @property
    def has_no_calls(self) -> bool:
        """Whether no call has been answered yet."""
        return not any(meter.runs for meter in self._meters) and not self._disk.count

    def discard(self) -> None:
        """Delete and close the run."""
        self._close_caches()
        self.run.discard()

    def close(self) -> None:
        """Close the files."""
        self._close_caches()
        self.run.close()

    def _close_caches(self) -> None:
        for cache in (self._disk, *self._others):
            cache.close()


class RunMemory:
    """Storage of a method in the run directory; implements `compound.optimization.method.Memory`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def state(self) -> dict[str, Any]:
        """JSON, stored with every checkpoint."""
        return self._recorder.state.memory

    @property
    def folder(self) -> Path:
        """Folder for files."""
        return self._recorder.run.folder.below(MEMORY_FOLDER).make().path

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record; it is durable from the next checkpoint on."""
        self._recorder.run.append(MEMORY, record)
        for listener in self._recorder.on_record:
            listener(record)

    def flush(self) -> None:
        """Wait until the last checkpoint is stored."""
        self._recorder.run.flush()

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records so far."""
        return self._recorder.run.read(MEMORY)


class _Layered:
    """A cache on top of others; their entries are charged like new calls, and then stored in it."""

    def __init__(self, own: DiskCache, others: Sequence[DiskCache]) -> None:
        self._own, self._others = own, others
        self._borrowed: set[str] = set()

    def get(self, key: str) -> Mapping[str, Any] | None:
        found = self._own.get(key)
        if found is None:
            each = (other.get(key) for other in self._others)
            found = next((result for result in each if result is not None), None)
            if found is not None:
                self._borrowed.add(key)
        return found

    def put(self, key: str, result: Mapping[str, Any]) -> None:
        self._own.put(key, result)

    def drop(self, key: str, why: str) -> None:
        self._own.drop(key, why)
        self._borrowed.discard(key)

    def take_pending(self, key: str) -> bool:
        if key in self._borrowed:
            self._borrowed.discard(key)
            return True
        return self._own.take_pending(key)


def read_events(place: str | Path | UntrustedFolder) -> list[Event]:
    """Return the events of a run, in order.

    Raises:
        RunDirectoryError: a line is damaged.
    """
    return [*read_records(place, EVENTS)]


def is_supported(decision: Event) -> bool:
    """Return whether a test supported a change; earlier versions accepted only such changes."""
    return bool(
        decision["verdict"] == "supported" if "verdict" in decision else decision["accepted"]
    )
