"""Optimizer states that outlast a job: Adam moments, and the value head, by the adapter they belong to.

A method may train one adapter in several jobs of a run. Each job's proposal leaves its optimizer states in
the run's memory, under the digests of the proposed adapters. A later job of the same recipe takes those whose
adapter it starts from. A rejected adapter is no longer in the configuration: its states are dropped, and the
states of the adapter before it fit again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from compound.optimizers.weights.learner.saved import Saved, Stored
from compound.storage.state import State

KEY = "optimizer_states"  # in the run's memory


class Kept(State):
    """The optimizer states of one earlier proposal.

    Attributes:
        recipe: what trained the adapters.
        adapters: digests by adapter name.
        reference: the folder of the states.
    """

    recipe: str
    adapters: dict[str, str]
    reference: Stored


def all_kept(memory: Mapping[str, Any]) -> list[Kept]:
    """Return what a run's memory holds."""
    return [Kept.from_json(entry) for entry in memory.get(KEY, [])]


def remember(memory: dict[str, Any], recipe: str, saved: Saved) -> None:
    """Keep the optimizer states that belong to a proposal's adapters.

    Args:
        memory: the run's memory, changed in place.
        recipe: what trained the adapters.
        saved: what was stored of the proposed step.
    """
    digests = {name: reference["sha256"] for name, reference in saved.adapters.items() if reference}
    if digests:
        entry = Kept(recipe=recipe, adapters=digests, reference=saved.optimizers)
        memory[KEY] = [kept.to_json() for kept in (*(k for k in all_kept(memory) if k != entry), entry)]


def drop_rejected(memory: dict[str, Any], live: Collection[str]) -> None:
    """Forget the states of adapters that the present configuration does not hold."""
    if KEY in memory:
        kept = [kept for kept in all_kept(memory) if not live_in(kept).isdisjoint(live)]
        memory[KEY] = [entry.to_json() for entry in kept]


def live_in(entry: Kept) -> set[str]:
    """Return the digests of the adapters that an entry is of."""
    return set(entry.adapters.values())


def find(memory: Mapping[str, Any], recipe: str, starts: Mapping[str, str]) -> dict[str, Kept]:
    """Return, by adapter name, the kept states that belong to the adapters a job starts from.

    Args:
        memory: the run's memory.
        recipe: what will train the adapters: the moments of another loss say nothing of this one.
        starts: digests of the starting adapters by name; ``""`` is the base.
    """
    found: dict[str, Kept] = {}
    for kept in all_kept(memory):
        for name, digest in starts.items():
            if digest and kept.recipe == recipe and kept.adapters.get(name) == digest:
                found[name] = kept
    return found


def folders(memory: Mapping[str, Any]) -> set[str]:
    """Return the names of the folders that hold kept states."""
    return {kept.reference["path"] for kept in all_kept(memory)}
