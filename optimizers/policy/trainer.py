"""The one trainer: policy gradients of every kind, and maximum likelihood, on samples as they were sampled.

Every method feeds it the same way. Only sampled tokens carry loss; nothing is tokenized again; no sample is
lost to rounding: an update's loss is a sum over its samples, however they go through the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compound.artifacts import put, verified
from compound.errors import CompoundError
from compound.optimizers.policy import corrections, diagnostics, losses
from compound.optimizers.policy.adapters import Adapters
from compound.optimizers.policy.batching import by_adapter, micro_batches, parts, size
from compound.optimizers.policy.forward import Pass, forward
from compound.optimizers.policy.monitor import Monitor
from compound.optimizers.policy.samples import Sample
from compound.optimizers.policy.updates import Rate, Updater, share
from compound.optimizers.policy.values import value_head, values
from compound.settings import WeightSettings

LIKELIHOOD = "sft"
OPTIMIZERS = "optimizer-states"  # how their folders are named: like no adapter, whose name is an identifier
VALUE, HEAD = "|value", "|head:"  # no adapter can have these names: they are no identifiers


class StaleSamples(CompoundError):
    """Samples were drawn with other weights than those that are to be trained with them."""


@dataclass(frozen=True)
class Known:
    """What is worked out once for the samples of a step, before any update: log-probabilities by sample."""

    old: Mapping[int, Any]
    reference: Mapping[int, Any]


class Trainer:
    """Trains adapters.

    Args:
        adapters: what is trained.
        adapter_of: the adapter of each component.
        settings: rates, clipping, batches.
        seed: names the order of samples.
        steps: how many there will be, for the learning rate's schedule.
        longest: the most tokens of an answer, which `dr_grpo` divides by.
        critic: whether there is a value head (PPO).
    """

    def __init__(
        self,
        adapters: Adapters,
        adapter_of: Mapping[str, str],
        settings: WeightSettings,
        *,
        seed: int = 0,
        steps: int = 1,
        longest: int | None = None,
        critic: bool = False,
    ) -> None:
        self.longest, self._clip = longest, losses.Clip(low=settings.clip, high=settings.highest)
        self.adapters, self.adapter_of, self.settings, self.seed = adapters, dict(adapter_of), settings, seed
        rate = Rate(settings.lr, settings.warmup, steps, settings.schedule)
        self._updaters = {
            name: Updater(adapters.parameters(name), rate, settings.max_norm, f"adapter {name!r}")
            for name in adapters.spaces
        }
        self.head = value_head(adapters.base.config.hidden_size).to(adapters.device) if critic else None
        if self.head is not None:
            named = list(self.head.named_parameters())
            self._updaters[VALUE] = Updater(
                named, Rate(settings.value_lr), settings.max_norm, "the value head"
            )
        self.versions: dict[str, list[str]] = {name: [adapters.version(name)] for name in adapters.spaces}

    # -- what a step does ------------------------------------------------------------------------------

    def step(self, samples: Sequence[Sample], number: int, *, likelihood: bool = False) -> dict[str, Any]:
        """Update every adapter that has samples; return what happened, as JSON.

        Args:
            samples: with advantages; their adapters are the present ones, or at most `stale` updates older.
            number: of the step, for the learning rate and the order.
            likelihood: imitate the samples (advantage 1, no ratio) instead.

        Raises:
            StaleSamples: a sample was drawn with other weights.
            CompoundError: memory does not suffice, or a gradient is not finite.
        """
        begun = time.perf_counter()
        kept = [s for s in samples if s.length and size(s) <= self.settings.max_length]
        monitor = Monitor(samples, kept, divergence=bool(self.settings.beta) and not likelihood)
        if not likelihood:
            self._refuse_stale(kept)
        with self._memory():
            known = self._known(kept, likelihood)
            for turn in range(self.settings.passes):
                for part in parts(kept, self.settings.parts, self.seed, "step", number, turn):
                    self._update(part, number, known, likelihood, monitor)
        return {**monitor.facts(), "train_seconds": time.perf_counter() - begun}

    def values(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with what the value head says before each of their tokens."""
        import torch

        found = {id(sample): sample for sample in samples}
        kept = [s for s in samples if s.length and size(s) <= self.settings.max_length]
        with self._memory(), torch.no_grad():
            for batch, ran in self._passes(kept):
                said = values(self.head, ran.states).tolist()
                for sample, row in zip(batch, said, strict=True):
                    found[id(sample)] = replace(sample, values=tuple(row[: sample.length]))
        return list(found.values())

    def _update(
        self, part: Sequence[Sample], number: int, known: Known, likelihood: bool, monitor: Monitor
    ) -> None:
        """Take one step of each adapter that has samples in this part, and of the value head."""
        variant = self._variant(likelihood)
        for name, own in by_adapter(part, self.adapter_of).items():
            weights = losses.sample_weights(variant, [s.length for s in own], self.longest)
            weight_of = {id(s): w for s, w in zip(own, weights, strict=True)}
            with self.adapters.using(name) as model:
                for batch in self._mine(micro_batches(own, self.settings.micro_tokens)):
                    loss = self._loss(model, batch, variant, weight_of, known, monitor)
                    loss.backward()
            monitor.norm(name, self._updaters[name].update(number))
        if VALUE in self._updaters and not likelihood:
            self._updaters[VALUE].update(number)

    def _loss(
        self,
        model: Any,
        batch: Sequence[Sample],
        variant: str,
        weight_of: Mapping[int, float],
        known: Known,
        monitor: Monitor,
    ) -> Any:
        """Return a micro-batch's part of the update's loss."""
        import torch

        settings, likelihood = self.settings, losses.variant_of(variant).likelihood
        temperature = 1.0 if likelihood else settings.temperature  # what is imitated is to be said at any
        ran = forward(model, batch, bonus=settings.entropy > 0, temperature=temperature)
        weight = torch.tensor([weight_of[id(s)] for s in batch], device=ran.mask.device)[:, None]
        old = ran.logps.detach() if not known.old else _rows(known.old, batch, ran.mask)
        advantages = _padded([s.advantages for s in batch], ran.mask) if not likelihood else ran.mask
        if not likelihood and settings.correction is not None:
            said = _said(batch, old, ran.mask)
            if losses.variant_of(variant).sampler:
                old = said
            else:
                cap = settings.correction
                advantages = advantages * corrections.importance_weights(old, said, ran.mask, cap=cap)
        per_token = losses.per_token_loss(variant, ran.logps, old, advantages, ran.mask, self._clip)
        divergence = None
        if known.reference:
            divergence = losses.kl(ran.logps, _rows(known.reference, batch, ran.mask), ran.mask)
            per_token = per_token + settings.beta * divergence
        if settings.entropy and not likelihood:
            per_token = per_token - settings.entropy * ran.entropies
        loss = (per_token * ran.mask * weight).sum()
        if self.head is not None and not likelihood:
            loss = loss + (self._value_loss(batch, ran) * ran.mask * weight).sum()
        for component, rows in _by_component(batch).items():
            seen = diagnostics.diagnose(
                variant, ran.logps[rows], old[rows], advantages[rows], ran.mask[rows], self._clip,
                entropy=ran.entropies[rows],
            )  # fmt: skip
            far = (
                float((divergence[rows] * ran.mask[rows]).detach().sum()) if divergence is not None else None
            )
            monitor.seen(component, seen, far)
        return loss

    def _value_loss(self, batch: Sequence[Sample], ran: Pass) -> Any:
        """Return the value head's loss at each token."""
        said = values(self.head, ran.states)
        before = _padded([s.values for s in batch], ran.mask)
        wanted = _padded([s.returns for s in batch], ran.mask)
        return losses.value_loss(said, before, wanted, self.settings.value_clip)

    def _variant(self, likelihood: bool) -> str:
        """Return the loss by name: where samples are imitated, one that does so."""
        own = self.settings.loss
        return own if not likelihood or losses.variant_of(own).likelihood else LIKELIHOOD

    # -- what is known before a step -------------------------------------------------------------------

    def _known(self, samples: Sequence[Sample], likelihood: bool) -> Known:
        """Work out log-probabilities of the weights as they are, and of the base, where they are needed."""
        import torch

        several = self.settings.passes * self.settings.parts > 1 and not likelihood
        with torch.no_grad():
            old = self._logps(samples, base=False) if several else {}
            reference = self._logps(samples, base=True) if self.settings.beta and not likelihood else {}
        return Known(old, reference)

    def _logps(self, samples: Sequence[Sample], *, base: bool) -> dict[int, Any]:
        return {
            id(sample): row
            for batch, ran in self._passes(samples, base=base)
            for sample, row in zip(batch, ran.logps, strict=True)
        }

    def _passes(
        self, samples: Sequence[Sample], *, base: bool = False
    ) -> Iterator[tuple[list[Sample], Pass]]:
        """Yield micro-batches with what the model says of them."""
        for name, own in by_adapter(samples, self.adapter_of).items():
            with self.adapters.using(None if base else name) as model:
                for batch in micro_batches(own, self.settings.micro_tokens):
                    yield batch, forward(model, batch, temperature=self.settings.temperature)

    def _refuse_stale(self, samples: Sequence[Sample]) -> None:
        """Raise where a sample's weights are not those of now, or of the few updates before that may pass."""
        for sample in samples:
            known = self.versions[self.adapter_of[sample.component]][-1 - self.settings.stale :]
            if sample.on_policy and sample.tokens.adapter not in known:
                raise StaleSamples(
                    f"{sample.address} of example {sample.example!r} was sampled with the adapter "
                    f"{_short(sample.tokens.adapter)}, but {_short(known[-1])} is to be trained",
                    hint="sample with the weights of the last step, or raise optimize.weights.stale",
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
                    hint="go on with a lower optimize.weights.micro_tokens, or else .max_length",
                ) from error
            raise

    # -- checkpoints -----------------------------------------------------------------------------------

    def save(self, folder: Path) -> dict[str, Any]:
        """Store adapters and optimizer states; return their references, relative to ``folder``, as JSON."""
        adapters = {name: self.adapters.save(name, folder) for name in self.adapters.spaces}
        for name in adapters:
            if self.versions[name][-1] != (now := self.adapters.version(name)):
                self.versions[name] = [*self.versions[name], now][-2 - self.settings.stale :]
        return {
            "adapters": adapters,
            "optimizers": put(self._write, folder, OPTIMIZERS),
            "versions": {name: list(some) for name, some in self.versions.items()},
        }

    def restore(self, saved: Mapping[str, Any], folder: Path) -> None:
        """Go on from what `save` stored.

        Raises:
            ConfigurationError: a folder is missing, was changed, or does not fit.
        """
        from safetensors.torch import load_file

        for name, reference in saved["adapters"].items():
            self.adapters.begin(name, reference, folder)
        tensors = load_file(verified(saved["optimizers"], folder) / "state.safetensors")
        for name, updater in self._updaters.items():
            own = {
                key.removeprefix(f"{name}:"): t for key, t in tensors.items() if key.startswith(f"{name}:")
            }
            updater.restore(own)
        if self.head is not None:
            own = {key.removeprefix(HEAD): t for key, t in tensors.items() if key.startswith(HEAD)}
            self.head.load_state_dict(own)
        self.versions = {name: list(some) for name, some in saved["versions"].items()}

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


def _rows(known: Mapping[int, Any], batch: Sequence[Sample], like: Any) -> Any:
    """Return stored rows of samples, as wide as this micro-batch."""
    import torch

    rows = torch.zeros_like(like)
    for i, sample in enumerate(batch):
        rows[i, : sample.length] = known[id(sample)][: sample.length]
    return rows


def _said(batch: Sequence[Sample], old: Any, mask: Any) -> Any:
    """Return the sampler's log-probabilities; where it gave none, what the trainer computes."""
    said = old.clone()
    known = [i for i, s in enumerate(batch) if len(s.tokens.logprobs) == s.length]
    if known:
        said[known] = _padded([batch[i].tokens.logprobs for i in known], mask[known])
    return said


def _padded(rows: Sequence[Sequence[float]], like: Any) -> Any:
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
