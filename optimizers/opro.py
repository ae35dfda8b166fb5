"""Prompts written by a language model that sees earlier prompts with their scores (OPRO).

Yang et al. 2023, "Large Language Models as Optimizers". The history is kept across iterations and shown
in ascending order; a proposal may span several lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from compound.contracts import Message, Request

MARK = re.compile(r"<prompt>(.*?)(?:</prompt>|\Z)", re.DOTALL | re.IGNORECASE)


def ask(
    purpose: str,
    history: Sequence[tuple[str, float | None]],
    seed: int,
    shown: int = 10,
) -> Request:
    """Return the request for one new prompt.

    Args:
        purpose: what the component does: its inputs and outputs in words.
        history: prompts and their scores, the last one where a prompt has several; the best ``shown`` are
            shown, the best last. ``None`` is a prompt that has no score yet.
        seed: the request's random stream.
        shown: how many earlier prompts to show.
    """
    best = sorted(dict(history).items(), key=lambda item: -math.inf if item[1] is None else item[1])[-shown:]
    lines = "\n".join(f"<prompt>{text}</prompt> {_score(score)}" for text, score in best)
    text = (
        f"A language model performs one step of a larger system. The step: {purpose}\n\n"
        f"Instructions tried so far, with their scores (higher is better):\n{lines}\n\n"
        "Write one new instruction that is different from all of these and scores higher. "
        "Write it between <prompt> and </prompt>, and nothing else."
    )
    return Request((Message("user", text),), max_tokens=400, temperature=1.0, seed=seed)


def _score(score: float | None) -> str:
    return "not scored yet" if score is None else f"score {score:.3f}"


def proposal(text: str) -> str | None:
    """Return the instruction in a reply, all its lines; ``None`` when there is none.

    >>> proposal("Sure! <prompt>Answer.\\nBe brief.</prompt>")
    'Answer.\\nBe brief.'
    """
    match = MARK.search(text)
    found = match.group(1).strip() if match else ""
    return found or None
