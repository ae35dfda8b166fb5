"""Small tasks, and a scripted model that solves the first one only with demonstrations."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Rows = dict[str, list[dict[str, object]]]
COUNTRIES = Path(__file__).parents[2] / "data" / "atlas_countries.json"
SIZE = 30  # rows of each split
THINGS: Mapping[str, str] = {
    "animal": "dog cat horse cow lion tiger bear wolf fox deer rabbit mouse goat sheep pig duck frog shark "
    "whale eagle donkey camel monkey otter beaver parrot snake turtle crab salmon",
    "fruit": "apple pear banana grape orange lemon plum peach cherry melon mango kiwi papaya lime fig date "
    "apricot coconut strawberry pineapple raspberry blueberry blackberry nectarine tangerine grapefruit "
    "pomegranate cranberry guava watermelon",
    "vehicle": "car bus truck train bicycle tram ship boat airplane helicopter scooter taxi van ferry "
    "tractor subway motorcycle rocket canoe ambulance minibus yacht submarine jeep sled kayak trolley "
    "limousine glider caravan",
}


@dataclass(frozen=True)
class Task:
    """Questions with one right answer each.

    Attributes:
        instruction: the prompt of programs that are not optimized.
        rows: rows with ``question`` and ``answer`` by split.
        shown: examples of train rows that a program may show to its model.
        max_tokens: maximum number of tokens of an answer.
    """

    instruction: str
    rows: Rows
    shown: tuple[tuple[str, str], ...]
    max_tokens: int


def uppercase() -> Task:
    """Return the task to write a word in capital letters."""
    pairs = [(f"word{number}", f"WORD{number}") for number in range(3 * SIZE)]
    return Task("Answer the question.", _split(pairs), tuple(pairs[:3]), 24)


def things() -> Task:
    """Return the task to name the kind of a thing."""
    pairs = sorted(
        ((thing, label) for label, text in THINGS.items() for thing in text.split()),
        key=lambda pair: hashlib.sha256(pair[0].encode()).hexdigest(),
    )
    of_kind = [[pair for pair in pairs[:SIZE] if pair[1] == label] for label in THINGS]
    shown = tuple(kind[number] for number in range(2) for kind in of_kind)
    return Task("Is it an animal, a fruit or a vehicle?", _split(pairs), shown, 24)


def countries() -> Task:
    """Return the task to name the capital of a country."""
    known = [(row["name"], row["capital"]) for row in json.loads(COUNTRIES.read_text("utf-8"))]
    chosen = sorted(known, key=lambda pair: hashlib.sha256(pair[0].encode()).hexdigest())[
        : 3 * SIZE
    ]
    pairs = [(f"What is the capital of {name}?", capital) for name, capital in chosen]
    return Task("You are a geographer. Answer the question.", _split(pairs), (), 16)


def scripted(messages: Sequence[Mapping[str, str]]) -> str:
    """Answer in the prompt's format: rightly after a demonstration, or by chance."""
    text = "\n".join(message["content"] for message in messages)
    word = re.findall(r"\bword\d+", text)[-1]
    shown = re.search(r"WORD\d", text) is not None
    answer = word.upper() if shown or word.endswith("0") else "no idea"
    if "[[ ##" not in text:
        return answer
    name = re.findall(r"`\[\[ ## (\w+) ## \]\]`", messages[-1]["content"])[-2]
    return f"[[ ## {name} ## ]]\n{answer}\n\n[[ ## completed ## ]]"


def _split(pairs: Sequence[tuple[str, str]]) -> Rows:
    rows: list[dict[str, object]] = [
        {"question": question, "answer": answer} for question, answer in pairs
    ]
    return {
        name: rows[k * SIZE : (k + 1) * SIZE] for k, name in enumerate(("train", "valid", "test"))
    }
