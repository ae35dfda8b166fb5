"""Measure the time of a training step in one process and in several, on the CPU.

    OMP_NUM_THREADS=1 python -m compound.benchmarks.measure.learner_processes

The same step on 32 sequences of 192 + 32 tokens is computed by one process with one thread, by two processes
with one thread each (data parallel, and with the layers of the base model divided, FSDP2), and by one process
with two threads. All learners are open at once, and the steps alternate ``TURNS`` times, in reverse order
every other turn, so that other load affects all equally. A ratio belongs to one turn; over all turns the
median, the minimum and the maximum are reported. The time of a message with the samples of a step is
measured, too. No GPU is used. Results are written to ``benchmarks/data/learner_processes.json``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from compound.benchmarks.measure.weights_speed import LOSS, samples
from compound.components.engines.local import loading
from compound.components.engines.local.devices import Placement
from compound.graph.space import ATTENTION
from compound.optimizers.weights.distributed.messages import encode, samples_from_json, samples_to_json
from compound.optimizers.weights.distributed.processes import Processes
from compound.optimizers.weights.distributed.sharded import ShardedLearner
from compound.optimizers.weights.learner.learner import AdapterShape, Learner, LearnerSpec, open_trainer
from compound.optimizers.weights.learner.samples import Sample, SamplingSettings
from compound.optimizers.weights.learner.updates import OptimizerSettings

OUTPUT = Path(__file__).parents[1] / "data" / "learner_processes.json"
TURNS = 7
PROMPT, ANSWER, GROUPS, EACH = 192, 32, 8, 4
BASIS = "1 process"


def spec() -> LearnerSpec:
    """Return the declaration of the learner that is measured."""
    return LearnerSpec(
        model="smollm2",
        shapes={"x": AdapterShape(rank=16, alpha=32, targets=ATTENTION)},
        adapter_of={"x": "x"},
        policy=LOSS,
        optimizer=OptimizerSettings(micro_tokens=1024),
        rollouts=SamplingSettings(),
        section="optimize.mmgrpo",
        placement=Placement("cpu", loading.dtype_of(Placement("cpu"))),
    )


def measure() -> dict[str, object]:
    """Return the seconds of every step by learner, and those of a message."""
    torch.set_num_threads(1)
    rows = [replace(s, on_policy=False) for s in samples(PROMPT, ANSWER, GROUPS, EACH)]
    alone, groups = open_trainer(spec()), [Processes(2), Processes(2)]
    learners: dict[str, tuple[Learner, int]] = {
        BASIS: (alone, 1),
        "2 processes": (ShardedLearner(groups[0], spec()), 1),
        "2 processes, fsdp": (ShardedLearner(groups[1], spec(), sharding="fsdp"), 1),
        "1 process, 2 threads": (alone, 2),
    }

    def step(name: str) -> float:
        learner, threads = learners[name]
        torch.set_num_threads(threads)
        started = time.perf_counter()
        learner.step(rows, 0)
        return time.perf_counter() - started

    for name in learners:
        step(name)  # the first step allocates memory
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for turn in range(TURNS):
        for name in reversed(learners) if turn % 2 else learners:
            seconds[name].append(step(name))
    for learner, _ in learners.values():
        if learner is not alone:
            learner.close()
    tokens = sum(s.length for s in rows) + PROMPT * GROUPS
    return {
        "seconds": seconds,
        "tokens": tokens,
        "message": {"bytes": len(message(rows)), "seconds": timed(lambda: sent_and_read(rows))},
        "dtype": spec().placement.dtype,
        "cores": len(os.sched_getaffinity(0)),
        "load": list(os.getloadavg()),
        "torch": torch.__version__,
        "gpu": False,
    }


def message(rows: Sequence[Sample]) -> bytes:
    """Return the message with the samples of a step."""
    return encode({"action": "step", "arguments": {"samples": samples_to_json(rows)}})


def sent_and_read(rows: Sequence[Sample]) -> None:
    """Encode samples, and read them as each process does."""
    samples_from_json(json.loads(message(rows)[8:])["arguments"]["samples"])


def timed(run: Callable[[], object]) -> float:
    """Return the median seconds of some runs."""
    seconds = []
    for _ in range(TURNS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


if __name__ == "__main__":
    found = measure()
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
