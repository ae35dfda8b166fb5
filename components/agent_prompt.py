"""Prompts of an external agent: components that rewrite, send and record its requests."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from compound.components.gateway.bodies import check_fields, read_messages, read_tools
from compound.components.gateway.documents import (
    CURRENT,
    Document,
    Route,
    TextSlot,
    answer_format,
    as_document,
    number,
    readable_messages,
    stop_strings,
    text_of,
    text_slots,
)
from compound.components.gateway.templates import PromptTemplate, fill
from compound.core.engine import Adapter, Forward, Request
from compound.core.errors import CallError, DeclarationError, TransientError
from compound.core.narrowing import entry, report_wrong_arguments
from compound.core.storage.artifacts import is_reference
from compound.graph.component import CallContext, Operation, check_name
from compound.graph.configuration import digest
from compound.graph.space import Choice, Float, Int, Text, Weights
from compound.graph.types import Port

VERSION = 1  # increment it when equal settings lead to another request
LIMIT = 4096  # tokens of an answer if neither the agent nor the component limits it
CHAT_FIELDS = ("max_completion_tokens", "max_tokens")
FIELDS = {"chat/completions": CHAT_FIELDS, "responses": ("max_output_tokens",)}
MATCHED = ("system", "user")


@report_wrong_arguments
@dataclass(frozen=True, eq=False, repr=False)
class AgentPrompt(Operation):
    """A prompt of an `ExternalAgent`: recognizes requests, and replaces their text and settings.

    A request is recognized if its first system (or developer) message and its first user message
    match the templates in ``match``. The texts and settings that are given here replace those of
    the request; everything else is sent as the agent wrote it.

    Attributes:
        name: the component's name.
        match: templates of the messages, by role: ``system``, ``user``, or both; see
            `compound.components.gateway.templates`. By default the declared texts; empty for a
            component that takes all requests.
        system: the text that replaces the system message; may contain the placeholders of its
            template.
        prompt: the text that replaces the user message.
        lm: the model that answers; ``None`` uses the system's model.
        temperature: the sampling temperature; ``None`` leaves the agent's.
        max_tokens: the maximum length of an answer; ``None`` leaves the agent's, and limits to 4096
            tokens a request that states none, since a budget must know a limit.
        weights: LoRA adapter weights; tunable if given. They need ``max_tokens``.
        timeout: time limit of one attempt in seconds.
        retries: how often transient errors are retried.

    Raises:
        DeclarationError: a template is invalid, or a text is given for a message that is not
            matched.

    Example:
        >>> planner = AgentPrompt("planner", system=Text("You plan trips to {{place}}."))
        >>> message = {"role": "system", "content": "You plan trips to Peru."}
        >>> planner.recognizes("chat/completions", {"messages": [message]})
        True
    """

    name: str
    match: Mapping[str, str] | None = None
    system: str | Text | None = None
    prompt: str | Text | None = None
    lm: str | Choice | None = None
    temperature: NonNegativeFloat | Float | Choice | None = None
    max_tokens: PositiveInt | Int | Choice | None = None
    weights: Weights | None = None
    timeout: PositiveFloat | None = 120.0
    retries: NonNegativeInt = 3

    kind = "agent_prompt"
    cacheable = True
    external_inputs = True
    inputs: ClassVar[Mapping[str, Port]] = {
        "request": Port(dict[str, object]),
        "route": Port(str),
    }
    outputs: ClassVar[Mapping[str, Port]] = {
        "text": Port(str),
        "response": Port(dict[str, object]),
    }

    def __post_init__(self) -> None:
        check_name("AgentPrompt", self.name)
        for role in self.templates:
            if role not in MATCHED:
                raise DeclarationError(
                    f"prompt {self.name!r}: match names {role!r}, but only {' and '.join(MATCHED)} messages "
                    "can be matched"
                )
        if self.weights is not None and self.max_tokens is None:
            raise DeclarationError(
                f"prompt {self.name!r} has weights, but no max_tokens, which bounds the samples of training",
                hint="set max_tokens, for example 256",
            )
        for role, text in (("system", self.system), ("user", self.prompt)):
            if text is not None and role not in self.templates:
                raise DeclarationError(
                    f"prompt {self.name!r} replaces the {role} message, but match does not name it",
                    hint=f"add the text that the agent sends: match: {{{role}: …}}",
                )

    @property
    def templates(self) -> Mapping[str, PromptTemplate]:
        """Templates of the messages by role."""
        if self.match is not None:
            return {role: PromptTemplate(text) for role, text in self.match.items()}
        texts = {"system": self.system, "user": self.prompt}
        starts = {
            role: text.value if isinstance(text, Text) else text for role, text in texts.items()
        }
        return {role: PromptTemplate(text) for role, text in starts.items() if text is not None}

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        names = ("system", "prompt", "lm", "temperature", "max_tokens", "weights")
        return {name: getattr(self, name) for name in names}

    @property
    def version(self) -> str:  # noqa: D102
        templates = {role: template.text for role, template in self.templates.items()}
        return "agent_prompt:" + digest([VERSION, templates, self.weights is not None])

    def deterministic(self, values: Mapping[str, object]) -> bool:  # noqa: D102
        return values["temperature"] == 0  # without a setting, requests may have any temperature

    def recognizes(self, route: Route, document: Document) -> bool:
        """Return whether a request is one of this prompt."""
        templates = self.templates
        if not templates:
            return True
        first = _first_slots(route, document)
        return all(
            role in first and template.match(first[role].text) is not None
            for role, template in templates.items()
        )

    def rewritten(self, route: Route, document: Document, values: Mapping[str, object]) -> Document:
        """Return a request with the texts and settings of this prompt."""
        new = copy.deepcopy(document)
        first = _first_slots(route, new)
        for role, template in self.templates.items():
            text = values["system" if role == "system" else "prompt"]
            if isinstance(text, str) and (found := template.match(first[role].text)) is not None:
                first[role].replace(fill(text, found))
        if values["temperature"] is not None:
            new["temperature"] = values["temperature"]
        names = FIELDS[route]
        if values["max_tokens"] is not None:
            for name in names[1:]:
                new.pop(name, None)
            new[names[0]] = values["max_tokens"]
        elif number(new, *names) is None:
            new[names[0]] = LIMIT
        return new

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        if not values["lm"]:
            raise DeclarationError(
                f"the agent's prompt {self.name!r} has no model",
                hint="set lm, for example lm='smollm2', on the agent or on the system",
            )
        lm, route = entry(values, "lm", str), cast("Route", inputs["route"])
        document = self.rewritten(route, cast("Document", inputs["request"]), values)
        try:
            response = await self._send(lm, route, document, values, call)
        except Exception as error:
            exchange = CURRENT.get()
            if exchange is not None:  # the agent is told the reason
                exchange.kind = error.kind if isinstance(error, CallError) else "error"
                exchange.message = str(error)
                # a retry would repeat the text
                if exchange.begun and isinstance(error, TransientError):
                    raise CallError(str(error), kind=error.kind) from error
            raise
        return {"text": text_of(response), "response": response}

    async def _send(
        self,
        lm: str,
        route: Route,
        document: Document,
        values: Mapping[str, object],
        call: CallContext,
    ) -> Document:
        exchange = CURRENT.get()
        stream = exchange is not None and exchange.stream
        forwards = call.forwards(lm)
        weights = values["weights"]
        temperature = number(document, "temperature")
        if not forwards:
            check_fields(route, document, lm)
        tools, choice = ((), "auto") if forwards else read_tools(document, lm)
        request = Request(
            messages=readable_messages(route, document)
            if forwards
            else read_messages(route, document, lm),
            max_tokens=int(number(document, *FIELDS[route]) or LIMIT),
            temperature=1.0 if temperature is None else float(temperature),
            stop=stop_strings(document),
            seed=call.seed % 2**64,
            adapter=Adapter(**weights) if is_reference(weights) else None,
            want_tokens=self.weights is not None,
            format=answer_format(route, document),
            tools=tools,
            tool_choice=choice,
            forward=Forward(route, json.dumps(document), stream) if forwards else None,
        )
        if exchange is not None:
            exchange.raw = forwards
        # a tool call in text must not reach the agent as text
        on_text = exchange.put if exchange and stream and not request.uses_tools else None
        try:
            completion = await call.generate(lm, request, on_text)
        except DeclarationError as error:
            if not any(message.images for message in request.messages):
                raise
            # the agent, not the system, asks for what the model does not take
            raise CallError(error.message, hint=error.hint, kind="unsupported") from error
        if not forwards and document.get("parallel_tool_calls") is False:
            completion = replace(completion, tool_calls=completion.tool_calls[:1])
        if completion.body:
            return cast("Document", json.loads(completion.body))
        return as_document(route, lm, completion, 0 if exchange is None else exchange.number)


def _first_slots(route: Route, document: Document) -> dict[str, TextSlot]:
    first: dict[str, TextSlot] = {}
    for slot in text_slots(route, document):
        first.setdefault(slot.role, slot)
    return first
