"""Text from outside can be stored and printed, and holds no key, whatever it was."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound import LLM, Executor, Function, Input, System
from compound.api.progress import Course, Lines, format_event
from compound.core.errors import CallError
from compound.core.security import sanitize
from compound.core.security.sanitize import (
    HIDDEN,
    SafeStream,
    redact_secrets,
    remember_environment,
    remember_secret,
    replace_surrogates,
    sanitize_for_terminal,
    sanitize_text,
    sanitized_output,
)
from compound.engines.remote import first_line
from compound.evaluation.rows import read_rows
from compound.execution.cache import DiskCache
from compound.execution.trace import Failure, Trace, to_json
from compound.graph.configuration import digest, to_readable_json
from compound.optimization.runs.directory import RunDirectory
from compound.testing import ScriptedLM
from processes import python

# Arbitrary text: also surrogates, control characters and whatever Unicode has not assigned.
TEXT = st.text(st.characters(exclude_categories=()))
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
Q = Input("q", str)


@pytest.fixture(autouse=True)
def _no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "_SECRETS", set())


def answering(reply: Any, **settings: Any) -> Trace:
    system = System("s", outputs={"y": LLM("llm", prompt="x", retries=0)(q=Q)}, lm="m")
    executor = Executor({"m": ScriptedLM(lambda _: reply)}, **settings)
    return asyncio.run(executor.run(system, {"q": "?"}))


@given(TEXT)
def test_safe_text_can_be_stored_and_holds_no_control_character(text: str) -> None:
    found = sanitize_text(text)
    found.encode("utf-8")
    assert len(found) == len(text)
    assert {c for c in found if unicodedata.category(c) in {"Cc", "Cs"}} <= set("\t\n\r")
    assert sanitize_text(found) == found
    assert [c for c, before in zip(found, text, strict=True) if c != before] == [
        "\ufffd" for c, before in zip(found, text, strict=True) if c != before
    ]


@given(VALUES)
def test_a_storable_value_is_utf_8_and_the_same_object_where_it_was_already(value: Any) -> None:
    found = replace_surrogates(value)
    text = json.dumps(found, ensure_ascii=False)
    text.encode("utf-8")
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        assert replace_surrogates(found) is found
    else:
        assert found is value


@given(TEXT)
def test_whatever_a_server_says_a_run_can_record_it(text: str) -> None:
    trace = answering(text)
    json.dumps(to_json(trace), ensure_ascii=False).encode("utf-8")
    failed = answering(CallError(text))
    json.dumps(to_json(failed), ensure_ascii=False).encode("utf-8")
    assert failed.failure is not None
    assert "\x1b" not in str(trace.outputs) + failed.failure.message


@given(TEXT)
def test_whatever_a_function_returns_and_a_row_holds_can_be_recorded(text: str) -> None:
    def tool(q: str) -> dict[str, Any]:
        return {"said": [text, q]}

    system = System("s", outputs={"y": Function("tool", tool)(q=Q)})
    trace = asyncio.run(Executor().run(system, {"q": text}))
    assert trace.failure is None
    json.dumps(to_json(trace), ensure_ascii=False).encode("utf-8")
    assert digest({"q": text})


def test_an_answer_with_a_lone_surrogate_is_kept_and_found_again(tmp_path: Path) -> None:
    """Regression test: it ended the run, and every attempt to continue it."""
    lm = ScriptedLM(lambda _: "half \ud83d of a pair")
    system = System("s", outputs={"y": LLM("llm", prompt="x")(q=Q)}, lm="m")
    run = RunDirectory.create(tmp_path / "run", "", {})
    for _ in range(2):
        cache = DiskCache(tmp_path / "cache.sqlite")
        trace = asyncio.run(Executor({"m": lm}, cache=cache).run(system, {"q": "?"}))
        assert trace.outputs == {"y": "half � of a pair"}
        run.append("traces.jsonl", to_json(trace))
        cache.close()
    run.close()
    assert len(lm.requests) == 1


def test_a_row_with_a_lone_surrogate_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"q": "\\ud83d?", "tags": ["\\udc00"]}\n')
    assert [row for _, row in read_rows(path)] == [{"q": "�?", "tags": ["�"]}]
    assert to_readable_json({"\ud83d": object})


def test_known_keys_are_removed_from_answers_and_errors() -> None:
    remember_secret("sk-secret-value")
    assert answering("your key is sk-secret-value!").outputs["y"] == f"your key is {HIDDEN}!"
    assert Failure("error", "denied: sk-secret-value").message == f"denied: {HIDDEN}"
    assert sanitize_for_terminal("sk-secret-value\n") == f"{HIDDEN}\n"


def test_a_key_that_contains_another_is_removed_completely() -> None:
    keys = [f"sk-of-tenant-{number}-and-of" for number in range(20)]
    for key in keys:
        remember_secret(f"{key}-both")
        remember_secret(key)
    assert {redact_secrets(f"{key}-both") for key in keys} == {HIDDEN}


def test_a_key_is_removed_before_a_message_is_cut() -> None:
    remember_secret("sk-of-a-message-that-is-cut-0123456789")
    said = "y" * 280 + " sk-of-a-message-that-is-cut-0123456789"
    assert "sk-of" not in first_line(said)
    assert first_line(said).endswith(HIDDEN)


def test_text_that_would_be_shown_in_another_order_is_not_printed() -> None:
    assert (
        sanitize_for_terminal("safe\u202egnp.exe\u2066\u2028\U000e0041")
        == "safe\ufffdgnp.exe\ufffd\ufffd\ufffd"
    )
    assert sanitize_for_terminal("نمی\u200cخواهم 👩\u200d🔬") == "نمی\u200cخواهم 👩\u200d🔬"


def test_a_value_that_occurs_by_chance_is_no_key() -> None:
    remember_secret("EMPTY")
    remember_secret(None)
    remember_environment(
        {"MODE_KEY": "production", "PATH": "/usr/local/some/where/bin", "MY_API_KEY": "k" * 20}
    )
    assert (
        redact_secrets("EMPTY production /usr/local/some/where/bin")
        == "EMPTY production /usr/local/some/where/bin"
    )
    assert redact_secrets("k" * 20) == HIDDEN


@given(TEXT)
def test_nothing_that_a_terminal_obeys_is_printed(text: str) -> None:
    under = io.StringIO()
    print(text, file=SafeStream(under))
    said = under.getvalue()
    said.encode("utf-8")
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", said)
    assert not re.search(r"\r(?!\n)", said.rstrip("\n").rstrip("\r"))
    assert not set(format_event({"event": "note", "note": text})) & {"\x1b", "\x9b", "\x00", "\x07"}


def test_a_line_that_is_to_be_overwritten_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    with sanitized_output():
        print("3 runs", end="\r")
        sys.stderr.write("\x1b[2Jcleared")
    print("\x1b[0m", end="")
    printed = capsys.readouterr()
    assert printed.out == "3 runs\r\x1b[0m"
    assert printed.err == "�[2Jcleared"


def test_a_command_prints_no_control_sequence_of_a_file_or_a_server(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compound.testing import ScriptedLM

    monkeypatch.chdir(tmp_path)
    reply = {"answer": "\x1b]0;owned\x07done\x9b2J"}
    monkeypatch.setattr(
        "compound.graph.registry.engines.open_engine",
        lambda *_, **__: ScriptedLM(lambda _: reply["answer"]),
    )
    (tmp_path / "s.yaml").write_text(
        "system: s\nlm: openai/m\ninputs: {q: str}\ncomponents:\n"
        "  a: {llm: {prompt: hello}, in: {q: $q}}\noutputs: {y: $a}\n"
    )
    for arguments in (
        ["run", "s.yaml", "q=\x1b[31mred"],
        ["run", "s.yaml", "q=x", "--json"],
        ["run", "\x1b[2J"],
    ):
        ran = cli(*arguments)
        assert not set(ran.out + ran.err) & {"\x1b", "\x9b", "\x07"}
    (tmp_path / "bad.yaml").write_text('system: s\n"\\e[31mwrong": 1\n')
    ran = cli("check", "bad.yaml")
    assert ran.code == 2
    assert "\x1b" not in ran.err


def test_notices_are_printed_one_in_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    lines = Lines(Course({}, clock=lambda: now[0]))
    lines.listen({"event": "phase", "name": "searching", "total": None})
    for second in (0.0, 1.0, 9.0, 12.0, 13.0):
        now[0] = second
        lines.listen({"event": "notice", "note": f"waiting at {second:.0f}"})
    lines.listen({"event": "note", "note": "another"})
    lines.listen({"event": "call"})
    printed = capsys.readouterr().err.splitlines()
    assert printed == ["searching", "  waiting at 12", "note: another"]


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp437", "utf-8"])
def test_an_encoding_that_lacks_a_sign_gets_another(encoding: str) -> None:
    raw = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    SafeStream(raw).write("0.1 → −0.2 é 名…\n")
    raw.flush()
    written = raw.buffer.getvalue().decode(encoding)
    assert ("→" if encoding == "utf-8" else "->") in written
    assert ("名" if encoding == "utf-8" else "\\u540d") in written


def test_json_of_an_ascii_terminal_has_the_same_values(game: Path) -> None:
    (game / "名.yaml").write_text((game / "game.yaml").read_text())
    told = python(
        "-m", "compound", "check", "名.yaml", "--json", env={"PYTHONIOENCODING": "ascii"}
    ).stdout
    assert told.isascii()
    assert json.loads(told)["file"] == "名.yaml"
