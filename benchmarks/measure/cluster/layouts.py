"""Simulate training steps on up to 64 GPUs: the best division of the GPUs, and how a step scales.

Run ``python -m benchmarks.measure.cluster.layouts``. It simulates for some minutes, and writes
``benchmarks/data/layouts.json``. No GPU is used: costs are those of a roofline model of H100 GPUs
(`benchmarks.simulated.layouts.costs`). Training is fitted to measured steps on one H100
(``benchmarks/data/one_gpu.json``): 8B gives the share of the peak operations, and 0.6B, which
reaches less of it, the time in which kernels are launched. The shares of sampling are assumed. The
time of the driver for a call is measured (``benchmarks/data/overhead.json``). For other GPUs,
change `Device` and `Efficiency`.

- ``scaling``: the fastest layout of each kind by number of GPUs, with the same examples (``fixed``), and with
  examples in proportion to the GPUs (``growing``).
- ``assumptions``: the best overlapping layout of 8 GPUs if shares or micro-batches are others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.simulated.layouts.costs import BASES, Costs, Efficiency
from benchmarks.simulated.layouts.sampling import Load
from benchmarks.simulated.layouts.steps import Layout, StepTime, layouts, step_time

DATA = Path(__file__).parents[2] / "data"
OUTPUT = DATA / "layouts.json"
SEEDS = 3
GPUS = (1, 2, 4, 8, 16, 32, 64)
EACH = 8  # examples for each GPU, if they grow with the GPUs
ASSUMPTIONS: Mapping[str, Mapping[str, Any]] = {
    "as above": {},
    "micro-batches of 32,768 tokens": {"micro": 32_768},
    "training reaches 20 %": {"training": 0.2},
    "training reaches 50 %": {"training": 0.5},
    "decoding reaches 40 %": {"decoding": 0.4},
    "decoding reaches 80 %": {"decoding": 0.8},
}


def driver_seconds() -> float:
    """Return the measured time of the driver for a call."""
    found = json.loads((DATA / "overhead.json").read_text(encoding="utf-8"))
    return float(found["us_per_call_chain_5"]) * 1e-6


def fitted() -> Efficiency:
    """Return what measured training steps reach."""
    steps = json.loads((DATA / "one_gpu.json").read_text(encoding="utf-8"))["memory"]
    small, large = (steps[f"{name} with checkpointing"] for name in ("0.6B", "8B"))
    launch = small["seconds"]["median"] / BASES["0.6B"].layers  # of one micro-batch
    return Efficiency(training=large["share_of_peak"], launch=launch)


def assumed(base: str, micro: int = Costs.micro, **shares: float) -> Costs:
    """Return the costs of a base where some numbers are others than those fitted."""
    return Costs(BASES[base], reached=replace(fitted(), **shares), micro=micro)


def kind_of(layout: Layout) -> str:
    """Return the kind of a layout."""
    return (
        "in turns"
        if not layout.training
        else "overlapping"
        if layout.overlaps
        else "one after the other"
    )


def best(costs: Costs, load: Load, gpus: int) -> dict[str, dict[str, object]]:
    """Return the fastest layout of each kind."""
    found: dict[str, tuple[float, Layout, list[StepTime]]] = {}
    for layout in layouts(gpus, costs.group):
        times = [step_time(costs, load, layout, seed) for seed in range(SEEDS)]
        mean, kind = fmean(time.step for time in times), kind_of(layout)
        if kind not in found or mean < found[kind][0]:
            found[kind] = (mean, layout, times)
    return {kind: _summary(layout, times) for kind, (_, layout, times) in found.items()}


def _summary(layout: Layout, times: list[StepTime]) -> dict[str, object]:
    steps = [time.step for time in times]
    return {
        "sampling_gpus": layout.sampling,
        "training_gpus": layout.training,
        "step": round(fmean(steps), 2),
        "range": [round(min(steps), 2), round(max(steps), 2)],
        "sampling": round(fmean(time.sampling for time in times), 2),
        "training": round(fmean(time.training for time in times), 2),
        "driver": round(fmean(time.driver for time in times), 3),
        "bottleneck": times[0].bottleneck,
    }


def scaling(costs: Costs, load: Load) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the fastest layouts by number of GPUs."""
    for gpus in (gpus for gpus in GPUS if gpus >= costs.group):
        grown = replace(load, examples=EACH * gpus)
        yield str(gpus), {"fixed": best(costs, load, gpus), "growing": best(costs, grown, gpus)}


def main() -> None:
    """Simulate, and write the file."""
    load, reached = Load(driver=driver_seconds()), fitted()
    found: dict[str, object] = {
        "device": Costs(BASES["8B"]).device.name,
        "load": {
            "examples": load.examples,
            "group": load.group,
            "calls": load.calls,
            "prompt": load.prompt,
            "answer": load.answer,
        },
        "seeds": SEEDS,
        "fitted": {"training": round(reached.training, 3), "launch": round(reached.launch, 4)},
        "groups": {name: Costs(base).group for name, base in BASES.items()},
        "scaling": {name: dict(scaling(assumed(name), load)) for name in BASES},
        "assumptions": {
            name: {
                label: best(assumed(name, **given), load, 8)["overlapping"]
                for label, given in ASSUMPTIONS.items()
            }
            for name in BASES
        },
    }
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
