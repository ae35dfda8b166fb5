"""Measure the time of a training step in several processes and launchers, and of a checkpoint, on the CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.measure.training.learner_processes [PART ...]

- ``processes``: the same step of a random Llama (4 layers of width 256, 40,000 words, float32) on
  16 sequences of 192 + 16 tokens, four to a prompt, by one process and by two (data parallel, and
  with the layers of the base model divided, FSDP2), each with one thread.
- ``machines``: steps of one launcher with one process on 16 sequences, and of two launchers with
  one process each on 32, so that each process has equal work. Each launcher is pinned to a core; the
  second is the command for other machines, on loopback.
- ``checkpoint``: the seconds that a step waits for a checkpoint of an adapter and its optimizer states
  of 1 GB, and the seconds in which a thread brings it from the memory of the system to the disk.

All learners are open at once, and the steps alternate ``TURNS`` times, in reverse order every other
turn, so that other load affects all equally. A ratio belongs to one turn; over all turns the
median, the minimum and the maximum are reported. The time of a message with the samples of a step
is measured, too. No GPU is used. Results are written to
``benchmarks/data/learner_processes.json``, with the machine's load.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.measure.training.weights_speed import LOSS, samples
from benchmarks.simulated.toy_model import make_toy_model
from compound.core.storage.artifacts import sync
from compound.engines.local.devices import Placement
from compound.execution.rng import fork_torch_rng
from compound.graph.space import ATTENTION, Weights
from compound.optimizers.weights.distributed.learner import KEY, open_trainer
from compound.optimizers.weights.distributed.node import COMMAND
from compound.optimizers.weights.distributed.processes import Learner, Processes, ShardedLearner
from compound.optimizers.weights.distributed.worker import LOOPBACK
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
RANK = 4_228  # of an adapter that takes 1 GB with its optimizer states


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


def measure_processes(model: Path) -> dict[str, object]:
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

    seconds = alternate({name: (learner, rows) for name, learner in learners.items()})
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


def alternate(learners: dict[str, tuple[Learner, Sequence[Sample]]]) -> dict[str, list[float]]:
    """Return the seconds of alternating steps of learners on their samples."""
    for learner, rows in learners.values():
        learner.step(rows, 0)  # the first step allocates memory
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for turn in range(TURNS):
        for name in reversed(learners) if turn % 2 else learners:
            learner, rows = learners[name]
            started = time.perf_counter()
            learner.step(rows, 0)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def measure_machines(model: Path) -> dict[str, object]:
    """Return the seconds of steps with equal work for each process, by launchers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    os.environ |= {KEY: secrets.token_hex(), "GLOO_SOCKET_IFNAME": LOOPBACK}
    cores = os.sched_getaffinity(0)
    first, second = sorted(cores)[:2]
    command = ["taskset", "-c", str(second), sys.executable, *COMMAND.split()[1:], address]
    few = [replace(s, on_policy=False) for s in samples(PROMPT, ANSWER, GROUPS, EACH)]
    many = [replace(s, on_policy=False) for s in samples(PROMPT, ANSWER, 2 * GROUPS, EACH)]
    os.sched_setaffinity(0, {first})  # and the processes that it starts
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as other:
        one = ShardedLearner(Processes(1), spec(model))
        both = Processes(1, machines=2, address=address, model=str(model), folder=model)
        two = ShardedLearner(both, spec(model))
        seconds = alternate({"1 launcher": (one, few), "2 launchers": (two, many)})
        one.close()
        two.close()
        other.terminate()
    os.sched_setaffinity(0, cores)
    return {"seconds": seconds, "load": list(os.getloadavg()), "nice": os.nice(0)}


def measure_checkpoint(model: Path) -> dict[str, object]:
    """Return the seconds of saving 1 GB into the memory of the system, and of bringing it to the disk."""
    given = spec(model)
    shapes = {"x": Weights(rank=RANK, alpha=RANK, targets="all-linear")}
    trainer = open_trainer(given.model_copy(update={"shapes": shapes}))
    rows = [replace(s, on_policy=False) for s in samples(16, 4, 1, 2)]
    found: dict[str, list[float]] = {"save": [], "sync": []}
    with tempfile.TemporaryDirectory(dir=model.parent) as name:
        folder = Path(name)
        for number in range(TURNS):
            trainer.step(rows, number)
            started = time.perf_counter()
            saved = trainer.save(folder)
            stored = [saved.optimizers, *filter(None, saved.adapters.values())]
            paths = [folder / each["path"] for each in stored]
            ended = time.perf_counter()
            sync(*paths)
            found["save"].append(ended - started)
            found["sync"].append(time.perf_counter() - ended)
            size = sum(file.stat().st_size for path in paths for file in path.iterdir())
            for path in paths:
                shutil.rmtree(path)
    return {"bytes": size, "seconds": found, "load": list(os.getloadavg())}


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


def main() -> None:
    """Measure the parts that are named, and add them to the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    found = json.loads(OUTPUT.read_text(encoding="utf-8"))
    for part in parser.parse_args().parts:
        with tempfile.TemporaryDirectory() as folder:
            result = PARTS[part](random_model(Path(folder) / "model"))
        found |= result if part == "processes" else {part: result}
        OUTPUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


PARTS = {
    "processes": measure_processes,
    "machines": measure_machines,
    "checkpoint": measure_checkpoint,
}

if __name__ == "__main__":
    main()
