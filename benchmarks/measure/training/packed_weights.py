"""Measure training steps and decoding with a base that engine and trainer share, and with one for each.

Run ``python -m benchmarks.measure.training.packed_weights``; it takes about 20 minutes on two cores, and
writes ``benchmarks/data/packed_weights.json`` after each case. Two trainers of SmolLM2 take the same steps,
and two engines decode the same prompts, in turns that begin with either: one has a base of its own, as
`load_base` loads it, and one that of `load_shared`, whose weights are rearranged on a CPU. A ratio belongs
to one turn. Seconds are those of the processor, which other load changes less than those of the clock.
"""

from __future__ import annotations

import asyncio
import json
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal
from unittest.mock import patch

from benchmarks.measure.training.weights_speed import OPTIMIZER, samples, trainer_of

OUTPUT = Path(__file__).parents[2] / "data" / "packed_weights.json"
# prompt and answer tokens, groups, samples of each, and turns
STEPS = {
    "4 of 40 + 20": (40, 20, 2, 2, 21),
    "8 of 192 + 32": (192, 32, 2, 4, 11),
    "32 of 192 + 32": (192, 32, 8, 4, 7),
}
ANSWERS, TOKENS, DECODINGS = 8, 64, 11
Format = Literal["float32", "bfloat16"]


def step(dtype: Format, *case: int) -> dict[str, object]:
    """Return the seconds of training steps."""
    from compound.engines.local import loading
    from compound.graph.space import LoRA
    from compound.optimizers.weights.learner.adapters import Adapters

    prompt, answer, groups, each, turns = case
    rows = samples(prompt, answer, groups, each)
    loads = {"own": loading.load_base, "shared": loading.load_shared}
    trainers = {
        name: trainer_of(
            Adapters("smollm2", {"x": LoRA(rank=16)}, dtype=dtype, load=load), OPTIMIZER
        )
        for name, load in loads.items()
    }
    return compared(
        {name: partial(trainer.step, list(rows), 0) for name, trainer in trainers.items()}, turns
    )


def decoding(dtype: Format) -> dict[str, object]:
    """Return the seconds of a batch of answers."""
    from compound.core.engine import Message, Request
    from compound.engines.local import loading
    from compound.engines.local.engine import TransformersEngine

    prompts = [
        (Message("user", f"Write a long story about the number {n}."),) for n in range(ANSWERS)
    ]

    async def answer(engine: TransformersEngine) -> None:
        requests = (Request(each, TOKENS, temperature=1.0, seed=1) for each in prompts)
        await asyncio.gather(*map(engine.generate, requests))

    def decode(runner: asyncio.Runner, engine: TransformersEngine) -> None:
        runner.run(answer(engine))

    engines = {
        name: TransformersEngine("smollm2", dtype=dtype, device="cpu") for name in ("own", "shared")
    }
    with asyncio.Runner() as runner:
        with patch.object(loading, "load_shared", loading.load_base):
            decode(runner, engines["own"])
        found = compared(
            {name: partial(decode, runner, each) for name, each in engines.items()}, DECODINGS
        )
        for engine in engines.values():
            runner.run(engine.aclose())
    return found


def compared(forms: Mapping[str, Callable[[], object]], turns: int) -> dict[str, object]:
    """Return the seconds of calls that alternate, and the ratios of shared to own."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(turns + 1):  # the first one warms up
        for name in list(forms)[:: 1 if turn % 2 else -1]:
            start = time.process_time()
            forms[name]()
            seconds[name].append(time.process_time() - start)
    found = {name: values[1:] for name, values in seconds.items()}
    ratios = sorted(b / a for a, b in zip(found["own"], found["shared"], strict=True))
    return {**found, "ratio": [median(ratios), ratios[0], ratios[-1]]}


def main() -> None:
    """Measure, and write the file."""
    warnings.simplefilter("ignore")
    formats: tuple[Format, ...] = ("float32", "bfloat16")
    cases = {
        (what, dtype): partial(step, dtype, *case)
        for what, case in STEPS.items()
        for dtype in formats
    }
    answers = f"{ANSWERS} answers of {TOKENS} tokens"
    cases |= {(answers, dtype): partial(decoding, dtype) for dtype in formats}
    rows: list[dict[str, object]] = []
    for (what, dtype), measure in cases.items():
        rows.append({"case": what, "dtype": dtype, **measure()})
        print(json.dumps(rows[-1]), flush=True)
        OUTPUT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
