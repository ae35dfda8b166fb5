"""Samples for the trainer: the tokens of sampled calls with their rewards and advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field, TypeAdapter

from compound.core.engine import TokenRecord, token_ids
from compound.optimization.settings.base import Settings

Group = tuple[str | int, ...]
SECTION = "optimize.<method>"  # stands for the path of the settings in messages if it is not known


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled answer of a trained component."""

    component: str  # the component that was called
    example: str  # the name of the example
    address: str  # the address of the call in its run
    invocation: int  # the number of earlier calls of the component in the run
    tokens: TokenRecord  # prompt and answer tokens as sampled; they are never tokenized again
    reward: float  # the reward of the call
    # samples with the same group are compared with each other; `()` belongs to no group
    group: Group = ()
    rollout: int = 0  # the index of the run among those of the example
    on_policy: bool = True  # whether the answer was sampled with the weights that are trained
    advantages: tuple[float, ...] = ()  # one number per sampled token, once credit is assigned
    # the value head's estimate before each token when credit was assigned (PPO)
    values: tuple[float, ...] = ()
    returns: tuple[float, ...] = ()  # the targets of the value head
    weight: float = 1.0  # the sample's weight in the loss, relative to a weight of 1
    # samples with the same unit, such as the turns of a conversation, count as one sample in losses
    # that average over samples; with `()` the sample is a unit by itself
    unit: Group = ()

    def with_advantage(self, advantage: float) -> Sample:
        """Return the sample with one advantage for all of its tokens."""
        return replace(self, advantages=(advantage,) * len(self.tokens.sampled))

    @property
    def length(self) -> int:
        """Number of sampled tokens."""
        return len(self.tokens.sampled)

    @property
    def size(self) -> int:
        """Number of tokens of prompt and answer."""
        return len(self.tokens.prompt) + self.length

    @property
    def is_truncated(self) -> bool:
        """Whether the answer was cut off at the maximum length."""
        return self.tokens.finish_reason == "length"


_SAMPLES = TypeAdapter(list[Sample])


def samples_to_json(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return samples as JSON, in which every number is exact."""
    found: list[dict[str, Any]] = _SAMPLES.dump_python(list(samples))
    return found


def samples_from_json(rows: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """Return the samples that `samples_to_json` returned as JSON."""
    found = []
    for sample in _SAMPLES.validate_python(rows):
        tokens = sample.tokens
        prompt, sampled = token_ids(tokens.prompt), token_ids(tokens.sampled)
        found.append(replace(sample, tokens=replace(tokens, prompt=prompt, sampled=sampled)))
    return found


def probe_sample(tokens: Sequence[int], *, prompt: int = 1, answer: int | None = None) -> Sample:
    """Return a sample whose prompt is the first ``prompt`` tokens and whose answer is the next ``answer``."""
    end = None if answer is None else prompt + answer
    record = TokenRecord(tuple(tokens[:prompt]), tuple(tokens[prompt:end]), (), "stop")
    return Sample("", "", "", 0, record, 0.0)


class SamplingSettings(Settings):
    """Examples of a training step, and the sampling of their rollouts."""

    examples: int = Field(default=4, ge=1)
    """Train examples per step."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of the trained components; log-probabilities are computed at this temperature."""
    max_staleness: int = Field(default=0, ge=0)
    """Maximum number of updates by which the adapter that drew a sample may lag behind the trainer. With 1 or
    more, the samples of the next step are drawn while the current step is trained."""
    max_length: int = Field(default=8192, ge=8)
    """Maximum number of tokens of prompt and answer; longer samples are excluded and counted."""
    mask_truncated: bool = False
    """Exclude answers that were cut off at `max_tokens` from the loss (DAPO's overlong filtering, TRL's
    `mask_truncated_completions`). Their rewards still count in the statistics of their group."""
    failure_score: float | None = None
    """Reward of a failed run; `optimize.failure_score` by default."""

    def admits(self, sample: Sample) -> bool:
        """Return whether a sample is neither empty nor too long."""
        return bool(sample.length) and sample.size <= self.max_length

    def masks(self, sample: Sample) -> bool:
        """Return whether a sample is excluded from the loss because it was cut off."""
        return self.mask_truncated and sample.is_truncated

    def learns_from(self, sample: Sample) -> bool:
        """Return whether the tokens of a sample contribute to the loss."""
        return self.admits(sample) and not self.masks(sample)
