"""Trainer of LoRA adapters for all policy-gradient losses and maximum likelihood.

All methods share it. Only sampled tokens contribute to the loss, and no text is tokenized again.
The loss of an update is a sum over its samples, so it does not depend on how they are divided into
micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.core.errors import CompoundError
from compound.core.storage.artifacts import Reference, store_folder, verify_reference
from compound.engines.local import loading
from compound.engines.local.devices import naming_settings
from compound.execution.rng import fork_torch_rng
from compound.optimizers.weights.learner import losses
from compound.optimizers.weights.learner.adapters import CRITIC, Adapters, FrozenModel
from compound.optimizers.weights.learner.batching import (
    Pass,
    Passes,
    by_adapter,
    minibatches,
    per_token,
)
from compound.optimizers.weights.learner.critic import VALUE, CriticSettings, ValueCritic
from compound.optimizers.weights.learner.forward import ForwardPass
from compound.optimizers.weights.learner.losses import Objective, PolicyLoss
from compound.optimizers.weights.learner.monitor import Monitor, diagnostic_sums
from compound.optimizers.weights.learner.samples import SECTION, Sample, SamplingSettings
from compound.optimizers.weights.learner.saved import Saved
from compound.optimizers.weights.learner.updates import (
    OptimizerSettings,
    Rate,
    Updater,
    rank_and_world_size,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OPTIMIZERS = "optimizer-states"  # prefix of the folders of optimizer states


class StaleSamples(CompoundError):
    """Samples were drawn with weights that are too old for the trainer."""


@dataclass(frozen=True)
class FixedLogps:
    """Log-probabilities computed once per step, before the first update, by ``id`` of the sample.

    Attributes:
        old: under the weights at the start of the step, without dropout; empty if those of the
            first update are the same, since each sample is used in one update only.
        reference: under the base model; empty if the loss has no KL term.
    """

    old: Mapping[int, Tensor]
    reference: Mapping[int, Tensor]


class Trainer:
    """Trains adapters, and the critic if there is one.

    Args:
        adapters: the base model and its adapters.
        adapter_of: the adapter of each component.
        loss: the loss; imitation losses ignore advantages.
        optimizer: learning rate and batch sizes.
        rollouts: the settings that the samples were drawn with.
        critic: the settings of the critic (PPO); ``None`` for no critic.
        seed: the seed of the order of samples.
        steps: the total number of steps, for the learning rate schedule.
        longest: the maximum number of tokens of an answer, which `dr_grpo` divides by.
        section: the path of the training settings, for messages.
        in_step: whether all processes must run the same forward passes, since they share the base
            model.
        teacher: a model that scores answers instead of the base model; see `divergences`.
    """

    def __init__(
        self,
        adapters: Adapters,
        adapter_of: Mapping[str, str],
        loss: Objective,
        optimizer: OptimizerSettings,
        rollouts: SamplingSettings,
        critic: CriticSettings | None = None,
        *,
        seed: int = 0,
        steps: int = 1,
        longest: int | None = None,
        section: str = SECTION,
        in_step: bool = False,
        teacher: FrozenModel | None = None,
    ) -> None:
        self.section = section
        self.adapters, self.adapter_of = adapters, dict(adapter_of)
        self.longest, self.seed = longest, seed
        self.optimizer, self.rollouts = optimizer, rollouts
        self.variant, self.loss = loss.name, loss.settings
        # None: an imitation loss
        self.policy = self.loss if isinstance(self.loss, PolicyLoss) else None
        self.passes = Passes(
            adapters,
            self.adapter_of,
            optimizer.micro_tokens,
            rollouts.temperature,
            # imitation also teaches the format, so it maximizes the likelihood without the
            # constraint
            constrained=self.policy is not None,
            in_step=in_step,
        )
        self._taught = (
            replace(self.passes, adapters=teacher, in_step=False) if teacher else self.passes
        )
        rate, norm, most = Rate.of(optimizer, steps), optimizer.max_norm, optimizer.max_skipped
        self._updaters = {
            name: Updater(
                adapters.parameters(name),
                rate,
                norm,
                f"adapter {name!r}",
                most,
                section,
                optimizer.weight_decay,
            )
            for name in adapters.spaces
        }
        self.critic = None if critic is None else ValueCritic(critic, adapters)
        if self.critic is not None:
            self._updaters |= self.critic.updaters(norm, most, section)
        self.versions: dict[str, list[str]] = {
            name: [adapters.version(name)] for name in adapters.spaces
        }

    # -- training steps ----------------------------------------------------------------------------------

    def step(self, samples: Sequence[Sample], number: int) -> dict[str, Any]:
        """Update every adapter that has samples, and return statistics as JSON.

        Args:
            samples: with advantages, unless the loss imitates; drawn with the current adapters or
                with versions at most ``max_staleness`` updates older.
            number: the index of the step, for the learning rate and the order of samples.

        Raises:
            StaleSamples: a sample was drawn with older weights.
            CompoundError: memory ran out, or ``max_skipped`` consecutive gradients were not finite.
        """
        started = time.perf_counter()
        kept = self._kept(samples)
        masked = len(kept) - len(self._learned_from(kept))
        divergence = self.policy is not None and self.policy.beta > 0
        monitor = Monitor(
            samples, kept, divergence=divergence, masked=masked, device=self.adapters.device
        )
        if self.policy is not None:
            self._check_staleness(kept)
        with self._memory():
            fixed = self._fixed_logps(self._learned_from(kept))
            for epoch in range(self.optimizer.epochs):
                parts = minibatches(
                    kept, self.optimizer.minibatches, self.seed, "step", number, epoch
                )
                for place, part in enumerate(parts):
                    with self._dropout(number, epoch, place):
                        self._update(part, number, fixed, monitor)
        facts = {**monitor.facts(), "train_seconds": time.perf_counter() - started}
        return {**facts, "unshared": self.adapters.unshared} if self.adapters.unshared else facts

    def _dropout(self, *place: int) -> AbstractContextManager[None]:
        """Seed the dropout of an update, in each process with a stream of its own."""
        if not self.optimizer.dropout:
            return nullcontext()
        return fork_torch_rng(self.seed, "dropout", *place, rank_and_world_size()[0])

    def values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the value head's estimate before each of their tokens.

        In distributed training, all processes must call it with the same samples; each computes a
        share.
        """
        import torch

        kept, critic = self._kept(samples), self.critic
        assert critic is not None  # only recipes with a critic ask for values
        with self._memory(), torch.no_grad():
            table = self.passes.table(
                kept, lambda ran: critic.estimates(ran.states), critic=critic.has_adapter
            )
            rows = per_token(kept, table)
        return [
            replace(sample, values=rows[id(sample)]) if id(sample) in rows else sample
            for sample in samples
        ]

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
        kept = [
            (one, other) for one, other in pairs if all(map(self.rollouts.admits, (one, other)))
        ]
        own, others = [one for one, _ in kept], [other for _, other in kept]
        with self._memory(), torch.no_grad():
            policy = self.passes.table(own, lambda ran: ran.logps)
            rows = per_token(own, policy - passes.table(others, lambda ran: ran.logps, base=True))
        return [rows.get(id(sample), ()) for sample in samples]

    def _kept(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples that are neither empty nor too long."""
        return [s for s in samples if self.rollouts.admits(s)]

    def _update(
        self, part: Sequence[Sample], number: int, fixed: FixedLogps, monitor: Monitor
    ) -> None:
        """Update the critic and each adapter that has samples in this minibatch."""
        for name, own in by_adapter(part, self.adapter_of).items():
            if not (learned := self._learned_from(own)):
                continue
            weight_of = self._weights(own)
            with self.adapters.using(name) as model, self.adapters.dropping():
                for each in self.passes.share(learned):
                    self._loss(model, each, weight_of, fixed, monitor).backward()
                    self._accumulate()
            if self.critic is not None and self.critic.has_adapter:
                self._fit_critic(self.critic, learned, weight_of)
            monitor.add_norm(name, self._updaters[name].update(number))
        for name in (VALUE, CRITIC):
            if name in self._updaters and self._learned_from(part):
                monitor.add_norm(name, self._updaters[name].update(number))

    def _fit_critic(
        self, critic: ValueCritic, samples: Sequence[Sample], weight_of: Mapping[int, float]
    ) -> None:
        """Add the gradients of the value loss to the critic's adapter and head."""
        with self.adapters.using(CRITIC) as model:
            for each in self.passes.share(samples):
                ran = self.passes.run(model, each, temperature=1.0, logps=False)
                if each.counts:
                    weight = _padded([(weight_of[id(s)],) for s in each.samples], ran.mask[:, :1])
                    loss = (self._value_loss(each.samples, ran, critic) * ran.mask * weight).sum()
                else:
                    loss = 0.0 * ran.states.sum()
                loss.backward()
                self._accumulate()

    def _accumulate(self) -> None:
        """Add the gradients of a micro-batch to the sums of the update."""
        for updater in self._updaters.values():
            updater.accumulate()

    def _learned_from(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples whose tokens contribute to the loss, without masked truncated ones."""
        return [s for s in samples if not self.rollouts.masks(s)]

    def _weights(self, samples: Sequence[Sample]) -> dict[int, float]:
        """Return the weights of the samples of an update; a masked sample counts as an empty answer."""
        learned = {id(sample) for sample in self._learned_from(samples)}
        found = losses.sample_weights(
            self.variant,
            [s.length if id(s) in learned else 0 for s in samples],
            self.longest,
            counts=[s.weight for s in samples],
            units=[s.unit or (n,) for n, s in enumerate(samples)],
        )
        return {id(s): weight for s, weight in zip(samples, found, strict=True)}

    def _loss(
        self,
        model: PreTrainedModel,
        each: Pass,
        weight_of: Mapping[int, float],
        fixed: FixedLogps,
        monitor: Monitor,
    ) -> Tensor:
        """Return the contribution of a micro-batch to the loss of an update."""
        import torch

        policy, batch = self.policy, each.samples
        entropy = 0.0 if policy is None else policy.entropy
        # imitation maximizes the likelihood at temperature 1, whatever the rollouts were sampled at
        temperature = 1.0 if policy is None else self.rollouts.temperature
        ran = self.passes.run(model, each, entropy_grad=entropy > 0, temperature=temperature)
        if not each.counts:
            return 0.0 * ran.logps.sum()
        weight = torch.tensor([weight_of[id(s)] for s in batch], device=ran.mask.device)[:, None]
        old = ran.logps.detach() if not fixed.old else _rows(fixed.old, batch, ran.mask)
        advantages = ran.mask
        if policy is not None:
            advantages = _padded([s.advantages for s in batch], ran.mask)
        if policy is not None and policy.correction is not None:
            sampler = _sampler_logps(batch, old, ran.mask)
            advantages = advantages * losses.importance_weights(
                old, sampler, ran.mask, cap=policy.correction
            )
        per_token = losses.per_token_loss(
            self.variant, ran.logps, old, advantages, ran.mask, self.loss
        )
        divergence = None
        if policy is not None and fixed.reference:
            divergence = losses.kl(ran.logps, _rows(fixed.reference, batch, ran.mask), ran.mask)
            per_token = per_token + policy.beta * divergence
        if entropy:
            per_token = per_token - entropy * ran.entropies
        loss = (per_token * ran.mask * weight).sum()
        if self.critic is not None and not self.critic.has_adapter:
            loss = loss + (self._value_loss(batch, ran, self.critic) * ran.mask * weight).sum()
        self._monitor(batch, ran, old, advantages, divergence, monitor)
        return loss

    def _monitor(
        self,
        batch: Sequence[Sample],
        ran: ForwardPass,
        old: Tensor,
        advantages: Tensor,
        divergence: Tensor | None,
        monitor: Monitor,
    ) -> None:
        """Report the diagnostics of a micro-batch to the monitor, by component."""
        for component, rows in _by_component(batch).items():
            sums = diagnostic_sums(
                self.variant,
                ran.logps[rows],
                old[rows],
                advantages[rows],
                ran.mask[rows],
                self.loss,
                entropy=ran.entropies[rows],
            )
            base_kl = None
            if divergence is not None:
                base_kl = (divergence[rows] * ran.mask[rows]).detach().sum()
            monitor.add(component, sums, base_kl)

    def _value_loss(self, batch: Sequence[Sample], ran: ForwardPass, critic: ValueCritic) -> Tensor:
        """Return the critic's loss at each token."""
        estimates = critic.estimates(ran.states)
        before = _padded([s.values for s in batch], ran.mask)
        targets = _padded([s.returns for s in batch], ran.mask)
        return losses.value_loss(estimates, before, targets, critic.settings.clip)

    # -- log-probabilities before the first update -------------------------------------------------------

    def _fixed_logps(self, samples: Sequence[Sample]) -> FixedLogps:
        """Compute the log-probabilities under the current weights and the base model, as far as needed."""
        import torch

        if self.policy is None:
            return FixedLogps({}, {})
        # with a single update without dropout, the old ones are those of the update's own forward
        # pass
        differ = (
            self.optimizer.epochs * self.optimizer.minibatches > 1 or self.optimizer.dropout > 0
        )
        with torch.no_grad():
            old = self.passes.logps(samples, base=False) if differ else {}
            reference = self.passes.logps(samples, base=True) if self.policy.beta else {}
        return FixedLogps(old, reference)

    def _check_staleness(self, samples: Sequence[Sample]) -> None:
        """Raise if a sample was drawn with an adapter version that is too old."""
        for sample in samples:
            known = self.versions[self.adapter_of[sample.component]][
                -1 - self.rollouts.max_staleness :
            ]
            if sample.on_policy and sample.tokens.adapter not in known:
                raise StaleSamples(
                    f"{sample.address} of example {sample.example!r} was sampled with adapter version "
                    f"{_short(sample.tokens.adapter)}, but the current version is {_short(known[-1])}",
                    hint="sample with the weights of the last step, or raise "
                    f"{self.section}.rollouts.max_staleness",
                )

    def _memory(self) -> AbstractContextManager[None]:
        """Turn an out-of-memory error into one that names the settings to lower."""
        section = self.section
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
        """Start from stored adapters; ``None`` keeps the initial weights, which equal the base model.

        Args:
            references: the stored adapters by name, relative to ``folder`` or absolute.
            folder: the folder that adapters are saved to.

        Raises:
            ConfigurationError: a folder is missing, was changed, or does not match the adapters.
        """
        for name, reference in references.items():
            self.adapters.start_from(name, reference, folder)
            self.versions[name] = [self.adapters.version(name)]

    def write_adapter(self, name: str, folder: Path) -> None:
        """Write the current weights of an adapter to a folder, in peft's format."""
        self.adapters.write(name, folder)

    def interrupt(self) -> None:
        """Do nothing: a step in this process cannot be ended."""

    def close(self) -> None:
        """Release the model's memory; the trainer cannot be used afterwards."""
        del self.adapters, self.passes, self._taught, self._updaters
        loading.release()

    def save(self, folder: Path) -> Saved:
        """Store adapters and optimizer states, and return their references, relative to ``folder``."""
        adapters = {name: self.adapters.save(name, folder) for name in self.adapters.spaces}
        for name in adapters:
            if self.versions[name][-1] != (now := self.adapters.version(name)):
                self.versions[name] = [*self.versions[name], now][
                    -2 - self.rollouts.max_staleness :
                ]
        return Saved(
            adapters=adapters,
            optimizers=store_folder(self._write, folder, OPTIMIZERS),
            versions={name: list(some) for name, some in self.versions.items()},
            skipped={name: updater.skipped for name, updater in self._updaters.items()},
        )

    def restore(self, saved: Saved, folder: Path) -> None:
        """Restore adapters and optimizer states that `save` stored.

        Raises:
            ConfigurationError: a folder is missing, was changed, or does not match the adapters.
        """
        for name, reference in saved.adapters.items():
            self.adapters.start_from(name, reference, folder)
        tensors = _stored(saved.optimizers, folder)
        for name, updater in self._updaters.items():
            self._restore_tensors(name, tensors)
            updater.skipped = saved.skipped.get(name, 0)
        self.versions = {name: list(some) for name, some in saved.versions.items()}

    def restore_optimizer(self, name: str, reference: Reference, folder: Path) -> None:
        """Restore the optimizer state of one adapter from a checkpoint.

        Args:
            name: the adapter, or `VALUE` for the critic's weights and optimizer states, which are
                ignored if they belong to a critic of another kind or size.
            reference: the folder of the optimizer states, relative to ``folder``.
            folder: the folder of checkpoints.

        Raises:
            ConfigurationError: the folder is missing or was changed.
        """
        tensors = _stored(reference, folder)
        if name != VALUE:
            self._restore_tensors(name, tensors)
        elif self.critic is not None and self.critic.fits(tensors):
            for each in self._updaters.keys() & {VALUE, CRITIC}:
                self._restore_tensors(each, tensors)

    def _restore_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self._updaters[name].restore(
            {
                key.removeprefix(f"{name}:"): t
                for key, t in tensors.items()
                if key.startswith(f"{name}:")
            }
        )
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

    tensors: dict[str, Tensor] = load_file(
        verify_reference(reference, folder) / "state.safetensors"
    )
    return tensors


def _rows(known: Mapping[int, Tensor], batch: Sequence[Sample], like: Tensor) -> Tensor:
    """Return the stored rows of a micro-batch's samples, padded to its width."""
    import torch

    rows = torch.zeros_like(like)
    for i, sample in enumerate(batch):
        rows[i, : sample.length] = known[id(sample)][: sample.length]
    return rows


def _sampler_logps(batch: Sequence[Sample], old: Tensor, mask: Tensor) -> Tensor:
    """Return the sampler's log-probabilities; the trainer's own for samples without any."""
    logps = old.clone()
    known = [i for i, s in enumerate(batch) if len(s.tokens.logprobs) == s.length]
    if known:
        logps[known] = _padded([batch[i].tokens.logprobs for i in known], mask[known])
    return logps


def _padded(rows: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    import torch

    padded = torch.zeros(like.shape, dtype=like.dtype)  # filled on the host, and copied once
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=padded.dtype)
    return padded.to(like.device)


def _by_component(batch: Sequence[Sample]) -> dict[str, list[int]]:
    """Return the row indices of each component's samples."""
    found: dict[str, list[int]] = {}
    for row, sample in enumerate(batch):
        found.setdefault(sample.component, []).append(row)
    return found


def _short(version: str) -> str:
    return version[:12] or "(base model)"
