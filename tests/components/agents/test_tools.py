"""Tools from functions and programs: schemas, validation, errors, sandboxes."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

import compound as cp
from compound.components.agents.turn import declarations, tool_spec, tool_text
from compound.core.errors import CallError, DeclarationError, TransientError
from compound.core.loops import Sessions
from sandboxes import require_sandbox


class Point(BaseModel):
    x: int
    y: int = 0


def find(
    query: str,
    k: Annotated[int, Field(ge=1, le=5, description="how many")] = 3,
    mode: Literal["a", "b"] = "a",
) -> list[str]:
    """Search the catalogue.

    The best come first.

    Args:
        query: words to find,
            in any order
        k: ignored, since the annotation has a description

    Returns:
        the titles
    """
    return [f"{query} {mode}"] * k


def answer(tool: cp.Tool, **arguments: Any) -> str:
    return answer_text(tool, json.dumps(arguments))


def answer_text(tool: cp.Tool, arguments: str) -> str:
    return asyncio.run(tool.answer(arguments, Sessions()))


class TestFunctions:
    tool = cp.Tool.from_function(find)

    def test_the_declaration_comes_from_the_function(self) -> None:
        assert self.tool.name == "find"
        assert self.tool.description == "Search the catalogue.\n\nThe best come first."
        properties = self.tool.parameters["properties"]
        assert properties["query"] == {
            "description": "words to find, in any order",
            "type": "string",
        }
        assert properties["k"]["description"] == "how many"
        assert properties["mode"]["enum"] == ["a", "b"]
        assert self.tool.parameters["required"] == ["query"]

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            ("{}", "'query' is a required property"),
            ('{"query": 3}', "query: 3 is not of type 'string'"),
            ('{"query": "x", "k": 9}', "k: 9 is greater than the maximum of 5"),
            ('{"query": "x", "other": 1}', "Additional properties are not allowed"),
            ("{", "the arguments are not JSON"),
            ("[1]", "must be a JSON object"),
            ('{"query": "' + "x" * 200_000 + '"}', "more than 100,000 characters"),
        ],
    )
    def test_invalid_arguments_are_answered(self, arguments: str, problem: str) -> None:
        found = answer_text(self.tool, arguments)
        assert found.startswith("error: ")
        assert problem in found

    def test_models_are_converted(self) -> None:
        @cp.tool
        def shift(point: Point, by: int) -> Point:
            return Point(x=point.x + by, y=point.y)

        assert answer(shift, point={"x": 1}, by=2) == '{"x":3,"y":0}'
        assert "point.x" in answer(shift, point={"x": "one"}, by=2)

    def test_async_functions_and_their_time_limit(self) -> None:
        @cp.tool(timeout=0.05)
        async def wait(seconds: float) -> str:
            await asyncio.sleep(seconds)
            return "done"

        assert answer(wait, seconds=0) == "done"
        assert answer(wait, seconds=30) == "error: wait took longer than 0.05 s"

    def test_a_blocking_function_does_not_block_the_loop(self) -> None:
        slow = cp.Tool.from_function(blocks, timeout=0.05)
        assert answer(slow) == "error: blocks took longer than 0.05 s"

    def test_errors_are_answered_but_lost_servers_are_retried(self) -> None:
        @cp.tool
        def fail(kind: str) -> str:
            raise {
                "value": ValueError("no"),
                "call": CallError("refused"),
                "lost": ConnectionError("gone"),
            }[kind]

        assert answer(fail, kind="value") == "error: ValueError: no"
        assert answer(fail, kind="call") == "error: refused"
        assert answer(fail, kind="unknown") == "error: KeyError: 'unknown'"
        assert answer(fail, kind="lost") == "error: ConnectionError: gone"

        @cp.tool(reproducible=True)
        def look_up() -> str:
            raise ConnectionError("gone")

        with pytest.raises(ConnectionError):
            answer(look_up)

        @cp.tool
        def lost() -> str:
            raise TransientError("later")

        with pytest.raises(TransientError):
            answer(lost)

    def test_functions_without_a_schema_are_rejected(self) -> None:
        def untyped(x) -> str:  # type: ignore[no-untyped-def]
            return str(x)

        def many(*names: str) -> str:
            return str(names)

        def opaque(x: cp.System) -> str:
            return str(x)

        for function, message in (
            (untyped, "'x' has no type"),
            (many, r"\*args"),
            (opaque, "no JSON schema"),
        ):
            with pytest.raises(DeclarationError, match=message):
                cp.Tool.from_function(function)

    @pytest.mark.parametrize("name", ["", "two words", "x" * 65, "née"])
    def test_names_that_providers_reject(self, name: str) -> None:
        with pytest.raises(DeclarationError, match="1 to 64 letters"):
            cp.Tool.from_function(find, name=name or " ")

    @given(st.text())
    def test_any_arguments_are_answered(self, arguments: str) -> None:
        assert answer_text(self.tool, arguments).startswith(("error:", "["))


def blocks() -> str:
    """Block."""
    time.sleep(0.3)
    return "done"


def double(x: int) -> int:
    """Double a number."""
    return 2 * x


class TestConversion:
    def declared(self, tool: Any) -> cp.Tool:
        (found,) = cp.Agent("agent", [tool]).tools
        return found

    def test_a_plain_function_is_a_tool(self) -> None:
        found = self.declared(double)
        assert (found.name, found.description) == ("double", "Double a number.")
        assert answer(found, x=4) == "8"

    def test_a_function_component_is_a_tool(self) -> None:
        assert answer(self.declared(cp.component(double)), x=4) == "8"

    def test_a_generator_is_explained(self) -> None:
        def count(x: int) -> Iterator[int]:
            yield from range(x)

        async def count_later(x: int) -> AsyncIterator[int]:
            yield x

        for function in (count, count_later):
            with pytest.raises(DeclarationError, match="is a generator; return a list"):
                self.declared(function)

    @pytest.mark.parametrize("wrong", ["search", 5, None, int])
    def test_other_objects_are_explained(self, wrong: Any) -> None:
        with pytest.raises(DeclarationError, match="a tool must be a tool or a function"):
            self.declared(wrong)

    def test_a_decorated_function_can_be_called(self) -> None:
        assert cp.tool(double)(4) == cp.tool(double)(x=4) == 8
        with pytest.raises(DeclarationError, match="is no Python function"):
            cp.Tool.python()()

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_a_tool_that_exits_is_an_error_of_the_tool(self, kind: str) -> None:
        def leave() -> str:
            sys.exit(3)

        async def leave_later() -> str:
            sys.exit(3)

        found = cp.Tool.from_function(leave if kind == "sync" else leave_later)
        assert answer(found).endswith("called sys.exit(3)")
        assert answer(found).startswith("error: ")


class TestCode:
    def test_code_without_a_sandbox_is_refused(self) -> None:
        def shell(command: str) -> str:
            """Run a command."""
            return command

        with pytest.raises(DeclarationError, match="executes code without a sandbox"):
            cp.Tool.from_function(shell, executes_code=True)

    def test_programs(self) -> None:
        require_sandbox()
        tool = cp.Tool.python()
        assert answer(tool, code="print(6 * 7)") == "42\n"
        failed = answer(tool, code="print('a')\nraise ValueError('no')")
        assert failed.startswith("a\n\nerror: the program failed")
        assert "ValueError: no" in failed
        assert "error" in answer(tool, code="open('/etc/passwd').read()")


class TestTexts:
    tool = cp.Tool.from_function(find)

    def test_the_text_reads_back(self) -> None:
        text = tool_text(self.tool)
        assert text.splitlines()[0] == "find: Search the catalogue. The best come first."
        spec = tool_spec(self.tool, text)
        assert spec.name == "find"
        assert json.loads(spec.parameters) == self.tool.parameters

    def test_a_rewritten_text(self) -> None:
        spec = tool_spec(
            self.tool,
            "**lookup**: Find pages.\nUse it often.\n- `query`: key words\n  only nouns\n",
        )
        assert (spec.name, spec.description) == ("lookup", "Find pages.\nUse it often.")
        assert (
            json.loads(spec.parameters)["properties"]["query"]["description"]
            == "key words only nouns"
        )

    @given(st.text())
    def test_any_text_leaves_a_callable_tool(self, text: str) -> None:
        ((shown, (spec, tool)),) = declarations([self.tool], {"find": text}).items()
        assert tool is self.tool
        assert (
            cp.Tool(shown, spec.description, json.loads(spec.parameters), tool.source).spec == spec
        )
        types = {
            name: part["type"] for name, part in json.loads(spec.parameters)["properties"].items()
        }
        assert types == {"query": "string", "k": "integer", "mode": "string"}

    def test_two_tools_never_share_a_name(self) -> None:
        other = cp.Tool.from_function(find, name="other")
        texts = {"find": "lookup: a", "other": "lookup: b"}
        assert set(declarations([self.tool, other], texts)) == {"find", "other"}
        assert set(declarations([self.tool, other], {"find": "other: a"})) == {"find", "other"}
