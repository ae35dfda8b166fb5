"""Copies of containers, so that user code may modify its arguments without side effects."""

from __future__ import annotations

from typing import TypeVar, cast

Copied = TypeVar("Copied")


def copy_containers(value: Copied) -> Copied:
    """Return a value with copied dictionaries, lists and sets; other objects are shared.

    >>> row = {"tags": ["a"]}
    >>> copy_containers(row)["tags"].append("b"), row
    (None, {'tags': ['a']})
    """
    if isinstance(value, dict) and type(value) is dict:  # subclasses may copy otherwise
        return cast("Copied", {key: copy_containers(item) for key, item in value.items()})
    if isinstance(value, list) and type(value) is list:
        return cast("Copied", [copy_containers(item) for item in value])
    if isinstance(value, set) and type(value) is set:
        return cast("Copied", set(value))
    return value
