"""What the YAML files of the tests call."""

from __future__ import annotations

from typing import Any

from compound.graph.component import Operation
from compound.graph.types import Port


def fuse(a: list[Any], b: list[Any], weight: float) -> list[str]:
    return [str(item) for item in (a if weight > 0.5 else b)]


def route(question: str) -> dict[str, Any]:
    return {"route": "search", "needs_search": True}


def step(state: str, turns: int = 1) -> dict[str, Any]:
    return {"state": state, "done": True}


def plan(question: str) -> dict[str, Any]:
    return {"questions": [question], "n": 1}


def shout(text: str) -> str:
    return text.upper()


def score(outputs: Any, example: Any) -> float:
    return 1.0


untyped = lambda text: text  # noqa: E731 - a function that no file can name
number = 3


class Cutter(Operation):
    kind = "cutter"

    def __init__(self, name: str, size: Any = 3, extra: Any = None) -> None:
        if size == 99:
            raise RuntimeError("99 is unlucky")
        self.name, self.size, self.extra = name, size, extra

    @property
    def inputs(self) -> Any:
        return {"text": Port(str)}

    @property
    def outputs(self) -> Any:
        return {"output": Port(str)}

    @property
    def settings(self) -> Any:
        return {"size": self.size}

    @property
    def version(self) -> str:
        return f"cutter:{self.extra}"

    async def run(self, inputs: Any, values: Any, call: Any) -> Any:
        return {"output": inputs["text"][: values["size"]]}
