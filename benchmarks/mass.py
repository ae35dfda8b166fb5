"""Python steps of the multi-agent search system, and its agents' penalties for malformed output."""

from __future__ import annotations

import itertools
import re

from compound.components.retriever import FoundPassage as Passage
from compound.optimizers.weights.credit.shaping import BadIds, TooLong, TooMany

rewriter_penalty = TooMany("queries", max_items=4, penalty=-0.5)
reranker_penalty = BadIds("ids", items="candidates", penalty=-1.0)
answerer_penalty = TooLong("answer", words=30, penalty=-1.0)

_NUMBER = re.compile(r"(?<![\w.])[0-9]{1,9}(?!\w)")


def searchable(queries: list[str], question: str, most: int) -> list[str]:
    """Return the first distinct queries, or the question if there are none.

    >>> searchable(["Lima", " ", "lima", "Peru", "Cusco"], "Where is Lima?", most=2)
    ['Lima', 'Peru']
    >>> searchable([], "Where is Lima?", most=2)
    ['Where is Lima?']
    """
    distinct: dict[str, str] = {}
    for query in queries:
        distinct.setdefault(query.strip().lower(), query.strip())
    distinct.pop("", None)
    return list(distinct.values())[:most] or [question]


def pool(found: list[list[Passage]], most: int, words: int) -> list[str]:
    """Merge the passages of all queries by rank, without duplicates, and truncate them.

    >>> a, b = {"title": "Peru", "text": "Lima is its capital."}, {"title": "", "text": "A river."}
    >>> pool([[a, b], [a]], most=5, words=3)
    ['Peru: Lima is its', 'A river.']
    """
    ranks = itertools.zip_longest(*found)
    texts = [_shown(passage, words) for rank in ranks for passage in rank if passage is not None]
    return list(dict.fromkeys(texts))[:most]


def _shown(passage: Passage, words: int) -> str:
    text = " ".join(passage["text"].split()[:words])
    return f"{passage['title']}: {text}" if passage.get("title") else text


def chosen(ids: str, candidates: list[str], otherwise: int) -> list[str]:
    """Return the distinct candidates that a reranker names by number, counted from 1.

    Args:
        ids: the reranker's output.
        candidates: the candidates shown to the reranker.
        otherwise: number of candidates to take if it names none.

    >>> chosen("I take [2], 9 and 2.", ["a", "b", "c"], otherwise=1)
    ['b']
    >>> chosen("all of them", ["a", "b", "c"], otherwise=2)
    ['a', 'b']
    """
    named = dict.fromkeys(int(number) for number in _NUMBER.findall(ids))
    known = [candidates[i - 1] for i in named if 1 <= i <= len(candidates)]
    return known or candidates[:otherwise]
