"""Python steps of the pubmedqa system: preparation of the abstract, a rule, and parsing of a verdict."""

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
# "No difference was found" is not an answer: a verdict "no" must be followed by punctuation or the
# end.
_WORD = r"(?:yes|maybe|no(?=\W*$|\s*[^\w\s-]))(?![\w-])"
_OPTIONS = re.compile(r"\byes\s*[,/]\s*no\s*,?\s*(?:or|/)\s*maybe\b", re.IGNORECASE)
_MARKED = re.compile(
    rf"\banswer(?:\s+to\s+(?:this|the)\s+question)?(?:\s+is\b\s*:?|\s*:)[\s*_\"']*({_WORD})",
    re.IGNORECASE,
)
_STATED = re.compile(
    rf"(?:^|[.:;!?\n])[\s*_\"']*({_WORD})|(?<![\w-])(yes|no|maybe)\W*$", re.IGNORECASE
)


def sentences(paragraphs: list[str]) -> list[str]:
    """Split an abstract into sentences.

    >>> sentences(["One. Two (P = 0.05) here.", "Three?"])
    ['One.', 'Two (P = 0.05) here.', 'Three?']
    """
    return [part for text in paragraphs for part in _SENTENCE_END.split(text.strip()) if part]


def prepare(context: list[str], question: str, how: How, keep: int) -> str:
    """Select the part of an abstract that is shown to the model.

    Args:
        context: the sections of the abstract.
        question: the question about it.
        how: ``whole``; ``ending``, the last sentences; or ``matching``, those most similar to the
            question by BM25, in their order.
        keep: number of sentences, except for ``whole``.

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
    """Derive a verdict from the words of a finding, without a model.

    Args:
        finding: the main result, in one or a few sentences.
        balance: the ratio of denials to claims above which the verdict is "no".
        doubt: the number of hedges from which the verdict is otherwise "maybe".

    >>> by_rule("The drug did not help.", 1.0, 2), by_rule("Mortality was reduced.", 1.0, 2)
    ('no', 'yes')
    """
    words = finding.lower()
    denials, claims, hedges = (len(kind.findall(words)) for kind in (_DENIALS, _CLAIMS, _HEDGES))
    if denials > balance * claims:
        return "no"
    return "maybe" if hedges >= doubt else "yes"


def verdict(text: str) -> Literal["yes", "no", "maybe", "unclear"]:
    """Return the verdict that a text states; parts of words and a "no" before a noun do not count.

    The last verdict after "answer:" or "the answer is" counts, else the last one that starts a
    sentence or ends the text.

    >>> verdict("The diagnosis was confirmed. Answer: yes"), verdict("No difference was found.")
    ('yes', 'unclear')
    """
    plain = _OPTIONS.sub("", text).strip()
    found = _MARKED.findall(plain) or ["".join(pair) for pair in _STATED.findall(plain)]
    return VERDICTS[found[-1].lower()] if found else "unclear"
