"""An engine: repeat the last message."""

from __future__ import annotations

import compound as cp


class Echo:
    """Repeat the last message.

    Args:
        upper: whether to write in capitals.
    """

    concurrency = 8
    remote = False
    priced = True

    def __init__(self, upper: bool = False) -> None:
        self.upper = upper

    @property
    def name(self) -> str:
        """The name in cache keys: whatever changes an answer is part of it."""
        return f"echo-{'upper' if self.upper else 'plain'}"

    def worst_case(self, request: cp.ext.Request) -> cp.ext.Usage:
        """Return the most that a request can use."""
        return cp.ext.Usage(1, _count(request), request.max_tokens)

    async def generate(self, request: cp.ext.Request) -> cp.ext.Completion:
        """Answer a request."""
        text = request.messages[-1].text
        text = text.upper() if self.upper else text
        for stop in request.stop:
            text = text.split(stop, maxsplit=1)[0]
        words = text.split()
        said = words[: request.max_tokens]
        reason = "length" if len(said) < len(words) else "stop"
        return cp.ext.Completion(
            " ".join(said), cp.ext.Usage(1, _count(request), len(said)), reason
        )

    async def aclose(self) -> None:
        """Release nothing."""


def _count(request: cp.ext.Request) -> int:
    return sum(len(message.text.split()) for message in request.messages)
