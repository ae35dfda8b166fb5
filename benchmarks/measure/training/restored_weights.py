"""Measure what a training step costs more with the rearranged weights of an engine than with its own.

Run ``python -m benchmarks.measure.training.restored_weights``; it takes about five minutes on two cores,
and writes ``benchmarks/data/restored_weights.json``. The trainer of SmolLM2 takes steps that alternate
between both forms of its frozen weights, with a few short samples and with whole micro-batches. Seconds
are those of the processor, which other load changes less than those of the clock.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.measure.training.weights_speed import OPTIMIZER, samples, trainer_of

OUTPUT = Path(__file__).parents[2] / "data" / "restored_weights.json"
CASES = {"4 of 40 + 20": (40, 20, 2, 2), "32 of 192 + 32": (192, 32, 8, 4)}
TURNS = 4


def measure(dtype: str, case: tuple[int, int, int, int], turns: int) -> dict[str, object]:
    """Return the seconds of steps with own and with restored weights."""
    from compound.engines.local import kernels, loading
    from compound.graph.space import LoRA
    from compound.optimizers.weights.learner.adapters import Adapters

    adapters = Adapters("smollm2", {"x": LoRA(rank=16)}, dtype=dtype, load=loading.load_shared)
    trainer = trainer_of(adapters, OPTIMIZER)
    layers = [each for each in adapters.base.modules() if isinstance(each, kernels.SharedLinear)]
    own = [layer.frozen.matrix for layer in layers]
    for layer in layers:
        layer.frozen.pack()
    packed = [layer.frozen.matrix for layer in layers]  # None, but for a tied output layer
    rows = samples(*case)

    def step(matrices: list[object]) -> float:
        for layer, matrix in zip(layers, matrices, strict=True):
            layer.frozen.matrix = matrix
        start = time.process_time()
        trainer.step(list(rows), 0)
        return time.process_time() - start

    forms: dict[str, Callable[[], float]] = {
        "own": lambda: step(own),
        "restored": lambda: step(packed),
    }
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(turns + 1):  # the first one warms up
        for name in list(forms)[:: 1 if turn % 2 else -1]:
            seconds[name].append(forms[name]())
    found = {name: values[1:] for name, values in seconds.items()}
    difference = median(b - a for a, b in zip(found["own"], found["restored"], strict=True))
    return {**found, "difference": difference, "relative": difference / median(found["own"])}


def main() -> None:
    """Measure, and write the file."""
    warnings.simplefilter("ignore")
    found: dict[str, object] = {}
    for dtype in ("float32", "bfloat16"):
        for name, case in CASES.items():
            found[f"{dtype}, {name}"] = measure(dtype, case, TURNS)
            print(name, dtype, found[f"{dtype}, {name}"], flush=True)
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
