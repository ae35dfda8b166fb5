"""The one trainer: policy gradients of every kind, and maximum likelihood, on samples as they were sampled.

Every method feeds it the same way. Only sampled tokens carry loss; nothing is tokenized again; no sample is
lost to rounding: an update's loss is a sum over its samples, however they go through the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compound.errors import CompoundError
from compound.optimizers.weights.learner.adapters import Adapters
from compound.optimizers.weights.learner.batching import by_adapter, micro_batches, minibatches, size
from compound.optimizers.weights.learner.forward import Pass, forward
from compound.optimizers.weights.learner.monitor import Monitor
from compound.optimizers.weights.learner.samples import Sample, SamplingSettings
from compound.optimizers.weights.learner.saved import Saved
from compound.optimizers.weights.learner.updates import OptimizerSettings, Rate, Updater, add_up, share
from compound.optimizers.weights.learner.values import CriticSettings, value_head, values
from compound.optimizers.weights.loss import corrections, diagnostics, losses
from compound.optimizers.weights.loss.losses import PolicyLoss
from compound.optimizers.weights.loss.objective import Objective
from compound.storage.artifacts import Reference, put, verified

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

OPTIMIZERS = "optimizer-states"  # how their folders are named: like no adapter, whose name is an identifier
VALUE, HEAD = "|value", "|head:"  # no adapter can have these names: they are no identifiers


class StaleSamples(CompoundError):
    """Samples were drawn with other weights than those that are to be trained with them."""


@dataclass(frozen=True)
class Known:
    """What is worked out once for the samples of a step, before any update: log-probabilities by sample."""

    old: Mapping[int, Tensor]
    reference: Mapping[int, Tensor]


class Trainer:
    """Trains adapters.

    Args:
        adapters: what is trained.
        adapter_of: the adapter of each component.
        loss: what is minimized; one that imitates reads no advantages.
        optimizer: learning rate, batches.
        rollouts: how the samples were drawn.
        critic: the settings of the value head, where there is one (PPO).
        seed: names the order of samples.
        steps: how many there will be, for the learning rate's schedule.
        longest: the most tokens of an answer, which `dr_grpo` divides by.
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
    ) -> None:
        self.adapters, self.adapter_of, self.longest, self.seed = adapters, dict(adapter_of), longest, seed
        self.optimizer, self.rollouts, self.critic = optimizer, rollouts, critic
        self.variant, self.loss = loss.name, loss.settings
        self.policy = self.loss if isinstance(self.loss, PolicyLoss) else None  # none: samples are imitated
        rate, norm, most = Rate.of(optimizer, steps), optimizer.max_norm, optimizer.max_skipped
        self._updaters = {
            name: Updater(adapters.parameters(name), rate, norm, f"adapter {name!r}", most)
            for name in adapters.spaces
        }
        self.head = None
        if critic is not None:
            self.head = value_head(adapters.base.config.hidden_size).to(adapters.device)
            named = list(self.head.named_parameters())
            self._updaters[VALUE] = Updater(named, Rate(critic.lr), norm, "the value head", most)
        self.versions: dict[str, list[str]] = {name: [adapters.version(name)] for name in adapters.spaces}

    # -- what a step does ------------------------------------------------------------------------------

    def step(self, samples: Sequence[Sample], number: int) -> dict[str, Any]:
        """Update every adapter that has samples; return what happened, as JSON.

        Args:
            samples: with advantages, unless they are imitated; their adapters are the present ones, or at
                most ``max_staleness`` updates older.
            number: of the step, for the learning rate and the order.

        Raises:
            StaleSamples: a sample was drawn with other weights.
            CompoundError: memory does not suffice, or gradients were not finite `max_skipped` times in a row.
        """
        begun = time.perf_counter()
        kept = self._kept(samples)
        masked = len(kept) - len(self._learned_from(kept))
        divergence = self.policy is not None and self.policy.beta > 0
        monitor = Monitor(samples, kept, divergence=divergence, masked=masked, device=self.adapters.device)
        if self.policy is not None:
            self._check_staleness(kept)
        with self._memory():
            known = self._known(self._learned_from(kept))
            for turn in range(self.optimizer.epochs):
                for part in minibatches(kept, self.optimizer.minibatches, self.seed, "step", number, turn):
                    self._update(part, number, known, monitor)
        facts = {**monitor.facts(), "train_seconds": time.perf_counter() - begun}
        return {**facts, "unshared": self.adapters.unshared} if self.adapters.unshared else facts

    def values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with what the value head says before each of their tokens.

        Where several processes train together, all must call it with the same samples: each reads a share.
        """
        import torch

        kept = self._kept(samples)
        with self._memory(), torch.no_grad():
            rows = self._rows_of(kept, lambda ran: values(self.head, ran.states))
        return [
            replace(sample, values=tuple(rows[id(sample)].tolist())) if id(sample) in rows else sample
            for sample in samples
        ]

    def divergences(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Return, for each sample's tokens, the log-ratio of the policy to the base model, adapter off.

        Its mean over sampled tokens estimates the KL divergence. Samples that are too long have none.
        """
        import torch

        kept = self._kept(samples)
        with self._memory(), torch.no_grad():
            policy, base = self._logps(kept, base=False), self._logps(kept, base=True)
        far = {id(s): (policy[id(s)] - base[id(s)])[: s.length].tolist() for s in kept}
        return [tuple(far.get(id(sample), ())) for sample in samples]

    def _kept(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples that are neither empty nor too long."""
        return [s for s in samples if s.length and size(s) <= self.rollouts.max_length]

    def _update(self, part: Sequence[Sample], number: int, known: Known, monitor: Monitor) -> None:
        """Take one step of each adapter that has samples in this part, and of the value head."""
        for name, own in by_adapter(part, self.adapter_of).items():
            if not (learned := self._learned_from(own)):
                continue
            weight_of = self._weights(own)
            with self.adapters.using(name) as model:
                for batch in self._mine(self._batches(learned)):
                    loss = self._loss(model, batch, weight_of, known, monitor)
                    loss.backward()
            monitor.norm(name, self._updaters[name].update(number))
        if VALUE in self._updaters and self._learned_from(part):
            monitor.norm(VALUE, self._updaters[VALUE].update(number))

    def _learned_from(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples whose tokens carry loss: all, or those that were not truncated."""
        return [s for s in samples if not (self.rollouts.mask_truncated and s.is_truncated)]

    def _weights(self, samples: Sequence[Sample]) -> dict[int, float]:
        """Return the weights of an update's samples; a masked one counts as an answer without tokens."""
        learned = {id(sample) for sample in self._learned_from(samples)}
        found = losses.sample_weights(
            self.variant, [s.length if id(s) in learned else 0 for s in samples], self.longest,
            counts=[s.weight for s in samples], units=[s.unit or (n,) for n, s in enumerate(samples)],
        )  # fmt: skip
        return {id(s): weight for s, weight in zip(samples, found, strict=True)}

    def _loss(
        self,
        model: PreTrainedModel,
        batch: Sequence[Sample],
        weight_of: Mapping[int, float],
        known: Known,
        monitor: Monitor,
    ) -> Tensor:
        """Return a micro-batch's part of the update's loss."""
        import torch

        policy = self.policy
        entropy = 0.0 if policy is None else policy.entropy
        temperature = (
            1.0 if policy is None else self.rollouts.temperature
        )  # what is imitated is to be said at any
        ran = self._forward(model, batch, bonus=entropy > 0, temperature=temperature)
        weight = torch.tensor([weight_of[id(s)] for s in batch], device=ran.mask.device)[:, None]
        old = ran.logps.detach() if not known.old else _rows(known.old, batch, ran.mask)
        advantages = ran.mask
        if policy is not None:
            advantages = _padded([s.advantages for s in batch], ran.mask)
            old, advantages = self._corrected(policy, batch, old, advantages, ran.mask)
        per_token = losses.per_token_loss(self.variant, ran.logps, old, advantages, ran.mask, self.loss)
        divergence = None
        if policy is not None and known.reference:
            divergence = losses.kl(ran.logps, _rows(known.reference, batch, ran.mask), ran.mask)
            per_token = per_token + policy.beta * divergence
        if entropy:
            per_token = per_token - entropy * ran.entropies
        loss = (per_token * ran.mask * weight).sum()
        if self.critic is not None:
            loss = loss + (self._value_loss(batch, ran, self.critic) * ran.mask * weight).sum()
        self._seen(batch, ran, old, advantages, divergence, monitor)
        return loss

    def _corrected(
        self, policy: PolicyLoss, batch: Sequence[Sample], old: Tensor, advantages: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return old log-probabilities and advantages, corrected for a sampler that computes differently."""
        if not policy.corrected:
            return old, advantages
        said = _said(batch, old, mask)
        if policy.weight_cap is None:  # the ratio of the loss refers to the sampler itself
            return said, advantages
        return old, advantages * corrections.importance_weights(old, said, mask, cap=policy.weight_cap)

    def _seen(
        self,
        batch: Sequence[Sample],
        ran: Pass,
        old: Tensor,
        advantages: Tensor,
        divergence: Tensor | None,
        monitor: Monitor,
    ) -> None:
        """Give the monitor what a micro-batch shows, by component."""
        for component, rows in _by_component(batch).items():
            seen = diagnostics.diagnose(
                self.variant, ran.logps[rows], old[rows], advantages[rows], ran.mask[rows], self.loss,
                entropy=ran.entropies[rows],
            )  # fmt: skip
            far = (
                float((divergence[rows] * ran.mask[rows]).detach().sum()) if divergence is not None else None
            )
            monitor.seen(component, seen, far)

    def _value_loss(self, batch: Sequence[Sample], ran: Pass, critic: CriticSettings) -> Tensor:
        """Return the value head's loss at each token."""
        said = values(self.head, ran.states)
        before = _padded([s.values for s in batch], ran.mask)
        wanted = _padded([s.returns for s in batch], ran.mask)
        return losses.value_loss(said, before, wanted, critic.clip)

    # -- what is known before a step -------------------------------------------------------------------

    def _known(self, samples: Sequence[Sample]) -> Known:
        """Work out log-probabilities of the weights as they are, and of the base, where they are needed."""
        import torch

        if self.policy is None:
            return Known({}, {})
        several = self.optimizer.epochs * self.optimizer.minibatches > 1
        with torch.no_grad():
            old = self._logps(samples, base=False) if several else {}
            reference = self._logps(samples, base=True) if self.policy.beta else {}
        return Known(old, reference)

    def _logps(self, samples: Sequence[Sample], *, base: bool) -> dict[int, Tensor]:
        return self._rows_of(samples, lambda ran: ran.logps, base=base)

    def _rows_of(
        self, samples: Sequence[Sample], row: Callable[[Pass], Tensor], *, base: bool = False
    ) -> dict[int, Tensor]:
        """Return a number for each sampled token, by sample.

        Each process reads its share of the micro-batches, and all get every row: the others' are 0 in a table
        that is added up, so no number is rounded.
        """
        import torch

        place = {id(sample): number for number, sample in enumerate(samples)}
        if not place:
            return {}
        longest = max(sample.length for sample in samples)
        table = torch.zeros((len(samples), longest), device=self.adapters.device)
        for batch, ran in self._passes(samples, base=base):
            found = row(ran) * ran.mask
            table[[place[id(sample)] for sample in batch], : found.shape[1]] = found
        add_up([table])
        return {key: table[number, : samples[number].length] for key, number in place.items()}

    def _passes(
        self, samples: Sequence[Sample], *, base: bool = False
    ) -> Iterator[tuple[list[Sample], Pass]]:
        """Yield this process's micro-batches with what the model says of them."""
        for name, own in by_adapter(samples, self.adapter_of).items():
            with self.adapters.using(None if base else name) as model:
                for batch in self._mine(self._batches(own)):
                    yield batch, self._forward(model, batch, temperature=self.rollouts.temperature)

    def _batches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Cut samples of one adapter into micro-batches."""
        return micro_batches(samples, self.optimizer.micro_tokens, once=not self.adapters.unshared)

    def _forward(
        self, model: PreTrainedModel, batch: Sequence[Sample], *, temperature: float, bonus: bool = False
    ) -> Pass:
        """Run the model over a micro-batch; equal prompts are read once where the model allows it."""
        shared = False if self.adapters.unshared else None
        return forward(model, batch, shared=shared, bonus=bonus, temperature=temperature)

    def _check_staleness(self, samples: Sequence[Sample]) -> None:
        """Raise where a sample's weights are not those of now, or of the few updates before that may pass."""
        for sample in samples:
            known = self.versions[self.adapter_of[sample.component]][-1 - self.rollouts.max_staleness :]
            if sample.on_policy and sample.tokens.adapter not in known:
                raise StaleSamples(
                    f"{sample.address} of example {sample.example!r} was sampled with the adapter "
                    f"{_short(sample.tokens.adapter)}, but {_short(known[-1])} is to be trained",
                    hint="sample with the weights of the last step, or raise rollouts.max_staleness",
                )

    @staticmethod
    def _mine(batches: Sequence[list[Sample]]) -> Sequence[list[Sample]]:
        """Return this process's part of the micro-batches."""
        rank, world = share()
        return batches[rank::world]

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """Say what to lower where memory does not suffice."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryError) or "memory" in str(error):
                raise CompoundError(
                    f"memory does not suffice for a training step: {error}",
                    hint="continue with a lower optimizer.micro_tokens, or else rollouts.max_length",
                ) from error
            raise

    # -- checkpoints -----------------------------------------------------------------------------------

    def save(self, folder: Path) -> Saved:
        """Store adapters and optimizer states; return their references, relative to ``folder``."""
        adapters = {name: self.adapters.save(name, folder) for name in self.adapters.spaces}
        for name in adapters:
            if self.versions[name][-1] != (now := self.adapters.version(name)):
                self.versions[name] = [*self.versions[name], now][-2 - self.rollouts.max_staleness :]
        return Saved(
            adapters=adapters,
            optimizers=put(self._write, folder, OPTIMIZERS),
            versions={name: list(some) for name, some in self.versions.items()},
            skipped={name: updater.skipped for name, updater in self._updaters.items()},
        )

    def restore(self, saved: Saved, folder: Path) -> None:
        """Go on from what `save` stored.

        Raises:
            ConfigurationError: a folder is missing, was changed, or does not fit.
        """
        for name, reference in saved.adapters.items():
            self.adapters.begin(name, reference, folder)
        tensors = _stored(saved.optimizers, folder)
        for name, updater in self._updaters.items():
            self._take(name, tensors)
            updater.skipped = saved.skipped.get(name, 0)
        self.versions = {name: list(some) for name, some in saved.versions.items()}

    def take(self, name: str, reference: Reference, folder: Path) -> None:
        """Take one adapter's optimizer state, or that of `VALUE` with the value head, from a checkpoint.

        Raises:
            ConfigurationError: the folder is missing or was changed.
        """
        self._take(name, _stored(reference, folder))

    def _take(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self._updaters[name].restore(
            {key.removeprefix(f"{name}:"): t for key, t in tensors.items() if key.startswith(f"{name}:")}
        )
        if name == VALUE and self.head is not None:
            own = {key.removeprefix(HEAD): t for key, t in tensors.items() if key.startswith(HEAD)}
            self.head.load_state_dict(own)

    def _write(self, folder: Path) -> None:
        from safetensors.torch import save_file

        tensors = {
            f"{name}:{key}": tensor
            for name, updater in self._updaters.items()
            for key, tensor in updater.state().items()
        }
        if self.head is not None:
            tensors |= {f"{HEAD}{key}": t.detach().cpu().clone() for key, t in self.head.state_dict().items()}
        save_file(tensors, folder / "state.safetensors")


def _stored(reference: Reference, folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found: dict[str, Tensor] = load_file(verified(reference, folder) / "state.safetensors")
    return found


def _rows(known: Mapping[int, Tensor], batch: Sequence[Sample], like: Tensor) -> Tensor:
    """Return stored rows of samples, as wide as this micro-batch."""
    import torch

    rows = torch.zeros_like(like)
    for i, sample in enumerate(batch):
        rows[i, : sample.length] = known[id(sample)][: sample.length]
    return rows


def _said(batch: Sequence[Sample], old: Tensor, mask: Tensor) -> Tensor:
    """Return the sampler's log-probabilities; where it gave none, what the trainer computes."""
    said = old.clone()
    known = [i for i, s in enumerate(batch) if len(s.tokens.logprobs) == s.length]
    if known:
        said[known] = _padded([batch[i].tokens.logprobs for i in known], mask[known])
    return said


def _padded(rows: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    import torch

    padded = torch.zeros_like(like)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=padded.dtype, device=padded.device)
    return padded


def _by_component(batch: Sequence[Sample]) -> dict[str, list[int]]:
    """Return the rows of each component."""
    found: dict[str, list[int]] = {}
    for row, sample in enumerate(batch):
        found.setdefault(sample.component, []).append(row)
    return found


def _short(version: str) -> str:
    return version[:12] or "of no adapter"
