"""Public names of `compound.ext`, for type checkers and for its ``__getattr__``."""

from compound.core.engine import Completion as Completion
from compound.core.engine import Engine as Engine
from compound.core.engine import Message as Message
from compound.core.engine import Request as Request
from compound.core.engine import ToolCall as ToolCall
from compound.core.engine import ToolSpec as ToolSpec
from compound.core.engine import Usage as Usage
from compound.core.example import Metric as Metric
from compound.core.storage.state import State as State
from compound.graph.component import CallContext as CallContext
from compound.graph.component import Component as Component
from compound.graph.component import Operation as Operation
from compound.graph.json_types import json_type as json_type
from compound.optimization.method import Job as Job
from compound.optimization.method import JobPlan as JobPlan
from compound.optimization.method import Method as Method
from compound.optimization.method import Optimizer as Optimizer
from compound.optimization.method import PlannedJob as PlannedJob
from compound.optimization.method import Progress as Progress
from compound.optimization.method import Proposal as Proposal
from compound.optimization.method import Scheduler as Scheduler
from compound.optimization.method import Task as Task
from compound.optimization.registration import method as method
from compound.optimization.settings.base import Settings as Settings
from compound.optimizers.extension import optimizer as optimizer
from compound.optimizers.extension import recipe as recipe
from compound.optimizers.weights.recipes.recipe import Recipe as Recipe

__all__: list[str]
