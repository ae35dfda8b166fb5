"""Types and bounds of engine settings, and the options that may be passed on to a model.

Only options of sampling and reasoning may be passed on. Others (number of answers, retries, fallbacks,
addresses, headers, keys, callbacks) would bypass the budget or the user's consent.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from compound.errors import DeclarationError, suggest_name

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
            near, possible = suggest_name(name, kind.model_fields), suggest_name("", kind.model_fields)
            names = near if near == possible else f"{near}; {possible}"
            raise DeclarationError(
                f"engine {model!r}: extra must not set {name!r}",
                hint=f"{names}; only sampling and reasoning options are passed on",
            ) from None
        raise DeclarationError(
            f"engine {model!r}: extra.{name}: {first['msg']}, but got {first['input']!r:.100}"
        ) from None


def check_settings(engine: Callable[..., object], given: Mapping[str, object]) -> None:
    """Validate settings against the types that an engine's ``__init__`` declares.

    Raises:
        DeclarationError: a setting is invalid; the message names it.

    Example:
        >>> class Mine:
        ...     def __init__(self, timeout: Seconds = 8.0) -> None:
        ...         check_settings(Mine, {"timeout": timeout})
        >>> Mine(0)
        Traceback (most recent call last):
        compound.errors.DeclarationError: Mine: timeout: Input should be greater than 0, but got 0
    """
    hints = typing.get_type_hints(engine.__init__, include_extras=True)
    for name, value in given.items():
        if name not in hints:
            continue
        plain = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        try:
            TypeAdapter(hints[name]).validate_python(plain, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            owner = getattr(engine, "__name__", "engine")
            raise DeclarationError(f"{owner}: {name}: {first['msg']}, but got {value!r:.100}") from None
