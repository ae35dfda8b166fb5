"""What can be said under ``optimize:``, as one typed object; YAML and Python share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from compound.budget import Budget
from compound.errors import DeclarationError, nearest

Proposer = Literal["demos", "edits", "opro"]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


COUNTS: Mapping[str, str] = {
    "system_runs": "runs of the system on train and validation examples; cached and forked runs count in "
    "part, runs on the test split and requests for proposals not at all",
    "calls": "calls to models, requests for proposals and the test split included",
    "tokens": "prompt and completion tokens, those of proposals and of the test split included",
    "cost": "US dollars, proposals and the test split included",
    "minutes": "wall-clock minutes over all attempts, the test split included",
}  # what each limit of a budget counts


class BudgetSettings(_Settings):
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


class PromptSettings(_Settings):
    """How prompts and demonstrations are searched."""

    proposers: tuple[Proposer, ...] = ("demos", "edits")
    """Where candidates come from: demonstrations from successful traces, a grammar of edits, an LLM."""
    lm: str | None = None
    """The model that writes prompts, criticism or verdicts; the system's own by default."""
    edits_per_candidate: int = Field(default=2, ge=1)
    """The most edits between an incumbent and a candidate: a trust region."""
    give_up: int = Field(default=5, ge=1)
    """Failed calls in a row after which a job stops asking the model that writes; four times as many replies
    that cannot be used have the same effect."""


class RewardSettings(_Settings):
    """How local rewards are learned and used (method `optimas`)."""

    backbone: str = "minilm"
    """What reads the texts: `minilm`, `smollm2`, a folder or hub id; `none` reads numbers and labels only."""
    train: bool = False
    """Train a LoRA adapter on the backbone; otherwise its features are fixed and cached."""
    rank: int = Field(default=16, ge=1)
    """The rank of that adapter (32 in the paper)."""
    alpha: int = Field(default=32, ge=1)
    """Its scale (16 in the paper)."""
    lr: float = Field(default=5e-4, gt=0)
    """The adapter's learning rate (2e-6 in the paper, for an 8B model)."""
    epochs: int = Field(default=25, ge=1)
    """The most passes over the pairs."""
    batch: int = Field(default=32, ge=1)
    """Pairs of one training step."""
    patience: int = Field(default=512, ge=1)
    """Training steps without a lower held-out loss before training stops."""
    max_length: int = Field(default=256, ge=8)
    """Tokens the backbone reads of one call (2048 in the paper)."""
    weighting: Literal["plain", "margin"] = "margin"
    """`margin` weighs pairs by how much the global reward differs, `plain` does not (the paper's equation 5):
    where scores are noisy, a small difference says little."""
    inputs: int = Field(default=20, ge=1)
    """The most inputs of the offline phase, for preference pairs."""
    fresh: int = Field(default=4, ge=0)
    """Fresh inputs of each later iteration, for the component at hand (20 in the paper)."""
    samples: int = Field(default=3, ge=1)
    """Further outputs drawn for each input."""
    rollouts: int = Field(default=2, ge=1)
    """The fewest runs of what follows, for each output."""
    most_rollouts: int = Field(default=4, ge=1)
    """The most of them, where chance leaves the order open."""
    offline: float = Field(default=0.4, ge=0, lt=1)
    """The offline phase's part of the budget that is not needed to decide."""
    accuracy: float = Field(default=0.6, ge=0.5, le=1)
    """A local reward must order this share of held-out pairs, or its component goes by the global reward."""
    sure: float = Field(default=0.9, ge=0.5)
    """A local reward that orders this share right is not checked by the global one on train examples."""
    steps: int = Field(default=3, ge=1)
    """Rounds of local search in one iteration: a trust region."""
    temperature: float = Field(default=0.0, ge=0)
    """Settings are drawn with probability proportional to exp(reward / temperature); 0 takes the best."""
    scheduler: Literal["gaps", "uniform", "ucb", "thompson"] = "gaps"
    """Who chooses the next component: `gaps` (the paper's rule), `uniform`, or a bandit on gain per run."""


class WeightSettings(_Settings):
    """How weights are trained, by a method of their own or as a part of another."""

    steps: int = Field(default=25, ge=1)
    """Training steps of a job: sample, credit, update."""
    examples: int = Field(default=4, ge=1)
    """Train examples of a step."""
    runs: int = Field(default=8, ge=1)
    """Runs, or forks, of each of them (`mygo`: see `attempts`)."""
    group: int | None = Field(default=None, ge=2)
    """Samples of a group, chosen for the variance of their rewards (`mmgrpo`; `mhgpo_rr`: how many are
    compared of what came before the forks); all by default."""
    padding: Literal["fill", "truncate", "none", "dspy_fill", "dspy_fill_random"] = "fill"
    """What `mmgrpo` does where not every run made as many calls: `fill` up short groups with copies of their
    own samples, `truncate` to the calls that every run made, `none`, or DSPy's ways of lending a call."""
    adapters: Literal["each", "shared"] | dict[str, tuple[str, ...]] = "each"
    """Which components share an adapter: `each` has its own, all have one, or names with their components."""
    loss: Literal[
        "grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "luspo", "vespo", "reinforce",
        "sft", "sft_sum",
    ] = "grpo"  # fmt: skip
    """The objective, by TRL's names; `reinforce` has no ratio. `mygo` imitates, by the mean over tokens
    (`sft`) or their sum in each answer (`sft_sum`), and knows no other."""
    scale: Literal["trl", "plain", "population", "center", "leave_one_out", "none"] = "trl"
    """How rewards of a group become advantages (not in `ppo`, `mappo`, `mygo`)."""
    lr: float = Field(default=1e-4, gt=0)
    """AdamW's learning rate."""
    warmup: int = Field(default=0, ge=0)
    """Steps over which it rises to that."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Whether it falls towards 0 at the last step."""
    passes: int = Field(default=1, ge=1)
    """How often a step goes through its samples."""
    parts: int = Field(default=1, ge=1)
    """Updates of a pass: the samples are cut into as many parts."""
    clip: float = Field(default=0.2, gt=0, lt=1)
    """How far the probability ratio may fall, or rise, before it is clipped (not in `mygo`)."""
    clip_high: float | None = Field(default=None, gt=0)
    """How far it may rise, where that differs."""
    clip_delta: float | None = Field(default=None, gt=1)
    """Upper bound of the ratio for negative advantages (two-sided clipping, TRL's `delta`); above
    1 + `clip_high`. `null` leaves it unbounded."""
    cispo_cap: float = Field(default=5.0, gt=0)
    """Upper bound of the ratio in `cispo` (TRL's `epsilon_high`)."""
    sapo_positive: float = Field(default=1.0, gt=0)
    """Gate temperature of `sapo` for positive advantages (TRL's `sapo_temperature_pos`)."""
    sapo_negative: float = Field(default=1.05, gt=0)
    """Gate temperature of `sapo` for other advantages (TRL's `sapo_temperature_neg`)."""
    vespo_positive: tuple[NonNegativeFloat, PositiveFloat] = (2.0, 3.0)
    """`vespo`'s exponent k and decay lambda for positive advantages (TRL's `vespo_k_pos` and
    `vespo_lambda_pos`)."""
    vespo_negative: tuple[NonNegativeFloat, PositiveFloat] = (3.0, 2.0)
    """`vespo`'s exponent k and decay lambda for negative advantages (TRL's `vespo_k_neg` and
    `vespo_lambda_neg`)."""
    beta: float = Field(default=0.0, ge=0)
    """The weight of the divergence from the base model (not in `mygo`)."""
    entropy: float = Field(default=0.0, ge=0)
    """The weight of the entropy bonus (not in `mygo`)."""
    max_norm: float = Field(default=1.0, gt=0)
    """Gradients of an adapter are clipped to this norm."""
    max_skipped: int = Field(default=5, ge=1)
    """Consecutive updates of an adapter with a non-finite gradient after which training stops. Each of them
    is skipped and counted; weights and optimizer state stay as they are."""
    correction: float | None = Field(default=2.0, gt=0)
    """The cap of the weight that corrects what sampler and trainer compute differently; `null` for none."""
    stale: int = Field(default=0, ge=0)
    """How many updates older than the trainer a sample's adapter may be; from 1 on, the next step's samples
    are drawn while a step is trained."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the trained components, in rollouts; log-probabilities are those at this temperature."""
    max_length: int = Field(default=8192, ge=8)
    """Tokens of prompt and answer; longer samples are left out, and counted."""
    mask_truncated: bool = False
    """Exclude answers that were cut at `max_tokens` from the loss (DAPO's overlong filtering, TRL's
    `mask_truncated_completions`). Their rewards still count in their group's statistics."""
    micro_tokens: int = Field(default=4096, ge=64)
    """Tokens that go through the model at once, padding included: lower it when memory does not suffice."""
    failure: float | None = None
    """The reward of a failed run; `optimize.failure_score` by default."""
    penalties: dict[str, str] = {}
    """By component, a function `module:name` of its inputs and outputs. Its value is added to the component's
    reward where rewards flow back through the calls: `mhgpo_…`, `ppo`, `mappo`."""
    forks: dict[str, NonNegativeFloat] = {}
    """By component, how likely `mhgpo_rr` forks there; equal by default."""
    teachers: dict[str, PositiveInt] = {}
    """By configuration file, how many of the runs are made with it instead (mmGRPO)."""
    eval_every: int = Field(default=5, ge=0)
    """Training steps between evaluations on held-out train examples. The best evaluated step is proposed,
    the earliest of equals. A job too short for two evaluated steps, or 0, proposes its last step."""
    eval_examples: int = Field(default=16, ge=1)
    """Train examples held out for these evaluations, at most a quarter of the train examples. Each evaluation
    takes one system run per example from the job's budget."""
    kl_reward: float = Field(default=0.0, ge=0)
    """Coefficient of the KL penalty in the per-token reward of PPO: the log-ratio of the policy to the base
    model, adapter off (TRL's PPO used 0.05). `beta` adds a KL term to the loss instead."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of later tokens' rewards (PPO)."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """The λ of generalized advantage estimation (PPO)."""
    value_lr: float = Field(default=1e-3, gt=0)
    """The learning rate of the value head (PPO)."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move in a step (PPO)."""
    local: Literal["ppo", "grpo"] = "ppo"
    """How `optimas` trains weights by local rewards."""
    attempts: int = Field(default=16, ge=1)
    """The most attempts at an example (MyGO)."""
    keep: int = Field(default=3, ge=1)
    """Attempts of an example that are trained on (MyGO)."""
    threshold: float = Field(default=0.5)
    """The reward from which an attempt is kept, at first (MyGO)."""
    best: float = Field(default=1.0, gt=0)
    """The highest reward: the threshold rises towards it (MyGO)."""
    rule: Literal["halved", "fixed", "printed"] = "halved"
    """How it rises: half way from what first attempts earn to the best, not at all, or as printed."""
    pace: float = Field(default=1.0, gt=0, le=1)
    """How much of that way it rises in a step: small batches need more steps than the paper's."""
    online: bool = True
    """Whether attempts are made by the present weights, or by those that the job, or its warm-up, led to
    at first (MyGO)."""
    warm_up: int = Field(default=0, ge=0)
    """Attempts with the highest reward that are imitated before anything else (MyGO; 300 in the paper)."""
    stages: tuple[str, ...] = ("mipro", "mmgrpo")
    """The methods of `better_together`, in order."""

    @model_validator(mode="after")
    def _corrected(self) -> Self:
        """Refuse to take for the weights' own what others sampled."""
        if self.correction is None and (self.stale or self.teachers):
            raise ValueError("samples of other weights (stale, teachers) need a correction; it is null")
        return self

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        """Refuse a two-sided bound inside the trust region."""
        if self.clip_delta is not None and self.clip_delta <= 1 + self.highest:
            raise ValueError(f"clip_delta must be above 1 + clip_high = {1 + self.highest:g}")
        return self

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        """Refuse a threshold that no attempt can reach."""
        if self.threshold > self.best:
            raise ValueError(f"threshold {self.threshold:g} is above best {self.best:g}, the highest reward")
        return self

    @property
    def highest(self) -> float:
        """How far the ratio may rise."""
        return self.clip if self.clip_high is None else self.clip_high


class OptimizeSettings(_Settings):
    """How a system is optimized."""

    method: str = "search"
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
    """How often each example is run when a stochastic system is measured."""
    prompts: PromptSettings = PromptSettings()
    """How prompts and demonstrations are searched."""
    rewards: RewardSettings = RewardSettings()
    """How local rewards are learned and used."""
    weights: WeightSettings = WeightSettings()
    """How weights are trained."""
    baselines: tuple[str, ...] = ()
    """Methods run beside the main one, each with the same budget, for the table of the report."""
    concurrency: int = Field(default=64, ge=1)
    """Examples in flight at once."""
    failure_score: float = 0.0
    """What a failed run scores; failures are counted and shown besides."""
    max_failed: float = Field(default=0.5, gt=0, le=1)
    """The run ends when a larger share of an evaluation fails."""


def make_settings(values: Mapping[str, Any]) -> OptimizeSettings:
    """Return settings from what was given of them.

    Raises:
        DeclarationError: a setting does not exist, or has a value that it cannot have; all are named.

    >>> make_settings({"weights": {"lrr": 1}})
    Traceback (most recent call last):
    compound.errors.DeclarationError: there is no setting weights.lrr; did you mean 'lr'?
    """
    try:
        return OptimizeSettings.model_validate(values)
    except ValidationError as error:
        raise DeclarationError("\n".join(map(_told, error.errors()))) from None


def _told(error: ErrorDetails) -> str:
    """Return what is wrong with a setting."""
    *parents, name = error["loc"] or ("settings",)
    where = ".".join(map(str, error["loc"]))
    if error["type"] != "extra_forbidden":
        return f"{where or name}: {error['msg']}"
    model: Any = OptimizeSettings
    for parent in parents:
        model = model.model_fields[parent].annotation
    return f"there is no setting {where}; {nearest(str(name), model.model_fields)}"
