"""The settings that every method reads, and the budget."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from compound.execution.budget import Budget
from compound.settings.base import Settings
from compound.settings.references import MethodName

COUNTS: Mapping[str, str] = {
    "system_runs": "runs of the system on train and validation examples; cached and forked runs count in "
    "part, runs on the test split and requests for proposals not at all",
    "calls": "calls to models, requests for proposals and the test split included",
    "tokens": "prompt and completion tokens, those of proposals and of the test split included",
    "cost": "US dollars, proposals and the test split included",
    "minutes": "wall-clock minutes over all attempts, the test split included",
}  # what each limit of a budget counts


class BudgetSettings(Settings):
    """Hard limits of a run; what is left out has no limit."""

    system_runs: float | None = Field(default=None, ge=0)
    """Runs of the system on train and validation examples; cached and forked runs count in part. Requests
    for proposals, such as new prompts, are no system runs: calls, tokens and cost limit them."""
    calls: int | None = Field(default=None, ge=0)
    """Engine calls, requests for proposals and the test split included."""
    tokens: int | None = Field(default=None, ge=0)
    """Prompt and completion tokens, those of proposals and of the test split included."""
    cost: float | None = Field(default=None, ge=0)
    """US dollars, proposals and the test split included."""
    minutes: float | None = Field(default=None, gt=0)
    """Wall-clock minutes over all attempts, test split included."""
    test_share: float = Field(default=0.2, gt=0, lt=1)
    """The share of calls, tokens, cost and minutes kept back for reading the test split."""
    max_proposal_failures: int = Field(default=5, ge=1)
    """Consecutive failed calls after which a job stops asking the model that writes proposals. Four times as
    many replies that cannot be used have the same effect."""

    def limits(self) -> dict[str, float]:
        """Return the limits that are set, by name.

        >>> BudgetSettings(system_runs=100).limits()
        {'system_runs': 100.0}
        """
        found = {name: getattr(self, name) for name in COUNTS}
        return {name: limit for name, limit in found.items() if limit is not None}

    def total(self) -> Budget:
        """Return the limits of the whole run."""
        return Budget(self.system_runs, self.calls, self.tokens, self.cost, self.minutes)

    def search(self) -> Budget:
        """Return the limits of the search: everything but the reserve for the test split."""
        return self.total().share(1 - self.test_share)

    def test(self) -> Budget:
        """Return the reserve of the test split; its runs are counted apart and not limited."""
        reserve = self.total().share(self.test_share)
        return Budget(None, reserve.calls, reserve.tokens, reserve.cost, reserve.minutes)


class CommonSettings(Settings):
    """The settings that every method reads."""

    method: MethodName = "search"
    """`search` (all kinds together), `optimas` (local rewards, component by component), `coordinate` (the
    same without local rewards), one that trains weights such as `mmgrpo` or `mhgpo_rr`, `better_together`, a
    baseline such as `random` or `mipro`, or `module:function` of your own."""
    seed: int = Field(default=0, ge=0)
    """Names every random stream of the run."""
    budget: BudgetSettings = BudgetSettings()
    """Hard limits."""
    iterations: int = Field(default=6, ge=1)
    """The most proposals that are put to the test on the validation split."""
    train_size: int | None = Field(default=None, ge=1)
    """How many train examples to use; all by default."""
    valid_size: int | None = Field(default=40, ge=2)
    """How many validation examples decide about acceptance."""
    test_size: int | None = Field(default=None, ge=1)
    """How many test examples the report reads; all by default."""
    minibatch: int = Field(default=8, ge=1)
    """Train examples a candidate first meets; survivors meet twice as many, and so on."""
    candidates: int = Field(default=8, ge=1)
    """Candidates of one proposal round."""
    alpha: float = Field(default=0.05, gt=0, lt=1)
    """The chance, over the whole run, of accepting a configuration that is no better."""
    repeats: int = Field(default=1, ge=1)
    """Runs per example when a stochastic system is evaluated."""
    baselines: tuple[MethodName, ...] = ()
    """Methods run beside the main one, each with the same budget, for the table of the report."""
    concurrency: int = Field(default=64, ge=1)
    """Examples in flight at once."""
    failure_score: float = 0.0
    """What a failed run scores; failures are counted and shown besides."""
    max_failed: float = Field(default=0.5, gt=0, le=1)
    """The run ends when a larger share of an evaluation fails."""
