"""On-policy distillation: train the weights toward a teacher that knows more than the trained components.

The teacher is the same model with the prompts and demonstrations that the job starts from, while
the trained components read short prompts; it may also be another model with the same tokenizer, or
see the expected answer and the feedback of the metric. The trained components sample, and the
advantage of a token is ``log p(teacher) - log p(policy)``: in expectation the gradient of the
reverse KL divergence at each token (Agarwal et al. 2024, "On-policy distillation of language
models", with lambda = beta = 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from pydantic import Field

from compound.components.fields import format_inputs
from compound.core.engine import Request
from compound.core.errors import DeclarationError, suggest_name
from compound.core.example import Example
from compound.core.threads import compute
from compound.execution.schedule import setting_values
from compound.execution.trace import Call
from compound.graph.space import Demos, Text
from compound.graph.system import System
from compound.optimization.settings.base import ModelName
from compound.optimizers.weights.learner.losses import (
    ClippedLoss,
    PolicyObjective,
    PolicyObjectiveField,
)
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.recipes.recipe import (
    CreditedSamples,
    PolicyRecipe,
    PolicySettings,
    RecipeContext,
    SharedAdapters,
    learnable,
    samples_of,
    scores_of,
)
from compound.optimizers.weights.recipes.rollouts import Rollout

BOUND = 5.0  # nats: bound of an advantage, so that no single token dominates a step


class DistillSettings(PolicySettings, SharedAdapters):
    """Settings of `distill`."""

    prompts: dict[str, str] = Field(default={})
    """The short prompt of each component; by default, the prompt that the system declares. Demonstrations are
    always dropped."""
    teacher: ModelName | None = None
    """A model with the same tokenizer to learn from, loaded beside the base model; by default, the base model
    itself."""
    feedback: bool = False
    """Whether the teacher also reads the expected answer of the example and the metric's feedback on the
    run."""
    margin: float = Field(default=0.05, ge=0)
    """The loss of the mean score that is accepted for shorter prompts, in units of the score."""
    loss: PolicyObjectiveField = PolicyObjective(dapo=ClippedLoss())
    """The loss: a name, or a name with its settings; `dapo` by default, the mean over tokens."""


@dataclass(frozen=True)
class Distill(PolicyRecipe):
    """Recipe of on-policy distillation."""

    settings: DistillSettings

    @property
    def teacher(self) -> str | None:
        """The model to learn from, if it is not the base model."""
        return self.settings.teacher

    def values(self, system: System, trained: Sequence[str]) -> dict[str, object]:
        """Return the short prompts, and no demonstrations, for the trained components that have such keys."""
        found: dict[str, object] = {}
        for name in trained:
            prompt, demos = (
                system.parameters.get(f"{name}.{setting}") for setting in ("prompt", "demos")
            )
            if isinstance(prompt, Text):
                found[f"{name}.prompt"] = self.settings.prompts.get(name, prompt.value)
            if isinstance(demos, Demos):
                found[f"{name}.demos"] = ()
        return found

    def obstacle(self, system: System, trained: Sequence[str]) -> str:
        """Return why there is nothing to learn from the teacher, or why it is not available."""
        if self.teacher is not None:
            return ""
        adapted = [name for name in trained if system.configuration[f"{name}.weights"] is not None]
        if adapted:
            return f"the weights of {', '.join(adapted)} are trained already, unlike the teacher's"
        short = system.configuration.replace(self.values(system, trained))
        if self.settings.feedback or system.configuration.diff(short):
            return ""
        return f"the prompts of {', '.join(trained)} are the short ones, without demonstrations"

    def check(self, system: System, trained: Sequence[str], section: str) -> None:
        """Check the names and values of the short prompts, and that requests of the components are known."""
        short = self.values(system, trained)
        for name, prompt in self.settings.prompts.items():
            if name not in trained:
                raise DeclarationError(
                    f"{section}.prompts names {name!r}, which is not trained",
                    hint=suggest_name(name, trained),
                )
            if f"{name}.prompt" not in short:
                raise DeclarationError(
                    f"{section}.prompts names {name!r}, whose prompt is fixed",
                    hint=f"declare the prompt of {name!r} as a parameter: prompt: {{tune: …}}",
                )
            system.parameters[f"{name}.prompt"].check(prompt, f"{section}.prompts.{name}")
        for name in trained:
            if not hasattr(system.components[name], "request"):
                raise DeclarationError(
                    f"{name!r} cannot be distilled: its requests are not known in advance",
                    hint="distill llm and agent components; freeze others with weights: null",
                )

    async def collect(self, context: RecipeContext, examples: Sequence[Example]) -> CreditedSamples:
        """Run every example several times, and compare each token with the teacher."""
        rollouts = await context.sampler.runs(examples, range(self.settings.rollouts.runs))
        chat, samples = context.chat, list[Sample]()
        taught: list[Sample] = []
        for rollout in learnable(rollouts):
            for sample in samples_of(context, [rollout]):
                request = self._request(context, rollout, rollout.trace.call(sample.address))
                prompt = chat.encode(request.messages, request.cue, request.tools)
                if self.teacher is not None or prompt != sample.tokens.prompt:
                    samples.append(sample)
                    taught.append(replace(sample, tokens=replace(sample.tokens, prompt=prompt)))
        async with context.trainer_turn():
            rows = await compute(context.trainer.divergences, samples, taught)
        known = [(sample, row) for sample, row in zip(samples, rows, strict=True) if row]
        if samples and not known:
            raise DeclarationError(
                f"every prompt of the teacher is longer than max_length ({self.sampling.max_length} tokens)",
                hint="raise rollouts.max_length of the method",
            )
        facts: dict[str, Any] = {"too_long": len(samples) - len(known)}
        if tokens := [value for _, row in known for value in row]:
            facts["reverse_kl"] = fmean(tokens)
        learned = [replace(sample, advantages=advantages(row)) for sample, row in known]
        return CreditedSamples(learned, scores_of(rollouts), facts, samples)

    def _request(self, context: RecipeContext, rollout: Rollout, call: Call) -> Request:
        """Return what the teacher reads in place of the request of a call."""
        system = context.task.system  # bound to the configuration that the job starts from
        component: Any = system.components[call.component]
        wired = {name: value for name, value in call.inputs.items() if name in component.settings}
        request: Request = component.request(
            call.inputs, {**setting_values(component, system), **wired}
        )
        return with_note(request, rollout) if self.settings.feedback else request


def advantages(divergence: Sequence[float]) -> tuple[float, ...]:
    """Return the advantages of the tokens of an answer.

    >>> advantages((-0.5, 2.0, 30.0))
    (0.5, -2.0, -5.0)
    """
    return tuple(min(BOUND, max(-BOUND, -value)) for value in divergence)


def with_note(request: Request, rollout: Rollout) -> Request:
    """Return a request whose last message of a user also shows what is known after a run."""
    known: Mapping[str, object] = {
        "expected_result_of_the_whole_task": format_inputs(rollout.example.gold) or None,
        "feedback_on_an_earlier_attempt": rollout.trace.feedback or None,
    }
    place = max(n for n, message in enumerate(request.messages) if message.role == "user")
    messages = list(request.messages)
    messages[place] = replace(
        messages[place], content=f"{messages[place].text}\n\n{format_inputs(known)}".rstrip()
    )
    return replace(request, messages=tuple(messages))
