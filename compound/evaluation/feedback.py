"""Feedback folders: runs of a served system, and what its users said about them.

``runs.jsonl`` holds one run per line, ``feedback.jsonl`` one statement per line: a score of a run,
a corrected answer, which of two runs was better, or that neither was. Both files are only appended
to, by `compound.api.serving` and `compound.api.studio`. A later statement about a run replaces an
earlier one of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compound.core.errors import DataError
from compound.core.narrowing import entry
from compound.core.security.limits import LINE
from compound.core.security.sanitize import replace_surrogates
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.records import Damaged, parse
from compound.evaluation.rows import DataRow
from compound.execution.trace import Trace, from_json
from compound.graph.configuration import digest
from compound.graph.json_values import find_nonfinite

RUNS, FEEDBACK = "runs.jsonl", "feedback.jsonl"
CONFIRMED = 1.0  # a run with this score confirms its own answer
IDENTITY = (
    "feedback_id"  # column that identifies an example; the system may have an input named "id"
)


@dataclass
class RunFeedback:
    """What was said about a run; ``None`` for what was not."""

    score: float | None = None
    correction: Mapping[str, object] | None = None
    comment: str = ""


@dataclass(frozen=True)
class FeedbackLog:
    """The content of a feedback folder."""

    runs: Mapping[str, Trace]
    about: Mapping[str, RunFeedback] = field(default_factory=dict)
    preferences: Sequence[tuple[str, str]] = ()
    ties: Sequence[tuple[str, str]] = ()

    def examples(self) -> list[DataRow]:
        """Return an example for each input with a corrected or confirmed answer.

        A row has the inputs, the right outputs under their names and under ``gold``, and the latest comment.
        Its id depends only on the inputs; of several runs with equal inputs, the one rated last counts.
        """
        rows: dict[str, DataRow] = {}
        for run, said in self.about.items():
            trace = self.runs.get(run)
            if trace is None:
                continue
            if not said.correction and (said.score != CONFIRMED or trace.failure is not None):
                continue
            gold = {**trace.outputs, **(said.correction or {})}
            identity = f"feedback-{digest(dict(trace.inputs))[:16]}"
            comment = {"comment": said.comment} if said.comment else {}
            named = {"id": identity, "gold": gold, **comment}
            rows[identity] = {**named, **gold, **trace.inputs, IDENTITY: identity}
        return list(rows.values())


def is_feedback_folder(folder: UntrustedFolder) -> bool:
    """Return whether a folder holds feedback."""
    return all(folder.kind(name) == "file" for name in (RUNS, FEEDBACK))


def read_feedback(folder: UntrustedFolder | str | Path) -> FeedbackLog:
    """Read a feedback folder; a last line that is not complete yet is ignored.

    Raises:
        DataError: a file is missing or damaged; the message names ``file:line``.
    """
    if not isinstance(folder, UntrustedFolder):
        folder = UntrustedFolder(folder, error=DataError)
    if not is_feedback_folder(folder):
        raise DataError(
            f"{folder} is not a feedback folder: it lacks {RUNS} or {FEEDBACK}",
            hint="`compound serve --feedback DIR` writes one",
        )
    runs: dict[str, Trace] = {}
    for place, document in _documents(folder, RUNS):
        try:
            run, trace = entry(document, "run", str), from_json(entry(document, "trace", dict))
        except Damaged as error:
            raise DataError(f"{place}: not a run of a served system: {error}") from None
        except (KeyError, TypeError) as error:
            raise DataError(f"{place}: not a run of a served system: {error!r}") from None
        if (number := find_nonfinite([trace.inputs, trace.outputs])) is not None:
            raise DataError(f"{place}: holds {number}, which is not a finite number")
        runs[run] = trace
    about: dict[str, RunFeedback] = {}
    compared: dict[frozenset[str], tuple[str, str, bool]] = {}
    for place, document in _documents(folder, FEEDBACK):
        try:
            _add(document, about, compared)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{place}: not feedback: {error!r}") from None
    pairs = {
        tie: tuple((one, other) for one, other, is_tie in compared.values() if is_tie == tie)
        for tie in (False, True)
    }
    return FeedbackLog(runs, about, pairs[False], pairs[True])


def _add(
    document: Mapping[str, object],
    about: dict[str, RunFeedback],
    compared: dict[frozenset[str], tuple[str, str, bool]],
) -> None:
    """Add a statement; a later one replaces an earlier one."""
    if "better" in document:
        better, worse = entry(document, "better", str), entry(document, "worse", str)
        compared[frozenset((better, worse))] = better, worse, False
        return
    if "equal" in document:
        one, other = map(str, entry(document, "equal", list))
        compared[frozenset((one, other))] = one, other, True
        return
    run = entry(document, "run", str)
    said = about.setdefault(run, RunFeedback())
    if "score" in document or "correction" in document:
        about[run] = about.pop(run)  # to the end
    if "score" in document:
        said.score = float(entry(document, "score", (int, float)))
    if "correction" in document:
        said.correction = entry(document, "correction", dict)
    if "comment" in document:
        said.comment = entry(document, "comment", str)


def _documents(folder: UntrustedFolder, name: str) -> Iterator[tuple[str, dict[str, object]]]:
    number, most = 0, LINE.bytes
    with folder.reader(name) as file:
        while line := file.readline(most + 1):
            number += 1
            place = f"{folder.path / name}:{number}"
            if len(line) > most:
                raise DataError(f"{place}: the line is longer than {LINE}", hint=LINE.hint)
            if not line.endswith(b"\n"):
                return
            try:
                document = parse(line)
            except Damaged as error:
                raise DataError(f"{place}: {error}") from None
            if not isinstance(document, dict):
                raise DataError(f"{place}: a line must be an object {{…}}")
            yield place, replace_surrogates(document)
