"""Building a graph by calling a Python function with placeholders for its inputs.

A placeholder has no value while the graph is built. Operations that need one, such as an ``if`` or
an f-string, raise `GraphBuildError` with the user's line, instead of baking a wrong branch into the
graph.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NoReturn

from compound.core.errors import GraphBuildError

BRANCH = "pass the condition as when=… to a component and join the branches with cp.FirstOf"
REPEAT = "use cp.Map to run a system for each item, or cp.Loop to repeat one"
COMPUTE = "do it in a function with @cp.component, and call that"
WRITE = "give the value to a component as an input; an LLM component shows its inputs in the prompt"


@dataclass
class GraphBuild:
    """A graph under construction.

    Attributes:
        nodes: the nodes created so far, by name.
        constant: returns the source of a constant that is connected to a port, for a name of its
            node; other values are returned as they are.
    """

    nodes: dict[str, object] = field(default_factory=dict)
    constant: Callable[[str, object], object] | None = None

    def node_name(self, name: str) -> str:
        """Return a name that no node has: ``name``, or ``name_2`` and so on.

        >>> GraphBuild().node_name("reader")
        'reader'
        """
        number, unused = 1, name
        while unused in self.nodes:
            number += 1
            unused = f"{name}_{number}"
        return unused


_BUILD: ContextVar[GraphBuild | None] = ContextVar("graph_build", default=None)


def active_build() -> GraphBuild | None:
    """Return the graph under construction in this context, if any."""
    return _BUILD.get()


@contextmanager
def building(constant: Callable[[str, object], object] | None = None) -> Iterator[GraphBuild]:
    """Collect the nodes that are created in a block; for ``constant`` see `GraphBuild`."""
    token = _BUILD.set(GraphBuild(constant=constant))
    try:
        build = _BUILD.get()
        assert build is not None
        yield build
    finally:
        _BUILD.reset(token)


class Placeholder(ABC):
    """Base of inputs and outputs in a declaration: rejects Python operations on their values.

    Conversions that Python also applies in passing (``bool``, ``==``, ``str``) are rejected only
    while a graph is built from a function.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def label(self) -> str:
        """Spelling in messages and YAML."""

    def _reject(self, what: str, hint: str, depth: int = 2) -> NoReturn:
        frame = sys._getframe(depth)
        place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        raise GraphBuildError(
            f"{place}: {what} {self.label}, which has no value while the graph is built", hint=hint
        )

    def __bool__(self) -> bool:
        if active_build() is not None:
            self._reject("`if`, `while`, `and`, `or` or `not` tests", BRANCH)
        return True

    def __eq__(self, other: object) -> bool:
        if active_build() is not None and self is not other and not isinstance(other, Placeholder):
            self._reject(
                "`==` compares", "write value.equals(…) and pass it as when=…, or " + COMPUTE
            )
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __str__(self) -> str:
        if active_build() is not None:
            self._reject("an f-string, format or str() reads", WRITE)
        return repr(self)

    def __format__(self, spec: str) -> str:
        if active_build() is not None:
            self._reject("an f-string, format or str() reads", WRITE)
        return format(repr(self), spec)

    def __getitem__(self, name: str) -> Placeholder:
        self._reject("an index, a slice or a key reads", COMPUTE)

    def _reverse(self) -> NoReturn:
        self._reject("reversed() reads", REPEAT)

    def _contain(self, *_: object) -> NoReturn:
        self._reject("`in` searches", COMPUTE)

    def __len__(self) -> int:  # noqa: PLE0303 - it raises
        self._reject("len() reads", COMPUTE)

    def __iter__(self) -> Iterator[Placeholder]:
        self._reject("a loop or unpacking reads", REPEAT)

    def _compute(self, *_: object) -> NoReturn:
        self._reject("an operator computes with", COMPUTE)

    def _order(self, *_: object) -> NoReturn:
        self._reject("`<`, `<=`, `>` or `>=` compares", COMPUTE)

    __reversed__ = _reverse
    __contains__ = _contain
    __lt__ = __le__ = __gt__ = __ge__ = _order
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        _compute
    )
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = _compute
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _compute
    __neg__ = __pos__ = __abs__ = __invert__ = __int__ = __float__ = __index__ = __round__ = (
        _compute
    )
