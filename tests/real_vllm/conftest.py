"""A real vLLM server for the tests of this folder, and transformers to compare it with.

Not part of the normal run: ``make test-vllm`` sets REAL_VLLM to the ``vllm`` command. Without it
nothing here is collected.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from compound.core.engine import Adapter, Completion, Request
from compound.core.storage.artifacts import folder_digest
from compound.engines import models
from compound.engines.vllm.engine import VLLMEngine

collect_ignore_glob = [] if os.environ.get("REAL_VLLM") else ["*"]

ARGS = ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.3", "--max-model-len", "2048")
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROBE = (
    "The river was high that spring. 12 * 12 = 144. def area(r): return 3.14 * r ** 2. Die Katze schläft, "
    "and nobody had seen the letter since Tuesday."
)


@pytest.fixture(autouse=True)
def _own_cache() -> None:
    """Use the user's cache: converting the model takes half a minute."""


@pytest.fixture(scope="session")
def lm() -> Iterator[VLLMEngine]:
    """An engine whose server is shared by all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPOUND_VLLM", os.environ["REAL_VLLM"])
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
        engine = VLLMEngine(
            "smollm2", args=ARGS, max_lora_rank=8, max_loras=2, restarts=1, deterministic=True
        )
        yield engine
        asyncio.run(engine.aclose())


@pytest.fixture(scope="session")
def ask(lm: VLLMEngine) -> Callable[..., list[Completion]]:
    """Make requests together."""

    def run(*requests: Request) -> list[Completion]:
        async def together() -> list[Completion]:
            return await asyncio.gather(*map(lm.generate, requests))

        return asyncio.run(together())

    return run


class Reference:
    """The same model in this process, in float32, and adapters on it."""

    def __init__(self, folder: Path) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, AutoTokenizer

        where = models.resolve("smollm2")
        self.torch, self._folder = torch, folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(where)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
        self._config = LoraConfig(
            r=8, lora_alpha=16, target_modules=list(MODULES), task_type="CAUSAL_LM"
        )
        self._model: Any = get_peft_model(model, self._config, adapter_name="silent")

    def logprobs(
        self, tokens: Sequence[int], adapter: str = "", temperature: float = 1.0
    ) -> list[float]:
        """Return the log-probabilities of the tokens but the first, under an adapter by its name."""
        torch = self.torch
        self._model.set_adapter(adapter or "silent")  # whose B is zero
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([tokens])).logits[0, :-1] / temperature
            each = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])
        found: list[float] = each[:, 0].tolist()
        return found

    def add(self, name: str, size: float, *, like: str = "", step: float = 0.0) -> None:
        """Add an adapter with B drawn at ``size``, or one like another but for a ``step`` in each number."""
        torch = self.torch
        self._model.add_adapter(name, self._config)
        source = torch.Generator().manual_seed(len(self._model.peft_config))
        weights = dict(self._model.named_parameters())
        for key, weight in weights.items():
            if f".{name}." in key and "lora_" in key:
                data = weight.data
                sign = torch.where(torch.rand(data.shape, generator=source) < 0.5, -1.0, 1.0)
                if like:
                    data.copy_(weights[key.replace(f".{name}.", f".{like}.")].data + step * sign)
                elif "lora_B" in key:
                    data.copy_(size * sign)

    def save(self, name: str, before: str | None = "") -> Adapter:
        """Write an adapter as a trainer does, with a probe unless ``before`` is None."""
        made = self._folder / f"{name}-{before}"
        self._model.save_pretrained(made, selected_adapters=[name])
        folder = made / name
        if before is not None:
            tokens = self.tokenizer(PROBE).input_ids
            probe = {
                "tokens": tokens,
                "logprobs": self.logprobs(tokens, name),
                "before": self.logprobs(tokens, before),
            }
            (folder / "probe.json").write_text(json.dumps(probe))
        return Adapter(str(folder), folder_digest(folder))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """SmolLM2 in transformers, with adapters ``one`` and ``two`` of sizes that show."""
    found = Reference(tmp_path_factory.mktemp("adapters"))
    found.add("one", 0.03)
    found.add("two", 0.03)
    return found
