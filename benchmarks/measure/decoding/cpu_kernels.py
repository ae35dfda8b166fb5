"""Measure what speeds up bfloat16 models on a CPU: blocks of attention, packed weights, long prompts alone.

``python -m compound.benchmarks.measure.decoding.cpu_kernels`` prints and saves JSON. The same random tokens
are processed in two ways, alternately, in one thread: prompts and decoded tokens with the model as
transformers and as the engine loads it, and prompts of different lengths padded in a batch and each alone.
Processor time is measured, because other programs hardly change it.
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
LENGTHS = {"150-200": (150, 200, 16), "300-450": (300, 450, 12), "900-1300": (900, 1300, 6)}
"""The shortest and the longest prompt in tokens, and the number of prompts."""
READ = {"100": (0, 100, 8), "500": (0, 500, 4), "2000": (0, 2000, 2), "700 after 1500": (1500, 700, 4)}
"""Tokens of a shared prefix, further tokens of each prompt, and the number of prompts."""
DECODED = {
    "1 after 200": (200, 1),
    "8 after 200": (200, 8),
    "8 after 1500": (1500, 8),
    "32 after 100": (100, 32),
}
"""Tokens of a prompt, and the number of answers to it."""
STEPS = 16  # tokens of an answer
Prompts = list[tuple[int, ...]]
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

    read, decoded, padded = {}, {}, {}
    for name, (before, own, count) in READ.items():
        prefix = tokens(before)
        prompts = [prefix + tokens(own) for _ in range(count)]
        read[name] = {"plain": _reading(plain, prompts), "ours": _reading(ours, prompts)}
    for name, (length, count) in DECODED.items():
        prompt = tokens(length)
        decoded[name] = {"plain": _decoding(plain, prompt, count), "ours": _decoding(ours, prompt, count)}
    for name, (low, high, count) in LENGTHS.items():
        prompts = [tokens(rng.randint(low, high)) for _ in range(count)]
        padded[name] = {"padded": _reading(ours, prompts, 10**9), "alone": _reading(ours, prompts)}
    document = {
        "model": args.model,
        "dtype": "bfloat16",
        "threads": 1,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "processor": _processor(),
        "reading": _compare(read, args.rounds),
        "decoding": _compare(decoded, args.rounds),
        "padding": _compare(padded, args.rounds),
    }
    OUTPUT.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _plain(model: str) -> PreTrainedModel:
    """Load a model without packed weights, and with torch's fused attention."""
    from compound.components.engines import models
    from compound.components.engines.model_folder import load_causal

    return load_causal(models.resolve(model), "bfloat16")[0].eval()


def _ours(model: str) -> PreTrainedModel:
    """Load a model as the engine does."""
    from compound.components.engines.local import loading
    from compound.components.engines.local.devices import Placement

    return loading.load(model, Placement(device="cpu", dtype="bfloat16"))[0]


def _processor() -> str:
    """Return the instructions for bfloat16 that the processor has, if Linux tells."""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text(encoding="utf-8").split()) if info.exists() else set()
    return ", ".join(sorted(flags & {"avx512f", "avx512_bf16", "amx_bf16"})) or "unknown"


def _reading(model: PreTrainedModel, prompts: Prompts, alone: int | None = None) -> Work:
    import torch

    from compound.components.engines.local import prefill

    usual = prefill.ALONE

    def work() -> float:
        prefill.ALONE = usual if alone is None else alone
        reader, start = prefill.Prefill(model, capacity=0), time.process_time()
        prefill.ALONE = usual
        with torch.inference_mode():
            reader.read(prompts)
        return time.process_time() - start

    return work


def _decoding(model: PreTrainedModel, prompt: tuple[int, ...], count: int) -> Work:
    """Decode `STEPS` tokens after equal prompts; the time to read them is not counted."""
    import torch

    from compound.components.engines.local.decoding import Decoder
    from compound.components.engines.local.sampling import Row

    tokenizer: Any = SimpleNamespace(eos_token_id=None, decode=lambda *_, **__: "")
    decoder = Decoder(model, tokenizer, exact=False, max_batch_tokens=10**6, max_adapters=1)
    decoder.ends = frozenset()  # decode all steps

    def work() -> float:
        rows = [Row(prompt, STEPS, seed=i) for i in range(count)]
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
