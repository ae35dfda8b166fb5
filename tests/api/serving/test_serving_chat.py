"""OpenAI's chat interface, used by the real `openai` client and by curl."""

from __future__ import annotations

import enum
import itertools
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import compound as cp
from compound.api.serving.chat import AnswerText
from compound.components.fields import parse
from compound.core.engine import OnText
from compound.core.errors import CallError, TransientError
from compound.graph.types import Port
from compound.testing import ScriptedLM
from served import Running, qa, served

openai = pytest.importorskip("openai")


def client(running: Running, key: str = "none") -> Any:
    import httpx

    return openai.OpenAI(
        base_url=f"{running.url}/v1",
        api_key=key,
        max_retries=0,
        timeout=120,
        http_client=httpx.Client(trust_env=False),
    )


def ask(lm: Any, text: str = "Which river?", **settings: Any) -> Any:
    return lm.chat.completions.create(
        model="qa", messages=[{"role": "user", "content": text}], **settings
    )


def test_the_openai_client_completes_a_chat() -> None:
    lm = ScriptedLM(lambda message: "the Rímac")
    with served(qa(), lm) as running, client(running) as openai_client:
        found = ask(openai_client, temperature=0.3, max_tokens=50, user="someone")
    assert found.choices[0].message.content == "the Rímac"
    assert found.choices[0].finish_reason == "stop"
    assert found.usage.total_tokens == found.usage.prompt_tokens + 2
    assert found.model == "qa"
    assert found.id.startswith("run-")
    assert "Question: Which river?" in lm.requests[0].messages[-1].content


def test_the_openai_client_streams_a_chat() -> None:
    script = ScriptedLM(lambda message: " the Rímac of Lima ")
    with served(qa(), script) as running, client(running) as lm:
        stream = ask(lm, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == "the Rímac of Lima"
    assert len([piece for piece in pieces if piece]) > 2
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == 4
    assert len({chunk.id for chunk in chunks}) == 1


def test_conversations_and_parts_become_one_text() -> None:
    lm = ScriptedLM(lambda message: "yes")
    with served(qa(), lm) as running, client(running) as openai_client:
        openai_client.chat.completions.create(
            model="qa",
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": "Hello."},
                {"role": "user", "content": "Is it raining?"},
            ],
        )
    sent = lm.requests[0].messages[-1].content
    assert "System: Be brief.\n\nUser: Hi\n\nAssistant: Hello.\n\nUser: Is it raining?" in sent


def test_models_are_listed_and_other_models_refused() -> None:
    with served(qa(), ScriptedLM(lambda message: "yes")) as running, client(running) as lm:
        assert [model.id for model in lm.models.list()] == ["qa"]
        assert lm.models.retrieve("qa").owned_by == "compound"
        with pytest.raises(openai.NotFoundError, match="this server has 'qa'"):
            lm.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "?"}])
        with pytest.raises(openai.NotFoundError):
            lm.models.retrieve("gpt-4o")


def test_errors_are_those_that_the_client_knows() -> None:
    script = ScriptedLM(lambda message: CallError("no such model"))
    with served(qa(), script) as running, client(running) as lm:
        with pytest.raises(openai.InternalServerError, match="no such model") as failed:
            ask(lm)
        assert failed.value.status_code == 502
        with pytest.raises(openai.UnprocessableEntityError, match="n"):
            ask(lm, n=2)
        with pytest.raises(openai.UnprocessableEntityError, match="tools"):
            ask(lm, tools=[{"type": "function", "function": {"name": "f"}}])
        with pytest.raises(openai.APIError, match="no such model"), ask(lm, stream=True) as stream:
            list(stream)


def test_a_system_without_streamed_text_sends_its_answer_whole() -> None:
    def shout(text: str) -> str:
        return text.upper()

    answerer = cp.LLM("answerer")(question=cp.Input("question"))
    system = cp.System("qa", {"answer": cp.Function("shout", shout)(text=answerer)}, lm="lm")
    with served(system, ScriptedLM(lambda message: "the Rímac")) as running, client(running) as lm:
        pieces = [chunk.choices[0].delta.content for chunk in ask(lm, stream=True)]
    assert [piece for piece in pieces if piece] == ["THE RÍMAC"]


class Lost(ScriptedLM):
    """Loses its first answer after some words, and answers with other words then."""

    first = True

    async def stream(self, request: cp.ext.Request, on_text: OnText) -> cp.ext.Completion:
        if self.first:
            self.first = False
            on_text("the Rí")
            raise TransientError("connection lost")
        return await super().stream(request, on_text)


@pytest.mark.parametrize(("second", "succeeds"), [("the Rímac", True), ("another river", False)])
def test_a_repeated_call_continues_its_text_or_is_an_error(second: str, succeeds: bool) -> None:
    answerer = cp.LLM("answerer", retries=1)(question=cp.Input("question"))
    system = cp.System("qa", {"answer": answerer}, lm="lm")
    with served(system, Lost(lambda message: second)) as running, client(running) as lm:
        if succeeds:
            with ask(lm, stream=True) as stream:
                assert "".join(c.choices[0].delta.content or "" for c in stream) == "the Rímac"
        else:
            with (
                pytest.raises(openai.APIError, match="was repeated"),
                ask(lm, stream=True) as stream,
            ):
                list(stream)


@given(
    st.text(alphabet="Answer: \nxy", max_size=30),
    st.lists(st.integers(0, 30), max_size=5),
)
def test_pieces_of_an_answer_form_what_the_component_parses(text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    answer = str(parse(text, {"output": Port(str)}, "text")["output"])
    shown = AnswerText("Answer:")
    sent = [shown.add(1, text[a:b]) for a, b in itertools.pairwise(places)]
    rest = shown.rest(answer)
    assert rest is not None
    assert "".join([*sent, rest]) == answer


class Ticket(BaseModel):
    queue: str
    urgent: bool


class Color(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("kind", "answer", "text"),
    [
        (Literal["bug", "wish"], "Bug.", "bug"),
        (Color, "red", "red"),
        (bool, "yes", "true"),
        (float, "2.50", "2.5"),
        (list[str], "- a\n- b", '["a", "b"]'),
        (Ticket, '{"queue": "q", "urgent": true}', '{"queue": "q", "urgent": true}'),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_any_output_is_sent_as_a_text(kind: Any, answer: str, text: str, stream: bool) -> None:
    with (
        served(qa(output=kind), ScriptedLM(lambda message: answer)) as running,
        client(running) as lm,
    ):
        assert [model.id for model in lm.models.list()] == ["qa"]
        found = ask(lm, stream=stream)
        if not stream:
            assert found.choices[0].message.content == text
            return
        assert "".join(c.choices[0].delta.content or "" for c in found if c.choices) == text


class Untold:
    """A class that no JSON schema describes."""


@pytest.mark.parametrize("kind", [str | None, Any, str | list[str]])
def test_any_input_that_takes_a_text_can_be_chatted_with(kind: Any) -> None:
    answerer = cp.LLM("answerer")(question=cp.Input("question", kind))
    system = cp.System("qa", {"answer": answerer}, lm="lm")
    with served(system, ScriptedLM(lambda message: "the Rímac")) as running, client(running) as lm:
        assert ask(lm).choices[0].message.content == "the Rímac"


def test_an_output_that_json_cannot_describe_is_served() -> None:
    def make(question: str) -> Untold:
        return Untold()

    made = cp.Function("maker", make)(question=cp.Input("question"))
    with (
        served(cp.System("qa", {"answer": made}, lm="lm"), ScriptedLM([])) as running,
        running.client() as http,
    ):
        answer = http.post("/v1/run", json={"inputs": {"question": "?"}})
    assert answer.json()["outputs"]["answer"].endswith("Untold object>")


def test_a_system_that_cannot_chat_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    answerer = cp.LLM("answerer")(question=cp.Input("question"), context=cp.Input("context"))
    system = cp.System("qa", {"answer": answerer}, lm="lm")
    with served(system, ScriptedLM([])) as running, client(running) as lm:
        assert list(lm.models.list()) == []
        with pytest.raises(openai.NotFoundError, match="a chat needs one input, but it has 2"):
            ask(lm)
        with pytest.raises(openai.NotFoundError, match="a chat needs one input, but it has 2"):
            lm.models.retrieve("qa")
    assert "no chat for OpenAI's clients: a chat needs one input" in capfd.readouterr().err
