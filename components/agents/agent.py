"""Agents: a model and tools, in turns until the model answers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from compound.components.agents.turn import (
    HISTORY,
    LAST,
    MESSAGE,
    RESERVED,
    TASK,
    TOOL_CALLS,
    AgentTurn,
    Record,
    ToolRunner,
    problem_of,
    setting_name,
    tool_text,
)
from compound.components.flow import Map
from compound.components.function import Function
from compound.components.llm import LLM
from compound.components.tools.tool import Tool
from compound.core.errors import CallError, DeclarationError, suggest_name
from compound.core.narrowing import report_wrong_arguments
from compound.graph.component import Input, Value, check_name, merge_addresses
from compound.graph.composite import Composite, RunBody, largest_number
from compound.graph.space import Choice, Demo, Demos, Float, Int, Text, Weights
from compound.graph.system import System
from compound.graph.types import Port

RESULTS = "results"
MAX_TURNS, MAX_CALLS, MAX_RESULT = 8, 4, 4_000


@report_wrong_arguments
class Agent(Composite):
    """A model that calls tools in turns until it gives its final answer.

    The body has two nodes: ``turn``, the model's turn (component ``NAME_turn``), and ``tools``,
    which executes its tool calls concurrently. Each turn and each tool call is a call of the trace:
    ``NAME[0]/turn``, ``NAME[0]/tools[1]/call``. The prompt, the model and the weights are
    parameters of ``NAME_turn``.

    A call with an unknown name or invalid arguments, and an error of a tool, are answered to the
    model as the result of the call. In the last turn, the model must answer.

    Args:
        name: the component's name.
        tools: what the model can call: `Tool` objects and typed functions.
        prompt: the instruction.
        output: one type (field ``output``), or types by field name, as in `LLM`.
        demos: demonstrations, shown as earlier conversations; as `Demos`, those that optimizers
            take from successful runs.
        lm: the model's name; ``None`` uses the system's model.
        temperature: sampling temperature; 0 is greedy.
        max_tokens: maximum length of the model's text in one turn.
        max_turns: maximum number of turns; may be a space to tune.
        max_calls: maximum number of tool calls in one turn; further ones are dropped.
        max_result: number of characters after which the result of a tool is cut.
        tune_tools: whether the texts of the tools may be tuned: names, descriptions, and
            descriptions of the arguments. Each is one text parameter, ``NAME_turn.tool_TOOL``.
        texts: texts that replace those of tools, by the tool's name, such as tuned ones; a name and
            a description, then a line ``- argument: description`` for each argument.
        weights: LoRA adapter weights; tunable if given.
        takes: declared inputs and their types; default: the connected edges define them.
        system: the system message.
        stop: strings that end the model's text.
        enforce: whether engines that can restrict the final answer to its type.
        reasks: maximum number of further requests after a tool call or a final answer that cannot
            be parsed. Default: 1, and 0 for trained agents, as in `LLM`.
        timeout: time limit of one attempt of a remote model in seconds.
        retries: how often transient errors of the model or of a server of tools are retried.

    Example:
        >>> from compound.components.tools.tool import tool
        >>> from compound.testing import ScriptedLM
        >>> @tool
        ... def add(a: int, b: int) -> int:
        ...     '''Add two numbers.'''
        ...     return a + b
        >>> agent = Agent("agent", [add], prompt=Text("Answer with a number."), output=int)
        >>> system = System("sums", {"sum": agent(question=Input("question"))}, lm="scripted")
        >>> lm = ScriptedLM(['{"tool": "add", "arguments": {"a": 17, "b": 25}}', '{"answer": 42}'])
        >>> import compound
        >>> trace = compound.run(system, {"question": "17 + 25"}, engines={"scripted": lm})
        >>> trace.outputs, [call.address for call in trace.calls]
        ({'sum': 42}, ['agent[0]/turn', 'agent[0]/tools[0]/call', 'agent[1]/turn'])
    """

    kind = "agent"

    def __init__(  # noqa: PLR0913 - settings
        self,
        name: str,
        tools: Sequence[Tool | Callable[..., object]],
        *,
        prompt: str | Text = "",
        output: object = str,
        demos: Demos | Sequence[Demo] = (),
        lm: str | Choice | None = None,
        temperature: NonNegativeFloat | Float | Choice = 0.0,
        max_tokens: PositiveInt | Int | Choice = 512,
        max_turns: PositiveInt | Int = MAX_TURNS,
        max_calls: PositiveInt = MAX_CALLS,
        max_result: PositiveInt = MAX_RESULT,
        tune_tools: bool = False,
        texts: Mapping[str, str] | None = None,
        weights: Weights | None = None,
        takes: Mapping[str, object] | None = None,
        system: str = "",
        stop: Sequence[str] = (),
        enforce: bool = True,
        reasks: NonNegativeInt | None = None,
        timeout: PositiveFloat | None = 120.0,
        retries: NonNegativeInt = 3,
    ) -> None:
        check_name("Agent", name)
        self.name, self.tune_tools, self.takes = name, tune_tools, takes
        self.tools = tuple(_as_tool(name, tool) for tool in tools)
        self.max_turns, self.max_calls, self.max_result = max_turns, max_calls, max_result
        self.texts = dict(texts or {})
        self._check()
        fields = output if isinstance(output, Mapping) else {"output": output}
        self.model = LLM(
            f"{name}_turn",
            prompt,
            output,
            demos=demos,
            lm=lm,
            temperature=temperature,
            max_tokens=max_tokens,
            stop=tuple(stop),
            format="text" if len(fields) == 1 else "json",
            enforce=enforce,
            reasks=reasks,
            weights=weights,
            system=system,
            timeout=timeout,
            retries=retries,
        )
        start = self.model.demos.value if isinstance(self.model.demos, Demos) else self.model.demos
        if problem := problem_of(start):
            raise DeclarationError(
                f"agent {name!r}: {problem}",
                hint="take demonstrations from records of the turns that answer",
            )
        if taken := [field for field in fields if field in RESERVED]:
            raise DeclarationError(f"agent {name!r}: {taken[0]!r} cannot be the name of an output")
        self.body = self._make_body()

    def _check(self) -> None:
        settings = [setting_name(tool) for tool in self.tools]
        for tool in self.tools:
            if settings.count(setting_name(tool)) > 1:
                raise DeclarationError(
                    f"agent {self.name!r} has several tools named {tool.name!r}",
                    hint="give tools different names: name=…",
                )
        least = {
            "max_turns": self.max_turns.low if isinstance(self.max_turns, Int) else self.max_turns,
            "max_calls": self.max_calls,
            "max_result": self.max_result,
        }
        names = [tool.name for tool in self.tools]
        for name in self.texts:
            if name not in names:
                raise DeclarationError(
                    f"agent {self.name!r} has no tool {name!r}", hint=suggest_name(name, names)
                )
        for setting, value in least.items():
            if value < 1:
                raise DeclarationError(
                    f"agent {self.name!r}: {setting} must be >= 1, but got {value!r}"
                )

    @property
    def tool_texts(self) -> dict[str, str | Text]:
        """Texts of tools by the name of the setting: those that may be tuned or were replaced."""
        found: dict[str, str | Text] = {}
        for tool in self.tools:
            text = self.texts.get(tool.name, tool_text(tool))
            if self.tune_tools:
                found[setting_name(tool)] = Text(text)
            elif tool.name in self.texts:
                found[setting_name(tool)] = text
        return found

    def _make_body(self) -> System:
        component = AgentTurn(
            f"{self.name}_turn",
            self.model,
            self.tools,
            self.tool_texts,
            self.takes or {},
            self.max_calls,
        )
        turn = component(
            name="turn",
            task=Input(TASK, dict[str, Any]),
            history=Input(HISTORY, list[dict[str, Any]]),
            last_turn=Input(LAST, bool),
        )
        runner = ToolRunner(f"{self.name}_call", self.tools, self.max_result, self.model.retries)
        call = System("call", outputs={"result": runner(name="call", call=Input("call", Record))})
        results = Map(f"{self.name}_tools", call, over="call")(name="tools", call=turn[TOOL_CALLS])
        answer = {field: turn[field] for field in self.model.outputs}
        shared = {MESSAGE: turn[MESSAGE], TOOL_CALLS: turn[TOOL_CALLS], RESULTS: results}
        return System(f"{self.name}_body", outputs={**shared, **answer})

    @property
    def inputs(self) -> Mapping[str, Port] | None:  # noqa: D102
        return (
            None if self.takes is None else {name: Port(kind) for name, kind in self.takes.items()}
        )

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        return self.model.outputs

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        return {"max_turns": self.max_turns}

    @property
    def version(self) -> str:  # noqa: D102
        return f"agent:{self.body.signature}"

    def most_turns(self, sizes: Mapping[str, float]) -> float:  # noqa: D102
        return sizes.get("max_turns", largest_number(self.max_turns))

    async def drive(  # noqa: D102
        self, inputs: Mapping[str, Value], values: Mapping[str, object], body: RunBody
    ) -> Mapping[str, Value] | None:
        turns = values["max_turns"]
        if type(turns) is not int or turns < 1:
            raise CallError(f"max_turns must be >= 1, but got {turns!r}")
        limit = inputs["max_turns"].sources if "max_turns" in inputs else ()
        fields = {name: value for name, value in inputs.items() if name not in self.settings}
        task = Value(
            {name: value.data for name, value in fields.items()},
            merge_addresses(*(value.sources for value in fields.values())),
        )
        history = Value([])
        answer: Mapping[str, Value] = {}
        for turn in range(turns):
            last = turn + 1 == turns
            ran = await body(turn, {TASK: task, HISTORY: history, LAST: Value(last, limit)})
            if ran is None:
                return None
            answer = ran
            if not ran[TOOL_CALLS].data:
                break
            history = _extended(history, ran)
        return {
            name: Value(answer[name].data, merge_addresses(answer[name].sources, limit))
            for name in self.outputs
        }


def _as_tool(owner: str, given: object) -> Tool:
    if isinstance(given, Tool):
        return given
    if isinstance(given, Function):  # made by `compound.component`
        return Tool.from_function(given.function, name=given.name)
    if inspect.isroutine(given):
        return Tool.from_function(given)
    kind = given.__name__ if isinstance(given, type) else type(given).__name__
    raise DeclarationError(
        f"agent {owner!r}: a tool must be a tool or a function, but got {kind}",
        hint="pass a cp.Tool, or a function with annotations, such as `def search(query: str) -> str`; "
        "of a tool of LangChain or DSPy, its function: tool.func",
    )


def _extended(history: Value, ran: Mapping[str, Value]) -> Value:
    """Return the history with a turn; later turns depend on all calls of it."""
    calls, results = ran[TOOL_CALLS].data, ran[RESULTS].data
    assert isinstance(history.data, list)
    assert isinstance(calls, list)
    assert isinstance(results, list)
    said = {"role": "assistant", "text": ran[MESSAGE].data, "calls": calls}
    heard = [
        {"role": "tool", "id": call["id"], "text": result}
        for call, result in zip(calls, results, strict=True)
    ]
    sources = merge_addresses(
        history.sources, *(ran[name].sources for name in (MESSAGE, TOOL_CALLS, RESULTS))
    )
    return Value([*history.data, said, *heard], sources)
