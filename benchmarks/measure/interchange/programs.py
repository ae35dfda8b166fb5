"""Programs of installed libraries that are imported, optimized and run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import compound as cp
from benchmarks.measure.interchange.exported import ask, in_dspy, runners
from benchmarks.measure.interchange.trial import MODEL, Trial


def plain_function(trial: Trial) -> dict[str, Any]:
    """Optimize a system declared as a Python function, and ask the model with its exported requests."""

    @cp.llm(
        prompt=cp.Text(trial.task.instruction),
        demos=cp.Demos(max=6),
        max_tokens=trial.task.max_tokens,
    )
    def answer(question: str) -> str:
        raise NotImplementedError

    @cp.system(name="plain_function", lm=MODEL)
    def declared(question: str) -> dict[str, str]:
        return {"answer": answer(question)}

    result = trial.optimize(declared, 600)
    best = declared.bind(result.best)
    expected = trial.outputs(best)
    same = {
        target: trial.agreement(ask_exported, expected)
        for target, ask_exported in runners(best, trial.url).items()
    }
    return trial.row("compound", "cp.system", result, same)


def dspy_program(trial: Trial) -> dict[str, Any]:
    """Optimize a DSPy program, write the values back, and run it in DSPy after saving and loading."""
    import dspy
    from dspy.utils.exceptions import AdapterParseError

    signature = dspy.Signature("question -> answer", trial.task.instruction)
    program = dspy.Predict(signature)
    system = cp.interchange.from_dspy(
        program, lm=MODEL, name="dspy_program", max_tokens=trial.task.max_tokens
    )
    result = trial.optimize(system, 600)
    best = system.bind(result.best)
    cp.interchange.to_dspy(program, result.best).save(trial.folder / "program.json")
    cp.interchange.export(best, "dspy", trial.folder / "exported.json")
    expected = trial.outputs(best)
    same = {}
    for form, file in (("to_dspy, save, load", "program"), ("export --to dspy, load", "exported")):
        loaded = dspy.Predict(signature)
        loaded.load(trial.folder / f"{file}.json")

        def alone(question: str, program: Any = loaded) -> object:  # noqa: ANN401 - of DSPy
            try:
                return in_dspy(program, trial.url, question=question).answer
            except AdapterParseError:
                return None

        same[form] = trial.agreement(alone, expected)
    return trial.row("dspy", "cp.interchange.from_dspy", result, same)


def langchain_chain(trial: Trial) -> dict[str, Any]:
    """Optimize a configurable field of a LangChain chain, and run the chain itself with the best value."""
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import ConfigurableField, RunnableLambda

    roles = {"system": "system", "human": "user", "ai": "assistant"}

    def model(value: Any) -> str:  # noqa: ANN401 - a prompt value of LangChain
        messages = [
            {"role": roles[each.type], "content": each.content} for each in value.to_messages()
        ]
        return ask(trial.url, {"model": "local", "messages": messages})

    def prompt(examples: int) -> Any:  # noqa: ANN401 - a prompt of LangChain
        turns = [
            turn for q, a in trial.task.shown[:examples] for turn in (("user", q), ("assistant", a))
        ]
        return ChatPromptTemplate.from_messages(
            [("system", trial.task.instruction), *turns, ("user", "{question}")]
        )

    counts = [str(count) for count in range(1, len(trial.task.shown) + 1)]
    prompts = prompt(0).configurable_alternatives(
        ConfigurableField(id="examples"),
        default_key="0",
        **{count: prompt(int(count)) for count in counts},
    )
    chain = prompts | RunnableLambda(model)
    component = cp.interchange.from_langchain(
        chain,
        "chain",
        inputs={"question": str},
        outputs={"output": str},
        examples=cp.Choice("0", *counts, value="0"),
    )
    system = cp.System("langchain_chain", {"answer": component(question=cp.Input("question"))})
    result = trial.optimize(system, 400)
    config: Any = {"configurable": {"examples": result.best["chain.examples"]}}
    alone = trial.agreement(
        lambda question: chain.invoke({"question": question}, config=config),
        trial.outputs(system.bind(result.best)),
    )
    return trial.row(
        "langchain-core", "cp.interchange.from_langchain", result, {"the chain itself": alone}
    )


def haystack_pipeline(trial: Trial) -> dict[str, Any]:
    """Optimize a socket of a Haystack pipeline, and run the pipeline itself with the best value."""
    import haystack
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    @haystack.component
    class Conversation:
        """Writes the instruction, the first examples, and the question."""

        @haystack.component.output_types(messages=list[ChatMessage])  # type: ignore[untyped-decorator]
        def run(self, question: str, examples: int) -> dict[str, list[ChatMessage]]:
            made = [ChatMessage.from_system(trial.task.instruction)]
            for asked, answered in trial.task.shown[:examples]:
                made += [ChatMessage.from_user(asked), ChatMessage.from_assistant(answered)]
            return {"messages": [*made, ChatMessage.from_user(question)]}

    pipeline = haystack.Pipeline()
    pipeline.add_component("prompt", Conversation())
    key = Secret.from_token("none")
    pipeline.add_component(
        "llm", OpenAIChatGenerator(model="local", api_key=key, api_base_url=trial.url)
    )
    pipeline.connect("prompt.messages", "llm.messages")
    component = cp.interchange.from_haystack(
        pipeline,
        "pipeline",
        inputs={"question": "prompt.question"},
        outputs={"answer": "llm.replies"},
        settings={"prompt.examples": cp.Choice(*range(len(trial.task.shown) + 1), value=0)},
    )
    system = cp.System("haystack_pipeline", {"answer": component(question=cp.Input("question"))})
    result = trial.optimize(system, 400)

    def alone(question: str) -> object:
        values = {"question": question, "examples": result.best["pipeline.prompt_examples"]}
        return pipeline.run({"prompt": values})["llm"]["replies"][0].text

    same = trial.agreement(alone, trial.outputs(system.bind(result.best)))
    return trial.row(
        "haystack-ai", "cp.interchange.from_haystack", result, {"the pipeline itself": same}
    )


PROGRAMS: tuple[Callable[[Trial], dict[str, Any]], ...] = (
    plain_function,
    dspy_program,
    langchain_chain,
    haystack_pipeline,
)
