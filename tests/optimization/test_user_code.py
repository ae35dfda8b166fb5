"""Mistakes in a user's method, scheduler or optimizer are answered with the file, the line and the fix."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.api.optimize import run_optimization
from compound.api.result import Result
from compound.evaluation.metrics.custom import custom
from compound.graph.registry.user_code import UserCodeError, definition
from compound.optimization.settings.base import BudgetSettings
from compound.testing import ScriptedLM

HEAD = """\
import compound as cp
from compound.optimization.method import Job, Method, Progress, Proposal
from compound.optimizers.scheduling import Uniform


def mine(system, optimize):
    return Method("mine", {"one": Optimizer()}, [Job("one", ("answerer.temperature",))], Uniform())


"""
GOOD = "yield Proposal({'answerer.temperature': 0.5}, tried=1)"


def optimizer(body: str) -> str:
    return f"{HEAD}class Optimizer:\n    async def propose(self, task):\n        {body}\n"


def run(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    """Optimize a system by the method in a file of its own."""
    (folder / "ways.py").write_text(textwrap.dedent(source))
    monkeypatch.chdir(folder)
    answerer = cp.LLM("answerer", prompt="Answer.", temperature=cp.Float(0.0, 1.0, value=0.0))
    system = cp.System(
        "demo", outputs={"answer": answerer(question=cp.Input("question", str))}, lm="lm"
    )
    rows = [{"id": str(i), "question": f"{i}?", "answer": "yes"} for i in range(24)]
    data = cp.Dataset.of(train=rows[:8], valid=rows[8:16], test=rows[16:])
    settings = cp.OptimizeSettings(
        method="ways:mine", budget=BudgetSettings(system_runs=200), minibatch=2
    )
    return run_optimization(
        system,
        data,
        custom(score, "score"),
        settings,
        run_dir=folder / "run",
        folder=folder,
        engines={"lm": ScriptedLM(["yes"] * 1000)},
    )


def score(outputs: Mapping[str, Any], example: cp.Example) -> float:
    return float(outputs["answer"] == example.gold["answer"])


def line_of(folder: Path, text: str) -> int:
    lines = (folder / "ways.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    ("source", "at", "message", "hint"),
    [
        (
            HEAD.replace("(system, optimize)", "(system)"),
            "def mine",
            r"method 'ways:mine' at .*: too many positional arguments",
            "called with (system, optimize)",
        ),
        (
            "def mine(system, optimize):\n    pass\n",
            "def mine",
            "method 'ways:mine' at .* returned None",
            "must return a cp.ext.Method",
        ),
        (
            HEAD.replace("Uniform())", "Uniform(1, 2))") + "class Optimizer: pass\n",
            "return Method",
            "method 'ways:mine' failed at .*: TypeError",
            "--debug shows the traceback",
        ),
        (
            HEAD.replace('Job("one"', 'Job("two"') + "class Optimizer: pass\n",
            "def mine",
            "names the optimizer 'two', which is not one of its optimizers",
            "possible: one",
        ),
        (
            HEAD.replace("answerer.temperature", "answerer.temprature") + "class Optimizer: pass\n",
            "def mine",
            "names 'answerer.temprature', which is not a parameter",
            "did you mean 'answerer.temperature'",
        ),
        (
            HEAD + "class Optimizer:\n    pass\n",
            "class Optimizer",
            "optimizer 'one' at .* has no method propose",
            "async generator",
        ),
        (
            HEAD + "class Optimizer:\n    async def propose(self):\n        yield Proposal({})\n",
            "async def propose",
            "propose of optimizer 'one' at .* too many positional",
            "called with (task)",
        ),
        (
            HEAD
            + "class Optimizer:\n    async def propose(self, task):\n        return Proposal({})\n",
            "class Optimizer",
            "propose returned coroutine, which is not an async generator",
            "async generator",
        ),
        (
            HEAD + "class Optimizer:\n    def propose(self, task):\n        return None\n",
            "class Optimizer",
            "propose returned NoneType, which is not an async generator",
            "async generator",
        ),
        (
            optimizer("raise ValueError('a mistake of mine'); yield"),
            "a mistake of mine",
            "optimizer 'one' failed at .*, in propose: ValueError: a mistake of mine",
            "--debug",
        ),
        (
            optimizer("yield 3"),
            "class Optimizer",
            "optimizer 'one' at .* yielded 3",
            "async generator",
        ),
        (
            optimizer("yield Progress({'held': object()}); " + GOOD),
            "class Optimizer",
            "the state of Progress must be JSON, but held is <object",
            "store numbers, texts",
        ),
        (
            optimizer("yield Progress({'step': 1}, facts={'held': object()}); " + GOOD),
            "class Optimizer",
            "the facts of Progress must be JSON, but held is <object",
            "store numbers, texts",
        ),
        (
            optimizer("yield Progress({'seen': {1, 2}}); " + GOOD),
            "class Optimizer",
            "the state of Progress must be JSON, but seen is {1, 2}",
            "store numbers, texts",
        ),
        (
            optimizer("yield Progress({1: 2}); " + GOOD),
            "class Optimizer",
            "it has the key 1, which is not a string",
            "store numbers, texts",
        ),
        (
            optimizer("yield Progress([1]); " + GOOD),
            "class Optimizer",
            "the state of Progress must be a dictionary, but is",
            "store numbers, texts",
        ),
        (
            optimizer("yield Progress({}, note=3); " + GOOD),
            "class Optimizer",
            "note of Progress is 3, which is not a string",
            "give one line",
        ),
        (
            optimizer("yield Progress({}, step='one'); " + GOOD),
            "class Optimizer",
            "step of Progress is 'one', which is not an integer",
            "of type int",
        ),
        (
            optimizer("yield Proposal({}, after='high')"),
            "class Optimizer",
            "after of Proposal is 'high', which is not a number",
            "evaluation.mean",
        ),
        (
            optimizer("yield Proposal({}, facts={'held': object()})"),
            "class Optimizer",
            "the facts of Proposal must be JSON, but held is <object",
            "store numbers, texts",
        ),
        (
            optimizer("yield Proposal(None)"),
            "class Optimizer",
            "optimizer 'one' at .* proposed None",
            "yield Proposal({key: value})",
        ),
        (
            optimizer("await task.scorer.score([{'answerer.k': 1}], task.train); " + GOOD),
            "answerer.k",
            "optimizer 'one' failed at .*, in propose: .* has no parameter 'answerer.k'",
            "did you mean",
        ),
        (
            optimizer(GOOD).replace("Optimizer()}", "Optimizer}"),
            "class Optimizer",
            "optimizer 'one' at .* is the class Optimizer",
            "Optimizer(…)",
        ),
        (
            optimizer(GOOD).replace('{"one": Optimizer()}', "[Optimizer()]"),
            "def mine",
            "optimizers of its Method are",
            "write Method(name",
        ),
        (
            optimizer(GOOD).replace("[Job(", "(Job(").replace(",))]", ",)))"),
            "def mine",
            "jobs of its Method are Job",
            "write Method(name",
        ),
        (
            optimizer(GOOD).replace("Uniform()", "Uniform"),
            "def mine",
            "the scheduler of its Method is <class",
            "Uniform()",
        ),
        (
            optimizer(GOOD).replace('("answerer.temperature",)', '"answerer.temperature"'),
            "def mine",
            "the keys of a job are the text 'answerer.temperature'",
            "write ('answerer.temperature',)",
        ),
        (
            optimizer("yield Progress({'step': 1})"),
            "class Optimizer",
            "optimizer 'one' at .* ended without a Proposal",
            "yield Proposal({})",
        ),
        (
            optimizer("yield Proposal({'answerer.temprature': 0.5})"),
            "class Optimizer",
            "proposed 'answerer.temprature', which is not a parameter",
            "did you mean",
        ),
        (
            optimizer("yield Proposal({'answerer.temperature': 'hot'})"),
            "class Optimizer",
            "optimizer 'one' at .*answerer.temperature",
            "",
        ),
        (
            optimizer(GOOD).replace("Uniform()", "Chooser()")
            + "class Chooser:\n    def choose(self, jobs, history, seed):\n        return None\n",
            "class Chooser",
            "the scheduler at .* chose None",
            "one of the given jobs",
        ),
        (
            optimizer(GOOD).replace("Uniform()", "Chooser()")
            + "class Chooser:\n    def choose(self, jobs, history, seed):\n        return jobs[7]\n",
            "return jobs[7]",
            "scheduler of method 'mine' failed at .*: IndexError",
            "--debug",
        ),
    ],
)
def test_a_mistake_names_the_line_and_the_fix(
    source: str, at: str, message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserCodeError) as raised:
        run(tmp_path, source, monkeypatch)
    error = raised.value
    assert re.search(message, error.message), error.message
    assert f"ways.py:{line_of(tmp_path, at)}" in error.message
    assert hint in (error.hint or "")


def test_the_same_file_without_a_mistake_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(tmp_path, optimizer(GOOD), monkeypatch)
    assert result.before.mean == 1.0


def test_a_run_with_a_mistake_continues_when_it_is_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    condition = "if not __import__('os').path.exists('fixed'): raise ValueError('later')"
    source = optimizer(f"yield Progress({{'step': 1}})\n        {condition}\n        {GOOD}")
    with pytest.raises(UserCodeError, match="later"):
        run(tmp_path, source, monkeypatch)
    (tmp_path / "fixed").touch()
    assert run(tmp_path, source, monkeypatch).before.mean == 1.0
    jobs = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    assert [event["event"] for event in jobs].count("start") == 1


def test_a_definition_is_named_by_file_and_line() -> None:
    assert re.fullmatch(
        r".*test_user_code\.py:\d+", definition(test_a_definition_is_named_by_file_and_line)
    )
    assert definition(len) == "len"


def test_a_state_that_does_not_fit_is_reported_with_the_place_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: the message named neither the run nor the file."""
    condition = "if not __import__('os').path.exists('fixed'): raise ValueError('later')"
    resume = "from compound.core.storage.state import State; class_ = type('Held', (State,), {}); "
    body = f"{resume}task.resume and class_.from_json(task.resume)\n        "
    source = optimizer(f"{body}yield Progress({{'step': 1}})\n        {condition}\n        {GOOD}")
    with pytest.raises(UserCodeError, match="later"):
        run(tmp_path, source, monkeypatch)
    with pytest.raises(
        cp.CompoundError, match=r"run/checkpoint\.json cannot be read: Held has format None"
    ):
        run(tmp_path, source, monkeypatch)
