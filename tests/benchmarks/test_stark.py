"""The stark benchmark: its file, its steps, whole runs over a tiny knowledge base, and its data."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from benchmark_systems import BENCHMARKS, data_folder, evaluated, needs_data
from benchmarks import stark_data
from benchmarks.stark import Edge, combine, edge_line, edges
from benchmarks.stark_data import Entity, example, prime
from compound.core.errors import DataError
from compound.core.narrowing import entry
from compound.evaluation.rows import read_rows
from compound.testing import ScriptedLM
from compound.yaml import load
from compound.yaml.program import Program

FILE = BENCHMARKS / "stark.yaml"
BASE = [
    Entity(
        "0",
        "Miss Potter",
        "A film about a writer of children's books.",
        [Edge("director", "Chris Noonan", "1")],
    ),
    Entity(
        "1",
        "Chris Noonan",
        "An Australian filmmaker.",
        [Edge("director of", "Miss Potter", "0"), Edge("place of birth", "Sydney", "2")],
        ["date of birth: 14 November 1952"],
    ),
    Entity(
        "2",
        "Sydney",
        "A city with an opera house.",
        [Edge("place of birth of", "Chris Noonan", "1")],
    ),
    Entity("3", "Lima", "The capital of Peru."),
]
QUESTION = "Where was the director of Miss Potter born?"
ROW: dict[str, Any] = {"id": "a", "question": QUESTION, "answer": ["2"]}


def corpora(folder: Path) -> list[tuple[str, str]]:
    files = {"question_scorer": "texts", "text_scorer": "texts", "linker": "relations"}
    return [
        (f"components.{n}.retriever.corpus", str(folder / f"{file}.jsonl"))
        for n, file in files.items()
    ]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    folder = tmp_path_factory.mktemp("stark")
    stark_data.write(folder, BASE, {"train": [ROW], "dev": [ROW], "test": [ROW]})
    return load(FILE, overrides=[("data.path", str(folder)), *corpora(folder)])


def replies(message: str) -> str:
    if message.startswith("Say in a few words"):
        return "a city"
    assert message.startswith("List the names")
    return "Miss Potter, place of birth"


def ranked(program: Program, lm: ScriptedLM, **values: float) -> list[str]:
    system = program.system.bind({name.replace("__", "."): value for name, value in values.items()})
    return entry(
        cp.run(system, {"question": QUESTION}, engines={"smollm2": lm}).outputs, "ranked", list
    )


def test_each_scorer_alone_has_its_own_ranking(program: Program) -> None:
    def alone(kind: str) -> list[str]:
        weights = {
            f"aggregator__{name}_weight": float(name == kind)
            for name in ("question", "text", "relation")
        }
        return ranked(program, ScriptedLM(replies), **weights)

    assert alone("question") == ["0"]  # the only text that shares a word with the question
    assert alone("text") == ["2"]
    assert set(alone("relation")) == {"0", "1", "2"}


def test_the_score_is_the_reciprocal_rank_of_the_answer(program: Program) -> None:
    assert program.data is not None
    lm = ScriptedLM(replies)
    place = ranked(program, lm).index("2") + 1
    assert evaluated(program, program.data, lm).mean == pytest.approx(1 / place)


def found(*scores: float, texts: Sequence[str] = ()) -> list[dict[str, Any]]:
    return [
        {"id": str(i), "title": "", "text": texts[i] if texts else "", "score": score}
        for i, score in enumerate(scores)
    ]


@pytest.mark.parametrize(
    "edge",
    [
        Edge("director of", "Emma: a film [1996]", "17"),
        Edge("ppi", "A (B)", "e-1"),
        Edge("x", "[", "2"),
    ],
)
def test_an_edge_is_parsed_as_it_was_written(edge: Edge) -> None:
    assert list(edges(f"date of birth: 1952\n{edge_line(edge)}\n")) == [edge]


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ((1.0, 0.0, 0.0), ["0", "1"]),
        ((0.0, 0.0, 1.0), ["x", "1"]),
        ((1.0, 0.0, 0.6), ["1", "0", "x"]),  # 0: 1, 1: 0.75 + 0.6 * 0.5 = 1.05, x: 0.6
        ((0.0, 0.0, 0.0), []),
    ],
)
def test_scores_are_normalized_and_weighted(
    weights: tuple[float, float, float], wanted: list[str]
) -> None:
    assert combine(found(8.0, 6.0), [], {"1": 0.5, "x": 1.0}, *weights, most=9) == wanted


NODES: list[dict[str, Any]] = [
    {
        "id": 0,
        "name": "flu",
        "text": "- name: flu\n- type: disease",
        "relations": [["associated with", 1]],
    },
    {"id": 1, "name": "G1", "text": "a gene", "relations": [["associated with", 0], ["target", 2]]},
    {"id": 2, "name": "new\ndrug", "text": "", "relations": [["target", 1]]},
]
QUESTIONS = 'id,query,answer_ids\n7,"Which gene, in flu?",[1]\n3,Which drug?,"[2, 0]"\n9,Which disease?,[0]\n'


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Path]:
    qa, nodes = tmp_path / "qa", tmp_path / "nodes.jsonl"
    (qa / "stark_qa").mkdir(parents=True)
    (qa / "split").mkdir()
    (qa / "stark_qa" / "stark_qa.csv").write_text(QUESTIONS)
    for split, ids in {"train": "7\n", "val": "3\n", "test": "9\n7\n", "test-0.1": "9\n"}.items():
        (qa / "split" / f"{split}.index").write_text(ids)
    nodes.write_text("".join(json.dumps(row) + "\n" for row in NODES))
    return qa, nodes


def rows(file: Path) -> list[dict[str, object]]:
    return [row for _, row in read_rows(file)]


def test_stark_prime_is_converted(published: tuple[Path, Path], tmp_path: Path) -> None:
    assert prime(*published, tmp_path / "out") == {"entities": 3, "train": 1, "dev": 1, "test": 2}
    assert rows(tmp_path / "out" / "dev.jsonl") == [
        {"id": "3", "question": "Which drug?", "answer": ["2", "0"]}
    ]
    assert [row["text"] for row in rows(tmp_path / "out" / "relations.jsonl")] == [
        "associated with: G1 [1]",
        "associated with: flu [0]\ntarget: new drug [2]",
        "target: G1 [1]",
    ]
    assert [row["title"] for row in rows(tmp_path / "out" / "texts.jsonl")] == [
        "flu",
        "G1",
        "new drug",
    ]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("split/train.index", "8\n", "train.index: .* has no question '8'"),
        ("stark_qa/stark_qa.csv", "id,query,answer_ids\n7,Who?,[5]\n", "csv:2: unknown entity '5'"),
        ("stark_qa/stark_qa.csv", "id,query,answer_ids\n7,Who?,[]\n", "csv:2: no answer_ids"),
        (
            "stark_qa/stark_qa.csv",
            f"id,query,answer_ids\n7,Who?,{'[' * 9999}\n",
            "not a list of numbers",
        ),
        (
            "stark_qa/stark_qa.csv",
            "id,query,answer_ids\n7,Who?,print(1)\n",
            "not a list of numbers",
        ),
        (
            "stark_qa/stark_qa.csv",
            "id,question\n7,Who?\n",
            "csv:2: no column 'query'; columns: id, question",
        ),
    ],
)
def test_damaged_questions_are_reported(
    published: tuple[Path, Path], tmp_path: Path, file: str, content: str, message: str
) -> None:
    (published[0] / file).write_text(content)
    with pytest.raises(DataError, match=message):
        prime(*published, tmp_path / "out")


def test_an_index_is_not_read_through_a_link(published: tuple[Path, Path], tmp_path: Path) -> None:
    index = published[0] / "split" / "val.index"
    index.rename(tmp_path / "elsewhere")
    index.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="symbolic link"):
        prime(*published, tmp_path / "out")


@pytest.fixture
def wiki(tmp_path: Path) -> Path:
    folder = tmp_path / "2wiki"
    folder.mkdir()
    page = {"title": "Miss Potter", "text": "A film."}
    rows: list[dict[str, Any]] = [
        {
            "id": "a",
            "question": "Where was the director born?",
            "answer": "sydney",
            "context": [page],
            "evidences": [
                ["miss potter", "director", "Chris Noonan"],
                ["Chris Noonan", "place of birth", "Sydney"],
                ["Chris Noonan", "date of birth", "14 November 1952"],
            ],
        },
        {
            "id": "b",
            "question": "Is it a film?",
            "answer": "yes",
            "context": [page],
            "evidences": [],
        },
        {
            "id": "c",
            "question": "When?",
            "answer": "14 November 1952",
            "context": [],
            "evidences": [],
        },
    ]
    for row in rows:
        row["type"] = "compositional"
    for name in ("train", "dev", "test"):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    with gzip.open(folder / "corpus.jsonl.gz", "wt") as file:
        file.write(json.dumps({"id": "x", "title": "Sydney", "text": "A city."}) + "\n")
    return folder


def test_triples_become_relations_of_both_entities(wiki: Path, tmp_path: Path) -> None:
    assert example(wiki, tmp_path / "out") == {"entities": 3, "train": 1, "dev": 1, "test": 1}
    assert {
        str(row["title"]): row["text"] for row in rows(tmp_path / "out" / "relations.jsonl")
    } == {
        "Miss Potter": "director: Chris Noonan [2]",
        "Sydney": "place of birth of: Chris Noonan [2]",
        "Chris Noonan": "date of birth: 14 November 1952\ndirector of: Miss Potter [0]\nplace of birth: Sydney [1]",
    }
    assert {str(row["title"]): row["text"] for row in rows(tmp_path / "out" / "texts.jsonl")} == {
        "Miss Potter": "A film.",
        "Sydney": "A city.",
        "Chris Noonan": "",
    }


@needs_data
def test_both_scorers_together_find_more_than_either_alone(tmp_path: Path) -> None:
    counts = example(data_folder() / "2wikimultihopqa", tmp_path)
    assert counts == {"entities": 11646, "train": 244, "dev": 106, "test": 207}
    real = load(FILE, overrides=[("data.path", str(tmp_path)), *corpora(tmp_path)])
    lm = ScriptedLM(lambda message: message.rsplit("Question:", 1)[1].split("\n")[0])

    def score(**weights: float) -> float:
        assert real.data is not None
        values = {f"aggregator.{name}_weight": value for name, value in weights.items()}
        system = real.system.bind({**values, "relation_scorer.own": 0.0})
        return evaluated(replace(real, system=system), real.data, lm).mean

    question = score(question=1.0, text=0.0, relation=0.0)
    relation = score(question=0.0, text=0.0, relation=1.0)
    assert score(question=0.1, text=0.0, relation=1.0) > max(question, relation) + 0.1
