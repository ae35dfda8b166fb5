"""Record the requests of the library ``textgrad`` in one step of prompt optimization, with a scripted model.

Run with ``python benchmarks/measure/prompts/textgrad_parity.py`` in an environment that has
textgrad 0.1.8, which is not a dependency of this package; it writes
``benchmarks/data/textgrad_parity.json``: for several systems and two examples, the number of
requests of each kind, and the information in each of them. The test
``tests/optimizers/baselines/test_textgrad_parity.py`` compares the requests of method ``textgrad``
with it.

Every piece of information is a marker, such as ``@OUTPUT-a-0`` for the output of step a on example
0, so the wording of the requests does not matter.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parents[2] / "data" / "textgrad_parity.json"
EXAMPLES = 2
# Steps in order of execution, each with the steps that it reads; the first reads the question. The
# last one writes the result. A step named "tool" is a function.
SYSTEMS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "one": {"a": ()},
    "chain": {"a": (), "b": ("a",)},
    "diamond": {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")},
    "shortcut": {"a": (), "b": ("a",), "c": ("a", "b")},
    "tool": {"a": (), "tool": ("a",), "b": ("tool",)},
}
Row = dict[str, Any]


def information(text: str) -> list[str]:
    """Return the markers in a text, without the numbers of the examples.

    >>> information("@PROMPT-a read @QUESTION-0, wrote @OUTPUT-a-0 and @OUTPUT-a-1")
    ['OUTPUT-a', 'PROMPT-a', 'QUESTION']
    """
    return sorted(set(re.findall(r"@([A-Z]+(?:-[a-z]+)*)", text)))


def summarize(requests: Sequence[tuple[str, str]]) -> dict[str, Row]:
    """Return, for each kind of request, their number and the information in each of them."""
    found: dict[str, Row] = {}
    for kind, text in requests:
        row = found.setdefault(kind, {"requests": 0, "information": information(text)})
        row["requests"] += 1
        assert row["information"] == information(text), kind
    return dict(sorted(found.items()))


def reply_to(prompt: str, system_prompt: str) -> tuple[str, str]:
    """Return the kind of a request of the library, and the scripted reply.

    Kinds are ``output a read by b``, ``prompt a``, ``rewrite a``, and ``run a`` in the system
    itself.
    """
    (number, *_) = re.findall(r"@[A-Z]+(?:-[a-z]+)*-(\d+)", prompt)
    if "<IMPROVED_VARIABLE>" in prompt:
        (step,) = set(re.findall(r"<ROLE>prompt (\w+)</ROLE>", prompt))
        return f"rewrite {step}", f"<IMPROVED_VARIABLE>@PROMPT-{step} better</IMPROVED_VARIABLE>"
    if role := re.search(r"<ROLE> (\w+) (\w+) </ROLE>", prompt):
        (reader,) = re.findall(r"<(?:LM_OUTPUT|OUTPUT_OF_FUNCTION)> @(?:OUTPUT-)?(\w+)", prompt)
        kind = f"{role[1]} {role[2]}" + (
            f" read by {reader.lower()}" if role[1] == "output" else ""
        )
        return kind, f"@FEEDBACK-{'-'.join(role.groups())}-{number}"
    (step,) = re.findall(r"@PROMPT-(\w+)", system_prompt)
    return f"run {step}", f"@OUTPUT-{step}-{number}"


def record(steps: Mapping[str, Sequence[str]]) -> dict[str, Row]:
    """Run one step of the library's optimizer on a system."""
    tg = import_module("textgrad")
    operations = import_module("textgrad.autograd.string_based_ops")
    requests: list[tuple[str, str]] = []

    def generate(engine: object, prompt: str, system_prompt: str = "", **_: object) -> str:
        kind, reply = reply_to(prompt, system_prompt)
        requests.append((kind, prompt))
        return reply

    base = import_module("textgrad.engine.base").EngineLM
    engine = type("Scripted", (base,), {"generate": generate, "__call__": generate})()
    prompts = {
        step: tg.Variable(f"@PROMPT-{step}", requires_grad=True, role_description=f"prompt {step}")
        for step in steps
        if step != "tool"
    }
    losses = []
    for number in range(EXAMPLES):
        question = tg.Variable(
            f"@QUESTION-{number}", requires_grad=False, role_description="question"
        )
        outputs: dict[str, Any] = {}
        for step, earlier in steps.items():
            inputs = {name: outputs[name] for name in earlier} or {"question": question}
            role = f"output {step}"
            if step == "tool":
                tool = operations.StringBasedFunction(lambda a: f"@TOOL {a.value}", "a tool")
                outputs[step] = tool(inputs=inputs, response_role_description=role)
                continue
            form = "\n".join(f"{name}: {{{name}}}" for name in inputs)
            call = import_module("textgrad.autograd").FormattedLLMCall(
                engine, form, dict.fromkeys(inputs), prompts[step]
            )
            outputs[step] = call(inputs=inputs, response_role_description=role)
        gold = tg.Variable(
            f"@GOLD-{number}", requires_grad=False, role_description="correct answer"
        )
        score = operations.StringBasedFunction(
            lambda prediction, gold, n=number: f"@SCORE-{n}", "the score"
        )
        losses.append(score(inputs={"prediction": [*outputs.values()][-1], "gold": gold}))
    tg.sum(losses).backward(engine)
    tg.TextualGradientDescent(parameters=list(prompts.values()), engine=engine).step()
    return summarize([(kind, text) for kind, text in requests if not kind.startswith("run ")])


def main() -> None:
    """Record the requests for every system, and write the file."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    systems = {name: {"steps": steps, "kinds": record(steps)} for name, steps in SYSTEMS.items()}
    found = {"textgrad": metadata.version("textgrad"), "examples": EXAMPLES, "systems": systems}
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
