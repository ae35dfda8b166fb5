"""Language model of known skill that performs a task and writes prompts for it, to compare prompt optimizers.

The task is a chain of two steps. The reader copies an order into a draft, and the finisher copies
the draft into a label. The data follow six conventions, such as "the quantity is spelled out",
three of which each step must apply; a step applies a convention reliably only if its prompt states
it, and less reliably if its demonstrations show it. The first prompts state none.

Asked to write, the model uses what any request for a prompt may contain, and nothing of its
wording:

- prompts, recognized by their first sentence, with the number after each of them, if there is one: it starts
  from the prompt with the highest number, or from the last prompt if there are no numbers;
- texts that follow a convention, such as expected answers: the more of them, the likelier it notices the
  convention;
- statements of conventions outside of prompts, such as a criticism or a summary written before;
- the form of the reply that the end of the request asks for: marks to write between, or a named field
  (`ReplyForm`). Without a form, or in a field other than a prompt, it states the conventions that
  it noticed.

    python -m benchmarks.simulated.writer FOLDER

writes the data set of ``benchmarks/writer.yaml``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from compound.execution.rng import generator
from compound.testing import ScriptedLM

RELIABLE = 0.95  # probability that a step applies a convention that its prompt states
CLUTTER = 0.02  # loss of that probability for each other sentence of the prompt
UNAWARE, MISLED = 0.08, 0.02  # the probability without a statement, and with a wrong one
SHOWN, SHOWN_MORE, SHOWN_MOST = (
    0.35,
    0.15,
    0.8,
)  # with demonstrations: of one, of each further one, at most
OVERLOOK = (
    0.7  # probability that a perfect writer overlooks a convention in one text that follows it
)
GUESS = 0.25  # probability of a guess about a convention that was not noticed
FORGET = 0.15  # probability that a writer without skill drops a statement

NAMES = ("anna lopez", "ben tanaka", "carla rossi", "david okoye", "eva novak", "farid haddad")
COLOURS = ("blue", "red", "green", "white")
ITEMS = ("lamp", "chair", "clock", "mirror", "basket")
MONTHS = ("january", "february", "march", "april", "may", "june", "july", "august", "september")
NUMBERS = ("two", "three", "four", "five", "six", "seven")
COUNTRIES = {
    "lima": "peru",
    "oslo": "norway",
    "cairo": "egypt",
    "hanoi": "vietnam",
    "quito": "ecuador",
}


@dataclass(frozen=True)
class Convention:
    """Convention about one field of a label.

    Attributes:
        name: the field.
        form: matches a text that follows the convention.
        statements: sentences about the field; the first one states the convention, the others are
            wrong.
    """

    name: str
    form: re.Pattern[str]
    statements: tuple[str, str, str]


def _words(words: Sequence[str]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(words)})\b")


CONVENTIONS = (
    Convention(
        "name",
        re.compile(r"\b[A-Z]{2}\b"),
        (
            "Give the initials of the name.",
            "Give the family name first.",
            "Write the name in small letters.",
        ),
    ),
    Convention(
        "date",
        re.compile(r"\b0[1-9]\d\d\b"),
        (
            "Write the date as four digits, month first.",
            "Name the day first.",
            "Shorten the month.",
        ),
    ),
    Convention(
        "quantity",
        _words(NUMBERS),
        ("Spell out the quantity.", "Put the quantity in brackets.", "Round the quantity."),
    ),
    Convention(
        "city",
        _words([*COUNTRIES.values()]),
        ("Replace the city by its country.", "Write the city in capitals.", "Shorten the city."),
    ),
    Convention(
        "price",
        re.compile(r"\b\d+00 cents\b"),
        (
            "Give the price in cents.",
            "Add the tax to the price.",
            "Write the price with a dollar sign.",
        ),
    ),
    Convention(
        "item",
        _words([item.upper() for item in ITEMS]),
        (
            "Write the item in capitals, without its colour.",
            "Put the colour last.",
            "Use the plural.",
        ),
    ),
)
STATEMENTS = [statement for convention in CONVENTIONS for statement in convention.statements]
NEEDLESS = "Take your time."  # a sentence that helps no step


@dataclass(frozen=True)
class Step:
    """Step of the task.

    Attributes:
        start: the first prompt, and the first sentence of every prompt that the model writes.
        reads, writes: labels of the input and of the output.
        conventions: the conventions that the step applies.
    """

    start: str
    reads: str
    writes: str
    conventions: tuple[Convention, ...]


STEPS = (
    Step("Copy the fields of the order into a draft.", "Order", "Draft", CONVENTIONS[:3]),
    Step("Copy the fields of the draft into a label.", "Draft", "Label", CONVENTIONS[3:]),
)
FIRST = re.compile("|".join(re.escape(step.start) for step in STEPS))
NUMBER = re.compile(r"[^\n]{0,24}?(-?\d+(?:\.\d+)?)")
ENDING = 400  # last characters of a request, in which the form of the reply is looked for
MARKS = re.compile(r"(<(\w+)>) and (</\2>)")
HEADED = re.compile(
    r"(\[\[ ## (\w+) ## \]\])`.*(\[\[ ## completed ## \]\])`"
)  # fields of DSPy's ChatAdapter
OBJECT = re.compile(r"JSON object[^`]*`(\w+)`")


@dataclass(frozen=True)
class ReplyForm:
    """Form of the reply that a request asks for.

    Attributes:
        before, after: what surrounds the text.
        field: the name of the field that holds the text, if it has one.
    """

    before: str = ""
    after: str = ""
    field: str | None = None

    @property
    def holds_prompt(self) -> bool:
        """Whether the text is to be a prompt: a field is one if it is named so."""
        return bool(self.before) and (
            self.field is None or bool(re.search("instruction|prompt", self.field))
        )


def reply_form(message: str) -> ReplyForm:
    """Return the form of the reply that the end of a request asks for.

    >>> reply_form("Write it between <prompt> and </prompt>.")
    ReplyForm(before='<prompt>', after='</prompt>', field=None)
    >>> reply_form("Respond with a JSON object: `summary`.").before
    '{"summary": "'
    """
    ending = message[-ENDING:]
    if marks := MARKS.search(ending):
        return ReplyForm(marks[1], marks[3])
    if headed := HEADED.search(ending):
        return ReplyForm(f"{headed[1]}\n", f"\n\n{headed[3]}", headed[2])
    if json_object := OBJECT.search(ending):
        return ReplyForm(f'{{"{json_object[1]}": "', '"}', json_object[1])
    return ReplyForm("```\n", "\n```") if "```" in ending else ReplyForm()


class WriterLM(ScriptedLM):
    """Engine with the model of this module.

    Args:
        skill: the probability that it notices a convention that plenty of texts follow, adopts one
            that is stated, and writes without needless sentences; from 0 to 1.
        changes: the maximum number of conventions that it notices in one reply.

    ``written`` is the number of requests other than for the output of a step.
    """

    def __init__(self, skill: float = 0.7, changes: int = 2) -> None:
        super().__init__(self._reply_to, name="writer", writes_prompts=True)
        self._skill = skill
        self._changes = changes
        self.written = 0

    def _reply_to(self, message: str, rng: np.random.Generator) -> str:
        if (output := answer(message)) is not None:
            return output
        self.written += 1
        return self._write(message, rng)

    def _write(self, message: str, rng: np.random.Generator) -> str:
        """Write a prompt in the requested form, or state the noticed conventions."""
        prompts, form = list(prompts_in(message)), reply_form(message)
        noticed = self._noticed(message, prompts, rng)
        if prompts and form.holds_prompt:
            return f"{form.before}{self._rewrite(prompts, noticed, rng)}{form.after}"
        text = " ".join(convention.statements[0] for convention in noticed) or "Nothing stands out."
        return f"{form.before}{text}{form.after}" if form.field else text

    def _noticed(
        self, message: str, prompts: Sequence[FoundPrompt], rng: np.random.Generator
    ) -> list[Convention]:
        """Return conventions that are stated outside of prompts, or that texts of the request follow."""
        rest = message
        for prompt in prompts:
            rest = rest.replace(" ".join([prompt.step.start, *prompt.sentences]), "")
        stated, seen = [], []
        for convention in CONVENTIONS:
            if convention.statements[0] in rest and rng.random() < self._skill:
                stated.append(convention)
            elif rng.random() < self._skill * (
                1 - OVERLOOK ** len(convention.form.findall(message))
            ):
                seen.append(convention)
        own = prompts[-1].step.conventions if prompts else CONVENTIONS
        known = base_of(prompts).sentences if prompts else ()
        new = [c for c in seen if c in own and c.statements[0] not in known]
        order = rng.permutation(len(new))
        return [*stated, *(new[i] for i in order[: self._changes])]

    def _rewrite(
        self,
        prompts: Sequence[FoundPrompt],
        noticed: Sequence[Convention],
        rng: np.random.Generator,
    ) -> str:
        """Return the best prompt with the noticed conventions, guesses about others, and mistakes."""
        base, text = base_of(prompts), [prompts[-1].step.start]
        for convention in base.step.conventions:
            about = [sentence for sentence in base.sentences if sentence in convention.statements]
            forgets, guesses = rng.random() < FORGET * (1 - self._skill), rng.random() < GUESS
            guess = convention.statements[rng.integers(len(convention.statements))]
            if convention in noticed:
                about = [convention.statements[0]]
            elif guesses and convention.statements[0] not in about:
                about = [guess]
            elif forgets:
                about = []
            text += about
        if rng.random() < (1 - self._skill) / 2:
            text.append(NEEDLESS)
        return " ".join(text)


@dataclass(frozen=True)
class FoundPrompt:
    """A prompt in a request, with the number after it.

    Attributes:
        step: the step that it instructs.
        sentences: its known sentences after the first one.
        score: the number after it; ``None`` if there is none on the same line.
    """

    step: Step
    sentences: tuple[str, ...] = field(default=())
    score: float | None = None


def prompts_in(message: str) -> Iterator[FoundPrompt]:
    """Yield the prompts in a request.

    >>> text = f"<x>{STEPS[0].start} Spell out the quantity.</x> has 0.25, and {STEPS[0].start}"
    >>> [(prompt.sentences, prompt.score) for prompt in prompts_in(text)]
    [(('Spell out the quantity.',), 0.25), ((), None)]
    """
    for found in FIRST.finditer(message):
        rest, sentences = message[found.end() :], []
        while sentence := next(
            (known for known in (*STATEMENTS, NEEDLESS) if rest.lstrip().startswith(known)), None
        ):
            sentences.append(sentence)
            rest = rest.lstrip().removeprefix(sentence)
        number = NUMBER.match(rest)
        step = next(step for step in STEPS if step.start == found[0])
        yield FoundPrompt(step, tuple(sentences), float(number[1]) if number else None)


def base_of(prompts: Sequence[FoundPrompt]) -> FoundPrompt:
    """Return the prompt to start from: the best by its number, or the last, for the step of the last one."""
    own = [prompt for prompt in prompts if prompt.step is prompts[-1].step]
    scored = [prompt for prompt in own if prompt.score is not None]
    return max(scored, key=lambda prompt: prompt.score or 0.0) if scored else own[-1]


def answer(message: str) -> str | None:
    """Return the output of the step that a message asks for; ``None`` if it asks for something else."""
    step = next((step for step in STEPS if message.rstrip().endswith(f"\n{step.writes}:")), None)
    return None if step is None else perform(step, message)


def perform(step: Step, message: str) -> str:
    """Return the output of a step for a message: a prompt, demonstrations, and an input."""
    before, _, given = message.rpartition(f"\n{step.reads}: ")
    values = [part.strip() for part in given.partition("\n")[0].split(";")]
    prompt = f"\n{before}".partition(f"\n{step.reads}: ")[0]
    demos = re.findall(rf"\n{step.writes}: (.+)", before)
    for convention in step.conventions:
        place = CONVENTIONS.index(convention)
        chance = chance_of(convention, step, prompt, demos)
        if place < len(values) and generator("writer", message, convention.name).random() < chance:
            values[place] = applied(convention.name, values[place])
    return "; ".join(values)


def chance_of(convention: Convention, step: Step, prompt: str, demos: Sequence[str]) -> float:
    """Return the probability that a step applies a convention, given its prompt and demonstrations."""
    right, *wrong = convention.statements
    if any(sentence in prompt for sentence in wrong):
        return MISLED
    shown = sum(bool(convention.form.search(demo)) for demo in demos)
    learned = min(SHOWN_MOST, SHOWN + SHOWN_MORE * (shown - 1)) if shown else UNAWARE
    useful = [c.statements[0] for c in step.conventions if c.statements[0] in prompt]
    others = len(re.findall(r"[.!?](?:\s|$)", prompt)) - len(useful) - 1
    return max(learned, RELIABLE - CLUTTER * max(0, others)) if right in prompt else learned


def applied(name: str, value: str) -> str:
    """Return a field's value in the form of its convention; unchanged if it is not understood.

    >>> applied("name", "anna lopez"), applied("date", "5 march"), applied("price", "12 dollars")
    ('AL', '0305', '1200 cents')
    """
    first, _, second = value.partition(" ")
    if name == "name" and second:
        return f"{first[0]}{second[0]}".upper()
    if name == "date" and second in MONTHS:
        return f"{MONTHS.index(second) + 1:02}{int(first):02}"
    if name == "quantity" and value.isdecimal():
        return NUMBERS[int(value) - 2]
    if name == "price" and second == "dollars":
        return f"{first}00 cents"
    return second.upper() if name == "item" and second in ITEMS else COUNTRIES.get(value, value)


def rows(count: int, kind: str) -> list[dict[str, str]]:
    """Return random orders with their labels."""
    found = []
    for number in range(count):
        rng = generator("writer", kind, number)
        values = {
            "name": NAMES[rng.integers(len(NAMES))],
            "date": f"{rng.integers(1, 29)} {MONTHS[rng.integers(len(MONTHS))]}",
            "quantity": str(rng.integers(2, 8)),
            "city": [*COUNTRIES][rng.integers(len(COUNTRIES))],
            "price": f"{rng.integers(5, 60)} dollars",
            "item": f"{COLOURS[rng.integers(len(COLOURS))]} {ITEMS[rng.integers(len(ITEMS))]}",
        }
        label = "; ".join(applied(name, value) for name, value in values.items())
        found.append({"id": f"{kind}{number}", "order": "; ".join(values.values()), "label": label})
    return found


SIZES: Mapping[str, int] = {"train": 240, "dev": 100, "test": 200}


def write_rows(folder: Path, make: Callable[[int, str], Sequence[Mapping[str, str]]]) -> None:
    """Write a data set."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, count in SIZES.items():
        text = "".join(json.dumps(row) + "\n" for row in make(count, kind))
        (folder / f"{kind}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_rows(Path(sys.argv[1]), rows)
