"""GRPO on whole runs: mmGRPO and Prompt-R1.

mmGRPO gives every call the reward of its run, and compares calls at the same position. Groups are
keyed by example, component and k-th invocation (algorithm 1 of the paper), so prompts within a
group may differ. Runs of teachers (the same system with another configuration) join the groups.

Prompt-R1 compares multi-turn interactions of an agent with an environment, with one reward per
conversation. Every turn is a sample with the conversation's reward. Group statistics count each
conversation once, regardless of its number of turns. So does the loss `grpo`: it is the mean over
conversations of the mean over their tokens (equations 14 and 15). The published code uses the mean
over all tokens: the loss `dapo`. Replies of the environment are part of the prompts and have no
loss.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from compound.core.engine import Completion, Request, TokenRecord, token_ids
from compound.core.example import Example
from compound.engines.local.chat_tokens import ChatTokenizer, write_calls
from compound.execution.schedule import setting_values
from compound.graph.configuration import load
from compound.graph.system import System
from compound.optimization.settings.base import ConfigurationFile
from compound.optimizers.weights.credit import advantages, module_groups
from compound.optimizers.weights.learner.samples import Group, Sample
from compound.optimizers.weights.recipes.recipe import (
    CreditedSamples,
    GroupSettings,
    PolicyRecipe,
    RecipeContext,
    SharedAdapters,
    learnable,
    samples_of,
    scores_of,
)
from compound.optimizers.weights.recipes.rollouts import Rollout


class GRPOSettings(GroupSettings):
    """Settings of GRPO on groups of module calls."""

    group: int | None = Field(default=None, ge=2)
    """Samples per group, selected to maximize the variance of their rewards; all samples by default."""
    padding: Literal["fill", "truncate", "none"] = "fill"
    """Treatment of runs with different numbers of calls: `fill` lets the samples of a short group weigh more,
    `truncate` drops the calls that not every run made, `none` leaves groups short."""
    teachers: dict[ConfigurationFile, PositiveInt] = Field(default={})
    """Number of the runs of each example that use another configuration, by configuration file. It may have
    other prompts, adapters and models. Answers of a model that tokenizes differently, or returns no
    log-probabilities, are tokenized by the trained model and have no importance weights."""

    @model_validator(mode="after")
    def _learnable(self) -> Self:
        taught, runs = sum(self.teachers.values()), self.rollouts.runs
        if taught >= runs:
            raise ValueError(
                f"teachers make {taught} of {runs} runs; leave at least one to the system itself, or raise "
                "rollouts.runs"
            )
        if taught and self.loss.settings.correction is None:
            raise ValueError(
                f"samples of teachers need a correction, but it is disabled; set loss.{self.loss.name}."
                "correction, or remove teachers"
            )
        return self

    @property
    def own_runs(self) -> int:
        """Number of runs of an example without a teacher."""
        return self.rollouts.runs - sum(self.teachers.values())


class MMGRPOSettings(GRPOSettings, SharedAdapters):
    """Settings of `mmgrpo`."""


@dataclass(frozen=True)
class MMGRPO(PolicyRecipe):
    """Recipe that compares module calls at the same position of whole runs."""

    settings: GRPOSettings

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> CreditedSamples:
        """Run every example with the system and its teachers, and compare calls at the same position."""
        rollouts = [
            *await context.sampler.runs(examples, range(self.settings.own_runs)),
            *await _taught(context, self.settings, examples),
        ]
        samples = samples_of(context, rollouts)
        grouped, counts = module_groups(
            samples,
            Counter(rollout.example.id for rollout in learnable(rollouts)),
            size=self.settings.group,
            padding=self.settings.padding,
            seed=context.seed,
        )
        trained, facts = advantages(grouped, self.settings.scale)
        return CreditedSamples(trained, scores_of(rollouts), {**facts, **counts}, samples)


async def _taught(
    context: RecipeContext, settings: GRPOSettings, examples: Sequence[Example]
) -> list[Rollout]:
    """Return the runs of teachers: the system with other configurations, and possibly other models."""
    rollouts: list[Rollout] = []
    sampler, number = context.sampler, settings.own_runs
    own, models = sampler.executor, _models(sampler.system, context.trained)
    for path, count in settings.teachers.items():
        teacher = sampler.system.bind(load(context.folder / path))
        numbers = range(number, number + count)
        pairs = zip(models, _models(teacher, context.trained), strict=True)
        others = list(dict.fromkeys(other for model, other in pairs if other != model))
        try:
            if others:
                sampler.executor = own.with_tokens(partial(_tokens, context.chat))
            made = await sampler.runs(examples, numbers, teacher, teacher=path)
        finally:
            sampler.executor = own
        records = (
            tokens for rollout in made for call in rollout.trace.calls for tokens in call.tokens
        )
        if others and not all(tokens.logprobs for tokens in records):
            warnings.warn(
                f"answers of the teacher {path} ({', '.join(others)}) are trained on as if the trained model "
                "had sampled them: without log-probabilities, importance weights cannot correct them",
                stacklevel=2,
            )
        rollouts += made
        number += count
    return rollouts


def _models(system: System, components: Sequence[str]) -> list[str]:
    return [str(setting_values(system.components[c], system).get("lm")) for c in components]


def _tokens(chat: ChatTokenizer, request: Request, completion: Completion) -> TokenRecord:
    """Return the tokens of a teacher's answer in the vocabulary of the trained model.

    They are the teacher's own, with their log-probabilities, if both models tokenize prompt and
    answer alike. Otherwise the text is tokenized, and has no log-probabilities.
    """
    prompt = chat.encode(request.messages, request.cue, request.tools)
    own, text = completion.tokens, write_calls(completion.text, completion.tool_calls)
    if own is not None and own.prompt == prompt and len(own.logprobs) == len(own.sampled):
        decoded = str(chat.tokenizer.decode(own.sampled, skip_special_tokens=True))
        if decoded.strip() == text.strip():
            return replace(own, adapter="")
    if request.cue:  # which the teacher may repeat, and the trained model continues after a space
        text = text.removeprefix(request.cue)
        text = text if text[:1].isspace() else f" {text}"
    sampled, end = chat.encode_answer(text), chat.tokenizer.eos_token_id
    ended = completion.finish_reason != "length" and not request.stop and end is not None
    return TokenRecord(
        prompt, token_ids([*sampled, *([end] if ended else [])]), (), completion.finish_reason
    )


class PromptR1Settings(GroupSettings, SharedAdapters):
    """Settings of `prompt_r1`."""


@dataclass(frozen=True)
class PromptR1(PolicyRecipe):
    """Recipe that compares whole conversations; groups are keyed by (example, agent)."""

    settings: PromptR1Settings

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> CreditedSamples:
        """Run every example several times, and compare the conversations."""
        rollouts = await context.sampler.runs(examples, range(self.settings.rollouts.runs))
        samples = [
            replace(s, group=(s.example, s.component), unit=(s.example, s.component, s.rollout))
            for s in samples_of(context, rollouts)
        ]
        trained, facts = advantages(
            samples, self.settings.scale, references=rollout_rewards(samples)
        )
        return CreditedSamples(trained, scores_of(rollouts), facts, samples)


def rollout_rewards(samples: Sequence[Sample]) -> Mapping[Group, tuple[float, ...]]:
    """Return the rewards of the rollouts of each group, one per rollout."""
    found: dict[Group, dict[int, float]] = {}
    for sample in samples:
        found.setdefault(sample.group, {})[sample.rollout] = sample.reward
    return {group: tuple(rewards.values()) for group, rewards in found.items()}
