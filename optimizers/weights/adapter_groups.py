"""The adapters of a training job, and the components that share each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compound.errors import DeclarationError
from compound.graph.system import System
from compound.optimizers.weights.learner.saved import Saved
from compound.storage.artifacts import Reference, is_reference


@dataclass(frozen=True)
class AdapterGroups:
    """The adapters that a job trains.

    Attributes:
        system: the system, bound to the configuration that the job starts from.
        groups: the components of each adapter, by the adapter's name.
        section: the path of the recipe's settings, for error messages.
    """

    system: System
    groups: Mapping[str, tuple[str, ...]]
    section: str

    @property
    def adapter_of(self) -> dict[str, str]:
        """The adapter's name by component."""
        return {component: name for name, some in self.groups.items() for component in some}

    def starts(self) -> dict[str, Reference | None]:
        """Return the adapter that each group starts from; ``None`` stands for the base model.

        Raises:
            DeclarationError: components that share an adapter start from different ones.
        """
        for name, some in self.groups.items():
            first = self._start(some[0])
            if any(self.system.configuration[f"{c}.weights"] != first for c in some):
                raise DeclarationError(
                    f"the components that share the adapter {name!r} start from different adapters",
                    hint=f"start {', '.join(some)} from the same adapter, or set {self.section}.adapters to "
                    "each",
                )
        return {name: self._start(some[0]) for name, some in self.groups.items()}

    def digests(self) -> dict[str, str]:
        """Return the digest of the adapter that each group starts from; ``""`` stands for the base model."""
        return {name: start["sha256"] if start else "" for name, start in self.starts().items()}

    def values(self, saved: Saved | None) -> dict[str, object]:
        """Return the weights of a checkpoint by key of the configuration; none for the starting weights."""
        if saved is None:
            return {}
        return {f"{component}.weights": saved.adapters[name] for component, name in self.adapter_of.items()}

    def _start(self, component: str) -> Reference | None:
        value = self.system.configuration[f"{component}.weights"]
        return value if is_reference(value) else None
