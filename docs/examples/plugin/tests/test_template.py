"""Conformance of the component kind."""

from __future__ import annotations

from collections.abc import Mapping

from compound_example.template import Template

import compound as cp
from compound.testing import ComponentKit


class TestTemplate(ComponentKit):
    def make(self, name: str) -> Template:
        return Template(name, "<{}>")

    def inputs(self) -> Mapping[str, object]:
        return {"value": "a"}


def test_it_fills_the_template() -> None:
    system = cp.System("s", outputs={"y": Template("t", "<{}>")(value=cp.Input("x", str))})
    assert cp.run(system, {"x": "a"}).outputs == {"y": "<a>"}
