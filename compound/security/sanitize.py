"""Make text from outside harmless: for our files, for a terminal, and without the user's keys.

Whatever a server, a data file or somebody else's YAML says is data. It may hold lone surrogates, which no
UTF-8 file can store, control characters, which a terminal obeys, and keys that a server sends back.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, TextIO, TypeVar, cast

Stored = TypeVar("Stored")
REPLACEMENT = "\ufffd"
HIDDEN = "[key removed]"
SHORTEST = 8  # characters of a key that is removed where it is named; shorter ones occur by chance
SHORTEST_GUESSED = 16  # of a variable that merely is named like a key
NAMED_LIKE_A_KEY = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD)$")

_SURROGATES = re.compile("[\ud800-\udfff]")
_CONTROLS = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]"
)  # all but tab, newline and return
_RETURNS = re.compile("\r(?!\n)")
_REORDERING = re.compile("[\u2028-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
"""What makes a terminal show text in another order, on another line, or not at all."""
_SECRETS: set[str] = set()


def without_controls(text: str) -> str:
    r"""Return text whose control characters and lone surrogates are replaced by U+FFFD.

    Tabs, newlines and carriage returns stay.

    >>> without_controls("\x1b[31mred\x00\ud83d, line\n")
    '�[31mred��, line\n'
    """
    return _CONTROLS.sub(REPLACEMENT, text) if not text.isprintable() else text


def storable(value: Stored) -> Stored:
    r"""Return a value whose texts can be written as UTF-8; the very same object where they can already.

    >>> storable({"a": ["\ud83d", 1]})
    {'a': ['�', 1]}
    """
    return cast("Stored", _storable(value)) if _has_surrogates(value) else value  # only its texts change


def _has_surrogates(value: object) -> bool:
    if isinstance(value, str):
        return not value.isascii() and _SURROGATES.search(value) is not None
    if isinstance(value, dict):
        return any(map(_has_surrogates, value)) or any(map(_has_surrogates, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_surrogates, value))


def _storable(value: object) -> object:
    if isinstance(value, str):
        return _SURROGATES.sub(REPLACEMENT, value)
    if isinstance(value, dict):
        return {_storable(key): _storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = map(_storable, value)
        return list(items) if isinstance(value, list) else tuple(items)
    return value


def remember_secret(value: str | None) -> None:
    """Remove a key from everything that is recorded or printed from now on."""
    if value and len(value) >= SHORTEST:
        _SECRETS.add(value)


def remember_environment(environment: Mapping[str, str] | None = None) -> None:
    """Remember the values of all environment variables that are named like keys."""
    for name, value in (os.environ if environment is None else environment).items():
        if NAMED_LIKE_A_KEY.search(name.upper()) and len(value) >= SHORTEST_GUESSED:
            remember_secret(value)


def redacted(text: str) -> str:
    """Return text without the keys that are known.

    >>> remember_secret("sk-example-of-a-key")
    >>> redacted("denied for sk-example-of-a-key")
    'denied for [key removed]'
    """
    for secret in _SECRETS:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    return text


def safe(text: str) -> str:
    """Return text as it may be recorded: without control characters and without keys."""
    return redacted(without_controls(text))


def printable(text: str) -> str:
    r"""Return text as a terminal may receive it.

    >>> printable("fine\rbad\x1b]0;title\x07\n")
    'fine�bad�]0;title�\n'
    """
    cleaned = safe(text)
    if not cleaned.isascii():
        cleaned = _REORDERING.sub(REPLACEMENT, cleaned)
    return cleaned if text in {"\r", ""} else _RETURNS.sub(REPLACEMENT, cleaned)


class SafeStream:
    """A text stream that makes everything written to it `printable`."""

    def __init__(self, stream: IO[str]) -> None:
        self.raw = stream

    def write(self, text: str) -> int:
        """Write text without what a terminal would obey."""
        self.raw.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream has
        return getattr(self.raw, name)


def raw(stream: IO[str]) -> IO[str]:
    """Return the stream beneath a `SafeStream`, for a library that draws on the terminal itself."""
    return stream.raw if isinstance(stream, SafeStream) else stream


@contextmanager
def safe_output() -> Iterator[None]:
    """Make everything that is printed in a block `printable`."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", SafeStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
