"""The litellm engine, tested against a small local server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from compound import CompoundError
from compound.core.engine import Adapter, AnswerFormat, Completion, Message, Request
from compound.core.errors import CallError, QuotaExhausted, TransientError
from compound.engines.litellm import LiteLLMEngine
from fake_openai import FakeOpenAI, chat, fake_openai

pytest.importorskip("litellm")
pytestmark = [  # litellm's own, at its first call
    pytest.mark.filterwarnings("ignore:Item 'summary' on TypedDict:UserWarning")
]


class Server:
    """An OpenAI-compatible server that returns a fixed answer, and records the requests."""

    fake: FakeOpenAI

    def __init__(self) -> None:
        self.status, self.body = 200, b""

    @property
    def address(self) -> str:
        return self.fake.url

    @property
    def received(self) -> list[dict[str, Any]]:
        return self.fake.requests

    def answer(self, text: str | None = "four", finish: str = "stop") -> None:
        usage = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}
        self.body = chat({"content": text}, finish, usage=usage)

    def fail(
        self, status: int, message: str, headers: dict[str, str] | None = None, code: str = "x"
    ) -> None:
        self.status, self.fake.headers = status, headers or {}
        error = {"message": message, "type": "error", "code": code}
        self.body = json.dumps({"error": error}).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("TINY_KEY", "secret-1")
    made = Server()
    made.answer()
    with fake_openai(lambda path, sent: (made.status, "application/json", made.body)) as fake:
        made.fake = fake
        yield made


def engine(server: Server, **settings: Any) -> LiteLLMEngine:
    return LiteLLMEngine("openai/tiny", api_base=server.address, api_key_env="TINY_KEY", **settings)


def request(text: str = "What is 2 + 2?", **settings: Any) -> Request:
    return Request((Message("user", text),), **settings)


def ask(lm: LiteLLMEngine, what: Request | None = None) -> Completion:
    async def run() -> Completion:
        try:
            return await lm.generate(what or request())
        finally:
            await lm.aclose()

    return asyncio.run(run())


def test_an_answer_comes_with_the_tokens_and_the_price_it_cost(server: Server) -> None:
    completion = ask(engine(server, price=(1.0, 10.0)))
    assert completion.text == "four"
    assert completion.finish_reason == "stop"
    usage = completion.usage
    assert (usage.calls, usage.prompt_tokens, usage.completion_tokens) == (1, 20, 5)
    assert usage.cost == pytest.approx((20 * 1 + 5 * 10) / 1e6)


def test_the_server_is_sent_the_messages_the_key_and_the_sampling_settings(server: Server) -> None:
    what = Request(
        (Message("system", "Be brief."), Message("user", "Hi")),
        max_tokens=7,
        temperature=0.5,
        stop=("\n",),
        seed=2**40 + 3,
    )
    ask(engine(server, extra={"top_p": 0.9}), what)
    sent = server.received[0]
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert (sent["max_tokens"], sent["temperature"], sent["seed"]) == (7, 0.5, 3)
    assert (sent["stop"], sent["top_p"], sent["model"]) == (["\n"], 0.9, "tiny")
    assert server.fake.keys == ["Bearer secret-1"]


def test_a_cue_is_shown_at_the_end_of_the_last_message(server: Server) -> None:
    ask(engine(server), request("What?", cue="answer:"))
    assert server.received[0]["messages"] == [{"role": "user", "content": "What?\nanswer:"}]


@pytest.mark.parametrize("text", ["", None])
def test_an_answer_cut_before_any_text_is_a_failed_call(server: Server, text: str | None) -> None:
    server.answer(text, finish="length")
    with pytest.raises(CallError, match="all of max_tokens=256 before it started") as caught:
        ask(engine(server))
    assert caught.value.kind == "empty"
    assert caught.value.charged is not None
    assert caught.value.charged.completion_tokens == 5


@pytest.mark.parametrize(
    ("after", "expected"), [("3", 3.0), ("0.5", 0.5), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)]
)
def test_a_rate_limit_is_transient_and_carries_the_requested_wait(
    server: Server, after: str, expected: float
) -> None:
    server.fail(429, "slow down", {"retry-after": after})
    with pytest.raises(TransientError, match="slow down") as caught:
        ask(engine(server))
    assert caught.value.retry_after == expected
    assert len(server.received) == 1, "litellm must not retry by itself"


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_names_the_variable_to_set(server: Server, status: int) -> None:
    server.fail(status, "bad key")
    with pytest.raises(CallError, match="set TINY_KEY") as caught:
        ask(engine(server))
    assert not isinstance(caught.value, TransientError)
    assert "secret-1" not in str(caught.value)


def test_without_a_named_variable_the_providers_own_is_named(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server.fail(401, "bad key")
    with pytest.raises(CallError, match="set OPENAI_API_KEY"):
        ask(LiteLLMEngine("openai/tiny", api_base=server.address))


def test_a_missing_key_is_the_users_mistake_and_nothing_is_sent(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINY_KEY")
    with pytest.raises(CompoundError, match="export TINY_KEY") as caught:
        ask(engine(server))
    assert not isinstance(caught.value, CallError)
    assert server.received == []


LONG = "This model's maximum context length is 100 tokens, but your messages have 200 tokens."


@pytest.mark.parametrize(
    ("status", "message", "code", "error", "said"),
    [
        (
            400,
            "Your credit balance is too low to access the API.",
            "x",
            QuotaExhausted,
            "no credit",
        ),
        (400, "The prompt was filtered.", "content_filter", CallError, "The prompt was filtered"),
        (400, LONG, "context_length_exceeded", CallError, "shorten the prompt"),
        (404, "the model tiny does not exist", "x", CallError, r"tiny.*check the model's name"),
    ],
)
def test_a_permanent_error_says_what_to_do(
    server: Server, status: int, message: str, code: str, error: type[CompoundError], said: str
) -> None:
    server.fail(status, message, code=code)
    with pytest.raises(error, match=said) as caught:
        ask(engine(server))
    assert not isinstance(caught.value, TransientError)
    assert (getattr(caught.value, "kind", "") == "refusal") == (code == "content_filter")


def test_an_unknown_provider_is_named() -> None:
    with pytest.raises(CallError, match=r"nonsense/x.*provider/model"):
        ask(LiteLLMEngine("nonsense/x"))


@pytest.mark.parametrize("body", [b"<html>proxy error</html>", b'{"choices": []}', b"{}", b""])
def test_an_answer_that_is_no_completion_is_a_failed_call(server: Server, body: bytes) -> None:
    server.body = body
    with pytest.raises(CallError):
        ask(engine(server))


def test_prices_come_from_the_list_and_unknown_ones_count_as_zero() -> None:
    known, unknown = LiteLLMEngine("openai/gpt-4o-mini"), LiteLLMEngine("hosted_vllm/own-model")
    assert known.priced
    assert known.worst_case(request(max_tokens=1000)).cost > 1000 * 0.5e-6
    assert not unknown.priced
    assert unknown.worst_case(request()).cost == 0.0


@pytest.mark.parametrize("model", ["heroku/claude-3-5-haiku", "snowflake/jamba-instruct"])
def test_a_listed_model_without_a_price_of_tokens_is_not_priced(model: str) -> None:
    import litellm

    assert litellm.get_model_info(model)["input_cost_per_token"] == 0
    assert not LiteLLMEngine(model).priced
    assert LiteLLMEngine(model).worst_case(request()).unpriced == 1
    assert LiteLLMEngine(model, price=(0.0, 0.0)).priced


@pytest.mark.parametrize("model", ["perplexity/sonar", "openai/gpt-4o-search-preview"])
def test_the_fee_of_a_search_is_part_of_the_cost_of_models_that_always_search(model: str) -> None:
    import litellm

    fees = litellm.get_model_info(model)["search_context_cost_per_query"]
    used = litellm.Usage(prompt_tokens=20, completion_tokens=5, total_tokens=25)
    choice = SimpleNamespace(finish_reason="stop", message=SimpleNamespace(content="hi"))
    lm, asked = LiteLLMEngine(model), request()
    usage = lm._completion(asked, SimpleNamespace(choices=[choice], usage=used)).usage
    assert max(fees.values()) < usage.cost < lm.worst_case(asked).cost
    assert LiteLLMEngine(model, price=(0.0, 0.0)).worst_case(asked).cost == 0
    other = LiteLLMEngine("openai/gpt-4o-mini")  # searches only if a request asks for it
    assert other.worst_case(asked).cost < max(fees.values())


@pytest.mark.parametrize(
    ("reported", "prompt", "completion"),
    [
        ({}, None, 50),
        ({"prompt_tokens": 20, "completion_tokens": 0, "total_tokens": 20}, 20, 50),
        ({"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 45}, 20, 25),
    ],
)
def test_the_list_price_covers_all_tokens_that_are_counted(
    reported: dict[str, int], prompt: int | None, completion: int
) -> None:
    import litellm

    message = SimpleNamespace(content="hi")
    response = SimpleNamespace(
        choices=[SimpleNamespace(finish_reason="stop", message=message)],
        usage=litellm.Usage(**reported),
    )
    lm, asked = LiteLLMEngine("openai/gpt-4o-mini"), request(max_tokens=50)
    usage = lm._completion(asked, response).usage
    prompt = lm.worst_case(asked).prompt_tokens if prompt is None else prompt
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, completion)
    assert usage.cost == pytest.approx(
        sum(litellm.cost_per_token("gpt-4o-mini", prompt, completion))
    )


def test_an_adapter_is_refused(server: Server) -> None:
    with pytest.raises(CallError, match="adapter"):
        ask(engine(server), request(adapter=Adapter("some/folder", "9f")))
    assert server.received == []


def test_threads_keep_their_connections(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """litellm closes the connections of the whole process, so only the last engine may close them."""

    def work(number: int) -> list[str]:
        async def several() -> list[str]:
            lm = engine(server)
            answers = [(await lm.generate(request(f"{number} {i}"))).text for i in range(4)]
            await lm.aclose()
            return answers

        return asyncio.run(several())

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(work, range(8)))
    assert len([text for several in answers for text in several]) == 32
    assert not caplog.records  # of its log's queue, which belongs to one loop


PERSON = AnswerFormat(
    schema=json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    )
)
LIST = AnswerFormat(schema='{"type": "array", "items": {"type": "integer"}}')


def test_a_schema_is_sent_as_the_response_format_to_models_that_take_it(server: Server) -> None:
    server.answer('{"name": "Ada"}')
    assert (
        ask(engine(server, response_schema=True), request(format=PERSON)).text == '{"name": "Ada"}'
    )
    sent = server.received[-1]["response_format"]
    assert sent["type"] == "json_schema"
    assert sent["json_schema"]["schema"] == json.loads(PERSON.schema)
    assert sent["json_schema"]["strict"] is True
    ask(engine(server), request(format=PERSON))  # litellm does not know this model
    assert "response_format" not in server.received[-1]
    ask(engine(server, response_schema=True), request())
    assert "response_format" not in server.received[-1]


def test_litellm_says_which_models_take_a_schema() -> None:
    takes = {
        name: LiteLLMEngine(name)._sent_format(request(format=PERSON)) is not None
        for name in ("openai/gpt-4o-mini", "openai/gpt-3.5-turbo")
    }
    assert takes == {"openai/gpt-4o-mini": True, "openai/gpt-3.5-turbo": False}
    own = LiteLLMEngine("openai/gpt-4o-mini", extra={"response_format": {"type": "json_object"}})
    assert own._sent_format(request(format=PERSON)) is None


@pytest.mark.parametrize(
    ("wanted", "sent", "text"),
    [
        (AnswerFormat(choices=("yes", "no")), '{"answer": "no"}', "no"),
        (LIST, '{"answer": [1, 2]}', "[1, 2]"),
        (LIST, "no JSON", "no JSON"),
        (PERSON, '{"answer": "x"}', '{"answer": "x"}'),
    ],
)
def test_an_answer_that_is_no_object_is_wrapped_in_one(
    server: Server, wanted: AnswerFormat, sent: str, text: str
) -> None:
    server.answer(sent)
    assert ask(engine(server, response_schema=True), request(format=wanted)).text == text
    schema = server.received[-1]["response_format"]["json_schema"]["schema"]
    assert schema["type"] == "object"


def test_the_worst_case_includes_a_schema_that_the_provider_adds(server: Server) -> None:
    lm = engine(server, response_schema=True)
    added = (
        lm.worst_case(request(format=PERSON)).prompt_tokens - lm.worst_case(request()).prompt_tokens
    )
    assert added >= len(PERSON.schema)
