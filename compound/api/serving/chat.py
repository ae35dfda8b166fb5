"""OpenAI's chat interface for a system with one text input and one text output."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from compound.api.serving.ports import (
    ServedRoute,
    chat_problem,
    chat_text,
    parse_body,
    streamed_call,
)
from compound.api.serving.routes import EventResponse, data
from compound.api.serving.service import Service, Ticket, answer_connected, of_failure
from compound.core.engine import Usage
from compound.core.web.problems import HTTPProblem, json_response
from compound.execution.trace import Trace
from compound.graph.system import System

DONE = b"data: [DONE]\n\n"


class ContentPart(BaseModel):
    """A part of a message; only text can be read."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        """The text of all parts."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False


class ChatRequest(BaseModel):
    """A request for a completion.

    The system's configuration decides on sampling, so that the request's own settings of it are
    ignored.
    """

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    seed: int | None = Field(None, ge=0, lt=2**53)
    tools: list[dict[str, Any]] | None = Field(None, max_length=0)


class AnswerText:
    """The text of an answer, as far as it is final while it arrives.

    An answer is stripped of blanks at both ends, and of a repeated cue at its start, like that of
    the component. A repeated attempt starts the text again; text that was sent cannot be taken
    back.

    >>> text = AnswerText("Answer:")
    >>> text.add(1, " Answ"), text.add(1, "er: the "), text.add(1, "Rímac "), text.rest("the Rímac")
    ('', 'the', ' Rímac', '')
    """

    def __init__(self, cue: str) -> None:
        self._cue, self._text, self._attempt, self._sent = cue, "", 1, ""

    def add(self, attempt: int, piece: str) -> str:
        """Return the new text after another piece."""
        if attempt != self._attempt:
            self._attempt, self._text = attempt, ""
        self._text += piece
        start = self._text.lstrip()
        if self._cue and self._cue.startswith(start):
            return ""
        final = start.removeprefix(self._cue).strip() if self._cue else start.rstrip()
        return self._after(final)

    def rest(self, answer: str) -> str | None:
        """Return what is left of the whole answer; ``None`` if other text was sent."""
        return self._after(answer) if answer.startswith(self._sent) else None

    def _after(self, text: str) -> str:
        if not text.startswith(self._sent):
            return ""
        new, self._sent = text[len(self._sent) :], text
        return new


def prompt_of(messages: list[ChatMessage]) -> str:
    """Return a conversation as one text: a single message as it is, several with the names of their roles.

    >>> prompt_of([ChatMessage(role="user", content="Which river?")])
    'Which river?'
    >>> prompt_of([ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hi")])
    'System: Be brief.\\n\\nUser: Hi'
    """
    if len(messages) == 1:
        return messages[0].text
    return "\n\n".join(f"{message.role.capitalize()}: {message.text}" for message in messages)


def chat_routes(service: Service, system: System, created: int) -> list[ServedRoute]:
    """Return the routes of the chat; a system without one has them too, to answer why."""
    problem = chat_problem(system)

    def check_chat() -> None:
        if problem:
            message = f"{system.name!r} has no chat: {problem}; POST /v1/run runs it"
            raise HTTPProblem(404, "no_chat", message)

    async def chat(request: Request) -> Response:
        check_chat()
        ((text_input,), (output,)) = system.inputs, system.outputs
        body: ChatRequest = parse_body(ChatRequest, await request.body())
        check_model(body.model, system)
        ticket = service.ticket(body.seed)
        inputs = {text_input: prompt_of(body.messages)}
        if body.stream:
            service.check_queue()  # while the answer can still have another status than 200
            usage = body.stream_options is not None and body.stream_options.include_usage
            return EventResponse(_chunks(service, ticket, system, inputs, usage), ticket.run)

        async def answer() -> Response:
            trace = await service.run(ticket, inputs)
            return json_response(
                _completion(ticket, system, chat_text(trace.outputs[output]), trace.usage)
            )

        return await answer_connected(request.receive, answer())

    async def models(request: Request) -> Response:
        return json_response(
            {"object": "list", "data": [] if problem else [_model(system, created)]}
        )

    async def model(request: Request) -> Response:
        check_chat()
        check_model(request.path_params["name"], system)
        return json_response(_model(system, created))

    complete, listed = "Complete a chat, as OpenAI's clients ask.", "List the system as a model."
    return [
        ServedRoute("/v1/chat/completions", chat, "" if problem else complete, ChatRequest),
        ServedRoute("/v1/models", models, "" if problem else listed),
        ServedRoute("/v1/models/{name}", model),
    ]


def check_model(name: str, system: System) -> None:
    """Reject the name of another model.

    Raises:
        Problem: the name is not that of the system.
    """
    if name != system.name:
        raise HTTPProblem(
            404,
            "model_not_found",
            f"there is no model {name!r:.100}; this server has {system.name!r}",
        )


def _model(system: System, created: int) -> dict[str, object]:
    return {"id": system.name, "object": "model", "created": created, "owned_by": "compound"}


def _completion(ticket: Ticket, system: System, text: str, usage: Usage) -> dict[str, object]:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {
        **_head(ticket, system, "chat.completion"),
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": _usage(usage),
    }


def _head(ticket: Ticket, system: System, kind: str) -> dict[str, object]:
    """Return the common fields; the id is that of the run, for feedback."""
    return {
        "id": ticket.run,
        "object": kind,
        "created": int(time.time()),
        "model": system.name,
        "system_fingerprint": ticket.deployment.digest[:16],
    }


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.tokens,
    }


async def _chunks(
    service: Service, ticket: Ticket, system: System, inputs: Mapping[str, object], with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of a streamed answer."""
    head = _head(ticket, system, "chat.completion.chunk")
    (output,) = system.outputs
    address, cue = streamed_call(ticket.deployment.system) or ("", "")
    text = AnswerText(cue)
    events = service.events(ticket, inputs)
    yield _chunk(head, {"role": "assistant", "content": ""})
    try:
        async for found in events:
            if isinstance(found, Trace):
                for chunk in _last_chunks(head, ticket, found, text, output):
                    yield chunk
                if with_usage and found.failure is None:
                    yield data(head | {"choices": [], "usage": _usage(found.usage)})
            elif (found.kind, found.address, found.request) == ("token", address, 0) and (
                new := text.add(found.attempt, found.text)
            ):
                yield _chunk(head, {"content": new})
    except HTTPProblem as problem:
        yield data(problem.document())
    finally:
        await events.aclose()
    yield DONE


def _last_chunks(
    head: Mapping[str, object], ticket: Ticket, trace: Trace, text: AnswerText, output: str
) -> list[bytes]:
    """Return the rest of the answer and its end, or the error."""
    if trace.failure is not None:
        return [data(of_failure(trace.failure, ticket.run).document())]
    rest = text.rest(chat_text(trace.outputs[output]))
    if rest is None:
        message = "the call was repeated, and its answer differs from the text that was sent"
        return [data(HTTPProblem(502, "transient", message, ticket.run).document())]
    chunks = [_chunk(head, {"content": rest})] if rest else []
    return [*chunks, _chunk(head, {}, "stop")]


def _chunk(
    head: Mapping[str, object], delta: Mapping[str, object], finish: str | None = None
) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return data({**head, "choices": [choice]})
