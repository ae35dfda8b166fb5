"""Python steps and the reward of the Prompt-R1 conversation.

An agent's turn is a thought and then either a prompt for the environment or the final answer:
``<think>…</think><interaction_prompt>…</interaction_prompt>`` or
``<think>…</think><answer>…</answer>``. The answer counts only if the form is complete (equations
10-13 of the paper).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compound.core.errors import DataError
from compound.core.example import Example, Score
from compound.core.narrowing import entry
from compound.evaluation.metrics.built_in import token_f1

THINK, PROMPT, ANSWER = "think", "interaction_prompt", "answer"
# Points of a well-formed turn with a prompt, of an answer block in the last turn, of one that is not
# empty, and of a last turn that is exactly a thought and that block.
PARTS = (0.4, 0.25, 0.25, 0.1)
_TAG = re.compile(rf"</?(?:{THINK}|{PROMPT}|{ANSWER})>")
_BLOCK = re.compile(rf"<({THINK}|{PROMPT}|{ANSWER})>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PromptTurn:
    """Parsed turn of the agent."""

    thought: str = ""
    prompt: str | None = None
    answer: str | None = None
    exact: bool = False

    @property
    def is_prompt(self) -> bool:
        """Whether the turn is a well-formed prompt for the environment."""
        return self.exact and bool(self.thought) and bool(self.prompt)

    @property
    def is_final(self) -> bool:
        """Whether the turn is a well-formed final one: a thought and the answer's block."""
        return self.exact and bool(self.thought) and self.answer is not None


def read_turn(text: str) -> PromptTurn:
    """Parse the blocks of a turn.

    >>> read_turn("<think>Who?</think> <interaction_prompt>Name it.</interaction_prompt>").is_prompt
    True
    >>> read_turn("<think>Now I know.</think><answer>Lima</answer>").answer
    'Lima'
    >>> read_turn("<answer>Lima</answer>").is_final
    False
    """
    blocks = [(match[1], match[2].strip()) for match in _BLOCK.finditer(text)]
    first = dict(reversed(blocks))
    prompt = first.get(PROMPT)
    names = [name for name, _ in blocks]
    only_blocks = not _BLOCK.sub("", text).strip() and not any(
        _TAG.search(inside) for _, inside in blocks
    )
    return PromptTurn(
        thought=first.get(THINK, ""),
        prompt=prompt,
        answer=first.get(ANSWER) if prompt is None else None,
        exact=only_blocks and names in ([THINK, PROMPT], [THINK, ANSWER]),
    )


def form(turns: Sequence[PromptTurn], parts: Sequence[float] = PARTS) -> float:
    """Return the points of the form of a conversation, at most 1: the sum of those parts that it has.

    In the published code, additional turns compensate for missing parts: three turns without an
    answer open the gate and get 0, more than the -0.4 of an immediate correct answer. Here, several
    prompts count as one. A rollout that ends without an answer, by its own fault or because its
    turns are used up, therefore gets at most -0.6.
    """
    last = turns[-1] if turns else PromptTurn()
    asked = any(turn.is_prompt for turn in turns)
    found = (asked, last.answer is not None, bool(last.answer), last.is_final)
    # rounded so that the sum reaches 1 in any order of summation
    return round(sum(part * has for part, has in zip(parts, found, strict=True)), 9)


def gated_reward(turns: Sequence[PromptTurn], f1: float, parts: Sequence[float] = PARTS) -> float:
    """Return R = -1 + form + [form = 1 and an answer is present] * F1, in [-1, 1].

    >>> ask = read_turn("<think>?</think><interaction_prompt>Name the capital.</interaction_prompt>")
    >>> end = read_turn("<think>!</think><answer>Lima</answer>")
    >>> gated_reward([ask, end], 1.0), gated_reward([ask, end], 0.5), gated_reward([end], 1.0)
    (1.0, 0.5, -0.4)
    >>> gated_reward([ask, ask, ask, ask, ask], f1=0.0)
    -0.6
    """
    points = form(turns, parts)
    passed = points >= 1.0 and bool(turns and turns[-1].answer)
    return round(points - 1.0, 9) + (f1 if passed else 0.0)


def gated(outputs: Mapping[str, object], example: Example) -> Score:
    """Score a conversation by `gated_reward`; a metric for ``custom``.

    It reads the output ``turns``, the texts of the agent in order, and the gold field ``answers``
    or ``answer``.

    >>> turns = ["<think>?</think><interaction_prompt>Capital?</interaction_prompt>",
    ...          "<think>!</think><answer>Lima</answer>"]
    >>> score = gated({"turns": turns}, Example("e1", {}, {"answer": "Lima"}))
    >>> score.value, dict(score.parts)
    (1.0, {'form': 1.0, 'f1': 1.0, 'turns': 2.0})
    """
    if "turns" not in outputs:
        raise DataError(
            "the gated reward reads the output 'turns'", hint=f"outputs: {', '.join(outputs)}"
        )
    turns = [read_turn(text) for text in entry(outputs, "turns", (list, tuple))]
    answer = turns[-1].answer if turns else None
    gold = "answers" if "answers" in example.gold else "answer"
    compared: Score = token_f1("answer", gold).score({"answer": answer or ""}, example)
    f1 = compared.value if answer else 0.0
    feedback = compared.feedback if answer else f"no answer after {len(turns)} turns"
    parts = {"form": form(turns), "f1": f1, "turns": float(len(turns))}
    return Score(gated_reward(turns, f1), feedback, parts)


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
