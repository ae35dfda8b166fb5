"""Redact registered keys from text that arrives in pieces.

A key may be divided between two pieces, so the end of the text is held back while it could be the start
of a key.
"""

from __future__ import annotations

from compound.security.sanitize import registered_secrets, sanitize_text


class StreamRedactor:
    """Sanitizes a text piece by piece.

    Example:
        >>> from compound.security.sanitize import remember_secret
        >>> remember_secret("sk-divided-key")
        >>> redactor = StreamRedactor()
        >>> redactor.feed("denied for sk-divi"), redactor.feed("ded-key\\n"), redactor.flush()
        ('denied for ', '[key removed]\\n', '')
    """

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
