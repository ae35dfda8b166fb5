"""The kind ``llm``: a call to a language model."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field

from compound.components.declaration.llm import LLMFunction
from compound.components.llm import LLM
from compound.graph.space import Choice, Weights
from compound.spec.kinds.kind import DumpContext, Kind, MakeContext, make_settings
from compound.spec.schema.settings import (
    CountSetting,
    DemosSetting,
    FloatSetting,
    LabelSetting,
    TextSetting,
    WeightsSetting,
)
from compound.spec.schema.types import Model, Name, Type
from compound.spec.schema.wiring import Out, Wiring
from compound.spec.spelling import Tree
from compound.spec.yaml.text import Flow


class LLMSettings(Model):
    """A call to a language model."""

    prompt: TextSetting = ""
    """The instruction."""
    demos: DemosSetting = Field(default=[])
    """Demonstrations placed before the inputs."""
    lm: LabelSetting | None = None
    """The model; the file's `lm` by default."""
    temperature: FloatSetting = 0.0
    """Sampling temperature; 0 is greedy decoding and makes the component deterministic."""
    max_tokens: CountSetting = 256
    """Maximum length of the answer in tokens."""
    stop: list[str] = Field(default=[])
    """Stop sequences."""
    format: Literal["auto", "text", "fields", "json"] = "auto"
    """Format of the output fields: text (one field), fields (`name: value` lines) or json."""
    enforce: bool = True
    """Restrict the answer to its type where the engine can."""
    reasks: int | None = Field(default=None, ge=0)
    """Maximum number of further requests after an answer that cannot be parsed; 1 for JSON by default."""
    weights: WeightsSetting | None = None
    """A LoRA adapter to train."""
    takes: dict[Name, Type] | None = None
    """Names and types of the inputs; by default those that are connected."""
    system: str = ""
    """The system message."""
    timeout: float | None = Field(default=120.0, gt=0)
    """Timeout of one attempt of a remote model in seconds."""
    retries: int = Field(default=3, ge=0)
    """Maximum number of retries after transient errors."""


class LLMEntry(Wiring):
    """A language model as a typed component."""

    llm: LLMSettings
    """The model's settings."""
    out: Out = Field(default="str", validate_default=True)
    """The type of the answer, or the types of the output fields."""


def _make(entry: LLMEntry, context: MakeContext) -> LLM | None:
    file, inside = context.file, (*context.address, "llm")
    given = make_settings(entry.llm.given)
    if isinstance(entry.llm.demos, list):
        given["demos"] = tuple(demo.model_dump() for demo in entry.llm.demos)
    lm = given.get("lm")
    if lm is not None:
        file.check_models(lm.options if isinstance(lm, Choice) else [lm], (*inside, "lm"))
    if isinstance(weights := given.get("weights"), Weights) and weights.value is not None:
        stored = file.resolve_stored(weights.value, (*inside, "weights", "value"))
        given["weights"] = replace(weights, value=stored)
    given |= {"stop": tuple(entry.llm.stop), "output": entry.out}
    return file.attempt(inside, lambda: LLM(context.name, **given))


def _dump(component: LLM, context: DumpContext) -> Tree:
    given = context.changed_fields(component, ("name", "output", "takes"))
    if component.takes is not None:
        given["takes"] = context.types(component.takes)
    outputs = context.output_types(component)
    if outputs == {"output": "str"}:
        return {"llm": given}
    return {"llm": given, "out": outputs["output"] if list(outputs) == ["output"] else Flow(outputs)}


LLM_KIND = Kind("llm", LLMEntry, _make, (LLM, LLMFunction), _dump)
