"""Upper bounds of the requests of a component, known before it runs.

A component declares how long its outputs can be and which requests it makes (`Component.reach`).

Lengths are in bytes where no tokenizer has seen the text, since a token holds at least one byte, and in
tokens where a model wrote it with a limit of tokens. A text is assumed to be read in no more tokens than it
was written in, which holds where reader and writer have the same tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, get_args, get_origin

from compound.graph.configuration import canonical, readable

if TYPE_CHECKING:
    from compound.graph.space import Text

SCALAR = 32  # bytes of a number or a truth value as text
CHARACTER = 4  # bytes of a character in UTF-8, at most


@dataclass(frozen=True)
class Extent:
    """The most that a value can be: its length as text, its items, and its possible values.

    Attributes:
        bytes: of the part that is counted in bytes.
        tokens: of the part that a model wrote.
        items: of a list.
        values: possible values, or the least and the largest; empty when unknown.
        why: what makes the length infinite.

    >>> Extent(bytes=10) + Extent(tokens=5)
    Extent(bytes=10, tokens=5, items=inf, values=(), why='')
    """

    bytes: float = 0
    tokens: float = 0
    items: float = math.inf
    values: tuple[object, ...] = ()
    why: str = ""

    def __add__(self, other: Extent) -> Extent:
        return Extent(self.bytes + other.bytes, self.tokens + other.tokens, why=self.why or other.why)

    def times(self, n: float) -> Extent:
        """Return the extent of ``n`` such texts."""
        return Extent(scaled(self.bytes, n), scaled(self.tokens, n), why=self.why)

    def joined(self, other: Extent) -> Extent:
        """Return the extent of a value that is one of two."""
        return Extent(
            max(self.bytes, other.bytes),
            max(self.tokens, other.tokens),
            max(self.items, other.items),
            (*self.values, *other.values) if self.values and other.values else (),
            self.why or other.why,
        )

    def cut(self, characters: int) -> Extent:
        """Return the extent of the text after it is cut to so many characters.

        >>> Extent(bytes=math.inf, why="a function").cut(10)
        Extent(bytes=40, tokens=0, items=inf, values=(), why='')
        """
        longest = CHARACTER * characters
        if self.bytes + self.tokens <= longest:
            return self
        return Extent(longest) if self.tokens > longest or not self.tokens else Extent(longest, self.tokens)

    @property
    def finite(self) -> bool:
        """Whether the length is bounded."""
        return math.isfinite(self.bytes + self.tokens)

    @property
    def largest(self) -> float:
        """The largest number that the value can be; infinite when unknown."""
        numbers = [value for value in self.values if isinstance(value, int | float)]
        return max(numbers, default=math.inf)


def scaled(a: float, n: float) -> float:
    """Return the product, where nothing of an infinite length is nothing."""
    return 0 if not a or not n else a * n


def of_values(values: Iterable[object]) -> Extent:
    """Return the extent of a value that is one of these, such as a column of the data.

    >>> of_values(["a", "bcd"]).bytes, of_values([["a", "b"], []]).items
    (3, 2)
    """
    found = list(values)
    lengths = [len(_text(value).encode(errors="replace")) for value in found]
    items = [len(value) if isinstance(value, list | tuple) else 1 for value in found]
    margin = 8 * max(items, default=0)  # numbers and line breaks between the items of a list
    listed = any(isinstance(value, list | tuple | Mapping) for value in found)
    return Extent(max(lengths, default=0) + (margin if listed else 0), items=max(items, default=0))


def _text(value: object) -> str:
    return value if isinstance(value, str) else canonical(readable(value))


def of_setting(setting: object) -> Extent:
    """Return the extent of a setting: of its options, or of its limits where it is a range of numbers."""
    options = getattr(setting, "options", None)
    if options is None and hasattr(setting, "low") and hasattr(setting, "high"):
        options = (setting.low, setting.high)
    if options is None:
        options = (getattr(setting, "value", setting),)
    found = of_values(options)
    bytes_ = max(found.bytes, SCALAR) if hasattr(setting, "low") else found.bytes
    return replace(found, bytes=bytes_, values=tuple(options))


def of_type(kind: object, why: str) -> Extent:
    """Return the extent of any value of a type; infinite for texts and collections.

    >>> of_type(Literal["yes", "no"], "").bytes, of_type(str, "a function").why
    (3, 'a function')
    """
    if get_origin(kind) is Literal:
        return replace(of_values(get_args(kind)), values=get_args(kind))
    if isinstance(kind, type) and issubclass(kind, bool | int | float):
        return Extent(SCALAR, items=1)
    return Extent(math.inf, why=why)


@dataclass(frozen=True)
class CallBound:
    """At most ``calls`` requests to a model, of which each is at most as long as this.

    Attributes:
        purpose: what they are for, in a word or two.
        calls: how many.
        prompt: the text of the messages.
        max_tokens: the longest answer.
        lms: the models they may go to; empty for the system's own.
        messages: how many messages a request has.
    """

    purpose: str
    calls: float
    prompt: Extent
    max_tokens: float
    lms: tuple[str, ...] = ()
    messages: int = 1


@dataclass(frozen=True)
class Reach:
    """The most that a component can return and ask for in one call.

    Attributes:
        outputs: the extent of each output.
        requests: what it asks of models; ``None`` when its class does not declare it.
    """

    outputs: Mapping[str, Extent]
    requests: Sequence[CallBound] | None = None


@dataclass(frozen=True)
class Use:
    """All calls of a component in one run of the system, at most.

    Attributes:
        calls: how many.
        inputs, outputs: the longest values of each port.
        requests: what one call asks of models; ``None`` when that is not declared.
    """

    calls: float
    inputs: Mapping[str, Extent]
    outputs: Mapping[str, Extent]
    requests: Sequence[CallBound] | None


class Limits(Protocol):
    """What a component's `Component.reach` may ask about its settings."""

    @property
    def lms(self) -> tuple[str, ...]:
        """The system's own model."""
        ...

    @property
    def read_corpora(self) -> bool:
        """Whether to read corpora for their longest passages."""
        ...

    def text(self, key: str, space: Text) -> Extent:
        """Return the longest text that a parameter can hold during the run."""
        ...

    def value(self, key: str, default: object) -> object:
        """Return the value that a parameter starts from."""
        ...

    @property
    def gold(self) -> Extent:
        """The longest value that examples hold."""
        ...
