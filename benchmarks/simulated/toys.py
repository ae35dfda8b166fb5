"""Toy tasks that a tiny random model learns in a hundred steps on a CPU, for tests of training.

They reproduce three shapes from the papers of the GRPO family: a chain of agents (MHGPO, mmGRPO), a
conversation with an environment (Prompt-R1), and a planner with workers (Mujica). Every word is one
token, an agent answers with at most three words, and the base model samples the words of `SAID`
about equally often for any prompt.

Words of different kinds correspond by their position: red, cat and pear mean north, and so on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.prompt_r1 import PromptTurn, form, gated_reward
from benchmarks.simulated.toy_model import (
    ANIMALS,
    ANSWER,
    ASK,
    COLOURS,
    FRUITS,
    NOTHING,
    PLACES,
    SAID,
    make_toy_model,
)
from compound.components.flow import Loop, Map
from compound.components.function import Function
from compound.components.llm import LLM
from compound.core.errors import DeclarationError, suggest_name
from compound.core.example import Example, Metric, Score
from compound.core.narrowing import entry
from compound.evaluation.metrics.built_in import token_f1
from compound.evaluation.metrics.custom import custom
from compound.execution.rng import generator
from compound.graph.component import Input
from compound.graph.space import ATTENTION, LoRA
from compound.graph.system import System

__all__ = ["Toy", "make_toy_model", "toy"]

TURNS = 3
# Asking alone must earn more than answering alone, or an untrained model learns never to ask.
GATE = (0.6, 0.15, 0.15, 0.1)


@dataclass(frozen=True)
class Toy:
    """Toy task with its chance level and optimum.

    Attributes:
        name: `chain`, `conversation` or `planning`.
        system: greedy as declared; rollouts run it at temperature 1.
        train, valid, test: examples over the same words, so that scores measure learning of the
            words.
        metric: the metric, from 0 to 1.
        chance: the expected score of agents that answer with random words of `SAID`.
        optimum: the best possible score.
        trained: the components with weights.
    """

    name: str
    system: System
    train: list[Example]
    valid: list[Example]
    test: list[Example]
    metric: Metric
    chance: float
    optimum: float
    trained: tuple[str, ...]


def toy(name: str, model: str) -> Toy:
    """Return a toy task.

    Args:
        name: `chain`, `conversation` or `planning`.
        model: the folder of `make_toy_model`, or another model's name.

    >>> chain = toy("chain", "local/any")
    >>> chain.trained, len(chain.train), round(chain.chance, 3)
    (('first', 'second', 'third'), 16, 0.167)
    """
    if name not in TOYS:
        raise DeclarationError(f"no toy {name!r}", hint=suggest_name(name, TOYS))
    return TOYS[name](model)


def place_of(word: str) -> str:
    """Return the place that a colour, an animal or a fruit means.

    >>> place_of("red"), place_of("dog"), place_of("lime")
    ('north', 'east', 'west')
    """
    kind = next(words for words in (COLOURS, ANIMALS, FRUITS) if word in words)
    return PLACES[kind.index(word)]


def _agent(name: str, words: int) -> LLM:
    return LLM(name, output={"say": str}, max_tokens=words, weights=LoRA(rank=8, targets=ATTENTION))


# --- a chain: three agents in a row --------------------------------------------------------------------


def _chain(model: str) -> Toy:
    """Build the chain: each agent reads its word and the previous answer, and must name the word's place."""
    one = _agent("first", 1)(word=Input("colour", str))
    two = _agent("second", 1)(word=Input("animal", str), before=one)
    three = _agent("third", 1)(word=Input("fruit", str), before=two)
    said = Function("together", together)(first=one, second=two, third=three)
    words = list(itertools.product(COLOURS, ANIMALS, FRUITS))
    order = generator("toys", "chain").permutation(len(words))
    examples = [_chain_example(*words[i]) for i in order[:32]]
    return Toy(
        name="chain",
        system=System("chain", {"said": said}, lm=model),
        train=examples[:16],
        valid=examples[16:24],
        test=examples[24:],
        metric=custom(chain_score, "chain"),
        chance=1 / len(SAID),
        optimum=1.0,
        trained=("first", "second", "third"),
    )


def together(first: str, second: str, third: str) -> list[str]:
    """Collect the three agents' answers."""
    return [first, second, third]


def _chain_example(colour: str, animal: str, fruit: str) -> Example:
    inputs = {"colour": colour, "animal": animal, "fruit": fruit}
    gold = {"said": [place_of(word) for word in inputs.values()]}
    return Example("-".join(inputs.values()), inputs, gold)


def chain_score(outputs: Mapping[str, object], example: Example) -> Score:
    """Return the share of the three words that are right."""
    names, wanted = ("first", "second", "third"), entry(example.gold, "said", list)
    said = entry(outputs, "said", list)
    parts = {name: float(f == w) for name, f, w in zip(names, said, wanted, strict=True)}
    return Score(sum(parts.values()) / 3, parts=parts)


# --- a conversation: an agent asks an environment, then answers ------------------------------------------


def _conversation(model: str) -> Toy:
    """Build the conversation: the agent must name the places of a colour and of an animal.

    It reads the colour, and must ask for the animal. A turn is ``ask WORDS``, to which the
    environment replies with the animal, or ``answer WORDS``, which ends the conversation; the
    environment replies ``nothing`` to any other turn. The reward is that of Prompt-R1 with other
    weights (`GATE`), mapped from [-1, 1] to [0, 1]. The colour is independent of the animal.
    """
    colour, animal = Input("colour", str), Input("animal", str)
    heard, said = Input("heard", str), Input("said", list[str])
    turn = _agent("agent", 3)(word=colour, heard=heard)
    reply = Function("environment", environment)(said=turn, animal=animal)
    body = System(
        "turn",
        {
            "heard": Function("hear", hear)(heard=heard, reply=reply),
            "said": Function("log", log)(said=said, turn=turn),
            "over": Function("over", is_over)(said=turn),
        },
    )
    loop = Loop(
        "talk", body, carry={"heard": "heard", "said": "said"}, until="over", max_turns=TURNS
    )
    talk = loop(
        colour=colour,
        animal=animal,
        heard=Function("silence", silence)(),
        said=Function("blank", blank)(),
    )
    pairs = [
        pair
        for pair in itertools.product(COLOURS, ANIMALS)
        if place_of(pair[0]) != place_of(pair[1])
    ]
    order = generator("toys", "conversation").permutation(len(pairs))
    drawn = [pairs[i] for i in order]
    return Toy(
        name="conversation",
        system=System("conversation", {"said": talk.said}, lm=model),
        train=[_conversation_example("train", *pair) for pair in drawn],
        valid=[_conversation_example("valid", *pair) for pair in drawn[:6]],
        test=[_conversation_example("test", *pair) for pair in drawn[6:]],
        metric=custom(conversation_score, "conversation"),
        chance=0.2004,
        optimum=1.0,
        trained=("agent",),
    )


def _conversation_example(split: str, colour: str, animal: str) -> Example:
    inputs = {"colour": colour, "animal": animal}
    gold = {"answer": f"{place_of(colour)} {place_of(animal)}"}
    return Example(f"{split}-{colour}-{animal}", inputs, gold)


def read_turn(said: str) -> PromptTurn:
    """Parse ``ask WORDS`` or ``answer WORDS``; the verb takes the role of the thought.

    >>> read_turn("ask north").is_prompt, read_turn("answer west").answer, read_turn("north").exact
    (True, 'west', False)
    """
    verb, _, rest = said.partition(" ")
    exact = verb in (ASK, ANSWER) and bool(rest)
    return PromptTurn(verb, rest if verb == ASK else None, rest if verb == ANSWER else None, exact)


def environment(said: str, animal: str) -> str:
    """Return the animal if the turn asks, else ``nothing``."""
    return animal if read_turn(said).is_prompt else NOTHING


def hear(heard: str, reply: str) -> str:
    """Append a reply to the replies so far."""
    return f"{heard} {reply}"


def log(said: list[str], turn: str) -> list[str]:
    """Append a turn to the agent's turns."""
    return [*said, turn]


def is_over(said: str) -> bool:
    """Return whether a turn answers, which ends the conversation."""
    return said.startswith(ANSWER)


def silence() -> str:
    """Return the replies before the first turn."""
    return NOTHING


def blank() -> list[str]:
    """Return an empty list of turns."""
    return []


def conversation_score(outputs: Mapping[str, object], example: Example) -> Score:
    """Return the gated reward, mapped from [-1, 1] to [0, 1]."""
    turns = [read_turn(said) for said in entry(outputs, "said", list)]
    right = token_f1("answer").score({"answer": turns[-1].answer or ""}, example).value
    parts = {"form": form(turns, GATE), "right": right, "turns": float(len(turns))}
    return Score((1 + gated_reward(turns, right, GATE)) / 2, parts=parts)


# --- planning: a planner asks workers, then answers -------------------------------------------------------


def _planning(model: str) -> Toy:
    """Build the planning task: the planner asks about the places of its two colours, one worker per place.

    A turn that starts with ``answer`` is the last one; any other asks about the places it names.
    The facts state which animal is at which place. A worker reads the animal at the requested place
    and answers with the animal's place. The planner must answer with the workers' results, which
    are independent of its colours. The workers' answers are scored as well: if only the final
    answer counted, workers could use any code that the planner learns to translate, and training
    would imitate the first code that works for some animals.
    """
    colours, facts = Input("colours", str), Input("facts", dict[str, str])
    found, asked = Input("found", str), Input("asked", list[str])
    asks, fact = Input("question", str), Function("lookup", lookup)
    read = fact(question=asks, facts=facts)
    work = System("work", {"found": _agent("worker", 1)(fact=read)})
    plan = _agent("planner", 3)(word=colours, found=found)
    step = Function(
        "plan", read_plan, outputs={"questions": list[str], "answer": str, "over": bool}
    )(said=plan)
    answers = Map("workers", work, over="question")(question=step.questions, facts=facts)
    body = System(
        "turn",
        {
            "found": Function("note", note)(found=found, answers=answers),
            "asked": Function("collect", collect)(asked=asked, questions=step.questions),
            "answer": step.answer,
            "over": step.over,
        },
    )
    loop = Loop(
        "solve", body, carry={"found": "found", "asked": "asked"}, until="over", max_turns=TURNS
    )
    solve = loop(
        colours=colours,
        facts=facts,
        found=Function("silence", silence)(),
        asked=Function("blank", blank)(),
    )
    examples = _planning_examples()
    return Toy(
        name="planning",
        system=System(
            "planning",
            {"answer": solve.answer, "asked": solve.asked, "found": solve.found},
            lm=model,
        ),
        train=examples[:72],
        valid=examples[72:80],
        test=examples[80:],
        metric=custom(planning_score, "planning"),
        chance=0.2788,
        optimum=1.0,
        trained=("planner", "worker"),
    )


def _planning_examples() -> list[Example]:
    """Return 96 examples, too many to memorize, in which the colours are independent of the answer."""
    pairs = list(itertools.combinations(COLOURS, 2))
    facts = list(itertools.permutations(ANIMALS))
    rng = generator("toys", "planning")
    made: dict[str, Example] = {}
    while len(made) < 96:
        pair, animals = pairs[len(made) % len(pairs)], facts[rng.integers(len(facts))]
        there = dict(zip(PLACES, animals, strict=True))
        wanted = [place_of(colour) for colour in pair]
        gold = {"asked": wanted, "answer": " ".join(place_of(there[place]) for place in wanted)}
        inputs = {"colours": " ".join(pair), "facts": there}
        name = "-".join((*pair, *animals))
        made.setdefault(name, Example(name, inputs, gold))
    return list(made.values())


def read_plan(said: str) -> dict[str, object]:
    """Parse a planner's turn: its questions, its answer, and whether it is the last one.

    >>> read_plan("ask east west")
    {'questions': ['east', 'west'], 'answer': '', 'over': False}
    >>> read_plan("answer south")
    {'questions': [], 'answer': 'south', 'over': True}
    """
    verb, _, rest = said.partition(" ")
    over = verb == ANSWER
    questions = [] if over else [word for word in said.split() if word in PLACES]
    return {"questions": questions, "answer": rest if over else "", "over": over}


def lookup(question: str, facts: dict[str, str]) -> str:
    """Return the animal at a place."""
    return facts[question]


def note(found: str, answers: list[str]) -> str:
    """Append the workers' answers to the findings."""
    return " ".join([found, *answers])


def collect(asked: list[str], questions: list[str]) -> list[str]:
    """Append the questions of a turn to those so far."""
    return [*asked, *questions]


def planning_score(outputs: Mapping[str, object], example: Example) -> Score:
    """Return the mean of three scores: asked places, right words of the workers, and the answer's F1.

    Without a question the score is 0.
    """
    wanted, asked = set(entry(example.gold, "asked", list)), entry(outputs, "asked", list)
    if not asked:
        return Score(0.0, parts={"asked": 0.0, "found": 0.0, "f1": 0.0})
    found = entry(outputs, "found", str).removeprefix(NOTHING).split(" ")[1:]
    facts = entry(example.inputs, "facts", dict)
    right = [place_of(facts[place]) for place in asked]
    parts = {
        "asked": len(wanted & set(asked)) / len(wanted),
        "found": sum(map(str.__eq__, found, right)) / len(right),
        "f1": token_f1("answer").score(outputs, example).value,
    }
    return Score(sum(parts.values()) / 3, parts=parts)


TOYS: Mapping[str, Callable[[str], Toy]] = {
    "chain": _chain,
    "conversation": _conversation,
    "planning": _planning,
}
