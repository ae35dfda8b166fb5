"""Upper bounds on a component's requests, known before it runs.

A component declares the maximum length of its outputs and the requests that it makes (`Component.reach`).

Lengths are in bytes for text that no tokenizer has processed, since a token is at least one byte, and in
tokens for text written by a model with a token limit. Text is assumed to be read in no more tokens than it
was written in, which holds if reader and writer use the same tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, get_args, get_origin

from compound.engine import MAX_IMAGE_TOKENS
from compound.graph.configuration import canonical_json, to_readable_json
from compound.image import Image, replace_images

if TYPE_CHECKING:
    from compound.graph.space import Text

SCALAR = 32  # maximum bytes of a number or boolean as text
CHARACTER = 4  # maximum bytes of a UTF-8 character


@dataclass(frozen=True)
class Extent:
    """Upper bounds of a value: its length as text, its number of items, and its possible values.

    Attributes:
        bytes: length of the part counted in bytes.
        tokens: length of the part written by a model.
        items: number of items of a list.
        values: possible values, or the minimum and maximum; empty if unknown.
        unbounded_reason: reason for an infinite length.

    >>> Extent(bytes=10) + Extent(tokens=5)
    Extent(bytes=10, tokens=5, items=inf, values=(), unbounded_reason='')
    """

    bytes: float = 0
    tokens: float = 0
    items: float = math.inf
    values: tuple[object, ...] = ()
    unbounded_reason: str = ""

    def __add__(self, other: Extent) -> Extent:
        return Extent(
            self.bytes + other.bytes,
            self.tokens + other.tokens,
            unbounded_reason=self.unbounded_reason or other.unbounded_reason,
        )

    def times(self, n: float) -> Extent:
        """Return the extent of the concatenation of ``n`` such texts."""
        return Extent(scaled(self.bytes, n), scaled(self.tokens, n), unbounded_reason=self.unbounded_reason)

    def union(self, other: Extent) -> Extent:
        """Return the extent of a value that is one of the two."""
        return Extent(
            max(self.bytes, other.bytes),
            max(self.tokens, other.tokens),
            max(self.items, other.items),
            (*self.values, *other.values) if self.values and other.values else (),
            self.unbounded_reason or other.unbounded_reason,
        )

    def truncated(self, characters: int) -> Extent:
        """Return the extent of the text truncated to a number of characters.

        >>> Extent(bytes=math.inf, unbounded_reason="a function").truncated(10)
        Extent(bytes=40, tokens=0, items=inf, values=(), unbounded_reason='')
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
        """The largest possible number; infinite if unknown."""
        numbers = [value for value in self.values if isinstance(value, int | float)]
        return max(numbers, default=math.inf)


def scaled(a: float, n: float) -> float:
    """Return the product, with ``0 * inf = 0``."""
    return 0 if not a or not n else a * n


def extent_of_values(values: Iterable[object]) -> Extent:
    """Return the extent of a value that is one of the given values, such as a column of the data.

    >>> extent_of_values(["a", "bcd"]).bytes, extent_of_values([["a", "b"], []]).items
    (3, 2)
    """
    found = list(values)
    lengths = list(map(_length, found))
    items = [len(value) if isinstance(value, list | tuple) else 1 for value in found]
    margin = 8 * max(items, default=0)  # numbers and line breaks between the items of a list
    listed = any(isinstance(value, list | tuple | Mapping) for value in found)
    return Extent(max(lengths, default=0) + (margin if listed else 0), items=max(items, default=0))


def _length(value: object) -> int:
    """Return the bytes of a value as text, with the most that its images take."""
    images: list[Image] = []

    def mark(image: Image) -> str:
        images.append(image)
        return f"[image {len(images)}]"

    shown = replace_images(value, mark)
    text = shown if isinstance(shown, str) else canonical_json(to_readable_json(shown))
    described = sum(len(image.label) + 1 for image in images)  # after the text
    return len(text.encode(errors="replace")) + described + MAX_IMAGE_TOKENS * len(images)


def extent_of_setting(setting: object) -> Extent:
    """Return the extent of a setting: of its options, or of its bounds for a numeric range."""
    options = getattr(setting, "options", None)
    if options is None and hasattr(setting, "low") and hasattr(setting, "high"):
        options = (setting.low, setting.high)
    if options is None:
        options = (getattr(setting, "value", setting),)
    found = extent_of_values(options)
    bytes_ = max(found.bytes, SCALAR) if hasattr(setting, "low") else found.bytes
    return replace(found, bytes=bytes_, values=tuple(options))


def extent_of_type(kind: object, why: str) -> Extent:
    """Return the extent of any value of a type; infinite for text and collections.

    >>> extent_of_type(Literal["yes", "no"], "").bytes, extent_of_type(str, "a function").unbounded_reason
    (3, 'a function')
    """
    if get_origin(kind) is Literal:
        return replace(extent_of_values(get_args(kind)), values=get_args(kind))
    if isinstance(kind, type) and issubclass(kind, bool | int | float):
        return Extent(SCALAR, items=1)
    return Extent(math.inf, unbounded_reason=why)


@dataclass(frozen=True)
class CallBound:
    """At most ``calls`` requests to a model, each within the given lengths.

    Attributes:
        purpose: purpose of the requests, in a word or two.
        calls: maximum number of requests.
        prompt: extent of the messages' text.
        max_tokens: maximum number of tokens of an answer.
        lms: models that may be called; empty for the system's default model.
        messages: number of messages per request.
    """

    purpose: str
    calls: float
    prompt: Extent
    max_tokens: float
    lms: tuple[str, ...] = ()
    messages: int = 1


@dataclass(frozen=True)
class Reach:
    """Upper bounds of the outputs and requests of one component call.

    Attributes:
        outputs: the extent of each output.
        requests: requests to models; ``None`` if the class does not declare them.
    """

    outputs: Mapping[str, Extent]
    requests: Sequence[CallBound] | None = None


@dataclass(frozen=True)
class Use:
    """Upper bounds of all calls of a component in one system run.

    Attributes:
        calls: number of calls.
        inputs, outputs: extent of the longest value of each port.
        requests: requests of one call; ``None`` if not declared.
    """

    calls: float
    inputs: Mapping[str, Extent]
    outputs: Mapping[str, Extent]
    requests: Sequence[CallBound] | None


class Limits(Protocol):
    """Limits of settings that `Component.reach` can query."""

    @property
    def lms(self) -> tuple[str, ...]:
        """The system's default model."""
        ...

    @property
    def read_corpora(self) -> bool:
        """Whether to read corpora for their longest passages."""
        ...

    def text(self, key: str, space: Text) -> Extent:
        """Return the extent of a text parameter during the run."""
        ...

    def value(self, key: str, default: object) -> object:
        """Return the initial value of a parameter."""
        ...

    @property
    def gold(self) -> Extent:
        """Extent of the longest gold value of the examples."""
        ...
