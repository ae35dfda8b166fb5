"""Forward pass over samples: log-probabilities, entropies and hidden states of every sampled token.

Tokens that several samples begin with, such as equal prompts and the turns of a conversation, are
processed once if the model's attention can be computed for packed rows. Otherwise the samples are
rows of equal length, and only turns whose tokens continue each other are processed together.

The logits of a token are as long as the vocabulary. Chunks of tokens therefore pass through the
output layer one after the other, and again in the backward pass, so memory holds the logits of one
chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compound.engines.local.constraints import Constraint
from compound.optimizers.weights.learner.packing import Pack, Tokens, use_packed_attention
from compound.optimizers.weights.learner.samples import Sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from compound.engines.local.constraints import ConstraintCompiler

CHUNK = 32_000_000  # maximum number of logits in a chunk


def sequences(samples: Sequence[Sample]) -> dict[Tokens, list[Sample]]:
    """Return the sequences that the model processes for some samples, sorted, with the samples of each.

    They are prompts with answers, without the last token. A sequence that another one begins with,
    such as an earlier turn of its conversation, is processed with it.
    """
    found: dict[Tokens, list[Sample]] = {}
    longer: Tokens = ()
    for sample in sorted(samples, key=_read, reverse=True):
        tokens = _read(sample)
        if longer[: len(tokens)] != tokens:
            longer = tokens
        found.setdefault(longer, []).append(sample)
    return dict(reversed(found.items()))


def _read(sample: Sample) -> Tokens:
    return (*sample.tokens.prompt, *sample.tokens.sampled[:-1])


@dataclass(frozen=True)
class ForwardPass:
    """Outputs of the model for a micro-batch; tensors have shape (samples, longest answer)."""

    logps: Tensor  # of sampled tokens (nats); 0 in the padding
    entropies: Tensor  # of the distributions they were sampled from; 0 if not computed
    states: Tensor  # final hidden states before each token, (samples, longest answer, width)
    mask: Tensor  # 1 for sampled tokens, 0 for padding


def forward(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    *,
    packed: bool = False,
    entropy_grad: bool = False,
    temperature: float = 1.0,
    constraints: ConstraintCompiler | None = None,
    entropy: bool = True,
    logps: bool = True,
) -> ForwardPass:
    """Run a causal language model over samples.

    Tokens that samples begin with are processed once if ``packed``, which few models do not
    support. Log-probabilities are those of the distribution at ``temperature``; with
    ``constraints``, of the tokens that were allowed to the sampler. Without ``logps``, only the
    states are computed.
    """
    import torch

    states = _states(model, samples, packed=packed)
    lengths = torch.tensor([s.length for s in samples], device=states.device)
    mask = (torch.arange(int(lengths.max()), device=states.device) < lengths[:, None]).float()
    empty = torch.zeros(mask.shape, dtype=torch.float32, device=states.device)
    if not logps:
        return ForwardPass(empty, empty, states, mask)
    targets = padded([s.tokens.sampled for s in samples], states.device)
    sampled = mask.bool()
    layer = OutputLayer.of(model, temperature)
    allowed = _allowed(samples, constraints, states.device) if constraints is not None else None
    values = token_logps(states[sampled], layer, targets[sampled], entropy_grad, allowed, entropy)
    found = [empty.masked_scatter(sampled, each) for each in values]
    return ForwardPass(found[0], found[1], states, mask)


def _allowed(
    samples: Sequence[Sample], constraints: ConstraintCompiler, device: torch.device
) -> Tensor | None:
    """Return the allowed tokens of all sampled tokens in order, as packed bits; ``None`` if all are."""
    import numpy as np
    import torch

    if not any(sample.tokens.constraint for sample in samples):
        return None
    rows = [
        constraints.replay(Constraint.from_text(sample.tokens.constraint), sample.tokens.sampled)
        if sample.tokens.constraint
        else np.full((sample.length, -(-constraints.size // 32)), -1, np.int32)
        for sample in samples
    ]
    return torch.from_numpy(np.concatenate(rows).view(np.uint8)).to(device)


def _states(model: PreTrainedModel, samples: Sequence[Sample], *, packed: bool) -> Tensor:
    """Return the states before each sampled token, (samples, longest answer, width).

    The sequences are packed into one row, or padded on the right to rows of equal length. Causal
    attention ignores the padding, so no mask is passed: attention is faster without one.
    """
    import torch

    rows = sequences(samples)
    how: dict[str, object]
    if packed:
        pack = Pack(list(rows), model.device)
        use_packed_attention(model)
        ids, indices = pack.ids[None], pack.indices
        # transformers passes a mask of four dimensions to the attention, which ignores it
        unused = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=model.device)
        how = {"attention_mask": unused, "position_ids": pack.places[None], "pack": pack}
    else:
        ids, how = padded(list(rows), model.device), {}
        indices = list(torch.arange(ids.numel()).view(ids.shape))
    states = _decoder(model)(input_ids=ids, use_cache=False, **how).last_hidden_state
    index_of = {
        id(s): index for index, own in zip(indices, rows.values(), strict=True) for s in own
    }
    wanted = [index_of[id(s)][(n := len(s.tokens.prompt) - 1) : n + s.length] for s in samples]
    found: Tensor = states.flatten(0, 1)[padded(wanted, model.device)]
    return found


def _decoder(model: PreTrainedModel) -> torch.nn.Module:
    """Return the decoder without the output layer; some families set ``base_model`` to the model itself."""
    return model.base_model if model.base_model is not model else model.model


def padded(
    rows: Sequence[Sequence[float] | Tensor], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Return rows of numbers, padded on the right with 0; by default they are integers."""
    import torch

    host = [torch.as_tensor(row, dtype=dtype or torch.long) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(host, batch_first=True).to(device)  # copied once


# -- output layer --------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputLayer:
    """Output layer of a model with the rescaling of logits that some families apply."""

    layer: Callable[[Tensor], Tensor]
    size: int  # of the vocabulary
    scale: float = 1.0  # Cohere's ``logit_scale``, or 1 / Granite's ``logits_scaling``
    softcap: float | None = None  # of tanh: Gemma's ``final_logit_softcapping``
    temperature: float = 1.0

    @classmethod
    def of(cls, model: PreTrainedModel, temperature: float = 1.0) -> OutputLayer:
        """Return the output layer of a causal language model."""
        config, layer = model.config, model.get_output_embeddings()
        times, divided = (
            getattr(config, name, None) or 1.0 for name in ("logit_scale", "logits_scaling")
        )
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(layer, layer.weight.shape[0], times / divided, softcap, temperature)

    def __call__(self, states: Tensor) -> Tensor:
        """Return the logits of states (n, width) in float32, (n, size)."""
        logits = self.layer(states).float()
        if self.scale != 1.0:
            logits = logits * self.scale
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
    """Return the log-probabilities (nats) and the entropies at each target token, both of shape (n,)."""
    import torch
    from torch.utils.checkpoint import checkpoint

    rows = max(1, CHUNK // output.size)
    if len(targets) <= rows:
        return _chunk(hidden, output, targets, entropy_grad, allowed, entropy)
    parts = []
    for i in range(0, len(targets), rows):
        at = slice(i, i + rows)
        own = None if allowed is None else allowed[at]
        given = (hidden[at], output, targets[at], entropy_grad, own, entropy)
        parts.append(checkpoint(_chunk, *given, use_reentrant=False))
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
        bits = (
            allowed[:, :, None] >> torch.arange(8, device=allowed.device, dtype=torch.uint8)
        ) & 1
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
