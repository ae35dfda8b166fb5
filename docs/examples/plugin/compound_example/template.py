"""A component kind: fill a template."""

from __future__ import annotations

from collections.abc import Mapping

import compound as cp


class Template(cp.ext.Operation):
    """Insert a text into a template.

    Args:
        name: the name of the component.
        text: the template; ``{}`` stands for the input. It may be tuned.
    """

    kind = "template"
    version = "1"  # raise it when the behavior changes: it is part of cache keys

    def __init__(self, name: str, text: str | cp.Text | cp.Choice = "{}") -> None:
        self.name = name
        self.text = text

    @property
    def inputs(self) -> Mapping[str, cp.Port]:
        """One text."""
        return {"value": cp.Port(str)}

    @property
    def outputs(self) -> Mapping[str, cp.Port]:
        """The filled template."""
        return {"output": cp.Port(str)}

    @property
    def settings(self) -> Mapping[str, object]:
        """The template."""
        return {"text": self.text}

    async def run(
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: cp.ext.CallContext
    ) -> Mapping[str, object]:
        """Fill the template."""
        return {"output": str(values["text"]).replace("{}", str(inputs["value"]))}
