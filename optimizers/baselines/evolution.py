"""The search of the library ``gepa`` as a sequence of questions: scores, new texts, and whether to continue.

The search runs in a separate thread (`compound.concurrency.questions`) and is deterministic given the
answers. It logs nothing, and does not use the library's own checkpoints, which are pickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol, overload

from compound.example import Example

if TYPE_CHECKING:
    from gepa.core.adapter import EvaluationBatch
    from gepa.core.state import GEPAState

PERFECT = 1.0  # maximum score of a metric

Record = Mapping[str, str]  # the description of one run for a reflection
Scored = tuple[list[float], Sequence[Mapping[str, Record]]]  # per example: the score, and records by key


@dataclass(frozen=True)
class Evaluate:
    """Asks for the scores of texts on examples, and for the records of each run for reflections."""

    texts: Mapping[str, str]
    examples: Sequence[Example]


@dataclass(frozen=True)
class Rewrite:
    """Asks for a rewritten text; the answer is ``None`` if there is none."""

    key: str
    text: str
    records: Sequence[Record]


@dataclass(frozen=True)
class Proceed:
    """Asks whether to continue, and describes the progress.

    Attributes:
        iterations: the number of completed iterations.
        candidates: the number of candidates.
        texts: the texts of the best candidate.
        mean: its mean score on the Pareto set.
    """

    iterations: int
    candidates: int
    texts: Mapping[str, str]
    mean: float


Question = Evaluate | Rewrite | Proceed


class Ask(Protocol):
    """Answers a question."""

    @overload
    def __call__(self, question: Evaluate, /) -> Scored: ...
    @overload
    def __call__(self, question: Rewrite, /) -> str | None: ...
    @overload
    def __call__(self, question: Proceed, /) -> bool: ...


class _Adapter:
    """Turns the calls of the library into questions; implements its ``GEPAAdapter``."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def evaluate(
        self, batch: Sequence[Example], candidate: Mapping[str, str], capture_traces: bool = False
    ) -> EvaluationBatch:
        """Return the scores of a candidate, with the records of the runs as trajectories."""
        from gepa.core.adapter import EvaluationBatch

        scores, records = self._ask(Evaluate(candidate, batch))
        return EvaluationBatch(scores, scores, list(records) or [{} for _ in scores])

    def make_reflective_dataset(
        self, candidate: Mapping[str, str], eval_batch: EvaluationBatch, components_to_update: Sequence[str]
    ) -> dict[str, list[Record]]:
        """Return the records of each key."""
        runs = eval_batch.trajectories
        return {key: [records[key] for records in runs if key in records] for key in components_to_update}

    def propose_new_texts(
        self,
        candidate: Mapping[str, str],
        reflective_dataset: Mapping[str, Sequence[Record]],
        components_to_update: Sequence[str],
    ) -> dict[str, str]:
        """Return new texts for the keys that could be rewritten."""
        answers = {
            key: self._ask(Rewrite(key, candidate[key], reflective_dataset[key]))
            for key in components_to_update
        }
        return {key: text for key, text in answers.items() if text is not None}


def search(
    ask: Ask,
    *,
    start: Mapping[str, str],
    feedback: Sequence[Example],
    pareto: Sequence[Example],
    batch: int,
    seed: int,
) -> None:
    """Run the library's search.

    Args:
        ask: answers the questions of the search.
        start: the incumbent's texts.
        feedback: the examples that reflections read runs of.
        pareto: the examples that candidates are compared on.
        batch: the number of examples of one reflection.
        seed: the seed of the search.
    """
    from gepa.api import optimize

    optimize(
        seed_candidate=dict(start),
        trainset=list(feedback),
        valset=list(pareto),
        adapter=_Adapter(ask),
        reflection_minibatch_size=min(batch, len(feedback)),
        perfect_score=PERFECT,
        stop_callbacks=lambda state: not ask(_progress(state)),
        logger=SimpleNamespace(log=lambda message: None),
        track_best_outputs=False,
        seed=seed,
    )


def _progress(state: GEPAState) -> Proceed:
    means = state.program_full_scores_val_set
    best = means.index(max(means))
    return Proceed(state.i + 1, len(means), dict(state.program_candidates[best]), means[best])
