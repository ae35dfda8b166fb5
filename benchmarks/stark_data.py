"""Knowledge bases for the stark system: files of STaRK-Prime, or a small one made of 2WikiMultihopQA.

    python -m benchmarks.stark_data prime QA NODES FOLDER
    python -m benchmarks.stark_data example 2WIKIMULTIHOPQA FOLDER

Both write to FOLDER the questions (train, dev and test) and two corpora with a row per entity:
texts, and relations, one per line. QA is the folder ``qa/prime`` of STaRK. NODES is a file of JSON
lines with the entities, exported as described in docs/evidence/benchmarks.md: STaRK stores its
knowledge base in pickle files, which can run code when they are opened, so this module does not
open them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.stark import Edge, edge_line
from compound.core.errors import DataError
from compound.core.narrowing import entry
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.records import Damaged, parse
from compound.evaluation.rows import read_rows

SPLITS = {"train": "train", "dev": "val", "test": "test"}
"""Splits, and their names in STaRK."""
MOST_WORDS = 300  # of the text of an entity; genes have up to 50,000
MOST_EDGES = 200  # of an entity, per relation; some entities have 10,000, and a trace contains what was found
VALUES = ("date of birth", "date of death", "inception", "publication date")
"""Relations of 2WikiMultihopQA whose tails are not entities."""

Row = dict[str, object]


@dataclass
class Entity:
    """An entity of a knowledge base.

    Attributes:
        id: identifier, without spaces and brackets.
        name: the name; need not be unique.
        text: what is known about it.
        edges: relations to other entities.
        values: lines ``relation: value`` that do not lead to entities.
    """

    id: str
    name: str
    text: str = ""
    edges: list[Edge] = field(default_factory=list)
    values: list[str] = field(default_factory=list)

    def text_row(self) -> Row:
        """Return the row in the corpus of texts."""
        return {"id": self.id, "title": self.name, "text": " ".join(self.text.split()[:MOST_WORDS])}

    def relation_row(self) -> Row:
        """Return the row in the corpus of relations, with at most ``MOST_EDGES`` edges per relation."""
        counts: dict[str, int] = {}
        lines = list(dict.fromkeys(self.values))
        for edge in dict.fromkeys(self.edges):
            counts[edge.relation] = counts.get(edge.relation, 0) + 1
            if counts[edge.relation] <= MOST_EDGES:
                lines.append(edge_line(edge))
        return {"id": self.id, "title": self.name, "text": "\n".join(lines)}


def write(
    folder: Path, entities: Iterable[Entity], questions: Mapping[str, Sequence[Row]]
) -> dict[str, int]:
    """Write the files of a knowledge base; return the number of entities and of questions by split."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    with (
        (folder / "texts.jsonl").open("w", encoding="utf-8") as texts,
        (folder / "relations.jsonl").open("w", encoding="utf-8") as relations,
    ):
        for entity in entities:
            count += 1
            texts.write(_line(entity.text_row()))
            relations.write(_line(entity.relation_row()))
    for split, rows in questions.items():
        (folder / f"{split}.jsonl").write_text("".join(map(_line, rows)), encoding="utf-8")
    return {"entities": count, **{split: len(rows) for split, rows in questions.items()}}


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


# --- STaRK-Prime -------------------------------------------------------------------------------------------


def prime(qa: Path, nodes: Path, folder: Path) -> dict[str, int]:
    """Convert STaRK-Prime; return the number of entities and of questions by split.

    Args:
        qa: folder with ``stark_qa/stark_qa.csv`` and ``split/*.index``.
        nodes: file with a row {"id", "name", "text", "relations"} per entity; ``relations`` are
            pairs of a relation and the id of another entity.
        folder: folder to write to.

    Raises:
        DataError: a file is missing or damaged, or a question or a relation names an unknown
            entity.
    """
    names = {}
    for number, row in read_rows(nodes):
        place = f"{nodes}:{number}"
        entity, name = str(_cell(row, "id", place)), str(_cell(row, "name", place))
        if any(sign in "[]" or sign.isspace() for sign in entity):
            raise DataError(f"{place}: the id {entity!r} must not contain spaces or brackets")
        names[entity] = " ".join(name.split())
    return write(folder, _prime_entities(nodes, names), prime_questions(qa, names))


def _cell(row: Mapping[str, object], column: str, place: str) -> object:
    if column not in row:
        raise DataError(f"{place}: no column {column!r}", hint=f"columns: {', '.join(row)}")
    return row[column]


def _prime_entities(nodes: Path, names: Mapping[str, str]) -> Iterator[Entity]:
    for number, row in read_rows(nodes):
        place, entity = f"{nodes}:{number}", str(row["id"])
        edges = list(_prime_edges(_cell(row, "relations", place), names, place))
        yield Entity(entity, names[entity], str(_cell(row, "text", place)), edges)


def _prime_edges(relations: object, names: Mapping[str, str], place: str) -> Iterator[Edge]:
    pairs = relations if isinstance(relations, list) else [relations]
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(
                f"{place}: relations must be pairs of a relation and an id, got {pair!r}"
            )
        relation, other = " ".join(str(pair[0]).replace(":", " ").split()), str(pair[1])
        if not relation:
            raise DataError(f"{place}: a relation has no name")
        if other not in names:
            raise DataError(f"{place}: a relation leads to the unknown entity {other!r}")
        yield Edge(relation, names[other], other)


def prime_questions(qa: Path, names: Mapping[str, str]) -> dict[str, list[Row]]:
    """Read the questions of each split, with the ids of their answers as texts.

    Raises:
        DataError: a split names an unknown question, or a question an unknown entity.
    """
    file = qa / "stark_qa" / "stark_qa.csv"
    questions = [_question(row, f"{file}:{number}", names) for number, row in read_rows(file)]
    found = {row["id"]: row for row in questions}
    folder = UntrustedFolder(qa, error=DataError).below("split")
    splits = {}
    for split, name in SPLITS.items():
        ids = folder.read(f"{name}.index").decode("ascii", errors="replace").split()
        if unknown := [number for number in ids if number not in found]:
            raise DataError(f"{folder}/{name}.index: {file} has no question {unknown[0]!r}")
        splits[split] = [found[number] for number in ids]
    return splits


def _question(row: Mapping[str, object], place: str, names: Mapping[str, str]) -> Row:
    question, listed = str(_cell(row, "query", place)), str(_cell(row, "answer_ids", place))
    try:
        answers = parse(listed)  # a Python list of numbers, which is also JSON
    except Damaged as error:
        raise DataError(f"{place}: answer_ids are not a list of numbers") from error
    ids = [str(answer) for answer in answers] if isinstance(answers, list) else []
    if not ids or (unknown := [answer for answer in ids if answer not in names]):
        raise DataError(
            f"{place}: " + (f"unknown entity {unknown[0]!r}" if ids else "no answer_ids")
        )
    return {"id": str(_cell(row, "id", place)), "question": question, "answer": ids}


# --- example -----------------------------------------------------------------------------------------------


def example(source: Path, folder: Path) -> dict[str, int]:
    """Make a small knowledge base and questions; return the number of entities and of questions by split.

    Entities are the pages of 2WikiMultihopQA and what its triples name; a triple is a relation of
    both of its entities. Questions are those whose answer is the name of an entity, at most a third
    of them comparisons.

    Args:
        source: the folder of 2WikiMultihopQA, with ``train``, ``dev``, ``test`` and ``corpus``.
        folder: folder to write to.
    """
    base = _Base()
    rows = {split: [row for _, row in read_rows(source / f"{split}.jsonl.gz")] for split in SPLITS}
    for row in (row for split in SPLITS for row in rows[split]):
        for page in entry(row, "context", list):
            base.describe(page["title"], page["text"])
    for _, page in read_rows(source / "corpus.jsonl.gz"):
        base.describe(entry(page, "title", str), entry(page, "text", str))
    for row in (row for split in SPLITS for row in rows[split]):
        for head, relation, tail in entry(row, "evidences", list):
            base.relate(head, relation, tail)
    questions = {split: _example_questions(rows[split], base) for split in SPLITS}
    return write(folder, base.entities.values(), questions)


def _example_questions(rows: Sequence[Mapping[str, object]], base: _Base) -> list[Row]:
    """Return the questions of a split whose answer is an entity.

    Comparisons name their answer, others lead to it by relations. The splits have different shares
    of them: the surplus of comparisons over a third of the questions is left out.
    """
    answers = [base.entities.get(_key(entry(row, "answer", str))) for row in rows]
    answered = [
        (row, entity) for row, entity in zip(rows, answers, strict=True) if entity is not None
    ]
    compared = [row["id"] for row, _ in answered if "comparison" in entry(row, "type", str)]
    surplus = set(compared[(len(answered) - len(compared)) // 2 :])
    return [
        {"id": row["id"], "question": row["question"], "answer": [entity.id]}
        for row, entity in answered
        if row["id"] not in surplus
    ]


class _Base:
    """Entities by name, regardless of case."""

    def __init__(self) -> None:
        self.entities: dict[str, Entity] = {}

    def entity(self, name: str) -> Entity:
        """Return the entity of a name, which is added if it is new."""
        clean = " ".join(name.split())
        return self.entities.setdefault(_key(name), Entity(str(len(self.entities)), clean))

    def describe(self, name: str, text: str) -> None:
        """Add the text of an entity, unless it has one."""
        entity = self.entity(name)
        entity.text = entity.text or text

    def relate(self, head: str, relation: str, tail: str) -> None:
        """Add a triple to both entities, or its value to the first one."""
        first = self.entity(head)
        if relation in VALUES:
            first.values.append(f"{relation}: {' '.join(tail.split())}")
            return
        second = self.entity(tail)
        first.edges.append(Edge(relation, second.name, second.id))
        second.edges.append(Edge(f"{relation} of", first.name, first.id))


def _key(name: str) -> str:
    return " ".join(name.casefold().split())


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a knowledge base, and print its numbers of entities and questions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, paths in (("prime", ("qa", "nodes", "folder")), ("example", ("source", "folder"))):
        command = commands.add_parser(name)
        for path in paths:
            command.add_argument(path, type=Path, metavar=path.upper())
    args = parser.parse_args(arguments)
    if args.command == "prime":
        print(prime(args.qa, args.nodes, args.folder))
    else:
        print(example(args.source, args.folder))


if __name__ == "__main__":
    main()
