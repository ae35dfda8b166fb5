"""A metric: short answers."""

from __future__ import annotations

from collections.abc import Mapping

import compound as cp


def brevity(output: str, words: int = 5) -> cp.ext.Metric:
    """Score 1 for answers of at most `words` words, and less for longer ones.

    Args:
        output: the output to score.
        words: the number of words that still scores 1.
    """

    def score(outputs: Mapping[str, object], example: cp.Example) -> cp.Score:
        count = len(str(outputs[output]).split())
        return cp.Score(
            min(1.0, words / max(count, 1)), feedback=f"{count} words, at most {words} wanted"
        )

    return cp.metrics.custom(score, "brevity", bounds=(0, 1))
