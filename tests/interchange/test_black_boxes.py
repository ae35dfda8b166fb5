"""LangChain runnables, Haystack pipelines and DSPy modules are components whose requests count in the budget."""

from __future__ import annotations

import asyncio
import dataclasses
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypedDict

import dspy
import haystack
import pytest
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.utils import Secret
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import PydanticOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import (
    ConfigurableField,
    RunnableConfig,
    RunnableLambda,
    RunnableParallel,
)
from pydantic import BaseModel

import compound as cp
from benchmarks.measure.interchange.chat_server import ChatServer
from compound.core.engine import NO_USAGE
from compound.core.errors import BudgetExhausted, DeclarationError, RunFailed
from compound.execution.budget import Budget, Meter

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:.*ReadOnly"
)
QUESTION = {"question": "capital?"}


class City(BaseModel):
    name: str
    people: int


def model(
    text: str = "Lima", tokens: tuple[int, int] | None = (7, 2), name: str = "gpt-4o-mini"
) -> Any:
    usage: Any = tokens and {
        "input_tokens": tokens[0],
        "output_tokens": tokens[1],
        "total_tokens": sum(tokens),
    }
    message = AIMessage(text, usage_metadata=usage, response_metadata={"model_name": name})
    return GenericFakeChatModel(messages=iter([message] * 99))


PROMPT = ChatPromptTemplate.from_messages([("system", "Answer."), ("user", "{question}")])


def one_node(component: Any, *names: str) -> cp.System:
    node = component(
        **{name: cp.Input(name, component.inputs[name].type) for name in names or component.inputs}
    )
    fields = list(component.outputs)
    return cp.System("s", {f: node if len(fields) == 1 else node[f] for f in fields})


@pytest.fixture
def server() -> Iterator[ChatServer]:
    def script(messages: Any) -> str:
        if "[[ ##" in messages[0]["content"]:
            return "[[ ## answer ## ]]\nLima\n\n[[ ## completed ## ]]"
        return f"Lima for {messages[-1]['content']}"

    with ChatServer(script, model="gpt-4o-mini") as running:
        yield running


def pipeline(server: ChatServer) -> Any:
    found = haystack.Pipeline()
    template = [ChatMessage.from_user("{{style}}: {{question}}")]
    found.add_component(
        "prompt", ChatPromptBuilder(template=template, required_variables=["question", "style"])
    )
    found.add_component(
        "llm",
        OpenAIChatGenerator(
            model="gpt-4o-mini", api_key=Secret.from_token("none"), api_base_url=server.url
        ),
    )
    found.connect("prompt.prompt", "llm.messages")
    return found


def test_a_chain_has_the_ports_of_its_schemas_and_reports_its_usage() -> None:
    component = cp.interchange.from_langchain(
        PROMPT | model() | StrOutputParser(), "answerer", price=(1.0, 10.0)
    )
    assert {name: port.type for name, port in component.inputs.items()} == {"question": str}
    trace = cp.run(one_node(component), QUESTION)
    assert trace.outputs == {"output": "Lima"}
    assert trace.usage == cp.ext.Usage(1, 7, 2, cost=27e-6)


def test_a_parsed_object_has_its_fields_as_outputs() -> None:
    chain = (
        PROMPT
        | model('{"name": "Lima", "people": 10}')
        | PydanticOutputParser(pydantic_object=City)
    )
    assert cp.run(one_node(cp.interchange.from_langchain(chain)), QUESTION).outputs == {
        "name": "Lima",
        "people": 10,
    }


def test_branches_are_counted_together() -> None:
    chain = PROMPT | model() | StrOutputParser()
    component = cp.interchange.from_langchain(RunnableParallel(first=chain, second=chain))
    trace = cp.run(one_node(component), QUESTION)
    assert trace.outputs == {"first": "Lima", "second": "Lima"}
    assert (trace.usage.calls, trace.usage.prompt_tokens) == (2, 14)


def graph(state: Any, answer: Any, **schemas: Any) -> Any:
    from langgraph.graph import END, START, StateGraph

    builder = StateGraph(state, **schemas)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    builder.add_edge("answer", END)
    return builder.compile()


class State(TypedDict):
    question: str
    answer: str
    steps: Annotated[list[str], operator.add]


@dataclasses.dataclass
class DataState:
    question: str
    answer: str = ""


class ModelState(BaseModel):
    question: str
    answer: str = ""


def test_a_graph_has_the_fields_of_its_state() -> None:
    pytest.importorskip("langgraph")
    answering = graph(
        State, lambda state: {"answer": state["question"].upper(), "steps": ["answer"]}
    )
    component = cp.interchange.from_langchain(answering)
    assert {name: (port.type, port.optional) for name, port in component.inputs.items()} == {
        "question": (str, True),
        "answer": (str, True),
        "steps": (list[str], True),
    }
    trace = cp.run(one_node(component, "question"), QUESTION)
    assert trace.outputs == {"question": "capital?", "answer": "CAPITAL?", "steps": ["answer"]}


@pytest.mark.parametrize("state", [DataState, ModelState])
def test_a_graph_and_a_function_take_instances_of_classes(state: Any) -> None:
    pytest.importorskip("langgraph")
    expected = {"question": "capital?", "answer": "CAPITAL?"}
    answering = graph(state, lambda given: {"answer": given.question.upper()})
    assert (
        cp.run(one_node(cp.interchange.from_langchain(answering), "question"), QUESTION).outputs
        == expected
    )

    def answer(given: Any) -> str:
        return str(given.question.upper())

    answer.__annotations__["given"] = state
    component = cp.interchange.from_langchain(RunnableLambda(answer))
    assert cp.run(one_node(component, "question"), QUESTION).outputs == {"output": "CAPITAL?"}


def test_the_messages_of_a_graph_become_the_text_of_the_last_one() -> None:
    pytest.importorskip("langgraph")
    from langgraph.graph import MessagesState

    component = cp.interchange.from_langchain(
        graph(MessagesState, lambda state: {"messages": [model().invoke(state["messages"])]}),
        price=(1.0, 10.0),
    )
    trace = cp.run(one_node(component), {"messages": "capital?"})
    assert trace.outputs == {"messages": "Lima"}
    assert (trace.usage.calls, trace.usage.prompt_tokens) == (1, 7)


def test_a_value_without_the_declared_fields_is_named() -> None:
    component = cp.interchange.from_langchain(
        RunnableLambda(abs), inputs={"input": int}, outputs={"twice": int}
    )
    with pytest.raises(RunFailed, match="the runnable returned int, and no twice"):
        cp.run(one_node(component, "input"), {"input": 2})


def test_configurable_fields_are_tunable_settings() -> None:
    chosen = PROMPT.configurable_alternatives(
        ConfigurableField(id="tone"),
        default_key="plain",
        loud=ChatPromptTemplate.from_messages([("user", "{question}!!!")]),
    )
    said = RunnableLambda(lambda value: value.to_messages()[-1].content)
    component = cp.interchange.from_langchain(
        chosen | said, outputs={"output": str}, tone=cp.Choice("plain", "loud", value="plain")
    )
    system = one_node(component, "question")
    assert list(system.parameters) == ["runnable.tone"]
    assert cp.run(system, QUESTION).outputs == {"output": "capital?"}
    assert cp.run(system.bind({"runnable.tone": "loud"}), QUESTION).outputs == {
        "output": "capital?!!!"
    }


class Notes(TypedDict):
    question: str
    notes: Annotated[list[str], operator.add]


def kept_graph(node: Any, **options: Any) -> Any:
    from langgraph.checkpoint.memory import MemorySaver
    from langgraph.graph import END, START, StateGraph

    made: Any = StateGraph(Notes)
    made.add_node("note", node)
    made.add_edge(START, "note")
    made.add_edge("note", END)
    return made.compile(checkpointer=MemorySaver(), **options)


def note(state: Notes, config: RunnableConfig) -> Any:
    return {"notes": [f"{config['configurable'].get('user')}: {state['question']}"]}


@pytest.mark.parametrize(
    "wrap", [lambda g: g, lambda g: g | RunnableLambda(dict), lambda g: g.with_config(tags=["a"])]
)
def test_each_run_of_a_graph_with_a_checkpointer_is_a_thread_of_its_own(wrap: Any) -> None:
    inputs = {"question": str}
    component = cp.interchange.from_langchain(
        wrap(kept_graph(note)),
        "graph",
        inputs=inputs,
        outputs={"notes": list[str]},
        cache=False,
        configurable={"user": cp.Choice("ann", "bob", value="ann")},
    )
    system = one_node(component)
    assert list(system.parameters) == ["graph.user"]
    for _ in range(2):  # a second run does not continue the first
        assert cp.run(system, QUESTION).outputs == {"notes": ["ann: capital?"]}
    assert cp.run(system.bind({"graph.user": "bob"}), QUESTION).outputs == {
        "notes": ["bob: capital?"]
    }


@pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory")
@pytest.mark.parametrize("keys", [("session_id",), ("user", "talk")])
def test_each_run_has_a_message_history_of_its_own(keys: tuple[str, ...]) -> None:
    from langchain_core.chat_history import InMemoryChatMessageHistory
    from langchain_core.runnables import ConfigurableFieldSpec
    from langchain_core.runnables.history import RunnableWithMessageHistory

    histories: dict[Any, Any] = {}

    def of_one(session_id: str) -> Any:
        return histories.setdefault(session_id, InMemoryChatMessageHistory())

    def of_two(user: str, talk: str) -> Any:
        return histories.setdefault((user, talk), InMemoryChatMessageHistory())

    history = of_one if len(keys) == 1 else of_two
    specs = [
        ConfigurableFieldSpec(id=key, annotation=str, default="", is_shared=True) for key in keys
    ]
    runnable = RunnableWithMessageHistory(
        RunnableLambda(lambda given: AIMessage(str(len(given["past"])))),
        history,
        input_messages_key="question",
        history_messages_key="past",
        history_factory_config=specs,
    )
    made = cp.interchange.from_langchain(
        runnable, "chat", inputs={"question": str}, outputs={"output": str}, cache=False
    )
    for _ in range(2):
        assert list(cp.run(one_node(made), QUESTION).outputs.values()) == ["0"]
    assert len(histories) == 2


def test_a_graph_that_waits_for_a_person_is_no_answer() -> None:
    from langgraph.types import interrupt

    waiting = kept_graph(lambda state: {"notes": [interrupt("sure?")]})
    with pytest.raises(RunFailed, match=r"waits for a person: 'sure\?'"):
        cp.run(one_node(cp.interchange.from_langchain(waiting, "graph"), "question"), QUESTION)
    for options in ({"interrupt_before": ["note"]}, {"interrupt_after": "*"}):
        with pytest.raises(DeclarationError, match="stops at .* for a person"):
            cp.interchange.from_langchain(kept_graph(note, **options))


@pytest.mark.parametrize(
    ("given", "calls", "unpriced"),
    [({}, 1, 0), ({"tokens": None}, 1, None), ({"name": "own-model"}, 1, 1)],
    ids=["known price", "no usage", "unknown price"],
)
def test_calls_are_counted_and_a_message_becomes_its_text(
    given: Any, calls: int, unpriced: int | None
) -> None:
    component = cp.interchange.from_langchain(PROMPT | model(**given))
    trace = cp.run(one_node(component), QUESTION)
    assert trace.outputs == {"output": "Lima"}
    assert trace.usage.calls == calls
    assert unpriced in (None, trace.usage.unpriced)


def within(budget: Budget, component: Any, runs: int = 1) -> Meter:
    meter = Meter(budget)

    async def run() -> None:
        for i in range(runs):
            await cp.Executor(meter=meter).run(one_node(component), QUESTION, sample=i)

    asyncio.run(run())
    return meter


def test_reported_usage_ends_the_run_at_the_limit() -> None:
    component = cp.interchange.from_langchain(PROMPT | model())
    assert within(Budget(tokens=18), component, runs=2).usage.tokens == 18
    with pytest.raises(BudgetExhausted, match="tokens"):
        within(Budget(tokens=18), component, runs=3)
    with pytest.raises(BudgetExhausted, match="limit of 2"):
        within(Budget(calls=2), component, runs=3)


def test_a_stated_worst_case_is_reserved_before_the_run() -> None:
    called: list[object] = []

    def record(value: object) -> str:
        called.append(value)
        return "x"

    component = cp.interchange.from_langchain(
        RunnableLambda(record),
        inputs={"question": str},
        outputs={"output": str},
        worst=cp.ext.Usage(calls=1, prompt_tokens=100, completion_tokens=100),
    )
    with pytest.raises(BudgetExhausted, match="above the limit of 150"):
        within(Budget(tokens=150), component)
    assert called == []


def test_a_cost_limit_needs_a_price() -> None:
    with pytest.raises(
        DeclarationError, match=r"price of the component's own requests.* is unknown"
    ):
        within(Budget(cost=1.0), cp.interchange.from_langchain(PROMPT | model(name="own-model")))
    priced = cp.interchange.from_langchain(PROMPT | model(name="own-model"), price=(1.0, 1.0))
    assert within(Budget(cost=1.0), priced).usage.cost == pytest.approx(9e-6)


def test_a_pipeline_has_the_ports_of_its_sockets_and_reports_its_usage(server: ChatServer) -> None:
    original = pipeline(server)
    component = cp.interchange.from_haystack(
        original, "rag", outputs={"answer": "llm.replies"}, price=(1.0, 1.0)
    )
    assert list(component.inputs) == ["question", "style"]
    trace = cp.run(one_node(component), {**QUESTION, "style": "brief"})
    assert trace.outputs == {"answer": "Lima for brief: capital?"}
    assert trace.usage == cp.ext.Usage(1, 2, 4, cost=6e-6)
    assert "recorded" not in repr(original.get_component("llm").run)
    assert (
        original.run({"question": "a", "style": "b"})["llm"]["replies"][0].text == "Lima for b: a"
    )


def test_a_socket_can_be_tuned_and_inputs_named(server: ChatServer) -> None:
    component = cp.interchange.from_haystack(
        pipeline(server),
        inputs={"query": "prompt.question"},
        outputs={"answer": "llm.replies", "asked": "prompt.prompt"},
        settings={"prompt.style": cp.Choice("brief", "long", value="brief")},
    )
    assert list(component.inputs) == ["query"]
    system = one_node(component, "query").bind({"pipeline.prompt_style": "long"})
    assert cp.run(system, {"query": "capital?"}).outputs["asked"] == "long: capital?"


@haystack.component
class Repeater:
    """Reports usage like a generator, and repeats until the third run."""

    runs = 0

    @haystack.component.output_types(again=str, replies=list[str])  # type: ignore[untyped-decorator]
    def run(self, text: str, again: str = "") -> dict[str, Any]:
        Repeater.runs += 1
        meta = {"model": "m", "usage": {"prompt_tokens": 5, "completion_tokens": 1}}
        found = {"replies": [ChatMessage.from_assistant("x", meta=meta)]}
        return found if Repeater.runs % 3 == 0 else {**found, "again": "again"}


@haystack.component
class Echo:
    @haystack.component.output_types(text=str)  # type: ignore[untyped-decorator]
    def run(self, again: str) -> dict[str, str]:
        return {"text": again}


def test_a_socket_whose_annotation_is_not_evaluated_takes_any_value() -> None:
    @haystack.component
    class Local:
        @haystack.component.output_types(text=str)  # type: ignore[untyped-decorator]
        def run(self, question: str, other: Unknown = None) -> dict[str, str]:  # type: ignore[name-defined] # noqa: F821
            return {"text": f"{question}!"}

    pipeline = haystack.Pipeline()
    pipeline.add_component("local", Local())
    component = cp.interchange.from_haystack(
        pipeline, "local", inputs={"question": "local.question"}
    )
    system = cp.System("s", {"text": component(question=cp.Input("question", str))})
    assert cp.run(system, {"question": "Why"}).outputs == {"text": "Why!"}


def test_every_run_of_a_component_in_a_loop_is_counted() -> None:
    looped = haystack.Pipeline()
    looped.add_component("llm", Repeater())
    looped.add_component("echo", Echo())
    looped.connect("llm.again", "echo.again")
    looped.connect("echo.text", "llm.again")
    component = cp.interchange.from_haystack(
        looped, inputs={"text": "llm.text"}, outputs={"answer": "llm.replies"}, price=(0, 0)
    )
    trace = cp.run(one_node(component), {"text": "a"})
    assert (trace.usage.calls, trace.usage.prompt_tokens) == (3, 15)


def test_a_dspy_module_runs_as_one_component(server: ChatServer) -> None:
    lm = dspy.LM("openai/gpt-4o-mini", api_base=server.url, api_key="none", cache=False)
    component = cp.interchange.from_dspy_module(
        dspy.Predict("question -> answer"), "qa", lm=lm, price=(1.0, 1.0)
    )
    trace = cp.run(one_node(component), QUESTION)
    assert trace.outputs == {"answer": "Lima"}
    assert trace.usage.calls == 1
    assert trace.usage.cost == pytest.approx(trace.usage.tokens * 1e-6)
    assert trace.usage.tokens > 10


def test_settings_of_a_black_box_are_optimized_within_a_budget(
    server: ChatServer, tmp_path: Path
) -> None:
    component = cp.interchange.from_haystack(
        pipeline(server),
        inputs={"question": "prompt.question"},
        outputs={"answer": "llm.replies"},
        settings={"prompt.style": cp.Choice("brief", "good", value="brief")},
        price=(0, 0),
    )
    rows = [{"question": f"q{i}", "answer": f"Lima for good: q{i}"} for i in range(40)]
    result = cp.optimize(
        one_node(component, "question"),
        {"train": rows[:20], "valid": rows[20:]},
        "exact_match",
        method="search",
        budget=200,
        progress=False,
        run_dir=tmp_path / "run",
    )
    assert result.best["pipeline.prompt_style"] == "good"


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (
            lambda _: cp.interchange.from_langchain(len),
            "needs a Runnable, but got builtin_function_or_method; wrap",
        ),
        (lambda _: cp.interchange.from_langchain(PROMPT, tone="x"), "no configurable field 'tone'"),
        (lambda _: cp.interchange.from_haystack(len), "needs a haystack.Pipeline"),
        (
            lambda server: cp.interchange.from_haystack(
                pipeline(server), inputs={"q": "prompt.qestion"}
            ),
            "no socket 'prompt.qestion'; did you mean 'prompt.question'",
        ),
        (lambda _: cp.interchange.from_dspy_module(dspy.Predict), "needs a dspy.Module"),
    ],
)
def test_mistakes_are_refused(declare: Any, message: str, server: ChatServer) -> None:
    with pytest.raises(DeclarationError, match=message):
        declare(server)


def test_an_error_inside_fails_the_call_with_its_text() -> None:
    def fail(value: object) -> str:
        raise KeyError("lost")

    component = cp.interchange.from_langchain(
        RunnableLambda(fail), inputs={"question": str}, outputs={"output": str}
    )
    with pytest.raises(RunFailed, match="KeyError: 'lost'"):
        cp.run(one_node(component), QUESTION)


def test_a_thread_can_be_set() -> None:
    fixed = {"thread_id": "t", "user": "u"}
    system = one_node(
        cp.interchange.from_langchain(kept_graph(note), "graph", cache=False, configurable=fixed),
        "question",
    )
    cp.run(system, QUESTION)
    assert cp.run(system, QUESTION).outputs["notes"] == ["u: capital?"] * 2


def test_a_function_takes_one_value() -> None:
    def double(number: int) -> int:
        return 2 * number

    component = cp.interchange.from_langchain(
        RunnableLambda(double), inputs={"input": int}, outputs={"output": int}
    )
    trace = cp.run(one_node(component), {"input": 4})
    assert trace.outputs == {"output": 8}
    assert trace.usage == NO_USAGE
