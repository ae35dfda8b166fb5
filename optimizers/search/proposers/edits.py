"""A small grammar of prompt edits, which needs no language model to write prompts.

A prompt is a list of sentences. An edit adds a clause of a missing kind (length, format, evidence, care,
role), replaces a clause by another one of its kind, or drops, shortens, rephrases or moves a sentence.
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

# Maximum bytes that edits add to the declared prompt. A clause of each kind takes about 200.
GROWTH = 300

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
    """Split a prompt into sentences; line breaks also end a sentence.

    >>> sentences("Answer. Use the passages.")
    ['Answer.', 'Use the passages.']
    """
    return [part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", prompt) if part.strip()]


def kind_of(sentence: str) -> str | None:
    """Return the kind of a clause; ``None`` for a sentence that is not in `CLAUSES`."""
    return next((kind for kind, clauses in CLAUSES.items() if sentence in clauses), None)


def add(parts: list[str], rng: np.random.Generator) -> list[str]:
    """Add a clause of a missing kind: a role at the beginning, any other kind at the end."""
    present = {kind_of(part) for part in parts}
    kinds = [kind for kind in CLAUSES if kind not in present]
    if not kinds:
        return parts
    kind = kinds[rng.integers(len(kinds))]
    clause = CLAUSES[kind][rng.integers(len(CLAUSES[kind]))]
    return [clause, *parts] if kind == "role" else [*parts, clause]


def drop(parts: list[str], rng: np.random.Generator) -> list[str]:
    """Drop a random sentence, unless it is the only one."""
    if len(parts) < 2:
        return parts
    index = int(rng.integers(len(parts)))
    return parts[:index] + parts[index + 1 :]


def swap(parts: list[str], rng: np.random.Generator) -> list[str]:
    """Replace a clause by one of the same kind."""
    clauses = [i for i, part in enumerate(parts) if kind_of(part)]
    if not clauses:
        return parts
    i = clauses[rng.integers(len(clauses))]
    kind = kind_of(parts[i])
    assert kind is not None  # `clauses` has indices of clauses only
    return [*parts[:i], CLAUSES[kind][rng.integers(len(CLAUSES[kind]))], *parts[i + 1 :]]


def reorder(parts: list[str], rng: np.random.Generator) -> list[str]:
    """Move a random sentence to a random position."""
    if len(parts) < 2:
        return parts
    rest = list(parts)
    moved = rest.pop(int(rng.integers(len(rest))))
    rest.insert(int(rng.integers(len(rest) + 1)), moved)
    return rest


def shorten(parts: list[str], rng: np.random.Generator) -> list[str]:
    """Remove filler words from all sentences; a prompt of filler words only is unchanged."""
    shorter = []
    for part in parts:
        text = part
        for pattern, replacement in SHORTER.items():
            text = re.sub(pattern, replacement, text, flags=re.IGNORECASE)
        text = text.strip()
        shorter.append(text[:1].upper() + text[1:])
    return [part for part in shorter if part] or parts


def rephrase(parts: list[str], rng: np.random.Generator) -> list[str]:
    """Replace one word by a near-synonym."""
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
    """Return an edited prompt; ``None`` if it is invalid for the parameter or too long.

    The limit prevents prompts from growing without bound over many jobs: an edited prompt is at most `GROWTH`
    bytes longer than the declared one.

    >>> bounded_edit("Be brief.", np.random.default_rng(1), Text("Be brief."), most=1) is not None
    True
    """
    text = edit_prompt(prompt, rng, most)
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


def edit_prompt(prompt: str, rng: np.random.Generator, most: int = 2) -> str:
    """Return a prompt with 1 to ``most`` random edits; edits that do not apply change nothing.

    Each edit changes one line and keeps the other lines and the layout.

    >>> edit_prompt("Answer the question.", np.random.default_rng(0)) != "Answer the question."
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
