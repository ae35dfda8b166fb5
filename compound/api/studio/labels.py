"""Blind comparisons of the outputs of two configurations, stored as feedback on their runs.

Labels are kept in the folder ``labels`` of the run directory, in the format of `compound serve
--feedback`: `compound.evaluation.feedback.read_feedback` and ``reward.feedback`` read them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from compound.api.serving.feedback_store import FeedbackStore, StoreError
from compound.api.studio.runs import Run
from compound.api.studio.traces import Query
from compound.core.errors import CompoundError
from compound.evaluation.feedback import FeedbackLog, is_feedback_folder, read_feedback
from compound.evaluation.statistics import UNIT, mean_interval
from compound.execution.rng import derive_seed
from compound.execution.trace import from_json
from compound.report.record import RecordedTrace

FOLDER = "labels"
TIMEOUT = 30.0  # seconds for a label to reach the disk

Choice = Literal["left", "right", "equal"]


@dataclass(frozen=True)
class OutputPair:
    """The outputs of two configurations for one example, in a random order."""

    example: str
    left: RecordedTrace
    right: RecordedTrace


@dataclass(frozen=True)
class LabelProgress:
    """The next pair, if there is one, and what the labels so far say.

    ``done`` counts the labelled pairs; ``share`` is the share in which the second configuration was
    preferred, where those without a preference count half, with its 95 % interval.
    """

    pair: OutputPair | None
    total: int
    done: int
    share: Mapping[str, Any] | None


def run_id(trace: RecordedTrace) -> str:
    """Return the name of a recorded run among labels."""
    return f"{trace['split']}/{trace['configuration'][:16]}/{trace['sample']}/{trace['example']}"


def progress(run: Run, query: Query) -> LabelProgress:
    """Return the next pair to label, and a summary of the labels of two configurations.

    Raises:
        CompoundError: the labels cannot be read.
    """
    log = _read(run)
    better = set(log.preferences)
    equal = {frozenset(pair) for pair in log.ties}
    counts, first, total = Counter[str](), None, 0
    pairs = sorted(run.traces.pairs(query), key=lambda pair: derive_seed("labels", pair[0]))
    for example, before, after in pairs:
        total += 1
        one = f"{query.split}/{query.before[:16]}/{before}/{example}"
        other = f"{query.split}/{query.after[:16]}/{after}/{example}"
        if (one, other) in better:
            counts["before"] += 1
        elif (other, one) in better:
            counts["after"] += 1
        elif frozenset((one, other)) in equal:
            counts["equal"] += 1
        elif first is None:
            first = example, before, after
    values = [0.0] * counts["before"] + [1.0] * counts["after"] + [0.5] * counts["equal"]
    share = mean_interval(values, bounds=UNIT).to_json() if values else None
    pair = None if first is None else _pair(run, query, *first)
    return LabelProgress(pair, total, len(values), share)


def _read(run: Run) -> FeedbackLog:
    folder = run.folder.below(FOLDER)
    if run.folder.kind(FOLDER) != "folder" or not is_feedback_folder(folder):
        return FeedbackLog({})
    return read_feedback(folder)


def _pair(run: Run, query: Query, example: str, before: int, after: int) -> OutputPair | None:
    sides = (
        run.traces.trace(query.split, query.before, example, before),
        run.traces.trace(query.split, query.after, example, after),
    )
    if sides[0] is None or sides[1] is None:
        return None
    left, right = sides[::-1] if derive_seed("sides", run.name, example) % 2 else sides
    return OutputPair(example, cast("RecordedTrace", left), cast("RecordedTrace", right))


class Labels:
    """Writes labels; a store is open while labels of its run are written."""

    def __init__(self) -> None:
        self._stores: dict[str, FeedbackStore] = {}
        self._lock = threading.Lock()  # several people may label at the same time

    def add(self, run: Run, query: Query, example: str, choice: Choice) -> None:
        """Store which of two outputs is better, once the label is on the disk.

        Raises:
            CompoundError: there is no such pair, or the label cannot be stored.
        """
        samples = [
            run.traces.samples(query.split, digest, example)
            for digest in (query.before, query.after)
        ]
        pair = None
        if all(samples):
            pair = _pair(run, query, example, samples[0][0], samples[1][0])
        if pair is None:
            raise CompoundError(f"there is no pair of outputs for example {example!r}")
        with self._lock:
            store = self._store(run)
            left, right = run_id(pair.left), run_id(pair.right)
            for name, trace in ((left, pair.left), (right, pair.right)):
                if not store.knows(name):
                    store.add_run(name, from_json(trace))
        documents: Mapping[Choice, Mapping[str, object]] = {
            "left": {"better": left, "worse": right},
            "right": {"better": right, "worse": left},
            "equal": {"equal": [left, right]},
        }
        store.add_feedback(documents[choice]).result(TIMEOUT)

    def _store(self, run: Run) -> FeedbackStore:
        if run.name not in self._stores:
            try:
                self._stores[run.name] = FeedbackStore(run.folder.below(FOLDER))
            except StoreError as error:
                raise CompoundError(
                    error.message.replace("feedback", "the label"),
                    hint="another `compound ui` may write labels of this run: use that one",
                ) from error
        return self._stores[run.name]

    def close(self) -> None:
        """Write what is left, and release the folders."""
        while self._stores:
            self._stores.popitem()[1].close()
