"""Score a component's options for each input with a stored reward, which is loaded once per process.

Calls are scored one at a time in a dedicated thread, so reward models need not be thread-safe. They are not
batched, because the last digits of a text's features depend on its batch, and a choice must not depend on
other calls in flight.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from compound.example import CallValues
from compound.storage.artifacts import Reference, verify_reference

LOADER = "compound.rewards.policy:load_policy"
LOADED = 8  # policies kept in memory


class Policy(Protocol):
    """Scores the outputs of a component."""

    def scores(self, component: str, calls: Sequence[CallValues]) -> Sequence[float]:
        """Return one number for each (inputs, outputs), higher for better outputs."""
        ...


async def score(
    reference: Reference, folder: Path | None, component: str, calls: Sequence[CallValues]
) -> Sequence[float]:
    """Score (inputs, outputs) of a component by a stored reward, in a dedicated thread.

    Args:
        reference: to the reward's checkpoint.
        folder: where its path starts, if it is relative.
        component: whose calls they are.
        calls: what to score.

    Raises:
        ConfigurationError: the checkpoint is missing, damaged, or made for something else.
    """
    path = str((folder or Path()).absolute() / reference["path"])

    def scored() -> Sequence[float]:
        return _load(path, reference["sha256"]).scores(component, calls)

    return await asyncio.get_running_loop().run_in_executor(_thread(), scored)


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "policies")


os.register_at_fork(after_in_child=_thread.cache_clear)  # a child process has none of its parent's threads


@functools.lru_cache(maxsize=LOADED)
def _load(path: str, sha256: str) -> Policy:
    folder = verify_reference({"path": path, "sha256": sha256})
    module, _, name = LOADER.partition(":")
    policy: Policy = getattr(importlib.import_module(module), name)(folder)
    return policy
