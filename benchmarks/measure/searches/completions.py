"""An engine that keeps greedy completions in a file, so that measurements share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from compound.core.engine import Completion, Engine, Request, Usage
from compound.execution.cache import DiskCache
from compound.graph.configuration import canonical_json, digest


@dataclass(frozen=True)
class StoredCompletions:
    """An engine that answers a greedy request from a file if any measurement has sent it before.

    Runs of several methods and seeds then differ in what they ask, and not in the last digits of a
    logit, which depend on the composition of a batch. Usage and budgets are those of the original
    calls.

    Attributes:
        engine: answers what is not stored.
        store: the file.
    """

    engine: Engine
    store: DiskCache

    @property
    def name(self) -> str:
        """Name of the engine."""
        return self.engine.name

    @property
    def concurrency(self) -> int:
        """Maximum number of requests in flight."""
        return self.engine.concurrency

    @property
    def remote(self) -> bool:
        """Whether an answer may never arrive."""
        return self.engine.remote

    @property
    def priced(self) -> bool:
        """Whether the cost of calls is known."""
        return self.engine.priced

    async def generate(self, request: Request) -> Completion:
        """Answer from the file, or by the engine."""
        if request.temperature > 0 or request.adapter is not None or request.want_tokens:
            return await self.engine.generate(request)
        fields = asdict(
            replace(request, seed=0, timeout=None)
        )  # neither changes a greedy completion
        key = digest(canonical_json([self.engine.name, fields]))
        stored = self.store.get(key)
        if stored is not None:
            return _completion(stored)
        found = await self.engine.generate(request)
        document = {
            "text": found.text,
            "usage": found.usage.to_json(),
            "finish_reason": found.finish_reason,
        }
        self.store.put(key, document)
        return found

    def worst_case(self, request: Request) -> Usage:
        """Return an upper bound of the request's usage."""
        return self.engine.worst_case(request)

    async def aclose(self) -> None:
        """Release the engine's resources; the file stays open for other runs."""
        await self.engine.aclose()


def _completion(stored: Mapping[str, Any]) -> Completion:
    return Completion(stored["text"], Usage.from_json(stored["usage"]), stored["finish_reason"])
