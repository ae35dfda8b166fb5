"""Printed calls of traces and run directories, and what recordings leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.errors import DeclarationError, RunDirectoryError
from compound.core.security.sanitize import remember_secret
from compound.execution.exchange import SWITCH
from compound.testing import ScriptedLM

pytestmark = pytest.mark.usefixtures("without_reports")

ROWS = [{"id": str(i), "question": f"What is {i}?", "answer": str(i)} for i in range(24)]
SECRET = "sk-a-key-for-the-test-of-inspection"


def system() -> cp.System:
    llm = cp.LLM("answerer", prompt=cp.Text("Answer."), system="Be brief.", retries=0)
    reply = llm(question=cp.Input("question"))
    return cp.System("qa", outputs={"answer": cp.Function("strip", strip)(text=reply)}, lm="lm")


def strip(text: str) -> str:
    if text == "broken":
        raise ValueError("nothing to strip")
    return text.strip(" .")


def reply(message: str) -> str:
    number = message.split("What is ")[1].split("?", maxsplit=1)[0]
    return "broken" if number == "3" else f"{number}."


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return optimize(tmp_path_factory.mktemp("inspected") / "run").path


def optimize(folder: Path) -> cp.Result:
    data = {"train": ROWS[:8], "valid": ROWS[:16], "test": ROWS[16:]}
    return cp.optimize(
        system(),
        data,
        "exact_match",
        method="random",
        budget=40,
        run_dir=folder,
        engines={"lm": ScriptedLM(reply)},
        progress=False,
    )


def printed(capsys: pytest.CaptureFixture[str], *arguments: Any, **options: Any) -> str:
    capsys.readouterr()
    cp.inspect_calls(*arguments, **options)
    return capsys.readouterr().out


def test_a_trace_is_printed_with_messages_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedLM(["7."], price=0.001)
    trace = cp.run(system(), {"question": "What is 7?"}, engines={"lm": engine})
    text = printed(capsys, trace)
    assert "8 prompt and 1 completion tokens, $0.009000)" in text
    assert (
        "[system]\nBe brief.\n[user]\nAnswer.\n\nQuestion: What is 7?\nAnswer:\n[lm: stop]\n7."
        in text
    )
    assert text.endswith("text <- 7.\noutput -> 7\n")
    only = printed(capsys, [trace, trace], component="strip", limit=1)
    assert only.count("== strip") == 1
    assert "[user]" not in only


def test_a_directory_shows_last_runs(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, finished, limit=2)
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in text.splitlines() if line.startswith("# example ") and ", test, " in line
    ]
    assert text.count("# example") == 2
    assert text.count("[user]") == 2


def test_system_runs_are_selected(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = printed(capsys, finished, failed=True, limit=1)
    assert failed.startswith("# example 3, valid, ")
    assert "failed: error: ValueError: nothing to strip" in failed
    one = printed(capsys, finished, example="17", split="test", component="answerer", limit=1)
    assert "Question: What is 17?" in one
    assert "score 1\n" in one
    assert "== strip" not in one
    assert printed(capsys, finished, example="999") == "no system run matches\n"


def test_mistakes_are_named(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="no traces of the split 'train'"):
        cp.inspect_calls(finished, split="train")
    with pytest.raises(DeclarationError, match="no component 'answer'") as caught:
        cp.inspect_calls(finished, component="answer")
    assert "answerer" in caught.value.hint
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        cp.inspect_calls(tmp_path)


def test_what_has_no_traces_is_refused() -> None:
    evaluation = cp.evaluate(
        system(), ROWS[:1], "exact_match", engines={"lm": ScriptedLM(reply)}, cache=False
    )
    for source in (evaluation, None, [1]):
        with pytest.raises(DeclarationError, match="inspect_calls prints traces, but got"):
            cp.inspect_calls(source)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match="limit >= 1 must hold, got 0"):
        cp.inspect_calls([], limit=0)


def test_the_command_prints_text_or_json(finished: Path, cli: Any) -> None:
    ran = cli("runs", "trace", str(finished), "--example", "17", "--split", "test", "--limit", "1")
    assert ran.code == 0
    assert "Question: What is 17?" in ran.out
    (recorded,) = json.loads(
        cli("runs", "trace", str(finished), "--failed", "--limit", "1", "--json").out
    )
    assert recorded["failure"] == ["error", recorded["failure"][1]]
    assert {"calls", "prompt_tokens", "completion_tokens", "cost", "unpriced"} == set(
        recorded["calls"][0]["usage"]
    )
    nothing = cli("runs", "trace", str(finished), "--example", "999")
    assert (nothing.code, nothing.out) == (0, "")
    assert cli("runs", "trace", str(finished), "--component", "x").code == 2


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        (("score",), "high", "score: Input should be a valid number"),
        (("configuration",), {}, "configuration: Input should be a valid string"),
        (("calls", 0, "inputs"), None, "calls.0.inputs: Input should be a valid dictionary"),
        (("calls", 0, "failure"), "no", "calls.0.failure: Input should be a valid tuple"),
        (("calls", 0, "usage", "calls"), -1, "calls.0.usage.calls: Input should be greater"),
        (("calls", 0, "seconds"), [1], "calls.0.seconds: Input should be a valid number"),
        (("calls", 0, "reused"), [], "calls.0.reused: Input should be a valid boolean"),
        (("calls", 0, "tokens"), [[1]], "calls.0.tokens.0.0: Input should be a valid list"),
        (("calls", 0, "exchanges", 0, "messages"), {}, "exchanges.0.messages: Input should be"),
        (("calls", 0, "exchanges", 0, "completion"), 5, "completion: Input should be a valid str"),
    ],
)
def test_a_trace_of_another_form_is_named(
    finished: Path, tmp_path: Path, place: tuple[Any, ...], value: object, problem: str
) -> None:
    """Regression test: a run directory of someone else ended with a traceback."""
    (tmp_path / "config.json").write_bytes((finished / "config.json").read_bytes())
    recorded: Any = json.loads((finished / "traces.jsonl").read_text().splitlines()[0])
    del recorded["checksum"]
    part = recorded
    for name in place[:-1]:
        part = part[name]
    part[place[-1]] = value
    (tmp_path / "traces.jsonl").write_text(json.dumps(recorded) + "\n")
    with pytest.raises(RunDirectoryError, match=r"traces\.jsonl:1: it is not a trace") as error:
        cp.inspect_calls(tmp_path)
    assert problem in str(error.value)


def test_keys_in_messages_are_not_recorded() -> None:
    remember_secret(SECRET)
    trace = cp.run(
        system(), {"question": f"What is 7? {SECRET}"}, engines={"lm": ScriptedLM([SECRET])}
    )
    (exchange,) = trace.calls[0].exchanges
    assert SECRET not in str(exchange)
    assert "What is 7? [key removed]" in str(exchange)


def test_messages_can_be_kept_out_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "memory")
    trace = cp.run(system(), {"question": "What is 7?"}, engines={"lm": ScriptedLM(reply)})
    assert trace.calls[0].exchanges
    result = optimize(tmp_path / "run")
    files = [path for path in result.path.rglob("*") if path.is_file()]
    assert {"traces.jsonl", "cache.sqlite"} <= {path.name for path in files}
    assert not [p.name for p in files if b"Be brief." in p.read_bytes() and p.name != "config.json"]
