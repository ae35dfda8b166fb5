"""Python steps of the Prompt-R1 conversation."""

from __future__ import annotations

from compound.optimizers.weights.credit.gated import read_turn


def nothing() -> str:
    """Return the history before the first turn."""
    return ""


def no_turns() -> list[str]:
    """Return the empty list of turns before the first one."""
    return []


def read(said: str) -> dict[str, object]:
    """Parse a turn of the agent: its prompt for the environment, if any, and whether it is the last turn.

    A turn without a prompt for the environment ends the conversation, with or without an answer.

    >>> read("<think>Who?</think><interaction_prompt>Who wrote Emma?</interaction_prompt>")
    {'asks': True, 'prompt': 'Who wrote Emma?', 'over': False}
    >>> read("I do not know.")["over"]
    True
    """
    prompt = read_turn(said).prompt
    return {"asks": bool(prompt), "prompt": prompt or "", "over": not prompt}


def remember(history: str, said: str, reply: str | None = None) -> str:
    """Append the agent's turn and the environment's reply, if any, to the history.

    >>> print(remember("", "<interaction_prompt>Who wrote Emma?</interaction_prompt>", "Jane Austen."))
    <interaction_prompt>Who wrote Emma?</interaction_prompt>
    <interaction_response>Jane Austen.</interaction_response>
    """
    answered = "" if reply is None else f"<interaction_response>{reply}</interaction_response>"
    return "\n".join(part for part in (history, said.strip(), answered) if part)


def log(turns: list[str], said: str) -> list[str]:
    """Append a turn to the agent's turns."""
    return [*turns, said]


def exchange(exchanges: str, prompt: str, reply: str | None = None) -> str:
    """Append a prompt and its reply to the environment's history, which contains nothing else.

    >>> print(exchange("", "Who wrote Emma?", "Jane Austen."))
    Asked: Who wrote Emma?
    Replied: Jane Austen.
    """
    new = "" if reply is None else f"Asked: {prompt}\nReplied: {reply}"
    return "\n".join(part for part in (exchanges, new) if part)
