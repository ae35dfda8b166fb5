"""Messages with tool calls and images: their text, cache keys, records and wire format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import compound as cp
from compound.core.engine import AnswerFormat, Completion, Message, Request, ToolCall, ToolSpec
from compound.engines.chat_format import calls_from_json, tools_to_json
from compound.engines.local.chat_tokens import read_calls
from compound.engines.remote import max_prompt_tokens
from compound.engines.vllm import api as vllm_api
from compound.execution.caller import request_key
from compound.execution.exchange import Exchange, record_exchange
from compound.execution.tool_text import from_text, to_text
from compound.graph.configuration import digest

DOT = cp.Image.from_bytes(b"GIF89a-a-dot")
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
HALVE = ToolSpec("halve", "Halve a number.", SCHEMA)
CALL = ToolCall("call_7", "halve", '{"a": 8}')
TURNS = (
    Message("user", "Half of 8?"),
    Message("assistant", "", (CALL,)),
    Message("tool", "4", tool_call_id="call_7"),
)


class TestKeys:
    def test_text_requests_keep_the_keys_of_earlier_versions(self) -> None:
        request = Request(
            (Message("system", "Be brief."), Message("user", "Grüße?")),
            max_tokens=9,
            temperature=0.5,
            stop=("x",),
            seed=7,
            cue="A:",
        )
        key = digest(["ask", "m", request_key(request)])
        assert key == "6a71032f544ff26314ac664cc7c44ca9847c982f92468119441df79749582568"
        choices = Request((Message("user", "Hi"),), format=AnswerFormat(choices=("a", "b")))
        key = digest(["ask", "m", request_key(choices)])
        assert key == "148ec094c670da74a76e1b6505d730968e0353a936ed6253f24daa44663a61af"

    def test_every_new_field_changes_the_key(self) -> None:
        plain = Request((Message("user", "Hi"),))
        others = [
            replace(plain, messages=(Message("user", ("Hi",)),)),
            replace(plain, messages=(Message("user", ("Hi", DOT)),)),
            replace(plain, messages=(Message("user", ("Hi", cp.Image.from_bytes(b"GIF89a-x"))),)),
            replace(plain, messages=(Message("user", "Hi", (CALL,)),)),
            replace(plain, messages=(Message("user", "Hi", (), "call_7"),)),
            replace(plain, tools=(HALVE,)),
            replace(plain, tools=(HALVE,), tool_choice="none"),
        ]
        keys = {digest(request_key(request)) for request in [plain, *others]}
        assert len(keys) == len(others) + 1


class TestRecords:
    def test_tool_calls_survive_and_images_become_descriptions(self) -> None:
        request = Request((Message("user", ("Look.", DOT)), *TURNS[1:]), tools=(HALVE,))
        (exchange,) = record_exchange(
            "m", request, Completion("", finish_reason="tool_calls", tool_calls=(CALL,))
        )
        assert Exchange.from_json(json.loads(json.dumps(exchange.to_json()))) == exchange
        assert exchange.messages[0].content == f"Look.\n{DOT.label}"
        assert (exchange.tool_calls, exchange.tools) == ((CALL,), ("halve",))
        assert 'halve({"a": 8})' in str(exchange)


class TestWire:
    @pytest.mark.parametrize(
        ("found", "expected"),
        [
            (None, ()),
            ("text", ()),
            ([{"function": {"name": "f", "arguments": "{}"}}], (ToolCall("call_1", "f", "{}"),)),
            (
                [{"id": 3, "function": {"name": "f", "arguments": {"a": 1}}}],
                (ToolCall("call_1", "f", '{"a": 1}'),),
            ),
            ([{"id": "x", "function": {"name": ""}}, {"id": "y"}], ()),
        ],
    )
    def test_malformed_calls_of_servers(
        self, found: object, expected: tuple[ToolCall, ...]
    ) -> None:
        assert calls_from_json(found) == expected

    def test_vllm_sends_tools_and_reads_calls(self) -> None:
        request = Request(TURNS, tools=(HALVE,))
        sent = vllm_api.body(request, "m", {})
        assert sent["tools"] == tools_to_json([HALVE])
        calls = [{"id": "c", "type": "function", "function": {"name": "halve", "arguments": "{}"}}]
        answer: Mapping[str, Any] = {
            "choices": [
                {"finish_reason": "tool_calls", "message": {"content": None, "tool_calls": calls}}
            ]
        }
        found, _ = vllm_api.completion(request, answer, cp.ext.Usage(1, 9, 9))
        assert (found.text, found.finish_reason) == ("", "tool_calls")
        assert found.tool_calls == (ToolCall("c", "halve", "{}"),)

    def test_the_bound_of_a_prompt_covers_tools_calls_and_images(self) -> None:
        plain = max_prompt_tokens(Request((TURNS[0],)))
        full = max_prompt_tokens(
            Request((Message("user", ("Half of 8?", DOT)), *TURNS[1:]), tools=(HALVE,))
        )
        assert full > plain + 50_000 + len(json.dumps(tools_to_json([HALVE])))


class TestTemplates:
    def test_calls_and_other_texts_are_separated(self) -> None:
        call = '<tool_call>\n{"name": "halve", "arguments": {"a": %d}}\n</tool_call>'
        text = f"One. {call % 8} <tool_call>no JSON</tool_call> Two. {call % 4} <tool_call>"
        rest, calls = read_calls(text)
        assert rest == "One.  <tool_call>no JSON</tool_call> Two.  <tool_call>"
        assert [(call.id, call.arguments) for call in calls] == [
            ("call_1", '{"a": 8}'),
            ("call_2", '{"a": 4}'),
        ]

    @pytest.mark.parametrize("text", ["<tool_call>" + " " * 200_000, "<tool_call>" * 200_000])
    def test_a_call_that_does_not_end_is_read_in_linear_time(self, text: str) -> None:
        assert read_calls(text) == (text, ())


class TestToolText:
    request = Request((Message("system", "Be brief."), *TURNS), tools=(HALVE,))

    def test_the_written_call_is_repeated_verbatim(self) -> None:
        raw = '{"tool":  "halve", "arguments": {"a":8}}'
        found = from_text(self.request, Completion(raw))
        assert found.tool_calls == (ToolCall("call_1", "halve", '{"a": 8}'),)
        later = Request(
            (TURNS[0], Message("assistant", found.text, found.tool_calls), TURNS[2]), tools=(HALVE,)
        )
        assert to_text(later).messages[1].text == raw

    def test_the_schema_allows_calls_and_answers_only(self) -> None:
        from jsonschema import Draft202012Validator

        nested = {
            "type": "object",
            "properties": {"p": {"$ref": "#/$defs/Point"}},
            "$defs": {
                "Point": {
                    "type": "object",
                    "properties": {"x": {"type": "integer"}},
                    "required": ["x"],
                }
            },
        }
        tools = (HALVE, ToolSpec("plot", "Plot.", json.dumps(nested)))
        answer = AnswerFormat(
            schema=json.dumps({"$defs": {"P": {"type": "integer"}}, "$ref": "#/$defs/P"})
        )
        sent = to_text(Request((TURNS[0],), tools=tools, format=answer))
        assert sent.format is not None
        check = Draft202012Validator(json.loads(sent.format.schema))
        valid = [
            {"tool": "halve", "arguments": {"a": 1}},
            {"tool": "plot", "arguments": {"p": {"x": 1}}},
            {"answer": 4},
        ]
        wrong = [
            {"tool": "halve", "arguments": {}},
            {"tool": "plot", "arguments": {"p": {"x": "1"}}},
            {"tool": "other", "arguments": {}},
            {"answer": "4"},
            {"answer": 4, "tool": "halve"},
        ]
        assert all(map(check.is_valid, valid))
        assert not any(map(check.is_valid, wrong))

    @given(st.text())
    def test_any_text_is_read(self, text: str) -> None:
        found = from_text(self.request, Completion(text))
        assert (
            found.text == text
            or found.text in json.dumps(text)
            or found.text in text
            or found.tool_calls
        )

    @given(
        st.recursive(
            st.none() | st.integers() | st.text(),
            lambda s: st.dictionaries(st.text(), s),
            max_leaves=5,
        )
    )
    def test_arguments_survive(self, value: object) -> None:
        raw = json.dumps({"tool": "f", "arguments": {"v": value}}, ensure_ascii=False)
        (call,) = from_text(self.request, Completion(raw)).tool_calls
        assert json.loads(call.arguments) == {"v": value}
