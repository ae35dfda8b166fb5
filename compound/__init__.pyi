"""Public names of `compound`, for type checkers and for its ``__getattr__``."""

from compound import components as components
from compound import engines as engines
from compound import ext as ext
from compound import interchange as interchange
from compound import metrics as metrics
from compound import testing as testing
from compound.api.result import Result as Result
from compound.api.result import inspect_calls as inspect_calls
from compound.api.stream import stream as stream
from compound.api.sync import evaluate as evaluate
from compound.api.sync import load_result as load_result
from compound.api.sync import load_system as load_system
from compound.api.sync import optimize as optimize
from compound.api.sync import run as run
from compound.api.sync import sweep as sweep
from compound.components.agents.agent import Agent as Agent
from compound.components.declaration import component as component
from compound.components.declaration import llm as llm
from compound.components.declaration import system as system
from compound.components.flow import Loop as Loop
from compound.components.flow import Map as Map
from compound.components.function import FirstOf as FirstOf
from compound.components.function import Function as Function
from compound.components.llm import LLM as LLM
from compound.components.retriever import Retriever as Retriever
from compound.components.selector import Selector as Selector
from compound.components.tools.tool import Tool as Tool
from compound.components.tools.tool import tool as tool
from compound.core.errors import CompoundError as CompoundError
from compound.core.errors import RunFailed as RunFailed
from compound.core.example import Example as Example
from compound.core.example import Score as Score
from compound.core.image import Image as Image
from compound.evaluation.dataset import Dataset as Dataset
from compound.execution.budget import Budget as Budget
from compound.execution.executor import Executor as Executor
from compound.execution.trace import Trace as Trace
from compound.execution.tracing.setup import trace_with as trace_with
from compound.graph.component import Input as Input
from compound.graph.configuration import Configuration as Configuration
from compound.graph.configuration import load as load
from compound.graph.space import Choice as Choice
from compound.graph.space import Demos as Demos
from compound.graph.space import Float as Float
from compound.graph.space import Int as Int
from compound.graph.space import LoRA as LoRA
from compound.graph.space import Text as Text
from compound.graph.system import System as System
from compound.graph.types import Port as Port
from compound.optimization.settings.optimize import OptimizeSettings as OptimizeSettings

__version__: str
__all__: list[str]
_HOME: dict[str, str]
