"""Python steps of the Banking77 system: the list of labels, and parsing of an answer.

    python -m benchmarks.banking77 CATEGORIES FILE

writes a system whose classifier must answer with one of the labels, without reasoning, and this
file beside it.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from compound.core.errors import DataError
from compound.evaluation.metrics.text import find_label

NONE = "none"


def labels(file: str) -> list[str]:
    """Read labels from a JSON list of texts; a relative path may also be below ``$COMPOUND_DATA``.

    Raises:
        DataError: there is no such file, or it is not a list of texts.
    """
    return list(_labels(str(_find_file(file))))


def _find_file(file: str) -> Path:
    for path in (Path(file), Path(os.environ.get("COMPOUND_DATA", "")) / file):
        if path.is_file():
            return path
    raise DataError(
        f"no file of labels {file!r}",
        hint="give its path: --set components.labels.function.file=…/categories.json, or set COMPOUND_DATA",
    )


@functools.cache
def _labels(path: str) -> tuple[str, ...]:
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    if (
        not isinstance(found, list)
        or not found
        or not all(isinstance(label, str) for label in found)
    ):
        raise DataError(f"{path}: the labels must be a list of texts")
    return tuple(found)


def read_label(text: str, labels: list[str]) -> str:
    """Return the label that a text names; ``none`` if it names no label or several.

    >>> read_label("The card did not arrive. Intent: card_arrival", ["card_arrival", "card_linking"])
    'card_arrival'
    >>> read_label("card_arrival or card_linking", ["card_arrival", "card_linking"])
    'none'
    """
    marker = text.lower().rfind("intent:")
    behind = find_label(text[marker + len("intent:") :], labels) if marker >= 0 else None
    return behind or find_label(text, labels) or NONE


def write_constrained(categories: Path, target: Path) -> None:
    """Write ``banking77.yaml`` with a classifier whose answers are limited to the labels, and its code.

    Args:
        categories: the JSON list of labels.
        target: the YAML file to write.
    """
    document = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    document["system"] = "banking77_labels"
    classifier = document["components"]["classifier"]
    classifier["llm"].update(prompt="Which intent does the message have?", max_tokens=24)
    classifier["in"] = {"message": "$text"}
    classifier["out"] = {"json_schema": {"type": "string", "enum": labels(str(categories))}}
    target.write_text(
        yaml.safe_dump(document, sort_keys=False, allow_unicode=True), encoding="utf-8"
    )
    if not (code := target.with_name(Path(__file__).name)).exists():
        shutil.copy(__file__, code)


def main(arguments: Sequence[str]) -> None:
    """Write the system with constrained answers."""
    write_constrained(*map(Path, arguments))


if __name__ == "__main__":
    main(sys.argv[1:])
