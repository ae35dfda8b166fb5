"""Answers as servers with OpenAI's API differ in them: contents in parts, empty contents, and reports of usage."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from compound.core.engine import Completion, Engine, Message, Request, Usage
from compound.core.errors import CallError, TransientError
from compound.engines.litellm import LiteLLMEngine
from compound.engines.openai import OpenAIEngine
from compound.execution.executor import Executor
from compound.testing import ScriptedLM
from fake_openai import chat, events, fake_openai

pytest.importorskip("litellm")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Item 'summary' on TypedDict:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:Accessing the 'model_:DeprecationWarning"
    ),  # litellm's, of pydantic
]

REQUEST = Request((Message("user", "Name a capital. " * 20),), max_tokens=50)
TOTALS = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
ENGINES = pytest.mark.parametrize(
    "make", [OpenAIEngine, lambda m, **s: LiteLLMEngine(f"openai/{m}", **s)]
)


def ask(
    make: Any, message: dict[str, Any], *, stream: bool = False, **settings: Any
) -> tuple[Completion, int]:
    """Return the completion of a request that a server answers with a message, and the number of requests."""
    usage = settings.pop("usage", TOTALS)
    choice = {"index": 0, "delta": message, "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": "stop"}
    head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    body = chat(message, usage=usage)
    if stream:
        body = events(
            {**head, "choices": [choice]},
            {**head, "choices": [last]},
            {**head, "choices": [], "usage": usage},
        )

    async def run(url: str) -> Completion:
        engine: Engine = make(settings.pop("model", "m"), api_base=url, **settings)
        executor = Executor({"m": engine}, sleep=lambda _: asyncio.sleep(0))
        try:
            if stream:
                return await engine.stream(REQUEST, lambda _: None)  # type: ignore[attr-defined,no-any-return]
            return await executor.request("m", REQUEST)
        finally:
            await executor.aclose()
            await engine.aclose()

    kind = "text/event-stream" if stream else "application/json"
    with fake_openai(lambda path, document: (200, kind, body)) as fake:
        return asyncio.run(run(fake.url)), len(fake.requests)


THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "Peru …"}]}


@ENGINES
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "content",
    [
        [THOUGHT, {"type": "text", "text": "Lima"}],
        [{"type": "reasoning", "text": "Peru …"}, {"type": "output_text", "text": "Li"}, "ma"],
        {"type": "text", "text": {"value": "Lima"}},
    ],
)
def test_the_text_of_a_content_in_parts_is_read(make: Any, stream: bool, content: Any) -> None:
    completion, requests = ask(make, {"content": content}, stream=stream)
    assert (completion.text, requests) == ("Lima", 1)
    assert completion.usage.completion_tokens == 20


@ENGINES
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ({"content": "", "reasoning_content": "Peru …"}, "empty"),
        ({"content": " \n"}, "empty"),
        ({"content": [THOUGHT]}, "empty"),
        ({"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}, "empty"),
        ({"content": [{"type": "refusal", "refusal": "I cannot."}]}, "refusal"),
        ({"content": "", "refusal": "I cannot."}, "refusal"),
    ],
)
def test_an_answer_without_text_is_a_failed_call_that_is_billed_once(
    make: Any, stream: bool, message: dict[str, Any], kind: str
) -> None:
    with pytest.raises(CallError) as caught:
        ask(make, message, stream=stream, price=(1.0, 2.0))
    assert not isinstance(caught.value, TransientError)
    assert caught.value.kind == kind
    assert caught.value.charged == Usage(1, 100, 20, 140e-6)
    assert ("I cannot." in str(caught.value)) == (kind == "refusal")


def test_an_empty_answer_of_any_engine_is_a_failed_call() -> None:
    for text in ("", " \n"):
        executor = Executor({"m": ScriptedLM([Completion(text, Usage(1, 2, 3))])})
        with pytest.raises(CallError, match="m returned an answer without text") as caught:
            asyncio.run(executor.request("m", REQUEST))
        assert (caught.value.kind, executor.meter.usage) == ("empty", Usage(1, 2, 3))


def cost(usage: Any, model: str = "gpt-4o-mini") -> float:
    return ask(
        lambda m, **s: LiteLLMEngine(f"openai/{m}", **s),
        {"content": "Lima"},
        usage=usage,
        model=model,
    )[0].usage.cost


@pytest.mark.parametrize(
    "details",
    [
        {"prompt_tokens_details": {"text_tokens": 1}},
        {"prompt_tokens_details": {"text_tokens": 1, "image_tokens": 50}},
        {"completion_tokens_details": {"text_tokens": 1}},
        {"completion_tokens_details": {"text_tokens": 1, "reasoning_tokens": 1}},
        {"completion_tokens_details": {"reasoning_tokens": 45}},
        {"prompt_tokens_details": {"cached_tokens": 150}},
        {"prompt_tokens_details": {"cached_tokens": "99"}},
        {"prompt_tokens_details": {"cached_tokens": 99.5}},
        {"prompt_tokens_details": {"cached_tokens": True}},
        {"prompt_tokens_details": {"cached_tokens": -99}},
        {"prompt_tokens_details": "none"},
        {"cache_read_input_tokens": 150},
        {"cache_read_input_tokens": 100, "prompt_tokens_details": {"cached_tokens": 1}},
        {"total_tokens": 1},
        {"total_tokens": "150"},
        {"prompt_tokens": "1"},
        {"prompt_tokens": 0.5},
        {"prompt_tokens": True},
    ],
)
def test_details_and_contradictions_never_lower_a_charge(details: dict[str, Any]) -> None:
    least = (100 * 0.15 + 20 * 0.60) / 1e6
    assert cost(TOTALS) == pytest.approx(least)
    assert cost({**TOTALS, **details}) >= least * (
        0.99 if "cache_read_input_tokens" in details else 1 - 1e-9
    )


def test_the_discount_of_a_prompt_cache_is_applied() -> None:
    assert cost({**TOTALS, "prompt_tokens_details": {"cached_tokens": 80}}) == pytest.approx(21e-6)


@ENGINES
@pytest.mark.parametrize(
    ("reported", "completion"),
    [
        ({"total_tokens": 145}, 45),
        ({"completion_tokens_details": {"reasoning_tokens": 45}}, 45),
        ({"total_tokens": 3}, 20),
    ],
)
def test_the_larger_reading_counts(make: Any, reported: dict[str, Any], completion: int) -> None:
    found, _ = ask(make, {"content": "Lima"}, usage={**TOTALS, **reported}, price=(1.0, 2.0))
    assert found.usage == Usage(1, 100, completion, (100 + 2 * completion) / 1e6)
