"""Repeat a draft until a check accepts it, and tune how often it may be revised.

The embedded model writes a slogan, and a function checks it. If the check fails, the next turn sees
the draft and the problem. The loop ends when the check passes, or after ``max_turns``.

Needs ``pip install -e ".[local]"`` and ``compound models get smollm2``.
Run: python docs/examples/loop.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import compound as cp

TOPICS = """
    rain river tea bread winter garden music train coffee summer forest market bridge harbour apple candle
    mountain island mirror window ocean honey lemon snow paper piano school castle bicycle flower kitchen
    moon ship teacher village wine cheese dance dream fire football holiday letter movie night orange
"""


def check(draft: str, topic: str) -> dict[str, object]:
    """Return what is wrong with a draft, and whether nothing is."""
    problems = []
    if topic not in draft.lower():
        problems.append(f"The word {topic} is missing.")
    if not 3 <= len(draft.split()) <= 8:
        problems.append("Write three to eight words.")
    return {"problem": " ".join(problems), "valid": not problems}


def nothing() -> str:
    """Return the draft and the problem that the first turn sees."""
    return ""


def declare() -> cp.System:
    """Declare one turn, and the loop around it."""
    topic, draft, problem = (cp.Input(name, str) for name in ("topic", "draft", "problem"))
    prompt = "Write a slogan of at most eight words about the topic."
    writer = cp.LLM("writer", prompt=prompt, temperature=0.8, max_tokens=20, stop=("\n",))
    checker = cp.Function("checker", check, outputs={"problem": str, "valid": bool})
    written = writer(topic=topic, draft=draft, problem=problem)
    checked = checker(draft=written, topic=topic)
    body = cp.System(
        "turn", outputs={"draft": written, "problem": checked.problem, "valid": checked.valid}
    )
    carry = {"draft": "draft", "problem": "problem"}
    loop = cp.Loop("reviser", body, carry=carry, until="valid", max_turns=cp.Int(1, 5, value=1))
    empty = cp.Function("empty", nothing)()
    revised = loop(topic=topic, draft=empty, problem=empty)
    return cp.System(
        "slogans", outputs={"slogan": revised.draft, "valid": revised.valid}, lm="smollm2"
    )


def is_valid(outputs: Mapping[str, object], example: cp.Example) -> float:
    """Score 1 if the last draft passed the check."""
    return float(bool(outputs["valid"]))


def main(folder: Path) -> cp.Result:
    """Tune the number of turns, and print the share of valid slogans."""
    examples = [{"id": topic, "topic": topic} for topic in TOPICS.split()]
    result = cp.optimize(
        declare(),
        data={"train": examples[:14], "valid": examples[14:34], "test": examples[34:]},
        metric=cp.metrics.custom(is_valid, bounds=(0, 1)),
        budget=cp.Budget(system_runs=100),
        run_dir=folder / "loop",
        progress=False,
    )
    before, after = result.test_before, result.test_after
    assert before is not None
    assert after is not None
    print(f"valid slogans on {len(after.rows)} test topics: {before.mean:.0%} -> {after.mean:.0%}")
    print(f"max_turns: {result.best['reviser.max_turns']}")
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
