"""The simulation of layouts: costs by hand, requests of one replica by hand, and laws of several."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.measure.cluster import base_memory
from benchmarks.measure.cluster import layouts as measured
from benchmarks.simulated.layouts.costs import BASES, GB, Base, Costs, Device, Efficiency
from benchmarks.simulated.layouts.sampling import Load, sampling_time
from benchmarks.simulated.layouts.steps import Layout, layouts, step_time

# One token of one request takes 0.1 s (10 GB of weights at 100 GB/s) if its cache is negligible.
DEVICE = Device("d", flops=1e12, bandwidth=100 * GB, memory=100 * GB, host=10 * GB)
COSTS = Costs(
    Base("b", 5e9, layers=1, heads=1, width=1), DEVICE, Efficiency(1.0, 1.0, 1.0, 0.0, 0.0)
)
ALONE = Load(examples=1, group=1, calls=1, prompt=100, answer=10, spread=0.0, driver=0.0)


def test_costs_by_hand() -> None:
    assert (
        COSTS.base.cache == 4.0
    )  # keys and values of one layer, one head and one number, two bytes each
    assert COSTS.group == 1
    assert COSTS.decoding(1, 0) == pytest.approx(0.1)
    assert COSTS.decoding(1, 25 * GB) == pytest.approx(0.1 + 1.0)  # and 100 GB of cache
    assert COSTS.decoding(100, 0) == pytest.approx(1.0)  # bound by arithmetic: 2 x 5e9 x 100 / 1e12
    assert COSTS.prefill(100) == pytest.approx(1.0)
    assert COSTS.training(100, 3) == pytest.approx(1.0)
    launching = replace(COSTS, reached=Efficiency(1.0, 1.0, 1.0, launch=2.0), micro=50)
    assert launching.training(101, 1) == pytest.approx(6.0)  # three micro-batches of one layer
    assert launching.training(1000, 1) == pytest.approx(40.0)
    assert COSTS.switch() == pytest.approx(2.0)
    assert COSTS.capacity(1e9) == int((90 - 10) / 4)


def test_a_base_that_needs_several_gpus_is_read_by_all_of_them() -> None:
    large = replace(
        COSTS, base=replace(COSTS.base, parameters=100e9)
    )  # 200 GB of weights, 60 per GPU
    assert large.group == 4
    assert large.decoding(1, 0) == pytest.approx(200 / 400)


def test_one_run_takes_the_time_of_its_calls() -> None:
    assert sampling_time(COSTS, ALONE, 1, 0) == pytest.approx(1.0 + 10 * 0.1)
    assert sampling_time(COSTS, replace(ALONE, calls=3), 1, 0) == pytest.approx(3 * 2.0)
    assert sampling_time(COSTS, replace(ALONE, driver=0.5), 1, 0) == pytest.approx(0.5 + 2.0 + 0.5)


def test_lengths_have_their_mean_and_limit() -> None:
    load = Load(examples=2000, group=1, calls=2, answer=300, spread=0.6, longest=10**9)
    lengths = load.lengths(0)
    assert lengths.shape == (2000, 2)
    assert lengths.mean() == pytest.approx(300, rel=0.05)
    assert replace(load, longest=200).lengths(0).max() == 200


def test_layouts_hold_whole_replicas() -> None:
    found = list(layouts(8, 2))
    assert found[0] == Layout(8)
    assert {(each.sampling, each.training) for each in found[1:]} == {(2, 6), (4, 4), (6, 2)}
    assert all(each.gpus == 8 for each in found)
    with pytest.raises(ValueError, match="1 GPUs hold no replica, which takes 2"):
        step_time(Costs(BASES["32B"]), ALONE, Layout(1), 0)


def test_the_committed_results_are_those_of_the_simulation() -> None:
    found = json.loads(measured.OUTPUT.read_text(encoding="utf-8"))
    load = Load(driver=measured.driver_seconds())
    for kind, expected in measured.best(measured.assumed("8B"), load, 2).items():
        stored = found["scaling"]["8B"]["2"]["fixed"][kind]
        assert stored["step"] == pytest.approx(expected["step"], rel=0.01)
        assert stored["bottleneck"] == expected["bottleneck"]
    assert set(found["scaling"]["32B"]) == {"2", "4", "8", "16", "32", "64"}


def test_bases_have_the_sizes_of_their_shapes() -> None:
    """The number of parameters, and the cache of a token, are those of the models without weights."""
    pytest.importorskip("transformers")
    for name, stored in json.loads(base_memory.OUTPUT.read_text(encoding="utf-8"))["bases"].items():
        assert base_memory.memory_of(name) == stored
        assert stored["parameters"] == pytest.approx(BASES[name].parameters, rel=0.01)
        assert stored["cache_of_1000_tokens"] == 1000 * BASES[name].cache


def test_the_guides_advice_follows_from_the_results() -> None:
    """The statements of docs/guides/scale.md."""
    found = json.loads(measured.OUTPUT.read_text(encoding="utf-8"))
    scaling = found["scaling"]
    faster, kinds = [], ("fixed", "growing")
    for base, by_gpus in scaling.items():
        for gpus, of_gpus in by_gpus.items():
            for each in (of_gpus[kind] for kind in kinds):
                steps = {kind: each[kind]["step"] for kind in each}
                if len(steps) > 1:
                    assert max(steps, key=lambda kind: steps[kind]) == "one after the other"
                if int(gpus) >= 8:
                    faster.append(1 - steps["overlapping"] / steps["in turns"])
                elif int(gpus) == 2 or (int(gpus) == 4 and base == "32B"):
                    assert steps["in turns"] <= min(steps.values())
    assert (round(100 * min(faster)), round(100 * max(faster))) == (13, 27)
    train = {
        base: by_gpus["8"]["fixed"]["overlapping"]["training_gpus"]
        for base, by_gpus in scaling.items()
    }
    assert train == {"0.6B": 5, "8B": 5, "32B": 6}
    larger = found["assumptions"]["0.6B"]["micro-batches of 32,768 tokens"]
    assert larger["training_gpus"] == 2
    assert larger["step"] / scaling["0.6B"]["8"]["fixed"]["overlapping"]["step"] < 0.75
    fixed, growing = (
        [scaling["8B"][gpus][kind]["overlapping"]["step"] for gpus in ("8", "64")] for kind in kinds
    )
    assert 1.9 < fixed[0] / fixed[1] < 2.1
    assert growing[1] / growing[0] < 1.1
