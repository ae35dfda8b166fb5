"""Configurations: immutable mappings ``component.parameter -> value`` with a digest.

Optimization changes nothing else, and a saved configuration is all that another process needs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from compound.core import notebook
from compound.core.errors import ConfigurationError
from compound.core.formatting import MOST_NAMES, short_repr
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.sanitize import replace_surrogates
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.artifacts import (
    check_inside,
    copy_into,
    is_reference,
    verify_reference,
    with_absolute_path,
    without_path,
)
from compound.core.storage.records import Damaged, parse, to_encodable_json
from compound.graph.json_values import dumps

FORMAT = 1


def component_of(key: str) -> str:
    """Return the component that a key belongs to.

    >>> component_of("answerer.prompt")
    'answerer'
    """
    return key.split(".", maxsplit=1)[0]


def components_of(keys: Iterable[str]) -> list[str]:
    """Return the components of keys, without duplicates, in order of first occurrence."""
    return list(dict.fromkeys(map(component_of, keys)))


def segment_name(components: Sequence[str]) -> str:
    """Return the name of a component, or of a segment of several.

    >>> segment_name(["search", "rank"])
    'search + rank'
    """
    return " + ".join(components)


def canonical_json(value: object) -> str:
    """Return canonical JSON, equal for equal values: sorted keys, no spaces, no NaN.

    >>> canonical_json({"b": 1, "a": (2,)})
    '{"a":[2],"b":1}'
    """
    return dumps(value, sort_keys=True, compact=True)


def to_json_types(value: object) -> object:
    """Convert ``value`` to JSON types, keeping the order of mappings; no NaN."""
    return json.loads(dumps(value))


def to_json_values(values: Mapping[str, object]) -> dict[str, object]:
    """Convert values by name to JSON types; no NaN."""
    return {name: to_json_types(value) for name, value in values.items()}


MAX_READABLE = 1_000  # characters


def readable(value: object) -> str:
    """Return a value as text of bounded length for people: text as it is, other values as a short repr."""
    return value[:MAX_READABLE] if isinstance(value, str) else short_repr(value)


def to_readable_json(value: object) -> object:
    """Convert ``value`` to JSON types; replace unsupported objects by their repr without the address.

    >>> to_readable_json({"f": object(), "x": float("inf")})
    {'f': '<object object>', 'x': 'inf'}
    """
    try:
        return replace_surrogates(to_json_types(value))
    except (TypeError, ValueError):
        if isinstance(value, Mapping):
            return {str(key): to_readable_json(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [to_readable_json(item) for item in value]
        # addresses differ by process
        return re.sub(r" at 0x[0-9a-f]+", "", replace_surrogates(repr(value)))


def to_readable_values(values: Mapping[str, object]) -> dict[str, object]:
    """Convert values by name to JSON types; replace unsupported objects by text."""
    return {name: to_readable_json(value) for name, value in values.items()}


def digest(value: object) -> str:
    """Return the SHA-256 of the canonical JSON, in hex."""
    return hashlib.sha256(
        canonical_json(value).encode("utf-8", "surrogatepass")
    ).hexdigest()  # lone surrogates must not prevent hashing


def freeze(value: object) -> object:
    """Return an immutable copy of ``value``: lists become tuples, mappings become frozen dicts."""
    if isinstance(value, Mapping):
        return _FrozenDict({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


class _FrozenDict(dict[str, object]):
    """An immutable dict; it subclasses dict for JSON and equality."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("configuration values are immutable; bind another configuration")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[object, ...]:
        return _FrozenDict, (dict(self),)


@dataclass(frozen=True)
class Change:
    """A difference between two configurations."""

    key: str
    before: object
    after: object


@report_wrong_arguments
class Configuration(Mapping[str, object]):
    """Values by ``component.parameter``.

    >>> one = Configuration({"answerer.prompt": "Answer.", "searcher.k": 5})
    >>> two = one.replace({"searcher.k": 10})
    >>> [(c.key, c.before, c.after) for c in one.diff(two)], one["searcher.k"]
    ([('searcher.k', 5, 10)], 5)
    >>> one.digest == Configuration(dict(reversed(list(one.items())))).digest
    True
    """

    __slots__ = ("_digest", "_values")

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values: dict[str, object] = {key: freeze(values[key]) for key in sorted(values)}
        self._digest = ""

    def __getitem__(self, key: str) -> object:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Configuration) and self.digest == other.digest

    def __repr__(self) -> str:
        items = [*self._values.items()][:MOST_NAMES]
        more = len(self._values) - len(items)
        shown = [f"{key!r}: {short_repr(value)}" for key, value in items] + [
            f"… {more} more"
        ] * bool(more)
        return f"Configuration({{{', '.join(shown)}}})"

    def _repr_html_(self) -> str:
        """Return the values as a table, for notebooks."""
        rows = ((key, readable(value)) for key, value in self._values.items())
        return notebook.block("Configuration", notebook.table(["parameter", "value"], rows))

    @property
    def digest(self) -> str:
        """SHA-256 of the values, in hex; equal for equal configurations in any process.

        A folder counts by its content, not by its path.
        """
        if not self._digest:
            self._digest = digest({key: without_path(value) for key, value in self._values.items()})
        return self._digest

    def replace(self, values: Mapping[str, object]) -> Configuration:
        """Return a copy with some values replaced."""
        return Configuration({**self._values, **values})

    def diff(self, other: Configuration) -> list[Change]:
        """Return the differences by key; a missing value is ``None``."""
        changes = [Change(key, self.get(key), other.get(key)) for key in sorted({*self, *other})]
        return [
            c
            for c in changes
            if canonical_json(without_path(c.before)) != canonical_json(without_path(c.after))
        ]

    def located(self, folder: str | Path) -> Configuration:
        """Return a copy with folder paths made absolute, relative to ``folder``."""
        return Configuration(
            {key: with_absolute_path(value, Path(folder)) for key, value in self._values.items()}
        )

    def to_json(self) -> dict[str, object]:
        """Return the values as plain JSON types."""
        values: dict[str, object] = json.loads(canonical_json(self._values))
        return values

    def save(self, path: str | Path, **provenance: object) -> None:
        """Write a file that `load` reads: the values, their digest, and their provenance.

        Referenced folders are copied next to the file unless they exist there, so that all files
        can be moved together. The file's parent folder is created if missing.

        Raises:
            ConfigurationError: a referenced folder is missing or was changed, or the file cannot be
                written.
        """
        target = Path(path)
        folder = UntrustedFolder(target.parent, error=ConfigurationError).make()
        values = {key: copy_into(value, target.parent) for key, value in self.to_json().items()}
        document = {"format": FORMAT, "digest": self.digest, "values": values, **provenance}
        folder.write(target.name, to_encodable_json(document, indent=2) + "\n")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


@report_wrong_arguments
def load(path: str | Path) -> Configuration:
    """Read a configuration file written by `Configuration.save` (``best.json``).

    Raises:
        ConfigurationError: the file is missing, not a configuration file, or was edited since; or a
            referenced folder is missing, was changed, or is not below the file's folder.
    """
    target = Path(path)
    folder = UntrustedFolder(target.parent, error=ConfigurationError)
    if not target.name or folder.kind(target.name) is None:
        raise ConfigurationError(
            f"{path} does not exist", hint="`compound optimize` writes best.json"
        )
    if folder.kind(target.name) == "folder":
        raise ConfigurationError(
            f"{path} is a folder, but must be a file",
            hint=f"the configuration of a run directory is {target / 'best.json'}",
        )
    try:
        document = parse(folder.read(target.name), parse_constant=_no_constant)
    except Damaged as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("values"), dict):
        raise ConfigurationError(
            f"{path} is not a configuration file", hint="it must hold `format` and `values`"
        )
    if document.get("format") != FORMAT:
        raise ConfigurationError(
            f"{path} has format {document.get('format')!r}, but this version reads format {FORMAT}"
        )
    try:
        json.dumps(document["values"], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"{path} holds a lone surrogate (half a character), which no model can be sent",
            hint="write the whole character",
        ) from None
    configuration = Configuration(document["values"])
    if document.get("digest") not in (None, configuration.digest):
        raise ConfigurationError(
            f"{path} was changed: its values do not match its digest",
            hint="remove the digest line to accept the current values",
        )
    for key, value in configuration.items():
        if is_reference(value):
            check_inside(f"{key} in {path}", value["path"])
            verify_reference(value, target.parent)
    return configuration.located(target.parent)
