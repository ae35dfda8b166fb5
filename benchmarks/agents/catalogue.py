"""The catalogue of an invented shop, and questions about it.

Questions of the kind ``single`` take one tool: a search for a price, or a calculation. Those of the
kind ``totals`` ask for the price of some pieces of one or two products, which takes searches and a
calculation.

    python -m benchmarks.agents.catalogue FOLDER [single|totals]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import numpy as np

Kind = Literal["single", "totals"]

MATERIALS = ("oak", "brass", "linen", "glass", "cork", "slate", "birch", "copper", "maple", "steel")
THINGS = ("lamp", "chair", "shelf", "mirror", "vase", "clock", "stool", "tray")
SIZES = {"train": 24, "dev": 40, "test": 64}


def products() -> dict[str, int]:
    """Return the price of each product in dollars, by name."""
    rng = np.random.default_rng(7)
    names = [f"{material} {thing}" for material in MATERIALS for thing in THINGS]
    prices = rng.integers(6, 180, len(names))
    return {name: int(price) for name, price in zip(names, prices, strict=True)}


def pages() -> list[dict[str, str]]:
    """Return one page of the catalogue per product."""
    return [
        {"title": name, "text": f"The {name} costs {price} dollars. It is made to order."}
        for name, price in products().items()
    ]


def questions(split: str, kind: Kind = "single") -> Iterator[dict[str, str]]:
    """Yield the questions of a split with their answers; no question occurs in two splits.

    Args:
        split: ``train``, ``dev`` or ``test``.
        kind: ``single``: each takes one tool, in turn a search for a price and a calculation;
            ``totals``: each takes a search for one or two products, and then a calculation.
    """
    rng = np.random.default_rng(11)
    make = _single if kind == "single" else _total
    seen = set[str]()
    for name, size in SIZES.items():
        number = 0
        while number < size:
            question, answer = make(number, rng)
            if question in seen:
                continue
            seen.add(question)
            if name == split:
                yield {"id": f"{split}-{number}", "question": question, "answer": str(answer)}
            number += 1


def _single(number: int, rng: np.random.Generator) -> tuple[str, int]:
    prices = products()
    if number % 2:
        first, second = map(int, rng.integers(12, 99, 2))
        return f"What is {first} times {second}?", first * second
    name = str(rng.choice(sorted(prices)))
    return f"What does the {name} cost?", prices[name]


def _total(number: int, rng: np.random.Generator) -> tuple[str, int]:
    prices = products()
    chosen = rng.choice(sorted(prices), 1 + number % 2, replace=False)
    counts = rng.integers(2, 9, len(chosen))
    wanted = " and ".join(f"{n} of the {each}" for n, each in zip(counts, chosen, strict=True))
    total = sum(int(n) * prices[each] for n, each in zip(counts, chosen, strict=True))
    return f"How many dollars do {wanted} cost?", total


def main(folder: str, kind: str = "single") -> None:
    """Write the splits as JSON lines."""
    chosen = next((known for known in get_args(Kind) if known == kind), None)
    if chosen is None:
        raise SystemExit(f"{kind!r} is no kind of questions; possible: {', '.join(get_args(Kind))}")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for split in SIZES:
        rows = "".join(json.dumps(row) + "\n" for row in questions(split, chosen))
        (target / f"{split}.jsonl").write_text(rows, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
