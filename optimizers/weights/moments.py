"""Optimizer states that persist across jobs: Adam moments and the value head, keyed by adapter digest.

A method may train one adapter in several jobs of a run. Each job stores the optimizer states of its proposal
in the run's memory, under the digests of the proposed adapters. A later job of the same recipe restores the
states that match the adapters it starts from. When a proposal is rejected, its states are dropped, so the
states of the previous adapter apply again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from compound.optimizers.weights.learner.saved import Saved, Stored
from compound.storage.state import State

KEY = "optimizer_states"  # key in the run's memory


class StoredMoments(State):
    """Reference to the optimizer states of an earlier proposal.

    Attributes:
        recipe: the recipe that trained the adapters.
        adapters: the digests of the adapters by name.
        reference: the folder of the states.
    """

    recipe: str
    adapters: dict[str, str]
    reference: Stored


def stored_moments(memory: Mapping[str, Any]) -> list[StoredMoments]:
    """Return all entries in the memory of a run."""
    return [StoredMoments.from_json(entry) for entry in memory.get(KEY, [])]


def remember(memory: dict[str, Any], recipe: str, saved: Saved) -> None:
    """Add the optimizer states of the proposed adapters to the memory of a run.

    Args:
        memory: the run's memory, changed in place.
        recipe: the recipe that trained the adapters.
        saved: the checkpoint of the proposed step.
    """
    digests = {name: reference["sha256"] for name, reference in saved.adapters.items() if reference}
    if digests:
        entry = StoredMoments(recipe=recipe, adapters=digests, reference=saved.optimizers)
        others = [stored for stored in stored_moments(memory) if stored != entry]
        memory[KEY] = [stored.to_json() for stored in (*others, entry)]


def drop_rejected(memory: dict[str, Any], live: Collection[str]) -> None:
    """Remove the states of adapters that are not in the current configuration.

    Args:
        memory: the run's memory, changed in place.
        live: the digests of the adapters in the current configuration.
    """
    if KEY in memory:
        entries = stored_moments(memory)
        memory[KEY] = [e.to_json() for e in entries if not set(e.adapters.values()).isdisjoint(live)]


def find(memory: Mapping[str, Any], recipe: str, starts: Mapping[str, str]) -> dict[str, StoredMoments]:
    """Return, by adapter name, the stored states that match the adapters a job starts from.

    Args:
        memory: the run's memory.
        recipe: the recipe that will train the adapters; the moments of another recipe's loss do not apply.
        starts: the digests of the starting adapters by name; ``""`` stands for the base model.
    """
    found: dict[str, StoredMoments] = {}
    for stored in stored_moments(memory):
        for name, digest in starts.items():
            if digest and stored.recipe == recipe and stored.adapters.get(name) == digest:
                found[name] = stored
    return found


def folders(memory: Mapping[str, Any]) -> set[str]:
    """Return the names of the folders that hold stored states."""
    return {stored.reference["path"] for stored in stored_moments(memory)}
