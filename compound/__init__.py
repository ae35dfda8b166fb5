"""`compound`: declare a compound AI system as a typed graph, and let data improve it.

Public names are loaded when they are first used, so ``import compound`` loads neither torch,
transformers, optuna nor litellm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that type checkers see what `__getattr__` finds
    from compound.budget import Budget as Budget
    from compound.component import Component as Component
    from compound.component import Input as Input
    from compound.component import Operation as Operation
    from compound.components.engines.lm_litellm import LiteLLMEngine as LiteLLM  # noqa: F401
    from compound.components.engines.lm_transformers import TransformersEngine as Transformers  # noqa: F401
    from compound.components.engines.lm_vllm import VLLMEngine as VLLM  # noqa: F401, N814
    from compound.components.flow import Loop as Loop
    from compound.components.flow import Map as Map
    from compound.components.function import FirstOf as FirstOf
    from compound.components.function import Function as Function
    from compound.components.hyperparameter import Hyperparameter as Hyperparameter
    from compound.components.index import BM25 as BM25
    from compound.components.index import Dense as Dense
    from compound.components.index import PassageIndex as PassageIndex
    from compound.components.llm import LLM as LLM
    from compound.components.retriever import Retriever as Retriever
    from compound.components.selector import Selector as Selector
    from compound.configuration import Configuration as Configuration
    from compound.configuration import load as load
    from compound.contracts import Example as Example
    from compound.contracts import Score as Score
    from compound.contracts import Usage as Usage
    from compound.data import Dataset as Dataset
    from compound.errors import CompoundError as CompoundError
    from compound.errors import RunFailed as RunFailed
    from compound.executor import Executor as Executor
    from compound.metrics import accuracy as accuracy
    from compound.metrics import custom as custom
    from compound.metrics import exact_match as exact_match
    from compound.metrics import mrr as mrr
    from compound.metrics import recall_at_k as recall_at_k
    from compound.metrics import token_f1 as token_f1
    from compound.optimizing import Result as Result
    from compound.registration import method as method
    from compound.settings import OptimizeSettings as OptimizeSettings
    from compound.settings import Settings as Settings
    from compound.space import Choice as Choice
    from compound.space import Demos as Demos
    from compound.space import Float as Float
    from compound.space import Int as Int
    from compound.space import LoRA as LoRA
    from compound.space import Text as Text
    from compound.sync import evaluate as evaluate
    from compound.sync import load_result as load_result
    from compound.sync import load_system as load_system
    from compound.sync import optimize as optimize
    from compound.sync import run as run
    from compound.system import System as System
    from compound.trace import Trace as Trace

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


if not TYPE_CHECKING:  # which would believe that every name is there

    def __getattr__(name: str) -> object:
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
