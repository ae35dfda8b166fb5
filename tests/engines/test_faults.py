"""With any server fault, the meter counts at least the server's bill, limits hold, and the run continues."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from chaos import server as chaos
from chaos.server import Bill, Fault, FaultyServer
from compound import LLM, Executor, Input, System
from compound.core.errors import BudgetExhausted, CallError, QuotaExhausted, TransientError
from compound.core.security.sanitize import HIDDEN
from compound.engines.litellm import LiteLLMEngine
from compound.engines.remote import max_answer_bytes
from compound.engines.vllm.engine import VLLMEngine
from compound.execution.budget import Budget, Meter
from compound.execution.trace import Trace, to_json
from compound.ext import Completion, Engine, Message, Request, Usage

pytestmark = pytest.mark.filterwarnings("ignore:Item 'summary' on TypedDict:UserWarning")

KEY = "sk-a-key-of-these-tests-1234"
KINDS = ("litellm", "vllm", "hosted")  # hosted: litellm's own HTTP client, and not that of openai
INSTANT = [f for f in Fault if f not in {*chaos.SLOW, Fault.QUOTA, *chaos.LIMITED}]
BY_REQUEST = [
    *(Fault.UNAUTHORIZED, Fault.FORBIDDEN, Fault.NOT_FOUND),
    *(Fault.CONTROL_IN_ERROR, Fault.KEY_IN_ERROR),
]


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", KEY)


def engine(kind: str, server: FaultyServer, **settings: Any) -> Engine:
    if kind == "vllm":
        return VLLMEngine("tiny", api_base=server.url, api_key_env="TINY_KEY", **settings)
    provider = "openai" if kind == "litellm" else "hosted_vllm"
    settings = {"price": server.prices, **settings}
    return LiteLLMEngine(
        f"{provider}/tiny", api_base=server.url, api_key_env="TINY_KEY", **settings
    )


def request(text: str = "what is 4", **settings: Any) -> Request:
    return Request((Message("user", text),), max_tokens=16, **settings)


def ask(lm: Engine, what: Request | None = None) -> Completion:
    async def run() -> Completion:
        try:
            return await lm.generate(what or request())
        finally:
            await lm.aclose()

    return asyncio.run(run())


async def several(
    lm: Engine, meter: Meter, calls: int, retries: int = 0
) -> list[Trace | BaseException]:
    llm = LLM("llm", prompt="Say only the number:", max_tokens=16, retries=retries)
    system = System("s", outputs={"y": llm(q=Input("q"))}, lm="m")

    async def no_wait(_: float) -> None:
        await asyncio.sleep(0)

    executor = Executor({"m": lm}, meter=meter, sleep=no_wait, on_notice=lambda _: None)
    try:
        runs = [executor.run(system, {"q": f"what is {i}"}) for i in range(calls)]
        return await asyncio.gather(*runs, return_exceptions=True)
    finally:
        await executor.aclose()


def covers(meter: Usage, bill: Bill) -> bool:
    return (
        meter.calls >= bill.calls
        and meter.prompt_tokens >= bill.prompt_tokens
        and meter.completion_tokens >= bill.completion_tokens
        and meter.cost >= bill.cost - 1e-12
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", INSTANT)
def test_the_meter_counts_at_least_what_the_server_bills(fault: Fault, kind: str) -> None:
    if fault is Fault.BOMB and kind == "hosted":
        pytest.skip("the same transport as litellm's")
    with FaultyServer(1.0, [fault]) as server:
        lm, meter = engine(kind, server), Meter()
        (trace,) = asyncio.run(several(lm, meter, 1))
        assert isinstance(trace, Trace)
        assert server.requests == 1, "nothing is sent twice behind the executor's back"
        billed = server.billed if kind != "vllm" else Bill(*_without_cost(server.billed))
        assert covers(meter.usage, billed)
        assert covers(trace.usage, billed)
    if fault in BY_REQUEST or fault in {Fault.UNAVAILABLE, Fault.OVERLOADED}:
        assert meter.usage == Usage(), "a refused request costs nothing"
    for text in (str(trace.outputs.get("y", "")), trace.failure.message if trace.failure else ""):
        assert KEY not in text
        assert "\x1b" not in text
        text.encode()
    json.dumps(to_json(trace), ensure_ascii=False).encode()


def _without_cost(bill: Bill) -> tuple[int, int, int]:
    return bill.calls, bill.prompt_tokens, bill.completion_tokens


@pytest.mark.parametrize("kind", ["litellm", "vllm"])
def test_an_unsent_request_costs_nothing(kind: str) -> None:
    with FaultyServer() as gone:
        pass
    meter = Meter()
    (trace,) = asyncio.run(several(engine(kind, gone), meter, 1))
    assert isinstance(trace, Trace)
    assert trace.failure is not None
    assert trace.failure.kind == "transient"
    assert meter.usage == Usage()


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.4])
@pytest.mark.parametrize("limit", ["cost", "tokens", "calls"])
def test_no_limit_is_exceeded_by_what_the_server_bills(rate: float, limit: str) -> None:
    faults = [
        f for f in (*chaos.TRANSIENT, *chaos.MISCOUNTED, *chaos.EMPTY) if f not in chaos.LIMITED
    ]
    limits = {"cost": Budget(cost=0.0030), "tokens": Budget(tokens=2600), "calls": Budget(calls=13)}
    with FaultyServer(rate, faults, seed=3) as server:
        meter = Meter(limits[limit])
        found = asyncio.run(several(engine("litellm", server, concurrency=4), meter, 20, retries=2))
        billed = server.billed
    assert {type(each) for each in found} <= {Trace, BudgetExhausted}
    assert covers(meter.usage, billed)
    spent = {"cost": billed.cost, "tokens": billed.tokens, "calls": billed.calls}[limit]
    most = getattr(meter.budget, limit)
    assert 0 < spent <= most
    counted = {"cost": meter.usage.cost, "tokens": meter.usage.tokens, "calls": meter.usage.calls}[
        limit
    ]
    assert counted <= most + 1e-12
    if not rate:
        assert counted == pytest.approx(spent)


@pytest.mark.parametrize("kind", ["litellm", "vllm"])
@pytest.mark.parametrize("fault", [Fault.NEGATIVE_USAGE, Fault.HUGE_USAGE])
def test_impossible_usage_is_corrected_and_named_once(fault: Fault, kind: str) -> None:
    with FaultyServer(1.0, [fault]) as server:
        notes: list[str] = []
        meter = Meter()
        system = System(
            "s",
            outputs={"y": LLM("llm", prompt="only the number", max_tokens=16)(q=Input("q"))},
            lm="m",
        )
        executor = Executor({"m": engine(kind, server)}, meter=meter, on_notice=notes.append)

        async def thrice() -> list[Trace]:
            try:
                return [await executor.run(system, {"q": f"{i}"}) for i in range(3)]
            finally:
                await executor.aclose()

        traces = asyncio.run(thrice())
    assert [trace.outputs["y"] for trace in traces] == ["0", "1", "2"]
    assert len(notes) == 1
    assert notes[0].startswith("m reports impossible usage (prompt_tokens")
    assert meter.incidents["usage_corrected"] == 3
    assert meter.usage.completion_tokens == 48


@pytest.mark.parametrize("kind", ["litellm", "vllm"])
def test_usage_that_a_server_leaves_out_counts_with_the_worst_case(kind: str) -> None:
    with FaultyServer(1.0, [Fault.NO_USAGE]) as server:
        lm = engine(kind, server)
        assert ask(lm).usage == lm.worst_case(request())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fault", "failure", "message"),
    [
        (Fault.NULL_CONTENT, "empty", "returned an answer without text"),
        (Fault.REFUSAL, "refusal", "refused: I cannot help with that."),
        (
            Fault.TOOL_CALLS,
            "empty",
            "called a tool instead of answering; the request declared no tools",
        ),
        (Fault.CONTENT_FILTER, "", "."),
    ],
)
def test_an_answer_without_text_is_a_failed_call_with_its_own_kind(
    fault: Fault, failure: str, message: str, kind: str
) -> None:
    with FaultyServer(1.0, [fault]) as server, pytest.raises(CallError, match=message) as caught:
        ask(engine(kind, server))
    assert not failure or caught.value.kind == failure
    assert caught.value.charged is not None
    assert caught.value.charged.completion_tokens == 1, "what the server says it billed"


@pytest.mark.usefixtures("without_reports")
def test_a_run_that_ended_without_credit_continues_when_there_is_some(tmp_path: Path) -> None:
    with FaultyServer(first=[None] * 5 + [Fault.QUOTA]) as server:
        with pytest.raises(QuotaExhausted):
            optimized(server, tmp_path)
        result = optimized(server, tmp_path)
    assert result.before.failed == 0


@pytest.mark.parametrize("kind", ["litellm", "vllm"])
@pytest.mark.parametrize("fault", chaos.OVERSIZED)
def test_an_answer_that_is_too_large_is_cut_off_and_says_so(fault: Fault, kind: str) -> None:
    with FaultyServer(1.0, [fault]) as server, pytest.raises(TransientError) as caught:
        ask(engine(kind, server))
    assert "the answer is longer than" in str(caught.value)
    assert "bytes, the maximum that max_tokens allows" in str(caught.value)
    assert max_answer_bytes(request()) < 2_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_a_server_sends_back_is_removed(kind: str) -> None:
    with FaultyServer(first=[Fault.KEY_IN_ANSWER, Fault.KEY_IN_ERROR]) as server:

        async def twice() -> list[Any]:
            lm, meter = engine(kind, server, concurrency=1), Meter()
            return await several(lm, meter, 2)

        answered, failed = asyncio.run(twice())
    assert server.served[0].key == KEY
    assert answered.outputs["y"] == f"0 {HIDDEN}"
    assert HIDDEN in failed.failure.message


def optimized(server: FaultyServer, folder: Path, **settings: Any) -> cp.Result:
    llm = cp.LLM("llm", prompt=cp.Text("Say the number."), max_tokens=16, retries=2)
    system = cp.System("chaotic", outputs={"y": llm(q=cp.Input("q", str))}, lm="m")

    def rows(kind: str, n: int) -> list[dict[str, str]]:
        return [{"q": f"{kind} {i}", "y": str(i)} for i in range(n)]

    data = cp.Dataset.of(train=rows("learn", 6), valid=rows("check", 8), test=rows("prove", 4))
    lm = engine("vllm", server, concurrency=4)
    given = {
        "method": "random",
        "candidates": 2,
        "minibatch": 3,
        "alpha": 0.2,
        "valid_size": None,
        **settings,
    }
    return cp.optimize(
        system,
        data,
        cp.metrics.exact_match("y"),
        budget=given.pop("budget", cp.Budget(system_runs=40)),
        run_dir=folder / "run",
        engines={"m": lm},
        progress=False,
        **given,
    )


@pytest.mark.parametrize("fault", [Fault.SURROGATE, Fault.CONTROL, Fault.KEY_IN_ANSWER])
def test_a_run_survives_control_and_surrogate_characters(fault: Fault, tmp_path: Path) -> None:
    with FaultyServer(0.5, [fault], seed=1) as server:
        result = optimized(server, tmp_path)
    assert result.before.failed == 0
    for path in (tmp_path / "run").rglob("*"):
        if path.suffix in {".json", ".jsonl", ".md", ".html"}:
            text = path.read_text("utf-8")
            assert KEY not in text
            assert "\x1b" not in text
            assert "\x00" not in text
    assert KEY.encode() not in (tmp_path / "run" / "cache.sqlite").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", chaos.SLOW)
def test_the_time_limit_of_a_try_covers_the_whole_answer(fault: Fault, kind: str) -> None:
    with FaultyServer(1.0, [fault], drip=(0.05, 10_000), stall=60.0) as server:
        lm, meter = engine(kind, server, timeout=0.4), Meter()
        started = time.monotonic()
        (trace,) = asyncio.run(several(lm, meter, 1))
        assert time.monotonic() - started < 15, "a guard: the server would take minutes"
        assert isinstance(trace, Trace)
        assert trace.failure is not None
        assert "did not answer completely within 0.4 s" in trace.failure.message
        assert covers(meter.usage, Bill(*_without_cost(server.billed)))
    assert meter.incidents["lost"] == 1


@pytest.mark.parametrize("kind", ["litellm", "vllm"])
def test_the_minutes_of_a_run_end_the_calls_in_flight(kind: str) -> None:
    with FaultyServer(1.0, [Fault.STALL], stall=60.0) as server:
        lm = engine(kind, server, timeout=50.0)
        meter = Meter(Budget(minutes=0.02))
        started = time.monotonic()
        found = asyncio.run(several(lm, meter, 4))
        assert time.monotonic() - started < 15, "a guard: the time limit of the engine is 50 s"
        assert all(isinstance(each, BudgetExhausted) for each in found)
        assert covers(meter.usage, Bill(*_without_cost(server.billed)))
        with pytest.raises(BudgetExhausted):
            raise asyncio.run(several(lm, meter, 1))[0]  # type: ignore[misc]


def test_a_run_whose_minutes_are_over_ends_with_a_result(tmp_path: Path) -> None:
    """Regression test: the run ended only when its slowest call ended."""
    stalled = [None] * 10 + [Fault.STALL] * 90
    with FaultyServer(first=stalled, stall=60.0) as server:
        started = time.monotonic()
        result = optimized(server, tmp_path, budget=cp.Budget(minutes=0.05))
        assert time.monotonic() - started < 30, "a guard: the time limit of a try is 120 s"
    assert result.before.failed == 0
    state = json.loads((tmp_path / "run" / "checkpoint.json").read_text())["state"]["search"]
    assert "minutes" in state["stopped"]


def test_the_report_counts_what_went_wrong_at_the_server(tmp_path: Path) -> None:
    faults = [Fault.RATE_LIMIT] * 3 + [None] * 4 + [Fault.RESET, Fault.NEGATIVE_USAGE]
    with FaultyServer(first=faults, retry_after="0.05") as server:
        result = optimized(server, tmp_path)
    assert result.before.failed == 0
    assert (
        "3 requests rejected by a rate limit and retried, 1 requests without an answer"
        in result.report
    )
    assert "1 answers with invalid usage, corrected" in result.report
    assert "incidents" not in (tmp_path / "run" / "events.jsonl").read_text(), (
        "they depend on the attempt"
    )
