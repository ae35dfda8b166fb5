"""Call engines, which may be user code, and validate their results."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from compound.engine import Completion, Engine, OnText, Request, StreamingEngine, ToolCall, Usage
from compound.errors import DeclarationError
from compound.formatting import short_repr
from compound.registry.user_code import UserCodeError, check_signature, definition, reported

__all__ = ["check_images", "checked_engine", "completion", "has_stable_name", "no_images", "worst_case"]

MEMBERS = ("name", "concurrency", "remote", "priced", "worst_case", "generate", "aclose")
_WORST = "return compound.Usage(calls, prompt_tokens, completion_tokens)"
_COMPLETION = "return compound.Completion(text, compound.Usage(calls, prompt_tokens, completion_tokens))"


def checked_engine(name: str, engine: object) -> Engine:
    """Return what is given as an engine, if it has the members of one.

    Raises:
        UserCodeError: it has not.
    """
    if inspect.isclass(engine):
        raise UserCodeError(
            f"engine {name!r} is the class {engine.__name__} at {definition(engine)}, not an engine",
            hint=f"create an instance: {engine.__name__}()",
        )
    if not isinstance(engine, Engine):
        missing = [each for each in MEMBERS if not hasattr(engine, each)]
        raise UserCodeError(
            f"engine {name!r} at {definition(engine)} lacks {', '.join(missing)}",
            hint=f"an engine has {', '.join(MEMBERS)}",
        )
    return engine


def has_stable_name(engine: Engine) -> bool:
    """Return whether an engine says that its name identifies its answers, also in other processes.

    A subclass does not inherit the statement, because it may answer differently.
    """
    says = "stable_name" in {*vars(type(engine)), *getattr(engine, "__dict__", ())}
    return says and engine.stable_name is True  # type: ignore[attr-defined]


def worst_case(engine: Engine, request: Request) -> Usage:
    """Return the most that a request can use.

    Raises:
        UserCodeError: the engine takes other arguments, raises an error, or returns something else.
    """
    with _checked_signature(engine, "worst_case"), reported(f"engine {engine.name!r}", engine):
        found: object = engine.worst_case(request)
    if not isinstance(found, Usage):
        raise _wrong(engine, "worst_case", found, _WORST)
    return found


async def completion(engine: Engine, request: Request, on_text: OnText | None = None) -> Completion:
    """Send a request, and return the answer.

    Args:
        engine: the engine.
        request: the request.
        on_text: receives pieces of the text, if the engine can stream.

    Raises:
        UserCodeError: the engine takes other arguments, is not asynchronous, or returns something else.
    """
    # not isinstance(): on Python 3.11 it would evaluate every property of the protocol at each call
    method, parameters = "generate", ["request"]
    if on_text is not None and hasattr(engine, "stream"):
        method, parameters = "stream", ["request", "on_text"]
        with _checked_signature(engine, method, *parameters):
            started: object = cast("StreamingEngine", engine).stream(request, on_text)
    else:
        with _checked_signature(engine, method):
            started = engine.generate(request)
    if not inspect.isawaitable(started):
        raise _wrong(engine, method, started, f"write async def {method}(self, {', '.join(parameters)})")
    found: object = await started
    if not isinstance(found, Completion):
        raise _wrong(engine, method, found, _COMPLETION)
    if not isinstance(found.text, str) or not isinstance(found.usage, Usage):
        raise _wrong(engine, method, found, "its text must be a str, and its usage a Usage")
    if not isinstance(found.tool_calls, tuple) or not all(isinstance(c, ToolCall) for c in found.tool_calls):
        raise _wrong(engine, method, found, "its tool_calls must be a tuple of ToolCall")
    return found


def check_images(engine: Engine, name: str, request: Request) -> None:
    """Check that an engine takes the images of a request.

    Raises:
        DeclarationError: it does not.
    """
    if any(message.images for message in request.messages) and not getattr(engine, "takes_images", False):
        raise no_images(name)


def no_images(name: str) -> DeclarationError:
    """Return the error for a model that does not take images."""
    return DeclarationError(
        f"the model {name!r} does not take images",
        hint="choose a model that does; for a server of your own, set takes_images: true on its engine",
    )


@contextmanager
def _checked_signature(engine: Engine, method: str, *parameters: str) -> Iterator[None]:
    try:
        yield
    except TypeError:
        check_signature(
            getattr(engine, method), f"{method} of engine {engine.name!r}", *(parameters or ("request",))
        )
        raise


def _wrong(engine: Engine, method: str, found: object, hint: str) -> UserCodeError:
    place = definition(getattr(type(engine), method, engine))
    return UserCodeError(
        f"{method} of engine {engine.name!r} at {place} returned {short_repr(found)}", hint=hint
    )
