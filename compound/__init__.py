"""`compound`: declare a compound AI system as a typed graph, and optimize it on data.

Public names are loaded on first use, so ``import compound`` loads neither torch,
transformers, optuna nor litellm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # static counterpart of `__getattr__`
    from compound import testing as testing
    from compound.api.agreement import agreement as agreement
    from compound.api.inspect_calls import inspect_calls as inspect_calls
    from compound.api.result import Result as Result
    from compound.api.stream import stream as stream
    from compound.api.sync import evaluate as evaluate
    from compound.api.sync import load_result as load_result
    from compound.api.sync import load_system as load_system
    from compound.api.sync import optimize as optimize
    from compound.api.sync import run as run
    from compound.api.sync import sweep as sweep
    from compound.components.agent_prompt import AgentPrompt as AgentPrompt
    from compound.components.agents.agent import Agent as Agent
    from compound.components.code import CodeRunner as CodeRunner
    from compound.components.declaration.component import component as component
    from compound.components.declaration.llm import llm as llm
    from compound.components.declaration.system import system as system
    from compound.components.engines.fleet.engine import FleetEngine
    from compound.components.engines.litellm import LiteLLMEngine
    from compound.components.engines.local.engine import TransformersEngine
    from compound.components.engines.openai.engine import OpenAIEngine
    from compound.components.engines.vllm.engine import VLLMEngine
    from compound.components.external_agent import ExternalAgent as ExternalAgent
    from compound.components.flow import Loop as Loop
    from compound.components.flow import Map as Map
    from compound.components.function import FirstOf as FirstOf
    from compound.components.function import Function as Function
    from compound.components.hyperparameter import Hyperparameter as Hyperparameter
    from compound.components.imports.dspy_import import from_dspy as from_dspy
    from compound.components.imports.dspy_import import to_dspy as to_dspy
    from compound.components.imports.dspy_metric import from_dspy_metric as from_dspy_metric
    from compound.components.imports.dspy_module import from_dspy_module as from_dspy_module
    from compound.components.imports.haystack import from_haystack as from_haystack
    from compound.components.imports.langchain import from_langchain as from_langchain
    from compound.components.index import BM25 as BM25
    from compound.components.index import Dense as Dense
    from compound.components.index import PassageIndex as PassageIndex
    from compound.components.llm import LLM as LLM
    from compound.components.retriever import Retriever as Retriever
    from compound.components.selector import Selector as Selector
    from compound.components.tools.mcp_server import MCPServer as MCPServer
    from compound.components.tools.tool import Tool as Tool
    from compound.components.tools.tool import tool as tool
    from compound.engine import Completion as Completion
    from compound.engine import Engine as Engine
    from compound.engine import Message as Message
    from compound.engine import Request as Request
    from compound.engine import ToolCall as ToolCall
    from compound.engine import ToolSpec as ToolSpec
    from compound.engine import Usage as Usage
    from compound.errors import CompoundError as CompoundError
    from compound.errors import RunFailed as RunFailed
    from compound.evaluation.dataset import Dataset as Dataset
    from compound.evaluation.metrics.built_in import accuracy as accuracy
    from compound.evaluation.metrics.built_in import exact_match as exact_match
    from compound.evaluation.metrics.built_in import mrr as mrr
    from compound.evaluation.metrics.built_in import recall_at_k as recall_at_k
    from compound.evaluation.metrics.built_in import token_f1 as token_f1
    from compound.evaluation.metrics.custom import custom as custom
    from compound.evaluation.metrics.documents import json_match as json_match
    from compound.evaluation.metrics.judges.agreement import Agreement as Agreement
    from compound.evaluation.metrics.judges.pairwise import pairwise as pairwise
    from compound.evaluation.metrics.judges.rubric import rubric as rubric
    from compound.evaluation.metrics.reading import numeric_match as numeric_match
    from compound.evaluation.metrics.reading import regex_match as regex_match
    from compound.evaluation.metrics.repeated import pass_at_k as pass_at_k
    from compound.evaluation.metrics.similarity import rouge as rouge
    from compound.evaluation.metrics.similarity import semantic_similarity as semantic_similarity
    from compound.example import Example as Example
    from compound.example import Metric as Metric
    from compound.example import Score as Score
    from compound.execution.budget import Budget as Budget
    from compound.execution.executor import Executor as Executor
    from compound.execution.trace import Trace as Trace
    from compound.exports.export import export as export
    from compound.exports.optuna_study import to_optuna as to_optuna
    from compound.graph.component import CallContext as CallContext
    from compound.graph.component import Component as Component
    from compound.graph.component import Input as Input
    from compound.graph.component import Operation as Operation
    from compound.graph.configuration import Configuration as Configuration
    from compound.graph.configuration import load as load
    from compound.graph.json_types import json_type as json_type
    from compound.graph.space import Choice as Choice
    from compound.graph.space import Demos as Demos
    from compound.graph.space import Float as Float
    from compound.graph.space import Int as Int
    from compound.graph.space import LoRA as LoRA
    from compound.graph.space import Text as Text
    from compound.graph.system import System as System
    from compound.graph.types import Port as Port
    from compound.image import Image as Image
    from compound.optimization.bounds import JobBound as JobBound
    from compound.optimization.bounds import Outlook as Outlook
    from compound.optimization.method import Job as Job
    from compound.optimization.method import Method as Method
    from compound.optimization.method import Optimizer as Optimizer
    from compound.optimization.method import Progress as Progress
    from compound.optimization.method import Proposal as Proposal
    from compound.optimization.method import Scheduler as Scheduler
    from compound.optimization.method import Task as Task
    from compound.optimization.registration import method as method
    from compound.optimizers.extension import optimizer as optimizer
    from compound.optimizers.extension import recipe as recipe
    from compound.optimizers.weights.recipes.recipe import Recipe as Recipe
    from compound.settings.base import Settings as Settings
    from compound.settings.optimize import OptimizeSettings as OptimizeSettings
    from compound.storage.state import State as State
    from compound.tracing.setup import trace_with as trace_with

    Fleet = FleetEngine
    LiteLLM = LiteLLMEngine  # `import … as` under another name would not export it to type checkers
    OpenAI = OpenAIEngine
    Transformers = TransformersEngine
    VLLM = VLLMEngine

__version__ = "0.3.0"

_HOME = {
    "Budget": "compound.execution.budget",
    "Choice": "compound.graph.space",
    "CompoundError": "compound.errors",
    "Component": "compound.graph.component",
    "Operation": "compound.graph.component",
    "Configuration": "compound.graph.configuration",
    "Dataset": "compound.evaluation.dataset",
    "Demos": "compound.graph.space",
    "Example": "compound.example",
    "Executor": "compound.execution.executor",
    "Float": "compound.graph.space",
    "Input": "compound.graph.component",
    "Int": "compound.graph.space",
    "LoRA": "compound.graph.space",
    "Score": "compound.example",
    "System": "compound.graph.system",
    "Text": "compound.graph.space",
    "Trace": "compound.execution.trace",
    "Usage": "compound.engine",
    "OptimizeSettings": "compound.settings.optimize",
    "Settings": "compound.settings.base",
    "method": "compound.optimization.registration",
    "optimizer": "compound.optimizers.extension",
    "CallContext": "compound.graph.component",
    "Port": "compound.graph.types",
    "Engine": "compound.engine",
    "Request": "compound.engine",
    "Completion": "compound.engine",
    "Message": "compound.engine",
    "Image": "compound.image",
    "ToolCall": "compound.engine",
    "ToolSpec": "compound.engine",
    "Metric": "compound.example",
    "JobBound": "compound.optimization.bounds",
    "Outlook": "compound.optimization.bounds",
    "Job": "compound.optimization.method",
    "Method": "compound.optimization.method",
    "Optimizer": "compound.optimization.method",
    "Progress": "compound.optimization.method",
    "Proposal": "compound.optimization.method",
    "Scheduler": "compound.optimization.method",
    "Task": "compound.optimization.method",
    "Recipe": "compound.optimizers.weights.recipes.recipe",
    "State": "compound.storage.state",
    "recipe": "compound.optimizers.extension",
    "Result": "compound.api.result",
    "accuracy": "compound.evaluation.metrics.built_in",
    "custom": "compound.evaluation.metrics.custom",
    "json_match": "compound.evaluation.metrics.documents",
    "Agreement": "compound.evaluation.metrics.judges.agreement",
    "agreement": "compound.api.agreement",
    "pairwise": "compound.evaluation.metrics.judges.pairwise",
    "rubric": "compound.evaluation.metrics.judges.rubric",
    "numeric_match": "compound.evaluation.metrics.reading",
    "regex_match": "compound.evaluation.metrics.reading",
    "pass_at_k": "compound.evaluation.metrics.repeated",
    "rouge": "compound.evaluation.metrics.similarity",
    "semantic_similarity": "compound.evaluation.metrics.similarity",
    "evaluate": "compound.api.sync",
    "exact_match": "compound.evaluation.metrics.built_in",
    "inspect_calls": "compound.api.inspect_calls",
    "json_type": "compound.graph.json_types",
    "load": "compound.graph.configuration",
    "load_result": "compound.api.sync",
    "load_system": "compound.api.sync",
    "mrr": "compound.evaluation.metrics.built_in",
    "optimize": "compound.api.sync",
    "recall_at_k": "compound.evaluation.metrics.built_in",
    "run": "compound.api.sync",
    "sweep": "compound.api.sync",
    "trace_with": "compound.tracing.setup",
    "stream": "compound.api.stream",
    "token_f1": "compound.evaluation.metrics.built_in",
    "RunFailed": "compound.errors",
    "AgentPrompt": "compound.components.agent_prompt",
    "ExternalAgent": "compound.components.external_agent",
    "Fleet": "compound.components.engines.fleet.engine:FleetEngine",
    "LiteLLM": "compound.components.engines.litellm:LiteLLMEngine",
    "OpenAI": "compound.components.engines.openai.engine:OpenAIEngine",
    "Transformers": "compound.components.engines.local.engine:TransformersEngine",
    "VLLM": "compound.components.engines.vllm.engine:VLLMEngine",
    "BM25": "compound.components.index",
    "from_dspy": "compound.components.imports.dspy_import",
    "to_dspy": "compound.components.imports.dspy_import",
    "to_optuna": "compound.exports.optuna_study",
    "from_dspy_metric": "compound.components.imports.dspy_metric",
    "from_dspy_module": "compound.components.imports.dspy_module",
    "from_haystack": "compound.components.imports.haystack",
    "from_langchain": "compound.components.imports.langchain",
    "export": "compound.exports.export",
    "component": "compound.components.declaration.component",
    "llm": "compound.components.declaration.llm",
    "system": "compound.components.declaration.system",
    "Agent": "compound.components.agents.agent",
    "Tool": "compound.components.tools.tool",
    "tool": "compound.components.tools.tool",
    "MCPServer": "compound.components.tools.mcp_server",
    "CodeRunner": "compound.components.code",
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


if not TYPE_CHECKING:  # type checkers would treat every name as defined

    def __getattr__(name: str) -> object:
        if name == "testing":  # the import sets the attribute
            return importlib.import_module("compound.testing")
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
    return [*__all__, "__version__", "testing"]
