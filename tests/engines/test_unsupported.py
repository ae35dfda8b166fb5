"""Servers that refuse fields of a request, as reasoning models do: the request is sent without them, once and for all."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from compound.core.engine import Completion, Message, Request, Usage
from compound.core.errors import CallError
from compound.engines.litellm import LiteLLMEngine
from compound.engines.openai import OpenAIEngine
from compound.engines.options import refused_field
from compound.execution.executor import Executor
from fake_openai import chat, fake_openai

pytest.importorskip("litellm")
pytestmark = [pytest.mark.filterwarnings("ignore:Item 'summary' on TypedDict:UserWarning")]
ENGINES = pytest.mark.parametrize(
    "make", [OpenAIEngine, lambda m, **s: LiteLLMEngine(f"openai/{m}", **s)]
)
REQUEST = Request(
    (Message("system", "Be brief."), Message("user", "Hi")),
    max_tokens=50,
    temperature=0.7,
    stop=("END",),
)
MESSAGES = {
    "max_tokens": "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
    "temperature": "'temperature' does not support 0.7 with this model. Only the default (1) value is supported.",
    "stop": "Unsupported parameter: 'stop' is not supported with this model.",
    "seed": "Unrecognized request argument supplied: seed",
    "messages[0].role": "'messages[0].role' does not support 'system' with this model.",
}


def openai(field: str) -> dict[str, Any]:
    code = "unsupported_value" if field == "temperature" else "unsupported_parameter"
    return {"error": {"message": MESSAGES[field], "param": field, "code": code}}


def azure(field: str) -> dict[str, Any]:
    return {
        "error": {
            "message": MESSAGES[field],
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        }
    }


def vllm(field: str) -> dict[str, Any]:
    if "role" in field:
        return {"object": "error", "message": "System role not supported", "code": 400}
    place = f"[{{'type': 'extra_forbidden', 'loc': ('body', '{field}'), 'msg': 'Extra inputs are not permitted'}}]"
    return {"object": "error", "message": place, "type": "BadRequestError", "code": 400}


def fastapi(field: str) -> dict[str, Any]:
    if "role" in field:
        return {"detail": "the template has no support for a system message"}
    return {"detail": [{"type": "extra_forbidden", "loc": ["body", field], "msg": "Extra inputs"}]}


def picky(error: Any) -> Any:
    """Return a server that refuses, one after the other, everything that a reasoning model may refuse."""

    def answer(path: str, sent: dict[str, Any]) -> tuple[int, str, bytes]:
        fields = [name for name in ("max_tokens", "temperature", "stop", "seed") if name in sent]
        roles = [message["role"] for message in sent["messages"]]
        refused = [*fields, *["messages[0].role"] * ("system" in roles)]
        if refused:
            return 400, "application/json", json.dumps(error(refused[0])).encode()
        return 200, "application/json", chat({"content": "Lima END or Quito"})

    return answer


async def asked(engine: Any, times: int) -> tuple[list[Completion], Usage]:
    executor = Executor({"m": engine})
    try:
        found = await asyncio.gather(*(executor.request("m", REQUEST) for _ in range(times)))
        return list(found), executor.meter.usage
    finally:
        await executor.aclose()


@ENGINES
@pytest.mark.parametrize("error", [openai, azure, vllm, fastapi])
def test_a_refusal_is_learned(make: Any, error: Any, caplog: pytest.LogCaptureFixture) -> None:
    with fake_openai(picky(error)) as fake, caplog.at_level(logging.WARNING, "compound"):
        engine = make("m", api_base=fake.url, price=(1.0, 1.0))
        (first,), usage = asyncio.run(asked(engine, 1))
        assert len(fake.requests) == 6
        asyncio.run(asked(engine, 1))
        assert len(fake.requests) == 7  # what was learned is kept
    assert (first.text, usage) == ("Lima ", Usage(1, 5, 3, 8e-6))  # refused requests are free
    sent = fake.requests[-1]
    assert sent["max_completion_tokens"] == 50
    assert sent["messages"] == [{"role": "user", "content": "Be brief.\n\nHi"}]
    told = [r.getMessage() for r in caplog.records if "temperature" in r.getMessage()]
    assert len(told) == 1
    assert "0.7 is not sent" in told[0]


@ENGINES
def test_concurrent_first_requests_all_succeed(make: Any) -> None:
    with fake_openai(picky(openai)) as fake:
        found, usage = asyncio.run(asked(make("m", api_base=fake.url), 8))
        assert len(fake.requests) <= 8 * 6
    assert {completion.text for completion in found} == {"Lima "}
    assert usage.calls == 8


@ENGINES
def test_fields_can_be_named_in_advance(make: Any) -> None:
    fields = ("max_tokens", "temperature", "stop", "seed", "system")
    with fake_openai(picky(openai)) as fake:
        engine = make("m", api_base=fake.url, unsupported=fields)
        asyncio.run(asked(engine, 1))
        assert len(fake.requests) == 1
    assert engine.name != make("m", api_base=fake.url).name


@ENGINES
def test_a_server_that_refuses_everything_is_asked_a_bounded_number_of_times(make: Any) -> None:
    body = json.dumps(openai("temperature")).encode()
    with fake_openai(lambda path, sent: (400, "application/json", body)) as fake:
        with pytest.raises(CallError, match="'temperature' does not support"):
            asyncio.run(asked(make("m", api_base=fake.url), 1))
        assert len(fake.requests) == 2


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (
            400,
            {"message": "max_tokens is too large: 50000. This model supports at most 16384 tokens"},
        ),
        (400, {"message": "Unsupported value: temperature must be between 0 and 2"}),
        (
            400,
            {
                "message": "the prompt and max_tokens are not supported",
                "code": "context_length_exceeded",
            },
        ),
        (400, {"message": "unknown error"}),
        (400, {"message": "max_tokens must be less than or equal to 8192"}),
        (400, {"message": "temperature must be 1.5 or less"}),
        (500, {"message": "unsupported parameter: temperature"}),
    ],
)
def test_other_errors_change_no_request(status: int, error: dict[str, Any]) -> None:
    assert (
        refused_field(status, json.dumps({"error": error}).encode(), ["max_tokens", "temperature"])
        == ""
    )


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("max_tokens", "`max_tokens` is no longer supported; please use `max_completion_tokens`"),
        ("max_tokens", "max_tokens has been replaced by max_completion_tokens"),
        ("max_tokens", "Please use max_completion_tokens instead of max_tokens"),
        ("temperature", "`temperature` may only be set to 1 when thinking is enabled"),
        ("temperature", "`temperature` and `top_p` cannot both be specified for this model."),
        ("temperature", "temperature must be 1 for this model"),
        ("temperature", "Temperature is not configurable for reasoning models"),
        ("temperature", "This model has beta-limitations: temperature, top_p and n are fixed at 1"),
        ("temperature", "invalid temperature: only 1 is allowed for this model"),
        ("seed", "Malformed input request: extraneous key [seed] is not permitted"),
        ("seed", "Additional properties are not allowed ('seed' was unexpected)"),
        ("stop", "Argument not supported on this model: stop"),
        ("response_format", "This response_format type is unavailable now"),
        ("system", "Developer instruction is not enabled for models/gemma-3-27b-it"),
        ("system", "Only user and assistant roles are supported!"),
        ("system", "Conversation roles must alternate user/assistant/user/assistant/..."),
    ],
)
def test_refusals_of_providers_are_recognized(field: str, message: str) -> None:
    body = json.dumps({"error": {"message": message}}).encode()
    assert (
        refused_field(
            400, body, ["max_tokens", "temperature", "seed", "stop", "response_format", "system"]
        )
        == field
    )


def test_an_option_that_the_user_has_set_is_not_given_up() -> None:
    body = json.dumps({"error": {"message": "response_format is not supported"}}).encode()
    with fake_openai(lambda path, sent: (400, "application/json", body)) as fake:
        engine = LiteLLMEngine(
            "openai/m", api_base=fake.url, extra={"response_format": {"type": "json_object"}}
        )
        with pytest.raises(CallError, match="response_format is not supported"):
            asyncio.run(asked(engine, 1))
        assert len(fake.requests) == 1
