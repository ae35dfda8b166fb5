"""The steps of the pubmedqa system that are plain code: preparing the abstract, a rule, reading a verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

Verdict = Literal["yes", "no", "maybe"]
How = Literal["whole", "ending", "matching"]
VERDICTS: Mapping[str, Verdict] = {"yes": "yes", "no": "no", "maybe": "maybe"}

_SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z])")
_DENIALS = re.compile(
    r"\b(?:no|not|nor|neither|without|cannot|failed|lack|lacks|similar|comparable|unchanged|insignificant)\b"
)
_CLAIMS = re.compile(
    r"\b(?:significant|significantly|higher|lower|greater|increased|decreased|improved|reduced|associated"
    r"|correlated|predicted|effective|better)\b"
)
_HEDGES = re.compile(
    r"\b(?:may|might|could|possibly|unclear|inconclusive|inconsistent|although|however|limited|further|only)\b"
)
# "No difference was found" denies something, but it is no answer: a verdict "no" ends there
_WORD = r"(?:yes|maybe|no(?=\W*$|\s*[^\w\s-]))(?![\w-])"
_OPTIONS = re.compile(r"\byes\s*[,/]\s*no\s*,?\s*(?:or|/)\s*maybe\b", re.IGNORECASE)
_MARKED = re.compile(
    rf"\banswer(?:\s+to\s+(?:this|the)\s+question)?(?:\s+is\b\s*:?|\s*:)[\s*_\"']*({_WORD})", re.IGNORECASE
)
_STATED = re.compile(rf"(?:^|[.:;!?\n])[\s*_\"']*({_WORD})|(?<![\w-])(yes|no|maybe)\W*$", re.IGNORECASE)


def sentences(paragraphs: list[str]) -> list[str]:
    """Return the sentences of an abstract in order.

    >>> sentences(["One. Two (P = 0.05) here.", "Three?"])
    ['One.', 'Two (P = 0.05) here.', 'Three?']
    """
    return [part for text in paragraphs for part in _SENTENCE_END.split(text.strip()) if part]


def prepare(context: list[str], question: str, how: How, keep: int) -> str:
    """Return the part of an abstract to read.

    Args:
        context: the sections of the abstract.
        question: what is asked about it.
        how: all of it, its last sentences, or those most like the question by BM25, in their order.
        keep: how many sentences, unless it is all of it.

    >>> prepare(["We asked. We found a cure. Birds sang."], "Is there a cure?", "ending", 1)
    'Birds sang.'
    """
    found = sentences(context)
    if how == "ending":
        found = found[-keep:]
    elif how == "matching":
        from compound.components.index import PassageIndex

        best = {int(passage["id"]) for passage in PassageIndex().rank(question, found, keep)}
        found = [sentence for i, sentence in enumerate(found, 1) if i in best]
    return " ".join(found)


def by_rule(finding: str, balance: float, doubt: int) -> Verdict:
    """Return a verdict from the words of a finding, without any model.

    Args:
        finding: the main result, in a sentence or a few.
        balance: the ratio of denials to claims above which the verdict is "no".
        doubt: the number of hedges from which it is otherwise "maybe".

    >>> by_rule("The drug did not help.", 1.0, 2), by_rule("Mortality was reduced.", 1.0, 2)
    ('no', 'yes')
    """
    words = finding.lower()
    denials, claims, hedges = (len(kind.findall(words)) for kind in (_DENIALS, _CLAIMS, _HEDGES))
    if denials > balance * claims:
        return "no"
    return "maybe" if hedges >= doubt else "yes"


def verdict(text: str) -> Literal["yes", "no", "maybe", "unclear"]:
    """Return the verdict that a text states, never a part of a word or a "no" that belongs to a noun.

    The last one after "answer:" or "the answer is" counts; else the last one that opens a sentence or ends
    the text.

    >>> verdict("The diagnosis was confirmed. Answer: yes"), verdict("No difference was found.")
    ('yes', 'unclear')
    """
    plain = _OPTIONS.sub("", text).strip()
    found = _MARKED.findall(plain) or ["".join(pair) for pair in _STATED.findall(plain)]
    return VERDICTS[found[-1].lower()] if found else "unclear"
