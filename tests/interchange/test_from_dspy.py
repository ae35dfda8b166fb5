"""DSPy programs become systems: predictors are components, Python code runs between them, values are written back."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import dspy
import pytest
from dspy.utils import exceptions

import compound as cp
from benchmarks.measure.interchange.chat_server import ChatServer
from compound import RunFailed
from compound.core.errors import BudgetExhausted, CallError, DeclarationError, TransientError
from compound.interchange import from_dspy, to_dspy
from compound.testing import ComponentKit, ScriptedLM

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:.*ReadOnly"
)
DONE = "[[ ## completed ## ]]"


def fields(**values: str) -> str:
    """Return an answer in the format of DSPy's ChatAdapter."""
    return "\n\n".join([f"[[ ## {name} ## ]]\n{value}" for name, value in values.items()] + [DONE])


def fails_to_run(
    program: Any, message: str, question: str = "?", said: str = fields(answer="x"), **options: Any
) -> RunFailed:
    system = from_dspy(program, lm="lm", **options)
    with pytest.raises(RunFailed, match=message) as caught:
        cp.run(system, {"question": question}, engines={"lm": ScriptedLM(lambda _: said)})
    return caught.value


class MultiHop(dspy.Module):  # type: ignore[misc]
    """Writes two queries, then an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.query = dspy.ChainOfThought("question, notes: list[str] -> search_query")
        self.answer = dspy.Predict(
            dspy.Signature(
                "question, notes: list[str] -> answer, sure: bool", "Answer from the notes."
            )
        )

    def forward(self, question: str) -> Any:
        notes: list[str] = []
        for _ in range(2):
            notes.append(f"about {self.query(question=question, notes=notes).search_query}")
        found = self.answer(question=question, notes=notes)
        return dspy.Prediction(answer=found.answer, notes=notes)


def reply(message: str) -> str:
    if "`[[ ## search_query ## ]]`" in message:
        return fields(reasoning="because", search_query=f"query {message.count('about')}")
    return fields(answer="Lima", sure="True")


def by_messages(messages: Any) -> str:
    return reply(messages[-1]["content"])


def imported(**settings: Any) -> cp.System:
    return from_dspy(MultiHop(), lm="lm", outputs={"answer": str, "notes": list[str]}, **settings)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer(by_messages) as running:
        yield running


def engine(server: ChatServer) -> Any:
    return cp.engines.LiteLLM("openai/scripted", api_base=server.url, price=(0, 0))


def in_dspy(program: Any, server: ChatServer, **inputs: Any) -> Any:
    with dspy.context(
        lm=dspy.LM("openai/scripted", api_base=server.url, api_key="none", cache=False)
    ):
        return program(**inputs)


def test_predictors_are_components_with_their_signatures() -> None:
    system = imported()
    assert list(system.inputs.items()) == [("question", str)]
    names = ["answer.prompt", "answer.demos", "query.prompt", "query.demos"]
    assert list(system.parameters) == names
    assert system.configuration["answer.prompt"] == "Answer from the notes."
    assert system.components["answer"].outputs["sure"].type is bool


def test_calls_appear_in_execution_order_with_the_values_of_their_time() -> None:
    trace = cp.run(imported(), {"question": "capital?"}, engines={"lm": ScriptedLM(reply)})
    assert [call.address for call in trace.calls] == [
        "multi_hop[0]/query",
        "multi_hop[1]/query",
        "multi_hop[2]/answer",
    ]
    first, second, _ = (call.address for call in trace.calls)
    assert [call.parents for call in trace.calls] == [(), (first,), (first, second)]
    assert [call.inputs["notes"] for call in trace.calls] == [
        [],
        ["about query 0"],
        ["about query 0", "about query 1"],
    ]
    assert trace.outputs == {"answer": "Lima", "notes": ["about query 0", "about query 1"]}
    assert trace.ends == tuple(call.address for call in trace.calls)


def test_the_messages_are_those_of_dspy(server: ChatServer) -> None:
    program = MultiHop()
    program.answer.demos = [
        dspy.Example(question="1+1", notes=["n"], answer="2", sure=True).with_inputs("question")
    ]
    expected = in_dspy(program, server, question="capital?")
    sent, server.requests[:] = [request["messages"] for request in server.requests], []
    system = from_dspy(program, lm="lm", outputs={"answer": str, "notes": list[str]})
    trace = cp.run(system, {"question": "capital?"}, engines={"lm": engine(server)})
    assert [request["messages"] for request in server.requests] == sent
    assert trace.outputs == {"answer": expected.answer, "notes": expected.notes}


def test_a_fork_runs_the_program_again_with_earlier_calls_reused() -> None:
    lm, system = ScriptedLM(reply), imported()

    async def fork() -> Any:
        executor = cp.Executor({"lm": lm})
        trace = await executor.run(system, {"question": "capital?"})
        lm.requests.clear()
        changed = {"reasoning": "r", "search_query": "other"}
        return await executor.fork(system, trace, "multi_hop[1]/query", outputs=changed)

    trace = asyncio.run(fork())
    assert len(lm.requests) == 1
    assert [call.reused for call in trace.calls] == [True, True, False]
    assert trace.outputs["notes"] == ["about query 0", "about other"]


def test_an_answer_that_cannot_be_read_is_asked_for_in_json() -> None:
    system = from_dspy(dspy.Predict("question -> answer"), lm="lm")
    lm = ScriptedLM(["nonsense", '{"answer": "Lima"}'])
    trace = cp.run(system, {"question": "?"}, engines={"lm": lm})
    assert trace.outputs == {"answer": "Lima"}
    assert "JSON" in lm.requests[1].messages[-1].content
    assert trace.usage.calls == 2


def test_a_failed_predictor_fails_the_run_with_its_reason() -> None:
    message = "failed in 'predict_program.0./predict': parse: JSONAdapter found no answer"
    fails_to_run(dspy.Predict("question -> answer"), message, said="nonsense")


class Careful(dspy.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first = dspy.Predict("question -> answer")
        self.second = dspy.Predict("question, hint -> answer")

    def forward(self, question: str) -> Any:
        try:
            return self.first(question=question)
        except Exception:  # noqa: BLE001
            return self.second(question=question, hint="try again")


def test_a_program_may_catch_a_failure_and_continue() -> None:
    system = from_dspy(Careful(), lm="lm", outputs={"answer": str})
    lm = ScriptedLM(lambda message: fields(answer="Lima") if "hint" in message else "nonsense")
    trace = cp.run(system, {"question": "?"}, engines={"lm": lm})
    assert trace.outputs == {"answer": "Lima"}
    assert [bool(call.failure) for call in trace.calls] == [True, False]
    assert trace.calls[1].parents == ("careful[0]/first",)


def test_a_spent_budget_ends_the_run_past_the_programs_except() -> None:
    from compound.execution.budget import Budget, Meter

    system = from_dspy(Careful(), lm="lm", outputs={"answer": str})

    async def run() -> None:
        executor = cp.Executor(
            {"lm": ScriptedLM(lambda _: "nonsense")}, meter=Meter(Budget(calls=1))
        )
        await executor.run(system, {"question": "?"})

    with pytest.raises(BudgetExhausted):
        asyncio.run(run())


class OneStep(dspy.Module):  # type: ignore[misc]
    """A program of one predictor; subclasses say what it does."""

    signature = "question -> answer"

    def __init__(self) -> None:
        super().__init__()
        self.step = dspy.Predict(self.signature)


class Endless(OneStep):
    def forward(self, question: str) -> Any:
        while True:
            self.step(question=question)


def test_the_number_of_calls_is_bounded() -> None:
    failure = fails_to_run(Endless(), "forward made more than 3 predictor calls", max_calls=3)
    trace: Any = failure.trace
    assert len(trace.calls_of("step")) == 3


class Parallel(OneStep):
    signature = "part -> answer"

    def forward(self, question: str) -> Any:
        pairs = [
            (self.step, dspy.Example(part=part).with_inputs("part")) for part in question.split()
        ]
        found = dspy.Parallel(num_threads=2, disable_progress_bar=True)(pairs)
        return dspy.Prediction(answer=" ".join(one.answer for one in found))


class Async(OneStep):
    signature = "part -> answer"

    async def aforward(self, question: str) -> Any:
        found = await asyncio.gather(*(self.step.acall(part=part) for part in question.split()))
        return dspy.Prediction(answer=" ".join(one.answer for one in found))


@pytest.mark.parametrize("program", [Parallel, Async])
def test_concurrent_predictors_belong_to_the_run(program: Any) -> None:
    system = from_dspy(program(), lm="lm", inputs={"question": str})
    lm = ScriptedLM(
        lambda message: fields(answer=message.split("part ## ]]\n")[1].split("\n")[0].upper())
    )
    trace = cp.run(system, {"question": "a b c"}, engines={"lm": lm})
    assert trace.outputs == {"answer": "A B C"}
    assert len(trace.calls) == 3


class Threads(OneStep):
    signature = "part -> answer"

    def forward(self, question: str) -> Any:
        with ThreadPoolExecutor(2) as pool:
            return pool.submit(self.step, part=question).result()


def test_predictors_in_own_threads_are_rejected_with_the_remedy() -> None:
    fails_to_run(Threads(), r"use dspy\.Parallel in place of threads", inputs={"question": str})


def test_an_agent_with_tools_runs() -> None:
    def capital(country: str) -> str:
        """Return the capital of a country."""
        return {"Peru": "Lima"}[country]

    system = from_dspy(dspy.ReAct("question -> answer", tools=[capital]), lm="lm")

    def script(message: str) -> str:
        if "next_tool_name" not in message:
            return fields(reasoning="r", answer="Lima")
        name, arguments = (
            ("finish", "{}") if "observation_0" in message else ("capital", '{"country": "Peru"}')
        )
        return fields(next_thought="t", next_tool_name=name, next_tool_args=arguments)

    trace = cp.run(system, {"question": "capital of Peru?"}, engines={"lm": ScriptedLM(script)})
    assert trace.outputs == {"answer": "Lima"}
    assert [call.component for call in trace.calls] == ["react", "react", "extract"]
    assert "Lima" in str(trace.calls[1].inputs["trajectory"])
    assert "Return the capital of a country." in str(system.configuration["react.prompt"])


def test_optimized_values_are_written_back_and_survive_saving(
    server: ChatServer, tmp_path: Path
) -> None:
    program, system = MultiHop(), imported(temperature=cp.Float(0.0, 1.0, value=0.0))
    demo = {"inputs": {"question": "1+1", "notes": ["n"]}, "outputs": {"answer": "2", "sure": True}}
    best = {
        "answer.prompt": "Be brief.",
        "answer.demos": [demo],
        "query.prompt": "Write one query.",
        "query.temperature": 0.5,
    }
    bound = system.bind(best)
    trace = cp.run(bound, {"question": "capital?"}, engines={"lm": engine(server)})
    sent, server.requests[:] = [request["messages"] for request in server.requests], []

    bound.configuration.save(tmp_path / "best.json")
    to_dspy(program, tmp_path / "best.json").save(tmp_path / "program.json")
    loaded = MultiHop()
    loaded.load(tmp_path / "program.json")
    found = in_dspy(loaded, server, question="capital?")
    assert {"answer": found.answer, "notes": found.notes} == trace.outputs
    assert [request["messages"] for request in server.requests] == sent
    assert to_dspy(program, bound).query.predict.config["temperature"] == 0.5
    assert program.answer.signature.instructions == "Answer from the notes."


class Overriding(OneStep):
    def forward(self, question: str) -> Any:
        return self.step(question=question, config={"temperature": 1.0})


class OnTheFly(OneStep):
    def forward(self, question: str) -> Any:
        return dspy.Predict("question -> answer")(question=question)


class Wrong(OneStep):
    def forward(self, question: str) -> Any:
        if question == "raise":
            raise KeyError("lost")
        return dspy.Prediction(other=1)


@pytest.mark.parametrize(
    ("program", "question", "message"),
    [
        (Overriding, "?", r"calls the predictor 'step' with its own config\['temperature'\]"),
        (OnTheFly, "?", "create them in __init__"),
        (Wrong, "?", "forward returned no 'answer', but other"),
        (Wrong, "raise", r"forward raised KeyError: 'lost' \(test_from_dspy.py:\d+, in forward\)"),
    ],
)
def test_what_cannot_be_recorded_fails_with_the_reason(
    program: Any, question: str, message: str
) -> None:
    fails_to_run(program(), message, question)


def is_seven(inputs: dict[str, Any], prediction: Any) -> float:
    """Reward the digit 7."""
    return float(prediction.a == "7")


DECLARED: list[tuple[Any, str]] = [
    (lambda: from_dspy(MultiHop, lm="lm"), "needs a dspy.Module, but got ProgramMeta"),
    (lambda: from_dspy(MultiHop(), lm="lm"), "give outputs=.* its predictors: .*search_query: str"),
    (lambda: from_dspy(dspy.Module(), lm="lm"), "'module' has no predictors"),
    (lambda: from_dspy(dspy.Predict("q -> a", n=3), lm="lm"), "asks for n=3 completions"),
    (lambda: from_dspy(dspy.Predict("q -> a", top_p=0.5), lm="lm"), "top_p .*set it on the engine"),
    (lambda: from_dspy(dspy.Predict("q -> a")), "lm"),  # type: ignore[call-arg]
    (
        lambda: from_dspy(dspy.Refine(dspy.Predict("q -> a"), 2, is_seven, 1.0), lm="lm"),
        r"dspy.Refine .* creates a predictor.*; run the program unchanged as an external agent",
    ),
    (
        lambda: from_dspy(dspy.BestOfN(dspy.Predict("q -> a"), 2, is_seven, 1.0), lm="lm"),
        "dspy.BestOfN .* copies of its module",
    ),
    (lambda: from_dspy(dspy.RLM("q -> a"), lm="lm"), "dspy.RLM .* the code that it generates"),
    (lambda: to_dspy(MultiHop(), {"anwser.prompt": "x"}), "'anwser.*did you mean 'answer'"),
    (
        lambda: to_dspy(MultiHop(), {"answer.weights": {"path": "x", "sha256": "y"}}),
        "answer.weights cannot be written into a DSPy program",
    ),
    (
        lambda: to_dspy(MultiHop(), {"answer.lm": "huggingface/https://llm.example.com/m"}),
        "not the name of a model: it could send keys to another server",
    ),
]


@pytest.mark.parametrize(("declare", "message"), DECLARED)
def test_mistakes_are_refused(declare: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        declare()


class Choosy(dspy.Signature):  # type: ignore[misc]
    """Choose a label."""

    text: str = dspy.InputField(desc="what to label")
    label: Literal["good", "bad"] = dspy.OutputField()
    score: float = dspy.OutputField(desc="how sure")


LABELLER = dspy.Predict(Choosy)  # whose constructor draws from the global generator


class TestPredictor(ComponentKit):
    def make(self, name: str) -> Any:
        system = from_dspy(LABELLER, lm="lm", name="program")
        found = system.components["predict"]
        object.__setattr__(found, "name", name)
        return found

    def inputs(self) -> Any:
        return [{"text": "fine"}, {"text": "\n" * 20}]

    def engine(self) -> Any:
        return ScriptedLM(lambda _: fields(label="good", score="0.5"))


class TestProgram(TestPredictor):
    def make(self, name: str) -> Any:
        return from_dspy(LABELLER, lm="lm", name=name).components[name]


ONE = "question -> answer"


def test_options_of_predictors_are_kept_and_the_models_of_dspy_are_not_used() -> None:
    model = dspy.LM("openai/other", api_base="http://127.0.0.1:9", temperature=0.9, top_p=0.5)
    with dspy.context(lm=model):
        system = from_dspy(dspy.Predict(ONE, temperature=0.6, stop=["X"], timeout=7), lm="lm")
        lm = ScriptedLM(lambda _: fields(answer="Lima"))
        assert cp.run(system, {"question": "?"}, engines={"lm": lm}).outputs == {"answer": "Lima"}
    (sent,) = lm.requests
    assert (sent.temperature, sent.max_tokens, sent.stop) == (0.6, 1000, ("X",))
    assert system.components["predict"].timeout == 7


class CallingAdapter(dspy.ChatAdapter):  # type: ignore[misc]
    def __call__(self, *args: Any, **settings: Any) -> Any:
        return super().__call__(*args, **settings)


@pytest.mark.parametrize(
    "kind", [CallingAdapter, lambda: dspy.TwoStepAdapter(dspy.LM("openai/small"))]
)
def test_an_adapter_that_calls_models_is_refused(kind: Any) -> None:
    with (
        dspy.context(adapter=kind()),
        pytest.raises(DeclarationError, match="imported with the adap"),
    ):
        from_dspy(dspy.Predict(ONE), lm="lm")


def test_fields_may_have_the_names_of_methods_of_a_prediction() -> None:
    system = from_dspy(dspy.Predict("question -> items: list[str], keys: str"), lm="lm")
    lm = ScriptedLM(lambda _: fields(items='["a"]', keys="k"))
    trace = cp.run(system, {"question": "?"}, engines={"lm": lm})
    assert trace.outputs == {"items": ["a"], "keys": "k"}


class Changing(OneStep):
    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def forward(self, question: str) -> Any:
        with self.change(self.step):
            return self.step(question=question)


def own_model(step: Any) -> Any:
    step.lm = dspy.LM("openai/other")
    return dspy.context()


def own_config(step: Any) -> Any:
    step.update_config(temperature=1.0)
    return dspy.context()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda _: dspy.context(lm=dspy.LM("openai/other")), "lm of"),
        (lambda _: dspy.context(adapter=dspy.JSONAdapter()), "adapter of"),
        (own_model, "lm"),
        (own_config, "config"),
    ],
)
def test_changes_of_predictors_in_forward_are_refused(change: Any, named: str) -> None:
    fails_to_run(Changing(change), f"with its own {named}")


class Catching(dspy.Module):  # type: ignore[misc]
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind, self.first = kind, dspy.Predict("question -> number: int")

    def forward(self, question: str) -> Any:
        try:
            return self.first(question=question)
        except self.kind:
            return dspy.Prediction(number=-1)


def lose(_: str) -> str:
    raise TransientError("overloaded", charged=cp.ext.Usage(0))


def exceed(_: str) -> str:
    raise CallError("too long", kind="too_long", charged=cp.ext.Usage(0))


PARSE, LM = exceptions.AdapterParseError, exceptions.LMError
LONG = exceptions.ContextWindowExceededError


@pytest.mark.parametrize(
    ("script", "kind", "caught"),
    [
        (lambda _: "nonsense", PARSE, True),
        (lambda _: "nonsense", LM, False),
        (lose, LM, True),
        (lose, PARSE, False),
        (exceed, LONG, True),
        (lose, LONG, False),
        (exceed, ValueError, True),
    ],
)
def test_a_program_catches_the_errors_that_dspy_raises(
    script: Any, kind: Any, caught: bool
) -> None:
    system = from_dspy(Catching(kind), lm="lm")
    object.__setattr__(system.components["first"], "retries", 0)
    trace = cp.run(system, {"question": "?"}, engines={"lm": ScriptedLM(script)}, check=False)
    assert trace.outputs == ({"number": -1} if caught else {})


Kind = enum.Enum("Kind", {"GOOD": "good", "BAD": "bad"})


class Typed(dspy.Signature):  # type: ignore[misc]
    """Sort."""

    text: str = dspy.InputField()
    context: str = dspy.InputField(default="none given")
    one: Literal["a", "b"] = dspy.OutputField()
    maybe: Literal["a", "b"] | None = dspy.OutputField()
    kind: Kind = dspy.OutputField()
    many: list[Literal["a", "b"]] = dspy.OutputField()


class Ends(dspy.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.query = dspy.ChainOfThought("text -> query")
        self.sort = dspy.Predict(Typed)

    def forward(self, text: str) -> Any:
        query = self.query(text=text).query
        found = self.sort(text=query)
        return found  # noqa: RET504 - a usual form


def test_outputs_are_those_of_the_predictor_that_forward_ends_with() -> None:
    declared = {name: info.annotation for name, info in Typed.output_fields.items()}
    assert {
        name: output.type for name, output in from_dspy(Ends(), lm="lm").outputs.items()
    } == declared
    named = from_dspy(Ends(), lm="lm", outputs=["query", "one"])
    assert {name: output.type for name, output in named.outputs.items()} == {
        "query": str,
        "one": declared["one"],
    }
    with pytest.raises(DeclarationError, match="one: one of a, b"):
        from_dspy(Ends(), lm="lm", outputs=["absent"])


def test_an_input_with_a_default_is_filled_as_in_dspy(server: ChatServer) -> None:
    system = from_dspy(dspy.Predict(Typed), lm="lm")
    assert dict(system.inputs) == {"text": str}
    lm = ScriptedLM(lambda _: fields(one="a", maybe="None", kind="good", many='["b"]'))
    found = cp.run(system, {"text": "t"}, engines={"lm": lm}).outputs
    assert found == {"one": "a", "maybe": None, "kind": Kind.GOOD, "many": ["b"]}
    assert "none given" in lm.requests[0].messages[-1].text


def test_tuned_models_are_written_back_with_the_models_of_the_program() -> None:
    program = dspy.Predict(ONE)
    mine = dspy.LM("openai/small", api_base="http://127.0.0.1:1/v1")
    with dspy.context(lm=mine):
        system = from_dspy(program, lm=cp.Choice("openai/small", "openai/large"))
        assert to_dspy(program, system.bind({"predict.lm": "openai/small"})).lm is mine


def test_examples_of_dspy_are_rows_of_data() -> None:
    rows = [
        dspy.Example(question=f"{i}?", digit=str(i % 2)).with_inputs("question") for i in range(16)
    ]
    system = from_dspy(dspy.Predict("question -> digit"), lm="lm")
    lm = ScriptedLM(lambda message: fields(digit="1"))
    found = cp.evaluate(system, rows, "exact_match", engines={"lm": lm}, cache=False)
    assert (found.mean, len(found.rows)) == (0.5, 16)
