"""Native tool calls and images over the wire: litellm against a local server, and chat templates with tools."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.core.engine import AnswerFormat, Message, Request, ToolSpec
from recording_server import RecordingServer

ROOT = Path(__file__).parents[3]
TEMPLATE = (
    "{% if tools %}<|system|>Tools: {{ tools | tojson }} Call as <tool_call>JSON</tool_call><|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ADD = ToolSpec(
    "add", "Add two numbers.", '{"type": "object", "properties": {"a": {"type": "integer"}}}'
)


@cp.tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Server(RecordingServer):
    def __init__(self) -> None:
        super().__init__()
        self.replies: list[dict[str, Any]] = []
        self.headers = {"content-type": "application/json"}

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(request.body) for request in self.received]

    def respond(self) -> bytes:
        message = {"role": "assistant", "content": None, **self.replies[len(self.received) - 1]}
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        document = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "tiny",
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25},
        }
        return json.dumps(document).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.mark.filterwarnings("ignore:Item 'summary' on TypedDict:UserWarning")
class TestLiteLLM:
    def engine(self, server: Server, **given: Any) -> cp.engines.LiteLLM:
        pytest.importorskip("litellm")
        return cp.engines.LiteLLM("openai/tiny", api_base=f"{server.url}/v1", price=(0, 0), **given)

    def test_an_agent_calls_tools_natively(self, server: Server) -> None:
        calls = [
            {
                "id": f"c{n}",
                "type": "function",
                "function": {"name": "add", "arguments": f'{{"a": {n}, "b": 1}}'},
            }
            for n in range(2)
        ]
        server.replies = [{"tool_calls": calls}, {"content": "1 and 2"}]
        agent = cp.Agent("agent", [add])
        system = cp.System("s", {"answer": agent(question=cp.Input("question"))}, lm="m")
        engine = self.engine(server, native_tools=True)
        trace = cp.run(system, {"question": "0 + 1, 1 + 1"}, engines={"m": engine})
        assert trace.outputs == {"answer": "1 and 2"}
        first, second = server.documents
        assert first["tools"][0]["function"]["name"] == "add"
        assert first["tool_choice"] == "auto"
        assert [m["role"] for m in second["messages"]] == ["user", "assistant", "tool", "tool"]
        assert [m["content"] for m in second["messages"][2:]] == ["1", "2"]
        assert (
            second["messages"][1]["tool_calls"][1]["id"]
            == second["messages"][3]["tool_call_id"]
            == "c1"
        )

    def test_without_native_tools_they_are_text(self, server: Server) -> None:
        server.replies = [{"content": '{"answer": "3"}'}]
        agent = cp.Agent("agent", [add])
        system = cp.System("s", {"answer": agent(question=cp.Input("question"))}, lm="m")
        engine = self.engine(server, native_tools=False)
        assert cp.run(system, {"question": "1 + 2"}, engines={"m": engine}).outputs == {
            "answer": "3"
        }
        assert "tools" not in server.documents[0]
        assert "- add: Add two numbers." in server.documents[0]["messages"][0]["content"]

    def test_images_are_sent_as_data(self, server: Server) -> None:
        server.replies = [{"content": "a dot"}]
        dot = cp.Image.from_bytes(b"GIF89a-dot")
        look = cp.LLM("look", prompt="Look.")(photo=cp.Input("photo", cp.Image))
        engine = self.engine(server, takes_images=True)
        cp.run(cp.System("s", {"answer": look}, lm="m"), {"photo": dot}, engines={"m": engine})
        text, image, _cue = server.documents[0]["messages"][0]["content"]
        assert "[image 1]" in text["text"]
        assert image == {"type": "image_url", "image_url": {"url": dot.data_url}}

    def test_the_list_of_models_decides_by_default(self) -> None:
        pytest.importorskip("litellm")
        assert cp.engines.LiteLLM("openai/gpt-4o").native_tools
        assert cp.engines.LiteLLM("openai/gpt-4o").takes_images
        assert not cp.engines.LiteLLM("openai/unknown-model").takes_images

    def test_the_setting_changes_cache_keys(self) -> None:
        names = {
            cp.engines.LiteLLM("openai/gpt-4o", native_tools=given).name
            for given in (None, True, False)
        }
        assert len(names) == 3


class TestTemplates:
    def test_the_template_decides(self, model: Path) -> None:
        assert not cp.engines.Transformers(str(model)).native_tools
        assert cp.engines.Transformers(str(model), chat_template=TEMPLATE).native_tools
        assert not cp.engines.Transformers(
            str(model), chat_template=TEMPLATE, native_tools=False
        ).native_tools

    def test_the_model_reads_the_tools_and_earlier_calls(self, model: Path) -> None:
        engine = cp.engines.Transformers(str(model), dtype="float32", chat_template=TEMPLATE)
        call = cp.ext.ToolCall("call_1", "add", '{"a": 1}')
        turns = (
            Message("user", "1 + 1?"),
            Message("assistant", "", (call,)),
            Message("tool", "2", tool_call_id="call_1"),
        )

        async def ask(*requests: Request) -> list[cp.ext.Completion]:
            try:
                return [await engine.generate(request) for request in requests]
            finally:
                await engine.aclose()

        plain, full = asyncio.run(
            ask(
                Request((turns[0],), max_tokens=4, want_tokens=True),
                Request(turns, max_tokens=4, want_tokens=True, tools=(ADD,)),
            )
        )
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        assert plain.tokens is not None
        assert full.tokens is not None
        assert "Tools" not in tokenizer.decode(plain.tokens.prompt)
        read = tokenizer.decode(full.tokens.prompt)
        assert '"name": "add"' in read
        assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in read

    def test_a_format_is_enforced_only_where_no_tool_may_be_called(self, model: Path) -> None:
        engine = cp.engines.Transformers(str(model), dtype="float32", chat_template=TEMPLATE)
        request = Request(
            (Message("user", "Is it?"),),
            max_tokens=4,
            format=AnswerFormat(choices=("yes", "no")),
            tools=(ADD,),
        )

        async def ask() -> list[str]:
            try:
                choices = [request, replace(request, tool_choice="none")]
                return [(await engine.generate(each)).text for each in choices]
            finally:
                await engine.aclose()

        free, restricted = asyncio.run(ask())
        assert restricted in {"yes", "no"}
        assert free not in {"yes", "no"}  # the grammar of the answer would exclude every call

    @pytest.mark.slow
    def test_the_first_runs_of_a_process_may_be_concurrent(self, model: Path) -> None:
        """Reading the template and loading the model, in several threads, import transformers at once."""
        code = f"""
import asyncio
import compound as cp
from benchmarks.agents.arithmetic import calculate

agent = cp.Agent("agent", [calculate], max_turns=1, max_tokens=40, output=bool)
system = cp.System("s", {{"answer": agent(question=cp.Input("question"))}}, lm="m")

async def main():
    executor = cp.Executor({{"m": cp.engines.Transformers({str(model)!r}, dtype="float32")}})
    runs = [executor.run(system, {{"question": str(n)}}, example=str(n)) for n in range(12)]
    found = await asyncio.gather(*runs)
    await executor.aclose()
    errors = {{trace.failure.message for trace in found if trace.failure and trace.failure.kind == "error"}}
    assert not errors, errors

asyncio.run(main())
"""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
