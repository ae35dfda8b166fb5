"""A scorer that keeps back a part of a job's system runs for a later phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compound.engine import Completion, Request
from compound.evaluation.evaluate import Evaluation
from compound.example import Example
from compound.execution.trace import Trace
from compound.optimization.method import Scorer
from compound.optimization.proposals import ProposalOutcome


@dataclass(frozen=True)
class ReservingScorer:
    """Implements `Scorer` by another scorer.

    Attributes:
        scorer: the scorer of the job.
        reserve: system runs that are kept back.
    """

    scorer: Scorer
    reserve: float

    @property
    def runs_left(self) -> float:
        """System runs that the phase may still spend."""
        return max(0.0, self.scorer.runs_left - self.reserve)

    @property
    def has_free_repeats(self) -> bool:
        """Whether rescoring a candidate on the same examples costs no system runs."""
        return self.scorer.has_free_repeats

    async def score(
        self, candidates: Sequence[Mapping[str, object]], examples: Sequence[Example]
    ) -> list[Evaluation]:
        """Run and score candidates on the same examples."""
        return await self.scorer.score(candidates, examples)

    async def traces(self, values: Mapping[str, object], examples: Sequence[Example]) -> list[Trace]:
        """Return the scored traces of one candidate."""
        return await self.scorer.traces(values, examples)

    async def generate(self, request: Request, lm: str | None = None) -> Completion:
        """Send a request outside of the system."""
        return await self.scorer.generate(request, lm)

    def may_ask(self, lm: str | None = None) -> bool:
        """Return whether `generate` would send another request to a model."""
        return self.scorer.may_ask(lm)

    def record_outcome(self, outcome: ProposalOutcome, lm: str | None = None) -> None:
        """Record the usefulness of the last answer of `generate`."""
        self.scorer.record_outcome(outcome, lm)
