"""A limit of calls, tokens or cost below what the initial evaluation reserves is refused before anything is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.errors import DeclarationError
from compound.report.facts.text import count, money

ROWS = [{"question": f"what is {i}", "answer": "yes"} for i in range(40)]
DATA: Any = {"train": ROWS[:20], "valid": ROWS[20:]}


def system() -> cp.System:
    question = cp.Input("question", str)
    plan = cp.LLM("plan", prompt="Plan.", max_tokens=8)(question=question)
    return cp.System(
        "qa", {"answer": cp.LLM("a", prompt=cp.Text("Answer."), max_tokens=10)(plan=plan)}, lm="m"
    )


def run(path: Path, **budget: float) -> tuple[Any, cp.testing.ScriptedLM]:
    lm = cp.testing.ScriptedLM(lambda _: "no", price=0.001)
    return lambda: cp.optimize(
        system(), DATA, "exact_match", budget=budget, engines={"m": lm}, run_dir=path, progress=False,
    ), lm  # fmt: skip


@pytest.mark.parametrize(("name", "small"), [("calls", 20), ("tokens", 300), ("cost", 0.3)])
@pytest.mark.parametrize("resumes", [False, True])
def test_too_little_for_the_initial_evaluation_is_refused(
    tmp_path: Path, name: str, small: float, resumes: bool
) -> None:
    if resumes:
        run(tmp_path / "run", system_runs=100)[0]()
    start, lm = run(tmp_path / "run", **{name: small})
    with pytest.raises(
        DeclarationError, match=rf"budget\.{name}=.* too small to try anything: .* reserves"
    ) as e:
        start()
    assert lm.requests == []
    enough = float(str(e.value.hint).split("at least ")[1].split(",")[0])
    start, lm = run(tmp_path / "other", **{name: int(enough) if name != "cost" else enough})
    start()
    # 20 first steps, whose requests are known in advance; the others are equal without the first step's answer
    known = [request for request in lm.requests if "Plan." in request.messages[-1].text][:20]
    reserved = sum(getattr(lm.worst_case(request), name) for request in known)
    assert small * 0.8 < reserved < enough * 0.8 < 1.2 * reserved


def test_small_amounts_keep_their_digits() -> None:
    assert (count(0.004), count(0.5), money(0.00004)) == ("0.004", "0.5", "$4e-05")
