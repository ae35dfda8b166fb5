"""Data sets in a store are read in parts, with the keys of the environment only."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

import compound as cp
from compound.core.errors import DataError
from compound.yaml.program import load

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)
ROWS = [{"q": f"question {i}", "answer": str(i)} for i in range(30)]
FILE = """
system: echo
inputs: {q: str}
components: {echo: {function: {call: "parts:echo"}, in: {q: $q}}}
outputs: {answer: $echo}
data: {path: s3://bucket/rows.parquet, split_by: {train: 0.4, valid: 0.6}, test: null}
metric: exact_match
"""
MEMORY = """
import compound as cp
from compound.evaluation.examples import read_or_stream

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

data = cp.Dataset("s3://bucket/rows.parquet", split_by={"valid": 1.0})
found = read_or_stream(data, "valid", {"text": str})
begin, top = resident(), 0.0
for number, example in enumerate(found):
    if number % 10_000 == 0:
        top = max(top, resident())
print(len(found), top - begin)
"""


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), file, **options)
    return file.getvalue()


def lines(rows: list[dict[str, Any]]) -> bytes:
    import json

    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.parquet", parquet(ROWS, row_group_size=7)),
        ("rows.jsonl", lines(ROWS)),
        ("rows.jsonl.gz", gzip.compress(lines(ROWS))),
        ("rows.csv", b"q,answer\n" + b"".join(b"question %d,%d\n" % (i, i) for i in range(30))),
    ],
)
def test_files_in_a_store_have_the_rows_of_local_files(
    bucket: Any, tmp_path: Path, name: str, content: bytes
) -> None:
    bucket.put_object(Key=name, Body=content)
    (tmp_path / name).write_bytes(content)
    shares: dict[Literal["train", "valid", "test"], float] = {"train": 0.5, "valid": 0.5}
    local, stored = (
        cp.Dataset(path, split_by=shares) for path in (tmp_path / name, f"s3://bucket/{name}")
    )
    for role in ("train", "valid"):
        assert stored.examples(role, ["q"]) == local.examples(role, ["q"])
        assert stored.examples(role, ["q"], limit=3, seed=1) == local.examples(role, ["q"], 3, 1)
    assert stored.digest("train") == local.digest("train")


def test_a_folder_in_a_store_has_a_file_for_each_split(bucket: Any) -> None:
    bucket.put_object(Key="qa/train.parquet", Body=parquet(ROWS))
    bucket.put_object(Key="qa/dev.jsonl", Body=lines(ROWS[:4]))
    data = cp.Dataset("s3://bucket/qa/", test=None)
    assert [len(data.examples(role, ["q"])) for role in ("train", "valid")] == [30, 4]
    with pytest.raises(DataError, match=r"s3://bucket/qa: no file of split 'test'"):
        cp.Dataset("s3://bucket/qa").examples("test", ["q"])


@pytest.mark.parametrize("path", ["s3://bucket/none.jsonl", "s3://nobody-has-it/rows.jsonl"])
def test_what_is_missing_is_named(bucket: Any, path: str) -> None:
    with pytest.raises(DataError, match=f"no file or folder {path}"):
        cp.Dataset(path, split_by={"valid": 1.0}).examples("valid", ["q"])


def test_a_server_that_does_not_answer_is_named_with_the_remedy(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(DataError, match=r"s3://bucket/rows.jsonl cannot be used") as caught:
        cp.Dataset("s3://bucket/rows.jsonl", split_by={"valid": 1.0}).examples("valid", ["q"])
    assert "AWS_ENDPOINT_URL" in str(caught.value)


def test_an_object_that_changes_while_it_is_read_is_an_error(bucket: Any) -> None:
    big = [{"q": f"{i} " + os.urandom(2000).hex(), "answer": ""} for i in range(4000)]
    bucket.put_object(Key="rows.jsonl", Body=lines(big))
    rows = cp.Dataset("s3://bucket/rows.jsonl", split_by={"valid": 1.0}).stream("valid", ["q"])
    next(rows)
    bucket.put_object(Key="rows.jsonl", Body=lines(big[::-1]))
    with pytest.raises(DataError, match=r"s3://bucket/rows.jsonl"):
        list(rows)


def test_a_system_in_yaml_is_evaluated_on_rows_of_a_store(bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Key="rows.parquet", Body=parquet(ROWS))
    (tmp_path / "system.yaml").write_text(
        FILE.replace("exact_match", "{exact_match: {output: answer}}")
    )
    (tmp_path / "parts.py").write_text("def echo(q: str) -> str:\n    return q.split()[1]\n")
    program = load(tmp_path / "system.yaml", trust=["s3://bucket"])
    assert program.data is not None
    assert program.metric is not None
    found = cp.evaluate(program.system, program.data, program.metric, cache=False)
    assert found.mean == 1.0
    single = cp.evaluate(program.system, "s3://bucket/rows.parquet", program.metric, cache=False)
    assert len(single.rows) == 30


def test_memory_stays_flat_with_a_million_rows(bucket: Any) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    file = io.BytesIO()
    with parquet.ParquetWriter(file, pa.schema({"text": pa.string()})) as made:
        for start in range(0, 1_000_000, 100_000):
            rows = [f"row {i} with a text of its own" for i in range(start, start + 100_000)]
            made.write_table(pa.table({"text": rows}))
    bucket.put_object(Key="rows.parquet", Body=file.getvalue())
    found = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    )
    count, grown = found.stdout.split()
    assert int(count) == 1_000_000
    assert float(grown) < 100  # as a list, they take 900 MB
