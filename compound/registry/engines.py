"""Find engines by the name of a model, and kinds of engines by name.

``smollm2``, ``gemma3-270m``, a folder, or ``local/NAME`` run in this process; ``vllm/NAME`` runs in a vLLM
server that is started for it; every other name goes to litellm (``openai/gpt-4o-mini``,
``hosted_vllm/Qwen/Qwen3-8B``, ``ollama_chat/llama3.2`` …).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

from compound.engine import Engine
from compound.errors import DeclarationError, suggest_name
from compound.formatting import short_repr
from compound.graph.space import Weights
from compound.graph.system import System
from compound.registry.code import find_code
from compound.registry.engine_checks import checked_engine
from compound.registry.plugins import Plugin, visible, warn_if_hidden
from compound.registry.user_code import UserCodeError, reported

Engines = Mapping[str, Engine] | Callable[[str], Engine]

EMBEDDED = ("smollm2", "gemma3-270m")
KINDS = {
    "transformers": "compound.components.engines.local.engine:TransformersEngine",
    "litellm": "compound.components.engines.litellm:LiteLLMEngine",
    "vllm": "compound.components.engines.vllm.engine:VLLMEngine",
    "openai": "compound.components.engines.openai.engine:OpenAIEngine",
    "fleet": "compound.components.engines.fleet.engine:FleetEngine",
}
BUILT_IN = (*KINDS, "class")
"""The names that an installed engine cannot have."""


def find_engine(lm: str) -> Engine:
    """Return the engine of a model by its name.

    Raises:
        DeclarationError: the name fits no convention.
    """
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


def for_system(engines: Engines, system: System) -> Engines:
    """Return engines that know, before they start anything, what a system's adapters need of them."""
    ranks = [space.rank for space in system.parameters.values() if isinstance(space, Weights)]

    def prepared(engine: Engine) -> Engine:
        if ranks and hasattr(engine, "prepare"):
            engine.prepare(max(ranks))
        return engine

    if isinstance(engines, Mapping):
        return {name: prepared(engine) for name, engine in engines.items()}
    return lambda lm: prepared(engines(lm))


def with_gpu_shares(engines: Engines, shares: Mapping[str, float]) -> Engines:
    """Return engines whose servers, if started later, use at most a share of the memory of each GPU."""

    def limited(engine: Engine) -> Engine:
        if hasattr(engine, "limit_gpu_memory"):
            engine.limit_gpu_memory(shares)
        return engine

    if isinstance(engines, Mapping):
        return {name: limited(engine) for name, engine in engines.items()}
    return lambda lm: limited(engines(lm))


def open_engine(kind: str, **settings: object) -> Engine:
    """Make an engine of a kind, built in or installed, with its settings."""
    if kind in KINDS:
        warn_if_hidden("engines", kind)
    return engine_class(kind)(**settings)


def installed() -> Mapping[str, Plugin]:
    """Return the kinds of engines of installed packages that no kind built in has the name of."""
    return visible("engines", BUILT_IN)


def engine_class(kind: str) -> Callable[..., Engine]:
    """Return the class of a kind of engine; its typed parameters are the settings in files.

    Raises:
        DeclarationError: there is no such kind, or its package cannot be loaded.
    """
    if kind in KINDS:
        module, _, name = KINDS[kind].partition(":")
        built_in: Callable[..., Engine] = getattr(importlib.import_module(module), name)
        return built_in
    if kind not in installed():
        raise DeclarationError(f"no kind of engine {kind!r}", hint=suggest_name(kind, [*KINDS, *installed()]))
    return _made_by(kind, installed()[kind].load())


def own_engine(place: str, folder: Path) -> Callable[..., Engine]:
    """Return the class of an engine of a user's own; errors in it are reported with their lines.

    Args:
        place: ``module:name``.
        folder: where the module is looked for first.

    Raises:
        DeclarationError: it cannot be imported.
    """
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
