"""Forward passes over the samples of a training step, in micro-batches that the processes divide.

Every process of a learner computes a share of the micro-batches. If the processes share the base model, all
of them run equally many passes, of which some only take part in gathering its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compound.optimizers.weights.learner.adapters import CRITIC, FrozenModel
from compound.optimizers.weights.learner.batching import Pass, by_adapter, divide, in_step
from compound.optimizers.weights.learner.forward import ForwardPass, Sharing, forward, saves_enough
from compound.optimizers.weights.learner.samples import Sample
from compound.optimizers.weights.learner.updates import all_reduce, rank_and_world_size

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Passes:
    """Runs the models of a trainer over samples.

    Attributes:
        adapters: the base model and its adapters, or a model without any.
        adapter_of: the adapter of each component.
        micro_tokens: the maximum number of tokens of a micro-batch.
        temperature: the temperature that the samples were drawn at.
        constrained: whether the distributions of constrained answers are those of their sampler.
        in_step: whether all processes must run the same forward passes, since they share the base model.
    """

    adapters: FrozenModel
    adapter_of: Mapping[str, str]
    micro_tokens: int
    temperature: float
    constrained: bool
    in_step: bool

    @property
    def sharing(self) -> Sharing:
        """When equal prompts are processed once."""
        return Sharing(self.adapters.second_pass, self.micro_tokens)

    def share(self, samples: Sequence[Sample]) -> Iterator[Pass]:
        """Yield this process's share of the micro-batches of the samples of one adapter."""
        rank, processes = rank_and_world_size()
        sharing = self.sharing
        shares = divide(samples, self.micro_tokens, processes, sharing=sharing)
        if self.in_step:
            yield from in_step(shares, rank, sharing=sharing)
        else:
            yield from map(Pass, shares[rank])

    def run(
        self,
        model: PreTrainedModel,
        each: Pass,
        *,
        temperature: float,
        entropy_grad: bool = False,
        entropy: bool = True,
        logps: bool = True,
    ) -> ForwardPass:
        """Run a model over a micro-batch; equal prompts are processed once if it pays."""
        batch, shared = each.samples, each.shared
        if shared is None:
            shared = saves_enough(batch, self.sharing)
        constrained = self.constrained and any(sample.tokens.constraint for sample in batch)
        return forward(
            model,
            batch,
            shared=shared,
            entropy_grad=entropy_grad,
            temperature=temperature,
            constraints=self.adapters.constraints if constrained else None,
            entropy=entropy,
            logps=logps,
        )

    def logps(self, samples: Sequence[Sample], *, base: bool) -> dict[int, Tensor]:
        """Return the log-probabilities of sampled tokens, by ``id`` of the sample.

        Args:
            samples: any samples; all processes must pass the same ones.
            base: whether under the base model, without adapters.
        """
        table = self.table(samples, lambda ran: ran.logps, base=base)
        return {id(sample): row[: sample.length] for sample, row in zip(samples, table, strict=True)}

    def table(
        self,
        samples: Sequence[Sample],
        row: Callable[[ForwardPass], Tensor],
        *,
        base: bool = False,
        critic: bool = False,
    ) -> Tensor:
        """Return one number per sampled token, (samples, longest answer), on the device.

        Each process computes its share of the micro-batches. The rows are summed over the processes; rows of
        other processes are 0, so the sum is exact.

        Args:
            samples: any samples; all processes must pass the same ones.
            row: returns the numbers of a micro-batch.
            base: whether to run the base model, without adapters.
            critic: whether to run the critic's adapter.
        """
        import torch

        place = {id(sample): number for number, sample in enumerate(samples)}
        longest = max((sample.length for sample in samples), default=0)
        table = torch.zeros((len(samples), longest), device=self.adapters.device)
        if not samples:
            return table
        for batch, ran in self._ran(samples, base=base, critic=critic):
            numbers = row(ran) * ran.mask
            table[[place[id(sample)] for sample in batch], : numbers.shape[1]] = numbers
        all_reduce([table])
        return table

    def _ran(
        self, samples: Sequence[Sample], *, base: bool, critic: bool
    ) -> Iterator[tuple[list[Sample], ForwardPass]]:
        """Yield this process's micro-batches with their forward passes: of policy, base, or critic."""
        for name, own in by_adapter(samples, self.adapter_of).items():
            with self.adapters.using(CRITIC if critic else None if base else name) as model:
                for each in self.share(own):
                    ran = self.run(model, each, temperature=self.temperature, entropy=False, logps=not critic)
                    if each.counts:
                        yield each.samples, ran


def per_token(samples: Sequence[Sample], table: Tensor) -> dict[int, tuple[float, ...]]:
    """Return the numbers of each sample's tokens, by its ``id``; reads them from the device at once."""
    return {id(s): tuple(row[: s.length]) for s, row in zip(samples, table.tolist(), strict=True)}
