"""Table of the agent with two MCP servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables.data import markdown, results


def agent_tools() -> str:
    """Tabulate the score of each stage of the agent on the same test questions."""
    found = results("agent_tools")
    rows = [_row(stage, row) for stage, row in found["stages"].items()]
    return markdown(["stage", "share right (95 % interval)", "searches", "calculations"], rows)


def _row(stage: str, row: Mapping[str, Any]) -> list[str]:
    score = f"{row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
    return [stage, score, f"{row['search']:.2f}", f"{row['calculate']:.2f}"]


TABLES = (agent_tools,)
