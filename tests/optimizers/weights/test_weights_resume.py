"""Killed while it samples, trains or stores, a training of weights goes on to the end it would have had."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from compound.optimization.runs.directory import read_records

ROOT = Path(__file__).parents[3]

PROGRAM = '''
"""Trains in a child for each line of standard input: a folder, a method, and where to die."""

import asyncio, json, os, signal, sys, warnings
from pathlib import Path

warnings.simplefilter("ignore")
import peft, torch, transformers
import compound.report
from compound.optimization.runs import directory as store
from benchmarks.simulated.toys import make_toy_model, toy
from compound.engines.local.engine import TransformersEngine
from compound.evaluation.dataset import Dataset
from compound.core.errors import RunDirectoryError
from compound.optimizers.weights.learner import adapters
from compound.optimizers.weights.learner import trainer
from compound.api.optimize import run_optimization
from compound.optimization.settings.optimize import make_settings
from training_settings import trainings

os.fsync = compound.report.write = lambda _: None
MODEL = make_toy_model(Path(sys.argv[1]))


def rows(examples):
    return [{"id": e.id, **e.inputs, **e.gold} for e in examples]


def dying(owner, name, nth, after):
    """Let the n-th call of a function be the last thing this process does."""
    original, made = getattr(owner, name), [0]

    def patched(*arguments, **named):
        made[0] += 1
        if made[0] == nth and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = original(*arguments, **named)
        if made[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, patched)


def full(nth):
    """Let the n-th optimizer states find no room, half written."""
    original, made = trainer.Trainer._write, [0]

    def patched(self, folder):
        made[0] += 1
        if made[0] == nth:
            (folder / "state.safetensors").write_bytes(b"the beginning")
            raise OSError(28, "No space left on device")
        original(self, folder)

    trainer.Trainer._write = patched


PLACES = {
    "a full disk": lambda: full(2),
    "sampling": lambda: dying(TransformersEngine, "_answer", 5, True),
    "training": lambda: dying(trainer.Trainer, "_loss", 4, True),
    "an adapter": lambda: dying(adapters.Adapters, "_probe", 4, False),
    "optimizer states": lambda: dying(trainer.Trainer, "_write", 2, True),
    "before the checkpoint": lambda: dying(store.RunDirectory, "checkpoint", 4, False),
    "after the checkpoint": lambda: dying(store.RunDirectory, "checkpoint", 4, True),
    "": lambda: None,
}


def train(folder, method, place):
    torch.set_num_threads(1)
    PLACES[place]()
    task = toy("chain", str(MODEL))
    data = Dataset.of(train=rows(task.train), valid=rows(task.valid), test=rows(task.test[:2]))
    weights = {"steps": 3, "examples": 4, "runs": 4, "lr": 0.01, "minibatches": 2}
    method, _, how = method.partition(" ")
    evaluated = {"evaluation__every": 1, "evaluation__examples": 4}
    weights |= {"ahead": {"max_staleness": 1}, "evaluated": evaluated}.get(how, {})
    weights |= {"adapter": {"critic__adapter": {"rank": 4}, "critic__lr": 0.01}}.get(how, {})
    staged = {"better_together": {"stages": ["mhgpo_fof", "mmgrpo"]}}
    sections = trainings(**weights)
    settings = make_settings({"method": method, "valid_size": None, **sections, **staged})
    engine = TransformersEngine(str(MODEL), dtype="float32", deterministic=True)
    run_optimization(task.system, data, task.metric, settings, run_dir=folder, engines=lambda _: engine)


for line in sys.stdin:
    folder, method, place = json.loads(line)
    child = os.fork()
    if not child:
        try:
            train(folder, method, place)
        except RunDirectoryError as error:
            os._exit(3 if "no space left on the disk" in str(error) else 1)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(json.dumps(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)), flush=True)
'''
PLACES = (
    "sampling",
    "training",
    "an adapter",
    "optimizer states",
    "before the checkpoint",
    "after the checkpoint",
)
PROCESS = (
    "memory",
    "prompt_tokens",
    "prompt_tokens_cached",
)  # what this process took, calls in its cache not
Train = Callable[..., int]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Train]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("model"))]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}",
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdin
        assert process.stdout
        given, told = process.stdin, process.stdout

        def run(folder: Path, method: str, place: str = "") -> int:
            given.write(json.dumps([str(folder), method, place]) + "\n")
            given.flush()
            return int(json.loads(told.readline()))

        yield run
        given.close()


def ended(folder: Path) -> dict[str, Any]:
    """Return what a run came to, less the time it took."""
    events = [
        {key: value for key, value in event.items() if key not in ("at", "spent")}
        for event in read_records(folder / "events.jsonl")
    ]
    steps = [
        {
            key: value
            for key, value in record.items()
            if not key.endswith("_seconds") and key not in PROCESS
        }
        for record in read_records(folder / "memory.jsonl")
    ]
    spent = list(read_records(folder / "events.jsonl"))[-1]["spent"]
    best = json.loads((folder / "best.json").read_text())["values"]
    return {
        "events": events,
        "steps": steps,
        "best": best,
        "spent": {key: value for key, value in spent.items() if key != "seconds"},
    }


@pytest.fixture(scope="module")
def whole(
    train: Train, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """Return what a method comes to when nobody kills it."""
    known: dict[str, dict[str, Any]] = {}

    def run(method: str) -> dict[str, Any]:
        if method not in known:
            folder = tmp_path_factory.mktemp("whole") / "run"
            assert train(folder, method) == 0
            known[method] = ended(folder)
        return known[method]

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "place"),
    [
        *(("mmgrpo", place) for place in PLACES),
        *(
            ("mmgrpo ahead", place)
            for place in ("training", "optimizer states", "after the checkpoint")
        ),
        *(("mmgrpo evaluated", place) for place in ("an adapter", "before the checkpoint")),
        ("mappo adapter", "optimizer states"),
    ],
)
def test_a4_killed_anywhere_it_goes_on_to_the_same_weights(
    method: str, place: str, train: Train, whole: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    assert train(tmp_path / "run", method, place) == -signal.SIGKILL
    assert train(tmp_path / "run", method) == 0
    expected = whole(method)
    assert len(expected["steps"]) == 3
    assert expected["best"] or expected["events"]
    assert ended(tmp_path / "run") == expected


def test_sampling_ahead_is_another_training(whole: Callable[[str], dict[str, Any]]) -> None:
    assert whole("mmgrpo ahead")["steps"] != whole("mmgrpo")["steps"]


@pytest.mark.slow
def test_a_full_disk_loses_nothing(
    train: Train, whole: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    assert train(tmp_path / "run", "mmgrpo", "a full disk") == 3
    assert train(tmp_path / "run", "mmgrpo") == 0
    assert ended(tmp_path / "run") == whole("mmgrpo")


@pytest.mark.slow
@pytest.mark.user_cache
@pytest.mark.parametrize("method", ["mappo", "mhgpo_rr", "mygo", "better_together"])
def test_other_methods_go_on_to_the_same_weights(
    method: str, train: Train, whole: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    assert train(tmp_path / "run", method, "optimizer states") == -signal.SIGKILL
    assert train(tmp_path / "run", method) == 0
    assert ended(tmp_path / "run") == whole(method)
