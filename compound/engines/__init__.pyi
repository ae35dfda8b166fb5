"""Public names of `compound.engines`, for type checkers and for its ``__getattr__``."""

from compound.engines.fleet import FleetEngine
from compound.engines.litellm import LiteLLMEngine
from compound.engines.local.engine import TransformersEngine
from compound.engines.openai import OpenAIEngine
from compound.engines.vllm.engine import VLLMEngine

Fleet = FleetEngine
LiteLLM = LiteLLMEngine
OpenAI = OpenAIEngine
Transformers = TransformersEngine
VLLM = VLLMEngine

__all__: list[str]
