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
    if type(value) is dict:
        return cast("Copied", {key: copy_containers(item) for key, item in value.items()})
    if type(value) is list:
        return cast("Copied", [copy_containers(item) for item in value])
    return cast("Copied", set(value)) if type(value) is set else value
