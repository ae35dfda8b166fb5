"""Values that are written as YAML are read back unchanged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from compound.core.errors import DeclarationError
from compound.yaml.source import read
from compound.yaml.text import write

ODD_TEXTS = (  # between broken bars
    "yes¦1e-6¦0x10¦null¦~¦¦ a ¦a\nb¦a\n¦\n a¦- a¦a: b¦# a¦'¦\"¦{a}¦*a¦!a¦on¦.inf¦a\tb\n¦\x85¦|¦%a¦a\r\nb"
)
TEXTS = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), max_size=40
) | st.sampled_from(ODD_TEXTS.split("¦"))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3), max_leaves=8
)


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
@settings(max_examples=500)
def test_what_is_written_is_read_back(tree: dict[str, Any]) -> None:
    if tree:
        assert read(write(tree), "x.yaml").tree == tree


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), {1: 2}, {"a": {1, 2}}])
def test_values_without_a_spelling_are_refused(value: object) -> None:
    with pytest.raises(DeclarationError, match="cannot be written in YAML"):
        write({"a": value})


def test_a_text_with_indented_lines_is_a_block() -> None:
    text = "Rules:\n  - be kind\n\n    x: {y}\n"
    written = write({"a": {"b": text, "c": f" {text}"}})
    assert "  b: |\n    Rules:\n      - be kind\n\n        x: {y}\n" in written
    assert yaml.safe_load(written) == {"a": {"b": text, "c": f" {text}"}}
