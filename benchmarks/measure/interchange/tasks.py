"""Two small tasks, and models that solve them only with demonstrations or the right setting."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

Rows = dict[str, list[dict[str, object]]]
SIZES = {"train": 30, "valid": 30, "test": 30}
FIELD = re.compile(r"(?:question ## \]\]\n|Question:? |: )(word\d+)")
THINGS: Mapping[str, str] = {
    "animal": "dog cat horse cow lion tiger bear wolf fox deer rabbit mouse goat sheep pig duck frog shark "
    "whale eagle",
    "fruit": "apple pear banana grape orange lemon plum peach cherry melon mango kiwi papaya lime fig date "
    "apricot coconut strawberry pineapple",
    "vehicle": "car bus truck train bicycle tram ship boat airplane helicopter scooter taxi van ferry "
    "tractor subway motorcycle rocket canoe ambulance",
}


def capitals() -> Rows:
    """Return rows whose answer is the question in capitals."""
    numbers = iter(range(1000))
    return {
        split: [{"question": f"word{i}", "answer": f"WORD{i}"} for i in (next(numbers) for _ in range(size))]
        for split, size in SIZES.items()
    }


def things() -> Rows:
    """Return rows of things and their kind, of which each split holds others."""
    pairs: list[dict[str, object]] = [
        {"thing": thing, "label": label} for label, text in THINGS.items() for thing in text.split()
    ]
    pairs.sort(key=lambda row: hashlib.sha256(str(row["thing"]).encode()).hexdigest())
    return {"train": [*pairs[:20]], "valid": [*pairs[20:40]], "test": [*pairs[40:60]]}


def scripted(messages: Sequence[Mapping[str, str]]) -> str:
    """Answer in the prompt's format: rightly with a demonstration or the style ``loud``, or by chance."""
    text = "\n".join(message["content"] for message in messages)
    word = FIELD.findall(text)[-1]
    shown = re.search(r"WORD\d", text) is not None or "loud" in text
    answer = word.upper() if shown or word.endswith("0") else "no idea"
    if "[[ ##" not in text:
        return answer
    name = re.findall(r"`\[\[ ## (\w+) ## \]\]`", messages[-1]["content"])[-2]
    return f"[[ ## {name} ## ]]\n{answer}\n\n[[ ## completed ## ]]"
