"""Python entry points: which engines they use, what they accept as data, metric and budget, and what they refuse."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.errors import CompoundError, DeclarationError
from compound.testing import ScriptedLM

pytestmark = pytest.mark.usefixtures("without_reports")

ROWS = [{"id": str(i), "question": f"What is {i}?", "answer": str(i)} for i in range(24)]
FILE = """
system: qa
lm: fast
inputs: {question: str}
components: {answerer: {llm: {prompt: {tune: "Answer."}}, in: {question: $question}}}
outputs: {answer: $answerer}
engines: {fast: {litellm: {model: openai/gpt-4o-mini, price: [1, 2]}}}
"""


def echo(message: str) -> str:
    return re.sub(r"(?s).*What is |\?.*", "", message)


def system(lm: str = "lm", **settings: Any) -> cp.System:
    answerer = cp.LLM("answerer", prompt=cp.Text("Answer."), retries=0, **settings)
    return cp.System("qa", outputs={"answer": answerer(question=cp.Input("question"))}, lm=lm)


class Frame:
    """A data frame as far as it is used: pandas itself is no dependency."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows
        self.columns = list(rows[0])

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return self._rows


def test_a_loaded_system_keeps_the_engines_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, dict[str, Any]]] = []

    def open_engine(kind: str, **settings: Any) -> ScriptedLM:
        opened.append((kind, settings))
        return ScriptedLM(echo)

    monkeypatch.setattr("compound.yaml.program.open_engine", open_engine)
    (tmp_path / "qa.yaml").write_text(FILE)
    loaded = cp.load_system(tmp_path / "qa.yaml")
    for each in (
        loaded,
        loaded.bind({"answerer.prompt": "Say it."}),
        pickle.loads(pickle.dumps(loaded)),
    ):
        assert cp.run(each, {"question": "What is 7?"}).outputs == {"answer": "7"}
    assert cp.evaluate(loaded, ROWS, "exact_match", cache=False).mean == 1.0
    settings = {"model": "openai/gpt-4o-mini", "price": (1.0, 2.0)}
    assert opened == [("litellm", settings)] * 4


def test_engines_by_name_stand_beside_those_by_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "compound.graph.registry.engines.open_engine", lambda kind, **_: ScriptedLM(lambda _: kind)
    )
    question = cp.Input("question")
    first = cp.LLM("first", lm="fast")(question=question)
    second = cp.LLM("second", lm="some/model")(question=question)
    both = cp.System("both", outputs={"x": first, "y": second})
    assert cp.run(both, {"question": "?"}, engines={"fast": ScriptedLM(["given"])}).outputs == {
        "x": "given",
        "y": "litellm",
    }
    assert cp.run(system("fast"), {"question": "?"}, engines={"fast": "vllm/name"}).outputs == {
        "answer": "vllm"
    }


@pytest.mark.parametrize("engines", ["openai/gpt-4o-mini", ScriptedLM([]), 7, {"fast": 7}])
def test_engines_of_another_kind_are_refused(engines: Any) -> None:
    with pytest.raises(DeclarationError, match=r"engines.* must .*cp\.engines\.LiteLLM"):
        cp.run(system(), {"question": "?"}, engines=engines)


def test_a_failed_run_raises_and_the_error_holds_the_trace() -> None:
    engines = {"lm": ScriptedLM(lambda _: "many")}
    with pytest.raises(cp.RunFailed, match=r"run failed in 'answerer': parse: .*'many'") as caught:
        cp.run(system(output=int), {"question": "?"}, engines=engines)
    trace = caught.value.trace
    assert isinstance(trace, cp.Trace)
    assert [call.address for call in trace.calls] == ["answerer"]


def test_a_failed_run_is_returned_where_that_is_asked_for() -> None:
    trace = cp.run(
        system(output=int), {"question": "?"}, engines={"lm": ScriptedLM(["many"])}, check=False
    )
    assert trace.failure is not None
    assert trace.outputs == {}
    with pytest.raises(cp.RunFailed):
        trace.check()
    good = cp.run(system(), {"question": "?"}, engines={"lm": ScriptedLM(["yes"])})
    assert good.check() is good


def test_inputs_that_are_no_dictionary_are_refused() -> None:
    with pytest.raises(DeclarationError, match="inputs must be a dictionary.*'question'"):
        cp.run(system(), "What is 7?", engines={"lm": ScriptedLM([])})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(ROWS),
        (row for row in ROWS),
        Frame(ROWS),
        {"valid": ROWS},
        {"valid": Frame(ROWS)},
        [
            cp.Example(row["id"], {"question": row["question"]}, {"answer": row["answer"]})
            for row in ROWS
        ],
    ],
    ids=["list", "tuple", "generator", "frame", "splits", "frames", "examples"],
)
def test_rows_are_data(data: Any) -> None:
    lm = ScriptedLM(echo)
    found = cp.evaluate(
        system(), data, cp.metrics.exact_match("answer"), engines={"lm": lm}, cache=False
    )
    assert (found.mean, len(found.rows)) == (1.0, 24)


def test_a_metric_that_still_needs_its_output_is_that_of_the_only_output() -> None:
    lm = ScriptedLM(echo)
    assert (
        cp.evaluate(system(), ROWS, cp.metrics.token_f1, engines={"lm": lm}, cache=False).mean
        == 1.0
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"metric": "token_f2"}, "no metric 'token_f2'; did you mean 'token_f1'"),
        ({"metric": 7}, r"metric must be .*cp\.metrics\.exact_match"),
        ({"data": ["What is 1?"]}, "row 1 of the data must be a dictionary, but is str"),
        ({"data": []}, "data has no rows"),
        ({"data": 7}, "data must be rows, but is int 7"),
        ({"data": {"dev": ROWS}}, "data has no split 'dev'"),
        ({"data": [{"question": "What is 1?"}]}, "no gold field 'answer'"),
        ({"data": [*ROWS, {"question": "x", "answer": None}]}, "must hold a value to compare with"),
        ({"engines": "lm"}, "engines must map"),
    ],
)
def test_a_mistake_is_told_before_anything_is_called(arguments: dict[str, Any], told: str) -> None:
    lm = ScriptedLM(echo)
    given: dict[str, Any] = {
        "data": ROWS,
        "metric": "exact_match",
        "engines": {"lm": lm},
        **arguments,
    }
    with pytest.raises(CompoundError, match=told):
        cp.evaluate(system(), cache=False, **given)
    assert lm.requests == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"data": ROWS}, "divided into splits.*'train': rows"),
        ({"budget": "100"}, r"budget must be .*cp\.Budget"),
        ({"method": "randon"}, "did you mean 'random'"),
        ({"budget": True}, "budget must be"),
        ({"budget": {"runs": 100}}, "unknown setting budget.runs"),
        (
            {"data": {"train": ROWS, "valid": ROWS[:9], "test": [{"question": "?"}]}},
            "no gold field 'answer'",
        ),
    ],
)
def test_a_mistake_is_told_before_an_optimization_calls_anything(
    arguments: dict[str, Any], told: str, tmp_path: Path
) -> None:
    lm = ScriptedLM(echo)
    data = {"train": ROWS[:8], "valid": ROWS[8:]}
    given: dict[str, Any] = {
        "data": data,
        "metric": "exact_match",
        "engines": {"lm": lm},
        **arguments,
    }
    with pytest.raises(CompoundError, match=told):
        cp.optimize(system(), run_dir=tmp_path / "run", progress=False, **given)
    assert lm.requests == []
    assert not (tmp_path / "run").exists()


def test_a_metric_by_name_needs_a_system_with_one_output() -> None:
    node = cp.LLM("a", output={"x": str, "y": str})(q=cp.Input("q"))
    two = cp.System("two", outputs={"x": node.x, "y": node.y}, lm="lm")
    with pytest.raises(DeclarationError, match=r"needs the output .*cp\.metrics\.token_f1\('x'\)"):
        cp.evaluate(
            two, [{"q": "?", "x": "1"}], "token_f1", engines={"lm": ScriptedLM([])}, cache=False
        )


def upper(text: str) -> str:
    return text.upper()


def pair(a: str, b: str = "") -> str:
    return a + b


def test_a_source_without_a_name_feeds_the_only_input() -> None:
    question = cp.Input("question")
    assert list(cp.Function("shout", upper)(question).node.wires) == ["text"]
    assert list(cp.LLM("answerer")(question).node.wires) == ["question"]
    assert list(cp.Function("pair", pair)(question, b=question).node.wires) == ["a", "b"]


def test_a_source_without_a_name_is_refused_where_it_could_feed_several_inputs() -> None:
    question = cp.Input("question")
    with pytest.raises(DeclarationError, match="pair needs .* as keywords; pair takes a: str, b"):
        cp.Function("pair", pair)(question)
    rewritten = cp.LLM("rewriter")(question)
    with pytest.raises(DeclarationError, match=r"answerer accepts .* so \$rewriter must be given"):
        cp.LLM("answerer")(rewritten)
    with pytest.raises(DeclarationError, match=r"answerer\.question is connected twice"):
        cp.LLM("answerer")(question, question=question)


def test_a_missing_key_ends_an_evaluation_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("litellm")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    sent: list[Any] = []

    async def acompletion(**arguments: Any) -> Any:
        sent.append(arguments)

    monkeypatch.setattr("litellm.acompletion", acompletion)
    told = "the key of 'openai/gpt-4o-mini' is not set; export OPENAI_API_KEY=…"
    with pytest.raises(CompoundError, match=told):
        cp.evaluate(system("openai/gpt-4o-mini"), ROWS, "exact_match", cache=False)
    with pytest.raises(CompoundError, match=told):
        cp.run(system("openai/gpt-4o-mini"), {"question": "?"})
    assert sent == []


SPLITS = {"train": ROWS[:8], "valid": ROWS[8:16], "test": ROWS[16:]}


@pytest.mark.parametrize(
    "settings", [{"method": "random", "seed": 3}, cp.OptimizeSettings(method="random", seed=3)]
)
def test_settings_are_given_as_in_a_file(settings: Any, tmp_path: Path) -> None:
    engines = {"lm": ScriptedLM(echo)}
    result = cp.optimize(
        system(),
        SPLITS,
        "exact_match",
        settings=settings,
        budget=60,
        engines=engines,
        run_dir=tmp_path / "run",
        progress=False,
    )
    assert result.before.mean == 1.0
    stored = (tmp_path / "run" / "config.json").read_text()
    assert '"method": "random"' in stored or '"method":"random"' in stored
    found = cp.evaluate(
        system(), ROWS, "exact_match", settings={"concurrency": 2}, engines=engines, cache=False
    )
    assert found.mean == 1.0


def test_a_selector_takes_its_options_as_in_a_file() -> None:
    selectors = [cp.Selector("s", "a", "b"), cp.Selector("s", options=["a", "b"])]
    assert {selector.space.options for selector in selectors} == {("a", "b")}
    with pytest.raises(DeclarationError, match="options twice"):
        cp.Selector("s", "a", options=["b"])
    with pytest.raises(DeclarationError, match="not a list"):
        cp.Choice(["a", "b"])  # type: ignore[arg-type]


class Plain:
    """A value that no argument takes."""


def echoed(x: str) -> str:
    """Repeat it."""
    return x


GIVEN: dict[str, dict[str, Any]] = {
    "run": {"system": system(), "inputs": {"question": "?"}, "engines": {"lm": ScriptedLM(echo)}},
    "evaluate": {
        "system": system(),
        "data": ROWS,
        "metric": "exact_match",
        "limit": 1,
        "repeats": 1,
        "cache": False,
        "engines": {"lm": ScriptedLM(echo)},
        "settings": {},
        "on_trace": None,
        "concurrency": 1,
    },
    "optimize": {
        "system": system(),
        "data": SPLITS,
        "metric": "exact_match",
        "budget": 3,
        "progress": False,
        "settings": {"method": "random"},
        "engines": {"lm": ScriptedLM(echo)},
        "run_dir": "run",
        "new": True,
    },
    "sweep": {
        "system": system(),
        "data": SPLITS,
        "metric": "exact_match",
        "methods": ["random"],
        "seeds": [0],
        "budget": 3,
        "progress": False,
        "settings": {},
        "engines": {"lm": ScriptedLM(echo)},
        "run_dir": None,
        "controls": False,
    },
    "OptimizeSettings": {"method": "random", "seed": 0, "budget": {}, "search": {}, "mmgrpo": {}},
    "Selector": {"name": "s", "options": ["a", "b"], "value": "a", "per_input": False},
    "LLM": {
        "name": "a",
        "prompt": "p",
        "output": str,
        "demos": (),
        "lm": "lm",
        "temperature": 0.5,
        "stop": (),
        "max_tokens": 9,
        "reasks": 0,
        "weights": None,
        "takes": None,
        "timeout": 1.0,
        "retries": 0,
    },
    "Agent": {
        "name": "a",
        "tools": [echoed],
        "output": str,
        "stop": (),
        "max_turns": 2,
        "texts": {},
    },
    "Function": {"name": "f", "function": echoed, "outputs": None},
    "Retriever": {"name": "r", "index": cp.components.PassageIndex(), "k": 2},
    "Hyperparameter": {"name": "k", "space": cp.Int(1, 3)},
    "ExternalAgent": {"name": "a", "command": ["x"], "prompts": (), "env": ()},
    "System": {"name": "s", "outputs": {"y": cp.LLM("a")(x=cp.Input("x"))}, "lm": "lm"},
    "Demos": {"value": (), "max": 2},
    "Text": {"value": "x", "max_length": 9},
    "Int": {"low": 1, "high": 3, "value": 2},
    "Float": {"low": 1.0, "high": 3.0, "value": 2.0},
    "LoRA": {"rank": 8, "alpha": 16, "targets": "all-linear"},
    "Budget": {"system_runs": 3, "cost": 1.0},
    "Configuration": {"values": {"a.b": 1}},
    "json_type": {"schema": {"type": "string"}},
    "load": {"path": "best.json"},
    "load_result": {"path": "run"},
    "load_system": {"path": "qa.yaml"},
    "inspect_calls": {"source": "run"},
    "export": {"system": system(), "to": "openai"},
    "accuracy": {"output": "y", "choices": ["a", "b"]},
    "numeric_match": {"output": "y", "relative": 0.1, "absolute": 0.1},
    "json_match": {"output": "y", "keys": ["a"]},
    "recall_at_k": {"output": "y", "k": 2},
    "regex_match": {"output": "y", "pattern": "a", "whole": True},
    "pass_at_k": {"of": cp.metrics.exact_match("y"), "k": 2},
    "rubric": {"output": "y", "criteria": {"a": "b"}, "lm": "lm"},
    "custom": {"function": lambda outputs, example: 1.0, "name": "m", "bounds": (0, 1)},
    "OpenAI": {"model": "m", "api_base": "http://localhost:1/v1", "concurrency": 1},
    "LiteLLM": {"model": "openai/m", "api_base": None},
}
WRONG: list[Any] = [
    {"x": 1},
    {"a": {"b": {"c": [1]}}},
    {1: 2},
    [1, "a"],
    [],
    None,
    "zzz",
    "",
    3,
    -1,
    1.5,
    math.nan,
    b"x",
    Plain(),
    Plain,
    lambda: 1,
    {1},
    [{"a": 1}],
    (1, 2),
    "\ud800",
    "a\0b",
]


@pytest.mark.parametrize("name", GIVEN)
def test_arguments_of_any_wrong_type_raise_no_error_of_python(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    warnings.simplefilter("ignore")
    homes = (cp, cp.components, cp.engines, cp.ext, cp.interchange, cp.metrics)
    (call,) = (getattr(home, name) for home in homes if name in home.__all__)
    given = GIVEN[name]
    for key in given:
        for value in WRONG:
            with contextlib.suppress(CompoundError):
                call(**{**given, key: value})
    with pytest.raises(CompoundError, match="seede"):
        call(**given, seede=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda cp: cp.Selector("s", optoins=["a"]),
            "Selector has no argument 'optoins'; did you mean 'options'",
        ),
        (lambda cp: cp.LLM("a", output="itn"), "'itn' is not a type; did you mean 'int'"),
        (
            lambda cp: cp.Agent("a", [echoed], stop="END"),
            r"stop of Agent must be Sequence\[str\], but is 'END'",
        ),
        (
            lambda cp: cp.optimize("qa.yaml", SPLITS, "exact_match"),
            r"load a file with cp\.load_system",
        ),
        (
            lambda cp: cp.OptimizeSettings(method="search", sede=1),
            "unknown setting sede; did you mean 'seed'",
        ),
        (lambda cp: cp.Budget(system_runs="3"), "system_runs of Budget must be .*, but is '3'"),
        (
            lambda cp: cp.trace_with("http://localhost:4318"),
            "accepts OpenTelemetry's providers, but got 'http",
        ),
        (lambda cp: cp.run(system(), {}, engines=lambda: 3), r"has the signature \(\)"),
    ],
)
def test_a_wrong_argument_is_told_its_type(call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(CompoundError, match=message):
        call(cp)


OTHER_NAMES = {
    "function": {"call"},
    "external_agent": {"prompts_file"},
}  # stated in docs/reference/python.md


def test_the_keys_of_files_are_arguments_of_constructors() -> None:
    from compound.core.security.sandbox.limits import SandboxLimits
    from compound.yaml.kinds import BUILT_IN

    made: dict[str, Any] = {
        "llm": cp.LLM,
        "agent": cp.Agent,
        "function": cp.Function,
        "loop": cp.Loop,
        "map": cp.Map,
        "selector": cp.Selector,
        "first_of": cp.FirstOf,
        "code": cp.components.CodeRunner,
        "external_agent": cp.components.ExternalAgent,
    }
    assert BUILT_IN.keys() - made.keys() == {"class", "retriever", "hyperparameter"}
    for name, constructor in made.items():
        kind = BUILT_IN[name]
        keys = set(getattr(kind.entry.model_fields[name].annotation, "model_fields", ()))
        taken = {
            parameter.name
            for parameter in inspect.signature(constructor).parameters.values()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY)
        }
        if name == "code":  # the argument `limits`
            keys -= {field.name for field in dataclasses.fields(SandboxLimits)}
        assert keys - taken == OTHER_NAMES.get(name, set()), name


def test_a_sweep_compares_methods_and_seeds_and_is_resumed(tmp_path: Path) -> None:
    lm = ScriptedLM(echo)

    def sweep(folder: str = "sweep", minutes: float | None = None) -> Any:
        return cp.sweep(
            system(),
            SPLITS,
            "exact_match",
            ["search", "random"],
            seeds=[0, 1],
            budget=cp.Budget(system_runs=60, minutes=minutes),
            engines={"lm": lm},
            run_dir=tmp_path / folder,
            progress=False,
        )

    facts = sweep()
    assert [(run["method"], run["seed"], run["status"]) for run in facts["runs"]] == [
        ("search", 0, "finished"),
        ("random", 0, "finished"),
        ("search", 1, "finished"),
        ("random", 1, "finished"),
    ]
    assert (tmp_path / "sweep" / "sweep.md").is_file()
    assert cp.load_result(tmp_path / "sweep" / "qa" / "random" / "1").before.mean == 1.0
    asked = len(lm.requests)
    assert asked < sum(run["calls"] for run in facts["runs"])  # methods share equal calls
    assert sweep()["runs"] == facts["runs"]
    assert len(lm.requests) == asked  # everything is stored
    facts = sweep("timed", minutes=60)  # which shared calls would not take
    controls = len(lm.requests) - asked - sum(run["calls"] for run in facts["runs"])
    assert controls == 2 * len(SPLITS["test"])
