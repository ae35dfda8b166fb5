"""Chat prompts for LangChain; this file is copied into exported modules, with the prompts as PROGRAM."""

from __future__ import annotations

from typing import Any

from langchain_core.prompts import ChatPromptTemplate

PROGRAM: dict[str, Any] = {}  # <- replaced by the prompts

PROMPTS: dict[str, ChatPromptTemplate] = {
    name: ChatPromptTemplate.from_messages([(role, content) for role, content in prompt["messages"]])
    for name, prompt in PROGRAM.items()
}
TOOLS: dict[str, list[dict[str, Any]]] = {name: prompt["tools"] for name, prompt in PROGRAM.items()}
"""Tools of agents in OpenAI's format, for ``model.bind_tools(TOOLS[name])``."""
MODELS: dict[str, dict[str, Any]] = {
    name: {"model": prompt["lm"], **prompt["options"]} for name, prompt in PROGRAM.items()
}
