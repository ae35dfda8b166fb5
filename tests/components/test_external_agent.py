"""External agents as components: their requests are calls, rewritten, forked, counted, limited and ended."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import time
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import compound as cp
import external_agents
from compound.components.external_agent import ExternalAgent
from compound.core.errors import BudgetExhausted, DeclarationError, RunFailed, TransientError
from compound.core.security.sanitize import remember_secret
from compound.execution.budget import Budget, Meter
from compound.testing import ScriptedLM
from fake_openai import chat, events, fake_openai

pytest.importorskip("fastapi")
TEMPLATE = "You are a geographer of {{place}}. Answer with one word."


NODE = """
let text = ""; for await (const piece of process.stdin) text += piece;
const answer = await fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {
  method: "POST",
  headers: {"content-type": "application/json", authorization: "Bearer " + process.env.OPENAI_API_KEY},
  body: JSON.stringify({model: "m", messages: [{role: "user", content: JSON.parse(text).question}]}),
});
console.log("a line that is no result");
console.log(JSON.stringify({answer: (await answer.json()).choices[0].message.content, length: text.length}));
"""


def prompt(**settings: Any) -> cp.components.AgentPrompt:
    return cp.components.AgentPrompt("geographer", system=cp.Text(TEMPLATE), **settings)


def system(call: Any = external_agents.with_address, **settings: Any) -> cp.System:
    return wired(ExternalAgent("geo", call=call, **{"prompts": [prompt()], **settings}))


def wired(agent: ExternalAgent, **inputs: Any) -> cp.System:
    """Return a system of an agent with all its outputs."""
    node = agent(**(inputs or {"question": cp.Input("question")}))
    several = len(agent.outputs) > 1
    outputs = {name: node[name] if several else node for name in agent.outputs}
    return cp.System(
        "qa", {"answer" if n == "output" else n: o for n, o in outputs.items()}, lm="lm"
    )


def post(base_url: str, api_key: str, body: dict[str, Any]) -> str:
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"}
    url = f"{base_url}/chat/completions"
    return httpx.post(url, json=body, headers=headers, trust_env=False).text


def run(found: cp.System, lm: Any = None, question: str = "Capital?", **settings: Any) -> cp.Trace:
    return cp.run(found, {"question": question}, engines={"lm": lm or echo()}, **settings)


def echo() -> ScriptedLM:
    return ScriptedLM(lambda message: f"<{message}>")


def test_each_request_is_a_call_that_depends_on_the_earlier_answers() -> None:
    trace = run(system())
    assert trace.outputs == {"answer": "<Check: <Capital?>>"}
    assert [call.address for call in trace.calls] == ["geo[0]/geographer", "geo[1]/geographer"]
    assert [call.parents for call in trace.calls] == [(), ("geo[0]/geographer",)]
    assert trace.ends == ("geo[0]/geographer", "geo[1]/geographer")
    assert trace.calls[0].outputs["text"] == "<Capital?>"
    assert "You are a geographer of Peru" in str(trace.calls[0].exchanges[0])
    assert trace.usage.calls == 2
    assert trace.equivalents == 1.0


def test_recognized_requests_are_rewritten_with_the_values_that_vary() -> None:
    lm = echo()
    settings = {"temperature": cp.Float(0, 1, value=0.5), "max_tokens": 7}
    found = system(prompts=[prompt(**settings)]).bind({"geographer.system": "Think of {{place}}!"})
    run(found, lm)
    assert [request.messages[0].content for request in lm.requests] == [
        "Think of Peru!",
        "Think of Chile!",
    ]
    assert [(request.temperature, request.max_tokens) for request in lm.requests] == [(0.5, 7)] * 2


def test_other_requests_are_sent_unchanged_and_counted_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = cp.components.AgentPrompt("planner", system=cp.Text("You plan."))
    lm = echo()
    trace = run(system(prompts=[other]), lm)
    assert len(trace.calls_of("geo_other")) == 2
    assert trace.calls_of("planner") == ()
    assert lm.requests[0].messages[0].content == external_agents.SYSTEM.format(place="Peru")
    (warning,) = caplog.messages  # once, not for each request
    assert "no prompt recognizes, starting with 'You are a geographer of Peru" in warning


def test_an_async_agent_may_send_several_requests_at_once() -> None:
    trace = run(
        system(external_agents.with_async_client, prompts=[]), ScriptedLM(lambda message: "yes")
    )
    assert trace.outputs == {"answer": "yes|yes|yes"}
    assert [call.address for call in trace.calls] == [f"geo[{i}]/geo_other" for i in range(3)]


def test_values_of_other_classes_are_passed_to_a_process_and_back() -> None:
    agent = ExternalAgent(
        "bill",
        call=external_agents.later,
        output={"day": date, "cost": Decimal, "days": set[date]},
        isolation="run",
        prompts=[prompt()],
    )
    found = wired(agent, day=cp.Input("day", date), cost=cp.Input("cost", Decimal))
    given = {"day": date(2024, 1, 2), "cost": Decimal("1.25")}
    trace = cp.run(found, given, engines={"lm": echo()})
    assert trace.outputs == {
        "day": date(2024, 1, 3),
        "cost": Decimal("2.50"),
        "days": {date(2024, 1, 2)},
    }


@pytest.mark.parametrize("isolation", ["worker", "run"])
def test_a_function_that_reads_the_environment_has_a_process_of_its_own(isolation: str) -> None:
    agent = ExternalAgent(
        "geo",
        call=external_agents.from_environment,
        isolation=isolation,  # type: ignore[arg-type]
        prompts=[prompt()],
        output={"answer": str, "process": str},
    )
    found = wired(agent)

    async def twice() -> list[cp.Trace]:
        executor = cp.Executor({"lm": echo()})
        return [await executor.run(found, {"question": str(i)}) for i in range(2)]

    traces = asyncio.run(twice())
    assert [trace.outputs.get("answer") for trace in traces] == ["<0>", "<1>"]
    processes = {trace.outputs["process"] for trace in traces}
    assert len(processes) == (1 if isolation == "worker" else 2)
    assert str(os.getpid()) not in processes
    assert not any(_is_running(int(str(process))) for process in processes)


def _is_running(process: int) -> bool:
    try:
        state = (
            Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        )
    except OSError:
        return False
    return state != "Z"


def test_concurrent_runs_have_processes_and_requests_of_their_own() -> None:
    output = {"answer": str, "process": str}
    found = system(external_agents.from_environment, output=output, concurrency=2, prompts=[])

    async def all_at_once() -> list[cp.Trace]:
        executor = cp.Executor({"lm": ScriptedLM(lambda message: f"<{message}>", latency=0.05)})
        return list(
            await asyncio.gather(*(executor.run(found, {"question": str(i)}) for i in range(4)))
        )

    traces = asyncio.run(all_at_once())
    assert [trace.outputs["answer"] for trace in traces] == [f"<{i}>" for i in range(4)]
    assert [call.exchanges[0].messages[-1].content for t in traces for call in t.calls] == list(
        "0123"
    )


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_program_in_another_language_reads_and_writes_json(tmp_path: Path) -> None:
    (tmp_path / "agent.mjs").write_text(NODE)
    agent = ExternalAgent(
        "geo", command=["node", "agent.mjs"], folder=tmp_path, output={"answer": str, "length": int}
    )
    trace = run(wired(agent))
    assert trace.outputs == {"answer": "<Capital?>", "length": len('{"question": "Capital?"}')}
    assert [call.address for call in trace.calls] == ["geo[0]/geo_other"]


def test_the_environment_has_no_keys_but_those_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANTHROPIC_API_KEY", "DATABASE_URL", "AGENT_SETTING"):
        monkeypatch.setenv(name, "canary")
    found = system(external_agents.environment_of, prompts=[], env=["AGENT_SETTING"])
    names = str(run(found).outputs["answer"]).split()
    assert "AGENT_SETTING" in names
    assert {"OPENAI_BASE_URL", "OPENAI_API_KEY"} <= set(names)
    assert not {"ANTHROPIC_API_KEY", "DATABASE_URL"} & set(names)


def test_an_error_of_the_agent_fails_the_run_without_its_key() -> None:
    trace = run(system(external_agents.failing, prompts=[]), check=False)
    assert trace.failure is not None
    assert "ValueError: the key is [key removed]" in trace.failure.message
    assert "external_agents.py:" in trace.failure.message


def test_a_process_that_ends_is_replaced_for_the_next_run() -> None:
    found = system(external_agents.ending, prompts=[])
    for _ in range(2):
        with pytest.raises(RunFailed, match="program exited with status 3: the last words"):
            run(found)


def test_a_function_receives_instances_of_the_classes_that_it_annotates() -> None:
    agent = ExternalAgent("agent", call=external_agents.typed)
    place, day = cp.Input("place", external_agents.Place), cp.Input("day", date)
    inputs = {"place": external_agents.Place(name="Lima"), "day": date(2024, 1, 2)}
    trace = cp.run(wired(agent, place=place, day=day), inputs, engines={"lm": echo()})
    assert trace.outputs == {"answer": "Place Lima, date 2024-01-02, 3"}


def test_an_input_without_a_json_form_is_named() -> None:
    agent = ExternalAgent("agent", call=external_agents.repeating)
    found = wired(agent, question=cp.Input("question", float))
    with pytest.raises(RunFailed, match="an input of the agent cannot be written as JSON: nan and"):
        cp.run(found, {"question": math.nan}, engines={"lm": echo()})


@pytest.mark.slow
def test_an_agent_is_ended_with_its_children_at_its_time_limit(tmp_path: Path) -> None:
    found = system(external_agents.waiting, prompts=[], timeout=12.0)
    trace = run(found, question=str(tmp_path / "child"), check=False)
    assert trace.failure is not None
    assert trace.failure.kind == "timeout"
    child = int((tmp_path / "child").read_text())
    ends = time.monotonic() + 120
    while _is_running(child):
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_a_process_that_ended_while_it_was_idle_is_replaced() -> None:
    async def both() -> None:
        executor = cp.Executor({"lm": echo()})
        found = system(external_agents.process_of, prompts=[])
        first, second = [await executor.run(found, {"question": "?"}) for _ in range(2)]
        assert first.outputs == second.outputs
        os.kill(process := int(str(first.outputs["answer"])), signal.SIGKILL)
        for _ in range(1000):  # until its status was read
            if os.access(f"/proc/{process}", os.F_OK):
                await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        third = await executor.run(found, {"question": "?"})
        assert third.failure is None
        assert third.outputs != first.outputs
        await executor.aclose()

    asyncio.run(both())


def test_the_time_of_a_request_is_not_counted() -> None:
    slow = ScriptedLM(lambda message: "yes", latency=1.0)
    assert run(system(timeout=0.9), slow).outputs == {"answer": "yes"}


def test_a_request_beyond_the_budget_gets_an_error_and_ends_the_run(tmp_path: Path) -> None:
    async def once() -> Meter:
        meter = Meter(Budget(calls=3))
        executor = cp.Executor({"lm": echo()}, meter=meter)
        with pytest.raises(BudgetExhausted, match="above the limit of 3"):
            await executor.run(
                system(external_agents.insisting), {"question": str(tmp_path / "told")}
            )
        return meter

    assert asyncio.run(once()).usage.calls == 3
    first = (tmp_path / "told").read_text().splitlines()[0]
    assert first.startswith("429")
    assert "limit of 3" in first


def test_a_failed_request_is_an_error_for_the_agent_which_decides() -> None:
    lm = ScriptedLM(lambda message: ValueError("the model broke"))
    trace = run(system(), lm, check=False)
    assert trace.failure is not None
    assert "the model broke" in trace.failure.message
    assert [call.address for call in trace.calls] == ["geo[0]/geographer", "geo"]


def test_a_fork_repeats_the_agent_and_reuses_the_calls_before_the_change() -> None:
    async def fork() -> tuple[cp.Trace, cp.Trace, int]:
        lm = echo()
        executor = cp.Executor({"lm": lm})
        trace = await executor.run(system(), {"question": "Capital?"})
        answer = {**trace.calls[0].outputs, "text": "Lima"}
        answer["response"] = json.loads(
            json.dumps(answer["response"]).replace("<Capital?>", "Lima")
        )
        first = await executor.fork(system(), trace, "geo[0]/geographer", outputs=answer)
        before = len(lm.requests)
        second = await executor.fork(system(), trace, "geo[1]/geographer", resample=1)
        return first, second, len(lm.requests) - before

    first, second, asked = asyncio.run(fork())
    assert first.outputs == {"answer": "<Check: Lima>"}
    assert [call.reused for call in first.calls] == [True, False]
    assert [call.reused for call in second.calls] == [True, False]
    assert asked == 1
    assert second.outputs == {"answer": "<Check: <Capital?>>"}


def test_upstream_keys_reach_neither_agent_nor_records(monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "sk-canary-of-the-upstream-0123456789"
    monkeypatch.setenv("UPSTREAM_KEY", canary)
    seen: list[str] = []

    def leaking(path: str, document: dict[str, Any]) -> tuple[int, str, bytes]:
        if len(seen) == 0:
            seen.append("error")
            return (
                400,
                "application/json",
                json.dumps({"error": {"message": f"bad key {canary}"}}).encode(),
            )
        if document.get("stream"):
            chunk = {"choices": [{"index": 0, "delta": {"content": f"key {canary}"}}]}
            return 200, "text/event-stream", events(chunk)
        return 200, "application/json", chat({"content": f"key {canary}"})

    def agent(question: str, base_url: str, api_key: str) -> str:
        import openai

        texts = []
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for stream in (False, False, True):
                try:
                    made: Any = client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": "?"}], stream=stream
                    )
                    texts.append(str([*made] if stream else made))
                except openai.APIStatusError as error:
                    texts.append(f"{error.status_code} {error.message}")
        assert canary not in api_key
        return "\n".join(texts)

    remember_secret(canary)
    with fake_openai(leaking) as fake:
        engine = cp.engines.OpenAI("up", api_base=fake.url, api_key_env="UPSTREAM_KEY")
        trace = run(system(agent, prompts=[]), engine)
        assert set(fake.keys) == {f"Bearer {canary}"}
    text = str(trace.outputs) + repr(trace) + "".join(map(str, trace.calls[0].exchanges))
    from compound.execution.trace import to_json

    assert canary not in text + json.dumps(to_json(trace))
    assert text.count("[key removed]") >= 3


def test_tools_images_and_unknown_fields_pass_through_untouched() -> None:
    tool_call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }

    def answer(path: str, document: dict[str, Any]) -> tuple[int, str, bytes]:
        return (
            200,
            "application/json",
            chat({"content": None, "tool_calls": [tool_call]}, "tool_calls"),
        )

    body = {
        "model": "agents-own",
        "vendor_option": {"deep": [1, None, "ü"]},
        "tools": [
            {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        ],
        "messages": [
            {"role": "system", "content": external_agents.SYSTEM.format(place="Peru")},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
                ],
            },
        ],
    }

    def agent(question: str, base_url: str, api_key: str) -> str:
        return post(base_url, api_key, body)

    with fake_openai(answer) as fake:
        trace = run(system(agent), cp.engines.OpenAI(api_base=fake.url))
        sent = fake.requests[0]
    assert sent == {**body, "max_completion_tokens": 4096}  # a limit that the budget can reserve
    assert json.loads(str(trace.outputs["answer"])) == json.loads(
        chat({"content": None, "tool_calls": [tool_call]}, "tool_calls")
    )
    assert trace.calls[0].component == "geographer"
    assert 'add({"a": 1})' in str(trace.calls[0].outputs["text"])
    assert (trace.usage.prompt_tokens, trace.usage.completion_tokens) == (5, 3)


def test_the_events_of_an_upstream_pass_unchanged() -> None:
    tool = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    stream = events(
        {
            "id": "u",
            "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Li"}}],
            "odd": 1,
        },
        {"id": "u", "choices": [{"index": 0, "delta": {"content": "ma"}}]},
        {"id": "u", "choices": [{"index": 0, "delta": {"tool_calls": [tool]}}]},
        {
            "id": "u",
            "choices": [
                {
                    "index": 0,
                    "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
                }
            ],
        },
        {"id": "u", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"id": "u", "choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}},
    )

    def agent(question: str, base_url: str, api_key: str) -> str:
        body: Any = {"messages": [{"role": "user", "content": "?"}], "stream": True}
        if question == "with usage":
            body["stream_options"] = {"include_usage": True}
        return post(base_url, api_key, body)

    with fake_openai(lambda path, document: (200, "text/event-stream", stream)) as fake:
        engine = cp.engines.OpenAI("up", api_base=fake.url)
        without = run(system(agent, prompts=[]), engine)
        trace = run(system(agent, prompts=[]), engine, question="with usage")
        assert [sent["stream_options"] for sent in fake.requests] == [{"include_usage": True}] * 2
    assert str(trace.outputs["answer"]).encode() == stream
    chunks = [line for line in str(without.outputs["answer"]).splitlines() if line]
    assert chunks == [
        line for line in stream.decode().splitlines() if line and '"choices": []' not in line
    ]
    assert without.usage == trace.usage
    assert trace.calls[0].outputs["text"] == "Lima\nf({})"
    assert (trace.usage.prompt_tokens, trace.usage.completion_tokens) == (4, 2)


def test_outputs_are_checked_and_converted() -> None:
    def agent(question: str, base_url: str) -> dict[str, str]:
        return {"answer": "Lima", "count": "three"}

    trace = run(system(agent, output={"answer": str, "count": int}), check=False)
    assert trace.failure is not None
    assert trace.failure.kind == "type"
    assert "'count' must be int, but is 'three'" in trace.failure.message
    found = system(lambda question, base_url: {"wrong": 1}, output={"answer": str})
    assert "must return the fields ['answer']" in str(run(found, check=False).failure)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "exactly one of call and command"),
        ({"call": "a:b", "command": ["x"]}, "exactly one of call and command"),
        ({"command": [""]}, "list of texts"),
        ({"call": lambda question: "", "isolation": "worker"}, "cannot be imported"),
        ({"call": "a:b", "isolation": "thread"}, "the function itself"),
        ({"call": "a:b", "timeout": 0}, "timeout of ExternalAgent must be > 0"),
        ({"call": "a:b", "max_requests": 0}, "max_requests of ExternalAgent must be > 0"),
        ({"call": "a:b", "prompts": [cp.components.AgentPrompt("p", match={})]}, "recognized by"),
        (
            {
                "call": "a:b",
                "prompts": [
                    cp.components.AgentPrompt("p", system="x"),
                    cp.components.AgentPrompt("p", system="y"),
                ],
            },
            "two prompts",
        ),
    ],
)
def test_wrong_declarations_are_refused(settings: Any, words: str) -> None:
    with pytest.raises(DeclarationError, match=words):
        ExternalAgent("geo", **settings)


def test_a_program_that_does_not_exist_is_named() -> None:
    found = wired(ExternalAgent("geo", command=["no-such-program"]))
    with pytest.raises(DeclarationError, match="'no-such-program' cannot be started"):
        run(found)


class _Interrupted(ScriptedLM):
    """An engine whose first stream ends after a word."""

    async def stream(self, request: Any, on_text: Any) -> Any:
        if len(self.requests) == 0:
            self.requests.append(request)
            on_text("Li")
            raise TransientError("the connection was lost")
        return await super().stream(request, on_text)


def test_a_stream_that_has_begun_is_not_repeated() -> None:
    def agent(question: str, base_url: str, api_key: str) -> str:
        body = {"messages": [{"role": "user", "content": "?"}], "stream": True}
        return post(base_url, api_key, body)

    lm = _Interrupted(lambda message: "Lima")
    trace = run(system(agent, prompts=[]), lm)
    text = str(trace.outputs["answer"])
    assert '"content": "Li"' in text
    assert "the connection was lost" in text
    assert "Lima" not in text
    assert len(lm.requests) == 1
    assert trace.calls[0].failure is not None
    assert trace.calls[0].failure.is_transient


def test_a_result_that_is_too_large_does_not_reach_the_next_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from compound.components.gateway import processes

    monkeypatch.setattr(processes, "MAX_OUTPUT", 2000)
    found = system(external_agents.repeating, prompts=[])

    async def runs() -> list[cp.Trace]:
        executor = cp.Executor({"lm": echo()})
        return [await executor.run(found, {"question": size}) for size in ("9000", "3")]

    large, small = asyncio.run(runs())
    assert large.failure is not None
    assert "returned more than" in large.failure.message
    assert small.outputs == {"answer": "xxx"}
