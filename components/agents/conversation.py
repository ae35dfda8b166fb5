"""Turns of an agent as chat messages: earlier turns of a run, and demonstrations.

A demonstration of an agent is the record of the turn that answered: its ``inputs`` are those of the
turn (the task and the earlier turns), its ``outputs`` those of
`compound.components.agents.turn.AgentTurn`. It is shown as the conversation that it ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compound.core.engine import Message, ToolCall
from compound.graph.space import Demo

TASK, HISTORY, LAST = "task", "history", "last_turn"
MESSAGE, TOOL_CALLS = "message", "tool_calls"


def recorded_message(record: Mapping[str, Any]) -> Message:
    """Return a message of an earlier turn."""
    if record["role"] == "tool":
        return Message("tool", record["text"], tool_call_id=record["id"])
    return _spoken(record["text"], record["calls"])


def shown_task(demo: Demo) -> dict[str, Any]:
    """Return the inputs of the agent that a demonstration is about."""
    task: Any = demo["inputs"][TASK]
    return dict(task)


def shown_turns(demo: Demo) -> list[Message]:
    """Return the messages of a demonstration after its task.

    >>> calls = [{"id": "call_1", "name": "add", "arguments": "{}"}]
    >>> history = [
    ...     {"role": "assistant", "text": "", "calls": calls},
    ...     {"role": "tool", "id": "call_1", "text": "4"},
    ... ]
    >>> inputs = {"task": {"question": "2 + 2?"}, "history": history, "last_turn": False}
    >>> turns = shown_turns({"inputs": inputs, "outputs": {"message": "4", "tool_calls": []}})
    >>> [(message.role, message.text) for message in turns]
    [('assistant', ''), ('tool', '4'), ('assistant', '4')]
    """
    history: Any = demo["inputs"][HISTORY]
    text: Any = demo["outputs"][MESSAGE]
    calls: Any = demo["outputs"][TOOL_CALLS]
    return [*map(recorded_message, history), _spoken(text, calls)]


def problem_of(demos: Sequence[Demo]) -> str:
    """Return what is wrong with demonstrations that were given to an agent, or ``""``."""
    for demo in demos:
        for part, names in (("inputs", (TASK, HISTORY)), ("outputs", (MESSAGE, TOOL_CALLS))):
            missing = [name for name in names if name not in demo.get(part, {})]
            if missing:
                return f"the {part} of a demonstration have no {missing[0]!r}"
        try:
            shown_task(demo), shown_turns(demo)
        except (KeyError, TypeError, ValueError) as error:
            return f"a demonstration is not the record of a turn: {error!r}"
    return ""


def _spoken(text: str, calls: Sequence[Mapping[str, str]]) -> Message:
    return Message(
        "assistant",
        text,
        tuple(ToolCall(call["id"], call["name"], call["arguments"]) for call in calls),
    )
