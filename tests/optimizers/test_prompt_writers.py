"""The proposers of a search follow from the engines of the system's models, not from their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.api.check import check_program
from compound.api.estimate import estimate
from compound.optimizers.methods import method
from compound.yaml import loads

READS = "which reads train examples with their expected results"
MODEL = "openai/gpt-4o-mini"
FLEET = '{urls: ["http://127.0.0.1:1/v1"], openai: {model: m}}'
SERVED = {
    "litellm": f"{{litellm: {{model: {MODEL}}}}}",
    "openai": "{openai: {api_base: http://127.0.0.1:1/v1, model: m}}",
    "vllm": "{vllm: {model: Qwen/Qwen3-8B}}",
    "fleet": f"{{fleet: {FLEET}}}",
    "class": "{class: own:Served}",
}
OWN = """
from compound.testing import ScriptedLM
def Served(): return ScriptedLM(["yes"], writes_prompts=True)
def Silent(): return ScriptedLM(["yes"])
"""


def program(
    folder: Path, top: str, component: str = "", method: str = "search", selector: str = ""
) -> Any:
    (folder / "own.py").write_text(OWN)
    rows = [
        json.dumps({"id": str(i), "text": f"text {i}", "label": "ab"[i % 2]}) for i in range(200)
    ]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    wires = "text: $text, lm: $s" if selector else "text: $text"
    text = f"""
system: s
{top}
inputs: {{text: str}}
components:{selector and f"{chr(10)}  s: {{selector: {{{selector}}}}}"}
  c: {{llm: {{{component} prompt: {{tune: Label it.}}}}, in: {{{wires}}}, out: "one of a, b"}}
outputs: {{label: $c}}
data: {{path: rows.jsonl, split_by: {{train: 0.4, valid: 0.4, test: 0.2}}}}
metric: {{accuracy: {{output: label}}}}
optimize: {{method: {method}, budget: {{system_runs: 800}}}}
"""
    return loads(text, path=folder / "system.yaml")


def requests(facts: dict[str, Any]) -> list[str]:
    return [row["what"] for row in facts["requests"] if "new prompts" in row["what"]]


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize(
    "used",
    ["lm: mini", "lm: smollm2", ""],
    ids=["default", "beside one in this process", "component"],
)
def test_a_named_engine_of_a_server_writes_prompts(tmp_path: Path, kind: str, used: str) -> None:
    component = "" if used == "lm: mini" else "lm: {choice: [mini, other]},"
    engines = f"engines: {{mini: {SERVED[kind]}, other: {SERVED['class']}}}"
    made = program(tmp_path, f"{used}\n{engines}", component)
    told = (
        f"sources of new prompts and demonstrations: describe, reflect (prompts by mini, {READS})"
    )
    facts = estimate(made)
    assert requests(facts)
    assert told in facts["prospects"]["told"]
    assert told in check_program(made).notes


@pytest.mark.parametrize(
    ("top", "why"),
    [
        ("lm: smollm2", "'smollm2' runs in this process"),
        (
            "lm: mini\nengines: {mini: {transformers: {model: smollm2}}}",
            "'mini' runs in this process",
        ),
        (
            "lm: mini\nengines: {mini: {class: own:Silent}}",
            "'mini' declares that it writes no prompts",
        ),
    ],
)
@pytest.mark.parametrize(
    ("name", "section"), [("search", "search"), ("optimas", "optimas"), ("hbc", "hbc")]
)
def test_a_model_that_writes_none_is_named_with_the_setting(
    tmp_path: Path, top: str, why: str, name: str, section: str
) -> None:
    made = program(tmp_path, top, method=name)
    found = method(name, made.system, made.optimize, tmp_path, made.find_engine)
    assert list(found.proposers) == [
        f"sources of new prompts and demonstrations: edits; no model writes prompts: {why}; set "
        f"optimize.{section}.lm to a model that writes prompts"
    ]


@pytest.mark.parametrize(
    ("selector", "writer"),
    [
        ("options: [smollm2, mini]", "mini"),
        ("options: [mini, other], value: other", "other"),
        ("options: [mini, smollm2], value: smollm2, per_input: true", "mini"),
    ],
)
@pytest.mark.parametrize("top", ["", "lm: smollm2"])
def test_a_selector_names_the_models_of_a_component(
    tmp_path: Path, selector: str, writer: str, top: str
) -> None:
    engines = f"engines: {{mini: {SERVED['openai']}, other: {SERVED['class']}}}"
    made = program(tmp_path, f"{top}\n{engines}", selector=selector)
    told = f"sources of new prompts and demonstrations: describe, reflect (prompts by {writer}, {READS})"
    assert told in check_program(made).notes


@pytest.mark.parametrize("name", ["opro", "gepa", "textgrad", "mipro"])
def test_other_methods_name_the_model_that_writes(tmp_path: Path, name: str) -> None:
    told = f"sources of new prompts: {name} (prompts by "
    hint = f"; set optimize.{name}.lm to a model that writes prompts"
    for top, component, expected in [
        ("engines: {mini: {class: own:Served}}", "lm: mini,", "mini)"),
        ("lm: smollm2", "", f"smollm2), although 'smollm2' runs in this process{hint}"),
        (
            "engines: {mini: {class: own:Silent}}",
            "lm: mini,",
            f"mini), although 'mini' declares that it writes no prompts{hint}",
        ),
    ]:
        made = program(tmp_path, top, component, name)
        line = f"{told}{expected}"
        assert line in estimate(made)["prospects"]["told"]
        assert line in check_program(made).notes


def test_engines_given_in_python_and_the_record_of_a_run(tmp_path: Path) -> None:
    answer = cp.LLM("answer", prompt=cp.Text("Answer."))(question=cp.Input("question"))
    system = cp.System("qa", outputs={"answer": answer}, lm="m")
    rows = [{"question": f"what is {i}", "answer": "yes"} for i in range(60)]
    lm = cp.testing.ScriptedLM(
        lambda text: "<prompt>Say yes.</prompt>" if "<prompt>" in text else "no",
        writes_prompts=True,
    )
    result = cp.optimize(
        system,
        {"train": rows[:30], "valid": rows[30:]},
        "exact_match",
        budget=80,
        engines={"m": lm},
        run_dir=tmp_path / "run",
        progress=False,
    )
    line = f"sources of new prompts and demonstrations: describe, reflect (prompts by m, {READS})"
    events = [json.loads(row) for row in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert line in [text for e in events for text in (*e.get("told", ()), e.get("note"))]
    assert line[1:] in (tmp_path / "run/report.md").read_text()
    assert any("<prompt>" in request.messages[-1].text for request in lm.requests)
    assert line in result.to_json()["notes"]
