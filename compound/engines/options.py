"""Settings and options of engines: their types and bounds, and the fields of requests that a server refuses.

Only options of sampling and reasoning may be passed on. Others (number of answers, retries,
fallbacks, addresses, headers, keys, callbacks) would bypass the budget or the user's consent.
Refused fields are named by a setting, or learned from the first refusal.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from compound.core.errors import DeclarationError, suggest_name

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Wait = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Plain = str | int | float | bool | None
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Options(BaseModel):
    """Sampling and reasoning options that most servers support."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the most likely tokens whose probabilities sum to this value."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Sample from this number of most likely tokens; 0 or -1 means all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from tokens with at least this probability, relative to the most likely token."""
    presence_penalty: Penalty | None = None
    """Penalize tokens that have occurred."""
    frequency_penalty: Penalty | None = None
    """Penalize tokens in proportion to how often they have occurred."""
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    """Divide the logits of tokens that have occurred; 1 has no effect."""
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    """Values added to the logits, by token id."""
    reasoning_effort: Effort | None = None
    """Reasoning effort of a reasoning model."""
    response_format: dict[str, object] | None = None
    """Format of the answer, such as ``{type: json_object}``."""
    chat_template_kwargs: dict[str, Plain] | None = None
    """Settings of the model's chat template, such as ``{enable_thinking: false}``."""


class RemoteOptions(Options):
    """Options that may be passed on to a provider."""

    verbosity: Literal["low", "medium", "high"] | None = None
    """Desired length of answers."""
    thinking: dict[Literal["type", "budget_tokens"], str | int] | None = None
    """Whether the model reasons before it answers, and with how many tokens of max_tokens."""
    user: str | None = None
    """Identifier of the end user, which a provider's terms may require."""
    num_ctx: Annotated[int, Field(ge=1)] | None = None
    """Window of the model in tokens, for ``ollama_chat/…``; Ollama cuts longer prompts off."""


class VLLMOptions(Options):
    """Options that may be passed on to a vLLM server."""

    min_tokens: Natural | None = None
    """Minimum length of the answer in tokens."""
    ignore_eos: bool | None = None
    """Continue after an end token, up to max_tokens."""
    skip_special_tokens: bool | None = None
    """Omit special tokens from the text."""
    spaces_between_special_tokens: bool | None = None
    """Insert spaces between special tokens."""
    stop_token_ids: list[Natural] | None = None
    """Tokens that end the answer."""
    allowed_token_ids: list[Natural] | None = None
    """The only tokens that may be sampled."""
    bad_words: list[str] | None = None
    """Words that may not be sampled."""
    structured_outputs: dict[str, object] | None = None
    """Grammar, regular expression, schema or choice that constrains the answer."""
    include_reasoning: bool | None = None
    """Return the reasoning separately from the answer."""
    thinking_token_budget: Natural | None = None
    """Maximum number of reasoning tokens."""


OptionsT = TypeVar("OptionsT", bound=Options)
SelfT = TypeVar("SelfT")
SettingsT = TypeVar("SettingsT")
P = ParamSpec("P")
UNCHECKED = {"model", "extra", "vllm", "openai", "devices", "_"}  # the last one is `KW_ONLY`


def validate_options(
    kind: type[OptionsT], given: OptionsT | Mapping[str, object] | None, model: str
) -> dict[str, object]:
    """Validate options, and return those that are set.

    Raises:
        DeclarationError: an option is unknown, not allowed, or has an invalid value.

    Example:
        >>> validate_options(RemoteOptions, {"top_p": 0.9}, "openai/gpt-4o-mini")
        {'top_p': 0.9}
    """
    if isinstance(given, Options):
        return given.model_dump(exclude_unset=True)
    try:
        return kind.model_validate(dict(given or {})).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            names = (suggest_name(name, kind.model_fields), suggest_name("", kind.model_fields))
            raise DeclarationError(
                f"engine {model!r}: extra must not set {name!r}",
                hint=f"{'; '.join(dict.fromkeys(names))}; only sampling and reasoning options are passed on",
            ) from None
        raise DeclarationError(
            f"engine {model!r}: extra.{name}: {first['msg']}, but got {first['input']!r:.100}"
        ) from None


def takes_settings(
    settings: Callable[P, SettingsT],
) -> Callable[[Callable[[SelfT, SettingsT], None]], Callable[Concatenate[SelfT, P], None]]:
    """Decorate the ``__init__`` of an engine that takes its settings as one frozen dataclass.

    The engine is made with the settings as arguments, which are validated against their types. The
    model, `extra` and settings of other engines are validated by the engine.

    Raises:
        DeclarationError: a setting is invalid; the message names it.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class MySettings:
        ...     timeout: Seconds = 8.0
        >>> class Mine:
        ...     @takes_settings(MySettings)
        ...     def __init__(self, settings: MySettings) -> None: ...
        >>> Mine(0)
        Traceback (most recent call last):
        compound.core.errors.DeclarationError: Mine: timeout: Input should be greater than 0, but got 0
    """

    def decorate(make: Callable[[SelfT, SettingsT], None]) -> Callable[Concatenate[SelfT, P], None]:
        @functools.wraps(cast("Any", settings).__init__)
        def checked(self: SelfT, *given: P.args, **named: P.kwargs) -> None:
            found = settings(*given, **named)
            for name, hint in typing.get_type_hints(settings, include_extras=True).items():
                if name in UNCHECKED:
                    continue
                value = getattr(found, name)
                is_list = isinstance(value, Sequence) and not isinstance(value, str)
                try:
                    one = tuple(value) if is_list else value
                    TypeAdapter(hint).validate_python(one, strict=True)
                except ValidationError as error:
                    problem = error.errors(include_url=False)[0]["msg"]
                    owner = type(self).__name__
                    raise DeclarationError(
                        f"{owner}: {name}: {problem}, but got {value!r:.100}"
                    ) from None
            make(self, found)

        return cast("Callable[Concatenate[SelfT, P], None]", checked)

    return decorate


RefusedField = Literal["max_tokens", "temperature", "seed", "stop", "response_format", "system"]
STATUSES = (400, 422)
CODES = {"unsupported_parameter", "unsupported_value", "unknown_parameter", "extra_forbidden"}
OTHER_CODES = {"context_length_exceeded", "content_filter", "model_not_found"}
REFUSAL = re.compile(
    r"unsupported|(?:not|n't|n’t|no)(?: longer)? (?:currently )?(?:be )?support"
    r"|(?:not|only) (?:both )?(?:be )?(?:permitted|allowed|accepted|set|used|specified|configurable|enabled)"
    r"|(?:not |un)available|unrecognized|unknown|unexpected|extra[_ ](?:forbidden|inputs|fields)|deprecated"
    r"|use ['`\"]?max_completion_tokens|replaced by|must be 1(?:\.0)?(?!\.?\d)|fixed at|must alternate"
    r"|roles are supported|only (?:the )?(?:default|\S+ is (?:allowed|supported))",
    re.IGNORECASE,
)
# the server takes the field, but not this value
RANGE = re.compile(
    r"\b(?:between|range|(?:less|greater) than|at (?:least|most)|maximum|minimum)\b|[<>≤≥]=?", re.I
)
SYSTEM = (
    r"(?:system|developer)['\"]? (?:role|message|prompt|instruction)|role.{0,60}\bsystem\b"
    r"|user and assistant roles|roles must alternate"
)
EFFECTS: Mapping[str, str] = {
    "temperature": "{value} is not sent, the server samples at its own, and tuning it has no effect",
    "seed": "seeds are not sent: equal requests may have different answers",
    "stop": "stop strings are not sent: answers are cut off after they arrive",
    "response_format": "the format of answers is only described in the prompt",
    "system": "system messages are sent as the start of the user's message",
}


class Unsupported:
    """The fields that a server does not take, and requests without them.

    Args:
        fields: those known in advance; others are added by `learn`, also from several threads.
        owner: the engine's name, for the log.

    >>> known = Unsupported(["max_tokens", "temperature"], "m")
    >>> known.adapt({"max_tokens": 5, "temperature": 0.7, "messages": []})
    {'messages': [], 'max_completion_tokens': 5}
    """

    def __init__(self, fields: Collection[str], owner: str) -> None:
        self.fields, self._owner = set(fields), owner

    def adapt(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request in the form that the server takes."""
        found = {name: value for name, value in document.items() if name not in self.fields}
        if "max_tokens" in document and "max_tokens" in self.fields:
            found["max_completion_tokens"] = document["max_tokens"]
        if "system" in self.fields:
            found["messages"] = _without_system(document["messages"])
        return found

    def learn(
        self, status: int, body: bytes, sent: Mapping[str, Any], kept: Collection[str] = ()
    ) -> bool:
        """Return whether to send a refused request again, in the form that `adapt` then gives it.

        Each field is given up once, so that a request is repeated at most as often as it has
        fields. Fields in ``kept``, which the user has set, are not given up.
        """
        names = [name for name in get_args(RefusedField) if name in sent and name not in kept]
        if any(message.get("role") == "system" for message in sent["messages"]):
            names.append("system")
        field = refused_field(status, body, names)
        if field and field not in self.fields:
            self.fields.add(field)
            if field in EFFECTS:
                effect = EFFECTS[field].format(value=sent.get(field))
                logging.getLogger("compound").warning(
                    "%s does not take %s: %s", self._owner, field, effect
                )
        return bool(field)


def refused_field(status: int, body: bytes, names: Collection[str]) -> str:
    """Return the field because of which a server refuses a request, or ``""``.

    >>> body = b'{"error": {"message": "wrong", "code": "unsupported_value", "param": "seed"}}'
    >>> refused_field(400, body, ["seed", "stop"])
    'seed'
    >>> refused_field(400, b"max_tokens exceeds the context", ["max_tokens"])
    ''
    """
    if status not in STATUSES:
        return ""
    text = body.decode(errors="replace")
    error: object = None
    with contextlib.suppress(ValueError, RecursionError):
        error = json.loads(text)
    error = error.get("error", error) if isinstance(error, dict) else {}
    error = error if isinstance(error, dict) else {}
    code, parameter = str(error.get("code")), str(error.get("param"))
    is_refusal = code in CODES or (REFUSAL.search(text) and not RANGE.search(text))
    if code in OTHER_CODES or not is_refusal:
        return ""
    if re.fullmatch(r"messages\W.*role", parameter):
        parameter = "system"
    if parameter in names:
        return parameter
    patterns = {name: SYSTEM if name == "system" else rf"(?<![\w.]){name}(?!\w)" for name in names}
    found = {name: re.search(pattern, text, re.IGNORECASE) for name, pattern in patterns.items()}
    places = {name: place.start() for name, place in found.items() if place}
    return min(places, key=lambda name: places[name], default="")


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which system messages are the start of the next one by the user.

    >>> _without_system([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    [{'role': 'user', 'content': 'Be brief.\\n\\nHi'}]
    """
    plain: list[dict[str, Any]] = []
    held: list[str] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "system":
            held.append(cast("str", content))
        elif message["role"] == "user" and held:
            start = "\n\n".join(held)
            parts = [{"type": "text", "text": start}, *content]
            text = f"{start}\n\n{content}" if isinstance(content, str) else parts
            plain.append({**message, "content": text})
            held = []
        else:
            plain.append(message)
    return [*plain, *([{"role": "user", "content": "\n\n".join(held)}] if held else [])]
