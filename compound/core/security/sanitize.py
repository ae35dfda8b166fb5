"""Sanitize external text for files and terminals, and redact API keys.

Text from servers, data files and other people's YAML files is data. It may contain lone surrogates,
which UTF-8 cannot encode, control characters, which terminals interpret, and keys echoed by a
server.
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
SHORTEST = 8  # minimum length of redacted keys; shorter ones occur by chance
SHORTEST_GUESSED = 16  # minimum length for variables only named like a key
NAMED_LIKE_A_KEY = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD)$")

_SURROGATES = re.compile("[\ud800-\udfff]")
# all but tab, newline and return
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_RETURNS = re.compile("\r(?!\n)")
_REORDERING = re.compile("[\u2028-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
"""Characters that make a terminal reorder, break or hide text."""
PLAIN = str.maketrans({"→": "->", "−": "-", "–": "-", "…": "~", "·": "|", "×": "x"})
_SECRETS: set[str] = set()


def replace_controls(text: str) -> str:
    r"""Return text with control characters and lone surrogates replaced by U+FFFD.

    Tabs, newlines and carriage returns are kept.

    >>> replace_controls("\x1b[31mred\x00\ud83d, line\n")
    '�[31mred��, line\n'
    """
    return _CONTROLS.sub(REPLACEMENT, text) if not text.isprintable() else text


def replace_surrogates(value: Stored) -> Stored:
    r"""Return a value whose strings can be encoded as UTF-8; the same object if they already can.

    >>> replace_surrogates({"a": ["\ud83d", 1]})
    {'a': ['�', 1]}
    """
    # the cast holds since only strings change
    return cast("Stored", _replace_surrogates(value)) if _has_surrogates(value) else value


def _has_surrogates(value: object) -> bool:
    if isinstance(value, str):
        return not value.isascii() and _SURROGATES.search(value) is not None
    if isinstance(value, dict):
        return any(map(_has_surrogates, value)) or any(map(_has_surrogates, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_surrogates, value))


def _replace_surrogates(value: object) -> object:
    if isinstance(value, str):
        return _SURROGATES.sub(REPLACEMENT, value)
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = map(_replace_surrogates, value)
        return list(items) if isinstance(value, list) else tuple(items)
    return value


def remember_secret(value: str | None) -> None:
    """Redact a key from everything recorded or printed from now on."""
    if value and len(value) >= SHORTEST:
        _SECRETS.add(value)


def remember_environment(environment: Mapping[str, str] | None = None) -> None:
    """Register the values of all environment variables named like keys for redaction."""
    for name, value in (os.environ if environment is None else environment).items():
        if NAMED_LIKE_A_KEY.search(name.upper()) and len(value) >= SHORTEST_GUESSED:
            remember_secret(value)


def registered_secrets() -> frozenset[str]:
    """Return the keys that are redacted."""
    return frozenset(_SECRETS)


def redact_secrets(text: str) -> str:
    """Return text without registered keys.

    >>> remember_secret("sk-example-of-a-key")
    >>> redact_secrets("denied for sk-example-of-a-key")
    'denied for [key removed]'
    """
    found = [secret for secret in _SECRETS if secret in text]
    # one may contain another, whose rest would remain
    for secret in sorted(found, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def redact_values(value: Stored) -> Stored:
    """Return a value whose strings hold no registered keys; the same object if they already do not.

    >>> remember_secret("sk-example-of-a-key")
    >>> redact_values({"answer": ["sk-example-of-a-key", 1]})
    {'answer': ['[key removed]', 1]}
    """
    return cast("Stored", _redact_values(value)) if _SECRETS else value


def _redact_values(value: object) -> object:
    if isinstance(value, str):
        return redact_secrets(value)
    if isinstance(value, dict):
        found = {_redact_values(key): _redact_values(item) for key, item in value.items()}
        return value if found == value else found
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [_redact_values(item) for item in value]
        kept = items if isinstance(value, list) else tuple(items)
        return value if kept == value else kept
    return value


def sanitize_text(text: str) -> str:
    """Return text that is safe to record: without control characters and keys."""
    return redact_secrets(replace_controls(text))


def sanitize_for_terminal(text: str) -> str:
    r"""Return text that is safe to print on a terminal.

    >>> sanitize_for_terminal("fine\rbad\x1b]0;title\x07\n")
    'fine�bad�]0;title�\n'
    """
    cleaned = sanitize_text(text)
    if not cleaned.isascii():
        cleaned = _REORDERING.sub(REPLACEMENT, cleaned)
    return cleaned if text in {"\r", ""} else _RETURNS.sub(REPLACEMENT, cleaned)


def encodable(text: str, encoding: str | None) -> str:
    """Return text that an encoding holds: arrows and the like as ASCII signs, other signs as codes.

    >>> encodable("0.1 → 0.2 é 名", "latin-1"), encodable("→", "utf-8")
    ('0.1 -> 0.2 é \\\\u540d', '→')
    """
    try:
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError as error:
        plain = text.translate(PLAIN)
        return plain.encode(error.encoding, "backslashreplace").decode(error.encoding)
    return text


class SafeStream:
    """A text stream that sanitizes everything written to it by `sanitize_for_terminal`.

    What its encoding does not hold is replaced by `encodable`.
    """

    def __init__(self, stream: IO[str]) -> None:
        self.raw = stream

    def write(self, text: str) -> int:
        """Write sanitized text."""
        self.raw.write(encodable(sanitize_for_terminal(text), getattr(self.raw, "encoding", None)))
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of the stream
        return getattr(self.raw, name)


def underlying_stream(stream: IO[str]) -> IO[str]:
    """Return the stream below a `SafeStream`, for libraries that draw on the terminal."""
    return stream.raw if isinstance(stream, SafeStream) else stream


@contextmanager
def sanitized_output() -> Iterator[None]:
    """Sanitize everything printed in a block by `sanitize_for_terminal`."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", SafeStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class StreamRedactor:
    """Sanitizes a text piece by piece."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return the text that can be shown after another piece."""
        text = self._held + piece
        secrets = registered_secrets()
        held = max((_overlap(text, secret) for secret in secrets), default=0)
        # A complete key may contain the start of another one; it must not be divided.
        start = len(text) - held
        for secret in secrets:
            at = text.find(secret, max(0, start - len(secret) + 1))
            if 0 <= at < start < at + len(secret):
                start = at
        self._held = text[start:]
        return sanitize_text(text[:start])

    def flush(self) -> str:
        """Return the text that was held back."""
        text, self._held = sanitize_text(self._held), ""
        return text


def _overlap(text: str, secret: str) -> int:
    """Return the length of the longest end of ``text`` that is a proper start of ``secret``."""
    longest = min(len(text), len(secret) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(secret[:n])), 0)
