"""Tests of the component kind."""

from __future__ import annotations

from compound_example.template import Template

import compound as cp


def test_it_fills_the_template() -> None:
    system = cp.System("s", outputs={"y": Template("t", "<{}>")(value=cp.Input("x", str))})
    assert cp.run(system, {"x": "a"}).outputs == {"y": "<a>"}
