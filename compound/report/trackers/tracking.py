"""Send the record of a run to trackers, while it runs or afterwards.

Trackers follow the run directory: its events and training steps are logged in order, and
``trackers.json`` stores how many were. A resumed run therefore continues the same run of the
tracker without gaps; after a kill, the last event may be logged twice. What a tracker missed is
sent at the end or by a later call. A tracker that fails never ends a run.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pydantic import BaseModel

from compound.core.errors import CompoundError, DeclarationError, raise_missing_extra, suggest_name
from compound.core.security.sanitize import sanitize_text
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.records import to_document
from compound.core.web.addresses import can_connect
from compound.execution.rng import derive_seed
from compound.optimization.runs.directory import (
    CONFIG,
    RunDirectory,
    load_checkpoint,
    read_json,
    read_records,
)
from compound.optimization.runs.recorder import MEMORY, Interrupted, Recorder
from compound.optimization.settings.base import TrackerName
from compound.report.trackers.backends import (
    MLflowTracker,
    Status,
    TensorboardTracker,
    TrackedRun,
    Tracker,
    WandbTracker,
)
from compound.report.training import KIND, numbers_by_path, step_metrics

SECTIONS = ("system", "optimize", "engines", "data", "metric", "versions", "start")
MAX_CHARACTERS = 500  # of a value; MLflow accepts 6,000, its table shows far fewer


def run_parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters that trackers show; long values are truncated.

    >>> run_parameters({"system": "qa", "optimize": {"seed": 0, "budget": {"calls": 40, "cost": None}}})
    {'system': 'qa', 'optimize.seed': '0', 'optimize.budget.calls': '40'}
    """
    chosen = {name: config[name] for name in SECTIONS if name in config}
    return {name: sanitize_text(text)[:MAX_CHARACTERS] for name, text in _flat(chosen, "")}


def _flat(value: object, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, str):
        yield name, value
    elif isinstance(value, Sequence | int | float):
        yield name, json.dumps(value, ensure_ascii=False, default=str)


SCORES = ("mean", "low", "high", "failed", "n")
METRICS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "start": ("valid", SCORES),
    "job": ("job", ("job", "tried", "runs", "train_before", "train_after")),
    "decision": ("decision", ("decision", "p", "level", "accepted", "before", "after", "gain")),
    "test_before": ("test_before", SCORES),
    "test_after": ("test_after", SCORES),
}
"""The start of the names of metrics by the kind of event, and the entries with their numbers."""


def event_metrics(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an event; empty if it has none but the budget.

    ``best/valid`` is the score of the best configuration on the validation split. A decision
    evaluates it again, with fresh samples if the system is stochastic.

    >>> event_metrics({"event": "start", "mean": 0.25, "low": None, "high": None, "n": 40, "failed": 0})
    {'valid/mean': 0.25, 'valid/failed': 0, 'valid/n': 40, 'best/valid': 0.25}
    """
    kind = str(event["event"])
    if kind == "retry":
        kind, event = str(event["evaluation"]), event["after"]
    start, names = METRICS.get(kind, ("", ()))
    found: dict[str, object] = {name: event[name] for name in names if name in event}
    if kind == "job":
        found["accuracy"] = (event.get("facts") or {}).get("accuracy")
    best = event.get("mean") if kind == "start" else None
    if kind == "decision" and "before" in event:
        best = event["after" if event["accepted"] else "before"]["mean"]
    return numbers_by_path({start: found, "best": {"valid": best}})


FILE = "trackers.json"
ARTIFACTS = ("report.md", "report.html", "best.json", "system.yaml", CONFIG, "events.jsonl")
UNRECORDED = ("call", "notice", "phase")  # events that are not part of the record
TRACKERS: Mapping[TrackerName, Callable[[], Tracker]] = {
    "mlflow": MLflowTracker,
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
}
NOTICE_SECONDS = 2.0  # of waiting until it is told
START_SECONDS = 60.0  # of waiting for the start
FINAL_SECONDS = 30.0  # of waiting without progress at the end
_log = logging.getLogger("compound")


class Position(BaseModel):
    """What a tracker has received: the id of its run, and the number of logged events."""

    id: str = ""
    events: int = 0


class Follower:
    """Logs the record of a run directory to one tracker."""

    def __init__(self, name: TrackerName, folder: Path) -> None:
        self.name, self.folder = name, UntrustedFolder(folder)
        self.position = Position()
        self.sent = self._seen = 0
        self._steps: list[Mapping[str, Any]] = []  # training steps that no event has covered yet
        self.problem = ""

    def start(self) -> None:
        """Start or continue the tracker's run, and log what the record has so far."""
        self._tracker = TRACKERS[self.name]()
        self._require_server()
        config = read_json(self.folder, CONFIG)
        self._seed = int(config["optimize"]["seed"])
        stored = _read_positions(self.folder).get(self.name, Position())
        path = self.folder.path
        run = TrackedRun(path.name, str(config["system"]), path, run_parameters(config))
        found = self._tracker.start(run, stored.id)
        self.position = stored if found == stored.id else Position(id=found)
        self._store()
        self.catch_up()

    def _require_server(self) -> None:
        """Fail at once if the tracker's server is not reachable: its library may try for minutes."""
        server = getattr(self._tracker, "server", "")
        if server and not can_connect(server):
            raise ConnectionError(f"no server answers at {server}")

    def catch_up(self) -> None:
        """Log the events of the record that were not logged yet."""
        self._seen = 0
        self._steps = [r for r in read_records(self.folder, MEMORY) if r.get("kind") == KIND]
        for event in read_records(self.folder, "events.jsonl"):
            self._follow(event)

    def add_step(self, record: Mapping[str, Any]) -> None:
        """Add a training step; it is logged with the next event of its job."""
        self._steps.append(record)

    def follow(self, event: Mapping[str, Any]) -> None:
        """Log an event; after a failure, wait for the end of the run."""
        if self.problem:
            return
        try:
            self._follow(event)
        except Exception as error:  # noqa: BLE001 - a tracker must not end a run
            self.problem = _describe(error)
            again = "not reachable, trying again at the end of the run"
            _log.warning("%s: %s: %s", self.name, again, self.problem)

    def finish(self, status: Status) -> None:
        """Log what is missing, upload the files, and end the tracker's run."""
        self._require_server()
        self.catch_up()
        files = [self.folder.path / n for n in ARTIFACTS if self.folder.kind(n) == "file"]
        self._tracker.finish(status, files)

    def finish_if_possible(self, status: Status) -> None:
        """Finish, or warn that the run is not completely logged."""
        try:
            self.finish(status)
        except Exception as error:  # noqa: BLE001 - a tracker must not end a run
            where = f"`compound runs track {self.folder.path} --to {self.name}` sends the rest"
            _log.warning(
                "%s: the run is not completely logged: %s; %s", self.name, _describe(error), where
            )

    def _follow(self, event: Mapping[str, Any]) -> None:
        self._seen += 1
        steps = self._covered(event)
        if self._seen <= self.position.events:
            return
        budget = numbers_by_path({"budget": event.get("spent")})
        training = [{**step_metrics(step), "step": step.get("step")} for step in steps]
        points = [{**numbers_by_path({"training": each}), **budget} for each in training]
        if (metrics := event_metrics(event)) or not points:
            points.append({**metrics, **budget})
        for point in points:
            self._tracker.log(point, budget.get("budget/system_runs", 0.0), float(event["at"]))
        self.position.events = self._seen
        self.sent += 1
        self._store()

    def _covered(self, event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the training steps recorded before an event: one for its progress, all at its end."""
        kind = event["event"]
        if kind not in ("progress", "job") or (kind == "progress" and "evaluation" in event):
            return []
        seed = derive_seed(self._seed, "job", int(event["job"]))
        own = [step for step in self._steps if step.get("seed") == seed]
        covered = own[:1] if kind == "progress" else own
        self._steps = [step for step in self._steps if not any(step is other for other in covered)]
        return covered

    def _store(self) -> None:
        positions = {**_read_positions(self.folder), self.name: self.position}
        document = {name: position.model_dump() for name, position in positions.items()}
        self.folder.write(FILE, to_document(document))


class TrackerThread:
    """Runs functions one after another in a thread, which does not keep the process from ending."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Future[None], Callable[[], object]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="compound-trackers", daemon=True).start()

    def submit(self, function: Callable[..., object], *arguments: object) -> Future[None]:
        """Run a function after those submitted before, and return the future of its end."""
        future: Future[None] = Future()
        self._tasks.put((future, partial(function, *arguments)))
        return future

    def shutdown(self) -> None:
        """End the thread after what was submitted."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work = task
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again where the future is read
                future.set_exception(error)
            else:
                future.set_result(None)


@dataclass
class Tracking:
    """Followers of one run; they work in one thread, so that a slow tracker does not delay the run."""

    followers: Sequence[Follower]
    worker: TrackerThread

    def start(self) -> None:
        """Start the runs of all trackers.

        Raises:
            DeclarationError: a tracker cannot be started.
            MissingExtra: the library of a tracker is not installed.
        """
        try:
            self._start_in_time()
        except DeclarationError:
            raise
        except Exception as error:
            raise_missing_extra(error, "optimize.trackers")
            raise DeclarationError(
                f"optimize.trackers: the run cannot be tracked: {_describe(error)}",
                hint="check the tracker's environment variables, or remove it from optimize.trackers",
            ) from error

    def _start_in_time(self) -> None:
        starting = self.worker.submit(_start, self.followers)
        if not wait([starting], NOTICE_SECONDS).done:
            names = ", ".join(follower.name for follower in self.followers)
            _log.warning("waiting for %s …", names)
            if not wait([starting], START_SECONDS).done:
                raise TimeoutError(f"no answer of {names} in {START_SECONDS:g} s")
        starting.result()

    def listen(self, event: Mapping[str, Any]) -> None:
        """Log a recorded event in the background."""
        if event["event"] not in UNRECORDED:
            for follower in self.followers:
                self.worker.submit(follower.follow, event)

    def record(self, record: Mapping[str, Any]) -> None:
        """Receive a record of the method's memory."""
        if record.get("kind") == KIND:
            for follower in self.followers:
                self.worker.submit(follower.add_step, record)

    def finish(self, status: Status) -> None:
        """End the runs of all trackers, and wait for them as long as they make progress."""
        left = {self.worker.submit(f.finish_if_possible, status): f for f in self.followers}
        seconds, before = NOTICE_SECONDS, -1
        while left:
            for done in wait(left, seconds).done:
                del left[done]
            names, sent = ", ".join(f.name for f in left.values()), self._sent()
            if left and sent == before:
                where = "`compound runs track` sends the rest"
                _log.warning("%s: no progress in %g s; %s", names, seconds, where)
                return
            if left and seconds == NOTICE_SECONDS:
                _log.warning("waiting for %s …", names)
            seconds, before = FINAL_SECONDS, sent

    def _sent(self) -> int:
        return sum(follower.sent for follower in self.followers)


@contextmanager
def tracked(names: Sequence[TrackerName], recorder: Recorder) -> Iterator[None]:
    """Send the record of a run to trackers during the block.

    Raises:
        DeclarationError: a tracker cannot be reached at the start of the run.
        MissingExtra: the library of a tracker is not installed.
    """
    followers = [Follower(name, recorder.run.path) for name in dict.fromkeys(names)]
    tracking = Tracking(followers, TrackerThread())
    try:
        tracking.start()
        recorder.subscribe(tracking.listen, on_record=tracking.record)
        status: Status = "failed"
        try:
            yield
            status = "finished"
        except (Interrupted, KeyboardInterrupt):
            status = "interrupted"
            raise
        finally:
            tracking.finish(status)
    finally:
        tracking.worker.shutdown()


def send(tracker: str, folder: Path) -> int:
    """Send the record of a run directory to a tracker, as far as it lacks it.

    Returns:
        The number of events that were sent.

    Raises:
        CompoundError: the tracker cannot be reached, or not until the end.
        DeclarationError: it is unknown.
        MissingExtra: the library of the tracker is not installed.
        RunDirectoryError: the folder is not a run directory.
    """
    name = next((known for known in TRACKERS if known == tracker), None)
    if name is None:
        raise DeclarationError(f"unknown tracker {tracker!r}", hint=suggest_name(tracker, TRACKERS))
    run = RunDirectory.open(folder)  # rejects a run that is being written
    try:
        follower = Follower(name, folder)
        follower.start()
        stored = load_checkpoint(follower.folder)
        done = stored is not None and stored.state.done
        follower.finish("finished" if done else "interrupted")
    except CompoundError:
        raise
    except Exception as error:
        raise_missing_extra(error, f"the tracker {name!r}")
        raise CompoundError(
            f"{name}: the run is not completely logged: {_describe(error)}",
            hint="run the command again when the tracker is reachable; it sends the rest",
        ) from error
    else:
        return follower.sent
    finally:
        run.close()


def _start(followers: Sequence[Follower]) -> None:
    for follower in followers:
        follower.start()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _read_positions(folder: UntrustedFolder) -> dict[str, Position]:
    if folder.kind(FILE) is None:
        return {}
    stored = read_json(folder, FILE)
    return {name: Position.model_validate(value) for name, value in stored.items()}
