"""Rebuild a system from its file, and compare what the driver and a worker have rebuilt.

Results are equal on every machine only if the package, Python, the code that the file names, and
the data that its components read are equal. All of them are compared before the first example is
sent.
"""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

from compound.cluster.messages import VERSION, Facts
from compound.core.errors import DISTRIBUTION, CompoundError
from compound.graph.registry.code import file_digest, package_digest, sources_beside
from compound.graph.system import System
from compound.yaml.program import Program, SystemFile, loads

SAME = "install the same versions on every machine, and share or copy the folder of the file to each of them"


class WorkerMismatch(CompoundError):
    """A worker has other versions, code or data than the driver, or does not do what it was asked to do."""


def rebuild(source: SystemFile) -> Program:
    """Load a system from its file.

    Raises:
        CompoundError: the file, or code or data that it names, cannot be loaded here.
    """
    return loads(
        source.text,
        path=source.path,
        overrides=source.overrides,
        allow_import=source.allow_import,
        trust=source.trust,
    )


def facts_of(system: System, folder: Path) -> Facts:
    """Return what must be equal on every machine."""
    return Facts(
        protocol=VERSION,
        compound=metadata.version(DISTRIBUTION),
        source=package_digest(),
        python=".".join(platform.python_version_tuple()[:2]),
        system=system.identity,
        components={name: component.version for name, component in system.components.items()},
        modules={name: file_digest(path) for name, path in sources_beside(folder).items()},
    )


def first_difference(own: Facts, other: Facts) -> str:
    """Return how a worker differs from the driver, as text about "it"; ``""`` if it does not."""
    for name, label in (("protocol", "protocol"), ("compound", "compound"), ("python", "Python")):
        here, there = getattr(own, name), getattr(other, name)
        if here != there:
            return f"it has {label} {there}, but the driver has {here}"
    if own.source != other.source:
        return f"its source of compound {other.compound} differs from the driver's"
    # a module that only one of the two has imported yet is no difference
    changed = [
        name for name, digest in other.modules.items() if own.modules.get(name, digest) != digest
    ]
    if changed:
        return f"its module {changed[0]!r} differs from the driver's"
    names = [*own.components, *other.components]
    for name in names:
        if own.components.get(name) != other.components.get(name):
            return f"its component {name!r} differs from the driver's in code or data"
    return "" if own.system == other.system else "it has rebuilt another system from the file"
