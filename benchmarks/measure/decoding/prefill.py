"""Measure two choices of the prefill of prompts on the CPU: attention by blocks, and long prompts alone.

``python -m compound.benchmarks.measure.decoding.prefill`` prints and saves JSON. Both ways of a comparison
read the same random tokens in alternation, in one thread: attention by torch's fused kernel and by blocks,
and prompts of different lengths padded in a batch and each alone. Processor time is measured, because other
programs hardly change it.
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
from typing import TYPE_CHECKING

from compound.components.engines.local import loading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTPUT = Path(__file__).parents[2] / "data" / "prefill.json"
PADDED = {"150-200": (150, 200, 16), "300-450": (300, 450, 12), "900-1300": (900, 1300, 6)}
"""The shortest and the longest prompt in tokens, and the number of prompts."""
SHARED = {"100": (0, 100, 8), "500": (0, 500, 4), "2000": (0, 2000, 2), "700 after 1500": (1500, 700, 4)}
"""Tokens of a shared prefix, further tokens of each prompt, and the number of prompts."""
Prompts = list[tuple[int, ...]]


def main() -> None:
    """Measure, print and save."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, _ = loading.load(args.model, "bfloat16")
    rng = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(model.config.vocab_size) for _ in range(count))

    padded = {
        name: [tokens(rng.randint(low, high)) for _ in range(n)] for name, (low, high, n) in PADDED.items()
    }
    shared = {}
    for name, (before, own, count) in SHARED.items():
        prefix = tokens(before)
        shared[name] = [prefix + tokens(own) for _ in range(count)]
    document = {
        "model": args.model,
        "dtype": "bfloat16",
        "threads": 1,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "attention": _compare(model, _attention_ways(model), shared, args.rounds),
        "padding": _compare(model, _padding_ways(), padded, args.rounds),
    }
    OUTPUT.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _attention_ways(model: PreTrainedModel) -> dict[str, Callable[[], None]]:
    from compound.components.engines.local import attention

    attention.clearly_faster = lambda: True  # type: ignore[assignment]  # measure also where it is not
    model.set_attn_implementation("sdpa")
    attention.use_blocks(model)
    return {name: lambda kind=kind: model.set_attn_implementation(kind) for name, kind in
            (("fused", "sdpa"), ("blocks", attention.NAME))}  # fmt: skip


def _padding_ways() -> dict[str, Callable[[], None]]:
    from compound.components.engines.local import prefill

    usual = prefill.ALONE

    def choose(threshold: int) -> None:
        prefill.ALONE = threshold

    return {"padded": lambda: choose(10**9), "alone": lambda: choose(usual)}


def _compare(
    model: PreTrainedModel,
    ways: Mapping[str, Callable[[], None]],
    workloads: Mapping[str, Prompts],
    rounds: int,
) -> dict[str, object]:
    """Read each workload in two ways, alternately; return times and the ratios of the first to the second."""
    import torch

    from compound.components.engines.local.prefill import Prefill

    found: dict[str, object] = {}
    for name, prompts in workloads.items():
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            for way in list(ways) if number % 2 else reversed(list(ways)):
                ways[way]()
                with torch.inference_mode():
                    reader, start = Prefill(model, capacity=0), time.process_time()
                    reader.read(prompts)
                seconds[way].append(round(time.process_time() - start, 3))
        ratios = [first / second for first, second in zip(*seconds.values(), strict=True)]
        summary = {
            "median": round(statistics.median(ratios), 2),
            "range": [round(min(ratios), 2), round(max(ratios), 2)],
        }
        first, second = ways
        found[name] = {
            "prompts": len(prompts), "processor_seconds": seconds, f"{first}_to_{second}": summary,
        }  # fmt: skip
        print(f"{first} to {second}", name, summary, flush=True)
    return found


if __name__ == "__main__":
    main()
