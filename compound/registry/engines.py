"""From a model's name to its engine, by convention.

``smollm2``, a folder, or ``local/NAME`` run in this process; ``vllm/NAME`` runs in a vLLM server that is
started for it; every other name goes to litellm (``openai/gpt-4o-mini``, ``hosted_vllm/Qwen/Qwen3-8B``,
``ollama/llama3`` …).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

from compound.engine import Engine
from compound.errors import DeclarationError
from compound.graph.space import Weights
from compound.graph.system import System

Engines = Mapping[str, Engine] | Callable[[str], Engine]

EMBEDDED = ("smollm2",)
KINDS = {
    "transformers": "compound.components.engines.local.engine:TransformersEngine",
    "litellm": "compound.components.engines.litellm:LiteLLMEngine",
    "vllm": "compound.components.engines.vllm.engine:VLLMEngine",
}


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


def open_engine(kind: str, **settings: object) -> Engine:
    """Make an engine of a kind (``transformers``, ``litellm`` or ``vllm``) with its settings."""
    return engine_class(kind)(**settings)


def engine_class(kind: str) -> Callable[..., Engine]:
    """Return the class of a kind of engine."""
    module, _, name = KINDS[kind].partition(":")
    found: Callable[..., Engine] = getattr(importlib.import_module(module), name)
    return found
