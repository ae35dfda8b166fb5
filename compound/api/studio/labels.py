"""Blind comparisons of the outputs of two configurations, stored as feedback on their runs.

Labels are kept in the folder ``labels`` of the run directory, in the format of `compound serve
--feedback`: `compound.evaluation.feedback.read_feedback` and ``reward.feedback`` read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The outputs of two configurations for one example, in a random order.

    Attributes:
        swapped: whether the right side is that of the first configuration.
    """

    example: str
    left: RecordedTrace
    right: RecordedTrace
    swapped: bool

    @property
    def ids(self) -> tuple[str, str]:
        """Names of the runs on the left and on the right."""
        return run_id(self.left), run_id(self.right)


@dataclass(frozen=True)
class LabelProgress:
    """The next pair, if there is one, and what the labels so far say.

    ``preferred`` counts the labels for the first and for the second configuration, and those
    without a preference; ``share`` is the share of the second one, with its 95 % interval.
    """

    pair: OutputPair | None
    total: int
    preferred: tuple[int, int, int]
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
    counts, first, total = [0, 0, 0], None, 0
    pairs = sorted(run.traces.pairs(query), key=lambda pair: derive_seed("labels", pair[0]))
    for example, before, after in pairs:
        total += 1
        one = f"{query.split}/{query.before[:16]}/{before}/{example}"
        other = f"{query.split}/{query.after[:16]}/{after}/{example}"
        if (one, other) in better:
            counts[0] += 1
        elif (other, one) in better:
            counts[1] += 1
        elif frozenset((one, other)) in equal:
            counts[2] += 1
        elif first is None:
            first = example, before, after
    values = [0.0] * counts[0] + [1.0] * counts[1] + [0.5] * counts[2]
    share = mean_interval(values, bounds=UNIT).to_json() if values else None
    pair = None if first is None else _pair(run, query, *first)
    return LabelProgress(pair, total, (counts[0], counts[1], counts[2]), share)


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
    swapped = bool(derive_seed("sides", run.name, example) % 2)
    left, right = sides[::-1] if swapped else sides
    return OutputPair(example, cast("RecordedTrace", left), cast("RecordedTrace", right), swapped)


class Labels:
    """Writes labels; a store is open while labels of its run are written."""

    def __init__(self) -> None:
        self._stores: dict[str, FeedbackStore] = {}

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
        store = self._store(run)
        for trace in (pair.left, pair.right):
            if not store.knows(run_id(trace)):
                store.add_run(run_id(trace), from_json(trace))
        left, right = pair.ids
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
        stores: Sequence[FeedbackStore] = [*self._stores.values()]
        self._stores.clear()
        for store in stores:
            store.close()
