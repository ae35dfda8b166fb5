"""Python steps of the HoVer system, and a filter for claims that a small corpus can support.

    python -m benchmarks.hover CLAIMS CORPUS FOLDER

writes to FOLDER the claims of the folder CLAIMS whose gold pages are all in CORPUS.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from compound.components.retriever import FoundPassage as Passage
from compound.core.narrowing import entry
from compound.evaluation.rows import EXTENSIONS, read_rows

QUERIES = 3


def only(claim: str) -> list[str]:
    """Return the claim as the only query of the first hop.

    >>> only("Lima is the capital of Peru.")
    ['Lima is the capital of Peru.']
    """
    return [claim]


def queries(written: list[str]) -> list[str]:
    """Return the first three distinct queries, or fewer.

    >>> queries(["Lima", "", "Peru", "Lima", "Cusco", "Puno"])
    ['Lima', 'Peru', 'Cusco']
    """
    return list(dict.fromkeys(query for query in written if query.strip()))[:QUERIES]


def best(found: list[list[Passage]], each: int, most: int) -> list[Passage]:
    """Merge the passages of a hop, best first, without duplicates.

    Args:
        found: the passages of each query, best first, with their scores.
        each: maximum number of passages per query.
        most: maximum number of passages in total.

    >>> a, b = {"id": "a", "score": 2.0}, {"id": "b", "score": 3.0}
    >>> [passage["id"] for passage in best([[a, b], [a]], each=2, most=9)]
    ['b', 'a']
    """
    passages = [passage for group in found for passage in group[:each]]
    kept: dict[str, Passage] = {}
    for passage in sorted(passages, key=lambda passage: -passage["score"]):
        kept.setdefault(passage["id"], passage)
    return list(kept.values())[:most]


def shown(passages: list[Passage], most: int, words: int) -> list[str]:
    """Format the first passages of a hop, truncated, for the note taker.

    >>> shown([{"title": "Peru", "text": "Lima is its capital."}], most=5, words=2)
    ['Peru: Lima is']
    """
    return [f"{p['title']}: {' '.join(p['text'].split()[:words])}" for p in passages[:most]]


def nothing() -> str:
    """Return the facts before the first hop."""
    return "none yet"


def with_notes(facts: str, notes: str) -> str:
    """Append the facts of another hop.

    >>> with_notes("none yet", "Lima is in Peru."), with_notes("Lima is in Peru.", "Peru is a country.")
    ('Lima is in Peru.', 'Lima is in Peru.\\nPeru is a country.')
    """
    known = "" if facts == nothing() else facts
    return "\n".join(part for part in (known, notes.strip()) if part) or nothing()


def titles(
    first: list[Passage],
    second: list[Passage],
    third: list[Passage],
    last: list[Passage],
    most: int,
) -> list[str]:
    """Return the titles of at most ``most`` passages of all hops, in the order of the hops."""
    return [passage["title"] for passage in (*first, *second, *third, *last)][:most]


def supported(folder: Path, corpus: Path, target: Path) -> dict[str, int]:
    """Write the claims whose gold pages are all in a corpus; return their number by split."""
    known = {row["title"] for _, row in read_rows(corpus)}
    target.mkdir(parents=True, exist_ok=True)
    counts = {}
    for file in sorted(path for path in folder.iterdir() if path.name.endswith(EXTENSIONS)):
        split = file.name.partition(".")[0]
        rows = [
            row for _, row in read_rows(file) if known.issuperset(entry(row, "gold_titles", list))
        ]
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (target / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        counts[split] = len(rows)
    return counts


def main(arguments: Sequence[str]) -> None:
    """Write the claims that a corpus supports, and print their numbers."""
    print(supported(*map(Path, arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
