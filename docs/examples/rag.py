"""Tune a retrieval-augmented question answerer: the number of passages and the demonstrations.

BM25 searches a corpus of facts about invented islands, and the embedded model answers from what was
found.

Needs ``pip install -e ".[local,retrieval]"`` and ``compound models get smollm2``.
Run: python docs/examples/rag.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import compound as cp

NAMES = "Ardo Belmar Corvas Dunlow Elvane Farrow Gorran Hestia Istra Jorvan Kestle Lumen Marrow Norvik Orsa"
TOWNS = "Selm Tivane Harwick Maris Ston Quill Lenton Amberley Nova Kings Ravel Eastgate Pines Brook Orley"
GOODS = "copper salt wool tea honey silver oranges glass pearls timber wine cotton paper amber silk"
ANIMALS = "heron fox seal owl hare otter crane lynx gull bear swan badger goat wolf eagle"
FACTS = zip(TOWNS.split(), GOODS.split(), ANIMALS.split(), strict=True)
ISLANDS = dict(zip(NAMES.split(), FACTS, strict=True))
PASSAGES = (
    "{0} is an island in the northern sea. The capital of {0} is {1}, a town with a long wall.",
    "Merchants of {0} live by trade: the island sells {2} to its neighbours.",
    "The flag of {0} is green and shows the {3}, which is said to bring luck.",
)
QUESTIONS = (
    "What is the capital of {0}?",
    "What does the island of {0} sell?",
    "What animal does the flag of {0} show?",
)


def write_corpus(path: Path) -> None:
    """Write three passages about each island."""
    with path.open("w", encoding="utf-8") as file:
        for name, facts in ISLANDS.items():
            for number, text in enumerate(PASSAGES):
                passage = {
                    "id": f"{name}-{number}",
                    "title": name,
                    "text": text.format(name, *facts),
                }
                file.write(json.dumps(passage) + "\n")


def rows() -> dict[str, list[dict[str, str]]]:
    """Return three questions about each island; no island is in two splits."""
    names, places = (
        list(ISLANDS),
        {"train": slice(0, 7), "valid": slice(7, 11), "test": slice(11, 15)},
    )
    return {
        split: [
            {
                "id": f"{name}-{number}",
                "question": text.format(name),
                "answer": ISLANDS[name][number],
            }
            for name in names[place]
            for number, text in enumerate(QUESTIONS)
        ]
        for split, place in places.items()
    }


def declare(corpus: Path) -> cp.System:
    """Declare the searcher and the answerer."""
    question = cp.Input("question", str)
    searcher = cp.Retriever("searcher", cp.components.BM25(str(corpus)), k=cp.Choice(1, 3, value=1))
    demos, output = cp.Demos(max=2), {"answer": str}
    answerer = cp.LLM(
        "answerer",
        prompt="Answer in a few words.",
        demos=demos,
        output=output,
        max_tokens=10,
        stop=("\n",),
    )
    answer = answerer(passages=searcher(query=question), question=question)
    return cp.System("rag", outputs={"answer": answer}, lm="smollm2")


def main(folder: Path) -> cp.Result:
    """Optimize the system, and print scores and the configuration that was found."""
    write_corpus(folder / "corpus.jsonl")
    result = cp.optimize(
        declare(folder / "corpus.jsonl"),
        data=rows(),
        metric=cp.metrics.token_f1("answer"),
        budget=cp.Budget(system_runs=150),
        run_dir=folder / "rag",
        progress=False,
    )
    before, after, gain = result.test_before, result.test_after, result.test_gain
    assert before is not None
    assert after is not None
    assert gain is not None
    print(f"token F1 on {len(after.rows)} test questions: {before.mean:.2f} -> {after.mean:.2f}")
    print(f"gain: {gain.mean:+.2f}, 95 % interval {gain.low:+.2f} to {gain.high:+.2f}")
    print(f"passages: {result.best['searcher.k']}")
    demos: Any = result.best["answerer.demos"]
    for demo in demos:
        print(f"demonstration: {demo['inputs']['question']} {demo['outputs']['answer']}")
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
