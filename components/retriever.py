"""Retriever component: maps a query to passages, best first."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import PositiveInt

from compound.components.index import PassageIndex
from compound.core.errors import CallError, DataError, DeclarationError
from compound.core.narrowing import entry, report_wrong_arguments
from compound.graph.component import CallContext, Operation, check_name
from compound.graph.composite import largest_number
from compound.graph.space import Choice, Int
from compound.graph.types import Port

FoundPassage = dict[str, Any]  # as a port's type; see `compound.components.index.Passage`


class IndexDeclaration(Protocol):
    """A declared index, which is built at the first search."""

    @property
    def digest(self) -> str:
        """Digest of the corpus and the settings; part of cache keys."""
        ...

    def open(self) -> Any:  # noqa: ANN401
        """Build or load the index; its ``search(query, k)`` returns at most ``k`` passages, best first."""
        ...


@report_wrong_arguments
@dataclass(frozen=True, eq=False, repr=False)
class Retriever(Operation):
    """A component that searches an index over a corpus, or ranks the passages of each example.

    Attributes:
        name: the component's name.
        index: `BM25` or `Dense` over a corpus, or a `PassageIndex`, which ranks the ``passages``
            input.
        k: number of passages to return; may be a space to tune.

    Example:
        >>> from compound import Input
        >>> ranker = Retriever("ranker", PassageIndex(), k=Choice(1, 3, 5))
        >>> ranker(query=Input("question"), passages=Input("context", list[dict])).label
        '$ranker'
    """

    name: str
    index: IndexDeclaration | PassageIndex
    k: PositiveInt | Int | Choice = 5

    kind = "retriever"
    cacheable = True

    def __post_init__(self) -> None:
        check_name("Retriever", self.name)
        options = (
            self.k.options if isinstance(self.k, Choice) else (getattr(self.k, "low", self.k),)
        )
        if any(type(option) is not int or option < 1 for option in options):
            raise DeclarationError(
                f"retriever {self.name!r}: k must be a whole number >= 1, but got {self.k!r}"
            )

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        ports = {"query": Port(str)}
        return {**ports, "passages": Port(list)} if isinstance(self.index, PassageIndex) else ports

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {"passages": Port(list[FoundPassage])}

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        return {"k": self.k}

    @property
    def version(self) -> str:  # noqa: D102
        return f"retriever:{self.index.digest}"

    def output_sizes(self, sizes: Mapping[str, float]) -> Mapping[str, float]:  # noqa: D102
        return {"passages": sizes.get("k", largest_number(self.k))}

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        query, k = entry(inputs, "query", str), entry(values, "k", int)
        if isinstance(self.index, PassageIndex):
            try:
                return {"passages": self.index.rank(query, entry(inputs, "passages", list), k)}
            except DataError as error:  # of passages by a model: fail this call, not the run
                raise CallError(error.message, hint=error.hint) from error
        index = await asyncio.to_thread(self.index.open)
        return {"passages": [dict(passage) for passage in index.search(query, k)]}
