"""The search of the library ``gepa`` as a sequence of questions: scores, new texts, and whether to continue.

The search runs in a separate thread (`compound.core.threads`) and is deterministic given the
answers. It logs nothing, and does not use the library's own checkpoints, which are pickled.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, Protocol, overload

from pydantic import Field

from compound.core.example import Example
from compound.optimization.settings.base import ModelName, Settings

if TYPE_CHECKING:
    from gepa.core.adapter import EvaluationBatch
    from gepa.core.state import GEPAState


class GEPASettings(Settings):
    """Settings of `gepa`: prompts are rewritten by reflection. Defaults are those of the authors' library."""

    lm: ModelName | None = None
    """The model that writes reflections; the system's own by default."""
    iterations: int = Field(default=100, ge=0)
    """Maximum number of iterations of a job."""
    batch: int = Field(default=3, ge=1)
    """Number of examples of one reflection."""
    held_out: int = Field(default=50, ge=1)
    """Maximum size of the Pareto set, the train examples on which candidates are compared."""
    merges: int = Field(default=0, ge=0)
    """Maximum number of accepted merges of two candidates with a common ancestor; 0 disables merging. The
    library recommends 5."""
    selection: Literal["pareto", "current_best", "epsilon_greedy", "top_k_pareto"] = "pareto"
    """Choice of the candidate to rewrite: drawn from the frontier (`pareto`), the best by mean score
    (`current_best`), mostly the best (`epsilon_greedy`: a random one in one of ten cases), or drawn from the
    five best by mean score on the frontier (`top_k_pareto`)."""
    components: Literal["round_robin", "all"] = "round_robin"
    """Texts rewritten in one iteration: one after the other in turn, or all at once."""


# Added to all scores if candidates are merged: the library draws a common ancestor in proportion to
# its mean score, and fails if all are 0. A power of two, such that sums of counts stay exact.
LIFT = 2.0**-30

Record = Mapping[str, str]  # the description of one run for a reflection


@dataclass(frozen=True)
class Scored:
    """Scores of texts on examples, and the records of each run by key; empty if unknown."""

    scores: list[float]
    records: Sequence[Mapping[str, Record]] = ()


@dataclass(frozen=True)
class Evaluate:
    """Asks for the scores of texts on examples."""

    texts: Mapping[str, str]
    examples: Sequence[Example]


@dataclass(frozen=True)
class Reflection:
    """A text to rewrite, and records of runs with it."""

    key: str
    text: str
    records: Sequence[Record]


@dataclass(frozen=True)
class Rewrite:
    """Asks for several rewritten texts; the answer is ``None`` where there is none."""

    items: Sequence[Reflection]


@dataclass(frozen=True)
class Proceed:
    """Asks whether to continue, and describes the progress."""

    iterations: int
    candidates: Sequence[Mapping[str, str]]
    best: int
    mean: float


Question = Evaluate | Rewrite | Proceed


class Ask(Protocol):
    """Answers a question."""

    @overload
    def __call__(self, question: Evaluate, /) -> Scored: ...
    @overload
    def __call__(self, question: Rewrite, /) -> list[str | None]: ...
    @overload
    def __call__(self, question: Proceed, /) -> bool: ...


class _Key(str):
    """A key with the same hash in every process.

    A merge iterates over a set of keys and draws random numbers on the way, so a replay in another
    process would otherwise lead to other candidates.
    """

    __slots__ = ()

    def __hash__(self) -> int:
        return zlib.crc32(self.encode())


@dataclass
class _Adapter:
    """Turns what the library asks for into questions; implements its ``GEPAAdapter``."""

    ask: Ask
    lift: float

    def evaluate(
        self, batch: Sequence[Example], candidate: Mapping[str, str], capture_traces: bool = False
    ) -> EvaluationBatch:
        """Return the scores of a candidate, with the records of the runs as trajectories."""
        from gepa.core.adapter import EvaluationBatch

        answer = self.ask(Evaluate({str(key): text for key, text in candidate.items()}, batch))
        scores = [score + self.lift for score in answer.scores]
        return EvaluationBatch(scores, scores, list(answer.records) or [{} for _ in scores])

    def make_reflective_dataset(
        self, candidate: Mapping[str, str], eval_batch: EvaluationBatch, keys: Sequence[str]
    ) -> dict[str, list[Record]]:
        """Return the records of each key."""
        runs = eval_batch.trajectories
        return {key: [run[str(key)] for run in runs if str(key) in run] for key in keys}

    def propose_new_texts(
        self,
        candidate: Mapping[str, str],
        dataset: Mapping[str, Sequence[Record]],
        keys: Sequence[str],
    ) -> dict[str, str]:
        """Return the new texts of a candidate, without those that could not be rewritten."""
        asked = [Reflection(str(key), candidate[key], dataset[key]) for key in keys]
        texts = zip(keys, self.ask(Rewrite(asked)), strict=True)
        return {key: text for key, text in texts if text is not None}


def search(
    ask: Ask,
    *,
    start: Mapping[str, str],
    feedback: Sequence[Example],
    pareto: Sequence[Example],
    settings: GEPASettings,
    lowest: float,
    perfect: float,
    seed: int,
) -> None:
    """Run the library's search."""
    from gepa.api import optimize

    lift = LIFT - min(0.0, lowest) if settings.merges else 0.0
    optimize(
        seed_candidate={_Key(key): text for key, text in start.items()},
        trainset=list(feedback),
        valset=list(pareto),
        adapter=_Adapter(ask, lift),
        candidate_selection_strategy=settings.selection,
        module_selector=settings.components,
        use_merge=settings.merges > 0,
        max_merge_invocations=settings.merges,
        reflection_minibatch_size=min(settings.batch, len(feedback)),
        perfect_score=perfect + lift,
        stop_callbacks=lambda state: not ask(_progress(state, lift)),
        logger=SimpleNamespace(log=lambda message: None),
        track_best_outputs=False,
        seed=seed,
    )


def _progress(state: GEPAState, lift: float) -> Proceed:
    means = state.program_full_scores_val_set
    best = means.index(max(means))
    candidates = [
        {str(key): text for key, text in texts.items()} for texts in state.program_candidates
    ]
    return Proceed(state.i + 1, candidates, best, means[best] - lift)
