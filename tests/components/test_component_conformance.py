"""Every kind of component of this package passes the conformance kit of components."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import compound.components
from benchmarks.agents.arithmetic import calculate
from compound.components.agent_prompt import AgentPrompt
from compound.components.agents.agent import Agent
from compound.components.agents.turn import AgentTurn, ToolRunner
from compound.components.code import CodeRunner
from compound.components.declaration import component, llm
from compound.components.external_agent import ExternalAgent
from compound.components.flow import Loop, Map
from compound.components.function import FirstOf, Function
from compound.components.hyperparameter import Hyperparameter
from compound.components.index import BM25, PassageIndex
from compound.components.llm import LLM
from compound.components.retriever import Retriever
from compound.components.selector import Selector
from compound.core.security.sandbox.limits import SandboxLimits
from compound.graph.component import Component, CompositeBase, Input, Operation
from compound.graph.space import Choice, Demos, Float, Int, LoRA, Text
from compound.graph.system import System
from compound.testing import ComponentKit, ScriptedLM
from sandboxes import require_sandbox

QUESTIONS = [{"question": "Which river?"}, {"question": ""}, {"question": "Grüße, 世界 🙂\n" * 20}]
DEMO = {"inputs": {"question": "1+1"}, "outputs": {"output": "2"}}
CHAT = "chat/completions"
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


def kit(make: Callable[[str], Component], inputs: Any, **attributes: Any) -> type[ComponentKit]:
    hooks = {"make": lambda self, name: make(name), "inputs": lambda self: inputs}
    return type("TestIt", (ComponentKit,), {**hooks, **attributes})


def answering(question: str, base_url: str, api_key: str) -> str:
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        return client.responses.create(model="m", input=question, temperature=0).output_text


TestLLM = kit(
    lambda name: LLM(
        name,
        prompt=Text("Answer."),
        demos=Demos((DEMO,), max=3),
        temperature=Float(0.0, 1.0),
        max_tokens=Choice(4, 8),
        lm=Choice("lm", "other"),
        weights=LoRA(4),
        stop=("\n\n",),
    ),
    QUESTIONS,
)
TestLLMThatSamples = kit(
    lambda name: LLM(name, prompt="Answer.", temperature=1.0, system="Be brief.", max_tokens=4),
    QUESTIONS,
    engine=lambda self: ScriptedLM(lambda _, rng: " ".join(map(str, rng.integers(10, size=12)))),
)
TestLLMWithFields = kit(
    lambda name: LLM(
        name, prompt=Text("Answer."), output={"answer": list[str], "sure": bool}, max_tokens=20
    ),
    QUESTIONS,
    engine=lambda self: ScriptedLM(lambda message: "answer:\n- a\n- b\nsure: yes"),
)
TestLLMFunction = kit(
    lambda name: llm(name=name, temperature=Float(0.0, 1.0), demos=Demos((DEMO,), max=3))(answer),
    QUESTIONS,
)
TestAgentPrompt = kit(
    lambda name: AgentPrompt(
        name,
        system=Text("You know {{place}}."),
        temperature=Float(0.0, 1.0),
        max_tokens=Choice(4, 8),
        lm=Choice("lm", "other"),
    ),
    [
        {"request": {"messages": [{"role": "system", "content": "You know Peru."}]}, "route": CHAT},
        {"request": {"instructions": "You know Chile.", "input": "?"}, "route": "responses"},
    ],
)
TestExternalAgent = kit(
    lambda name: ExternalAgent(
        name,
        call=answering,
        prompts=[AgentPrompt("answerer", prompt=Text("Answer {{question}} now"), max_tokens=4)],
        takes={"question": str},
    ),
    QUESTIONS,
)


class TestRetriever(ComponentKit):
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
    def inputs(self) -> Sequence[Mapping[str, object]]:
        return [{"query": "river 3", "k": 3}, {"query": "", "k": 1}]


TestRetrieverOfPassages = kit(
    lambda name: Retriever(name, PassageIndex(), k=Int(1, 5, value=2)),
    [{"query": "river 3", "passages": PASSAGES}, {"query": "x", "passages": []}],
)
TestSelector = kit(
    lambda name: Selector(name, 1, 2.5, "large", per_input=True), {"question": "?", "rows": [1, 2]}
)
TestHyperparameter = kit(lambda name: Hyperparameter(name, Float(0.5, 2.0, log=True)), {})
TestFunction = kit(
    lambda name: Function(name, join, times=Int(1, 3, value=2)),
    [{"first": "a", "second": "b"}, {"first": "", "second": ""}],
)
TestFunctionWithoutItsOptionalInput = kit(lambda name: Function(name, join), [{"first": "a"}])
TestAsyncFunction = kit(
    lambda name: Function(
        name,
        split,
        outputs={"head": str, "tail": str, "found": bool},
        timeout=9.0,
        at=Choice(":", "/"),
    ),
    [{"text": "a:b"}, {"text": "b"}],
)
TestStochasticFunction = kit(lambda name: Function(name, draw), {"options": ["a", "b", "c"]})
TestFunctionComponent = kit(
    lambda name: component(name=name, times=Int(1, 3, value=2))(join), {"first": "a", "second": "b"}
)
TestFirstOf = kit(lambda name: FirstOf(name, str, ("a", "b", "c")), {"b": "second", "c": "third"})


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


def looped(name: str) -> Component:
    text = Function("shorten", shorten)(text=Input("text"))
    turn = {"text": text, "done": Function("is_short", is_short)(text=text)}
    rest: Any = {"carry": {"text": "text"}, "until": "done", "max_turns": Int(2, 6, value=3)}
    return Loop(name, System("turn", outputs=turn), **rest)


def mapped(name: str) -> Component:
    each = LLM("each", prompt=Text("Say it again."), max_tokens=3, temperature=0.5)
    said = each(item=Input("item"), note=Input("note"))
    return Map(name, System("one", outputs={"said": said}), over="item")


TestLoop = kit(looped, [{"text": "a text of some length"}, {"text": "short"}])
TestMap = kit(
    mapped,
    [{"item": ["a", "b"], "note": "x"}, {"item": [], "note": "y"}],
    engine=lambda self: ScriptedLM(lambda _, rng: " ".join(map(str, rng.integers(9, size=9)))),
)
CALL = {"id": "call_1", "name": "calculate", "arguments": '{"expression": "1"}'}
HISTORY = [
    {"role": "assistant", "text": "", "calls": [{**CALL, "tool": "calculate"}]},
    {"role": "tool", "id": "call_1", "text": "1"},
]
TestAgent = kit(  # it calls its tool once, and then answers
    lambda name: Agent(
        name,
        [calculate],
        prompt=Text("Answer."),
        max_turns=Int(2, 4, value=3),
        tune_tools=True,
        max_tokens=60,
    ),
    QUESTIONS,
    engine=lambda self: ScriptedLM(
        lambda message: (
            '{"answer": "42"}'
            if "Result of" in message
            else '{"tool": "calculate", "arguments": {"expression": "6 * 7"}}'
        )
    ),
)
TestAgentTurn = kit(
    lambda name: AgentTurn(
        name, LLM(name, "Answer.", max_tokens=60, temperature=0.5), (calculate,)
    ),
    [
        {"task": {"question": "Grüße?"}, "history": [], "last_turn": False},
        {"task": {"question": "Grüße?"}, "history": HISTORY, "last_turn": True},
    ],
    engine=lambda self: ScriptedLM(lambda message: '{"answer": "42"}'),
)
TestToolRunner = kit(
    lambda name: ToolRunner(name, (calculate,), 100),
    [{"call": {**CALL, "tool": "calculate"}}, {"call": {**CALL, "known": "calculate"}}],
)


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
