"""The toy tasks: their optimum, their chance level, and the vocabulary of the toy model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compound as cp
from benchmarks.simulated import toys
from benchmarks.simulated.toy_model import (
    ANIMALS,
    ANSWER,
    ASK,
    NOTHING,
    SAID,
    VOCABULARY,
)
from benchmarks.simulated.toys import Toy, place_of, toy
from compound.core.example import Example
from compound.testing import ScriptedLM

NAMES = ("chain", "conversation", "planning")
LM = "local/toy"


def fields(message: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in message.splitlines() if ": " in line)


def perfect(message: str) -> str:
    shown = fields(message)
    if "Fact" in shown:
        return place_of(shown["Fact"])
    if "Heard" in shown:
        animals = [word for word in shown["Heard"].split() if word in ANIMALS]
        return (
            f"{ANSWER} {place_of(shown['Word'])} {place_of(animals[0])}"
            if animals
            else f"{ASK} north"
        )
    if "Found" in shown:
        found = [word for word in shown["Found"].split() if word != NOTHING]
        places = [place_of(colour) for colour in shown["Word"].split()]
        return " ".join([ANSWER, *found] if found else [ASK, *places])
    return place_of(shown["Word"])


def play(task: Toy, reply: Callable[..., str], repeats: int = 1, split: str = "all") -> Any:
    lm = ScriptedLM(reply)  # a reply that draws has a stream for each sample, at any temperature
    examples = {"train": task.train, "all": [*task.train, *task.valid, *task.test]}[split]
    evaluation = evaluate(task, examples, lm, repeats)
    return evaluation, lm


def evaluate(task: Toy, examples: list[Example], lm: ScriptedLM, repeats: int) -> Any:
    from compound.evaluation.evaluate import EvaluationRules
    from compound.evaluation.evaluate import evaluate as run

    samples, rules = range(repeats), EvaluationRules(cache=False)
    executor = cp.Executor({LM: lm})
    return asyncio.run(
        run(executor, task.system, examples, task.metric, samples=samples, rules=rules)
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_perfect_player_reaches_the_optimum(name: str) -> None:
    task = toy(name, LM)
    evaluation, _ = play(task, perfect)
    assert evaluation.failed == 0
    assert set(evaluation.scores) == {task.optimum} == {1.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_chance_is_what_random_words_earn(name: str) -> None:
    task = toy(name, LM)

    def random(message: str, rng: np.random.Generator) -> str:
        return " ".join(rng.choice(SAID, size=3))

    evaluation, _ = play(task, random, repeats=30, split="train")
    spread = np.std([row.score for row in evaluation.rows]) / len(evaluation.rows) ** 0.5
    assert evaluation.failed == 0
    assert abs(evaluation.mean - task.chance) < 4 * spread
    assert 0.1 < task.chance < 0.4


def test_splits_differ_by_id_and_components_to_train_have_weights() -> None:
    for name in NAMES:
        task = toy(name, LM)
        ids = [e.id for e in (*task.train, *task.valid, *task.test)]
        assert len(set(ids)) == len(ids)
        assert {f"{component}.weights" for component in task.trained} == set(task.system.parameters)
        assert 8 <= len(task.train) <= 72
        assert toy(name, LM).train == task.train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return toys.make_toy_model(tmp_path_factory.mktemp("toy") / "model")


def test_the_model_is_the_same_for_a_seed(folder: Path, tmp_path: Path) -> None:
    again, other = toys.make_toy_model(tmp_path / "a"), toys.make_toy_model(tmp_path / "b", seed=1)
    weights = [(place / "model.safetensors").read_bytes() for place in (folder, again, other)]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize("name", NAMES)
def test_prompts_hold_no_unknown_word(folder: Path, name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def anything(message: str, rng: np.random.Generator) -> str:
        return " ".join(rng.choice(VOCABULARY[2:], size=3))

    requests = [
        r for player in (perfect, anything) for r in play(toy(name, LM), player)[1].requests
    ]
    for request in requests:
        turns = [{"role": m.role, "content": m.text} for m in request.messages]
        text = (
            tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            + request.cue
        )
        assert tokenizer.unk_token_id not in tokenizer(text, add_special_tokens=False).input_ids, (
            text
        )
    assert len(requests) > 30
