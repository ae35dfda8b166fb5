"""Mistakes in a user's method, scheduler or optimizer are answered with the file, the line and the fix."""

from __future__ import annotations

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


IDLE = HEAD + "class Optimizer:\n    pass\n"
CHOOSER = "\n\nclass Chooser:\n    def choose(self, jobs, history, seed):\n        return {}\n"
OWN = ("Uniform())", "Chooser())")
METHODS = [  # changes of a method, where, what is said, and the hint
    ("Uniform())", "Uniform(1, 2))", "return Method", "failed at .*: TypeError", "--debug shows"),
    ("Optimizer()}", "Optimizer}", "class Optimizer", "is the class Optimizer", "Optimizer(…)"),
    ('{"one": Optimizer()}', "[Optimizer()]", "def mine", "optimizers of its Method are", "name"),
    ("[Job(", "*[Job(", "def mine", "jobs of its Method are Job", "write Method(name"),
    ("Uniform()", "Uniform", "def mine", "the scheduler of its Method is <class", "Uniform()"),
    ('("answerer.temperature",)', '"answerer.temperature"', "def mine", "keys .* the text", ",)"),
    ("temperature", "temprature", "def mine", "names 'answerer.temprature', which", "did you mean"),
]
BODIES = [  # what an optimizer does, what is said, and the hint
    (
        "await task.scorer.score([{'answerer.k': 1}], task.train)",
        "no parameter 'answerer.k'",
        "did",
    ),
    ("yield Progress({}, facts={'held': object()})", "the facts of Progress must be JSON", "store"),
    ("yield Progress({1: 2})", "it has the key 1, which is not a string", "store numbers, texts"),
    ("yield Progress([1])", "the state of Progress must be a dictionary, but is", "store numbers"),
    ("yield Progress({}, note=3)", "note of Progress is 3, which is not a string", "give one line"),
    ("yield Progress({}, step='one')", "step of Progress is 'one', which is not an", "of type int"),
    ("yield Proposal({}, after='high')", "after of Proposal is 'high', which is no", "evaluation"),
    ("yield Proposal({}, facts={'held': object()})", "the facts of Proposal must be JSON", "store"),
]
MISTAKES = [
    *((optimizer(GOOD).replace(old, new, 1), *told) for old, new, *told in METHODS),
    *(
        (
            optimizer(f"{body}; {GOOD}"),
            "answerer.k" if "await" in body else "class Optimizer",
            *told,
        )
        for body, *told in BODIES
    ),
    (
        *(optimizer("yield Proposal(None)"), "class Optimizer"),
        *("optimizer 'one' at .* proposed None", "yield Proposal({key: value})"),
    ),
    (IDLE, "class Optimizer", "optimizer 'one' .* no method propose", "generator"),
    (
        optimizer(GOOD).replace(*OWN) + CHOOSER.format(None),
        *("class Chooser", "the scheduler at .* chose None", "one of the given jobs"),
    ),
    (
        optimizer(GOOD).replace(*OWN) + CHOOSER.format("jobs[7]"),
        *("return jobs[7]", "scheduler of method 'mine' failed at .*: IndexError", "--debug"),
    ),
]


@pytest.mark.parametrize(("source", "at", "message", "hint"), MISTAKES)
def test_a_mistake_names_line_and_fix(
    source: str, at: str, message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserCodeError) as raised:
        run(tmp_path, source, monkeypatch)
    error = raised.value
    assert re.search(message, error.message), error.message
    assert f"ways.py:{line_of(tmp_path, at)}" in error.message
    assert hint in (error.hint or "")


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
    with pytest.raises(cp.CompoundError, match=r"run/checkpoint\.json .*: Held has format None"):
        run(tmp_path, source, monkeypatch)
