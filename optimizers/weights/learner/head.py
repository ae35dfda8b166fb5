"""Log-probabilities of given tokens, without keeping a row of the vocabulary for each of them.

Some families rescale what their output layer returns; `Output` does so, too.

What the output layer returns for a token is as long as the vocabulary. Chunks of tokens are taken through it
one after the other, and again in the backward pass, so that memory holds one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

CHUNK = 32_000_000  # numbers that a chunk of logits may hold


@dataclass(frozen=True)
class Output:
    """How a model makes logits of its final states.

    Attributes:
        layer: its output layer.
        divided: what logits are divided by (Granite's ``logits_scaling``).
        times: what they are multiplied by (Cohere's ``logit_scale``).
        softcap: the bound they are pressed into by a tanh (Gemma's ``final_logit_softcapping``).
        temperature: what was sampled at: logits are divided by it.
    """

    layer: Callable[[Tensor], Tensor]
    size: int
    divided: float = 1.0
    times: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, model: PreTrainedModel, temperature: float = 1.0) -> Output:
        """Return that of a causal language model."""
        config, layer = model.config, model.get_output_embeddings()
        return cls(
            layer,
            layer.weight.shape[0],
            getattr(config, "logits_scaling", None) or 1.0,
            getattr(config, "logit_scale", None) or 1.0,
            getattr(config, "final_logit_softcapping", None),
            temperature,
        )

    def __call__(self, states: Tensor) -> Tensor:
        """Return the logits of states (n, width) in float32, (n, size)."""
        logits = self.layer(states).float()
        if (scale := self.times / self.divided) != 1.0:
            logits = logits * scale
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return logits if self.temperature == 1.0 else logits / self.temperature


def token_logps(
    hidden: Tensor, output: Output, targets: Tensor, bonus: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (nats) of ``targets`` (n,) and the entropies there, from states (n, width).

    Args:
        hidden: the final states before each target.
        output: how logits are made of them.
        targets: token ids.
        bonus: whether the entropies have a gradient.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    rows = max(1, CHUNK // output.size)
    if len(targets) <= rows:
        return _chunk(hidden, output, targets, bonus)
    parts = [
        checkpoint(_chunk, hidden[i : i + rows], output, targets[i : i + rows], bonus, use_reentrant=False)
        for i in range(0, len(targets), rows)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _chunk(hidden: Tensor, output: Output, targets: Tensor, bonus: bool) -> tuple[Tensor, Tensor]:
    import torch

    logits = output(hidden)
    norm = logits.logsumexp(-1)
    logps = logits.gather(-1, targets[:, None])[:, 0] - norm
    with torch.set_grad_enabled(bonus and torch.is_grad_enabled()):
        entropies = norm - ((logits - norm[:, None]).exp() * logits).sum(-1)  # H = log Z - Σ p z
    return logps, entropies
