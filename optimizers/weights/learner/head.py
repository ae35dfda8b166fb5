"""Log-probabilities of given tokens, without storing the logits of all tokens.

The logits of a token are as long as the vocabulary. Chunks of tokens therefore pass through the output layer
one after the other, and again in the backward pass, so memory holds the logits of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

CHUNK = 32_000_000  # maximum number of logits in a chunk


@dataclass(frozen=True)
class OutputLayer:
    """Output layer of a model with the rescaling of logits that some families apply.

    Attributes:
        layer: the linear layer.
        size: the number of logits per token: the size of the vocabulary.
        divided: the divisor of the logits (Granite's ``logits_scaling``).
        times: the factor of the logits (Cohere's ``logit_scale``).
        softcap: the bound of a tanh soft cap (Gemma's ``final_logit_softcapping``); ``None`` for none.
        temperature: the sampling temperature, which logits are divided by.
    """

    layer: Callable[[Tensor], Tensor]
    size: int
    divided: float = 1.0
    times: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, model: PreTrainedModel, temperature: float = 1.0) -> OutputLayer:
        """Return the output layer of a causal language model."""
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
    hidden: Tensor,
    output: OutputLayer,
    targets: Tensor,
    entropy_grad: bool = False,
    allowed: Tensor | None = None,
    entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (nats) and the entropies at each target token, both of shape (n,).

    Args:
        hidden: final hidden states before each target, (n, width).
        output: the output layer.
        targets: token ids, (n,).
        entropy_grad: whether the entropies have a gradient.
        allowed: the tokens among which each target was drawn, as packed bits in bytes, (n, size / 8); by
            default all. Probabilities are renormalized over them.
        entropy: whether to compute the entropies; otherwise they are 0.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    rows = max(1, CHUNK // output.size)
    if len(targets) <= rows:
        return _chunk(hidden, output, targets, entropy_grad, allowed, entropy)
    parts = [
        checkpoint(
            _chunk,
            hidden[i : i + rows],
            output,
            targets[i : i + rows],
            entropy_grad,
            None if allowed is None else allowed[i : i + rows],
            entropy,
            use_reentrant=False,
        )
        for i in range(0, len(targets), rows)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _chunk(
    hidden: Tensor,
    output: OutputLayer,
    targets: Tensor,
    entropy_grad: bool,
    allowed: Tensor | None,
    entropy: bool,
) -> tuple[Tensor, Tensor]:
    import torch

    logits = output(hidden)
    if allowed is not None:
        bits = (allowed[:, :, None] >> torch.arange(8, device=allowed.device, dtype=torch.uint8)) & 1
        # a finite value: 0 * -inf would be NaN in the entropy
        logits = logits.masked_fill(
            bits.flatten(1)[:, : logits.shape[-1]] == 0, torch.finfo(torch.float32).min
        )
    norm = logits.logsumexp(-1)
    logps = logits.gather(-1, targets[:, None])[:, 0] - norm
    if not entropy:
        return logps, torch.zeros_like(norm)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropies = norm - ((logits - norm[:, None]).exp() * logits).sum(-1)  # H = log Z - Σ p z
    return logps, entropies
