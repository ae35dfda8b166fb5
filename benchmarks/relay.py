"""Python steps of the relay system, and a script that turns triples of 2WikiMultihopQA into questions.

    python -m benchmarks.relay 2WIKIMULTIHOPQA FOLDER

writes to FOLDER the files train, dev and test with one question for each fact that its paragraph
states.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from compound.components.retriever import FoundPassage as Passage
from compound.core.narrowing import entry
from compound.evaluation.rows import read_rows

Unit = Literal["paragraph", "sentence"]
Order = Literal["best_first", "best_last"]
SPLITS = ("train", "dev", "test")
QUESTIONS: Mapping[str, str] = {
    "composer": "Who composed {}?",
    "country of citizenship": "What is the nationality of {}?",
    "country of origin": "Which country is {} from?",
    "country": "In which country is {}?",
    "date of birth": "When was {} born?",
    "date of death": "When did {} die?",
    "director": "Who directed {}?",
    "educated at": "Where was {} educated?",
    "father": "Who was the father of {}?",
    "inception": "When was {} founded?",
    "mother": "Who was the mother of {}?",
    "performer": "Who performed {}?",
    "place of birth": "Where was {} born?",
    "place of death": "Where did {} die?",
    "publication date": "When was {} published?",
    "spouse": "To whom was {} married?",
}
"""The question about each relation; triples of other relations are left out."""

_SENTENCE_END = re.compile(r"(?<=[.?!])\s+(?=[A-Z])")


def split(context: list[dict[str, object]], unit: Unit) -> list[Passage]:
    """Return the paragraphs of an example, or their sentences with the titles of the paragraphs.

    >>> split([{"title": "Peru", "text": "Lima is its capital. It has a coast."}], "sentence")
    [{'title': 'Peru', 'text': 'Lima is its capital.'}, {'title': 'Peru', 'text': 'It has a coast.'}]
    """
    return [
        {"title": entry(paragraph, "title", str), "text": text}
        for paragraph in context
        for text in _units(entry(paragraph, "text", str), unit)
    ]


def _units(text: str, unit: Unit) -> list[str]:
    return (
        [text]
        if unit == "paragraph"
        else [part for part in _SENTENCE_END.split(text.strip()) if part]
    )


def present(passages: list[Passage], words: int, order: Order) -> str:
    """Format passages, one per line, truncated to their first words.

    Args:
        passages: the passages, best first.
        words: maximum number of words per passage, without the title.
        order: ``best_last`` puts the best passage next to the question.

    >>> found = [{"title": "Peru", "text": "Lima is its capital."}, {"title": "Chile", "text": "A country."}]
    >>> print(present(found, 2, "best_last"))
    Chile: A country.
    Peru: Lima is
    """
    lines = [f"{p['title']}: {' '.join(p['text'].split()[:words])}" for p in passages]
    return "\n".join(lines if order == "best_first" else reversed(lines))


def facts(row: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yield a question for each triple of an example whose paragraph contains the answer.

    >>> page = {"title": "Emma", "text": "Emma is a novel by Jane Austen."}
    >>> row = {"id": "7", "context": [page], "evidences": [["Emma", "composer", "Jane Austen"]]}
    >>> [(fact["id"], fact["question"], fact["answer"]) for fact in facts(row)]
    [('7-0', 'Who composed Emma?', 'Jane Austen')]
    """
    context = [
        {"title": entry(paragraph, "title", str), "text": entry(paragraph, "text", str)}
        for paragraph in entry(row, "context", list)
    ]
    for number, (subject, relation, answer) in enumerate(entry(row, "evidences", list)):
        stated = any(p["title"] == subject and answer.lower() in p["text"].lower() for p in context)
        if relation in QUESTIONS and stated:
            question = QUESTIONS[relation].format(subject)
            yield {
                "id": f"{row['id']}-{number}",
                "question": question,
                "context": context,
                "answer": answer,
            }


def write_facts(source: Path, target: Path) -> dict[str, int]:
    """Write the first fact of each example of 2WikiMultihopQA; return the number of questions by split.

    A question that occurs in several examples is written once.
    """
    target.mkdir(parents=True, exist_ok=True)
    counts, seen = {}, set()
    for name in SPLITS:
        lines = []
        for _, row in read_rows(source / f"{name}.jsonl.gz"):
            fact = next((fact for fact in facts(row) if fact["question"] not in seen), None)
            if fact is not None:
                seen.add(fact["question"])
                lines.append(json.dumps(fact, ensure_ascii=False) + "\n")
        (target / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        counts[name] = len(lines)
    return counts


def main(arguments: Sequence[str]) -> None:
    """Write the questions, and print their numbers."""
    print(write_facts(*map(Path, arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
