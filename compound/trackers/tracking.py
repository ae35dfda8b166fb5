"""Send the record of a run to trackers, while it runs or afterwards.

Trackers follow the run directory: its events and training steps are logged in order, and ``trackers.json``
stores how many were. A resumed run therefore continues the same run of the tracker without gaps or
repetitions, and what a tracker missed because it was not reachable is sent at the end or by a later call.
A tracker that fails never ends a run.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

from pydantic import BaseModel

from compound.errors import CompoundError, DeclarationError, suggest_name
from compound.execution.rng import derive_seed
from compound.extras import raise_missing_extra
from compound.report.training.steps import KIND
from compound.runs.directory import (
    CONFIG,
    RunDirectory,
    baselines,
    load_checkpoint,
    read_json,
    read_records,
)
from compound.runs.recorder import MEMORY, Interrupted, Recorder
from compound.security.untrusted import UntrustedFolder
from compound.settings.common import TrackerName
from compound.storage.records import to_document
from compound.trackers.metrics import budget_metrics, event_metrics, training_metrics
from compound.trackers.parameters import run_parameters
from compound.trackers.tracker import Status, TrackedRun, Tracker
from compound.web.addresses import can_connect

FILE = "trackers.json"
ARTIFACTS = ("report.md", "report.html", "best.json", "system.yaml", CONFIG, "events.jsonl")
UNRECORDED = ("call", "notice")  # events that are not part of the record
TRACKERS: Mapping[TrackerName, str] = {
    "mlflow": "compound.trackers.mlflow_tracker:MLflowTracker",
    "tensorboard": "compound.trackers.tensorboard_tracker:TensorboardTracker",
    "trackio": "compound.trackers.trackio_tracker:TrackioTracker",
    "wandb": "compound.trackers.wandb_tracker:WandbTracker",
}
NOTICE_SECONDS = 2.0  # of waiting until it is told
START_SECONDS, FINAL_SECONDS = 60.0, 30.0  # of waiting for the start, and without progress at the end
_log = logging.getLogger("compound")


class Position(BaseModel):
    """What a tracker has received: the id of its run, and the number of logged events."""

    id: str = ""
    events: int = 0


class Follower:
    """Logs the record of a run directory to one tracker.

    Args:
        name: name of the tracker.
        folder: the run directory.
        parent: follower of the main run, if this run is a baseline.

    Attributes:
        position: what the tracker has received.
        sent: number of events that were sent by this object.
    """

    def __init__(self, name: TrackerName, folder: Path, parent: Follower | None = None) -> None:
        self.name = name
        self._folder = UntrustedFolder(folder)
        self._parent = parent
        self._open = tracker_class(name)
        self.position = Position()
        self.sent = 0
        self._seed = 0
        self._seen = 0
        self._points = 0  # of the events seen so far
        self._steps: list[Mapping[str, Any]] = []  # training steps that no event has covered yet
        self._problem = ""
        self._started = False

    def start(self) -> None:
        """Start or continue the tracker's run, and log what the record has so far."""
        self._tracker = self._open()
        self._require_server()
        config = read_json(self._folder, CONFIG)
        self._seed = int(config["optimize"]["seed"])
        stored = _read_positions(self._folder).get(self.name, Position())
        parent = self._parent.position.id if self._parent is not None else ""
        folder = self._folder.path
        name = f"{folder.name} ({config['optimize']['method']})" if parent else folder.name
        run = TrackedRun(name, str(config["system"]), folder, run_parameters(config), parent)
        found = self._tracker.start(run, stored.id)
        self.position = stored if found == stored.id else Position(id=found)
        self._store()
        self._started = True
        self.catch_up()

    def _require_server(self) -> None:
        """Fail at once if the tracker's server is not reachable: its library may try for minutes.

        Raises:
            ConnectionError: it is not.
        """
        server = getattr(self._tracker, "server", "")
        if server and not can_connect(server):
            raise ConnectionError(f"no server answers at {server}")

    def start_if_possible(self) -> None:
        """Start, or after a failure try again at the end of the run."""
        try:
            self.start()
        except Exception as error:  # noqa: BLE001 - a tracker must not end a run
            self._give_up(error)

    def catch_up(self) -> None:
        """Log the events of the record that were not logged yet."""
        self._seen = self._points = 0
        self._steps = [r for r in read_records(self._folder, MEMORY) if r.get("kind") == KIND]
        for event in read_records(self._folder, "events.jsonl"):
            self._follow(event)

    def add_step(self, record: Mapping[str, Any]) -> None:
        """Add a training step; it is logged with the next event of its job."""
        self._steps.append(record)

    def follow(self, event: Mapping[str, Any]) -> None:
        """Log an event; after a failure, wait for the end of the run."""
        if self._problem:
            return
        try:
            self._follow(event)
        except Exception as error:  # noqa: BLE001 - a tracker must not end a run
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._problem = _describe(error)
        _log.warning("%s: not reachable, trying again at the end of the run: %s", self.name, self._problem)

    @property
    def folder(self) -> UntrustedFolder:
        """The run directory."""
        return self._folder

    def finish(self, status: Status) -> None:
        """Log what is missing, upload the files, and end the tracker's run."""
        if self._started:
            self._require_server()
            self.catch_up()
        else:
            self.start()
        files = [self._folder.path / n for n in ARTIFACTS if self._folder.kind(n) == "file"]
        self._tracker.finish(status, files)

    def finish_if_possible(self, status: Status) -> None:
        """Finish, or warn that the run is not completely logged."""
        try:
            self.finish(status)
        except Exception as error:  # noqa: BLE001 - a tracker must not end a run
            where = f"`compound track {self._folder.path} --to {self.name}` sends the rest"
            _log.warning("%s: the run is not completely logged: %s; %s", self.name, _describe(error), where)

    def _follow(self, event: Mapping[str, Any]) -> None:
        self._seen += 1
        budget = budget_metrics(event)
        points = [{**training_metrics(step), **budget} for step in self._covered(event)]
        if (metrics := event_metrics(event)) or not points:
            points.append({**metrics, **budget})
        first, self._points = self._points, self._points + len(points)
        if self._seen <= self.position.events:
            return
        at = float(event["at"])
        runs = budget.get("budget/system_runs", 0.0)
        for number, point in enumerate(points, first):
            self._tracker.log(point, runs, at, number)
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
        positions = {**_read_positions(self._folder), self.name: self.position}
        document = {name: position.model_dump() for name, position in positions.items()}
        self._folder.write(FILE, to_document(document))


class Worker:
    """Runs functions one after another in a thread, which does not keep the process from ending.

    Attributes:
        stuck: whether a tracker made no progress within the time limit; later waits are brief.
    """

    def __init__(self) -> None:
        self.stuck = False
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="compound-trackers", daemon=True).start()

    def submit(self, function: Callable[..., object], *arguments: object, **options: object) -> Future[None]:
        """Run a function after those submitted before, and return the future of its end."""
        future: Future[None] = Future()

        def work() -> None:
            try:
                function(*arguments, **options)
            except BaseException as error:  # noqa: BLE001 - raised again where the future is read
                future.set_exception(error)
            else:
                future.set_result(None)

        self._tasks.put(work)
        return future

    def shutdown(self) -> None:
        """End the thread after what was submitted."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (work := self._tasks.get()) is not None:
            work()


@dataclass
class Tracking:
    """Followers of one run; they work in one thread, so that a slow tracker does not delay the run."""

    followers: Sequence[Follower]
    worker: Worker

    def start(self, *, required: bool) -> None:
        """Start the runs of all trackers.

        Raises:
            TimeoutError: a tracker does not answer.
        """
        starting = self.worker.submit(_start, self.followers, required=required)
        names = ", ".join(follower.name for follower in self.followers)
        if not wait([starting], NOTICE_SECONDS).done:
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
        seconds, before = NOTICE_SECONDS, sum(f.sent for f in self.followers) if self.worker.stuck else -1
        while left:
            for done in wait(left, seconds).done:
                del left[done]
            names, sent = ", ".join(f.name for f in left.values()), sum(f.sent for f in self.followers)
            if left and sent == before:
                self.worker.stuck = True
                where = "`compound track` sends the rest"
                _log.warning("%s: no progress in %g s; %s", names, seconds, where)
                return
            if left and seconds == NOTICE_SECONDS:
                _log.warning("waiting for %s …", names)
            seconds, before = FINAL_SECONDS, sent


@contextmanager
def tracked(
    names: Sequence[TrackerName], recorder: Recorder, parent: Tracking | None = None
) -> Iterator[Tracking]:
    """Send the record of a run to trackers during the block.

    Args:
        names: names of trackers.
        recorder: recorder of the run.
        parent: tracking of the main run, if this run is a baseline.

    Raises:
        DeclarationError: a tracker cannot be reached at the start of the main run.
        MissingExtra: the library of a tracker is not installed.
    """
    tracking = Tracking(_followers(names, recorder.run.path, parent), _worker(parent))
    try:
        _start_in_time(tracking, required=parent is None)
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
        followers = (*others, main)
        _start([main, *others])
        for follower in followers:
            follower.finish(_status(follower.folder))
        return sum(follower.sent for follower in followers)
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


def _status(folder: UntrustedFolder) -> Status:
    stored = load_checkpoint(folder)
    return "finished" if stored is not None and stored.state.done else "interrupted"


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


def _followers(names: Sequence[TrackerName], folder: Path, parent: Tracking | None) -> list[Follower]:
    mains = {f.name: f for f in parent.followers} if parent is not None else {}
    return [Follower(name, folder, mains.get(name)) for name in dict.fromkeys(names)]


def _worker(parent: Tracking | None) -> Worker:
    return parent.worker if parent is not None else Worker()


def _start(followers: Sequence[Follower], *, required: bool = True) -> None:
    for follower in followers:
        follower.start() if required else follower.start_if_possible()


def _start_in_time(tracking: Tracking, *, required: bool) -> None:
    """Start trackers; name the setting in the error of a library.

    Raises:
        DeclarationError: a required tracker cannot be started.
        MissingExtra: the library of a tracker is not installed.
    """
    try:
        tracking.start(required=required)
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


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _read_positions(folder: UntrustedFolder) -> dict[str, Position]:
    if folder.kind(FILE) is None:
        return {}
    stored = read_json(folder, FILE)
    return {name: Position.model_validate(value) for name, value in stored.items()}
