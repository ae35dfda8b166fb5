"""Groups of learner processes that tests share, and processes that run other code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from compound.optimizers.weights.distributed.processes import Processes


@pytest.fixture(scope="module")
def group() -> Iterator[Callable[[int], Processes]]:
    """Return a group of processes, which several learners use one after the other.

    A test may end it, and others follow in any order.
    """
    from compound.optimizers.weights.distributed.processes import Processes

    known: dict[int, Processes] = {}

    def found(count: int) -> Processes:
        if count not in known or known[count]._closed:
            known[count] = Processes(count)
        return known[count]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield found
    for each in known.values():
        each.close()


@pytest.fixture
def booting(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let processes run some code before they serve; `rank` is their rank."""
    from compound.optimizers.weights.distributed import node

    def boot(code: str) -> None:
        lines = node.BOOT.splitlines()
        code = f"import os; rank = int(place['rank'])\n{code}"
        monkeypatch.setattr(node, "BOOT", "\n".join([*lines[:2], code, *lines[2:]]))

    return boot
