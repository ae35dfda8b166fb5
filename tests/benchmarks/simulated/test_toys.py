"""The toy tasks: their optimum, their chance level, and the vocabulary of the toy model."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compound as cp
from compound.benchmarks.simulated import toys
from compound.benchmarks.simulated.toy_model import (
    ANIMALS,
    ANSWER,
    ASK,
    COLOURS,
    NOTHING,
    PLACES,
    SAID,
    VOCABULARY,
)
from compound.benchmarks.simulated.toys import Toy, place_of, read_plan, read_turn, toy
from compound.engine import Completion, Message, Request
from compound.errors import DeclarationError
from compound.example import Example
from compound.narrowing import entry
from compound.testing import ScriptedLM

NAMES = ("chain", "conversation", "planning")
LM = "local/toy"


def fields(message: str) -> dict[str, str]:
    """Return the labelled lines of a prompt."""
    return dict(line.split(": ", 1) for line in message.splitlines() if ": " in line)


def perfect(message: str) -> str:
    """Play without a mistake."""
    shown = fields(message)
    if "Fact" in shown:
        return place_of(shown["Fact"])
    if "Heard" in shown:
        animals = [word for word in shown["Heard"].split() if word in ANIMALS]
        return f"{ANSWER} {place_of(shown['Word'])} {place_of(animals[0])}" if animals else f"{ASK} north"
    if "Found" in shown:
        found = [word for word in shown["Found"].split() if word != NOTHING]
        places = [place_of(colour) for colour in shown["Word"].split()]
        return " ".join([ANSWER, *found] if found else [ASK, *places])
    return place_of(shown["Word"])


def play(task: Toy, reply: Callable[..., str], repeats: int = 1, split: str = "all") -> Any:
    """Evaluate a player; agents are as random as the player."""
    lm = ScriptedLM(reply)  # a reply that draws has a stream for each sample, at any temperature
    examples = {"train": task.train, "all": [*task.train, *task.valid, *task.test]}[split]
    evaluation = evaluate(task, examples, lm, repeats)
    return evaluation, lm


def evaluate(task: Toy, examples: list[Example], lm: ScriptedLM, repeats: int) -> Any:
    from compound.evaluation.evaluate import EvaluationRules
    from compound.evaluation.evaluate import evaluate as run

    samples, rules = range(repeats), EvaluationRules(cache=False)
    executor = cp.Executor({LM: lm})
    return asyncio.run(run(executor, task.system, examples, task.metric, samples=samples, rules=rules))


# --- the tasks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_perfect_player_reaches_the_optimum(name: str) -> None:
    task = toy(name, LM)
    evaluation, _ = play(task, perfect)
    assert evaluation.failed == 0
    assert set(evaluation.scores) == {task.optimum} == {1.0}


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


def scored(task: toys.Toy, outputs: Mapping[str, object], example: cp.Example) -> float:
    score = task.metric.score(outputs, example)
    assert isinstance(score, cp.Score)
    return score.value


def test_the_chance_of_a_conversation_is_exact() -> None:
    task = toy("conversation", LM)
    example = task.train[0]
    said = [" ".join(words) for words in itertools.product(SAID, repeat=3)]
    endings = [text for text in said if text.startswith(ANSWER)]
    kinds = {"ask north east": 36, "north east west": 144}  # all that ask, and all that do neither

    def expected(turns: list[str]) -> float:
        def worth(text: str) -> float:
            after = [*turns, text]
            if text.startswith(ANSWER) or len(after) == toys.TURNS:
                return scored(task, {"said": after}, example)
            return expected(after)

        return (sum(map(worth, endings)) + sum(n * worth(text) for text, n in kinds.items())) / len(said)

    assert expected([]) == pytest.approx(task.chance, abs=5e-5)


def test_the_chance_of_planning_is_exact() -> None:
    task = toy("planning", LM)
    example = task.train[0]
    wanted = set(entry(example.gold, "asked", list))
    said = [read_plan(" ".join(words)) for words in itertools.product(SAID, repeat=3)]
    other = next(place for place in PLACES if place not in wanted)
    kinds: Counter[Any] = Counter()
    for plan in said:
        asked = frozenset(place if place in wanted else other for place in entry(plan, "questions", list))
        kinds[asked, plan["answer"], plan["over"]] += 1

    def expected(asked: frozenset[str], turn: int) -> float:
        total = 0.0
        for (more, answer, over), n in kinds.items():
            if over or turn == toys.TURNS:
                outputs = {"asked": sorted(asked | more), "answer": answer, "found": NOTHING}
                lucky = bool(asked | more) / len(SAID) / 3  # a worker that says any word
                total += n * (scored(task, outputs, example) + lucky)
            else:
                total += n * expected(asked | more, turn + 1)
        return total / len(said)

    assert expected(frozenset(), 1) == pytest.approx(task.chance, abs=5e-5)


@pytest.mark.parametrize("wrong", ["Word: red", "Word: cat", "Word: pear"])
def test_a_wrong_word_in_the_chain_costs_a_third(wrong: str) -> None:
    task = toy("chain", LM)
    example = Example("e", {"colour": "red", "animal": "cat", "fruit": "pear"}, {"said": ["north"] * 3})
    lm = ScriptedLM(lambda message: "south" if message.strip().startswith(wrong) else "north")
    trace = cp.run(task.system, example.inputs, engines={LM: lm})
    score: Any = task.metric.score(trace.outputs, example)
    assert score.value == pytest.approx(2 / 3)
    assert sorted(score.parts.values()) == [0.0, 1.0, 1.0]


def test_agents_of_the_chain_read_what_the_one_before_said() -> None:
    _, lm = play(toy("chain", LM), lambda message: "west" if "red" in message else "north", split="train")
    shown = [fields(request.messages[-1].text) for request in lm.requests]
    assert {before for prompt in shown if (before := prompt.get("Before"))} == {"west", "north"}
    assert {len(prompt) for prompt in shown} == {1, 2}


def test_an_answer_without_a_question_is_worth_less_than_a_question_alone() -> None:
    task = toy("conversation", LM)
    example = task.train[0]
    right = f"{ANSWER} {example.gold['answer']}"

    def worth(*said: str) -> float:
        return scored(task, {"said": list(said)}, example)

    found = [worth("north"), worth(right), worth("ask north"), worth("ask north", "answer ask")]
    assert found == pytest.approx([0.0, 0.2, 0.3, 0.5])
    assert worth("ask north", right) == 1.0
    assert worth("ask north", "ask north", "ask north") == pytest.approx(0.3)


def test_the_environment_answers_only_questions() -> None:
    task = toy("conversation", LM)
    replies = iter(["north east west", "ask", "ask ask", "answer west"])
    lm = ScriptedLM(lambda message: next(replies))
    cp.run(task.system, {"colour": "red", "animal": "hen"}, engines={LM: lm})
    heard = [fields(request.messages[-1].text)["Heard"] for request in lm.requests]
    assert heard == ["nothing", "nothing nothing", "nothing nothing nothing"]
    lm = ScriptedLM(lambda message: "answer" if "hen" in message else "ask ask")
    trace = cp.run(task.system, {"colour": "red", "animal": "hen"}, engines={LM: lm})
    assert trace.outputs["said"] == ["ask ask", "answer"]


def test_colours_say_nothing_about_what_is_found() -> None:
    conversation, planning = toy("conversation", LM), toy("planning", LM)
    for colour in COLOURS:
        animals = {e.inputs["animal"] for e in conversation.train if e.inputs["colour"] == colour}
        assert len(animals) == 3
    answers: dict[str, set[str]] = {}
    for example in planning.train:
        colours, answer = entry(example.inputs, "colours", str), entry(example.gold, "answer", str)
        answers.setdefault(colours, set()).add(answer)
    assert len(answers) == 6
    assert all(len(found) >= 6 for found in answers.values())


def test_planners_that_do_not_ask_earn_nothing() -> None:
    task = toy("planning", LM)
    for example in task.train:
        outputs = {"asked": [], "answer": example.gold["answer"], "found": NOTHING}
        assert scored(task, outputs, example) == 0.0


def test_each_part_of_planning_counts_a_third() -> None:
    task = toy("planning", LM)
    example = task.train[0]
    asked, answer = example.gold["asked"], entry(example.gold, "answer", str)
    wrong = next(place for place in PLACES if place not in answer)

    def worth(found: str, answer: str) -> float:
        outputs = {"asked": asked, "answer": answer, "found": found}
        return scored(task, outputs, example)

    first, second = answer.split()
    assert worth(f"{NOTHING} {first} {second}", answer) == pytest.approx(1.0)
    assert worth(f"{NOTHING} {second} {first}", answer) == pytest.approx(2 / 3)
    assert worth(f"{NOTHING} {first} {wrong}", wrong) == pytest.approx(1 / 2)
    assert worth(f"{NOTHING}  {second}", "") == pytest.approx(1 / 2)  # a worker that said nothing


def test_workers_run_concurrently() -> None:
    task = toy("planning", LM)
    lm = ScriptedLM(perfect, latency=0.001)
    trace = cp.run(task.system, task.train[0].inputs, engines={LM: lm})
    asked = [call.address for call in trace.calls if call.component == "worker"]
    assert asked == ["solve[0]/workers[0]/worker", "solve[0]/workers[1]/worker"]
    assert lm.most_in_flight == 2


def test_splits_differ_by_id_and_components_to_train_have_weights() -> None:
    for name in NAMES:
        task = toy(name, LM)
        ids = [e.id for e in (*task.train, *task.valid, *task.test)]
        assert len(set(ids)) == len(ids)
        assert {f"{component}.weights" for component in task.trained} == set(task.system.parameters)
        assert 8 <= len(task.train) <= 72
        assert toy(name, LM).train == task.train


def test_an_unknown_toy_is_refused_with_the_nearest() -> None:
    with pytest.raises(DeclarationError, match="no toy 'chian'; did you mean 'chain'"):
        toy("chian", LM)


@pytest.mark.parametrize("text", ["", "north", "answer", "ask", "answer ask ask", "west answer ask"])
def test_any_answer_of_a_model_is_parsed(text: str) -> None:
    plan, turn = read_plan(text), read_turn(text)
    assert plan["over"] == text.startswith(ANSWER)
    assert bool(turn.answer) == (plan["answer"] != "")


# --- the model -------------------------------------------------------------------------------------------


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

    requests = [r for player in (perfect, anything) for r in play(toy(name, LM), player)[1].requests]
    for request in requests:
        turns = [{"role": m.role, "content": m.text} for m in request.messages]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) + request.cue
        assert tokenizer.unk_token_id not in tokenizer(text, add_special_tokens=False).input_ids, text
    assert len(requests) > 30


def test_every_word_is_one_token_and_comes_back(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [tokenizer(word).input_ids for word in VOCABULARY] == [[i] for i in range(len(VOCABULARY))]
    assert tokenizer.decode(tokenizer("ask north west").input_ids) == "ask north west"


def test_the_base_model_says_the_words_about_equally_often(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    from compound.components.engines.local.engine import TransformersEngine

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lm = TransformersEngine(str(folder), dtype="float32")
    prompt = (Message("user", "Word: red\nHeard: nothing"),)
    requests = [Request(prompt, max_tokens=3, temperature=1.0, seed=i, cue="Say:") for i in range(200)]

    async def ask() -> list[Completion]:
        try:
            return list(await asyncio.gather(*(lm.generate(request) for request in requests)))
        finally:
            await lm.aclose()

    words = Counter(word for completion in asyncio.run(ask()) for word in completion.text.split())
    torch.set_num_threads(threads)
    total = words.total()
    assert sum(words[word] for word in SAID) > 0.95 * total
    assert all(0.05 < words[word] / total < 0.4 for word in SAID)
