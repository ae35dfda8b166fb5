"""One pass of the model over samples: log-probabilities, entropies and states of every sampled token.

Samples of one group often have one prompt. Where that saves enough, each prompt is read once and its keys and
values are repeated, with their gradient, for the answers; gradients are those of reading everything (tested).
That needs layers whose cache holds keys and values of every token: full and sliding-window attention. Models
with other layers read every prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compound.components.engines.local.layers import unshared_kinds
from compound.optimizers.weights.learner.head import Output, token_logps
from compound.optimizers.weights.learner.samples import Sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import DynamicCache, PreTrainedModel

WORTH = 0.5  # a shared prompt is read once where that leaves at most this share of the tokens


@dataclass(frozen=True)
class Pass:
    """What the model says of a micro-batch; every tensor is (samples, longest answer).

    ``states`` is (samples, longest answer, width): the final states before each token.
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
    bonus: bool = False,
    temperature: float = 1.0,
) -> Pass:
    """Run a causal language model over samples.

    Args:
        model: in the mode and with the adapter it should have.
        samples: at least one, each with at least one prompt token and one sampled token.
        shared: whether prompts that are equal are read once; by default, where the model's layers allow it
            and it saves enough.
        bonus: whether entropies have a gradient.
        temperature: that the samples were drawn at: log-probabilities are of the distribution sampled from.
    """
    import torch

    prompts = list(dict.fromkeys(sample.tokens.prompt for sample in samples))
    if shared is None:
        shared = not unshared_kinds(model.config) and saving(samples) <= WORTH
    states = _shared_states(model, samples, prompts) if shared else _plain_states(model, samples)
    mask = _mask(samples, states.device)
    targets = _padded([s.tokens.sampled for s in samples], states.device)
    logps = torch.zeros(mask.shape, dtype=torch.float32, device=states.device)
    entropies = torch.zeros_like(logps)
    picked = mask.bool()
    found = token_logps(states[picked], Output.of(model, temperature), targets[picked], bonus)
    return Pass(
        logps.masked_scatter(picked, found[0]), entropies.masked_scatter(picked, found[1]), states, mask
    )


def saving(samples: Sequence[Sample]) -> float:
    """Return the share of tokens that are left to read when each different prompt is read once."""
    answers = sum(sample.length for sample in samples)
    every = sum(len(sample.tokens.prompt) for sample in samples)
    once = sum(map(len, {sample.tokens.prompt for sample in samples}))
    return (once + answers) / (every + answers)


def _plain_states(model: PreTrainedModel, samples: Sequence[Sample]) -> Tensor:
    """Read prompts with answers, padded on the right; return the states before each sampled token.

    What is behind a token does not reach it, so there is no mask: without one, attention is faster.
    """
    import torch

    rows = [(*s.tokens.prompt, *s.tokens.sampled[:-1]) for s in samples]
    ids = _padded(rows, model.device)
    states = _decoder(model)(input_ids=ids, use_cache=False).last_hidden_state
    longest = max(s.length for s in samples)
    first = torch.tensor([len(s.tokens.prompt) - 1 for s in samples], device=model.device)
    places = (first[:, None] + torch.arange(longest, device=model.device)).clamp(max=ids.shape[1] - 1)
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[-1]))


def _shared_states(
    model: PreTrainedModel, samples: Sequence[Sample], prompts: Sequence[tuple[int, ...]]
) -> Tensor:
    """Read each prompt once, padded on the left, and the answers behind it.

    The cache is not the model's own, which forgets what is behind a sliding window: the mask alone hides it.
    """
    import torch
    from transformers import DynamicCache

    width = max(map(len, prompts))
    ids = torch.zeros((len(prompts), width), dtype=torch.long, device=model.device)
    real = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt, device=model.device)
        real[row, width - len(prompt) :] = 1
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
    behind = (steps < torch.tensor([len(a) for a in answers], device=model.device)[:, None]).long()
    after = _decoder(model)(
        input_ids=tokens,
        attention_mask=torch.cat([real[owner], behind], 1),
        position_ids=real[owner].sum(1, keepdim=True) + steps,
        past_key_values=_repeated(read.past_key_values, owner),
        use_cache=True,
    )
    return torch.cat([last, after.last_hidden_state], 1)


def _decoder(model: PreTrainedModel) -> torch.nn.Module:
    """Return what makes the final states; in families that misname it, ``base_model`` is the model itself."""
    return model.base_model if model.base_model is not model else model.model


def _repeated(cache: DynamicCache, owner: Tensor) -> DynamicCache:
    """Return keys and values of the prompts, one row for each sample."""
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


def _mask(samples: Sequence[Sample], device: torch.device) -> Tensor:
    import torch

    lengths = torch.tensor([s.length for s in samples], device=device)
    return (torch.arange(int(lengths.max()), device=device) < lengths[:, None]).float()
