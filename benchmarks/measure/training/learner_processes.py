"""Measure the time of a training step in one process and in several, on the CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.measure.training.learner_processes

The same step of a random Llama (4 layers of width 256, 40,000 words, float32) on 16 sequences of
192 + 16 tokens, four to a prompt, is computed by one process and by two processes (data parallel,
and with the layers of the base model divided, FSDP2), each with one thread. All learners are open
at once, and the steps alternate ``TURNS`` times, in reverse order every other turn, so that other
load affects all equally. A ratio belongs to one turn; over all turns the median, the minimum and
the maximum are reported. The time of a message with the samples of a step is measured, too. No GPU
is used. Results are written to ``benchmarks/data/learner_processes.json``, with the machine's load
at the end.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.measure.training.weights_speed import LOSS, samples
from benchmarks.simulated.toy_model import make_toy_model
from compound.engines.local.devices import Placement
from compound.execution.rng import fork_torch_rng
from compound.graph.space import ATTENTION, Weights
from compound.optimizers.weights.distributed.learner import open_trainer
from compound.optimizers.weights.distributed.processes import Learner, Processes, ShardedLearner
from compound.optimizers.weights.learner.samples import (
    Sample,
    SamplingSettings,
    samples_from_json,
    samples_to_json,
)
from compound.optimizers.weights.learner.trainer import LearnerSpec
from compound.optimizers.weights.learner.updates import OptimizerSettings

OUTPUT = Path(__file__).parents[2] / "data" / "learner_processes.json"
TURNS = 15
PROMPT, ANSWER, GROUPS, EACH = 192, 16, 4, 4
BASIS = "1 process"


def random_model(folder: Path) -> Path:
    """Save a random model with the tokenizer of the toy tasks, and return its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    make_toy_model(folder)
    config = LlamaConfig(
        vocab_size=40_000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    with fork_torch_rng(0, "model"):
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def spec(model: Path) -> LearnerSpec:
    """Return the declaration of the learner that is measured."""
    return LearnerSpec(
        model=str(model),
        shapes={"x": Weights(rank=16, alpha=32, targets=ATTENTION)},
        adapter_of={"x": "x"},
        loss=LOSS,
        optimizer=OptimizerSettings(micro_tokens=256),
        rollouts=SamplingSettings(),
        section="optimize.mmgrpo",
        placement=Placement("cpu", "float32"),
    )


def measure(model: Path) -> dict[str, object]:
    """Return the seconds of every step by learner, and those of a message."""
    import torch

    torch.set_num_threads(1)
    rows = [replace(s, on_policy=False) for s in samples(PROMPT, ANSWER, GROUPS, EACH)]
    alone, groups = open_trainer(spec(model)), [Processes(2), Processes(2)]
    learners: dict[str, Learner] = {
        BASIS: alone,
        "2 processes": ShardedLearner(groups[0], spec(model)),
        "2 processes, fsdp": ShardedLearner(groups[1], spec(model), sharding="fsdp"),
    }

    def step(name: str) -> float:
        started = time.perf_counter()
        learners[name].step(rows, 0)
        return time.perf_counter() - started

    for name in learners:
        step(name)  # the first step allocates memory
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for turn in range(TURNS):
        for name in reversed(learners) if turn % 2 else learners:
            seconds[name].append(step(name))
    for learner in learners.values():
        if learner is not alone:
            learner.close()
    tokens = sum(s.length for s in rows) + PROMPT * GROUPS
    return {
        "seconds": seconds,
        "tokens": tokens,
        "message": {"bytes": len(message(rows)), "seconds": timed(lambda: sent_and_read(rows))},
        "cores": len(os.sched_getaffinity(0)),
        "load": list(os.getloadavg()),
        "torch": torch.__version__,
        "gpu": False,
    }


def message(rows: Sequence[Sample]) -> bytes:
    """Return the message with the samples of a step."""
    return json.dumps(samples_to_json(rows)).encode()


def sent_and_read(rows: Sequence[Sample]) -> None:
    """Encode samples, and read them as each process does."""
    samples_from_json(json.loads(message(rows)))


def timed(run: Callable[[], object]) -> float:
    """Return the median seconds of some runs."""
    seconds = []
    for _ in range(TURNS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = measure(random_model(Path(folder)))
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
