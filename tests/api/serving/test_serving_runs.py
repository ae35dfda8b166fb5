"""Runs over HTTP: typed inputs and outputs, failures by status, batches, streams, limits."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import math
import threading
from collections.abc import Sequence
from decimal import Decimal
from itertools import groupby
from typing import Any, Literal

import httpx
import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel

import compound as cp
from compound.api.serving import service
from compound.api.serving.application import build
from compound.api.serving.settings import ServerSettings
from compound.core.errors import CallError, QuotaExhausted, RateLimited, TransientError
from compound.core.security import sanitize
from compound.testing import ScriptedLM
from served import client_of, qa, served, until

pytest.importorskip("fastapi")


class Address(BaseModel):
    street: str
    number: int


def typed() -> cp.System:
    def describe(
        address: Address, tags: list[str], kind: Literal["short", "long"], score: float
    ) -> str:
        return f"{address.street} {address.number} {tags} {kind} {score}"

    def count(tags: list[str]) -> int:
        return len(tags)

    tags = cp.Input("tags", list[str])
    text = cp.Function("describe", describe)(
        address=cp.Input("address", Address),
        tags=tags,
        kind=cp.Input("kind", Literal["short", "long"]),
        score=cp.Input("score", float),
    )
    return cp.System("typed", {"text": text, "count": cp.Function("count", count)(tags=tags)})


GOOD = {
    "address": {"street": "Jirón", "number": 5},
    "tags": ["a", "b"],
    "kind": "short",
    "score": 1,
}


def sse(text: str) -> list[tuple[str, Any]]:
    """Parse server-sent events."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if lines:
            found.append((lines.get("event", ""), json.loads(lines["data"])))
    return found


def test_a_run_answers_with_outputs_usage_and_identity() -> None:
    with client_of(qa(), ScriptedLM(lambda message: "the Rímac")) as client:
        answer = client.post("/v1/run", json={"inputs": {"question": "Which river?"}})
    assert answer.status_code == 200
    body = answer.json()
    assert body["outputs"] == {"answer": "the Rímac"}
    assert body["usage"]["calls"] == 1
    assert body["configuration"] == qa().configuration.digest
    assert answer.headers["x-run-id"] == body["run_id"]


def test_dates_and_decimals_are_returned_in_their_json_form() -> None:
    day, cost = cp.Input("day", dt.date), cp.Input("cost", Decimal)

    def later(day: dt.date) -> dt.date:
        return day + dt.timedelta(days=1)

    def double(cost: Decimal) -> Decimal:
        return 2 * cost

    system = cp.System(
        "bill",
        {
            "due": cp.Function("later", later)(day=day),
            "cost": cp.Function("double", double)(cost=cost),
        },
    )
    with client_of(system) as client:
        answer = client.post("/v1/run", json={"inputs": {"day": "2024-01-02", "cost": "1.25"}})
    assert answer.json()["outputs"] == {"due": "2024-01-03", "cost": "2.50"}


def test_a_function_that_blocks_does_not_block_the_server() -> None:
    running_function, go = threading.Event(), threading.Event()

    def blocks(question: str) -> str:
        running_function.set()
        go.wait(60)
        return question

    system = cp.System(
        "blocks", {"answer": cp.Function("f", blocks)(question=cp.Input("question"))}
    )
    body = {"inputs": {"question": "?"}}
    with client_of(system, concurrency=1, queue=0, timeout=30) as client:
        found: list[httpx.Response] = []
        first = threading.Thread(
            target=lambda: found.append(client.post("/v1/run", json=body, timeout=60))
        )
        first.start()
        try:
            assert running_function.wait(60)
            assert client.get("/health", timeout=20).status_code == 200
            assert client.post("/v1/run", json=body, timeout=20).status_code == 429
        finally:
            go.set()
            first.join()
        assert found[0].json()["outputs"] == {"answer": "?"}


def test_the_seed_of_a_run_repeats_it_and_is_random_by_default() -> None:
    lm = ScriptedLM(lambda message, rng: str(rng.integers(10**9)))
    with client_of(qa(temperature=1.0), lm) as client:

        def run(**body: Any) -> Any:
            return client.post("/v1/run", json={"inputs": {"question": "?"}, **body}).json()

        first, second = run(), run()
        assert first["outputs"] != second["outputs"]
        assert run(seed=first["seed"])["outputs"] == first["outputs"]


def test_typed_inputs_are_validated_and_typed_outputs_returned() -> None:
    with client_of(typed()) as client:
        answer = client.post("/v1/run", json={"inputs": GOOD})
        assert answer.json()["outputs"] == {"text": "Jirón 5 ['a', 'b'] short 1.0", "count": 2}
        changes: list[tuple[dict[str, Any], str]] = [
            ({"kind": "medium"}, "inputs.kind"),
            ({"tags": "a"}, "inputs.tags"),
            ({"address": {"street": "x"}}, "inputs.address.number"),
            ({"extra": 1}, "inputs.extra"),
        ]
        for change, field in changes:
            wrong = client.post("/v1/run", json={"inputs": {**GOOD, **change}})
            assert wrong.status_code == 422
            error = wrong.json()["error"]
            assert error["type"] == "invalid_request"
            assert field in [detail["field"] for detail in error["details"]]


def test_openapi_describes_the_answers_of_all_routes_without_a_body() -> None:
    with client_of(qa(), ScriptedLM([])) as client:
        document = client.get("/openapi.json").json()
        described = {path: item["get"] for path, item in document["paths"].items() if "get" in item}
        assert set(described) == {"/health", "/ready", "/metrics", "/v1/models"}
        for path, operation in described.items():
            ((media, content),) = operation["responses"]["200"]["content"].items()
            answer = client.get(path)
            jsonschema.validate(
                answer.json() if media == "application/json" else answer.text, content["schema"]
            )


def test_openapi_describes_what_the_server_accepts_and_returns() -> None:
    with client_of(typed()) as client:
        document = client.get("/openapi.json").json()
        answer = client.post("/v1/run", json={"inputs": GOOD}).json()
    run = document["paths"]["/v1/run"]["post"]
    body = run["requestBody"]["content"]["application/json"]["schema"]
    result = run["responses"]["200"]["content"]["application/json"]["schema"]

    def check(value: Any, schema: Any) -> None:
        jsonschema.validate(value, {**schema, "components": document["components"]})

    check({"inputs": GOOD, "seed": 3}, body)
    check(answer, result)
    refused: tuple[Any, ...] = (
        {"inputs": {**GOOD, "kind": "medium"}},
        {"inputs": {}},
        {"inputs": GOOD, "sed": 1},
    )
    for wrong in refused:
        with pytest.raises(jsonschema.ValidationError):
            check(wrong, body)
    assert "/v1/chat/completions" not in document["paths"]  # four inputs are no chat


@pytest.mark.parametrize(
    ("reply", "status", "kind"),
    [
        (CallError("no such model"), 502, "error"),
        (TransientError("connection lost"), 502, "transient"),
        (QuotaExhausted("no credit left for sk-x"), 502, "quota"),
        (RuntimeError("a defect"), 502, "error"),
    ],
)
def test_failures_have_a_status_and_a_kind(reply: Exception, status: int, kind: str) -> None:
    with client_of(qa(), ScriptedLM(lambda message: reply)) as client:
        answer = client.post("/v1/run", json={"inputs": {"question": "?"}})
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert answer.json()["error"]["run_id"]


PRIVATE = "db=10.0.0.7"


def raises(question: str) -> str:
    raise ValueError(PRIVATE)


def loses_a_connection(question: str) -> str:
    raise ConnectionError(PRIVATE)


def returns_another_type(question: str) -> int:
    return PRIVATE  # type: ignore[return-value]


@pytest.mark.parametrize("function", [raises, loses_a_connection, returns_another_type])
def test_texts_of_user_code_are_only_logged(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(service.LOG, "error", lambda text, *arguments: log.append(text % arguments))
    node = cp.Function("f", function)(question=cp.Input("question"))
    body = {"inputs": {"question": "?"}}
    with client_of(cp.System("s", {"answer": node})) as client:
        answer = client.post("/v1/run", json=body)
        stream = client.post("/v1/run/stream", json=body).text
        batch = client.post("/v1/batch", json={"inputs": [body["inputs"]]}).text
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "internal")
    assert [PRIVATE in text for text in (answer.text, stream, batch)] == [False] * 3
    assert [PRIVATE in line for line in log] == [True] * 3
    names = [name for name, _ in sse(stream)]
    assert names == ["call", "call", "error", "usage"]


def test_a_function_that_is_rate_limited_is_answered_with_429() -> None:
    def limited(question: str) -> str:
        raise RateLimited(PRIVATE)

    node = cp.Function("f", limited)(question=cp.Input("question"))
    with client_of(cp.System("s", {"answer": node})) as client:
        answer = client.post("/v1/run", json={"inputs": {"question": "?"}})
    assert (answer.status_code, PRIVATE in answer.text) == (429, False)


def test_an_unparsable_answer_is_a_bad_gateway() -> None:
    with client_of(qa(output=int), ScriptedLM(lambda message: "many")) as client:
        answer = client.post("/v1/run", json={"inputs": {"question": "?"}})
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "parse")


def test_a_run_that_takes_too_long_is_cancelled() -> None:
    lm = ScriptedLM(lambda message: "late", latency=60.0)
    with client_of(qa(), lm, timeout=0.1) as client:
        answer = client.post("/v1/run", json={"inputs": {"question": "?"}})
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout")
        stream = sse(client.post("/v1/run/stream", json={"inputs": {"question": "?"}}).text)
        assert stream[-1][0] == "error"
        assert stream[-1][1]["error"]["type"] == "timeout"
        assert lm.in_flight == 0


def test_a_full_queue_rejects_further_runs_at_once_and_serves_the_others() -> None:
    release = threading.Event()

    async def wait(message: str) -> str:
        await asyncio.to_thread(release.wait, 120)
        return "done"

    lm = ScriptedLM(wait)
    body = {"inputs": {"question": "?"}}
    with served(qa(), lm, concurrency=1, queue=1) as running, running.client() as client:
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(client.post("/v1/run", json=body)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        service = running.built.service
        until(lambda: (service.running, service.waiting) == (1, 1))
        for path in ("/v1/run", "/v1/run/stream", "/v1/batch"):
            refused = client.post(
                path, json={"inputs": [body["inputs"]]} if "batch" in path else body
            )
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
        release.set()
        for thread in threads:
            thread.join(120)
    assert [answer.status_code for answer in answers] == [200, 200]


def test_a_batch_answers_in_order_with_errors_in_their_places() -> None:
    def reply(message: str) -> str | Exception:
        return CallError("cannot") if "bad" in message else message.split()[-2]

    with client_of(qa(), ScriptedLM(reply), concurrency=2, batch=4) as client:
        items = [{"question": q} for q in ("a ?", "bad ?", "c ?", "d ?")]
        answer = client.post("/v1/batch", json={"inputs": items})
        results = answer.json()["results"]
        too_many = client.post("/v1/batch", json={"inputs": [*items, items[0]]})
    assert answer.status_code == 200
    assert ["outputs" in result for result in results] == [True, False, True, True]
    assert results[1]["error"]["type"] == "error"
    assert too_many.status_code == 422


def test_a_stream_sends_calls_tokens_output_and_usage() -> None:
    with client_of(qa(), ScriptedLM(lambda message: "the Rímac")) as client:
        answer = client.post("/v1/run/stream", json={"inputs": {"question": "?"}, "seed": 5})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = sse(answer.text)
    # the number of tokens depends on which texts the process must keep secret
    assert [name for name, _ in groupby(events, lambda event: event[0])] == [
        "call",
        "token",
        "call",
        "output",
        "usage",
    ]
    assert "".join(data["text"] for name, data in events if name == "token") == "the Rímac"
    output, usage = (data for _, data in events[-2:])
    assert output["outputs"] == {"answer": "the Rímac"}
    assert output["run_id"] == answer.headers["x-run-id"]
    assert usage["usage"]["calls"] == 1


def test_a_client_that_leaves_cancels_its_run() -> None:
    lm = ScriptedLM(lambda message: "late", latency=60.0)
    with served(qa(), lm) as running:
        for path in ("/v1/run", "/v1/run/stream"):
            with running.client() as client, pytest.raises(httpx.ReadTimeout):
                client.post(path, json={"inputs": {"question": "?"}}, timeout=0.5)
            until(lambda: lm.in_flight == 0)
        until(lambda: running.built.service.running == 0)


def test_keys_appear_neither_in_answers_nor_in_streams(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sanitize, "_SECRETS", {"sk-of-the-provider"})
    replies: Sequence[Any] = [
        "the key is sk-of-the-provider",
        CallError("denied for sk-of-the-provider"),
        "the key is sk-of-the-provider",
        RuntimeError("sk-of-the-provider"),
    ]
    with client_of(qa(), ScriptedLM(replies)) as client:
        body = {"inputs": {"question": "?"}}
        texts = [
            client.post(path, json=body).text
            for path in ("/v1/run", "/v1/run", "/v1/run/stream", "/v1/run")
        ]
    assert all("sk-of-the-provider" not in text for text in [*texts, caplog.text])
    assert "[key removed]" in texts[0]
    assert "[key removed]" in texts[2]


async def test_metrics_count_the_finished_calls_of_a_run_that_does_not_end() -> None:
    """A provider bills them, although the run timed out or its client is gone."""

    asked = asyncio.Event()

    async def answer(message: str) -> str:
        if message.startswith("Check"):
            asked.set()
            await asyncio.Event().wait()
        return "the Rímac"

    answerer = cp.LLM("answerer", prompt="Answer.")
    checker = cp.LLM("checker", prompt="Check.")
    system = cp.System(
        "qa", {"answer": checker(text=answerer(question=cp.Input("question")))}, lm="lm"
    )
    built = build(system, None, {"lm": ScriptedLM(answer)}, ServerSettings())
    run = asyncio.create_task(built.service.run(built.service.ticket(), {"question": "?"}))
    await asked.wait()
    run.cancel()
    await asyncio.wait([run])
    await built.service.aclose()
    text = built.service.metrics.text("")[0].decode()
    assert 'compound_run_seconds_count{outcome="cancelled"} 1.0' in text
    assert 'compound_calls_total{component="answerer",outcome="ok"} 1.0' in text
    assert 'compound_tokens_total{kind="completion"} 2.0' in text


def test_metrics_count_requests_runs_calls_and_tokens() -> None:
    with client_of(qa(), ScriptedLM(lambda message: "the Rímac")) as client:
        client.post("/v1/run", json={"inputs": {"question": "?"}})
        client.post("/v1/run", json={})
        client.get("/nothing/here")
        text = client.get("/metrics").text
        openmetrics = client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    for line in (
        'compound_http_requests_total{route="/v1/run",status="200"} 1.0',
        'compound_http_requests_total{route="/v1/run",status="422"} 1.0',
        'compound_http_requests_total{route="other",status="404"} 1.0',
        'compound_run_seconds_count{outcome="ok"} 1.0',
        'compound_calls_total{component="answerer",outcome="ok"} 1.0',
        'compound_tokens_total{kind="completion"} 2.0',
        "compound_runs_executing 0.0",
    ):
        assert line in text
    assert openmetrics.text.endswith("# EOF\n")


class Measured(BaseModel):
    value: float


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        [1.0, math.inf],
        {"a": -math.inf},
        Measured(value=math.nan),
        Decimal("NaN"),
        {math.inf: 1},
        np.float32("nan"),
    ],
)
def test_a_number_that_json_does_not_have_is_an_error(value: Any) -> None:
    """Run, batch and stream report the output; a request cannot send such a number either."""

    def compute(x: float) -> Any:
        return value

    system = cp.System("s", {"y": cp.Function("f", compute)(x=cp.Input("x", float))})
    with client_of(system) as client:
        one = client.post("/v1/run", json={"inputs": {"x": 1}})
        batch = client.post("/v1/batch", json={"inputs": [{"x": 1}]}).json()
        stream = sse(client.post("/v1/run/stream", json={"inputs": {"x": 1}}).text)
        kind = {"content-type": "application/json"}
        bodies = [f'{{"inputs": {{"x": {number}}}}}' for number in ("NaN", "1e999")]
        sent = [client.post("/v1/run", content=body, headers=kind) for body in bodies]
    assert one.status_code == 500
    for error in (
        one.json()["error"],
        batch["results"][0]["error"],
        dict(stream)["error"]["error"],
    ):
        assert error["type"] == "internal"  # the failure of a function is told in the log
    assert "f.output holds" in str(cp.run(system, {"x": 1.0}, check=False).failure)
    assert [answer.status_code for answer in sent] == [422, 422]
