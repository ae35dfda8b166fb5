"""The HoVer system: its file, its steps, whole runs over a tiny corpus, and the filter for claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from benchmark_systems import BENCHMARKS, data_folder, evaluated, needs_data
from benchmarks.hover import main, supported
from compound.testing import ScriptedLM
from compound.yaml import load
from compound.yaml.program import Program

CORPUS = "components.search.map.body.components.searcher.retriever.corpus"
PAGES = {
    "Miss Potter": "Miss Potter is a film directed by Chris Noonan.",
    "Chris Noonan": "Chris Noonan also directed Babe.",
    "Babe": "Babe was nominated for the Academy Award for Best Director.",
    "Academy Award for Best Director": "It is presented by the Academy of Motion Picture Arts and Sciences.",
    "Lima": "Lima is the capital of Peru.",
}
CLAIM = "The director of Miss Potter was nominated for an award."
GOLD: Any = ["Miss Potter", "Chris Noonan", "Academy Award for Best Director"]
ROW = {"id": "a", "claim": CLAIM, "gold_titles": GOLD}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    file = tmp_path_factory.mktemp("hover") / "corpus.jsonl"
    rows: Any = [
        {"id": f"p{i}", "title": t, "text": text} for i, (t, text) in enumerate(PAGES.items())
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return load(BENCHMARKS / "hover.yaml", overrides=[(CORPUS, str(file))])


def replies(message: str) -> str:
    """Follow the chain: each note names the next page."""
    steps = [
        ("none yet", "Chris Noonan"),
        ("Chris Noonan", "Babe"),
        ("Babe", "Academy Motion Picture"),
    ]
    facts = message.split("Facts:")[1].split("Claim:", maxsplit=1)[0].strip()
    if message.startswith("Write one sentence"):
        return next(note for known, note in reversed(steps) if known in facts)
    assert message.startswith("Write up to three")
    return f"- {facts.splitlines()[-1]}"


def run(program: Program, lm: ScriptedLM) -> cp.Trace:
    return cp.run(program.system, {"claim": CLAIM}, engines={"smollm2": lm}, check=False)


def test_every_gold_page_is_found_by_following_the_notes(program: Program) -> None:
    lm = ScriptedLM(replies)
    found = evaluated(program, [ROW], lm)
    assert (found.mean, found.failed, len(lm.requests)) == (1.0, 0, 6)


def test_notes_are_handed_from_hop_to_hop(program: Program) -> None:
    trace = run(program, ScriptedLM(replies))
    facts = [call.inputs["facts"] for call in trace.calls_of("query_writer")]
    assert facts == [
        "Chris Noonan",
        "Chris Noonan\nBabe",
        "Chris Noonan\nBabe\nAcademy Motion Picture",
    ]
    assert [call.address for call in trace.calls_of("note_taker")] == ["notes1", "notes2", "notes3"]
    assert [call.invocation for call in trace.calls_of("query_writer")] == [0, 1, 2]


def test_claims_whose_pages_are_all_in_the_corpus_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, claims = tmp_path / "corpus.jsonl", tmp_path / "claims"
    claims.mkdir()
    corpus.write_text('{"title": "A", "text": "a"}\n{"title": "B", "text": "b"}')
    rows = [{"id": "1", "gold_titles": ["A", "B"]}, {"id": "2", "gold_titles": ["A", "C"]}]
    for split in ("train", "dev"):
        (claims / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert supported(claims, corpus, tmp_path / "kept") == {"dev": 1, "train": 1}
    data = cp.Dataset(tmp_path / "kept")
    assert [example.id for example in data.examples("valid", [])] == ["1"]
    main([str(claims), str(corpus), str(tmp_path / "again")])
    assert capsys.readouterr().out == "{'dev': 1, 'train': 1}\n"


@needs_data
def test_real_claims_run() -> None:
    folder = data_folder()
    real = load(
        BENCHMARKS / "hover.yaml",
        overrides=[(CORPUS, str(folder / "wiki_abstracts" / "corpus.jsonl.gz"))],
    )
    lm = ScriptedLM(lambda message: "the page" if "Queries" in message else "a note")
    found = evaluated(real, cp.Dataset(folder / "hover"), lm, limit=5)
    assert found.failed == 0
