"""Write plain values as YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import yaml

from compound.core.errors import DeclarationError
from compound.yaml.source import BOOL, FLOAT, INT, NOT_FINITE, NULL

_TAG = "tag:yaml.org,2002:"
# the text does not begin with a space, and no line ends with one
_BLOCK = re.compile(r"\S(.*\S)?(\n+ *\S(.*\S)?)*\n?\Z")
_ODD = re.compile(
    "[^\n -~\xa1-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010fffe]|[\u2028\u2029]"
)  # written as escapes


class Flow(dict[str, object]):
    """Mapping to write on one line."""


def write(value: Mapping[str, object]) -> str:
    """Return a mapping as YAML text, in its order.

    Raises:
        DeclarationError: a value cannot be written in YAML.

    >>> print(write({"a": "1e-6", "b": 1e-6, "c": ["on", True], "d": (1, 2)}), end="")
    a: '1e-6'
    b: 1.0e-06
    c: ['on', true]
    d: [1, 2]
    """
    text: str = yaml.dump(
        plain(value, ""),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=math.inf,
        default_flow_style=None,
    )
    return text


def plain(value: object, where: str) -> object:
    """Convert a value to YAML's types, or raise if it has none; ``where`` starts the message."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        kind = Flow if isinstance(value, Flow) else dict
        return kind(
            {str(plain(key, where)): plain(item, f"{where}.{key}") for key, item in value.items()}
        )
    raise DeclarationError(f"{where.lstrip('.')}: {value!r} cannot be written in YAML")


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes ambiguous strings and writes multi-line strings as blocks."""

    yaml_implicit_resolvers: dict[str, object] = {}  # noqa: RUF012 - PyYAML's name for its table

    def ignore_aliases(self, data: object) -> bool:
        """Return True: a file must not have aliases, so equal values are written in full."""
        return True


def _text(dumper: _Dumper, value: str) -> yaml.Node:
    style = None
    if _ODD.search(value) or ("\n" in value and not _BLOCK.match(value)):
        style = '"'
    elif "\n" in value:
        style = "|"
    return dumper.represent_scalar(f"{_TAG}str", value, style=style)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(
    Flow, lambda dumper, value: dumper.represent_mapping(f"{_TAG}map", value, flow_style=True)
)
for _tag, _pattern in (
    ("null", NULL),
    ("bool", BOOL),
    ("int", INT),
    ("float", FLOAT),
    ("float", NOT_FINITE),
):
    _Dumper.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(rf"(?:{_pattern.pattern})\Z"), None)
# Many YAML readers implement YAML 1.1, where these are booleans: quote them for compatibility.
_Dumper.add_implicit_resolver(f"{_TAG}bool", re.compile(r"(?i:yes|no|on|off)\Z"), None)
