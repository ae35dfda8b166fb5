"""Samples for the trainer: sampled calls, token by token, with their rewards and advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import Field

from compound.engine import TokenRecord
from compound.settings.base import Settings

Group = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One call of a trained component.

    Attributes:
        component: who said it.
        example: the example that was run.
        address: the call's address in its run.
        invocation: how many calls of the component came before it in its run.
        tokens: prompt and answer as sampled, never tokenized again.
        reward: what the call earned.
        group: samples with equal groups are compared with each other; `()` belongs to none.
        rollout: which of the example's runs it is from.
        on_policy: whether the log-probabilities are those of a sampler of the same weights.
        advantages: one number for each sampled token, once there is credit.
        values: what the value head said before each token when there was credit (PPO).
        returns: what it should have said.
        weight: how much it counts in the loss, against other samples of 1.
        unit: samples of equal units count as one in losses that average over samples, such as the turns of a
            conversation; `()` is a unit of its own.
    """

    component: str
    example: str
    address: str
    invocation: int
    tokens: TokenRecord
    reward: float
    group: Group = ()
    rollout: int = 0
    on_policy: bool = True
    advantages: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    returns: tuple[float, ...] = ()
    weight: float = 1.0
    unit: Group = ()

    def with_advantage(self, advantage: float) -> Sample:
        """Return the sample with one advantage for all of its tokens."""
        return replace(self, advantages=(advantage,) * len(self.tokens.sampled))

    @property
    def length(self) -> int:
        """Sampled tokens."""
        return len(self.tokens.sampled)

    @property
    def is_truncated(self) -> bool:
        """Whether it was cut at the largest length an answer may have."""
        return self.tokens.finish_reason == "length"


def probe(tokens: Sequence[int], *, prompt: int = 1, answer: int | None = None) -> Sample:
    """Return a text as a sample: its first tokens are the prompt, and those that follow are sampled."""
    end = None if answer is None else prompt + answer
    record = TokenRecord(tuple(tokens[:prompt]), tuple(tokens[prompt:end]), (), "stop")
    return Sample("", "", "", 0, record, 0.0)


class SamplingSettings(Settings):
    """Which examples a training step runs, and how their samples are drawn."""

    examples: int = Field(default=4, ge=1)
    """Train examples of a step."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of the trained components; log-probabilities are those at this temperature."""
    max_staleness: int = Field(default=0, ge=0)
    """How many updates older than the trainer a sample's adapter may be. From 1 on, the next step's samples
    are drawn while a step is trained."""
    max_length: int = Field(default=8192, ge=8)
    """Tokens of prompt and answer; longer samples are left out, and counted."""
    mask_truncated: bool = False
    """Exclude answers that were cut at `max_tokens` from the loss (DAPO's overlong filtering, TRL's
    `mask_truncated_completions`). Their rewards still count in their group's statistics."""
    failure_score: float | None = None
    """The reward of a failed run; `optimize.failure_score` by default."""
