"""Measure the cost of local rewards: calls to collect pairs, scoring time, memory of backbone training.

``python -m benchmarks.measure.rewards_speed`` prints and saves JSON. Calls are counted exactly.
Times are CPU times of one thread; blocks of both methods alternate in one process, so that other
load affects both equally, and medians are over blocks. Peak memory is measured in a separate
process for each size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulated.systems import Step
from compound.core.example import CallValues, Example
from compound.evaluation.metrics.custom import custom
from compound.execution.executor import Executor
from compound.execution.rng import generator
from compound.graph.component import Input, Source
from compound.graph.system import System
from compound.rewards.alignment import NO_PAIRS
from compound.rewards.candidates import Sampling
from compound.rewards.features import Embedder, FeatureMap, Reading, Template
from compound.rewards.fit import PairTexts
from compound.rewards.heads import Head, Role
from compound.rewards.model import LocalReward, RewardModel
from compound.rewards.pairs import Collection, collect

OUTPUT = Path(__file__).parents[1] / "data" / "rewards_speed.json"
LENGTH = 5  # of the chain
WORDS = (
    "river",
    "capital",
    "harbour",
    "bridge",
    "tower",
    "museum",
    "garden",
    "market",
    "library",
    "castle",
    "station",
    "coast",
    "island",
    "border",
    "county",
    "north",
    "south",
    "old",
    "new",
    "first",
    "second",
    "large",
    "small",
    "opened",
    "built",
    "named",
    "known",
    "between",
    "after",
    "before",
)
TWO_ROLLOUTS = Sampling(samples=3, rollouts=2, max_rollouts=2), True
UNTIL_DECIDED = Sampling(), False
HEADS = 4  # number of components that score the same text

# --- collecting pairs: calls are counted -----------------------------------------------------------------


def chain(length: int, common: bool) -> tuple[System, tuple[str, ...]]:
    """Return a chain of components with noise, and their names in order.

    With ``common`` noise the rewards of two candidates differ by a constant; otherwise noise
    depends on the inputs, like that of a language model.
    """
    names = tuple(f"s{k}" for k in range(1, length + 1))
    source: Source = Input("x", float)
    read = "x"
    for name in names:
        step = Step(name, (read,), (0.0,), 1.0, 0.2, common)
        wires: dict[str, Any] = {read: source}
        source, read = step(**wires), name
    return System("chain", outputs={"y": source}), names


def collected(names: Sequence[str], system: System, sampling: Sampling) -> Collection:
    """Collect the pairs of components on one example; its initial run is not counted."""
    example = Example("e", {"x": 0.0}, {})

    async def work() -> Collection:
        executor = Executor()
        trace = executor.settle(await executor.run(system, example.inputs, example=example.id))
        metric = custom(lambda outputs, _: outputs["y"], "y")
        return await collect(executor, system, [(example, trace)], names, metric, sampling=sampling)

    return asyncio.run(work())


def pairs(sampling: Sampling, common: bool) -> dict[str, object]:
    """Count the calls for the pairs of every node of a chain, and compare them with whole system runs.

    Node k of n takes S calls to draw candidates, and n - k calls for each reward of its S + 1
    candidates. A whole run for each reward takes n calls.
    """
    system, names = chain(LENGTH, common)
    rows: list[dict[str, float]] = []
    for k, name in enumerate(names, 1):
        found = collected([name], system, sampling)
        rewards = sum(len(candidate.rewards) for candidate in found.draws[0].candidates)
        rows.append(
            {
                "node": k,
                "calls": found.calls,
                "formula": sampling.samples + rewards * (LENGTH - k),
                "system_runs": round(found.system_runs, 3),
                "rewards": rewards,
            }
        )
    calls = sum(row["calls"] for row in rows)
    # Whole runs cannot detect that a reward is deterministic, so they need all rollouts of each
    # candidate.
    least = sampling.rollouts * (sampling.samples + 1)
    whole, lean = (
        sum(max(row["rewards"], least) for row in rows),
        sum(row["rewards"] for row in rows),
    )
    return {
        "samples": sampling.samples,
        "rollouts": [sampling.rollouts, sampling.max_rollouts],
        "nodes": rows,
        "calls": calls,
        "formula": sum(row["formula"] for row in rows),
        "system_runs": round(calls / LENGTH, 3),
        "whole_system_runs": whole,
        "ratio": round(calls / LENGTH / whole, 3),
        "whole_system_runs_if_one_tells_all_at_the_last_node": lean,
        "ratio_then": round(calls / LENGTH / lean, 3),
    }


# --- scoring ---------------------------------------------------------------------------------------------


def sentence(rng: np.random.Generator, low: int, high: int) -> str:
    """Return a text of random words."""
    return " ".join(rng.choice(WORDS, rng.integers(low, high + 1)))


def answers(count: int) -> list[CallValues]:
    """Return distinct (inputs, outputs) of a component that answers questions."""
    rng = generator("rewards speed", count)
    return [
        ({"question": f"{i} {sentence(rng, 3, 12)}"}, {"answer": sentence(rng, 1, 12)})
        for i in range(count)
    ]


def model(calls: Sequence[CallValues], backbone: Embedder) -> RewardModel:
    """Return a model of several heads with the same inputs; weights do not affect time and are random."""
    rewards_of = {}
    for i in range(HEADS):
        template = Template(f"head{i}", frozenset(), {})
        features = FeatureMap.of(
            template, [template.read(*call) for call in calls[:8]], backbone.dim
        )
        size = len(features.columns)
        weights = generator("head", i).normal(size=size)
        rewards_of[f"head{i}"] = LocalReward(
            features, Head(weights, np.zeros(size), np.ones(size)), 1.0, NO_PAIRS
        )
    return RewardModel("minilm", backbone, rewards_of)


def cpu(work: Callable[[], object]) -> float:
    """Return the CPU seconds that a function took."""
    start = time.process_time()
    work()
    return time.process_time() - start


def scoring(texts: int, blocks: int) -> dict[str, object]:
    """Time `RewardModel.rewards` on new texts, and compare it with the backbone's forward passes alone."""
    import torch

    from compound.rewards.backbone import BATCH_TOKENS, Backbone, batches

    torch.set_num_threads(1)
    backbone = Backbone("minilm")
    calls = answers(texts)
    rewards = model(calls, backbone)
    template = rewards.rewards_of["head0"].features.template
    size = texts // blocks
    seconds: dict[str, list[float]] = {"rewards": [], "bare": []}
    ratios = []
    tokens = 0
    for start in range(0, texts, size):
        block = calls[start : start + size]
        readings = [template.read(*call) for call in block]
        read = backbone.tokenize([r.texts for r in readings])
        tokens += sum(map(len, read))

        def bare(read: Sequence[Sequence[int]] = read) -> None:
            with torch.inference_mode():
                for batch in batches([len(t) for t in read], BATCH_TOKENS):
                    longest = max(len(read[i]) for i in batch)
                    rows = [[*read[i], *[0] * (longest - len(read[i]))] for i in batch]
                    mask = [[1] * len(read[i]) + [0] * (longest - len(read[i])) for i in batch]
                    backbone.model(input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask))

        def ours(block: Sequence[CallValues] = block) -> None:
            rewards.rewards("head0", block)

        if start // size % 2:  # only every second block is also run through the bare model
            seconds["rewards"].append(cpu(ours))
            continue
        first, second = (bare, ours) if start // size % 4 else (ours, bare)
        took = {first: cpu(first), second: cpu(second)}
        seconds["bare"].append(took[bare])
        seconds["rewards"].append(took[ours])
        ratios.append(took[bare] / took[ours])
    passes = backbone.passes
    for i in range(HEADS):
        rewards.rewards(f"head{i}", calls)
    return {
        "texts": texts,
        "tokens": tokens,
        "texts_per_cpu_second": {n: round(size * len(t) / sum(t), 1) for n, t in seconds.items()},
        "throughput_over_bare": spread(ratios),
        "passes": passes,
        f"passes_with_{HEADS}_heads": backbone.passes,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {
        "median": round(statistics.median(values), 3),
        "least": round(min(values), 3),
        "largest": round(max(values), 3),
        "repeats": len(values),
    }


# --- memory of training ----------------------------------------------------------------------------------


def training_pairs(count: int) -> PairTexts:
    """Return pairs of distinct texts, of which a tenth decides when to stop."""
    rng = generator("training", count)
    chosen, rejected = (
        tuple(Reading("", f"answer: {sentence(rng, 2, 6)}", {}, "") for _ in range(count))
        for _ in range(2)
    )
    names = tuple(f"e{i}" for i in range(count))
    ones = (1.0,) * count
    roles = tuple[Role, ...]("tune" if i % 10 == 0 else "fit" for i in range(count))
    return PairTexts("a", chosen, rejected, names, ones, roles)


def peak(count: int, batch: int) -> dict[str, float]:
    """Train one epoch in this process; return the peak resident memory before and after, in MB."""
    import torch

    from compound.rewards.backbone import Backbone
    from compound.rewards.fit import train
    from compound.rewards.settings import BackboneLoRASettings

    torch.set_num_threads(1)
    backbone = Backbone("minilm")
    backbone.embed([("", "a text to warm up")])
    texts = training_pairs(count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    curve = train(backbone, [texts], BackboneLoRASettings(epochs=1, batch=batch), seed=0)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"before": round(before, 1), "after": round(after, 1), "steps": curve.losses[-1][0]}


def training(sizes: Sequence[int], batch: int, repeats: int) -> dict[str, object]:
    """Return the peak memory of training on buffers of several sizes, each in new processes."""

    def one(count: int) -> dict[str, float]:
        script = "benchmarks.measure.rewards_speed"
        command = [sys.executable, "-m", script, "--peak", str(count), str(batch)]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        found: dict[str, float] = json.loads(ran.stdout)
        return found

    with ThreadPoolExecutor(2) as pool:
        measured = list(pool.map(one, [count for count in sizes for _ in range(repeats)]))
    rows: list[dict[str, object]] = []
    peaks: list[dict[str, float]] = []
    for place, count in enumerate(sizes):
        made = measured[place * repeats : (place + 1) * repeats]
        added = [run["after"] - run["before"] for run in made]
        peaks.append(spread([run["after"] for run in made]))
        rows.append(
            {
                "pairs": count,
                "steps": made[0]["steps"],
                "peak_mb": peaks[-1],
                "peak_mb_added_by_training": spread(added),
            }
        )
    return {
        "batch": batch,
        "buffers": rows,
        "peak_ratio": round(peaks[-1]["median"] / peaks[0]["median"], 3),
    }


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", help="measure only this part, and keep the others")
    parser.add_argument("--peak", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print(json.dumps(peak(*args.peak)))
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parts: dict[str, Callable[[], object]] = {
        "pairs_on_a_chain_of_5": lambda: {
            "two_rollouts": pairs(*TWO_ROLLOUTS),
            "until_decided": pairs(*UNTIL_DECIDED),
        },
        "training_memory": lambda: training((200, 2_000), 16, args.repeats),
        "scoring": lambda: scoring(args.texts, args.blocks),
    }
    kept = json.loads(OUTPUT.read_text("utf-8")) if args.only else {}
    found: dict[str, object] = {"machine": platform.machine(), "python": platform.python_version()}
    for name, part in parts.items():
        found[name] = part() if args.only in (None, name) else kept[name]
    text = json.dumps(found, indent=2)
    print(text)
    OUTPUT.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
