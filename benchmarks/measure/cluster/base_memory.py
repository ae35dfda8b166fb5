"""Compute the memory of training and sampling with base models of three sizes.

Run ``python -m benchmarks.measure.cluster.base_memory``; it takes seconds, and writes
``benchmarks/data/base_memory.json``. The models have the shapes of Qwen3, and are built without
weights. The formulas are those of the memory plan (`compound.engines.local.footprint`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.simulated.layouts.costs import BASES
from compound.engines.local.footprint import OPTIMIZER_BYTES, SUM_BYTES, Footprint
from compound.optimizers.weights.learner.forward import CHUNK

if TYPE_CHECKING:
    from transformers import Qwen3Config

OUTPUT = Path(__file__).parents[2] / "data" / "base_memory.json"
RANK, TOKENS = 16, 8192  # of an adapter on all linear layers; of a micro-batch
LOGITS = (
    3 * 4 * CHUNK
)  # bytes of the logits of a chunk, their exponentials and gradients, in float32
SHAPES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    "32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64},
}


def config_of(name: str) -> Qwen3Config:
    """Return the configuration of a base model."""
    from transformers import Qwen3Config

    base = BASES[name]
    return Qwen3Config(
        **SHAPES[name],
        num_hidden_layers=base.layers,
        num_key_value_heads=base.heads,
        head_dim=base.width,
        vocab_size=151936,
        tie_word_embeddings=name == "0.6B",
    )


def footprint_of(name: str) -> Footprint:
    """Return the sizes of a base model."""
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        return Footprint.of(Qwen3ForCausalLM(config_of(name)))


def memory_of(name: str) -> dict[str, int]:
    """Return the bytes of the parts of training and sampling."""
    sizes = footprint_of(name)
    suffixes = sorted({layer.rpartition(".")[2] for layer, _, _ in sizes.linear})
    return {
        "parameters": sizes.parameters,
        "weights": sizes.weights("bfloat16"),
        "weights_4bit": sizes.weights("bfloat16", "4bit"),
        "adapter": (OPTIMIZER_BYTES + SUM_BYTES) * sizes.adapter(RANK, suffixes),
        "activations": TOKENS * sizes.activations("bfloat16"),
        "activations_checkpointed": TOKENS * sizes.activations("bfloat16", checkpointing=True),
        "logits": LOGITS,
        "cache_of_1000_tokens": 1000 * sizes.cache("bfloat16"),
    }


def main() -> None:
    """Compute, and write the file."""
    found = {"rank": RANK, "tokens": TOKENS, "bases": {name: memory_of(name) for name in SHAPES}}
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
