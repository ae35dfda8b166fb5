"""Trainer of LoRA adapters for all policy-gradient losses and maximum likelihood.

All methods share it. Only sampled tokens contribute to the loss, and no text is tokenized again.
The loss of an update is a sum over its samples, so it does not depend on how they are divided into
micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from compound.core.errors import CompoundError
from compound.core.storage.artifacts import Reference, store_folder, verify_reference
from compound.core.storage.state import State
from compound.engines.local import loading
from compound.engines.local.devices import Placement, naming_settings
from compound.graph.space import Weights
from compound.optimizers.weights.learner import losses
from compound.optimizers.weights.learner.adapters import Adapters, FrozenModel
from compound.optimizers.weights.learner.batching import (
    Batch,
    Passes,
    by_adapter,
    minibatches,
    per_token,
)
from compound.optimizers.weights.learner.excerpts import choose_groups
from compound.optimizers.weights.learner.forward import ForwardPass, padded
from compound.optimizers.weights.learner.losses import (
    ClippedLoss,
    ImitationObjective,
    Monitor,
    PolicyObjective,
)
from compound.optimizers.weights.learner.samples import Sample, SamplingSettings
from compound.optimizers.weights.learner.updates import (
    VALUE,
    CriticSettings,
    OptimizerSettings,
    Updater,
    ValueCritic,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OPTIMIZERS = "optimizer-states"  # prefix of the folders of optimizer states
Logps = Mapping[int, "Tensor"]  # by ``id`` of the sample


class StaleSamples(CompoundError):
    """Samples were drawn with weights that are too old for the trainer."""


class Saved(State):
    """References to the folders that `Trainer.save` wrote, relative to the folder of the run's memory."""

    # the folder of each adapter; `None` if it equals the base model
    adapters: dict[str, dict[str, str] | None]
    optimizers: dict[str, str]  # the folder of the optimizer states
    versions: dict[str, list[str]]  # the digests of the latest versions of each adapter
    # the number of consecutive skipped updates of each adapter
    skipped: dict[str, int] = Field(default={})


class LearnerSpec(BaseModel):
    """Declaration of a learner, as JSON if it is opened in another process."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str  # the base model: `smollm2`, a folder, or a hub id
    shapes: dict[str, Weights]  # of each adapter
    adapter_of: dict[str, str]  # by component
    loss: PolicyObjective | ImitationObjective
    optimizer: OptimizerSettings
    rollouts: SamplingSettings  # that samples are drawn with
    critic: CriticSettings | None = None
    teacher: str | None = None  # a model that scores answers instead of the base model
    seed: int = 0  # of initial weights, and of the order of samples
    steps: int = 1  # of the job, for the learning rate
    longest: int | None = None  # the maximum number of tokens of an answer
    section: str  # the path of the training settings, for messages
    placement: Placement = Placement()  # where and how the base model is loaded
    checkpointing: bool = False  # whether the backward pass recomputes activations


class Trainer:
    """Trains adapters, and the critic if there is one.

    Args:
        adapters: the base model and its adapters.
        spec: the declaration of the training.
        in_step: whether all processes must run the same forward passes, since they share the base
            model.
        teacher: a model that scores answers instead of the base model; see `divergences`.
    """

    def __init__(
        self,
        adapters: Adapters,
        spec: LearnerSpec,
        *,
        in_step: bool = False,
        teacher: FrozenModel | None = None,
    ) -> None:
        self.adapters, self.spec, self.loss = adapters, spec, spec.loss.settings
        self.optimizer, self.rollouts = spec.optimizer, spec.rollouts
        # None: an imitation loss
        self.policy = self.loss if isinstance(self.loss, ClippedLoss) else None
        self.passes = Passes(
            adapters,
            spec.adapter_of,
            spec.optimizer.micro_tokens,
            spec.rollouts.temperature,
            # imitation also teaches the format, so it maximizes the likelihood without the
            # constraint
            constrained=self.policy is not None,
            in_step=in_step,
        )
        self._taught = (
            replace(self.passes, adapters=teacher, in_step=False) if teacher else self.passes
        )
        optimizer, section = spec.optimizer, spec.section
        self._updaters = {
            name: Updater(
                adapters.parameters(name), optimizer, f"adapter {name!r}", section, spec.steps
            )
            for name in adapters.spaces
        }
        self.critic = None
        if spec.critic is not None:
            self.critic = ValueCritic(spec.critic, optimizer, adapters.base, section)
            self._updaters[VALUE] = self.critic.updater
        self.versions = {name: [adapters.version(name)] for name in adapters.spaces}

    # -- training steps ----------------------------------------------------------------------------------

    def step(self, samples: Sequence[Sample], number: int) -> dict[str, Any]:
        """Update every adapter that has samples, and return statistics as JSON.

        Args:
            samples: with advantages, unless the loss imitates; drawn with the current adapters or
                with versions at most ``max_staleness`` updates older.
            number: the index of the step, for the learning rate and the order of samples.

        Raises:
            StaleSamples: a sample was drawn with older weights.
            CompoundError: memory ran out, or several consecutive gradients were not finite.
        """
        started = time.perf_counter()
        kept = [s for s in samples if self.rollouts.admits(s)]
        learned = self._learned_from(kept)
        divergence = self.policy is not None and self.policy.beta > 0
        groups = choose_groups(samples, number, self.spec.steps) if self.policy is not None else []
        shown = [s for group in groups for s in group if self.rollouts.learns_from(s)]
        monitor = Monitor(kept, divergence=divergence, device=self.adapters.device, shown=shown)
        if self.policy is not None:
            self._check_staleness(kept)
        with self._memory():
            old, reference = self._fixed_logps(learned)
            for epoch in range(self.optimizer.epochs):
                parts = minibatches(
                    kept, self.optimizer.minibatches, self.spec.seed, "step", number, epoch
                )
                for part in parts:
                    self._update(part, number, old, reference, monitor)
        facts = {
            "left_out": len(samples) - len(kept),
            "masked": len(kept) - len(learned),
            **monitor.facts(),
            "train_seconds": time.perf_counter() - started,
        }
        return {**facts, "unshared": self.adapters.unshared} if self.adapters.unshared else facts

    def values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the value head's estimate before each of their tokens."""
        import torch

        kept, critic = [s for s in samples if self.rollouts.admits(s)], self.critic
        assert critic is not None  # only recipes with a critic ask for values
        with self._memory(), torch.no_grad():
            table = self.passes.table(kept, lambda ran: critic.estimates(ran.states), logps=False)
            rows = per_token(kept, table)
        return [replace(s, values=rows[id(s)]) if id(s) in rows else s for s in samples]

    def divergences(
        self, samples: Sequence[Sample], taught: Sequence[Sample] | None = None
    ) -> list[tuple[float, ...]]:
        """Return, per sampled token, the log-ratio of the policy to the base model (adapter disabled).

        Its mean over sampled tokens estimates the KL divergence. Samples that are too long get an
        empty row.

        Args:
            samples: the samples.
            taught: the same answers after the prompts of a teacher, in the same order. The
                log-ratio is then that to the teacher: another model if the trainer has one, else
                the base model.
        """
        import torch

        passes = self.passes if taught is None else self._taught
        pairs = zip(samples, samples if taught is None else taught, strict=True)
        kept = [pair for pair in pairs if all(map(self.rollouts.admits, pair))]
        own, others = [one for one, _ in kept], [other for _, other in kept]
        with self._memory(), torch.no_grad():
            policy = self.passes.table(own, lambda ran: ran.logps)
            rows = per_token(own, policy - passes.table(others, lambda ran: ran.logps, base=True))
        return [rows.get(id(sample), ()) for sample in samples]

    def _update(
        self, part: Sequence[Sample], number: int, old: Logps, reference: Logps, monitor: Monitor
    ) -> None:
        for name, own in by_adapter(part, self.spec.adapter_of).items():
            if not (learned := self._learned_from(own)):
                continue
            weight_of = self._weights(own)
            with self.adapters.using(name) as model:
                for batch, counts in self.passes.share(learned):
                    loss, ran = self._loss(model, batch, weight_of, old, reference, monitor, counts)
                    if self.critic is not None and counts:
                        loss = loss + self._value_loss(batch, ran, weight_of)
                    loss.backward()
                    for updater in self._updaters.values():
                        updater.accumulate()
            monitor.add_norm(name, self._updaters[name].update(number))
        if self.critic is not None and self._learned_from(part):
            monitor.add_norm(VALUE, self._updaters[VALUE].update(number))

    def _learned_from(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples whose tokens contribute to the loss, without masked truncated ones."""
        return [s for s in samples if not self.rollouts.masks(s)]

    def _weights(self, samples: Sequence[Sample]) -> dict[int, float]:
        """Return the weights of the samples of an update; a masked sample counts as an empty answer."""
        found = losses.sample_weights(
            self.spec.loss.name,
            [0 if self.rollouts.masks(s) else s.length for s in samples],
            self.spec.longest,
            counts=[s.weight for s in samples],
            units=[s.unit or (n,) for n, s in enumerate(samples)],
        )
        return {id(s): weight for s, weight in zip(samples, found, strict=True)}

    def _loss(
        self,
        model: PreTrainedModel,
        batch: Batch,
        weight_of: Mapping[int, float],
        old_logps: Logps,
        reference: Logps,
        monitor: Monitor,
        counts: bool,
    ) -> tuple[Tensor, ForwardPass]:
        """Return the contribution of a micro-batch to the loss of an update, and its forward pass."""
        policy = self.policy
        entropy = 0.0 if policy is None else policy.entropy
        # imitation maximizes the likelihood at temperature 1, whatever the rollouts were sampled at
        temperature = 1.0 if policy is None else self.rollouts.temperature
        ran = self.passes.run(model, batch, entropy_grad=entropy > 0, temperature=temperature)
        if not counts:
            return 0.0 * ran.logps.sum(), ran
        old = ran.logps.detach()
        if old_logps:
            old = _padded([old_logps[id(s)] for s in batch], ran.mask)
        advantages, divergence = ran.mask, None
        if policy is not None:
            advantages = _padded([s.advantages for s in batch], ran.mask)
            if policy.correction is not None:
                sampler = _sampler_logps(batch, old, ran.mask)
                advantages = advantages * losses.importance_weights(
                    old, sampler, ran.mask, cap=policy.correction
                )
        terms = losses.per_token_loss(self.loss, ran.logps, old, advantages, ran.mask)
        monitor.add_logps(batch, ran.logps, old)
        if policy is not None and reference:
            base = _padded([reference[id(s)] for s in batch], ran.mask)
            divergence = losses.kl(ran.logps, base, ran.mask)
            terms = terms + policy.beta * divergence
        if entropy:
            terms = terms - entropy * ran.entropies
        components = [sample.component for sample in batch]
        for component in dict.fromkeys(components):
            rows = [row for row, name in enumerate(components) if name == component]
            sums = losses.diagnostic_sums(
                self.loss,
                ran.logps[rows],
                old[rows],
                advantages[rows],
                ran.mask[rows],
                ran.entropies[rows],
                None if divergence is None else divergence[rows],
            )
            monitor.add(component, sums)
        return (terms * ran.mask * _weight(batch, weight_of, ran.mask)).sum(), ran

    def _value_loss(self, batch: Batch, ran: ForwardPass, weight_of: Mapping[int, float]) -> Tensor:
        assert self.critic is not None
        before = _padded([s.values for s in batch], ran.mask)
        targets = _padded([s.returns for s in batch], ran.mask)
        estimates = self.critic.estimates(ran.states)
        terms = losses.value_loss(estimates, before, targets, self.critic.settings.clip)
        return (terms * ran.mask * _weight(batch, weight_of, ran.mask)).sum()

    def _fixed_logps(self, samples: Sequence[Sample]) -> tuple[Logps, Logps]:
        """Return the log-probabilities before the first update, as far as needed."""
        import torch

        if self.policy is None:
            return {}, {}
        updates = self.optimizer.epochs * self.optimizer.minibatches
        with torch.no_grad():
            old = self.passes.logps(samples, base=False) if updates > 1 else {}
            return old, self.passes.logps(samples, base=True) if self.policy.beta else {}

    def _check_staleness(self, samples: Sequence[Sample]) -> None:
        most = self.rollouts.max_staleness
        for sample in samples:
            known = self.versions[self.spec.adapter_of[sample.component]][-1 - most :]
            if sample.on_policy and sample.tokens.adapter not in known:
                raise StaleSamples(
                    f"{sample.address} of example {sample.example!r} was sampled with adapter version "
                    f"{_short(sample.tokens.adapter)}, but the current version is {_short(known[-1])}",
                    hint="sample with the weights of the last step, or raise "
                    f"{self.spec.section}.rollouts.max_staleness",
                )

    def _memory(self) -> AbstractContextManager[None]:
        """Turn an out-of-memory error into one that names the settings to lower."""
        section = self.spec.section
        checkpointing = f"set {section}.base.gradient_checkpointing, or "
        return naming_settings(
            "a training step",
            f"lower {section}.optimizer.micro_tokens, {'' if self.adapters.checkpointing else checkpointing}"
            f"lower {section}.rollouts.max_length, and resume the run",
        )

    # -- checkpoints -----------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the base model."""
        return self.adapters.tokenizer

    def start(self, references: Mapping[str, Reference | None], folder: Path) -> None:
        """Start from stored adapters; ``None`` keeps the initial weights, which equal the base model."""
        for name, reference in references.items():
            self.adapters.start_from(name, reference, folder)
            self.versions[name] = [self.adapters.version(name)]

    def write_adapter(self, name: str, folder: Path) -> None:
        """Write the current weights of an adapter to a folder, in peft's format."""
        self.adapters.write(name, folder)

    def release_cache(self) -> None:
        """Return memory that is not in use to the device, so that other processes can use it."""
        loading.release()

    def interrupt(self) -> None:
        """Do nothing: a step in this process cannot be ended."""

    def close(self) -> None:
        """Release the model's memory; the trainer cannot be used afterwards."""
        del self.adapters, self.passes, self._taught, self._updaters
        loading.release()

    def save(self, folder: Path) -> Saved:
        """Store adapters and optimizer states, and return their references, relative to ``folder``."""
        with ThreadPoolExecutor(1) as thread:  # hashing and writing leave the processor to others
            optimizers = thread.submit(store_folder, self._write, folder, OPTIMIZERS)
            adapters = self.save_adapters(folder)
        for name in adapters:
            if self.versions[name][-1] != (now := self.adapters.version(name)):
                known = [*self.versions[name], now]
                self.versions[name] = known[-2 - self.rollouts.max_staleness :]
        return Saved(
            adapters=adapters,
            optimizers=optimizers.result(),
            versions={name: list(some) for name, some in self.versions.items()},
            skipped={name: updater.skipped for name, updater in self._updaters.items()},
        )

    def save_adapters(self, folder: Path) -> dict[str, dict[str, str] | None]:
        """Store adapters; all processes that share a base model must call it together."""
        return {name: self.adapters.save(name, folder) for name in self.adapters.spaces}

    def restore(self, saved: Saved, folder: Path) -> None:
        """Restore adapters and optimizer states that `save` stored."""
        for name, reference in saved.adapters.items():
            self.adapters.start_from(name, reference, folder)
        tensors = _stored(saved.optimizers, folder)
        for name, updater in self._updaters.items():
            self._restore_tensors(name, tensors)
            updater.skipped = saved.skipped.get(name, 0)
        self.versions = {name: list(some) for name, some in saved.versions.items()}

    def restore_optimizer(self, name: str, reference: Reference, folder: Path) -> None:
        """Restore the optimizer state of one adapter from a checkpoint; of `VALUE`, also the weights."""
        self._restore_tensors(name, _stored(reference, folder))

    def _restore_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        start = f"{name}:"
        own = {key.removeprefix(start): t for key, t in tensors.items() if key.startswith(start)}
        self._updaters[name].restore(own)
        if name == VALUE and self.critic is not None:
            self.critic.restore(tensors)

    def _write(self, folder: Path) -> None:
        from safetensors.torch import save_file

        tensors = {
            f"{name}:{key}": tensor
            for name, updater in self._updaters.items()
            for key, tensor in updater.state().items()
        }
        if self.critic is not None:
            tensors |= self.critic.state()
        save_file(tensors, folder / "state.safetensors")


def _stored(reference: Reference, folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    path = verify_reference(reference, folder) / "state.safetensors"
    tensors: dict[str, Tensor] = load_file(path)
    return tensors


def _sampler_logps(batch: Batch, old: Tensor, mask: Tensor) -> Tensor:
    """Return the sampler's log-probabilities; the trainer's own for samples without any."""
    missing = (math.nan,)
    known = [
        s.tokens.logprobs if len(s.tokens.logprobs) == s.length else missing * s.length
        for s in batch
    ]
    found = _padded(known, mask)
    return found.where(~found.isnan(), old)


def _weight(batch: Batch, weight_of: Mapping[int, float], mask: Tensor) -> Tensor:
    return _padded([(weight_of[id(s)],) for s in batch], mask[:, :1])


def _padded(rows: Sequence[Sequence[float] | Tensor], like: Tensor) -> Tensor:
    import torch

    found = padded(rows, like.device, like.dtype)
    return torch.nn.functional.pad(found, (0, like.shape[1] - found.shape[1]))


def _short(version: str) -> str:
    return version[:12] or "(base model)"
