"""Settings of GEPA's search."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from compound.optimization.settings.base import ModelName, Settings


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
    parents: int = Field(default=1, ge=1)
    """Number of candidates rewritten in one iteration (P of P×N). All reflections of an iteration, and the
    runs of their candidates, are concurrent."""
    proposals: int = Field(default=1, ge=1)
    """Number of rewritten versions of each of these candidates, each from examples of its own (N of P×N)."""
    keep: int | None = Field(default=None, ge=1)
    """Maximum number of improvements of an iteration that become candidates, the largest first; all by
    default."""
    merges: int = Field(default=0, ge=0)
    """Maximum number of accepted merges of two candidates with a common ancestor; 0 disables merging. The
    library recommends 5."""
    frontier: Literal["instance", "objective", "hybrid", "cartesian"] = "instance"
    """The criteria for which the best candidates form the frontier: the score on each example (`instance`),
    the mean of each part of the metric (`objective`), both (`hybrid`), or each part on each example
    (`cartesian`)."""
    selection: Literal["pareto", "current_best", "epsilon_greedy", "top_k_pareto"] = "pareto"
    """Choice of the candidate to rewrite: drawn from the frontier (`pareto`), the best by mean score
    (`current_best`), mostly the best (`epsilon_greedy`: a random one in one of ten cases), or drawn from the
    five best by mean score on the frontier (`top_k_pareto`)."""
    components: Literal["round_robin", "all"] = "round_robin"
    """Texts rewritten in one iteration: one after the other in turn, or all at once."""
    acceptance: Literal["strict_improvement", "improvement_or_equal"] = "strict_improvement"
    """Condition for running a rewritten candidate on the Pareto set: the sum of its scores on the examples
    of the reflection is higher than before, or not lower."""
    whole_runs: bool = True
    """Whether a reflection also shows the inputs and outputs of all other steps of each run."""
    template: str | None = None
    """Text of the request, with `<curr_param>` and `<side_info>` in place of the current text and the
    records of the runs; the library's own by default."""
    max_tokens: int = Field(default=1000, ge=1)
    """Maximum length of a reply, in tokens."""

    @field_validator("template")
    @classmethod
    def _complete(cls, template: str | None) -> str | None:
        """Check that the template has both placeholders."""
        missing = [
            mark for mark in ("<curr_param>", "<side_info>") if mark not in (template or mark)
        ]
        if missing and template is not None:
            raise ValueError(f"must contain {' and '.join(missing)}")
        return template

    @property
    def tasks(self) -> int:
        """Number of rewritten candidates of an iteration."""
        return self.parents * self.proposals

    @property
    def accepted(self) -> int:
        """Maximum number of new candidates of an iteration."""
        return min(self.tasks, self.keep or self.tasks)
