"""Lines that report the events of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from compound.api.progress import format_event

SCORE = {"mean": 0.25, "low": 0.1, "high": 0.4, "n": 40}
DECISION = {
    "event": "decision",
    "verdict": "supported",
    "accepted": True,
    "before": {"mean": 0.25},
    "after": {"mean": 0.5},
    "level": 0.05,
}


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            {"event": "outlook", "duplicates": ["one"], "told": ["two"]},
            "note      one\nnote      two",
        ),
        ({"event": "proposals", "note": "stopped"}, "note      stopped"),
        ({"event": "test_before", **SCORE}, "test      before 0.250 [0.100, 0.400] on 40"),
        ({"event": "test_after", **SCORE}, "test      after 0.250 [0.100, 0.400] on 40"),
        (
            {**DECISION, "p": 0.00071},
            "decision  supported: valid 0.250 -> 0.500, p = 0.00071 at level 0.05",
        ),
        (
            {**DECISION, "p": 1e-9},
            "decision  supported: valid 0.250 -> 0.500, p < 0.0001 at level 0.05",
        ),
    ],
)
def test_an_event_is_one_line_for_each_thing_it_says(event: Mapping[str, Any], text: str) -> None:
    assert format_event(event) == text
