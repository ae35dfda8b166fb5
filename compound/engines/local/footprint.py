"""Memory that a model needs, computed from its configuration without loading its weights.

Weights, adapters and optimizer states are exact. Activations are those that a pre-norm decoder with
LoRA on all linear layers stores for the backward pass, an upper bound within 15 % of what autograd
stores for Llama and Qwen3 models. Buffers of libraries and fragmentation are not included.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compound.engines import model_folder
from compound.engines.local import devices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED = {
    "8bit": 1.0,
    "4bit": 0.5 + 4 / 64,
}  # NF4 stores a float32 scale for each block of 64 weights
OPTIMIZER_BYTES = 16  # per adapter parameter: weight, gradient and two moments of Adam, in float32
SUM_BYTES = 8  # per adapter parameter of the trainer: the sum of its gradients, in float64
CGROUP = Path("/sys/fs/cgroup")  # limits of a container


@dataclass(frozen=True)
class Footprint:
    """Sizes of a model, from which its memory is computed.

    Attributes:
        parameters: the number of parameters; tied ones count once.
        quantizable: how many of them bitsandbytes quantizes: those of linear layers but the output
            layer.
        layers: the number of layers.
        hidden: the width of hidden states.
        intermediate: the width of the feed-forward states of a token, over the experts that it is
            sent to.
        queries: the width of the queries of a token, over all heads of a layer.
        normed: the width of the inputs of all norms in a layer.
        cached: the width of the keys of a token, over all key-value heads of a layer.
        vocabulary: the number of logits of a token.
        linear: inputs and outputs of each linear layer, by name.
        context: the maximum number of tokens of a request; 0 if unknown.
    """

    parameters: int
    quantizable: int
    layers: int
    hidden: int
    intermediate: int
    queries: int
    normed: int
    cached: int
    vocabulary: int
    linear: tuple[tuple[str, int, int], ...]
    context: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel) -> Footprint:
        """Return the sizes of a model, which may be on the meta device."""
        import torch

        config = model.config.get_text_config(decoder=True)
        output = model.get_output_embeddings()
        linear = [
            (name, layer)
            for name, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear) and layer is not output
        ]
        heads = getattr(config, "num_attention_heads", 1)
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        experts = getattr(config, "num_experts_per_tok", None)
        inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        keys = (getattr(config, "num_key_value_heads", None) or heads) * width
        return cls(
            sum(parameter.numel() for parameter in model.parameters()),
            sum(layer.weight.numel() for _, layer in linear),
            config.num_hidden_layers,
            config.hidden_size,
            experts * (getattr(config, "moe_intermediate_size", None) or inner)
            if experts
            else inner,
            heads * width,
            _normed_width(model, config.num_hidden_layers, config.hidden_size, heads * width, keys),
            keys,
            config.vocab_size,
            tuple((name, layer.in_features, layer.out_features) for name, layer in linear),
            getattr(config, "max_position_embeddings", None) or 0,
        )

    def weights(self, dtype: str, quantization: str = "none") -> int:
        """Return the bytes of the weights."""
        full = self.parameters * BYTES[dtype]
        if quantization == "none":
            return full
        return full - int(self.quantizable * (BYTES[dtype] - QUANTIZED[quantization]))

    def adapter(self, rank: int, targets: Sequence[str]) -> int:
        """Return the number of parameters of a LoRA adapter on the layers with these name suffixes."""
        chosen = tuple(f".{target}" for target in targets)
        return sum(
            rank * (inputs + outputs)
            for name, inputs, outputs in self.linear
            if f".{name}".endswith(chosen)
        )

    def cache(self, dtype: str) -> int:
        """Return the bytes of the keys and values of a token in all layers."""
        return 2 * self.layers * self.cached * BYTES[dtype]

    def activations(self, dtype: str, *, checkpointing: bool = False) -> int:
        """Return the bytes that a token stores for the backward pass.

        With ``checkpointing``, only the inputs of layers are stored, and the rest for one layer at
        a time.
        """
        size = BYTES[dtype]
        # the inputs of norms in float32; the inputs of adapters, queries, keys, values, and the
        # result of attention in two layouts; and four feed-forward states: gate, its activation,
        # the other factor, and the product
        attention = 2 * self.hidden + 3 * self.queries + 2 * self.cached
        layer = 4 * self.normed + size * (attention + 4 * self.intermediate)
        if checkpointing:
            return self.layers * self.hidden * size + layer
        return self.layers * layer


def _normed_width(model: PreTrainedModel, layers: int, hidden: int, queries: int, keys: int) -> int:
    """Return the width of the inputs of all norms in a layer, the mean over layers.

    Norms of queries and keys, such as `q_norm` and `k_norm` of Qwen3, read the states of all heads.
    """
    width = 0
    for name, module in model.named_modules():
        parts = name.split(".")
        # a norm outside the layers, such as the last one, has no number in its name
        if "norm" in type(module).__name__.lower() and any(map(str.isdecimal, parts)):
            width += {"q": queries, "k": keys}.get(parts[-1][0], hidden)
    return width // layers if width else 2 * hidden


@functools.lru_cache(maxsize=8)
def footprint(folder: Path, *, causal: bool = True) -> Footprint:
    """Return the sizes of the model in a folder; only its configuration is read.

    Raises:
        CompoundError: the folder contains code or unsafe settings.
        OSError, ValueError: it has no configuration that transformers knows.
    """
    return Footprint.of(empty_model(folder, causal))


@functools.lru_cache(maxsize=8)
def empty_model(folder: Path, causal: bool = True) -> PreTrainedModel:
    """Return the model in a folder without weights; raises like `footprint`."""
    return model_folder.load_empty(folder, causal=causal)


def free_memory(device: str) -> int | None:
    """Return the free bytes of a device, or ``None`` if unknown."""
    torch, kind = devices.torch_module(), devices.device_type(device)
    if kind in ("cuda", "xpu"):
        free: int = getattr(torch, kind).mem_get_info(torch.device(device))[0]
        return free
    if kind == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return _free_ram()


def total_memory(device: str) -> int:
    """Return the bytes of a CUDA or XPU device, free or not."""
    torch, kind = devices.torch_module(), devices.device_type(device)
    total: int = getattr(torch, kind).mem_get_info(torch.device(device))[1]
    return total


def _free_ram() -> int | None:
    """Return the RAM that is available to this process, within the limit of its container."""
    try:
        import psutil
    except ImportError:
        return None
    available = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError, KeyError):  # no container, or "max"
        limit = int((CGROUP / "memory.max").read_text())
        statistics = dict(
            line.split() for line in (CGROUP / "memory.stat").read_text().splitlines()
        )
        return min(available, limit - int(statistics["anon"]))  # files in memory can be dropped
    return available
