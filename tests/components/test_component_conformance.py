"""Every kind of component of this package passes the conformance kit of components."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openai
import pytest

import compound.components
from benchmarks.agents.arithmetic import calculate
from benchmarks.simulated.systems import Step
from compound.components.agent_prompt import AgentPrompt
from compound.components.agents.agent import Agent
from compound.components.agents.tool_runner import ToolRunner
from compound.components.agents.turn import AgentTurn
from compound.components.code import CodeRunner
from compound.components.declaration.component import component
from compound.components.declaration.llm import llm
from compound.components.external_agent import ExternalAgent
from compound.components.flow import Loop, Map
from compound.components.function import FirstOf, Function
from compound.components.hyperparameter import Hyperparameter
from compound.components.index import BM25, PassageIndex
from compound.components.llm import LLM
from compound.components.retriever import Retriever
from compound.components.selector import Selector
from compound.core.engine import Engine
from compound.core.security.sandbox.limits import SandboxLimits
from compound.graph.component import Component, CompositeBase, Input, Operation
from compound.graph.space import Choice, Demos, Float, Int, LoRA, Text
from compound.graph.system import System
from compound.testing import ComponentKit, ScriptedLM
from sandboxes import require_sandbox

QUESTIONS = [{"question": "Which river?"}, {"question": ""}, {"question": "Grüße, 世界 🙂\n" * 20}]
DEMO = {"inputs": {"question": "1+1"}, "outputs": {"output": "2"}}
PASSAGES = [{"id": f"p{i}", "title": f"T{i}", "text": f"Lima lies on river {i}."} for i in range(9)]


def join(first: str, second: str = "none", times: int = 1) -> str:
    return f"{first} {second} " * times


async def split(text: str, at: str) -> dict[str, Any]:
    head, _, tail = text.partition(at)
    return {"head": head, "tail": tail, "found": at in text}


def answer(question: str) -> bool:
    """Answer yes or no."""
    raise NotImplementedError


def draw(options: list[str], rng: np.random.Generator) -> str:
    return options[rng.integers(len(options))]


def shorten(text: str) -> str:
    return text[:-1]


def is_short(text: str) -> bool:
    return len(text) < 4


class TestLLM(ComponentKit):
    def make(self, name: str) -> Component:
        return LLM(
            name,
            prompt=Text("Answer."),
            demos=Demos((DEMO,), max=3),
            temperature=Float(0.0, 1.0),
            max_tokens=Choice(4, 8),
            lm=Choice("lm", "other"),
            weights=LoRA(4),
            stop=("\n\n",),
        )

    def inputs(self) -> Sequence[Mapping[str, object]]:
        return QUESTIONS


class TestAgentPrompt(ComponentKit):
    dumpable = False  # it is written as a part of its agent

    def make(self, name: str) -> Component:
        return AgentPrompt(
            name,
            system=Text("You know {{place}}."),
            temperature=Float(0.0, 1.0),
            max_tokens=Choice(4, 8),
            lm=Choice("lm", "other"),
        )

    def inputs(self) -> Sequence[Mapping[str, object]]:
        system = {"role": "system", "content": "You know Peru."}
        user = {"role": "user", "content": "Which river?"}
        return [
            {
                "request": {"messages": [system, user], "temperature": 0.5},
                "route": "chat/completions",
            },
            {"request": {"instructions": "You know Chile.", "input": "?"}, "route": "responses"},
        ]


def answering(question: str, base_url: str, api_key: str) -> str:
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        return client.responses.create(model="m", input=question, temperature=0).output_text


class TestExternalAgent(ComponentKit):
    def make(self, name: str) -> Component:
        answerer = AgentPrompt("answerer", prompt=Text("Answer {{question}} now"), max_tokens=4)
        return ExternalAgent(name, call=answering, prompts=[answerer], takes={"question": str})

    def inputs(self) -> Sequence[Mapping[str, object]]:
        return QUESTIONS


class TestLLMThatSamples(TestLLM):
    def make(self, name: str) -> Component:
        return LLM(name, prompt="Answer.", temperature=1.0, system="Be brief.", max_tokens=4)

    def engine(self) -> Engine:
        return ScriptedLM(lambda message, rng: " ".join(map(str, rng.integers(10, size=12))))


class TestLLMWithFields(TestLLM):
    def make(self, name: str) -> Component:
        return LLM(
            name, prompt=Text("Answer."), output={"answer": list[str], "sure": bool}, max_tokens=20
        )

    def engine(self) -> Engine:
        return ScriptedLM(lambda message: "answer:\n- a\n- b\nsure: yes")


class TestLLMWithLabels(TestLLM):
    def make(self, name: str) -> Component:
        return LLM(name, output=Literal["yes", "no"], format="json", takes={"question": str})

    def engine(self) -> Engine:
        return ScriptedLM(lambda message: '{"output": "no"}')


class TestRetriever(ComponentKit):
    """A retriever over a corpus."""

    corpus: Path

    @pytest.fixture(autouse=True)
    def _corpus(self, tmp_path: Path) -> None:
        self.corpus = tmp_path / "corpus.jsonl"
        self.corpus.write_text("\n".join(map(json.dumps, PASSAGES)))

    def make(self, name: str) -> Component:
        return Retriever(name, BM25(str(self.corpus)), k=Choice(1, 3, value=3))

    def inputs(self) -> Sequence[Mapping[str, object]]:
        return [{"query": "river 3"}, {"query": ""}]


class TestRetrieverWithAWiredSetting(TestRetriever):
    """A retriever whose ``k`` comes from the data."""

    def inputs(self) -> Sequence[Mapping[str, object]]:
        return [{"query": "river 3", "k": 3}, {"query": "", "k": 1}]


class TestRetrieverOfPassages(ComponentKit):
    def make(self, name: str) -> Component:
        return Retriever(name, PassageIndex(), k=Int(1, 5, value=2))

    def inputs(self) -> Sequence[Mapping[str, object]]:
        return [{"query": "river 3", "passages": PASSAGES}, {"query": "x", "passages": []}]


class TestSelector(ComponentKit):
    def make(self, name: str) -> Component:
        return Selector(name, "small", "large", value="large")

    def inputs(self) -> Mapping[str, object]:
        return {"question": "Which river?", "rows": [1, 2]}


class TestSelectorPerInput(TestSelector):
    def make(self, name: str) -> Component:
        return Selector(name, 1, 2.5, "large", per_input=True)


class TestHyperparameter(ComponentKit):
    def make(self, name: str) -> Component:
        return Hyperparameter(name, Float(0.5, 2.0, log=True))

    def inputs(self) -> Mapping[str, object]:
        return {}


class TestFunction(ComponentKit):
    def make(self, name: str) -> Component:
        return Function(name, join, times=Int(1, 3, value=2))

    def inputs(self) -> Sequence[Mapping[str, object]]:
        return [{"first": "a", "second": "b"}, {"first": "", "second": ""}]


class TestFunctionWithoutItsOptionalInput(TestFunction):
    def inputs(self) -> Sequence[Mapping[str, object]]:
        return [{"first": "a"}]


class TestAsyncFunction(ComponentKit):
    def make(self, name: str) -> Component:
        outputs = {"head": str, "tail": str, "found": bool}
        return Function(name, split, outputs=outputs, timeout=9.0, at=Choice(":", "/"))

    def inputs(self) -> Sequence[Mapping[str, object]]:
        return [{"text": "a:b"}, {"text": "b"}]


class TestStochasticFunction(ComponentKit):
    def make(self, name: str) -> Component:
        return Function(name, draw)

    def inputs(self) -> Mapping[str, object]:
        return {"options": ["a", "b", "c"]}


class TestFunctionComponent(ComponentKit):
    def make(self, name: str) -> Component:
        return component(name=name, times=Int(1, 3, value=2))(join)

    def inputs(self) -> Mapping[str, object]:
        return {"first": "a", "second": "b"}


class TestLLMFunction(ComponentKit):
    def make(self, name: str) -> Component:
        return llm(name=name, temperature=Float(0.0, 1.0), demos=Demos((DEMO,), max=3))(answer)

    def inputs(self) -> Sequence[Mapping[str, object]]:
        return QUESTIONS


class TestFunctionThatIsALambda(ComponentKit):
    dumpable = False

    def make(self, name: str) -> Component:
        function: Any = lambda text: text.upper()  # noqa: E731
        function.__annotations__ = {"text": str, "return": str}
        return Function(name, function)

    def inputs(self) -> Mapping[str, object]:
        return {"text": "a"}


class TestFirstOf(ComponentKit):
    def make(self, name: str) -> Component:
        return FirstOf(name, str, ("a", "b", "c"))

    def inputs(self) -> Mapping[str, object]:
        return {"b": "second", "c": "third"}


class TestCodeRunner(ComponentKit):
    def make(self, name: str) -> Component:
        return CodeRunner(name, SandboxLimits(wall=60.0), reproducible=True)

    def inputs(self) -> Sequence[Mapping[str, object]]:
        require_sandbox()
        copy = "import sys; print(sys.stdin.read(), open('d/a.txt').read())"
        programs = [copy, "import sys; sys.exit(3)", "("]
        return [
            {"code": code, "stdin": "Grüße 🙂", "files": {"d/a.txt": "text"}} for code in programs
        ]


class TestLoop(ComponentKit):
    def make(self, name: str) -> Component:
        text = Function("shorten", shorten)(text=Input("text"))
        body = System(
            "turn", outputs={"text": text, "done": Function("is_short", is_short)(text=text)}
        )
        return Loop(name, body, carry={"text": "text"}, until="done", max_turns=Int(2, 6, value=3))

    def inputs(self) -> Sequence[Mapping[str, object]]:
        return [{"text": "a text of some length"}, {"text": "short"}]


class TestLoopOfAModel(ComponentKit):
    def make(self, name: str) -> Component:
        turn = LLM("turn", prompt=Text("Go on."), max_tokens=6, temperature=0.5)(text=Input("text"))
        return Loop(
            name, System("turn", outputs={"text": turn}), carry={"text": "text"}, max_turns=3
        )

    def inputs(self) -> Mapping[str, object]:
        return {"text": "Once upon a time"}

    def engine(self) -> Engine:
        return ScriptedLM(lambda message, rng: " ".join(f"w{n}" for n in rng.integers(99, size=9)))


class TestMap(ComponentKit):
    def make(self, name: str) -> Component:
        each = LLM("each", prompt=Text("Say it again."), max_tokens=3)(
            item=Input("item"), note=Input("note")
        )
        return Map(name, System("one", outputs={"said": each}), over="item")

    def inputs(self) -> Sequence[Mapping[str, object]]:
        return [{"item": ["a", "b"], "note": "x"}, {"item": [], "note": "y"}]


class TestAgent(ComponentKit):
    """An agent that calls its tool once and then answers."""

    def make(self, name: str) -> Component:
        return Agent(
            name,
            [calculate],
            prompt=Text("Answer."),
            max_turns=Int(2, 4, value=3),
            tune_tools=True,
            max_tokens=60,
        )

    def inputs(self) -> Sequence[Mapping[str, object]]:
        return QUESTIONS

    def engine(self) -> Engine:
        call = '{"tool": "calculate", "arguments": {"expression": "6 * 7"}}'
        return ScriptedLM(lambda message: '{"answer": "42"}' if "Result of" in message else call)


class TestAgentTurn(ComponentKit):
    dumpable = False  # agents are written as a whole

    def make(self, name: str) -> Component:
        return AgentTurn(name, LLM(name, "Answer.", max_tokens=60, temperature=0.5), (calculate,))

    def inputs(self) -> Sequence[Mapping[str, object]]:
        call = {
            "id": "call_1",
            "name": "calculate",
            "tool": "calculate",
            "arguments": '{"expression": "1"}',
        }
        turn = {"role": "assistant", "text": "", "calls": [call]}
        history = [turn, {"role": "tool", "id": "call_1", "text": "1"}]
        return [
            {"task": {"question": "Grüße?"}, "history": [], "last_turn": False},
            {"task": {"question": "Grüße?"}, "history": history, "last_turn": True},
        ]

    def engine(self) -> Engine:
        return ScriptedLM(lambda message: '{"answer": "42"}')


class TestToolRunner(ComponentKit):
    dumpable = False  # agents are written as a whole

    def make(self, name: str) -> Component:
        return ToolRunner(name, (calculate,), 100)

    def inputs(self) -> Sequence[Mapping[str, object]]:
        call = {
            "id": "call_1",
            "name": "calculate",
            "tool": "calculate",
            "arguments": '{"expression": "1"}',
        }
        return [
            {"call": call},
            {"call": {"id": "call_1", "name": "fly", "known": "calculate", "arguments": ""}},
        ]


class TestSimulatedStep(ComponentKit):
    def make(self, name: str) -> Component:
        return Step(name, ("x",), (0.0, 1.0), carry=0.5, noise=0.3)

    def inputs(self) -> Mapping[str, object]:
        return {"x": 0.5}


def test_every_kind_has_a_class_here(tmp_path: Path) -> None:
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(compound.components.__path__, "compound.components.")
        if not module.ispkg and "engines" not in module.name and "imports" not in module.name
    ]
    kinds = {
        value for module in modules for value in vars(module).values() if inspect.isclass(value)
    }
    kinds = {
        kind
        for kind in kinds
        if issubclass(kind, Operation | CompositeBase)
        and kind.__module__.startswith("compound.components")
    }
    kits: list[Any] = [
        k for k in globals().values() if inspect.isclass(k) and issubclass(k, ComponentKit)
    ]
    TestRetriever.corpus = tmp_path / "corpus.jsonl"
    tested = {type(kit().make("tested")) for kit in kits if kit is not ComponentKit}
    assert kinds <= tested
    assert len(kinds) == 16
