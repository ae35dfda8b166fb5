"""The steps of the Prompt-R1 conversation that are plain code."""

from __future__ import annotations

from compound.rewards.credit.gated import read_turn


def nothing() -> str:
    """Return the history before the first turn."""
    return ""


def no_turns() -> list[str]:
    """Return the turns before the first one."""
    return []


def read(said: str) -> dict[str, object]:
    """Read a turn of the agent: whether it asks the environment, what, and whether it is the last one.

    A turn without a prompt for the environment ends the conversation, with or without an answer.

    >>> read("<think>Who?</think><interaction_prompt>Who wrote Emma?</interaction_prompt>")
    {'asks': True, 'prompt': 'Who wrote Emma?', 'over': False}
    >>> read("I do not know.")["over"]
    True
    """
    prompt = read_turn(said).prompt
    return {"asks": bool(prompt), "prompt": prompt or "", "over": not prompt}


def remember(history: str, said: str, reply: str | None = None) -> str:
    """Return the history with the agent's turn and, if it asked, the environment's reply.

    >>> print(remember("", "<interaction_prompt>Who wrote Emma?</interaction_prompt>", "Jane Austen."))
    <interaction_prompt>Who wrote Emma?</interaction_prompt>
    <interaction_response>Jane Austen.</interaction_response>
    """
    answered = "" if reply is None else f"<interaction_response>{reply}</interaction_response>"
    return "\n".join(part for part in (history, said.strip(), answered) if part)


def log(turns: list[str], said: str) -> list[str]:
    """Return the agent's turns with one more."""
    return [*turns, said]


def exchange(exchanges: str, prompt: str, reply: str | None = None) -> str:
    """Return what the environment was asked and replied so far; it sees nothing else.

    >>> print(exchange("", "Who wrote Emma?", "Jane Austen."))
    Asked: Who wrote Emma?
    Replied: Jane Austen.
    """
    new = "" if reply is None else f"Asked: {prompt}\nReplied: {reply}"
    return "\n".join(part for part in (exchanges, new) if part)
