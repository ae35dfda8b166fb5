"""A limit of calls, tokens or cost that is too small to try anything is refused before anything is sent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.errors import DeclarationError
from compound.report.text import count, money

ROWS = [{"question": f"what is {i}", "parts": [f"{i}", "b"], "answer": "yes"} for i in range(40)]
DATA: Any = {"train": ROWS[:20], "valid": ROWS[20:]}


def look_up(word: str) -> str:
    """Look a word up."""
    return word


def chain(question: Any, parts: Any) -> Any:
    plan = cp.LLM("plan", prompt="Plan.", max_tokens=8)(question=question)
    return cp.LLM("a", prompt=cp.Text("Answer."), max_tokens=10)(plan=plan)


def agent(question: Any, parts: Any) -> Any:
    return cp.Agent("plan", [look_up], prompt=cp.Text("Plan."), max_tokens=8)(question=question)


def loop(question: Any, parts: Any) -> Any:
    text = cp.Input("text", str)
    body = cp.System(
        "turn", {"text": cp.LLM("plan", prompt=cp.Text("Plan."), max_tokens=8)(text=text)}
    )
    return cp.Loop("again", body, carry={"text": "text"}, max_turns=2)(text=question)


def each(question: Any, parts: Any) -> Any:
    text = cp.Input("text", str)
    body = cp.System(
        "one", {"text": cp.LLM("plan", prompt=cp.Text("Plan."), max_tokens=8)(text=text)}
    )
    texts = cp.Map("all", body, over="text")(text=parts)
    return cp.LLM("a", prompt="Answer.", max_tokens=10)(texts=texts)


def random(question: Any, parts: Any) -> Any:
    return cp.LLM("plan", prompt=cp.Text("Plan."), max_tokens=8, temperature=0.5)(question=question)


def run(path: Path, made: Any = chain, **budget: float) -> tuple[Any, cp.testing.ScriptedLM]:
    system = cp.System(
        "qa", {"answer": made(cp.Input("question", str), cp.Input("parts", list[str]))}, lm="m"
    )
    lm = cp.testing.ScriptedLM(lambda _: "no", price=0.001)
    return lambda: cp.optimize(
        system,
        DATA,
        "exact_match",
        budget=budget,
        engines={"m": lm},
        run_dir=path,
        progress=False,
    ), lm


def test_a_limit_that_another_node_decides_is_not_assumed(tmp_path: Path) -> None:
    def short(question: Any, parts: Any) -> Any:
        most = cp.components.Hyperparameter("most", cp.Choice(1, 2))()
        return cp.LLM("plan", prompt=cp.Text("Plan."))(question=question, max_tokens=most)

    start, lm = run(tmp_path / "run", short, tokens=4000)
    start()
    assert lm.requests


@pytest.mark.parametrize(("name", "small"), [("calls", 40), ("tokens", 300), ("cost", 0.3)])
@pytest.mark.parametrize("resumes", [False, True])
def test_too_little_to_try_anything_is_refused(
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
    assert any("Answer." in message.text for r in lm.requests for message in r.messages)


@pytest.mark.parametrize(
    ("made", "known"), [(chain, 20), (agent, 20), (loop, 20), (each, 21), (random, 20)]
)  # 20 first steps, whose requests are known in advance; "b" is a part of every example
def test_the_reservations_of_known_requests_are_named(
    tmp_path: Path, made: Any, known: int
) -> None:
    start, lm = run(tmp_path / "run", made, cost=0.01)
    with pytest.raises(DeclarationError) as e:
        start()
    named = re.search(r"reserves \$([\d.]+)", str(e.value))
    assert named is not None
    start, lm = run(tmp_path / "run", made, system_runs=400)
    start()
    requests = [request for request in lm.requests if "Plan." in request.messages[-1].text][:known]
    assert len({repr(request) for request in requests}) == known
    expected = sum(lm.worst_case(request).cost for request in requests)
    assert (
        0.99 * expected < float(named[1]) < 1.1 * expected
    )  # a later step counts without its inputs


def test_small_amounts_keep_their_digits() -> None:
    assert (count(0.004), count(0.5), money(0.00004)) == ("0.004", "0.5", "$4e-05")
