"""Conformance of the metric."""

from __future__ import annotations

from compound_example.brevity import brevity

import compound as cp
from compound.testing import MetricKit


class TestBrevity(MetricKit):
    def make(self) -> cp.ext.Metric:
        return brevity("answer", words=2)

    def cases(self) -> list[tuple[dict[str, object], cp.Example, float]]:
        example = cp.Example("e", {})
        return [
            ({"answer": "two words"}, example, 1.0),
            ({"answer": "here are four words"}, example, 0.5),
        ]
