"""Python steps of Mujica: parsing of the planner's and workers' outputs, and the knowledge graph."""

from __future__ import annotations

import re

from compound.components.retriever import FoundPassage as Passage
from compound.evaluation.metrics.text import normalize

UNKNOWN = "No relevant information found."
_SEARCH = re.compile(
    r"""Search\(\s*\[(?P<entity>[^\]\n]*)\]\s*,\s*["“'](?P<question>[^\n]*?)["”']\s*\)"""
)


def blocks(text: str, tag: str) -> list[str]:
    """Return the non-empty contents of all occurrences of a tag.

    >>> blocks("<search>Who?</search> <search> </search><search>When?</search>", "search")
    ['Who?', 'When?']
    """
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return [inside.strip() for inside in found if inside.strip()]


def nothing() -> str:
    """Return the history before the first turn."""
    return ""


def read_plan(said: str, most: int) -> dict[str, object]:
    """Parse a planner's turn over texts: at most ``most`` sub-questions, or the final answer.

    An answer is ignored in a turn with questions. A turn with neither is also the last one.

    >>> read_plan("<think>Two films.</think><search>When was A made?</search><search>When B?</search>", 4)
    {'questions': ['When was A made?', 'When B?'], 'answer': '', 'over': False}
    >>> read_plan("<think>A.</think><answer>A</answer>", 4)
    {'questions': [], 'answer': 'A', 'over': True}
    """
    questions = list(dict.fromkeys(blocks(said, "search")))[:most]
    return {
        "questions": questions,
        "answer": "" if questions else _answer(said),
        "over": not questions,
    }


def _answer(said: str) -> str:
    return (blocks(said, "answer") or [""])[-1]


def numbered(passages: list[Passage], words: int) -> str:
    """Format passages for a worker, numbered from 0 and truncated.

    >>> numbered([{"title": "Peru", "text": "Lima is its capital."}], words=3)
    '[0] Peru: Lima is its'
    """
    lines = [f"{p['title']}: {' '.join(p['text'].split()[:words])}" for p in passages]
    return _lines(lines)


def _lines(texts: list[str]) -> str:
    return "\n".join(f"[{i}] {text}" for i, text in enumerate(texts))


def sentence(reply: str) -> str:
    """Return the sentence in a worker's reply, or a fixed sentence if there is none.

    >>> sentence("<think>[0] says so.</think><select>[0]</select><sentence>Lima is in Peru.</sentence>")
    'Lima is in Peru.'
    >>> sentence("Lima")
    'No relevant information found.'
    """
    return " ".join((blocks(reply, "sentence") or [UNKNOWN])[-1].split())


def selected(reply: str) -> list[int]:
    """Return the numbers that a worker selected; -1 means none of the passages.

    >>> selected("<select> [0][2] </select>"), selected("<select>[-1]</select>"), selected("0")
    ([0, 2], [-1], [])
    """
    return [
        int(number)
        for block in blocks(reply, "select")
        for number in re.findall(r"-?[0-9]{1,9}", block)
    ]


def remember(history: str, said: str, sentences: list[str]) -> str:
    """Append a turn of the planner and the workers' results to the history.

    >>> print(remember("", "<search>Who wrote Emma?</search>", ["Jane Austen wrote Emma."]))
    <search>Who wrote Emma?</search>
    Obs: Jane Austen wrote Emma.
    """
    observed = f"Obs: {' '.join(sentences)}" if sentences else ""
    return "\n".join(part for part in (history, said.strip(), observed) if part)


# --- knowledge graph ---------------------------------------------------------------------------------------


def topics(evidences: list[list[str]]) -> list[str]:
    """Return the entities that a question starts from: heads of triples that are not tails of others.

    >>> topics([["Emma", "author", "Jane Austen"], ["Jane Austen", "father", "George Austen"]])
    ['Emma']
    """
    heads = list(dict.fromkeys(head for head, _, _ in evidences))
    return [
        head for head in heads if not any(_same(head, tail) for _, _, tail in evidences)
    ] or heads


def entity_list(entities: list[str]) -> str:
    """Format the known entities for the planner, numbered from 0."""
    return _lines(entities)


def read_actions(said: str, entities: list[str], most: int) -> dict[str, object]:
    """Parse a planner's turn over a graph: lines ``Search([entity], "question")``, or the final answer.

    An entity is given by its number in the list, or by its name. Malformed lines and unknown
    numbers are ignored.

    >>> turn = '<action>Search([0], "Who wrote it?")\\nSearch([7], "When?")</action>'
    >>> read_actions(turn, ["Emma"], 4)["searches"]
    [{'entity': 'Emma', 'question': 'Who wrote it?'}]
    """
    searches = [
        {"entity": entity, "question": match["question"].strip()}
        for block in blocks(said, "action")
        for match in _SEARCH.finditer(block)
        if (entity := _entity(match["entity"].strip(), entities)) and match["question"].strip()
    ][:most]
    return {"searches": searches, "answer": "" if searches else _answer(said), "over": not searches}


def _entity(given: str, entities: list[str]) -> str:
    if not re.fullmatch(r"[0-9]{1,9}", given):
        return given
    return entities[int(given)] if int(given) < len(entities) else ""


def question(search: dict[str, str]) -> str:
    """Return the question of a search."""
    return search["question"]


def materials(search: dict[str, str], evidences: list[list[str]]) -> str:
    """Format the triples whose head is the entity of a search, numbered from 0.

    >>> materials({"entity": "emma", "question": "?"}, [["Emma", "author", "Jane Austen"]])
    '[0] Emma, author, Jane Austen'
    """
    return _lines([", ".join(triple) for triple in _from(search["entity"], evidences)]) or "none"


def with_found(
    entities: list[str], searches: list[dict[str, str]], evidences: list[list[str]]
) -> list[str]:
    """Add the tails of the searched entities' triples to the known entities."""
    tails = [tail for search in searches for _, _, tail in _from(search["entity"], evidences)]
    return list(dict.fromkeys([*entities, *tails]))


def _from(entity: str, evidences: list[list[str]]) -> list[list[str]]:
    return [triple for triple in evidences if _same(triple[0], entity)]


def _same(one: str, other: str) -> bool:
    """Return whether two names match: one consists of at least half of the other's normalized words.

    The evidences name an entity in several ways, such as "Andrew III" and "Andrew III of Hungary".
    """
    short, long = sorted((set(normalize(one).split()), set(normalize(other).split())), key=len)
    return short <= long and 2 * len(short) >= len(long)
