"""The kind ``retriever``: a search over a corpus, or over the passages of each example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, Tag

from compound.components.index import BM25, Dense, PassageIndex
from compound.components.retriever import Retriever
from compound.errors import DeclarationError
from compound.spec.kinds.kind import DumpContext, Kind, MakeContext, make_settings
from compound.spec.schema.settings import CountSetting
from compound.spec.schema.types import Model
from compound.spec.schema.wiring import Wiring, label_discriminator
from compound.spec.spelling import Tree

Index = BM25 | Dense | PassageIndex
INDEXES: Mapping[str, type[Index]] = {"bm25": BM25, "dense": Dense, "passages": PassageIndex}


class _Index(Model):
    k: CountSetting = 5
    """Number of passages to return."""
    text: str = "text"
    """The column with a passage's text."""
    title: str = "title"
    """The column with a passage's title."""
    id: str = "id"
    """The column that identifies a passage."""


class BM25Settings(_Index):
    """A lexical search with BM25."""

    index: Literal["bm25"]
    """bm25: lexical search."""
    corpus: str
    """A .jsonl or .csv file of passages, optionally .gz, relative to this file."""
    k1: float = Field(default=1.5, ge=0)
    """Saturation of the term frequency in BM25."""
    b: float = Field(default=0.75, ge=0, le=1)
    """Length normalization in BM25."""
    language: str | None = None
    """Stop words and stems, for example german; any: every word as written."""


class DenseSettings(_Index):
    """A search by embeddings."""

    index: Literal["dense"]
    """dense: search by embeddings."""
    corpus: str
    """A .jsonl or .csv file of passages, optionally .gz, relative to this file."""
    model: str = ""
    """The embedding model: a sentence-transformers folder or hub id."""
    revision: str | None = None
    """The model's hub revision."""
    device: str | None = None
    """The device of the embedding model, for example cuda."""
    windows: bool = False
    """Whether passages longer than the model reads are embedded in windows."""


class PassagesSettings(_Index):
    """A ranking of the passages that each example provides on the port `passages`."""

    index: Literal["passages"]
    """passages: rank the passages of the `passages` input."""
    model: str | None = None
    """An embedding model; BM25 by default."""
    k1: float = Field(default=1.5, ge=0)
    """Saturation of the term frequency in BM25."""
    b: float = Field(default=0.75, ge=0, le=1)
    """Length normalization in BM25."""
    revision: str | None = None
    """The model's hub revision."""
    device: str | None = None
    """The device of the embedding model, for example cuda."""
    language: str | None = None
    """Stop words and stems for BM25, for example german; any: every word as written."""
    windows: bool = False
    """Whether passages longer than the model reads are embedded in windows."""


class RetrieverEntry(Wiring):
    """A retriever: maps a query to passages, best first."""

    retriever: Annotated[
        Annotated[BM25Settings, Tag("~bm25")]
        | Annotated[DenseSettings, Tag("~dense")]
        | Annotated[PassagesSettings, Tag("~passages")],
        label_discriminator("index", INDEXES),
    ]
    """The index and the number of passages to return."""


def _make(entry: RetrieverEntry, context: MakeContext) -> Retriever | None:
    file, inside = context.file, (*context.address, "retriever")
    given = make_settings(entry.retriever.given)
    index = {key: value for key, value in given.items() if key not in ("index", "k")}
    if "corpus" in index:
        index["corpus"], index["within"] = file.resolve_path(index["corpus"], (*inside, "corpus"))
    if index.get("model"):
        file.may_read(index["model"], (*inside, "model"))
    rest = {"k": given["k"]} if "k" in given else {}
    kind = INDEXES[entry.retriever.index]
    return file.attempt(inside, lambda: Retriever(context.name, kind(**index), **rest))


def _dump(component: Retriever, context: DumpContext) -> Tree:
    index = component.index
    name = next((name for name, kind in INDEXES.items() if type(index) is kind), None)
    if name is None or not isinstance(index, Index):
        raise DeclarationError(
            f"{component.name}: the index {type(index).__name__} cannot be written in YAML"
        )
    given: Tree = {"index": name, **context.changed_fields(index, ("within",))}
    if "corpus" in given:
        given["corpus"] = str(given["corpus"])
    return {"retriever": {**given, "k": context.setting("k", component.k)}}


RETRIEVER_KIND = Kind(
    "retriever",
    RetrieverEntry,
    _make,
    (Retriever,),
    _dump,
    tags={"~bm25": BM25Settings, "~dense": DenseSettings, "~passages": PassagesSettings},
)
