"""Programs as Python source: the fixed code of a template, and the system as a literal."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

from compound.components.answers import answer_lists, answer_words
from compound.execution.calls import answer_text
from compound.exports.dspy_state import describe_for_dspy
from compound.exports.literal import python_literal
from compound.exports.program import Data, describe_program, without_secrets
from compound.exports.prompts import langchain_messages, prompts_of
from compound.graph.system import System

PLACE = re.compile(r"^PROGRAM: dict\[str, Any\] = \{\}.*$", re.MULTILINE)
GRAPH = re.compile(r"^# -- graph .*?(?=^# -- )", re.MULTILINE | re.DOTALL)
SHARED = "from compound.exports.runtime import KINDS, run_program\n"
READING = (answer_text, answer_lists, answer_words)  # modules that are copied into an exported program
IMPORTS = re.compile(r"^from compound\.[\w.]+ import (?:\([^)]*\)|.*)\n", re.MULTILINE)
BEGIN = "from collections.abc import "
NEEDED = (
    "import asyncio\nimport importlib\nimport inspect\nfrom collections.abc import Sequence\n"  # by the graph
)
ONLY_HERE = re.compile(r"  # (?:noqa|no[s]ec|type:).*$", re.MULTILINE)


def python_module(system: System) -> str:
    """Return a Python module that runs the system with the standard library only."""
    title = f"The system {system.name!r}, exported from compound. Needs Python 3.11, and no packages."
    return _fill(_template("runtime"), title, describe_program(system), "".join(map(_definitions, READING)))


def _definitions(module: ModuleType) -> str:
    """Return the source of a module without its docstring and imports; the runtime has all of its imports."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    body = ast.parse(source).body
    last = max(n.end_lineno or 0 for n in body if isinstance(n, ast.Import | ast.ImportFrom))
    return ONLY_HERE.sub("", "".join(source.splitlines(keepends=True)[last:]))


def langchain_module(system: System) -> str:
    """Return a Python module with a ``ChatPromptTemplate`` for each prompt."""
    title = f"Prompts of the system {system.name!r}, exported from compound. Needs langchain-core."
    data = {
        prompt.node: {
            "lm": prompt.lm,
            "options": prompt.options,
            "messages": [list(message) for message in langchain_messages(prompt)],
            "tools": prompt.tools,
        }
        for prompt in prompts_of(system)
    }
    return _fill(_template("langchain_runtime"), title, data)


def dspy_module(system: System) -> str:
    """Return a Python module with the system as a DSPy program, its demonstrations included."""
    title = f"The system {system.name!r} as a DSPy program, exported from compound. Needs dspy."
    graph = GRAPH.findall(_template("runtime"))[0]
    source = _template("dspy_runtime").replace(SHARED, "").replace(BEGIN, NEEDED + BEGIN, 1)
    return _fill(source, title, describe_for_dspy(system), ONLY_HERE.sub("", graph))


def _template(name: str) -> str:
    """Return the source of a module of this package, without importing the libraries that it needs."""
    return Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")


def _fill(source: str, title: str, data: Data, more: str = "") -> str:
    """Return the template with another docstring and the data in place of the empty literal."""
    _, _, code = source.partition('"""')[2].partition('"""')
    literal = f"PROGRAM: dict[str, Any] = {python_literal(without_secrets(data))}\n{more}"
    filled = PLACE.sub(lambda _: literal, ONLY_HERE.sub("", IMPORTS.sub("", code)), count=1)
    return f'"""{title}"""{filled}'
