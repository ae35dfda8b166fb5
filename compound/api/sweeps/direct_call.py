"""The system of a direct call: one request to the default model, with the inputs and outputs of a system."""

from __future__ import annotations

from typing import Any

from compound.components.llm import LLM
from compound.errors import DeclarationError
from compound.evaluation.metrics.comparison import Comparison
from compound.evaluation.metrics.judges.judge import Judge
from compound.example import Metric
from compound.graph.component import Input, Output, Source, connect
from compound.graph.space import Space
from compound.graph.system import System

NAME = "direct"
MAX_TOKENS = 256  # of the answer, unless a model component writes the output


class NotApplicable(DeclarationError):
    """A control does not apply to a system, for a reason that the sweep reports."""


def direct_system(system: System, metric: Metric) -> System:
    """Return a system of one LLM component with the inputs of a system, and the outputs that a metric reads.

    The prompt names inputs and outputs, and the component adds the type of the outputs, as it does in any
    system. Where an LLM component writes the output, its stop strings and number of tokens are taken over.

    Raises:
        NotApplicable: the system has no default model, or no model can write its outputs.

    Example:
        >>> from compound import exact_match
        >>> answerer = LLM("answerer", max_tokens=8)
        >>> system = System("demo", {"answer": answerer(question=Input("question"))}, lm="smollm2")
        >>> component = direct_system(system, exact_match("answer")).components["direct"]
        >>> component.prompt, component.max_tokens
        ('Read the question, then give the answer.', 8)
    """
    if system.lm is None:
        raise NotApplicable(f"system {system.name!r} has no default model (lm)")
    names = [metric.output] if isinstance(metric, Comparison | Judge) else list(system.outputs)
    kinds = {name: str if system.outputs[name].type is Any else system.outputs[name].type for name in names}
    writer = _writer(system, names)
    stop, setting = (writer.stop, writer.max_tokens) if writer else ((), MAX_TOKENS)
    start = setting.value if isinstance(setting, Space) else setting
    tokens = start if isinstance(start, int) else MAX_TOKENS
    wires: dict[str, Source] = {_port(name): Input(name, kind) for name, kind in system.inputs.items()}
    try:
        component = LLM(
            NAME, prompt=_prompt(list(system.inputs), names), output=kinds, max_tokens=tokens, stop=stop
        )
        node = connect(component, NAME, wires, None)
        made = System(NAME, {name: Output(node, name) for name in names}, lm=system.lm)
    except DeclarationError as error:
        raise NotApplicable(f"one call cannot replace the system: {error.message}") from error
    return made.with_engines(system.engines)


def _prompt(inputs: list[str], outputs: list[str]) -> str:
    """Return the instruction.

    >>> _prompt(["question", "search_results"], ["answer"])
    'Read the question and the search results, then give the answer.'
    """
    given, wanted = (
        " and ".join(f"the {name.replace('_', ' ')}" for name in names) for names in (inputs, outputs)
    )
    return f"Read {given}, then give {wanted}."


def _port(name: str) -> str:
    """Return the port of an input; a port with the name of a setting would replace the setting."""
    return f"given_{name}" if name in LLM(NAME).settings else name


def _writer(system: System, outputs: list[str]) -> LLM | None:
    """Return the LLM component that writes the outputs, if one does."""
    sources = [system.outputs[name] for name in outputs]
    components = [source.node.component for source in sources if isinstance(source, Output)]
    first = components[0] if components else None
    same = all(component is first for component in components)
    return first if same and isinstance(first, LLM) else None
