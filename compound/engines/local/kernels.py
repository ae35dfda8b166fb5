"""Faster layers of models on a CPU for batches that decode one token per row: packed products, and attention.

An ordinary linear layer rearranges its weights in every product. This is negligible for a long
prompt, but takes most of the time when a batch decodes one token per row, because the weights are
larger than the activations. `PackedLinear` rearranges them once, and the models of a process share
them. Training steps gain in the forward pass about what restoring each layer's weights in the
backward pass takes; benchmarks/measure/training/packed_weights.py measures both.

For a single query, PyTorch's fused attention reads the keys once for each head that shares them.
`attend` reads them once for all, as rows of one matrix product. Both together decode 8 and 32 rows
of SmolLM2 in bfloat16 2.3 and 1.9 times as fast as the model as transformers loads it, on an AMD
EPYC with bfloat16 but without matrix units (benchmarks/measure/decoding/cpu_kernels.py); `attend`
alone 1.5 and 1.6 times. Attention of prompts and of training steps is left to PyTorch, as blocks of
queries gained less than 1.3 times there.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import torch

from compound.engines.local import devices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "compound_grouped"  # under which transformers knows this attention
CLEARLY_FASTER = 0.7  # maximum fraction of the fused kernel's time
OTHER_TERMS = ("position_bias", "softcap", "s_aux")  # of some models' attention, not of `attend`
MEASURED_KEYS = 512


class PackedLinear(torch.nn.Linear):  # type: ignore[misc]  # mypy skips torch
    """Frozen linear layer whose weights are rearranged once."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        torch.nn.Module.__init__(self)  # without the weights of a linear layer
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        with torch.inference_mode(False), torch.no_grad():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    @property
    def weight(self) -> torch.Tensor:
        """The weights as a linear layer has them, restored at each access."""
        return self.packed.to_dense()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``states`` times the weights, plus the bias."""
        if states.requires_grad:
            return LinearProduct.apply(states, self)
        return torch.ops.mkldnn._linear_pointwise(states, self.packed, self.bias, "none", [], "")


class LinearProduct(torch.autograd.Function):  # type: ignore[misc]  # mypy skips torch
    """Product of a frozen linear layer, plus the product with an adapter's matrices, if any.

    It computes in the format of the layer, and takes fewer operations than autograd: the terms are
    added by the products, and a `PackedLinear` has no gradient in torch.
    """

    @staticmethod
    def forward(  # noqa: D102 - as torch defines it
        ctx: Any,  # noqa: ANN401
        states: torch.Tensor,
        layer: torch.nn.Linear,
        a: torch.Tensor | None = None,
        b: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        result = layer.forward(states.detach())  # whose hooks, if any, follow
        ctx.layer, ctx.scale = layer, scale
        if a is not None and b is not None:
            inner = torch.nn.functional.linear(states, a.to(states.dtype))
            ctx.save_for_backward(states, inner, a, b)
            result.flatten(0, -2).addmm_(inner.flatten(0, -2), b.to(states.dtype).T, alpha=scale)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401, D102
        rows = gradient.flatten(0, -2)
        below = rows @ ctx.layer.weight if ctx.needs_input_grad[0] else None
        own: tuple[torch.Tensor, ...] = ()
        if saved := ctx.saved_tensors:  # which checkpointing recomputes once
            states, inner, a, b = saved
            outer = rows @ (b * ctx.scale).to(rows.dtype)
            if below is not None:
                below.addmm_(outer, a.to(rows.dtype))
            own = (
                (outer.T @ states.flatten(0, -2)).to(a.dtype),
                (rows.T @ inner.flatten(0, -2)).to(b.dtype).mul_(ctx.scale),
            )
        below = None if below is None else below.view(*gradient.shape[:-1], -1)
        return below, None, *(own or (None, None)), None


def packable(model: PreTrainedModel) -> bool:
    """Return whether packing applies: on a CPU, in a format for which torch has the kernel."""
    if not (
        model.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    ):
        return False
    if model.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(model.dtype == torch.float32)


def pack(model: PreTrainedModel, *, output: bool = True) -> PreTrainedModel:
    """Replace the linear layers of a frozen model by `PackedLinear`, and return the model.

    Args:
        model: the model.
        output: whether to replace the output layer, too: its weights are large to restore, and
            often those of the embeddings.
    """
    if packable(model):
        kept = None if output else model.get_output_embeddings()
        linears = [
            (name, layer)
            for name, layer in model.named_modules()
            if type(layer) is torch.nn.Linear and layer is not kept
        ]
        for name, layer in linears:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, PackedLinear(layer))
    return model


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a frozen model that has modules of its own, but the same weights."""
    packed = (layer.packed for layer in model.modules() if isinstance(layer, PackedLinear))
    return copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *packed)})


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Return the attention of one query in each row, the last token of a sequence, to all of its tokens.

    Args:
        query: queries of shape (rows, heads, 1, width).
        key: keys of shape (rows, key heads, tokens, width); each serves heads // key heads heads.
        value: values of the shape of ``key``.
        mask: which tokens a query attends to, boolean, of shape (rows, 1, 1, tokens).
        scaling: factor of the scores, which are rounded to the number format of the keys.

    Returns:
        Tensor of the shape of ``query``.

    >>> query, key = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 300, 8)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    >>> torch.allclose(attend(query, key, key, None, 8**-0.5), expected, atol=1e-5)
    True
    """
    rows, heads, _, width = query.shape
    grouped = (query * scaling).view(rows, key.shape[1], heads // key.shape[1], width)
    # contiguous keys and values make the products faster by more than the copy takes
    scores = grouped @ key.contiguous().transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return (scores.softmax(-1) @ value.contiguous()).view(query.shape)


def use_grouped_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model use `attend` for single queries if it is faster here, and return the model.

    This applies to models in bfloat16 on a CPU that would use torch's fused kernel.
    """
    if (
        model.device.type == "cpu"
        and model.dtype == torch.bfloat16
        and model.config._attn_implementation == "sdpa"
        and clearly_faster()
    ):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(NAME, _forward)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
    return model


@functools.cache
def clearly_faster() -> bool:
    """Return whether `attend` takes clearly less time than torch's fused kernel on this processor.

    The margin is wide so that all processes of a run choose the same.
    """
    query = torch.ones(1, 6, 1, 64, dtype=torch.bfloat16)
    key = torch.ones(1, 3, MEASURED_KEYS, 64, dtype=torch.bfloat16)
    attention = torch.nn.functional.scaled_dot_product_attention
    fused = functools.partial(attention, query, key, key, enable_gqa=True)
    grouped = functools.partial(attend, query, key, key, None, 64**-0.5)
    with torch.inference_mode():
        ours, theirs = devices.shortest_times(grouped, fused)
    return ours < CLEARLY_FASTER * theirs


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers calls it: grouped if that applies, else by torch's fused kernel."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if (
        not dropout
        and not any(options.get(name) is not None for name in OTHER_TERMS)
        and _suitable(query, key, value, attention_mask)
    ):
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(query, key, value, attention_mask, factor).transpose(1, 2).contiguous(), None
    result, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )
    return result, None


def _suitable(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Return whether `attend` supports tensors of these formats and shapes."""
    return bool(
        query.device.type == "cpu"  # a model may be moved after it was loaded
        and query.dtype == key.dtype == torch.bfloat16
        and query.shape[2] == 1
        and key.shape == value.shape
        and query.shape[-1] == key.shape[-1]
        and (mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1))
    )
