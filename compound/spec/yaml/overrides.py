"""Override entries from the command line: ``--set a.b=c`` sets the entry a.b of the file to c."""

from __future__ import annotations

from collections.abc import Sequence

from compound.errors import SpecError
from compound.spec.yaml.document import Address, Document
from compound.spec.yaml.source import MAX_DEPTH, read_value


def apply(document: Document, overrides: Sequence[tuple[str, str]]) -> None:
    """Set each value in the document; errors are labelled with the text of the override.

    >>> from compound.spec.yaml.source import read
    >>> document = read("system: demo", "demo.yaml")
    >>> apply(document, [("optimize.seed", "7")])
    >>> document.tree, document.label(("optimize", "seed"))
    ({'system': 'demo', 'optimize': {'seed': 7}}, '--set optimize.seed=7')
    """
    problems: list[str] = []
    for number, (key, text) in enumerate(overrides):
        label = f"--set {key}={text}" if key.isprintable() else f"--set {key!a}=…"
        address = _address(document, key)
        if "" in address or len(address) > MAX_DEPTH or not key.isprintable():
            problems.append(f"{label}: must name an entry such as optimize.seed")
            continue
        try:
            value = read_value(text, label)
        except SpecError as error:
            problems += error.problems
            continue
        document.override(address, value, label, number)
    if problems:
        raise SpecError(problems)


def _address(document: Document, key: str) -> Address:
    """Return a dotted key as an address; a number is an index where the file has a list."""
    address: Address = ()
    for part in key.split("."):
        index = part.isdecimal() and isinstance(document.at(address), list)
        address = (*address, int(part) if index else part)
    return address
