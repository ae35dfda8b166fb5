"""Configurations and draws of local rewards that an optimization takes over from an earlier run.

Nothing is trusted because it is from an earlier run: the configurations are candidates like others, and a
local reward is used as far as the first whole runs of the new search confirm it. Draws of rows that are not
train examples of the new run are left out, so that no reward knows a validation or test row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from compound.errors import RunDirectoryError
from compound.example import Example
from compound.formatting import plural
from compound.graph.configuration import digest
from compound.graph.system import System
from compound.optimization.method import EarlierRun
from compound.rewards.buffer import PairBuffer, row_digest, to_document
from compound.rewards.pairs import Draw
from compound.rewards.sampling.candidates import Sampling
from compound.runs.directory import inconsistency_errors, load_checkpoint, read_records
from compound.security.untrusted import UntrustedFolder
from compound.storage.artifacts import is_reference

__all__ = ["read_earlier"]


def read_earlier(path: Path, system: System, train: Sequence[Example]) -> EarlierRun:
    """Read an earlier run of the same system, or of one that shares components with it.

    Args:
        path: its run directory.
        system: the system to optimize.
        train: the train examples of the new run.

    Raises:
        RunDirectoryError: it is not a run directory, or has no result yet, or one of its files is damaged.
    """
    stored = load_checkpoint(UntrustedFolder(path))
    if stored is None or stored.state.search is None:
        raise RunDirectoryError(f"{path} has nothing to start from yet", hint="name a run with a decision")
    search = stored.state.search
    values = [_usable(found, system) for found in (search.best, search.supported, search.promising or {})]
    draws, unusable = _draws(path, system, train)
    told = f"starts from {path}: {plural(len(draws), 'draw')} of its local rewards"
    if unusable:
        why = "their rows are no train examples of this run, or their component differs"
        told += f"; {unusable} are left out, since {why}"
    if not any(values) and not draws:
        raise RunDirectoryError(
            f"{path} has nothing that this run could start from: no parameter and no component in common",
            hint="start from a run of the same system",
        )
    usable = [each for each in values if each]
    found = digest([usable, [to_document(draw) for draw in draws]])
    return EarlierRun(usable, draws, told, found)


def _usable(values: Mapping[str, object], system: System) -> dict[str, object]:
    """Return the values that the system may have; trained weights and stored rewards stay where they are."""
    return {
        key: value
        for key, value in values.items()
        if key in system.parameters and not is_reference(value) and not system.parameters[key].problem(value)
    }


def _draws(path: Path, system: System, train: Sequence[Example]) -> tuple[list[Draw], int]:
    """Return the draws that a run may use, under the names of its examples, and the number of the others."""
    folder = UntrustedFolder(path)
    if folder.kind("memory.jsonl") is None:
        return [], 0
    names = {row_digest(example): example.id for example in train}
    with inconsistency_errors(folder):
        records = [record for record in read_records(folder, "memory.jsonl") if "draw" in record]
        whose = str(records[0]["system"]) if records else ""
        entries = PairBuffer.read(records, whose, Sampling()).entries
    found: list[Draw] = []
    for record, draw in zip(records, (entry.draw for entry in entries), strict=True):
        name = names.get(str(record.get("row")))
        if name is not None and _fits(draw, system):
            found.append(
                Draw(draw.component, draw.address, name, draw.configuration, draw.inputs, draw.candidates)
            )
    return found, len(records) - len(found)


def _fits(draw: Draw, system: System) -> bool:
    """Return whether a component of the system has the ports of a draw."""
    component = system.components.get(draw.component)
    if component is None:
        return False
    read = {
        name
        for node in system.all_nodes()
        if node.component is component
        for name in node.wires
        if name not in component.settings
    }
    written = {name for candidate in draw.candidates for name in candidate.outputs}
    return set(draw.inputs) <= read and written <= set(component.outputs)
