"""A small grammar of prompt edits, which needs no language model to write prompts.

A prompt is a list of sentences. An edit adds a clause of a missing kind (length, format, evidence,
care, role), replaces a clause by another one of its kind, or drops, shortens or moves a sentence.
The ports of a component decide which clauses are true of its task.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal, get_origin

import numpy as np

from compound.graph.component import Output
from compound.graph.configuration import component_of
from compound.graph.space import Text
from compound.graph.system import System

Clauses = Mapping[str, tuple[str, ...]]

ANY_TASK: Clauses = {
    "care": (
        "Read the input carefully.",
        "Check every part of the input.",
        "Follow every instruction.",
    ),
    "role": ("You are an expert.", "You work carefully and exactly."),
}
TEXT: Clauses = {
    "length": (
        "Be brief.",
        "Keep the output as short as possible.",
        "Write only the result, nothing else.",
    ),
    "format": ("Start with the result itself.", "Add no introduction and no comment."),
}  # where the output is one text
OPTIONS: Clauses = {
    "length": ("Give only the option, nothing else.",),
    "format": ("Choose the option that fits best.", "Compare the options before you choose."),
}  # where the output is one of several options
PASSAGES: Clauses = {
    "evidence": (
        "Use only the passages.",
        "Find the passages that matter first.",
        "Do not use anything that is not in the passages.",
    )
}  # where an input holds passages
CLAUSES: Clauses = {
    kind: tuple(
        clause for group in (TEXT, OPTIONS, PASSAGES, ANY_TASK) for clause in group.get(kind, ())
    )
    for kind in ("length", "format", "evidence", "care", "role")
}

# Maximum bytes that edits add to the declared prompt. A clause of each kind takes about 200.
GROWTH = 300

SHORTER: Mapping[str, str] = {r"^please,?\s+": "", r"\bin order to\b": "to"}

ABBREVIATION = re.compile(
    r"(?:^|[\s(])(?:(?:\w\.)*[^\W\d]|vs|cf|ca|approx|dr|mrs?|ms|prof|bzw)\.$|(?:^|[.!?:]\s)\d+\.$",
    re.I,
)
PAIRS = [("(", ")"), ("[", "]"), ("{", "}"), ("“", "”"), ("«", "»")]


def clauses_for(system: System, key: str) -> Clauses:
    """Return the clauses that are true of the task of a text, by the ports of its component."""
    component = system.components[component_of(key)]
    if component.kind == "agent_prompt":
        return ANY_TASK
    if key != f"{component.name}.prompt":
        return {}
    outputs = [port.type for port in component.outputs.values()]
    found = dict(ANY_TASK)
    if (
        len(outputs) == 1 and outputs[0] is str and component.kind != "agent"
    ):  # whose output may be a call
        found |= TEXT
    elif len(outputs) == 1 and get_origin(outputs[0]) is Literal:
        found |= OPTIONS
    for node in system.all_nodes():
        sources = [each for each in node.wires.values() if isinstance(each, Output)]
        retrieves = any(source.node.component.kind == "retriever" for source in sources)
        if node.component is component and ("passages" in node.inputs or retrieves):
            found |= PASSAGES
    return found


def sentences(prompt: str) -> list[str]:
    """Split a prompt into sentences; line breaks also end a sentence, but abbreviations do not.

    >>> sentences("Answer. Use the passages.")
    ['Answer.', 'Use the passages.']
    >>> sentences("Ask Dr. Ada, e.g. at home. Be kind.")
    ['Ask Dr. Ada, e.g. at home.', 'Be kind.']
    """
    found: list[str] = []
    for line in prompt.split("\n"):
        own: list[str] = []
        for part in re.split(r"(?<=[.!?])\s+|(?<=[.!?][)\"”»])\s+", line.strip()):
            if own and not (kind_of(own[-1]) or kind_of(part)) and _continues(own[-1], part):
                own[-1] += f" {part}"
            else:
                own.append(part)
        found += filter(None, own)
    return found


def _continues(before: str, part: str) -> bool:
    """Return whether a text belongs to the sentence before it."""
    is_open = before.count('"') % 2 or any(before.count(a) > before.count(b) for a, b in PAIRS)
    return bool(is_open or part[:1].islower() or part[:1].isdigit() or ABBREVIATION.search(before))


def kind_of(sentence: str) -> str | None:
    """Return the kind of a clause; ``None`` for a sentence that is not in `CLAUSES`."""
    return next((kind for kind, clauses in CLAUSES.items() if sentence in clauses), None)


def add(parts: list[str], rng: np.random.Generator, clauses: Clauses = CLAUSES) -> list[str]:
    """Add a clause of a missing kind: a role at the beginning, any other kind at the end."""
    present = {kind_of(part) for part in parts}
    kinds = [kind for kind in clauses if kind not in present]
    if not kinds:
        return parts
    kind = kinds[rng.integers(len(kinds))]
    clause = clauses[kind][rng.integers(len(clauses[kind]))]
    return [clause, *parts] if kind == "role" else [*parts, clause]


def drop(parts: list[str], rng: np.random.Generator, clauses: Clauses = CLAUSES) -> list[str]:
    """Drop a random sentence, unless it is the only one."""
    if len(parts) < 2:
        return parts
    index = int(rng.integers(len(parts)))
    return parts[:index] + parts[index + 1 :]


def swap(parts: list[str], rng: np.random.Generator, clauses: Clauses = CLAUSES) -> list[str]:
    """Replace a clause by one of the same kind."""
    known = [(i, kind) for i, part in enumerate(parts) if (kind := kind_of(part)) in clauses]
    if not known:
        return parts
    i, kind = known[rng.integers(len(known))]
    assert kind is not None  # which is in no set of clauses
    return [*parts[:i], clauses[kind][rng.integers(len(clauses[kind]))], *parts[i + 1 :]]


def reorder(parts: list[str], rng: np.random.Generator, clauses: Clauses = CLAUSES) -> list[str]:
    """Move a random sentence to a random position."""
    if len(parts) < 2:
        return parts
    rest = list(parts)
    moved = rest.pop(int(rng.integers(len(rest))))
    rest.insert(int(rng.integers(len(rest) + 1)), moved)
    return rest


def shorten(parts: list[str], rng: np.random.Generator, clauses: Clauses = CLAUSES) -> list[str]:
    """Remove filler words from all sentences; a prompt of filler words only is unchanged."""
    shorter = []
    for part in parts:
        text = part
        for pattern, replacement in SHORTER.items():
            text = re.sub(pattern, replacement, text, flags=re.IGNORECASE)
        text = text.strip()
        shorter.append(text[:1].upper() + text[1:] if part[:1].isupper() else text)
    return [part for part in shorter if part] or parts


def bounded_edit(
    prompt: str, rng: np.random.Generator, space: Text, most: int = 2, clauses: Clauses = CLAUSES
) -> str | None:
    """Return an edited prompt; ``None`` if it is invalid, or longer than the declared one by over `GROWTH`.

    >>> bounded_edit("Be brief.", np.random.default_rng(1), Text("Be brief."), most=1) is not None
    True
    """
    text = edit_prompt(prompt, rng, most, clauses)
    longest = max(len(space.value.encode()) + GROWTH, len(prompt.encode()))
    return None if len(text.encode()) > longest or space.problem(text) else text


Edit = Callable[[list[str], np.random.Generator, Clauses], list[str]]
EDITS: tuple[tuple[Edit, float], ...] = (
    (add, 4.0),
    (drop, 1.0),
    (swap, 2.0),
    (reorder, 1.0),
    (shorten, 0.5),
)


def edit_prompt(
    prompt: str, rng: np.random.Generator, most: int = 2, clauses: Clauses = CLAUSES
) -> str:
    """Return a prompt with 1 to ``most`` random edits; edits that do not apply change nothing.

    Each edit changes one line and keeps the other lines and the layout. A sentence without a full
    stop gets one before another sentence.

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
        parts = edit(sentences(lines[i]), rng, clauses)
        parts = [*(part + "." * part[-1:].isalnum() for part in parts[:-1]), *parts[-1:]]
        if (
            sentences(" ".join(parts)) == parts
        ):  # otherwise sentences would merge, as after "Question:"
            lines[i] = indent + " ".join(parts)
    return "\n".join(lines)
