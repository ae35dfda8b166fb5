"""The steps of the Banking77 system that are plain code: the list of labels, and reading the one given."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

from compound.errors import DataError
from compound.evaluation.metrics import find_label

NONE = "none"


def labels(file: str) -> list[str]:
    """Return the labels of a JSON file, a list of texts; a relative path also counts from ``$COMPOUND_DATA``.

    Raises:
        DataError: there is no such file, or it is no list of texts.
    """
    return list(_labels(str(_found(file))))


def _found(file: str) -> Path:
    beside, below = Path(file), Path(os.environ.get("COMPOUND_DATA", "")) / file
    for path in (beside, below):
        if path.is_file():
            return path
    raise DataError(
        f"no file of labels {file!r}",
        hint="give its path: --set components.labels.function.file=…/categories.json, or set COMPOUND_DATA",
    )


@functools.cache
def _labels(path: str) -> tuple[str, ...]:
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(found, list) or not found or not all(isinstance(label, str) for label in found):
        raise DataError(f"{path}: the labels must be a list of texts")
    return tuple(found)


def read_label(text: str, labels: list[str]) -> str:
    """Return the label that a text decides for; ``none`` when there is none or no single one.

    >>> read_label("The card did not arrive. Intent: card_arrival", ["card_arrival", "card_linking"])
    'card_arrival'
    >>> read_label("card_arrival or card_linking", ["card_arrival", "card_linking"])
    'none'
    """
    marker = text.lower().rfind("intent:")
    behind = find_label(text[marker + len("intent:") :], labels) if marker >= 0 else None
    return behind or find_label(text, labels) or NONE
