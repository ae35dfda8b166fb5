"""`compound`: declare a compound AI system as a typed graph, and let data improve it.

Public names are loaded when they are first used, so ``import compound`` loads neither torch,
transformers, optuna nor litellm.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Budget": "compound.budget",
    "Choice": "compound.space",
    "CompoundError": "compound.errors",
    "Component": "compound.component",
    "Operation": "compound.component",
    "Configuration": "compound.configuration",
    "Dataset": "compound.data",
    "Demos": "compound.space",
    "Example": "compound.contracts",
    "Executor": "compound.executor",
    "Float": "compound.space",
    "Input": "compound.component",
    "Int": "compound.space",
    "LoRA": "compound.space",
    "Score": "compound.contracts",
    "System": "compound.system",
    "Text": "compound.space",
    "Trace": "compound.trace",
    "Usage": "compound.contracts",
    "OptimizeSettings": "compound.settings",
    "Settings": "compound.settings",
    "method": "compound.registration",
    "Result": "compound.optimizing",
    "accuracy": "compound.metrics",
    "custom": "compound.metrics",
    "evaluate": "compound.sync",
    "exact_match": "compound.metrics",
    "load": "compound.configuration",
    "load_result": "compound.sync",
    "load_system": "compound.sync",
    "mrr": "compound.metrics",
    "optimize": "compound.sync",
    "recall_at_k": "compound.metrics",
    "run": "compound.sync",
    "token_f1": "compound.metrics",
    "RunFailed": "compound.errors",
    "LiteLLM": "compound.components.engines.lm_litellm:LiteLLMEngine",
    "Transformers": "compound.components.engines.lm_transformers:TransformersEngine",
    "VLLM": "compound.components.engines.lm_vllm:VLLMEngine",
    "BM25": "compound.components.index",
    "Dense": "compound.components.index",
    "FirstOf": "compound.components.function",
    "Function": "compound.components.function",
    "Hyperparameter": "compound.components.hyperparameter",
    "LLM": "compound.components.llm",
    "Loop": "compound.components.flow",
    "Map": "compound.components.flow",
    "PassageIndex": "compound.components.index",
    "Retriever": "compound.components.retriever",
    "Selector": "compound.components.selector",
}

__all__ = sorted(_HOME)  # noqa: PLE0605 - the names are loaded lazily


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'compound' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    try:
        value = getattr(importlib.import_module(module), attribute or name)
    except ImportError as error:
        importlib.import_module("compound.extras").raise_missing_extra(error, f"compound.{name}")
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
