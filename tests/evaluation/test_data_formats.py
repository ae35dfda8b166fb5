"""Parquet files, JSON arrays, data frames and data sets of Hugging Face give the same examples."""

from __future__ import annotations

import datetime
import gzip
import json
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import compound as cp
from compound.api.arguments import to_dataset
from compound.core.errors import DataError, DeclarationError
from compound.evaluation.examples import read_examples
from compound.evaluation.rows import read_rows
from compound.testing import ScriptedLM

ROWS: list[dict[str, Any]] = [
    {"id": "a", "question": "one?", "answer": ["1", "one"], "n": 1},
    {"id": "b", "question": "zwei – ü?", "answer": ["2"], "n": None},
]


def test_a_path_with_a_nul_character_is_refused() -> None:
    with pytest.raises(DeclarationError, match="contains a NUL character"):
        cp.Dataset("data\0x")


def read(path: Path) -> list[dict[str, object]]:
    return [row for _, row in read_rows(path)]


def parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_every_format_reads_the_same_rows(tmp_path: Path) -> None:
    array, packed = tmp_path / "a.json", tmp_path / "b.json.gz"
    array.write_text(json.dumps(ROWS, indent=2), encoding="utf-8-sig")
    packed.write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    assert read(array) == read(packed) == read(parquet(tmp_path / "c.parquet")) == ROWS


def test_a_folder_may_hold_splits_of_different_formats(tmp_path: Path) -> None:
    parquet(tmp_path / "train.parquet")
    (tmp_path / "validation.json").write_text(json.dumps(ROWS))
    data = cp.Dataset(tmp_path)
    for role in ("train", "valid"):
        assert [example.id for example in data.examples(role, ["question"])] == ["a", "b"]
    with pytest.raises(DataError, match=r"train\.parquet:1: no column 'text'"):
        data.examples("train", ["text"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{}", r"data\.json: must hold an array of objects .*, got dict; a file with one"),
        (b'{"a": 1}\n{"a": 2}', r"data\.json: not JSON"),
        (b'[{"a": 1}, 2]', r"data\.json:2: row 2 must be an object"),
        (b'[{"a": "\xff"}]', r"data\.json:1: not UTF-8"),
        (b"[" * 5000, r"data\.json: it is nested|data\.json: nested"),
        (b"", r"data\.json: not JSON"),
    ],
)
def test_errors_of_arrays_name_file_and_row(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(text)
    with pytest.raises(DataError, match=message):
        read(path)


def test_large_or_broken_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOUND_MAX_DATA_MB", "1")
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b"[" + b" " * 2**21 + b"]"))
    with pytest.raises(DataError, match="holds more than 1 MiB"):
        read(bomb)
    large = parquet(tmp_path / "large.parquet", [{"text": "x" * 2**19} for _ in range(8)])
    with pytest.raises(DataError, match="holds more than 1 MiB"):
        read(large)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1" + b"\0" * 50)
    with pytest.raises(DataError, match=r"broken\.parquet:1: not a readable Parquet file"):
        read(broken)
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(gzip.compress(b"[{}]")[:-9])
    with pytest.raises(DataError, match="gzip file is damaged"):
        read(cut)


def pandas_frame() -> Any:
    return pytest.importorskip("pandas").DataFrame(ROWS)


def polars_frame() -> Any:
    return pytest.importorskip("polars").DataFrame(ROWS)


def lazy_frame() -> Any:
    return polars_frame().lazy()


def arrow_table() -> Any:
    return pytest.importorskip("pyarrow").Table.from_pylist(ROWS)


def hub_dataset() -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(ROWS)


def streamed_dataset() -> Any:
    return hub_dataset().to_iterable_dataset()


@pytest.mark.parametrize(
    "make",
    [
        pandas_frame,
        polars_frame,
        lazy_frame,
        arrow_table,
        hub_dataset,
        streamed_dataset,
        lambda: ROWS,
    ],
)
def test_frames_and_data_sets_are_rows(make: Callable[[], Any]) -> None:
    examples = to_dataset(make(), splits=False).examples("train", ["question"])
    assert [(e.id, e.inputs["question"], e.gold["answer"], e.gold["n"]) for e in examples] == [
        (row["id"], row["question"], row["answer"], row["n"]) for row in ROWS
    ]


def test_the_splits_of_a_dataset_dict_have_roles() -> None:
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict(
        {"train": hub_dataset(), "validation": hub_dataset(), "test": hub_dataset()}
    )
    data = to_dataset(splits, splits=True)
    assert len(data.examples("valid", ["question"])) == 2


def test_columns_that_cannot_be_fields_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(DeclarationError, match="column 0 must have a text as its name"):
        to_dataset(pandas.DataFrame([[1, 2]]), splits=False)
    with pytest.raises(DeclarationError, match="two columns have the same name: a"):
        to_dataset(pandas.DataFrame([[1, 2]], columns=["a", "a"]), splits=False)


def test_missing_values_of_pandas_become_none() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"x": pandas.array([1, None], dtype="Int64"), "t": [pandas.NaT, pandas.NaT]}
    )
    rows = to_dataset(frame, splits=False).examples("train", ["x"])
    assert [(row.inputs["x"], row.gold["t"]) for row in rows] == [(1, None), (None, None)]


def test_a_stream_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compound.api.arguments.MAX_ROWS", 5)
    with pytest.raises(DeclarationError, match="data has more than 5 rows"):
        to_dataset(({"x": i} for i in iter(int, 1)), splits=False)


@pytest.mark.parametrize("kind", [datetime.date, datetime.datetime, datetime.date | None])
def test_times_of_a_data_frame_are_dates(kind: Any) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"day": pandas.to_datetime(["2024-01-02"]), "y": ["2024"]})

    def year(day: Any) -> str:
        return str(day.year) if isinstance(day, kind) else ""

    year.__annotations__["day"] = kind
    system = cp.System("s", {"y": cp.Function("year", year)(day=cp.Input("day", kind))})
    assert cp.evaluate(system, frame, "exact_match", cache=False).mean == 1


def test_a_time_of_a_data_frame_within_a_day_is_no_date() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"day": pandas.to_datetime(["2024-01-02 10:00"]), "y": ["2024"]})
    system = cp.System("s", {"y": cp.LLM("a")(day=cp.Input("day", datetime.date))}, lm="lm")
    with pytest.raises(DataError, match="input 'day' must be date"):
        cp.evaluate(system, frame, "exact_match", engines={"lm": ScriptedLM([])})


def test_integers_of_a_data_frame_column_with_missing_values_are_integers() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([{"n": 3, "answer": "3"}, {"n": None, "answer": "none"}])
    node = cp.LLM("answerer", prompt="Say the number.")(n=cp.Input("n", int | None))
    system = cp.System("s", {"answer": node}, lm="lm")
    lm = ScriptedLM(lambda message: "3" if message.endswith("N: 3\nAnswer:") else "none")
    assert cp.evaluate(system, frame, "exact_match", engines={"lm": lm}, cache=False).mean == 1
    halves = pandas.DataFrame([{"n": 0.5, "answer": "3"}])
    with pytest.raises(DataError, match=r"input 'n' must be int \| None, but got 0.5"):
        cp.evaluate(system, halves, "exact_match", engines={"lm": lm}, cache=False)


def test_an_empty_cell_of_an_optional_input_is_none(tmp_path: Path) -> None:
    (tmp_path / "dev.csv").write_text("n,text\n3,\n,x\n")
    inputs = {"n": int | None, "text": str | None}
    found = read_examples(cp.Dataset(tmp_path), "valid", inputs)
    assert [dict(example.inputs) for example in found] == [
        {"n": 3, "text": ""},
        {"n": None, "text": "x"},
    ]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_single_file_is_evaluated_as_any_split(split: Any, tmp_path: Path) -> None:
    def same(x: str) -> str:
        return x

    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(f'{{"x": "{i}", "y": "{i % 2}"}}\n' for i in range(5)), encoding="utf-8"
    )
    system = cp.System("s", {"y": cp.Function("f", same)(x=cp.Input("x", str))})
    found = cp.evaluate(system, path, "exact_match", split, cache=False)
    assert found.scores == (1.0, 1.0, 0.0, 0.0, 0.0)


MISSING = [float("nan"), np.float32("nan"), Decimal("NaN"), Decimal("sNaN"), np.datetime64("NaT")]
UNUSABLE = [
    [1.0, float("nan")],
    {"a": [float("nan")]},
    [Decimal("NaN")],
    float("inf"),
    [-math.inf],
    np.array([1, np.nan]),
]


def one(v: Any) -> str:
    return "1"


def echo(kind: Any) -> cp.System:
    return cp.System("s", outputs={"y": cp.Function("one", one)(v=cp.Input("v", kind))})


@pytest.mark.parametrize("gold", [*MISSING, *UNUSABLE, ["a", None], ["a", float("nan")]])
@pytest.mark.parametrize(
    "metric",
    [
        cp.metrics.exact_match("y"),
        cp.metrics.token_f1("y"),
        cp.metrics.accuracy("y"),
        cp.metrics.numeric_match("y"),
        cp.metrics.json_match("y"),
    ],
)
def test_missing_and_infinite_gold_is_a_data_error(metric: cp.ext.Metric, gold: object) -> None:
    rows = [{"id": "fine", "v": "a", "y": "1"}, {"id": "bad", "v": "a", "y": gold}]
    if metric.name == "json_match" and isinstance(gold, list) and gold[1:] == [None]:
        return  # null is a value of a document
    with pytest.raises(DataError, match="example 'bad': gold field 'y' "):
        cp.evaluate(echo(str), rows, metric, cache=False)


@pytest.mark.parametrize("value", [*MISSING, *UNUSABLE])
@pytest.mark.parametrize("kind", [float, list[float], list, dict[str, list[float]]])
def test_missing_and_infinite_inputs_are_data_errors(kind: object, value: object) -> None:
    rows = [{"id": "bad", "v": value, "y": "1"}]
    with pytest.raises(DataError, match=r"'bad': input 'v' must be "):
        cp.evaluate(echo(kind), rows, cp.metrics.exact_match("y"), cache=False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dev.jsonl", '{"v": 1.0, "y": "1"}\n{"v": NaN, "y": "1"}\n'),
        ("dev.jsonl", '{"v": 1.0, "y": "1"}\n{"v": 1e999, "y": "1"}\n'),
        ("dev.jsonl", '{"v": 1.0, "y": "1"}\n{"v": 2, "y": NaN}\n'),
        ("dev.csv", "v,y\n1,1\nnan,1\n"),
        ("dev.csv", "v,y\n1,1\n-inf,1\n"),
        ("dev.json", '[{"v": 1.0, "y": "1"}, {"v": NaN, "y": "1"}]'),
    ],
)
def test_missing_and_infinite_values_are_data_errors(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match="'dev-[23]'"):
        cp.evaluate(echo(float), cp.Dataset(tmp_path), cp.metrics.exact_match("y"), cache=False)


def test_missing_values_are_none_for_functions_and_optional_inputs() -> None:
    seen: list[object] = []

    def score(outputs: object, example: cp.Example) -> float:
        seen.extend([example.gold["y"], example.inputs["v"]])
        return 1.0

    rows = [{"v": value, "y": value} for value in MISSING]
    assert cp.evaluate(echo(float | None), rows, score, cache=False).mean == 1
    assert seen == [None] * 10


def labelled(tmp_path: Path, form: str, names: list[str]) -> Any:
    """Return rows with class labels as stored in a data set, a table or a file."""
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=names)
    features = datasets.Features(
        {"v": label, "y": label, "tags": datasets.Sequence(label), "part": {"kind": label}}
    )
    columns = {"v": [1, 0], "y": [1, 0], "tags": [[0, 1], []], "part": [{"kind": 1}, {"kind": 0}]}
    made = datasets.Dataset.from_dict(columns, features=features)
    if form == "parquet":
        datasets.disable_progress_bars()
        made.to_parquet(tmp_path / "dev.parquet")
        return cp.Dataset(tmp_path)
    if form == "of":
        return cp.Dataset.of(valid=made)
    return {
        "dataset": made,
        "dict": datasets.DatasetDict(validation=made),
        "table": made.data.table,
        "stream": made.to_iterable_dataset(),
        "torch": made.with_format("torch") if form == "torch" else None,
    }[form]


FORMS = ["dataset", "dict", "table", "stream", "torch", "of", "parquet"]


@pytest.mark.parametrize("form", FORMS)
def test_class_labels_are_read_by_their_names(tmp_path: Path, form: str) -> None:
    data = labelled(tmp_path, form, ["neg", "pos"])
    data = data if isinstance(data, cp.Dataset) else to_dataset(data, splits=False)
    first, second = read_examples(
        data, "valid", {"v": str, "tags": list[str], "part": dict[str, str]}
    )
    assert dict(first.inputs) == {"v": "pos", "tags": ["neg", "pos"], "part": {"kind": "pos"}}
    assert (first.gold["y"], second.gold["y"]) == ("pos", "neg")
    numbers, _ = read_examples(data, "valid", {"v": int, "tags": list[int]})
    assert dict(numbers.inputs) == {"v": 1, "tags": [0, 1]}
    assert type(numbers.inputs["v"]) is int


@pytest.mark.parametrize(
    ("output", "answers", "score"),
    [
        (str, {"pos": "pos", "neg": "neg"}, 1),
        (int, {"pos": 1, "neg": 0}, 1),
        (str, {"pos": "1", "neg": "0"}, 1),
        (Literal["neg", "pos"], {"pos": "pos", "neg": "neg"}, 1),
        (Literal[0, 1], {"pos": 1, "neg": 0}, 1),
        (str, {"pos": "neg", "neg": "pos"}, 0),
        (int, {"pos": 0, "neg": 1}, 0),
    ],
)
def test_class_labels_by_name_or_number(output: Any, answers: dict[str, Any], score: int) -> None:
    rows = labelled(Path(), "dataset", ["neg", "pos"])
    node = cp.LLM("a", prompt="P.", output=output)(v=cp.Input("v", str))
    lm = ScriptedLM(lambda message: str(answers["pos" if "V: pos" in message else "neg"]))
    system = cp.System("s", outputs={"y": node}, lm="m")
    metrics: list[Any] = [
        cp.metrics.exact_match("y"),
        cp.metrics.accuracy("y"),
        lambda out, row: row.gold["y"] in (out["y"], str(out["y"])),
    ]
    metrics = metrics[: 2 if answers == {"pos": "1", "neg": "0"} else 3]
    if output is str and score:
        metrics.append(cp.metrics.accuracy("y", choices=list(answers.values())))
    for metric in metrics:
        assert cp.evaluate(system, rows, metric, engines={"m": lm}, cache=False).mean == score


def test_numbers_of_classes_named_by_numbers_are_no_answers() -> None:
    rows = labelled(Path(), "dataset", ["1", "2"])
    example = read_examples(to_dataset(rows, splits=False), "valid", {"v": str})[0]
    for metric in (cp.metrics.exact_match("y"), cp.metrics.accuracy("y")):
        scores = [metric.score({"y": found}, example).value for found in ("2", "1", 2, 1)]
        assert scores == [1, 0, 1, 0]


def test_unknown_classes_are_data_errors_and_damaged_metadata_is_ignored(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"v": datasets.Value("string"), "y": datasets.ClassLabel(names=["a"])}
    )
    rows = datasets.Dataset.from_dict({"v": ["x"], "y": [-1]}, features=features)
    with pytest.raises(DataError, match="gold field 'y' is None"):
        cp.evaluate(echo(str), rows, cp.metrics.exact_match("y"), cache=False)
    table = rows.data.table
    for text in (
        b"{",
        b"[]",
        b'{"info": {"features": {"y": {"_type": "ClassLabel", "names": 3}}}}',
    ):
        plain = to_dataset(table.replace_schema_metadata({b"huggingface": text}), splits=False)
        assert read_examples(plain, "valid", {"v": str})[0].gold["y"] == -1


def _repeated(count: int, size: int) -> Any:
    """Return an array of equal texts, which a file holds once."""
    pa = pytest.importorskip("pyarrow")
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, "int32"), pa.array(["x" * size]))


@pytest.mark.parametrize("kind", ["texts", "lists", "numbers", "members"])
def test_a_parquet_file_is_decoded_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts, offsets = _repeated(1000, 2**20), pa.array([0, 500, 1000], "int32")
    column = {
        "texts": lambda: texts,
        "lists": lambda: pa.ListArray.from_arrays(offsets, texts),
        "numbers": lambda: pa.array([[0] * 10_000_000]),
        "members": lambda: pa.ListArray.from_arrays(
            offsets, pa.StructArray.from_arrays([texts], ["a"])
        ),
    }[kind]()
    parquet.write_table(pa.table({"q": column}), tmp_path / "rows.parquet")
    assert (tmp_path / "rows.parquet").stat().st_size < 2**17
    monkeypatch.setenv("COMPOUND_MAX_DATA_MB", "64")
    monkeypatch.setattr("compound.evaluation.rows.DECODED", 2**24)
    pa.default_memory_pool().release_unused()
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(DataError, match="holds more than 64 MiB"):
        list(read_rows(tmp_path / "rows.parquet"))
    assert pa.default_memory_pool().max_memory() - before < 2**27


@pytest.mark.parametrize("group", [3, 1000])
def test_repeated_texts_in_lists_are_read_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {
            "turns": [{"role": "user", "text": f"text {i % 3}"}] * (i % 4),
            "tags": None if i % 5 else ["a", None],
            "name": f"n{i % 2}",
            "scores": {"a": 1.5, "b": i},
            "raw": b"x" * i,
        }
        for i in range(40)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=group)
    plain = [row for _, row in read_rows(tmp_path / "rows.parquet")]
    assert plain == rows
    monkeypatch.setattr("compound.evaluation.rows.DECODED", 20)
    assert [row for _, row in read_rows(tmp_path / "rows.parquet")] == rows
