"""Keys are removed from text that arrives in pieces, wherever it is divided."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.core.security import sanitize
from compound.core.security.sanitize import HIDDEN, StreamRedactor, redact_secrets, remember_secret

KEY, LIKE = "sk-abcabcabd", "abcabdxyz0"


@pytest.fixture(autouse=True)
def _own_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "_SECRETS", set())


TEXTS = st.lists(
    st.sampled_from([KEY, LIKE, KEY[:7], LIKE[3:], "a", "bc", " ", "sk-"]), max_size=8
).map("".join)


@given(TEXTS, st.lists(st.integers(0, 60), max_size=6))
def test_the_division_of_a_text_changes_nothing_redacted(text: str, cuts: list[int]) -> None:
    sanitize._SECRETS.clear()
    remember_secret(KEY)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    redactor = StreamRedactor()
    shown = [redactor.feed(text[a:b]) for a, b in itertools.pairwise(places)]
    assert "".join([*shown, redactor.flush()]) == redact_secrets(text)


@given(TEXTS, st.lists(st.integers(0, 60), max_size=6))
def test_no_key_passes_even_if_keys_overlap(text: str, cuts: list[int]) -> None:
    sanitize._SECRETS.clear()
    remember_secret(KEY)
    remember_secret(LIKE)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    redactor = StreamRedactor()
    shown = [redactor.feed(text[a:b]) for a, b in itertools.pairwise(places)]
    whole = "".join([*shown, redactor.flush()])
    assert KEY not in whole
    assert LIKE not in whole


def test_text_that_cannot_start_a_key_is_not_delayed() -> None:
    remember_secret(KEY)
    redactor = StreamRedactor()
    assert [redactor.feed(piece) for piece in ("The ", "Rímac", " s", "k-x")] == [
        "The ",
        "Rímac",
        " ",
        "sk-x",
    ]
    assert redactor.feed(f"a {KEY}") == f"a {HIDDEN}"
