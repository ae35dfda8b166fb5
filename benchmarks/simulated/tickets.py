"""Language model of known skill that sorts tickets by hidden rules, and writes prompts that state them.

Each ticket has one of eight topics, and each topic belongs to a queue. The model sorts a ticket
reliably only if the prompt states the rule of its topic, less reliably if a demonstration shows it,
and otherwise only the topics whose queue is obvious. Asked for a prompt, it starts from the prompt
of the request with the highest number after it, or from the last one, and adds rules that the
tickets and queues in the request show, as `benchmarks.simulated.writer` does; unlike there, there
is a single step with a score of 0 or 1.

    python -m benchmarks.simulated.tickets FOLDER

writes the data set of ``benchmarks/tickets.yaml``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from compound.execution.rng import generator
from compound.testing import ScriptedLM

from .writer import NUMBER, reply_form, write_rows

START = "Name the queue of the ticket."
RELIABLE, CLUTTER, MISLED = 0.97, 0.02, 0.02
OBVIOUS, SHOWN, UNAWARE = 0.95, 0.75, 0.04
OVERLOOK, GUESS = 0.7, 0.2
QUEUES: Mapping[str, str] = {
    "refund": "finance",
    "parcel": "carrier",
    "password": "identity",
    "invoice": "ledger",
    "warranty": "returns",
    "upgrade": "sales",
    "cancellation": "retention",
    "praise": "archive",
}
OBVIOUS_TOPICS = ("invoice", "upgrade", "password")
OPENINGS = (
    "Hello, a question about my",
    "Please look into the",
    "Third message about this",
    "I write about a",
)
ENDINGS = (
    "since Monday",
    "from last week",
    "for my sister",
    "of the blue lamp",
    "of order 4410",
    "again",
)
NEEDLESS = "Think about the customer first."


def rule(topic: str, queue: str) -> str:
    """Return the sentence that states the queue of a topic.

    >>> rule("refund", "finance")
    'Tickets about a refund go to finance.'
    """
    return f"Tickets about a {topic} go to {queue}."


RIGHT = {topic: rule(topic, queue) for topic, queue in QUEUES.items()}
FOUND = re.compile(
    rf"{re.escape(START)}((?: Tickets about a \w+ go to \w+\.| {re.escape(NEEDLESS)})*)"
)


def rows(count: int, kind: str) -> list[dict[str, str]]:
    """Return random tickets with their queues."""
    found = []
    for number in range(count):
        rng = generator("tickets", kind, number)
        topic = [*QUEUES][rng.integers(len(QUEUES))]
        opening, ending = OPENINGS[rng.integers(len(OPENINGS))], ENDINGS[rng.integers(len(ENDINGS))]
        text = f"{opening} {topic} {ending}, no. {kind}-{number}"
        found.append({"id": f"{kind}{number}", "ticket": text, "queue": QUEUES[topic]})
    return found


class SorterLM(ScriptedLM):
    """Engine with the model of this module.

    Args:
        skill: the probability that it notices a rule that plenty of tickets show; from 0 to 1.
        changes: the maximum number of rules that it adds in one reply.

    ``written`` is the number of requests other than for the queue of a ticket.
    """

    def __init__(self, skill: float = 0.7, changes: int = 2) -> None:
        super().__init__(self._reply_to, name="writer", writes_prompts=True)
        self._skill, self._changes = skill, changes
        self.written = 0

    def _reply_to(self, message: str, rng: np.random.Generator) -> str:
        if (queue := answer(message)) is not None:
            return queue
        self.written += 1
        return self._write(message, rng)

    def _write(self, message: str, rng: np.random.Generator) -> str:
        prompts, form = [*FOUND.finditer(message)], reply_form(message)
        base = _sentences(_base(message, prompts))
        noticed = [
            rule for topic, rule in RIGHT.items() if self._notices(message, topic, rule, base, rng)
        ]
        noticed = [noticed[i] for i in rng.permutation(len(noticed))[: self._changes]]
        if not prompts or not form.holds_prompt:
            text = " ".join(noticed) or "Nothing stands out."
            return f"{form.before}{text}{form.after}" if form.field else text
        about = {sentence.split()[3]: sentence for sentence in base if sentence != NEEDLESS}
        about |= {sentence.split()[3]: sentence for sentence in noticed}
        if rng.random() < GUESS and (left := [topic for topic in QUEUES if topic not in about]):
            topic = left[rng.integers(len(left))]
            about[topic] = rule(topic, [*QUEUES.values()][rng.integers(len(QUEUES))])
        needless = [NEEDLESS] if rng.random() < (1 - self._skill) / 2 else []
        text = " ".join([START, *about.values(), *needless])
        return f"{form.before}{text}{form.after}"

    def _notices(
        self, message: str, topic: str, rule: str, base: Sequence[str], rng: np.random.Generator
    ) -> bool:
        rest = FOUND.sub("", message)
        seen = min(
            len(re.findall(rf"\b{topic}\b", rest)), len(re.findall(rf"\b{QUEUES[topic]}\b", rest))
        )
        chance = self._skill if rule in rest else self._skill * (1 - OVERLOOK**seen)
        return rule not in base and bool(rng.random() < chance)


def _base(message: str, prompts: Sequence[re.Match[str]]) -> str:
    scored = [
        (float(number[1]), p[1]) for p in prompts if (number := NUMBER.match(message[p.end() :]))
    ]
    return max(scored, key=lambda pair: pair[0])[1] if scored else prompts[-1][1] if prompts else ""


def _sentences(text: str) -> list[str]:
    return re.findall(r"[A-Z][^.]*\.", text)


def answer(message: str) -> str | None:
    """Return the queue of a ticket that a message asks for; ``None`` if it asks for something else."""
    return sort(message) if message.rstrip().endswith("\nQueue:") else None


def sort(message: str) -> str:
    """Return the queue of the ticket at the end of a message: a prompt, demonstrations, and the ticket."""
    before, _, given = message.rpartition("\nTicket: ")
    topic = next((topic for topic in QUEUES if topic in given), "praise")
    prompt, *demos = f"\n{before}".split("\nTicket: ")
    stated = [
        sentence
        for sentence in _sentences(prompt)
        if sentence.startswith(f"Tickets about a {topic} ")
    ]
    useful = sum(sentence in prompt for sentence in RIGHT.values())
    others = max(0, len(_sentences(prompt)) - useful - 1)
    shown = SHOWN if any(f" {topic} " in demo for demo in demos) else UNAWARE
    chance = max(shown, OBVIOUS if topic in OBVIOUS_TOPICS else 0.0)
    if stated:
        chance = max(shown, RELIABLE - CLUTTER * others) if RIGHT[topic] in stated else MISLED
    return QUEUES[topic] if generator("tickets", message).random() < chance else "general"


if __name__ == "__main__":
    write_rows(Path(sys.argv[1]), rows)
