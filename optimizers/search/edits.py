"""A small grammar of prompt edits, for models that cannot write prompts themselves.

A prompt is a list of sentences. An edit adds a clause of a kind that is missing (length, format,
evidence, care, role), drops, shortens, rephrases or moves a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from compound.graph.space import Text

CLAUSES: Mapping[str, tuple[str, ...]] = {
    "length": (
        "Answer in a few words.",
        "Give only the answer, nothing else.",
        "Be brief.",
        "Reply with one short phrase.",
    ),
    "format": (
        "Do not write a full sentence.",
        "Write the answer on one line.",
        "Do not repeat the question.",
        "Do not explain.",
    ),
    "evidence": (
        "Use only the passages.",
        "Copy the answer from the passages.",
        "Find the passage that answers the question first.",
        "Name the words that support the answer.",
    ),
    "care": (
        "Read the question carefully.",
        "Check every part of the question.",
        "Think about what is being asked.",
    ),
    "role": (
        "You are an expert.",
        "You answer trivia questions exactly.",
    ),
}

GROWTH = 300  # bytes by which edits may make a prompt longer than it was declared; all clauses take 200

SHORTER: Mapping[str, str] = {
    r"\bplease\b\s*": "",
    r"\bin order to\b": "to",
    r"\bmake sure (?:that )?you\b": "",
    r"\byou should\b\s*": "",
    r"\bthe following\b": "the",
    r"\bvery\b\s*": "",
    r"\ball of the\b": "all",
    r"\bas well as\b": "and",
}

SYNONYMS: Mapping[str, str] = {
    "answer": "reply to",
    "use": "rely on",
    "question": "query",
    "passages": "texts",
    "write": "give",
    "short": "brief",
    "list": "name",
    "summarize": "sum up",
}


def sentences(prompt: str) -> list[str]:
    """Split a prompt into sentences; paragraphs and lists keep their lines.

    >>> sentences("Answer. Use the passages.")
    ['Answer.', 'Use the passages.']
    """
    return [part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", prompt) if part.strip()]


def kind_of(sentence: str) -> str | None:
    """Return which kind of clause a sentence is, when it is one of ours."""
    return next((kind for kind, clauses in CLAUSES.items() if sentence in clauses), None)


def add(parts: list[str], rng: np.random.Generator) -> list[str]:
    """Add a clause of a kind that is not there yet; a role goes first, the rest last."""
    present = {kind_of(part) for part in parts}
    kinds = [kind for kind in CLAUSES if kind not in present]
    if not kinds:
        return parts
    kind = kinds[rng.integers(len(kinds))]
    clause = CLAUSES[kind][rng.integers(len(CLAUSES[kind]))]
    return [clause, *parts] if kind == "role" else [*parts, clause]


def drop(parts: list[str], rng: np.random.Generator) -> list[str]:
    """Drop one sentence; the last one stays."""
    if len(parts) < 2:
        return parts
    gone = int(rng.integers(len(parts)))
    return parts[:gone] + parts[gone + 1 :]


def swap(parts: list[str], rng: np.random.Generator) -> list[str]:
    """Exchange a clause for another one of its kind."""
    ours = [i for i, part in enumerate(parts) if kind_of(part)]
    if not ours:
        return parts
    i = ours[rng.integers(len(ours))]
    kind = kind_of(parts[i])
    assert kind is not None  # `ours` holds clauses only
    return [*parts[:i], CLAUSES[kind][rng.integers(len(CLAUSES[kind]))], *parts[i + 1 :]]


def reorder(parts: list[str], rng: np.random.Generator) -> list[str]:
    """Move one sentence to another place."""
    if len(parts) < 2:
        return parts
    rest = list(parts)
    moved = rest.pop(int(rng.integers(len(rest))))
    rest.insert(int(rng.integers(len(rest) + 1)), moved)
    return rest


def shorten(parts: list[str], rng: np.random.Generator) -> list[str]:
    """Take filler words out of every sentence; a prompt of nothing else stays."""
    shorter = []
    for part in parts:
        text = part
        for pattern, replacement in SHORTER.items():
            text = re.sub(pattern, replacement, text, flags=re.IGNORECASE)
        text = text.strip()
        shorter.append(text[:1].upper() + text[1:])
    return [part for part in shorter if part] or parts


def rephrase(parts: list[str], rng: np.random.Generator) -> list[str]:
    """Replace one word by another with about the same meaning."""
    places = [
        (i, word)
        for i, part in enumerate(parts)
        for word in SYNONYMS
        if re.search(rf"\b{word}\b", part, re.I)
    ]
    if not places:
        return parts
    i, word = places[rng.integers(len(places))]
    other = SYNONYMS[word]

    def keep_case(match: re.Match[str]) -> str:
        return other[:1].upper() + other[1:] if match.group()[0].isupper() else other

    return [*parts[:i], re.sub(rf"\b{word}\b", keep_case, parts[i], count=1, flags=re.I), *parts[i + 1 :]]


def bounded_edit(prompt: str, rng: np.random.Generator, space: Text, most: int = 2) -> str | None:
    """Return an edited prompt, or ``None`` where the parameter cannot hold it or it got too long.

    A prompt that was edited in many jobs could grow without end: edits make none longer than the declared one
    by more than `GROWTH`.

    >>> bounded_edit("Be brief.", np.random.default_rng(1), Text("Be brief."), most=1) is not None
    True
    """
    text = edited(prompt, rng, most)
    longest = max(len(space.value.encode()) + GROWTH, len(prompt.encode()))
    return None if len(text.encode()) > longest or space.problem(text) else text


Edit = Callable[[list[str], np.random.Generator], list[str]]
EDITS: tuple[tuple[Edit, float], ...] = (
    (add, 4.0),
    (drop, 1.0),
    (swap, 2.0),
    (reorder, 1.0),
    (shorten, 0.5),
    (rephrase, 1.0),
)


def edited(prompt: str, rng: np.random.Generator, most: int = 2) -> str:
    """Return a prompt that differs from ``prompt`` by 1 to ``most`` edits (or equals it when none applies).

    Each edit changes one line; the others, and the layout, stay as they are.

    >>> edited("Answer the question.", np.random.default_rng(0)) != "Answer the question."
    True
    """
    weights = np.array([weight for _, weight in EDITS])
    lines = prompt.split("\n")
    for _ in range(int(rng.integers(1, most + 1))):
        edit = EDITS[rng.choice(len(EDITS), p=weights / weights.sum())][0]
        filled = [i for i, line in enumerate(lines) if line.strip()] or [0]
        i = filled[rng.integers(len(filled))] if len(filled) > 1 else filled[0]
        indent = lines[i][: len(lines[i]) - len(lines[i].lstrip())]
        lines[i] = indent + " ".join(edit(sentences(lines[i]), rng))
    return "\n".join(lines)
