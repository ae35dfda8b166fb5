"""Forward pass over samples: log-probabilities, entropies and hidden states of every sampled token.

Samples of a group often have the same prompt. If that saves enough, each distinct prompt is
processed once and its keys and values are repeated for the answers, with gradients; the gradients
are the same (tested). This requires layers whose cache holds keys and values of every token: full
and sliding-window attention. Models with other layers process every prompt.

Otherwise the turns of a conversation are processed as one sequence. The prompt of a later turn
usually begins with all tokens of the turn before it, and attention is causal, so the states are
those of separate passes. If a chat template changes earlier turns, or the written text has other
tokens than the sampled one, turns are processed separately.

The logits of a token are as long as the vocabulary. Chunks of tokens therefore pass through the
output layer one after the other, and again in the backward pass, so memory holds the logits of one
chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compound.engines.local.constraints import Constraint
from compound.engines.local.loading import unshareable_kinds
from compound.optimizers.weights.learner.samples import Sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import DynamicCache, PreTrainedModel

    from compound.engines.local.constraints import ConstraintCompiler

Tokens = tuple[int, ...]
CHUNK = 32_000_000  # maximum number of logits in a chunk
# prompts are shared if at most this fraction of the tokens remains to be processed
MAX_SHARED_FRACTION = 0.5


def conversations(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Divide samples into conversations, each in the order of its turns.

    Every sample after the first of a conversation has a prompt that begins with the prompt and the
    answer of the one before it.
    """
    chains: list[list[Sample]] = []
    ends: defaultdict[Tokens, list[list[Sample]]] = defaultdict(list)
    lengths: set[int] = set()  # of the ends
    for sample in sorted(samples, key=lambda sample: len(sample.tokens.prompt)):
        prompt = sample.tokens.prompt
        candidates = sorted((length for length in lengths if length <= len(prompt)), reverse=True)
        chain = next((ends[prompt[:n]].pop(0) for n in candidates if ends.get(prompt[:n])), None)
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(sample)
        end = prompt + sample.tokens.sampled
        ends[end].append(chain)
        lengths.add(len(end))
    return chains


def whole(chain: Sequence[Sample]) -> Tokens:
    """Return the tokens that the model reads for all turns of a conversation."""
    last = chain[-1].tokens
    return (*last.prompt, *last.sampled[:-1])


def saves_enough(samples: Sequence[Sample]) -> bool:
    """Return whether processing equal prompts once saves enough, and more than merging conversations."""
    if shared_fraction(samples) > MAX_SHARED_FRACTION:
        return False
    total = sum(sample.size for sample in samples)
    merged = sum(len(whole(chain)) + 1 for chain in conversations(samples))
    return shared_fraction(samples) * total <= merged


def shared_fraction(samples: Sequence[Sample]) -> float:
    """Return the fraction of tokens to process if each distinct prompt is processed once."""
    answers = sum(sample.length for sample in samples)
    prompts = sum(len(sample.tokens.prompt) for sample in samples)
    distinct = sum(map(len, {sample.tokens.prompt for sample in samples}))
    return (distinct + answers) / (prompts + answers)


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
    shared: bool | None = None,
    entropy_grad: bool = False,
    temperature: float = 1.0,
    constraints: ConstraintCompiler | None = None,
    entropy: bool = True,
    logps: bool = True,
) -> ForwardPass:
    """Run a causal language model over samples.

    Equal prompts are processed once if ``shared``; by default, if the layers allow it and it saves
    enough. Log-probabilities are those of the distribution at ``temperature``; with
    ``constraints``, of the tokens that were allowed to the sampler. Without ``logps``, only the
    states are computed.
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
    token_values = token_logps(
        states[sampled], layer, targets[sampled], entropy_grad, allowed, entropy
    )
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


def _plain_states(model: PreTrainedModel, samples: Sequence[Sample]) -> Tensor:
    """Process prompts with answers, padded on the right; return the states before each sampled token.

    The turns of a conversation are processed as one row. Causal attention ignores the padding on
    the right, so no mask is passed: attention is faster without one.
    """
    import torch

    chains = conversations(samples)
    row_of = {id(sample): row for row, chain in enumerate(chains) for sample in chain}
    ids = _padded([whole(chain) for chain in chains], model.device)
    states = _decoder(model)(input_ids=ids, use_cache=False).last_hidden_state
    longest = max(s.length for s in samples)
    first = torch.tensor([len(s.tokens.prompt) - 1 for s in samples], device=model.device)
    places = (first[:, None] + torch.arange(longest, device=model.device)).clamp(
        max=ids.shape[1] - 1
    )
    rows = torch.tensor([row_of[id(s)] for s in samples], device=model.device)
    found: Tensor = states[rows[:, None], places]
    return found


def _shared_states(
    model: PreTrainedModel, samples: Sequence[Sample], prompts: Sequence[tuple[int, ...]]
) -> Tensor:
    """Process each distinct prompt once, padded on the left, then the answers with the prompts' cache.

    A full `DynamicCache` replaces the model's own cache, which drops tokens outside a sliding
    window; the attention mask hides these tokens instead.
    """
    import torch
    from transformers import DynamicCache

    width = max(map(len, prompts))
    ids = torch.zeros(
        (len(prompts), width), dtype=torch.long
    )  # filled on the host, and copied once
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
    answered = (
        steps < torch.tensor([len(a) for a in answers], device=model.device)[:, None]
    ).long()
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


def _padded(
    rows: Sequence[Sequence[int]], device: torch.device, width: int | None = None
) -> Tensor:
    import torch

    padded = torch.zeros((len(rows), width or max(map(len, rows))), dtype=torch.long)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row, dtype=torch.long)
    return padded.to(device)


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
