"""The search of the library ``gepa``, as questions for scores, for new texts, and whether to continue.

It runs in a thread of its own (`compound.concurrency.questions`), and is the same whenever its answers
are. It logs nothing, and neither writes nor reads the library's own record of a search, which is pickled.
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

PERFECT = 1.0  # the most a metric gives

Record = Mapping[str, str]  # what a reflection reads of one run
Scored = tuple[list[float], Sequence[Mapping[str, Record]]]  # by example: the score, and records by key


@dataclass(frozen=True)
class Evaluate:
    """Asks for the scores of texts on examples, and for what a reflection on any key reads of each run."""

    texts: Mapping[str, str]
    examples: Sequence[Example]


@dataclass(frozen=True)
class Rewrite:
    """Asks for another text in place of one; the answer is ``None`` when there is none."""

    key: str
    text: str
    records: Sequence[Record]


@dataclass(frozen=True)
class Proceed:
    """Asks whether to continue, and describes the search so far: the best texts, and their mean."""

    iterations: int
    candidates: int
    texts: Mapping[str, str]
    mean: float


Question = Evaluate | Rewrite | Proceed


class Ask(Protocol):
    """Returns the answer to a question."""

    @overload
    def __call__(self, question: Evaluate, /) -> Scored: ...
    @overload
    def __call__(self, question: Rewrite, /) -> str | None: ...
    @overload
    def __call__(self, question: Proceed, /) -> bool: ...


class _Adapter:
    """What the library calls for, as questions; implements its ``GEPAAdapter``."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def evaluate(
        self, batch: Sequence[Example], candidate: Mapping[str, str], capture_traces: bool = False
    ) -> EvaluationBatch:
        """Return the scores of a candidate, with the records of its runs as trajectories."""
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
        """Return new texts for those keys that get one."""
        asked = {
            key: self._ask(Rewrite(key, candidate[key], reflective_dataset[key]))
            for key in components_to_update
        }
        return {key: text for key, text in asked.items() if text is not None}


def search(
    ask: Ask,
    *,
    start: Mapping[str, str],
    feedback: Sequence[Example],
    pareto: Sequence[Example],
    batch: int,
    seed: int,
) -> None:
    """Run the library's search, which is silent and asks for everything."""
    from gepa.api import optimize

    optimize(
        seed_candidate=dict(start),
        trainset=list(feedback),
        valset=list(pareto),
        adapter=_Adapter(ask),
        reflection_minibatch_size=min(batch, len(feedback)),
        perfect_score=PERFECT,
        stop_callbacks=lambda state: not ask(_so_far(state)),
        logger=SimpleNamespace(log=lambda message: None),
        track_best_outputs=False,
        seed=seed,
    )


def _so_far(state: GEPAState) -> Proceed:
    means = state.program_full_scores_val_set
    best = means.index(max(means))
    return Proceed(state.i + 1, len(means), dict(state.program_candidates[best]), means[best])
