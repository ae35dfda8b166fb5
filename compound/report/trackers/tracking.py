"""Send the record of a run to trackers, while it runs or afterwards.

Trackers follow the run directory: its events and training steps are logged in order, and
``trackers.json`` stores how many were. A resumed run therefore continues the same run of the
tracker without gaps; after a kill, the last event may be logged twice. What a tracker missed is
sent at the end or by a later call. A tracker that fails never ends a run.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Protocol, cast

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
    baselines,
    load_checkpoint,
    read_json,
    read_records,
)
from compound.optimization.runs.recorder import MEMORY, Interrupted, Recorder
from compound.optimization.settings.base import TrackerName
from compound.report.training import KIND, step_metrics

Status = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as its tracker shows it."""

    name: str
    system: str
    folder: Path
    parameters: Mapping[str, str] = field(default_factory=dict)
    parent: str = ""


class Tracker(Protocol):
    """Connection to one run of an experiment tracker. All methods are called in one thread.

    An optional attribute ``server`` is the address of the server that receives the run. A
    connection to it is tried before the run starts and before it ends.
    """

    def start(self, run: TrackedRun, previous: str) -> str:
        """Start a run, or continue the run with the id ``previous`` if it exists, and return the id.

        Raises:
            DeclarationError: the tracker cannot be reached or is not configured.
        """
        ...

    def log(self, metrics: Mapping[str, float], system_runs: float, at: float) -> None:
        """Log metrics by name, at a number of system runs and a time in seconds since the epoch."""
        ...

    def finish(self, status: Status, files: Sequence[Path]) -> None:
        """Upload files, and end this part of the run."""
        ...


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
JOB = ("job", "tried", "runs", "train_before", "train_after")
DECISION = ("decision", "p", "level", "accepted")


def event_metrics(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an event; empty if it has none but the budget.

    ``best/valid`` is the score of the best configuration on the validation split. A decision
    evaluates it again, with fresh samples if the system is stochastic.

    >>> event_metrics({"event": "start", "mean": 0.25, "low": None, "high": None, "n": 40, "failed": 0})
    {'valid/mean': 0.25, 'valid/failed': 0, 'valid/n': 40, 'best/valid': 0.25}
    """
    match event["event"]:
        case "start":
            found = {**_named("valid", event, SCORES), "best/valid": event.get("mean")}
        case "job":
            found = {**_named("job", event, JOB), **dict(_accuracies(event))}
        case "decision":
            found = _decision(event)
        case "test_before" | "test_after":
            found = _named(str(event["event"]), event, SCORES)
        case "retry":
            found = _named(str(event["evaluation"]), event["after"], SCORES)
        case _:
            found = {}
    return _finite(found)


def budget_metrics(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the amounts spent so far, as ``budget/system_runs`` and so on."""
    return _finite({f"budget/{name}": value for name, value in (event.get("spent") or {}).items()})


def training_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a training step, as ``training/reward`` and so on."""
    step = record.get("step")
    found = {f"training/{name}": value for name, value in step_metrics(record).items()}
    return _finite({**found, "training/step": step})


def _decision(event: Mapping[str, Any]) -> dict[str, object]:
    found: dict[str, object] = _named("decision", event, DECISION)
    if "before" in event:
        before, after = event["before"]["mean"], event["after"]["mean"]
        found |= {"decision/before": before, "decision/after": after}
        found["best/valid"] = after if event["accepted"] else before
        found |= _named("decision/gain", event.get("gain") or {}, ("mean", "low", "high"))
    return found


def _accuracies(event: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    accuracies = (event.get("facts") or {}).get("accuracy") or {}
    for component, accuracy in accuracies.items():
        yield f"reward/accuracy/{component}", accuracy.get("mean")


def _named(prefix: str, values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, object]:
    return {f"{prefix}/{name}": values[name] for name in names if name in values}


def _finite(values: Mapping[str, object]) -> dict[str, float]:
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {
        name: int(v) if isinstance(v, bool) else v
        for name, v in numbers.items()
        if math.isfinite(v)
    }


FILE = "trackers.json"
ARTIFACTS = ("report.md", "report.html", "best.json", "system.yaml", CONFIG, "events.jsonl")
UNRECORDED = ("call", "notice", "phase")  # events that are not part of the record
TRACKERS: Mapping[TrackerName, str] = {
    "mlflow": "compound.report.trackers.backends:MLflowTracker",
    "tensorboard": "compound.report.trackers.backends:TensorboardTracker",
    "trackio": "compound.report.trackers.backends:TrackioTracker",
    "wandb": "compound.report.trackers.backends:WandbTracker",
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

    def __init__(self, name: TrackerName, folder: Path, parent: Follower | None = None) -> None:
        self.name, self.folder = name, UntrustedFolder(folder)
        self._parent = parent
        self._open = tracker_class(name)
        self.position = Position()
        self.sent = self._seen = 0
        self._steps: list[Mapping[str, Any]] = []  # training steps that no event has covered yet
        self._problem = ""
        self._started = False

    def start(self) -> None:
        """Start or continue the tracker's run, and log what the record has so far."""
        self._tracker = self._open()
        self._require_server()
        config = read_json(self.folder, CONFIG)
        self._seed = int(config["optimize"]["seed"])
        stored = _read_positions(self.folder).get(self.name, Position())
        parent = self._parent.position.id if self._parent is not None else ""
        path = self.folder.path
        name = f"{path.name} ({config['optimize']['method']})" if parent else path.name
        run = TrackedRun(name, str(config["system"]), path, run_parameters(config), parent)
        found = self._tracker.start(run, stored.id)
        self.position = stored if found == stored.id else Position(id=found)
        self._store()
        self._started = True
        self.catch_up()

    def _require_server(self) -> None:
        """Fail at once if the tracker's server is not reachable: its library may try for minutes."""
        server = getattr(self._tracker, "server", "")
        if server and not can_connect(server):
            raise ConnectionError(f"no server answers at {server}")

    def start_if_possible(self) -> None:
        """Start, or after a failure try again at the end of the run."""
        self._attempt(self.start)

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
        if not self._problem:
            self._attempt(lambda: self._follow(event))

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a tracker must not end a run
            self._problem = _describe(error)
            again = "not reachable, trying again at the end of the run"
            _log.warning("%s: %s: %s", self.name, again, self._problem)

    def finish(self, status: Status) -> None:
        """Log what is missing, upload the files, and end the tracker's run."""
        if self._started:
            self._require_server()
            self.catch_up()
        else:
            self.start()
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
        budget = budget_metrics(event)
        points = [{**training_metrics(step), **budget} for step in steps]
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
        self.stuck = False
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

    def start(self, *, required: bool) -> None:
        """Start the runs of all trackers.

        Raises:
            DeclarationError: a required tracker cannot be started.
            MissingExtra: the library of a tracker is not installed.
        """
        try:
            self._start_in_time(required)
        except DeclarationError:
            raise
        except Exception as error:
            raise_missing_extra(error, "optimize.trackers")
            if not required:
                _log.warning("%s", _describe(error))
                return
            raise DeclarationError(
                f"optimize.trackers: the run cannot be tracked: {_describe(error)}",
                hint="check the tracker's environment variables, or remove it from optimize.trackers",
            ) from error

    def _start_in_time(self, required: bool) -> None:
        starting = self.worker.submit(_start, self.followers, required)
        if not wait([starting], NOTICE_SECONDS).done:
            names = ", ".join(follower.name for follower in self.followers)
            _log.warning("waiting for %s …", names)
            if self.worker.stuck or not wait([starting], START_SECONDS).done:
                self.worker.stuck = True
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
        seconds, before = NOTICE_SECONDS, self._sent() if self.worker.stuck else -1
        while left:
            for done in wait(left, seconds).done:
                del left[done]
            names, sent = ", ".join(f.name for f in left.values()), self._sent()
            if left and sent == before:
                self.worker.stuck = True
                where = "`compound runs track` sends the rest"
                _log.warning("%s: no progress in %g s; %s", names, seconds, where)
                return
            if left and seconds == NOTICE_SECONDS:
                _log.warning("waiting for %s …", names)
            seconds, before = FINAL_SECONDS, sent

    def _sent(self) -> int:
        return sum(follower.sent for follower in self.followers)


@contextmanager
def tracked(
    names: Sequence[TrackerName], recorder: Recorder, parent: Tracking | None = None
) -> Iterator[Tracking]:
    """Send the record of a run to trackers during the block.

    Raises:
        DeclarationError: a tracker cannot be reached at the start of the main run.
        MissingExtra: the library of a tracker is not installed.
    """
    mains = {f.name: f for f in parent.followers} if parent is not None else {}
    followers = [Follower(n, recorder.run.path, mains.get(n)) for n in dict.fromkeys(names)]
    tracking = Tracking(followers, parent.worker if parent is not None else TrackerThread())
    try:
        tracking.start(required=parent is None)
        if tracking.followers:
            recorder.subscribe(tracking.listen, on_record=tracking.record)
        status: Status = "failed"
        try:
            yield tracking
            status = "finished"
        except (Interrupted, KeyboardInterrupt):
            status = "interrupted"
            raise
        finally:
            tracking.finish(status)
    finally:
        if parent is None:
            tracking.worker.shutdown()


def send(name: TrackerName, folder: Path) -> int:
    """Send the record of a run directory and of its baselines to a tracker, as far as it lacks them.

    Returns:
        The number of events that were sent.

    Raises:
        CompoundError: the tracker cannot be reached, or not until the end.
        MissingExtra: the library of the tracker is not installed.
        RunDirectoryError: the folder is not a run directory.
    """
    run = RunDirectory.open(folder)  # rejects a run that is being written
    try:
        main = Follower(name, folder)
        others = [Follower(name, other.path, main) for other in baselines(run.folder)]
        _start([main, *others])
        for follower in (*others, main):
            stored = load_checkpoint(follower.folder)
            done = stored is not None and stored.state.done
            follower.finish("finished" if done else "interrupted")
        return sum(follower.sent for follower in (main, *others))
    except CompoundError:
        raise
    except Exception as error:
        raise_missing_extra(error, f"the tracker {name!r}")
        raise CompoundError(
            f"{name}: the run is not completely logged: {_describe(error)}",
            hint="run the command again when the tracker is reachable; it sends the rest",
        ) from error
    finally:
        run.close()


def tracker_name(name: str) -> TrackerName:
    """Return the name of a tracker.

    Raises:
        DeclarationError: it is unknown.
    """
    for known in TRACKERS:
        if name == known:
            return known
    raise DeclarationError(f"unknown tracker {name!r}", hint=suggest_name(name, TRACKERS))


def tracker_class(name: TrackerName) -> Callable[[], Tracker]:
    """Return the class of a tracker; its library is imported when it is opened."""
    module, _, made = TRACKERS[name].partition(":")
    return cast("Callable[[], Tracker]", getattr(importlib.import_module(module), made))


def _start(followers: Sequence[Follower], required: bool = True) -> None:
    for follower in followers:
        follower.start() if required else follower.start_if_possible()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _read_positions(folder: UntrustedFolder) -> dict[str, Position]:
    if folder.kind(FILE) is None:
        return {}
    stored = read_json(folder, FILE)
    return {name: Position.model_validate(value) for name, value in stored.items()}
