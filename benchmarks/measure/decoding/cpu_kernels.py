"""Measure what speeds up decoding of bfloat16 models on a CPU: grouped attention and packed weights.

``python -m benchmarks.measure.decoding.cpu_kernels`` prints and saves JSON. The same random tokens
are decoded in two ways, alternately, in one thread: with the model as transformers and as the
engine loads it. Processor time is measured, because other programs hardly change it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTPUT = Path(__file__).parents[2] / "data" / "cpu_kernels.json"
DECODED = {
    "1 after 200": (200, 1),
    "8 after 200": (200, 8),
    "8 after 1500": (1500, 8),
    "32 after 100": (100, 32),
}
"""Tokens of a prompt, and the number of answers to it."""
STEPS = 16  # tokens of an answer
Work = Callable[[], float]  # returns its processor time in seconds


def main() -> None:
    """Measure, print and save."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    plain, ours = _plain(args.model), _ours(args.model)
    rng = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(plain.config.vocab_size) for _ in range(count))

    decoded = {}
    for name, (length, count) in DECODED.items():
        prompt = tokens(length)
        decoded[name] = {
            "plain": _decoding(plain, prompt, count),
            "ours": _decoding(ours, prompt, count),
        }
    document = {
        "model": args.model,
        "dtype": "bfloat16",
        "threads": 1,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "processor": _processor(),
        "decoding": _compare(decoded, args.rounds),
    }
    OUTPUT.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _plain(model: str) -> PreTrainedModel:
    """Load a model without packed weights, and with torch's fused attention."""
    from compound.engines import models
    from compound.engines.model_folder import load_causal

    return load_causal(models.resolve(model), "bfloat16")[0].eval()


def _ours(model: str) -> PreTrainedModel:
    """Load a model as the engine does."""
    from compound.engines.local import loading
    from compound.engines.local.devices import Placement

    return loading.load(model, Placement(device="cpu", dtype="bfloat16"))[0]


def _processor() -> str:
    """Return the instructions for bfloat16 that the processor has, if Linux tells."""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text(encoding="utf-8").split()) if info.exists() else set()
    return ", ".join(sorted(flags & {"avx512f", "avx512_bf16", "amx_bf16"})) or "unknown"


def _decoding(model: PreTrainedModel, prompt: tuple[int, ...], count: int) -> Work:
    """Decode `STEPS` tokens after equal prompts; the time to read them is not counted."""
    import torch

    from compound.engines.local.decoding import Decoder, SamplingRow

    tokenizer: Any = SimpleNamespace(eos_token_id=None, decode=lambda *_, **__: "")
    decoder = Decoder(model, tokenizer, exact=False, max_batch_tokens=10**6, max_adapters=1)
    decoder.ends = frozenset()  # decode all steps

    def work() -> float:
        rows = [SamplingRow(prompt, STEPS, seed=i) for i in range(count)]
        with torch.inference_mode():
            _, cache, mask = decoder._prefill.read([prompt] * count)
            start = time.process_time()
            decoder._decode(rows, cache, mask)
        return time.process_time() - start

    return work


def _compare(workloads: Mapping[str, Mapping[str, Work]], rounds: int) -> dict[str, object]:
    """Do each workload in both ways, alternately; return times and the ratios of the first to the second."""
    found: dict[str, object] = {}
    for name, ways in workloads.items():
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            for way in list(ways) if number % 2 else reversed(list(ways)):
                seconds[way].append(round(ways[way](), 3))
        ratios = [first / second for first, second in zip(*seconds.values(), strict=True)]
        summary = {
            "median": round(statistics.median(ratios), 2),
            "range": [round(min(ratios), 2), round(max(ratios), 2)],
        }
        found[name] = {"processor_seconds": seconds, "ratio": summary}
        print(" to ".join(ways), name, summary, flush=True)
    return found


if __name__ == "__main__":
    main()
