"""Read the committed results of the benchmarks, and format tables of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "benchmarks" / "data"


def results(name: str) -> Any:  # noqa: ANN401 - the JSON of any benchmark
    """Return the results of a benchmark.

    Args:
        name: the path of the file below `DATA`, without its suffix.
    """
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def spread(found: Mapping[str, Any], *, digits: int = 3, signed: bool = False) -> str:
    """Format a mean with its limits.

    >>> spread({"mean": 0.5, "low": 0.25, "high": 0.75}, digits=2, signed=True)
    '+0.50 [+0.25, +0.75]'
    """
    form = f"{'+' if signed else ''}.{digits}f"
    return f"{found['mean']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rule = ["---"] * len(headings)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows))
