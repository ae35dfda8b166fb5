"""Run exported forms of a system with one prompt against a server, without this package."""

from __future__ import annotations

import json
import runpy
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compound as cp

Answer = Callable[[str], object]


def runners(system: cp.System, url: str, folder: Path) -> dict[str, Answer]:
    """Return a function for each target that answers a question by its exported form."""
    return {
        "messages": _messages(system, url),
        "openai": _openai(system, url),
        "langchain": _langchain(system, url, folder),
        "python": _python(system, url, folder),
        "dspy": _dspy(system, url, folder),
    }


def in_dspy(program: Any, url: str, **inputs: object) -> Any:  # noqa: ANN401 - of DSPy, which has no types
    """Run a program in DSPy itself."""
    import dspy

    lm = dspy.LM("openai/local", api_base=url, api_key="none", cache=False)
    with dspy.context(lm=lm):
        return program(**inputs)


def ask(url: str, body: dict[str, Any]) -> str:
    """Return the text of a chat completion."""
    asked = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(asked) as answer:  # nosec B310  # a server on loopback
        text: str = json.load(answer)["choices"][0]["message"]["content"]
        return text


def _messages(system: cp.System, url: str) -> Answer:
    prompt = json.loads(cp.export(system, "messages"))["prompts"][0]
    return lambda question: ask(url, {"model": "local", "messages": _filled(prompt["messages"], question)})


def _openai(system: cp.System, url: str) -> Answer:
    body = next(iter(json.loads(cp.export(system, "openai")).values()))
    return lambda question: ask(url, {**body, "messages": _filled(body["messages"], question)})


def _filled(messages: list[dict[str, str]], question: str) -> list[dict[str, str]]:
    return [{**message, "content": message["content"].format(question=question)} for message in messages]


def _langchain(system: cp.System, url: str, folder: Path) -> Answer:
    from langchain_core.load import load

    path = folder / "prompts.json"
    cp.export(system, "langchain", path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # LangChain calls the function a beta version
        prompt = load(next(iter(json.loads(path.read_text("utf-8")).values())), allowed_objects="core")
    roles = {"system": "system", "human": "user", "ai": "assistant"}

    def answer(question: str) -> object:
        messages = prompt.format_messages(question=question)
        sent = [{"role": roles[message.type], "content": message.content} for message in messages]
        return ask(url, {"model": "local", "messages": sent})

    return answer


def _module(system: cp.System, target: Any, path: Path) -> dict[str, Any]:  # noqa: ANN401
    cp.export(system, target, path)
    return runpy.run_path(str(path), run_name="exported")


def _python(system: cp.System, url: str, folder: Path) -> Answer:
    run = _module(system, "python", folder / "program.py")["run"]
    return lambda question: run({"question": question}, base_url=url)["answer"]


def _dspy(system: cp.System, url: str, folder: Path) -> Answer:
    program = _module(system, "dspy", folder / "dspy_program.py")["Program"]()
    return lambda question: in_dspy(program, url, question=question).answer
