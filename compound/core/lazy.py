"""Public names of a package, loaded on first use from the stub beside it."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path


def public_names(
    package: str, file: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str], Mapping[str, str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a module, and the homes of its public names.

    These are the names that its stub imports under their own name, with ``module:attribute``.

    A name that the stub assigns from an import is public too (``OpenAI = OpenAIEngine``), and a module
    that it imports is a namespace, which ``__all__`` leaves out.
    """
    homes = dict(_homes(Path(file).with_suffix(".pyi")))
    namespaces = {name for name, home in homes.items() if home == f"{package}:{name}"}
    listed = sorted(homes.keys() - namespaces)

    def load(name: str) -> object:
        if name in namespaces:  # the import sets the attribute
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(_unknown(package, name, namespaces))
        module, _, attribute = homes[name].partition(":")
        try:
            value = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            errors = importlib.import_module("compound.core.errors")
            errors.raise_missing_extra(error, f"{package}.{name}")
            raise
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*listed, *namespaces, "__version__"} if namespaces else listed)

    return load, names, listed, {name: homes[name] for name in listed}


def _homes(stub: Path) -> Iterator[tuple[str, str]]:
    hidden: dict[str, str] = {}
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            for item in node.names:
                hidden[item.name] = f"{node.module}:{item.name}"
                if item.asname is not None:
                    yield item.asname, hidden[item.name]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            yield from ((ast.unparse(target), hidden[node.value.id]) for target in node.targets)


def _unknown(package: str, name: str, namespaces: set[str]) -> str:
    message = f"module {package!r} has no attribute {name!r}"
    for namespace in sorted(namespaces):
        if name in importlib.import_module(f"{package}.{namespace}").__all__:
            return f"{message}; use {package}.{namespace}.{name}"
    return message
