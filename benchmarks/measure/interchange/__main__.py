"""Import programs of installed libraries, optimize them, export them, and compare the results.

Run ``python -m compound.benchmarks.measure.interchange``; it takes minutes on two cores.

Prints one JSON object and writes it to ``benchmarks/data/interchange.json``. Each program is optimized with
method ``search`` against a scripted OpenAI-compatible server on loopback, which answers rightly only with a
demonstration in the prompt (or the right setting, for black boxes), and one DSPy program with the embedded
model SmolLM2. The optimized programs then run in their own library, and the exported ones without this
package; the rows count on how many test inputs they return what the optimized system returns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # read when it is imported

import compound as cp
from compound.benchmarks.measure.interchange.exported import in_dspy, runners
from compound.benchmarks.measure.interchange.tasks import Rows, capitals, scripted, things
from compound.engine import Message, Request
from compound.testing.chat_server import ChatServer

OUTPUT = Path(__file__).parents[2] / "data" / "interchange.json"
MODEL = "openai/local"


def optimized(
    system: cp.System, rows: Rows, folder: Path, budget: int, engines: Mapping[str, Any]
) -> cp.Result:
    """Optimize a system with the default settings of method ``search``.

    Runs may fail: SmolLM2 rarely follows DSPy's format without a demonstration.
    """
    return cp.optimize(
        system, rows, "exact_match", method="search", budget=budget, run_dir=folder / system.name,
        engines=dict(engines), progress=False, seed=0, max_failed=1.0,
    )  # fmt: skip


def row(library: str, form: str, model: str, result: cp.Result) -> dict[str, Any]:
    """Return the scores of a run."""
    assert result.test_before is not None
    assert result.test_after is not None
    return {
        "library": f"{library} {version(library)}" if library != "compound" else "compound",
        "form": form, "model": model, "test_rows": len(result.test_after.scores),
        "test_before": result.test_before.mean, "test_after": result.test_after.mean, "same_outputs": {},
    }  # fmt: skip


def agreement(
    answer: Callable[[Mapping[str, object]], object],
    rows: Sequence[Mapping[str, object]],
    expected: Sequence[object],
) -> int:
    """Count the rows with the expected output."""
    return sum(answer(example) == wanted for example, wanted in zip(rows, expected, strict=True))


def outputs(system: cp.System, rows: Rows, engines: Mapping[str, Any]) -> list[object]:
    """Return the outputs of a system on the test rows, ``None`` for those of failed runs."""
    found = []
    for example in rows["test"]:
        inputs = {name: example[name] for name in system.inputs}
        trace = cp.run(system, inputs, engines=dict(engines), check=False)
        found.append(next(iter(trace.outputs.values()), None))
    return found


def plain_function(folder: Path, server: ChatServer, engines: Mapping[str, Any]) -> dict[str, Any]:
    """Optimize a system declared as a Python function, and compare all of its exports."""

    @cp.llm(demos=cp.Demos(max=4))
    def answer(question: str) -> str:
        """Answer the question."""
        raise NotImplementedError

    @cp.system(name="plain_function", lm=MODEL)
    def declared(question: str) -> dict[str, str]:
        return {"answer": answer(question)}

    rows = capitals()
    result = optimized(declared, rows, folder, 600, engines)
    found, best = row("compound", "cp.system", "scripted", result), declared.bind(result.best)
    expected = outputs(best, rows, engines)
    for target, ask_exported in runners(best, server.url, folder).items():

        def answer_of(example: Mapping[str, object], ask: Callable[[str], object] = ask_exported) -> object:
            return ask(str(example["question"]))

        found["same_outputs"][target] = agreement(answer_of, rows["test"], expected)
    return found


def dspy_program(folder: Path, server: ChatServer, engines: Mapping[str, Any]) -> dict[str, Any]:
    """Optimize a DSPy program, write the values back, and run it in DSPy after saving and loading."""
    import dspy

    rows = capitals()
    program = dspy.Predict("question -> answer")
    system = cp.from_dspy(program, lm=MODEL, name="dspy_program")
    result = optimized(system, rows, folder, 600, engines)
    found, best = row("dspy", "cp.from_dspy", "scripted", result), system.bind(result.best)
    cp.to_dspy(program, result.best).save(folder / "program.json")
    loaded = dspy.Predict("question -> answer")
    loaded.load(folder / "program.json")
    expected = outputs(best, rows, engines)
    found["same_outputs"]["to_dspy, save, load"] = agreement(
        lambda x: in_dspy(loaded, server.url, question=x["question"]).answer, rows["test"], expected
    )
    cp.export(best, "dspy", folder / "exported.json")
    again = dspy.Predict("question -> answer")
    again.load(folder / "exported.json")
    found["same_outputs"]["export --to dspy, load"] = agreement(
        lambda x: in_dspy(again, server.url, question=x["question"]).answer, rows["test"], expected
    )
    return found


def langchain_chain(folder: Path, server: ChatServer, engines: Mapping[str, Any]) -> dict[str, Any]:
    """Optimize a configurable field of a LangChain chain, and run the chain itself with the best value."""
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import ConfigurableField, RunnableLambda

    from compound.benchmarks.measure.interchange.exported import ask

    def model(value: Any) -> str:  # noqa: ANN401 - a prompt value of LangChain
        return ask(
            server.url, {"model": "local", "messages": [{"role": "user", "content": value.to_string()}]}
        )

    prompts = ChatPromptTemplate.from_messages([("user", "plain: {question}")]).configurable_alternatives(
        ConfigurableField(id="style"), default_key="plain",
        loud=ChatPromptTemplate.from_messages([("user", "loud: {question}")]),
    )  # fmt: skip
    chain = prompts | RunnableLambda(model)
    component = cp.from_langchain(
        chain, "chain", inputs={"question": str}, outputs={"output": str},
        style=cp.Choice("plain", "loud", value="plain"),
    )  # fmt: skip
    system = cp.System("langchain_chain", {"answer": component(question=cp.Input("question"))})
    rows = capitals()
    result = optimized(system, rows, folder, 300, engines)
    found = row("langchain-core", "cp.from_langchain", "scripted", result)
    config: Any = {"configurable": {"style": result.best["chain.style"]}}
    found["same_outputs"]["the chain itself"] = agreement(
        lambda x: chain.invoke({"question": x["question"]}, config=config), rows["test"],
        outputs(system.bind(result.best), rows, engines),
    )  # fmt: skip
    return found


def haystack_pipeline(folder: Path, server: ChatServer, engines: Mapping[str, Any]) -> dict[str, Any]:
    """Optimize a socket of a Haystack pipeline, and run the pipeline itself with the best value."""
    import haystack
    from haystack.components.builders import ChatPromptBuilder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    pipeline = haystack.Pipeline()
    template = [ChatMessage.from_user("{{style}}: {{question}}")]
    builder = ChatPromptBuilder(template=template, required_variables=["question", "style"])
    pipeline.add_component("prompt", builder)
    key = Secret.from_token("none")
    pipeline.add_component("llm", OpenAIChatGenerator(model="local", api_key=key, api_base_url=server.url))
    pipeline.connect("prompt.prompt", "llm.messages")
    component = cp.from_haystack(
        pipeline, "pipeline", inputs={"question": "prompt.question"}, outputs={"answer": "llm.replies"},
        settings={"prompt.style": cp.Choice("plain", "loud", value="plain")},
    )  # fmt: skip
    system = cp.System("haystack_pipeline", {"answer": component(question=cp.Input("question"))})
    rows = capitals()
    result = optimized(system, rows, folder, 300, engines)
    found = row("haystack-ai", "cp.from_haystack", "scripted", result)

    def alone(example: Mapping[str, object]) -> object:
        values = {"question": example["question"], "style": result.best["pipeline.prompt_style"]}
        return pipeline.run({"prompt": values})["llm"]["replies"][0].text

    found["same_outputs"]["the pipeline itself"] = agreement(
        alone, rows["test"], outputs(system.bind(result.best), rows, engines)
    )
    return found


def embedded_model(folder: Path) -> dict[str, Any]:
    """Optimize a DSPy program with the embedded model, and run it in DSPy against a server of that model."""
    import dspy
    from dspy.utils.exceptions import AdapterParseError

    engine = cp.Transformers("smollm2", deterministic=True)

    def served(messages: Sequence[Mapping[str, str]]) -> str:
        sent = tuple(Message(message["role"], message["content"]) for message in messages)  # type: ignore[arg-type]
        return asyncio.run(engine.generate(Request(sent, max_tokens=24))).text

    program = dspy.Predict(dspy.Signature("thing -> label", "Is it an animal, a fruit or a vehicle?"))
    system = cp.from_dspy(program, lm="smollm2", name="embedded_model", max_tokens=24, max_demos=3)
    rows = things()
    result = optimized(system, rows, folder, 160, {})
    found = row("dspy", "cp.from_dspy", "smollm2", result)
    expected = outputs(system.bind(result.best), rows, {"smollm2": engine})
    better = cp.to_dspy(program, result.best)

    def alone(example: Mapping[str, object]) -> object:
        try:
            return in_dspy(better, server.url, thing=example["thing"]).label
        except AdapterParseError:
            return None

    with ChatServer(served) as server:
        found["same_outputs"]["to_dspy"] = agreement(alone, rows["test"], expected)
    return found


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--without-embedded", action="store_true", help="leave out the embedded model")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary, ChatServer(scripted) as server:
        folder = Path(temporary)
        engines = {MODEL: cp.LiteLLM(MODEL, api_base=server.url, price=(0, 0))}
        programs = (plain_function, dspy_program, langchain_chain, haystack_pipeline)
        rows = [program(folder, server, engines) for program in programs]
        if not options.without_embedded:
            rows.append(embedded_model(folder))
    text = json.dumps({"rows": rows}, indent=1)
    print(text)
    options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
