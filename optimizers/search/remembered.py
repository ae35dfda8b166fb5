"""Parts of a method's memory, typed: what later jobs of a run need from earlier ones."""

from __future__ import annotations

from typing import ClassVar, Self

from compound.optimization.method import Memory
from compound.storage.state import State


class Remembered(State):
    """A part of a method's memory, stored under a name of its own.

    Subclasses declare fields, all of which have defaults, and the name.

    Attributes:
        NAME: what it is stored under in `Memory.state`.

    Example:
        >>> from pathlib import Path
        >>> from compound.testing import PlainMemory
        >>> class Visits(Remembered):
        ...     NAME = "visits"
        ...     count: int = 0
        >>> memory = PlainMemory(Path())
        >>> visits = Visits.of(memory)
        >>> visits.count += 1
        >>> visits.store(memory)
        >>> Visits.of(memory).count
        1
    """

    NAME: ClassVar[str]

    @classmethod
    def of(cls, memory: Memory) -> Self:
        """Return what the memory holds; the defaults where it holds nothing.

        Raises:
            StateError: it was written by another version.
        """
        stored = memory.state.get(cls.NAME)
        return cls() if stored is None else cls.from_json(stored)

    def store(self, memory: Memory) -> None:
        """Keep a snapshot of this part, which is in every later checkpoint."""
        memory.state.update({self.NAME: self.to_json()})
