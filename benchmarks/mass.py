"""Python steps of the multi-agent search system, and its agents' penalties for malformed output.

The rules and numbers of the penalties are those of MMOA-RAG's three agents.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from compound.components.retriever import FoundPassage as Passage
from compound.core.example import Values
from compound.core.narrowing import entry

_NUMBER = re.compile(r"(?<![\w.])[0-9]{1,9}(?!\w)")
_ID = r"[0-9]{1,9}"
_LIST = rf"\[\s*{_ID}(?:\s*,\s*{_ID})*\s*\]"
_ONE = rf"(?:\[{_ID}\]|{_ID})"
_IDS = re.compile(rf"\s*+(?:{_LIST}|{_ONE}(?:(?:\s*+,\s*+|\s++){_ONE})*)\s*+\.?\s*+")
# splits at punctuation, so that joined words count separately
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")


class FormPenalty:
    """Penalty for calls that break a rule; a reply that cannot be parsed gets the same."""

    def __init__(self, breaks: Callable[[Values, Values], bool], penalty: float) -> None:
        self.breaks, self.malformed = breaks, penalty

    def __call__(self, inputs: Values, outputs: Values) -> float:
        """Return the penalty, or 0."""
        return self.malformed if self.breaks(inputs, outputs) else 0.0


def _many_queries(inputs: Values, outputs: Values) -> bool:
    return len(entry(outputs, "queries", list)) > 4


def _wrong_ids(inputs: Values, outputs: Values) -> bool:
    """Whether ids are malformed, unknown or repeated; ``2, 5``, ``[2] [5]`` and ``[2, 5]`` are right."""
    text = entry(outputs, "ids", str)
    ids = [int(number) for number in re.findall(_ID, text)] if _IDS.fullmatch(text) else []
    known = range(1, len(entry(inputs, "candidates", list)) + 1)
    return not ids or len(set(ids)) < len(ids) or any(i not in known for i in ids)


def _many_words(inputs: Values, outputs: Values) -> bool:
    return len(_WORD.findall(entry(outputs, "answer", str))) > 30


rewriter_penalty = FormPenalty(_many_queries, -0.5)
reranker_penalty = FormPenalty(_wrong_ids, -1.0)
answerer_penalty = FormPenalty(_many_words, -1.0)


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
