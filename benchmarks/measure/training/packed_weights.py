"""Measure training steps and decoding with a base that engine and trainer share, and with one for each.

Run ``python -m benchmarks.measure.training.packed_weights``; it takes about ten minutes on two cores, and
writes ``benchmarks/data/packed_weights.json`` after each case; cases in that file are kept. Trainers of
SmolLM2 take the same steps, and engines decode the same prompts, in turns that begin with the first or the
last: ``peft`` has a base of its own, and adapters that compute as peft does, in the number format of the
base; ``own`` adds their products by `LinearProduct`; and ``shared`` has the base of `load_shared`, too, whose
weights are rearranged on a CPU. A ratio to the first belongs to one turn. Seconds are those of the
processor, which other load changes less than those of the clock.
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
from typing import TYPE_CHECKING, Literal
from unittest.mock import patch

from benchmarks.measure.training.weights_speed import OPTIMIZER, samples, trainer_of

if TYPE_CHECKING:
    from peft import PeftModel

OUTPUT = Path(__file__).parents[2] / "data" / "packed_weights.json"
# prompt and answer tokens, groups, samples of each, and turns
STEPS = {
    "4 of 40 + 20": (40, 20, 2, 2, 11),
    "8 of 192 + 32": (192, 32, 2, 4, 5),
}
ANSWERS, TOKENS, DECODINGS = 8, 64, 7
Format = Literal["float32", "bfloat16"]


def step(dtype: Format, *case: int) -> dict[str, object]:
    """Return the seconds of training steps."""
    from compound.engines.local import loading
    from compound.graph.space import LoRA
    from compound.optimizers.weights.learner import adapters
    from compound.optimizers.weights.learner.trainer import Trainer

    prompt, answer, groups, each, turns = case
    rows = samples(prompt, answer, groups, each)

    def made(load: adapters.Load) -> Trainer:
        lora = {"x": LoRA(rank=16)}
        return trainer_of(adapters.Adapters("smollm2", lora, dtype=dtype, load=load), OPTIMIZER)

    with patch.object(adapters, "_compute_in_base_dtype", compute_as_peft):
        trainers = {"peft": made(loading.load_base)}
    trainers |= {"own": made(loading.load_base), "shared": made(loading.load_shared)}
    return compared(
        {name: partial(trainer.step, list(rows), 0) for name, trainer in trainers.items()}, turns
    )


def compute_as_peft(model: PeftModel) -> None:
    """Make adapters compute as in peft, without its conversion of inputs to float32."""
    from peft.tuners.lora import LoraLayer
    from torch.nn.functional import linear

    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.cast_input_dtype_enabled = False
            for part in (*layer.lora_A.values(), *layer.lora_B.values()):
                part.forward = lambda x, own=part: linear(x, own.weight.to(x.dtype))


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
    """Return the seconds of calls that alternate, and their ratios to the first: median, minimum, maximum."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(turns + 1):  # the first one warms up
        for name in list(forms)[:: 1 if turn % 2 else -1]:
            start = time.process_time()
            forms[name]()
            seconds[name].append(time.process_time() - start)
    found: dict[str, object] = {name: values[1:] for name, values in seconds.items()}
    first, *others = seconds
    for name in others:
        pairs = zip(seconds[name][1:], seconds[first][1:], strict=True)
        ratios = sorted(a / b for a, b in pairs)
        found[f"{name}/{first}"] = [median(ratios), ratios[0], ratios[-1]]
    return found


def main() -> None:
    """Measure, and write the file."""
    warnings.simplefilter("ignore")
    formats: tuple[Format, ...] = ("float32", "bfloat16")
    answers = f"{ANSWERS} answers of {TOKENS} tokens"
    cases = {(answers, dtype): partial(decoding, dtype) for dtype in formats}
    cases |= {
        (what, dtype): partial(step, dtype, *case)
        for what, case in STEPS.items()
        for dtype in formats
    }
    rows = json.loads(OUTPUT.read_text(encoding="utf-8")) if OUTPUT.exists() else []
    for (what, dtype), measure in cases.items():
        if any((row["case"], row["dtype"]) == (what, dtype) for row in rows):
            continue
        rows.append({"case": what, "dtype": dtype, **measure()})
        print(json.dumps(rows[-1]), flush=True)
        OUTPUT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
