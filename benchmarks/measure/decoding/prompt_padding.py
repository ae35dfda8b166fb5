"""Measure the prefill of prompts of different lengths on the CPU: padded in batches, and each alone.

``python -m compound.benchmarks.measure.decoding.prompt_padding`` prints and saves JSON. Both ways read the
same random tokens in alternation, in one thread. Processor time is measured, because other programs hardly
change it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path

from compound.components.engines.local import loading

OUTPUT = Path(__file__).parents[2] / "data" / "prompt_padding.json"
SHAPES = {"150-200": (150, 200, 16), "300-450": (300, 450, 12), "900-1300": (900, 1300, 6)}
"""The shortest and the longest prompt in tokens, and the number of prompts."""


def main() -> None:
    """Measure, print and save."""
    import torch

    from compound.components.engines.local import prefill

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, _ = loading.load(args.model, args.dtype)
    rng, usual = random.Random(0), prefill.ALONE
    found = {}
    for name, (low, high, count) in SHAPES.items():
        prompts = [
            tuple(rng.randrange(model.config.vocab_size) for _ in range(rng.randint(low, high)))
            for _ in range(count)
        ]
        seconds: dict[str, list[float]] = {"padded": [], "alone": []}
        for number in range(args.rounds):
            ways = [("padded", 10**9), ("alone", usual)]
            for way, threshold in ways if number % 2 else reversed(ways):
                prefill.ALONE = threshold
                with torch.inference_mode():
                    reader, start = prefill.Prefill(model, capacity=0), time.process_time()
                    reader.read(prompts)
                seconds[way].append(round(time.process_time() - start, 3))
        ratios = [padded / alone for padded, alone in zip(seconds["padded"], seconds["alone"], strict=True)]
        found[name] = {
            "prompts": count,
            "processor_seconds": seconds,
            "padded_to_alone": {
                "median": round(statistics.median(ratios), 2),
                "range": [round(min(ratios), 2), round(max(ratios), 2)],
            },
        }
        print(name, found[name]["padded_to_alone"], flush=True)
    versions = {"torch": torch.__version__, "machine": platform.machine()}
    document = {"model": args.model, "dtype": args.dtype, "threads": 1, **versions, "tokens": found}
    OUTPUT.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
