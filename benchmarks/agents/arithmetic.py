"""Evaluate arithmetic expressions without executing code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from compound.components.tools.tool import tool

LONGEST = 200  # characters of an expression
LARGEST = 1e15
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(expression: str) -> float:
    """Return the value of an expression of numbers, brackets and ``+ - * / // %``.

    Raises:
        ValueError: it is no such expression, or a value is too large.

    >>> evaluate("2 * (3 + 4)"), evaluate("-7 / 2")
    (14, -3.5)
    >>> evaluate("__import__('os')")
    Traceback (most recent call last):
    ValueError: only numbers, brackets and + - * / // % are possible
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has more than {LONGEST} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


@tool(reproducible=True)
def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression such as 3 * (12 + 5)."""
    return f"{evaluate(expression):g}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        found: float = node.value  # type: ignore[assignment]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        found = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        found = OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("only numbers, brackets and + - * / // % are possible")
    if abs(found) > LARGEST:
        raise ValueError("a value is too large")
    return found
