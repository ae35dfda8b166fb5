"""Typed parts of a method's memory, which later jobs of a run read."""

from __future__ import annotations

from typing import ClassVar, Self

from compound.core.storage.state import State
from compound.optimization.method import Memory


class MemoryPart(State):
    """Base class of the typed parts of a method's memory, with a unique name; all fields have defaults.

    Example:
        >>> from pathlib import Path
        >>> from compound.testing import PlainMemory
        >>> class Visits(MemoryPart):
        ...     NAME = "visits"
        ...     count: int = 0
        >>> memory = PlainMemory(Path())
        >>> Visits(count=1).store(memory)
        >>> Visits.of(memory).count
        1
    """

    NAME: ClassVar[str]

    @classmethod
    def of(cls, memory: Memory) -> Self:
        """Load the part from a memory; return the defaults if it was never stored.

        Raises:
            StateError: the stored part has another format.
        """
        stored = memory.state.get(cls.NAME)
        return cls() if stored is None else cls.from_json(stored)

    def store(self, memory: Memory) -> None:
        """Store a snapshot of this part, which every later checkpoint includes."""
        memory.state.update({self.NAME: self.to_json()})
