"""Log-probabilities and gradients of tiny models on a GPU, compared with the CPU."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure.gpu import models
from compound.core.engine import TokenRecord
from compound.core.errors import CompoundError
from compound.engines.local.loading import unshareable_kinds
from compound.execution.rng import fork_torch_rng
from compound.optimizers.weights.learner.forward import forward
from compound.optimizers.weights.learner.samples import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY: dict[str, object] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
FAMILIES: Mapping[
    str, tuple[str, Mapping[str, object]]
] = {  # class prefix, settings of its configuration
    "Llama": ("Llama", {}),
    "Gemma 3, with windows": ("Gemma3Text", {"head_dim": 16, **MIXED}),
    "Qwen2, with windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "LFM2, a hybrid": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "Qwen3-Next, a hybrid": (
        "Qwen3Next",
        {
            "head_dim": 16,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 2,
            "shared_expert_intermediate_size": 16,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}


def agreement(_: Path) -> dict[str, object]:
    """Compare log-probabilities and gradients on the GPU with those of a model in float64 on the CPU."""
    return {family: _agreement(*FAMILIES[family]) for family in FAMILIES}


def _agreement(prefix: str, given: Mapping[str, object]) -> dict[str, object]:
    import torch
    import transformers

    config = getattr(transformers, f"{prefix}Config")(**{**TINY, **given})
    family = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")
    with fork_torch_rng(0, "tiny model"):
        model = family(config).eval().double()
    model.config._experts_implementation = "eager"  # grouped products do not support float64
    exact = _gradients(model, packed=False)
    found: dict[str, object] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for device in ("cpu", models.GPU):
            moved = copy.deepcopy(model).to(device=device, dtype=dtype)
            for way in ("unshared", "default"):
                packed = way == "default" and not unshareable_kinds(moved.config)
                try:
                    logps, gradients = _gradients(moved, packed=packed)
                except (RuntimeError, NotImplementedError, CompoundError) as error:
                    found[_key(dtype, device, way)] = f"{type(error).__name__}: {error}"[:300]
                    continue
                largest = max(float(g.abs().max()) for g in exact[1].values())
                found[_key(dtype, device, way)] = {
                    "logps": float((logps - exact[0]).abs().max()),
                    "gradients": max(
                        float((gradients[name] - g).abs().max()) / largest
                        for name, g in exact[1].items()
                    ),
                }
    return found


def _key(dtype: object, device: str, way: str) -> str:
    return " ".join(
        (
            str(dtype).removeprefix("torch."),
            device.partition(":")[0],
            way,
        )
    )


def _gradients(model: PreTrainedModel, *, packed: bool) -> tuple[Any, dict[str, Any]]:
    import torch

    rng, rows = random.Random(0), []
    for length in (40, 12):
        prompt = tuple(rng.randrange(5, 90) for _ in range(length))
        for number in range(4):
            sampled = tuple(rng.randrange(5, 90) for _ in range(2 + number))
            rows.append(Sample("x", "e", "x", 0, TokenRecord(prompt, sampled, (), "stop"), 0.0))
    model.zero_grad()
    ran = forward(model, rows, packed=packed)
    weights = torch.arange(1, len(rows) + 1, device=ran.logps.device)[:, None]
    (ran.logps * ran.mask * weights).sum().backward()
    found = {
        name: parameter.grad.double().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return (ran.logps * ran.mask).detach().double().cpu(), found
