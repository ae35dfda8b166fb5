"""The line of a file that an error is about, with carets under its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from compound.cli.errors import excerpt
from compound.core.errors import PlacedProblem, SpecError
from compound.yaml.source import read


def placed(line: str, column: int) -> PlacedProblem:
    problem = PlacedProblem("a.yaml:7:1: wrong")
    problem.lines, problem.column = [(7, line)], column
    return problem


def sign_above_caret(shown: str) -> str:
    """Return the sign in the column of the first caret, by the columns of a terminal."""
    line, carets = shown.split("\n")[-2:]
    at = cell_len(carets.partition("^")[0])
    return next((c for i, c in enumerate(line) if cell_len(line[:i]) >= at and cell_len(c)), "")


@pytest.mark.parametrize(
    ("line", "column", "expected"),
    [
        ("seed: three", 6, ["  7 | seed: three", "    |       ^^^^^"]),
        ("a: {b: 'x y'}", 7, ["  7 | a: {b: 'x y'}", "    |        ^^^^^"]),
        ("\ta: 1", 0, ["  7 |     a: 1", "    | ^"]),
        ("a:\tb", 3, ["  7 | a:    b", "    |       ^"]),
        ("名前: 後", 4, ["  7 | 名前: 後", "    |       ^^"]),
        ("", 0, ["  7 |", "    | ^"]),
        ("a: \x1b[31m\u202eb", 3, ["  7 | a: \ufffd[31m\ufffdb", "    |    ^"]),
    ],
)
def test_carets_stand_under_the_place(line: str, column: int, expected: list[str]) -> None:
    assert excerpt(placed(line, column), 80).split("\n") == expected


def test_carets_stand_under_the_place_in_an_encoding_without_its_signs() -> None:
    assert excerpt(placed("名 → x", 4), 80, "ascii").split("\n")[0] == "  7 | \\u540d -> x"
    assert sign_above_caret(excerpt(placed("名 → x", 4), 80, "ascii")) == "x"


@given(
    st.text("ab :{}'名é́\t\x1b\u202e", max_size=300),
    st.text("xyz後", min_size=1, max_size=300),
    st.integers(20, 100),
)
def test_an_excerpt_fits_its_width_and_keeps_the_place(before: str, after: str, width: int) -> None:
    shown = excerpt(placed(before + after, len(before)), width)
    assert sign_above_caret(shown) == after[0]
    assert all(cell_len(line) <= width for line in shown.split("\n"))
    assert "\x1b" not in shown
    assert "\u202e" not in shown


def test_a_place_at_the_end_of_the_file_shows_the_last_line_with_text() -> None:
    with pytest.raises(SpecError) as error:
        read("system: s\nlm: [a, b\n\n", "a.yaml")
    (problem,) = error.value.problems
    assert isinstance(problem, PlacedProblem)
    assert excerpt(problem, 80) == "  2 | lm: [a, b\n  4 |\n    | ^"


def test_commands_show_the_line_and_values_of_the_command_line_have_none(
    game: Path, cli: Any
) -> None:
    (game / "bad.yaml").write_text((game / "game.yaml").read_text().replace("seed: 3", "sed: 3"))
    for command in (["check"], ["optimize"], ["evaluate"], ["run"]):
        ran = cli(*command, "bad.yaml")
        assert ran.code == 2
        assert "sed: 3" in ran.err
        assert ran.err.rstrip().endswith("^^^")
    assert "^" not in cli("check", "game.yaml", "--set", "optimize.sed=3").err
