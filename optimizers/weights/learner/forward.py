"""Forward pass over samples: log-probabilities, entropies and hidden states of every sampled token.

Samples of a group often have the same prompt. If that saves enough, each distinct prompt is processed once
and its keys and values are repeated for the answers, with gradients; the gradients are the same (tested).
This requires layers whose cache holds keys and values of every token: full and sliding-window attention.
Models with other layers process every prompt. Otherwise the turns of a conversation are processed as one
sequence where their tokens continue; see `conversations`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compound.components.engines.local.constraints import Constraint
from compound.components.engines.local.layers import unshareable_kinds
from compound.optimizers.weights.learner.conversations import conversations, whole
from compound.optimizers.weights.learner.head import OutputLayer, token_logps
from compound.optimizers.weights.learner.samples import Sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import DynamicCache, PreTrainedModel

    from compound.components.engines.local.constraints import ConstraintCompiler

# Time of a pass besides that of its tokens, relative to that of a second pass; a coarse estimate, as is
# `adapters.SECOND_PASS` (`benchmarks/data/one_gpu.json`).
FIRST_PASS = 0.6
MAX_SHARED_FRACTION = 0.5  # prompts are shared if at most this fraction of the tokens remains to be processed


@dataclass(frozen=True)
class Sharing:
    """When equal prompts are processed once, which takes a second pass through the layers for the answers.

    On a GPU, a pass takes time besides that of its tokens. Times are given in tokens that take as long.

    Attributes:
        second_pass: the tokens that the second pass takes as long as: 0 on a CPU, infinity to process every
            prompt.
        micro_tokens: the most tokens of a pass; more passes are needed if every prompt is processed.
    """

    second_pass: float = 0.0
    micro_tokens: float = math.inf

    def pays(self, samples: Sequence[Sample]) -> bool:
        """Return whether processing equal prompts once takes less time, and at most half of the tokens."""
        fraction = shared_fraction(samples)
        if fraction > MAX_SHARED_FRACTION or self.second_pass == math.inf:
            return False
        total = sum(len(sample.tokens.prompt) + sample.length for sample in samples)
        longest = max(sample.size for sample in samples)
        rows = max(1, int(min(self.micro_tokens, len(samples) * longest)) // longest)  # of a pass
        further = math.ceil(len(samples) / rows) - 1
        return (1.0 - fraction) * total + FIRST_PASS * self.second_pass * further >= self.second_pass


WHERE_FEWER_TOKENS = Sharing()
NEVER = Sharing(math.inf)


@dataclass(frozen=True)
class ForwardPass:
    """Outputs of the model for a micro-batch; tensors have shape (samples, longest answer).

    Attributes:
        logps: log-probabilities (nats) of the sampled tokens; 0 in the padding.
        entropies: entropies of the distributions the tokens were sampled from; 0 in the padding, or if they
            were not computed, as log-probabilities are.
        states: final hidden states before each token, (samples, longest answer, width).
        mask: 1 for sampled tokens, 0 for padding.
    """

    logps: Tensor
    entropies: Tensor
    states: Tensor
    mask: Tensor


def forward(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    *,
    shared: bool | None = None,
    entropy_grad: bool = False,
    temperature: float = 1.0,
    constraints: ConstraintCompiler | None = None,
    entropy: bool = True,
    logps: bool = True,
) -> ForwardPass:
    """Run a causal language model over samples.

    Args:
        model: the model, in the right mode and with the right adapter enabled.
        samples: at least one, each with at least one prompt token and one sampled token.
        shared: whether equal prompts are processed once; by default, if the model's layers allow it and it
            saves enough.
        entropy_grad: whether entropies have a gradient.
        temperature: the sampling temperature; log-probabilities are those of the sampled distribution.
        constraints: restricts the distributions of constrained answers to the tokens that were allowed, as
            their sampler did; ``None`` for the distributions without constraints.
        entropy: whether to compute entropies, which read the whole vocabulary again; otherwise they are 0.
        logps: whether to compute log-probabilities and entropies; otherwise only the states.
    """
    import torch

    prompts = list(dict.fromkeys(sample.tokens.prompt for sample in samples))
    if shared is None:
        shared = not unshareable_kinds(model.config) and saves_enough(samples)
    states = _shared_states(model, samples, prompts) if shared else _plain_states(model, samples)
    lengths = torch.tensor([s.length for s in samples], device=states.device)
    mask = (torch.arange(int(lengths.max()), device=states.device) < lengths[:, None]).float()
    empty = torch.zeros(mask.shape, dtype=torch.float32, device=states.device)
    if not logps:
        return ForwardPass(empty, empty, states, mask)
    targets = _padded([s.tokens.sampled for s in samples], states.device)
    sampled = mask.bool()
    layer = OutputLayer.of(model, temperature)
    allowed = _allowed(samples, constraints, states.device) if constraints is not None else None
    token_values = token_logps(states[sampled], layer, targets[sampled], entropy_grad, allowed, entropy)
    return ForwardPass(
        empty.masked_scatter(sampled, token_values[0]),
        empty.masked_scatter(sampled, token_values[1]),
        states,
        mask,
    )


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


def saves_enough(samples: Sequence[Sample], sharing: Sharing = WHERE_FEWER_TOKENS) -> bool:
    """Return whether processing equal prompts once saves enough, and more than merging conversations."""
    if not sharing.pays(samples):
        return False
    total = sum(len(sample.tokens.prompt) + sample.length for sample in samples)
    return shared_fraction(samples) * total <= sum(len(whole(chain)) + 1 for chain in conversations(samples))


def shared_fraction(samples: Sequence[Sample]) -> float:
    """Return the fraction of tokens to process if each distinct prompt is processed once."""
    answers = sum(sample.length for sample in samples)
    prompts = sum(len(sample.tokens.prompt) for sample in samples)
    distinct = sum(map(len, {sample.tokens.prompt for sample in samples}))
    return (distinct + answers) / (prompts + answers)


def _plain_states(model: PreTrainedModel, samples: Sequence[Sample]) -> Tensor:
    """Process prompts with answers, padded on the right; return the states before each sampled token.

    The turns of a conversation are processed as one row. Causal attention ignores the padding on the right,
    so no mask is passed: attention is faster without one.
    """
    import torch

    chains = conversations(samples)
    row_of = {id(sample): row for row, chain in enumerate(chains) for sample in chain}
    ids = _padded([whole(chain) for chain in chains], model.device)
    states = _decoder(model)(input_ids=ids, use_cache=False).last_hidden_state
    longest = max(s.length for s in samples)
    first = torch.tensor([len(s.tokens.prompt) - 1 for s in samples], device=model.device)
    places = (first[:, None] + torch.arange(longest, device=model.device)).clamp(max=ids.shape[1] - 1)
    rows = torch.tensor([row_of[id(s)] for s in samples], device=model.device)
    found: Tensor = states[rows[:, None], places]
    return found


def _shared_states(
    model: PreTrainedModel, samples: Sequence[Sample], prompts: Sequence[tuple[int, ...]]
) -> Tensor:
    """Process each distinct prompt once, padded on the left, then the answers with the prompts' cache.

    A full `DynamicCache` replaces the model's own cache, which drops tokens outside a sliding window; the
    attention mask hides these tokens instead.
    """
    import torch
    from transformers import DynamicCache

    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.long)  # filled on the host, and copied once
    real = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        real[row, width - len(prompt) :] = 1
    ids, real = ids.to(model.device), real.to(model.device)
    places = (real.cumsum(-1) - 1).clamp(min=0)
    read = _decoder(model)(
        input_ids=ids,
        attention_mask=real,
        position_ids=places,
        past_key_values=DynamicCache(),
        use_cache=True,
    )
    number = {prompt: row for row, prompt in enumerate(prompts)}
    owner = torch.tensor([number[s.tokens.prompt] for s in samples], device=model.device)
    last = read.last_hidden_state[owner, -1:]
    longest = max(s.length for s in samples)
    if longest == 1:
        return last
    answers = [s.tokens.sampled[:-1] for s in samples]
    tokens = _padded(answers, model.device, width=longest - 1)
    steps = torch.arange(longest - 1, device=model.device)
    answered = (steps < torch.tensor([len(a) for a in answers], device=model.device)[:, None]).long()
    after = _decoder(model)(
        input_ids=tokens,
        attention_mask=torch.cat([real[owner], answered], 1),
        position_ids=real[owner].sum(1, keepdim=True) + steps,
        past_key_values=_repeated(read.past_key_values, owner),
        use_cache=True,
    )
    return torch.cat([last, after.last_hidden_state], 1)


def _decoder(model: PreTrainedModel) -> torch.nn.Module:
    """Return the decoder without the output layer; some families set ``base_model`` to the model itself."""
    return model.base_model if model.base_model is not model else model.model


def _repeated(cache: DynamicCache, owner: Tensor) -> DynamicCache:
    """Return the prompts' keys and values, repeated: one row per sample."""
    from transformers import DynamicCache

    repeated = DynamicCache()
    for i, layer in enumerate(cache.layers):
        repeated.update(layer.keys[owner], layer.values[owner], i)
    return repeated


def _padded(rows: Sequence[Sequence[int]], device: torch.device, width: int | None = None) -> Tensor:
    import torch

    padded = torch.zeros((len(rows), width or max(map(len, rows))), dtype=torch.long)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return padded.to(device)
