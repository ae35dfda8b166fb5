"""Public names of `compound.components`, for type checkers and for its ``__getattr__``."""

from compound.components.agent_prompt import AgentPrompt as AgentPrompt
from compound.components.code import CodeRunner as CodeRunner
from compound.components.external_agent import ExternalAgent as ExternalAgent
from compound.components.hyperparameter import Hyperparameter as Hyperparameter
from compound.components.index import BM25 as BM25
from compound.components.index import Dense as Dense
from compound.components.index import PassageIndex as PassageIndex

__all__: list[str]
