"""Settings of engines are typed and bounded, and cannot bypass the budget."""

from __future__ import annotations

import asyncio
import inspect
import json
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from compound.core.engine import Message, Request
from compound.core.errors import DeclarationError, SpecError
from compound.engines.litellm import LiteLLMEngine
from compound.engines.local.engine import TransformersEngine
from compound.engines.openai import OpenAIEngine
from compound.engines.options import RemoteOptions, VLLMOptions
from compound.engines.vllm.engine import VLLMEngine
from compound.yaml import loads
from fake_openai import fake_openai

BYPASSES = [
    *("num_retries", "fallbacks", "mock_response", "api_key", "n", "best_of", "api_base"),
    *("base_url", "custom_llm_provider", "extra_headers", "headers", "extra_body", "callbacks"),
    *("max_tokens", "model", "messages", "max_completion_tokens", "stream", "seed"),
    *("temperature", "stop", "timeout", "request_timeout", "tools", "input_cost_per_token"),
    *("context_window_fallback_dict", "cache", "metadata", "client", "organization"),
    *("service_tier", "web_search_options", "logger_fn", "hf_model_name", "use_beam_search"),
    *("echo", "prompt_logprobs", "return_token_ids", "kv_transfer_params", "vllm_xargs"),
    *("chat_template", "no-log", "azure", "deployment_id"),
]


def spec(engine: str) -> str:
    return (
        f"system: s\nlm: m\nengines: {{m: {engine}}}\ninputs: {{q: str}}\n"
        "components: {a: {llm: {prompt: hello}, in: {q: $q}}}\noutputs: {y: $a}\n"
    )


def problems(engine: str) -> str:
    with pytest.raises(SpecError) as caught:
        loads(spec(engine))
    return str(caught.value)


@pytest.mark.parametrize("make", [TransformersEngine, LiteLLMEngine, VLLMEngine, OpenAIEngine])
def test_the_settings_of_an_engine_are_its_arguments_and_cannot_be_changed(make: Any) -> None:
    settings = make("org/name").settings
    assert list(inspect.signature(make).parameters) == [each.name for each in fields(settings)]
    assert settings == type(settings)("org/name")
    with pytest.raises(FrozenInstanceError):
        settings.model = "other"


@pytest.mark.parametrize("name", BYPASSES)
@pytest.mark.parametrize("make", [LiteLLMEngine, VLLMEngine])
def test_what_would_bypass_the_budget_or_the_users_consent_is_refused(make: Any, name: str) -> None:
    with pytest.raises(DeclarationError, match=f"must not set '{name}'.*only sampling and"):
        make("openai/m", extra={name: 1})
    kind = "litellm" if make is LiteLLMEngine else "vllm"
    assert "unknown key" in problems(f'{{{kind}: {{model: openai/m, extra: {{"{name}": 1}}}}}}')


def test_a_misspelled_option_is_named_with_the_nearest() -> None:
    with pytest.raises(DeclarationError, match="did you mean 'top_p'.*: chat_template_kwargs, "):
        LiteLLMEngine("openai/m", extra={"topp": 0.5})
    assert "did you mean 'top_p'?" in problems("{litellm: {model: openai/m, extra: {topp: 0.5}}}")


@pytest.mark.parametrize(
    "extra",
    [
        {"top_p": 2.0},
        {"top_p": "0.5"},
        {"top_p": float("nan")},
        {"logit_bias": [1]},
        {"reasoning_effort": "very"},
    ],
)
def test_an_option_with_a_wrong_value_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(DeclarationError, match=r"extra\."):
        LiteLLMEngine("openai/m", extra=extra)


def test_options_that_change_how_a_model_samples_are_passed_on() -> None:
    given = {
        "top_p": 0.9,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert LiteLLMEngine("openai/m", extra=given).extra == given
    assert VLLMEngine("m", extra={**given, "min_tokens": 3}).extra == {**given, "min_tokens": 3}
    assert LiteLLMEngine("openai/m", extra=RemoteOptions(top_p=0.5)).extra == {"top_p": 0.5}
    assert VLLMEngine("m", extra=VLLMOptions()).extra == {}
    program = loads(spec("{litellm: {model: openai/m, price: [1, 2], extra: {top_p: 0.9}}}"))
    engine = program.find_engine("m")
    assert isinstance(engine, LiteLLMEngine)
    assert (engine.extra, engine.price) == ({"top_p": 0.9}, (1, 2))


WRONG: list[tuple[Any, str, list[Any]]] = [
    (LiteLLMEngine, "concurrency", [0, -1, 1.5, True, "8"]),
    (LiteLLMEngine, "timeout", [0, -1.0, float("inf"), float("nan")]),
    (LiteLLMEngine, "max_wait", [-1.0, float("nan")]),
    (LiteLLMEngine, "price", [(-1.0, 0.0), (float("nan"), 0.0)]),
    (VLLMEngine, "concurrency", [0]),
    (VLLMEngine, "timeout", [0.0]),
    (VLLMEngine, "start_timeout", [0.0]),
    (VLLMEngine, "restarts", [-1]),
    (VLLMEngine, "max_loras", [0]),
    (VLLMEngine, "max_lora_rank", [0]),
    (TransformersEngine, "max_batch", [0]),
    (TransformersEngine, "max_wait_ms", [-1.0]),
    (TransformersEngine, "max_batch_tokens", [0]),
    (TransformersEngine, "max_adapters", [0]),
    (TransformersEngine, "dtype", ["float8"]),
]


@pytest.mark.parametrize(("make", "name", "values"), WRONG)
def test_a_setting_out_of_range_is_refused(make: Any, name: str, values: list[Any]) -> None:
    """Regression test: a concurrency of 0 passed `compound check`, and the run never started."""
    kind = {LiteLLMEngine: "litellm", VLLMEngine: "vllm", TransformersEngine: "transformers"}[make]
    for value in values:
        with pytest.raises(DeclarationError, match=f"{make.__name__}: {name}: "):
            make("openai/m", **{name: value})
    first = list(values[0]) if isinstance(values[0], tuple) else values[0]
    assert (
        f"{name}" in problems(f"{{{kind}: {{model: openai/m, {name}: {first}}}}}")
        or name == "price"
    )


@pytest.mark.parametrize(
    "key", ["optimize.concurrency", "optimize.minibatch", "optimize.candidates"]
)
def test_settings_of_the_optimization_are_bounded_as_well(key: str) -> None:
    with pytest.raises(SpecError, match="must be"):
        loads(spec("{litellm: {model: openai/m}}"), overrides=[(key, "0")])


@pytest.mark.parametrize(
    "argument",
    [
        "--host",
        "--port=1",
        "--api-key",
        "--served_model_name",
        "--logprobs-mode",
        "--trust-remote-code",
        "--trust-re",
        "--config",
        "--enable-lora",
    ],
)
def test_arguments_of_a_server_that_the_engine_sets_are_refused(argument: str) -> None:
    with pytest.raises(DeclarationError, match="args must not set"):
        VLLMEngine("m", args=[argument, "x"])
    VLLMEngine(
        "m",
        args=["--dtype", "bfloat16", "--max-model-len", "8192", "--gpu-memory-utilization", "0.5"],
    )


@pytest.mark.filterwarnings("ignore:Item 'summary' on TypedDict:UserWarning")
def test_ollama_receives_messages_and_its_window(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("litellm")
    document = {
        "model": "llama3.2",
        "message": {"role": "assistant", "content": "Lima"},
        "done": True,
    }
    with fake_openai(
        lambda path, sent: (200, "application/json", json.dumps(document).encode())
    ) as fake:
        engine = LiteLLMEngine(
            "ollama_chat/llama3.2", api_base=fake.url.removesuffix("/v1"), extra={"num_ctx": 16384}
        )

        async def ask() -> None:
            await engine.generate(Request((Message("user", "Hi"),)))
            await engine.aclose()

        asyncio.run(ask())
    sent = fake.requests[0]  # litellm asks afterwards what the model is
    assert sent["options"]["num_ctx"] == 16384
    assert sent["messages"][0]["content"] == "Hi"
    assert not caplog.records
    LiteLLMEngine("ollama/llama3.2")
    assert "use ollama_chat/llama3.2" in caplog.text
    with pytest.raises(DeclarationError, match="num_ctx is an option of Ollama"):
        LiteLLMEngine("openai/gpt-4o-mini", extra={"num_ctx": 16384})
