"""Each mistake on the page of error messages, made through the command line, is answered as it says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "errors.md"
CODE = """\
import compound as cp
from compound.optimizers.scheduling import Uniform


class DrawSettings(cp.ext.Settings):
    tries: int = 2


@cp.ext.optimizer(settings=DrawSettings, tunes=cp.Choice)
class Draw:
    def __init__(self, settings):
        self.settings = settings

    async def propose(self, task):
        yield cp.ext.Progress({"step": 1})
        yield cp.ext.Proposal({"wrap.before": "b"}, tried=1)


@cp.ext.method(settings=DrawSettings)
def one_draw(system, optimize, settings):
    return cp.ext.Method("draws", {"draw": Draw(settings)}, [cp.ext.Job("draw", ("wrap.before",))], Uniform())


class Wrap(cp.ext.Operation):
    kind, version = "wrap", "1"
    inputs = {"value": cp.Port(str)}
    outputs = {"output": cp.Port(str)}

    def __init__(self, name: str, before: str | cp.Choice = ""):
        self.name, self.before = name, before

    @property
    def settings(self):
        return {"before": self.before}

    async def run(self, inputs, values, call):
        return {"output": values["before"] + inputs["value"]}


def brief(outputs, example):
    return float(len(outputs["answer"]) < 20)


class Echo:
    name, concurrency, remote, priced = "echo", 4, False, True

    def __init__(self, upper: bool = False):
        self.upper = upper

    def worst_case(self, request):
        return cp.ext.Usage(1, 99, 9)

    async def generate(self, request):
        return cp.ext.Completion("ok", cp.ext.Usage(1, 9, 1))

    async def aclose(self):
        pass
"""
FILE = """\
system: demo
lm: fast
engines:
  fast: {class: "mine:Echo", settings: {upper: true}}
inputs: {question: str}
components:
  wrap:
    class: "mine:Wrap"
    settings: {before: {choice: [a, b]}}
    in: {value: $question}
  answerer: {llm: {}, in: {question: $wrap}}
outputs: {answer: $answerer}
metric: {custom: {call: "mine:brief"}}
data: {path: rows.jsonl, split_by: {train: 0.4, valid: 0.4, test: 0.2}}
optimize:
  method: mine:Draw
  Draw: {tries: 2}
  budget: {system_runs: 60}
"""
SCORE = 'return float(len(outputs["answer"]) < 20)'
OUTPUT = 'return {"output": values["before"] + inputs["value"]}'
PROGRESS, PROPOSAL = (
    'yield cp.ext.Progress({"step": 1})',
    'yield cp.ext.Proposal({"wrap.before": "b"}, tried=1)',
)
COMPLETION = 'return cp.ext.Completion("ok", cp.ext.Usage(1, 9, 1))'
METHOD = ("mine:Draw\n  Draw:", "mine:one_draw\n  one_draw:")

MISTAKES: dict[str, list[tuple[str, str]]] = {
    "`propose` takes other arguments": [("propose(self, task)", "propose(self)")],
    "`__init__` takes no settings": [("__init__(self, settings)", "__init__(self)")],
    "a metric takes other arguments": [("brief(outputs, example)", "brief(outputs)")],
    "`run` takes other arguments": [("run(self, inputs, values, call)", "run(self, inputs)")],
    "a method takes other arguments": [METHOD, ("(system, optimize, settings)", "(system)")],
    "a metric returns `None`": [(SCORE, SCORE.removeprefix("return "))],
    "`propose` yields `None`": [(PROGRESS, "yield")],
    "a component returns `None`": [(OUTPUT, OUTPUT.removeprefix("return "))],
    "a method returns `None`": [METHOD, ("return cp.ext.Method", "cp.ext.Method")],
    "an exception in an optimizer": [(PROGRESS, "1 / 0")],
    "an exception in a metric": [('outputs["answer"]', 'example.gold["anser"]')],
    "an exception in a component": [('values["before"]', 'values["befor"]')],
    "an exception in the constructor of a component": [("= name, before", "= name, before.valu")],
    "an exception in an engine": [('"ok"', "request.message")],
    "a state that is not JSON": [('{"step": 1}', '{"seen": {1, 2}}')],
    "a job of an optimizer that does not exist": [
        METHOD,
        ('cp.ext.Job("draw"', 'cp.ext.Job("two"'),
    ],
    "an unknown setting": [("{tries: 2}", "{trys: 2}")],
    "a misspelled section": [("  Draw: {", "  Drow: {")],
    "no `Proposal` at the end": [(PROPOSAL, "pass")],
    "`propose` is a coroutine": [(PROGRESS, "pass"), (PROPOSAL, "return cp.ext.Proposal({})")],
    "`propose` is a plain generator": [("async def propose", "def propose")],
    "a setting of another type": [("{tries: 2}", "{tries: two}")],
    "a setting of a component of another type": [("{before: {choice: [a, b]}}", "{before: 3}")],
    "a parameter that does not exist": [('"wrap.before": "b"', '"wrap.befor": "b"')],
    "a value outside of its space": [('"wrap.before": "b"', '"wrap.before": "c"')],
    "a metric returns a text": [(SCORE, "return 'good'")],
    "an engine returns a text": [(COMPLETION, "return 'ok'")],
    "a module that does not exist": [("mine:Draw", "mime:Draw")],
    "a name that does not exist": [("mine:Draw", "mine:Drew")],
    "a class that is not decorated": [
        ("@cp.ext.optimizer(settings=DrawSettings, tunes=cp.Choice)\n", "")
    ],
    "an error while the module is imported": [
        ("import Uniform\n", "import Uniform\n\nLIMIT = {}['limit']\n")
    ],
    "a library that is not installed": [
        ("import compound as cp\n", "import compound as cp\nimport numpi\n")
    ],
}


def table() -> dict[str, str]:
    """Return the messages of the table, by mistake."""
    rows = re.findall(r"^\| (.+?) \| `(.+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert all("|" not in message for _, message in rows)
    return dict(rows)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"id": str(i), "question": f"{i}?", "answer": "yes"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(tmp_path, [])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, edits: list[tuple[str, str]]) -> None:
    files = {"mine.py": CODE, "system.yaml": FILE}
    for old, new in edits:
        assert sum(old in text for text in files.values()) == 1, old
        files = {name: text.replace(old, new) for name, text in files.items()}
    for name, text in files.items():
        (folder / name).write_text(text)


def test_the_table_and_the_tests_have_the_same_mistakes() -> None:
    assert list(table()) == list(MISTAKES)


def test_the_files_without_a_mistake_run(folder: Path, cli: Any) -> None:
    ran = cli("optimize", "system.yaml", "--quiet")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_as_the_page_says(mistake: str, folder: Path, cli: Any) -> None:
    write(folder, MISTAKES[mistake])
    ran = cli("optimize", "system.yaml", "--quiet")
    assert ran.code in (1, 2)
    assert "bug in compound" not in ran.err
    said = (
        ran.err.strip()
        .replace(f"{folder}/", "")
        .replace("error: ", "", 1)
        .replace("\nhint: ", "; ")
    )
    message = ".*".join(map(re.escape, table()[mistake].split("…")))
    assert re.search(f"^{message}$", said, re.MULTILINE), said
    assert re.search(r"(mine\.py|system\.yaml):\d+", said)


def test_the_same_command_continues_when_the_mistake_is_corrected(folder: Path, cli: Any) -> None:
    write(folder, MISTAKES["no `Proposal` at the end"])
    assert cli("optimize", "system.yaml", "--quiet").code == 2
    write(folder, [])
    sys.modules.pop("mine")  # the command runs in a process of its own
    assert cli("optimize", "system.yaml", "--quiet").code == 0
    events = [json.loads(li) for li in (folder / "runs/demo/events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("start") == 1
