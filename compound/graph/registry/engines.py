"""Find engines by the name of a model, and kinds of engines by name.

``smollm2``, ``gemma3-270m``, a folder, or ``local/NAME`` run in this process; ``vllm/NAME`` runs in
a vLLM server that is started for it; every other name goes to litellm (``openai/gpt-4o-mini``,
``hosted_vllm/Qwen/Qwen3-8B``, ``ollama_chat/llama3.2`` …).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from compound.core.engine import (
    Capabilities,
    Completion,
    Engine,
    OnText,
    Request,
    StreamingEngine,
    ToolCall,
    Usage,
)
from compound.core.errors import DeclarationError, suggest_name
from compound.core.formatting import short_repr
from compound.graph.registry.code import find_code
from compound.graph.registry.plugins import Plugin, visible, warn_if_hidden
from compound.graph.registry.user_code import (
    UserCodeError,
    check_signature,
    definition,
    reported,
    short_place,
)
from compound.graph.space import Weights
from compound.graph.system import System

Engines = Mapping[str, Engine] | Callable[[str], Engine]
GivenEngines = Mapping[str, Engine | str] | Callable[[str], Engine]

EMBEDDED = ("smollm2", "gemma3-270m")
KINDS = {
    "transformers": "compound.engines.local.engine:TransformersEngine",
    "litellm": "compound.engines.litellm:LiteLLMEngine",
    "vllm": "compound.engines.vllm.engine:VLLMEngine",
    "openai": "compound.engines.openai:OpenAIEngine",
    "fleet": "compound.engines.fleet:FleetEngine",
}
BUILT_IN = (*KINDS, "class")
"""The names that an installed engine cannot have."""


def find_engine(lm: str) -> Engine:
    """Return the engine of a model by its name."""
    if lm in EMBEDDED or Path(lm).is_dir():
        return open_engine("transformers", model=lm)
    if lm.startswith("local/"):
        return open_engine("transformers", model=lm.removeprefix("local/"))
    if lm.startswith("vllm/"):
        return open_engine("vllm", model=lm.removeprefix("vllm/"))
    if "/" in lm:
        return open_engine("litellm", model=lm)
    raise DeclarationError(
        f"no engine for the model {lm!r}",
        hint="use 'smollm2', a folder, 'local/HUB-ID', 'vllm/HUB-ID', or 'provider/model' such as "
        "'openai/gpt-4o-mini'",
    )


def resolve_engines(system: System, engines: GivenEngines | None) -> Callable[[str], Engine]:
    """Return a function that finds the engine of a model.

    A model is looked up in ``engines`` first, where a string redirects to another model; then in
    the engines of the system's file; then by the form of its name (`find_engine`).

    Raises:
        DeclarationError: ``system`` is no system, or ``engines`` neither a mapping to engines nor a
            function.
    """
    given: object = system
    if not isinstance(given, System):
        raise DeclarationError(
            f"system must be a System, but is {short_repr(given)}",
            hint="declare it with cp.System, or load a file with cp.load_system('FILE.yaml')",
        )
    return engine_finder(engines, system.engines)


def engine_finder(
    engines: GivenEngines | None, otherwise: Callable[[str], Engine] | None = None
) -> Callable[[str], Engine]:
    """Return a function that finds the engine of a model, as `resolve_engines` does for a system."""
    usual = otherwise or find_engine
    if engines is None:
        return usual
    if not isinstance(engines, Mapping):
        if callable(engines) and not isinstance(engines, Engine):
            check_signature(engines, "engines", "lm")
            return engines
        raise DeclarationError(
            f"engines must map model names to engines, but is {engines!r:.80}",
            hint="such as engines={'fast': cp.engines.LiteLLM('openai/gpt-4o-mini')}; "
            "to choose the model of a system, use System(…, lm=…) or system.with_lm(…)",
        )
    known = dict(engines)
    given: Mapping[str, object] = known
    for name, engine in given.items():
        if not isinstance(engine, Engine | str):
            _refuse_engine(name, engine)

    def find(lm: str) -> Engine:
        engine = known.get(lm, lm)
        if not isinstance(engine, str):
            return engine
        try:
            return usual(engine)
        except DeclarationError as error:
            if engine != lm:
                raise
            raise DeclarationError(
                error.message, hint=f"{suggest_name(lm, known)}; or {error.hint}"
            ) from None

    return find


def _refuse_engine(name: str, engine: object) -> None:
    if short_place(engine):  # an object of a user's class, which lacks something
        checked_engine(name, engine)
    raise DeclarationError(
        f"engines[{name!r}] must be an engine, but is {engine!r:.80}",
        hint="such as cp.engines.LiteLLM('openai/gpt-4o-mini') or cp.engines.Transformers('smollm2')",
    )


def for_system(engines: Engines, system: System) -> Engines:
    """Return engines that know, before they start anything, what a system's adapters need of them."""
    ranks = [space.rank for space in system.parameters.values() if isinstance(space, Weights)]
    return _each(engines, lambda engine: ranks and Capabilities(engine).prepare(max(ranks)))


def with_gpu_shares(engines: Engines, shares: Mapping[str, float]) -> Engines:
    """Return engines whose servers, if started later, use at most a share of the memory of each GPU."""
    return _each(engines, lambda engine: Capabilities(engine).limit_gpu_memory(shares))


def _each(engines: Engines, change: Callable[[Engine], object]) -> Engines:
    """Return engines that are changed before their first use."""

    def changed(engine: Engine) -> Engine:
        change(engine)
        return engine

    if isinstance(engines, Mapping):
        return {name: changed(engine) for name, engine in engines.items()}
    return lambda lm: changed(engines(lm))


def open_engine(kind: str, **settings: object) -> Engine:
    """Make an engine of a kind, built in or installed, with its settings."""
    if kind in KINDS:
        warn_if_hidden("engines", kind)
    return engine_class(kind)(**settings)


def installed() -> Mapping[str, Plugin]:
    """Return the kinds of engines of installed packages that no kind built in has the name of."""
    return visible("engines", BUILT_IN)


def engine_class(kind: str) -> Callable[..., Engine]:
    """Return the class of a kind of engine; its typed parameters are the settings in files."""
    if kind in KINDS:
        module, _, name = KINDS[kind].partition(":")
        built_in: Callable[..., Engine] = getattr(importlib.import_module(module), name)
        return built_in
    if kind not in installed():
        raise DeclarationError(
            f"no kind of engine {kind!r}", hint=suggest_name(kind, [*KINDS, *installed()])
        )
    return _made_by(kind, installed()[kind].load())


def own_engine(place: str, folder: Path) -> Callable[..., Engine]:
    """Return the class of an engine of a user's own; errors in it are reported with their lines."""
    return _made_by(place, find_code(place, folder))


def _made_by(kind: str, found: object) -> Callable[..., Engine]:
    if not callable(found):
        raise UserCodeError(
            f"engine {kind!r} is {short_repr(found)}, which is not a class",
            hint="name a class that implements Engine",
        )
    return _checked(kind, found)


def _checked(kind: str, found: Callable[..., object]) -> Callable[..., Engine]:
    """Return a function that reports errors in the user's code, and rejects objects that are not engines."""

    @functools.wraps(found, updated=())
    def make(*arguments: object, **settings: object) -> Engine:
        with reported(f"engine {kind!r}", found):
            made = found(*arguments, **settings)
        return checked_engine(kind, made)

    return make


MEMBERS = ("name", "concurrency", "remote", "priced", "worst_case", "generate", "aclose")
_WORST = "return compound.ext.Usage(calls, prompt_tokens, completion_tokens)"
_COMPLETION = (
    "return compound.ext.Completion(text, "
    "compound.ext.Usage(calls, prompt_tokens, completion_tokens))"
)


def checked_engine(name: str, engine: object) -> Engine:
    """Return what is given as an engine, if it has the members of one."""
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
    """Return the most that a request can use."""
    with _checked_signature(engine, "worst_case"), reported(f"engine {engine.name!r}", engine):
        found: object = engine.worst_case(request)
    if not isinstance(found, Usage):
        raise _wrong(engine, "worst_case", found, _WORST)
    return found


def started_completion(
    engine: Engine, request: Request, on_text: OnText | None = None
) -> Awaitable[object]:
    """Start a request; check what it resolves to with `checked_completion`."""
    method, parameters = _method(engine, on_text)
    with _checked_signature(engine, method, *parameters):
        started: object = (
            engine.generate(request)
            if on_text is None or method == "generate"
            else cast("StreamingEngine", engine).stream(request, on_text)
        )
    if not inspect.isawaitable(started):
        raise _wrong(
            engine, method, started, f"write async def {method}(self, {', '.join(parameters)})"
        )
    return started


def checked_completion(engine: Engine, found: object, on_text: OnText | None = None) -> Completion:
    """Return an engine's answer, if it is one."""
    method = _method(engine, on_text)[0]
    if not isinstance(found, Completion):
        raise _wrong(engine, method, found, _COMPLETION)
    if not isinstance(found.text, str) or not isinstance(found.usage, Usage):
        raise _wrong(engine, method, found, "its text must be a str, and its usage a Usage")
    if not isinstance(found.tool_calls, tuple) or not all(
        isinstance(c, ToolCall) for c in found.tool_calls
    ):
        raise _wrong(engine, method, found, "its tool_calls must be a tuple of ToolCall")
    return found


def _method(engine: Engine, on_text: OnText | None) -> tuple[str, tuple[str, ...]]:
    """Return the method that answers a request, and its parameters."""
    # not isinstance(): on Python 3.11 it would evaluate every property of the protocol at each call
    if on_text is not None and hasattr(engine, "stream"):
        return "stream", ("request", "on_text")
    return "generate", ("request",)


def check_images(engine: Engine, name: str, request: Request) -> None:
    """Check that an engine takes the images of a request."""
    if (
        any(message.images for message in request.messages)
        and not Capabilities(engine).takes_images
    ):
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
            getattr(engine, method),
            f"{method} of engine {engine.name!r}",
            *(parameters or ("request",)),
        )
        raise


def _wrong(engine: Engine, method: str, found: object, hint: str) -> UserCodeError:
    place = definition(getattr(type(engine), method, engine))
    return UserCodeError(
        f"{method} of engine {engine.name!r} at {place} returned {short_repr(found)}", hint=hint
    )
