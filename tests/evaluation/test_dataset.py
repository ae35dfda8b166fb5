"""Data sets: what becomes of a row, and that every unusable one is named by file and line."""

from __future__ import annotations

import errno
import gzip
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.core.errors import DataError, DeclarationError, MissingExtra, SpecError
from compound.evaluation.dataset import Dataset
from compound.evaluation.examples import read_examples
from compound.evaluation.rows import EXTENSIONS, file_digest, read_rows
from compound.yaml import loads
from processes import python

SYSTEM = """\
system: demo
lm: smollm2
inputs: {question: str}
components:
  answerer: {llm: {prompt: {tune: Answer.}}, in: {question: $question}}
outputs: {answer: $answerer}
"""


def write(path: Path, rows: Sequence[Any]) -> Path:
    text = "".join(
        (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n"
        for row in rows
    )
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def questions(n: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"id": f"q{i}", "question": f"{i} + 1?", "answer": str(i + 1)}
        for i in range(start, start + n)
    ]


def ids(dataset: Dataset, role: Any = "train", **options: Any) -> list[str]:
    return [example.id for example in dataset.examples(role, [], **options)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "train.jsonl", questions(60))
    write(tmp_path / "dev.jsonl.gz", questions(3, start=100))
    (tmp_path / "test.csv").write_text(
        'id,question,answer\nq7,"a, b?",\nq8,"two\nlines",x\n', encoding="utf-8"
    )
    (tmp_path / "notes.txt").write_text("not data")
    return tmp_path


def test_a_folder_gives_each_role_its_file(folder: Path) -> None:
    data = Dataset(folder)
    assert len(ids(data, "train")) == 60
    assert ids(data, "valid") == ["q100", "q101", "q102"]
    rows = data.examples("test", ["question"])
    assert [dict(row.inputs) for row in rows] == [{"question": "a, b?"}, {"question": "two\nlines"}]
    assert dict(rows[0].gold) == {"id": "q7", "question": "a, b?", "answer": ""}


def test_other_split_names_and_a_missing_split_that_lists_the_files(folder: Path) -> None:
    assert ids(Dataset(folder, train="dev")) == ["q100", "q101", "q102"]
    with pytest.raises(DataError, match=r"no file .*'val'; .*dev.jsonl.gz, test.csv, train.jsonl"):
        ids(Dataset(folder, valid="val"), "valid")


def test_a_split_in_two_files_is_refused(folder: Path) -> None:
    write(folder / "train.csv", ["id", "1"])
    with pytest.raises(DataError, match=r"several files of .*'train'; .*train.csv, train.jsonl"):
        ids(Dataset(folder))


def test_fields_rename_columns_and_reach_into_them(tmp_path: Path) -> None:
    row = {"id": 1, "q": {"text": "why?", "a.b": "odd"}, "x.y": "literal", "target": ["because"]}
    write(tmp_path / "train.jsonl", [row])
    fields = {"question": "q.text", "answer": "target", "z": "x.y"}
    example = Dataset(tmp_path, fields=fields).examples("train", ["question"])[0]
    assert example.id == "1"
    assert dict(example.inputs) == {"question": "why?"}
    assert dict(example.gold) == {**row, "question": "why?", "answer": ["because"], "z": "literal"}


def test_inputs_and_gold_are_read_only(folder: Path) -> None:
    example = Dataset(folder).examples("train", ["question"])[0]
    for mapping in (example.inputs, example.gold):
        with pytest.raises(TypeError, match="does not support item assignment"):
            mapping["question"] = "changed"  # type: ignore[index]


def test_blank_lines_a_byte_order_mark_and_any_letters_are_read(tmp_path: Path) -> None:
    # U+2028 ends a line for str.splitlines, but not in a file of JSON lines.
    (tmp_path / "train.jsonl").write_bytes('\ufeff{"q": "é\u2028中"}\r\n\n   \n{"q": "2"}'.encode())
    (tmp_path / "dev.csv").write_bytes("\ufeffq,r\r\n\r\né,1\r\n   \r\n中,2\r\n".encode())
    train, valid = (Dataset(tmp_path).examples(role, ["q"]) for role in ("train", "valid"))
    assert [(e.id, e.inputs["q"]) for e in train] == [("train-1", "é\u2028中"), ("train-4", "2")]
    assert [(e.id, e.inputs["q"]) for e in valid] == [("dev-3", "é"), ("dev-5", "中")]


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'id': 3}", r"not JSON \(Expecting property name.*; each line must be one object"),
        ("[1, 2]", r"a row must be an object \{…\}, got list"),
        ('{"id": "q0", "question": ""}', r"id 'q0' is already used on line 1"),
        ('{"id": "q3", "qestion": ""}', "no column 'question' to read .*did you mean 'qestion'"),
        ('{"id": [3], "question": ""}', r"id column 'id' must hold text or a number, got \[3\]"),
        ('{"id": "", "question": ""}', r"id column 'id' must hold text or a number, got ''"),
        ("9" * 5000, r"not JSON \(Exceeds the limit"),
        ("[" * 100_000, "nested more than 200 levels deep"),
        ('{"q": ' + "[" * 201 + "]" * 201 + "}", "nested more than 200 levels deep"),
    ],
)
def test_an_unusable_row_has_its_place(tmp_path: Path, name: str, line: str, message: str) -> None:
    path = write(tmp_path / name, [*questions(2), "", line])
    with pytest.raises(DataError, match=rf"^{path}:4: {message}"):
        Dataset(tmp_path).examples("train", ["question"])


def test_a_missing_entry_of_a_column_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [{"q": {"txt": "?"}, "r": "text"}])
    for column, message in (
        ("q.text", "no entry 'text' in 'q' to read 'a' from; did you mean 'txt'"),
        ("r.text", "no entry 'text' in 'r' to read 'a' from; it is not an object"),
        ("s.text", "no column 's.text' to read 'a' from; possible: q, r"),
    ):
        with pytest.raises(DataError, match=f"^{path}:1: {message}"):
            Dataset(tmp_path, fields={"a": column}).examples("train", [])


def test_bytes_that_are_no_utf8_are_named_by_line(tmp_path: Path) -> None:
    for name in ("train.jsonl", "dev.csv"):
        (tmp_path / name).write_bytes(b'{"q": 1}\n"caf\xe9"\n')
    for role, name in (("train", "train.jsonl"), ("valid", "dev.csv")):
        with pytest.raises(DataError, match=rf"{name}:2: not UTF-8 \(invalid continuation byte\)"):
            ids(Dataset(tmp_path), role)


def test_repeated_ids_are_found_however_many_rows_are_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compound.evaluation.dataset.MERGED", 7)
    rows = [{"id": f"q{i}", "question": ""} for i in range(60)]
    write(tmp_path / "train.jsonl", rows)
    assert ids(Dataset(tmp_path)) == [row["id"] for row in rows]
    for first, second in ((0, 59), (6, 7), (13, 55), (50, 59), (58, 59)):
        changed = [*rows]
        changed[second] = rows[first]
        write(tmp_path / "train.jsonl", changed)
        with pytest.raises(DataError, match=rf":{second + 1}: id 'q{first}' .*line {first + 1}\b"):
            ids(Dataset(tmp_path))


def test_a_sample_of_a_file_is_that_of_its_rows(tmp_path: Path) -> None:
    rows = questions(40)
    write(tmp_path / "train.jsonl", rows)
    in_memory = Dataset.of(train=rows)
    for limit, seed in ((3, None), (7, 0), (7, 1), (39, 2), (40, 3), (99, 4)):
        found = Dataset(tmp_path).examples("train", ["question"], limit, seed)
        assert found == in_memory.examples("train", ["question"], limit, seed)
        assert len(found) == min(limit, 40)
    (tmp_path / "train.jsonl").write_text((tmp_path / "train.jsonl").read_text() + "[]\n")
    with pytest.raises(DataError, match="train.jsonl:41"):  # also behind the sample
        Dataset(tmp_path).examples("train", ["question"], 3)


def test_a_store_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtra, match=r"s3://bucket/qa: S3 needs s3fs.*pip install.*stores"):
        Dataset("s3://bucket/qa").examples("train", ["question"])


def test_a_damaged_gzip_file_is_an_error_not_a_short_data_set(tmp_path: Path) -> None:
    whole = write(
        tmp_path / "train.jsonl.gz",
        [{"q": hashlib.sha256(b"%d" % i).hexdigest()} for i in range(5000)],
    ).read_bytes()
    for broken in (
        whole[: len(whole) // 2],
        b"plain text",
        whole[:200] + b"\x00" * 50 + whole[250:],
    ):
        (tmp_path / "train.jsonl.gz").write_bytes(broken)
        with pytest.raises(DataError, match=r"train.jsonl.gz:\d+: (the gzip file is damaged|not)"):
            ids(Dataset(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n1,2,3\n", "3: 3 cells, but the header names 2 columns"),
        ('a,b\n"x\ny",2\n1\n', "4: 1 cells, but the header names 2 columns"),
        ("a,a\n1,2\n", "1: two columns have the same name: a, a"),
        ('a,b\n1,"2\n', r"2: not CSV \(unexpected end of data\)"),
        (f"a\n{'x' * 200_000}\n", r"2: not CSV \(field larger .* as JSON Lines \(.jsonl\)"),
        ("a,b\r1,2\r", r"1: not CSV \(new-line .* the line ends of Unix or Windows"),
    ],
)
def test_an_unusable_csv_row_is_named_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "train.csv").write_text(text, encoding="utf-8", newline="")
    with pytest.raises(DataError, match=rf"train.csv:{message}"):
        ids(Dataset(tmp_path))


@pytest.mark.parametrize("nested", [False, True])
def test_a_value_that_another_of_its_name_would_replace_is_refused(
    tmp_path: Path, nested: bool
) -> None:
    """A column of a CSV file is, too; JSON would keep the last value only."""
    row = '{"q": "one", "a": 1, "a": 2}'
    row = f'{{"outer": {row}}}' if nested else row
    (tmp_path / "train.jsonl").write_text(f'{{"q": "none", "a": 0}}\n{row}\n')
    with pytest.raises(DataError, match=r"train\.jsonl:2: two values have the same name: a"):
        ids(Dataset(tmp_path))
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "train.json").write_text(f"[{row}]")
    with pytest.raises(DataError, match=r"train\.json: two values have the same name: a"):
        ids(Dataset(tmp_path))


def test_an_id_column_that_was_named_must_exist(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"key": "a"}])
    assert ids(Dataset(tmp_path, id="key")) == ["a"]
    assert ids(Dataset(tmp_path)) == ["train-1"]
    with pytest.raises(DataError, match=r"train.jsonl:1: no column 'uid'"):
        ids(Dataset(tmp_path, id="uid"))


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ["", ""])
    with pytest.raises(DataError, match="no rows of split 'train'"):
        ids(Dataset(tmp_path))


def test_a_limit_without_a_seed_takes_the_first_rows(folder: Path) -> None:
    assert ids(Dataset(folder), limit=3) == ["q0", "q1", "q2"]
    assert len(ids(Dataset(folder), limit=1000)) == 60


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 40))
def test_samples_are_nested_in_file_order_of_that_size(seed: int, small: int, more: int) -> None:
    data = Dataset.of(train=questions(60))
    order = {identity: i for i, identity in enumerate(ids(data))}
    less, all_ = (ids(data, limit=n, seed=seed) for n in (small, small + more))
    assert (len(less), len(all_)) == (small, min(60, small + more))
    assert set(less) <= set(all_)
    assert all_ == sorted(all_, key=order.__getitem__)


def test_a_sample_depends_on_the_seed_and_the_role_only() -> None:
    data = Dataset.of(train=questions(60), valid=questions(60))
    first = ids(data, limit=10, seed=1)
    assert first == ids(data, limit=10, seed=1)
    assert first != ids(data, limit=10, seed=2)
    assert first != ids(data, "valid", limit=10, seed=1)
    counts = [0] * 60
    for seed in range(200):
        for identity in ids(data, limit=15, seed=seed):
            counts[int(identity[1:])] += 1
    # Each row is drawn Binomial(200, 1/4): mean 50, standard deviation 6.1.
    assert 20 < min(counts) <= max(counts) < 80


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(DeclarationError, match="limit >= 1 must hold"):
        ids(Dataset.of(train=questions(2)), limit=limit)


def test_a_column_of_one_file_can_name_the_split(tmp_path: Path) -> None:
    rows = [{"id": i, "part": part} for i, part in enumerate(["train", "dev", "train", "holdout"])]
    path = write(tmp_path / "all.jsonl", rows)
    data = Dataset(path, test="holdout", split_by="part")
    assert [ids(data, role) for role in ("train", "valid", "test")] == [["0", "2"], ["1"], ["3"]]
    with pytest.raises(DataError, match=r"all.jsonl: no rows of .*'trian'; did you mean 'train'"):
        ids(Dataset(path, train="trian", split_by="part"))
    with pytest.raises(DataError, match=r"all.jsonl:1: no column 'prat' to read 'split_by' from"):
        ids(Dataset(path, split_by="prat"))


def test_an_id_in_two_splits_of_one_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "all.jsonl", [{"id": 1, "part": "train"}, {"id": 1, "part": "dev"}])
    with pytest.raises(DataError, match=r"all.jsonl:2: id '1' is already used on line 1"):
        ids(Dataset(path, split_by="part"))


def test_shares_are_kept_whatever_is_added_and_hold_for_rows_without_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "all.jsonl", [{"q": i} for i in range(3000)])
    data = Dataset(path, split_by={"train": 0.6, "valid": 0.2, "test": 0.2})
    parts = [ids(data, role) for role in ("train", "valid", "test")]
    assert sorted(chain(*parts)) == sorted(f"all.jsonl-{i}" for i in range(1, 3001))
    # Binomial(3000, 0.6) has standard deviation 27, Binomial(3000, 0.2) 22.
    assert [len(part) for part in parts] == pytest.approx([1800, 600, 600], abs=110)
    write(path, [{"q": i} for i in range(3100)])
    for role, part in zip(("train", "valid", "test"), parts, strict=True):
        assert set(part) <= set(ids(data, role))


@pytest.mark.parametrize("shares", [{"train": 0.5}, {"train": 1.2, "test": -0.2}, {"dev": 1.0}, {}])
def test_shares_that_are_no_partition_are_refused(shares: Any) -> None:
    with pytest.raises(DeclarationError, match="split_by: "):
        Dataset("all.jsonl", split_by=shares)


def test_one_file_without_split_by_says_what_to_give(tmp_path: Path) -> None:
    path = write(tmp_path / "all.jsonl", questions(2))
    with pytest.raises(DataError, match=r"single file without split_by, .* set split_by to a"):
        ids(Dataset(path))


@pytest.mark.parametrize("path", ["./no/such/folder", "/no/such", "train.jsonl", "a/b/c"])
def test_a_path_that_is_neither_local_nor_a_hub_id_says_both_ways(path: str) -> None:
    with pytest.raises(DataError, match=r"no file or folder .*; path must be .* or a hub id"):
        ids(Dataset(path))


@pytest.mark.parametrize("module", ["huggingface_hub", "pyarrow"])
def test_a_hub_id_may_name_the_extra(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"'owner/name'; .*{module}.*pip install .*\[hub\]"):
        ids(Dataset("owner/name"))


PACKAGED = ["pandas", "json", "text", "csv", "parquet", "arrow", "imagefolder", "webdataset"]
PACKAGED += ["xml", "squad"]


class Hub:
    """The hub's files by revision, and what was asked for; a repository's own files have no revision."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str | None, list[str]]] = []

    def put(self, revision: str | None, name: str, rows: Sequence[Any]) -> None:
        path = self.folder / str(revision) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            parquet = pytest.importorskip("pyarrow.parquet")
            pyarrow = pytest.importorskip("pyarrow")
            parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        else:
            # The cache of the library holds links to files without endings.
            (self.folder / "blobs").mkdir(exist_ok=True)
            blob = self.folder / "blobs" / hashlib.sha256(name.encode()).hexdigest()
            blob.write_bytes(write(self.folder / f"made{path.suffix}", rows).read_bytes())
            path.symlink_to(blob)

    def snapshot_download(
        self,
        name: str,
        *,
        repo_type: str,
        revision: str | None = None,
        allow_patterns: list[str],
        local_files_only: bool = False,
    ) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        assert repo_type == "dataset"
        if not local_files_only:
            self.asked.append((name, revision, allow_patterns))
        if not (self.folder / str(revision)).is_dir():
            raise LocalEntryNotFoundError(f"no {revision}")
        return str(self.folder / str(revision))

    def list_repo_tree(self, name: str, *, repo_type: str, revision: str) -> list[Any]:
        assert repo_type == "dataset"
        from huggingface_hub.hf_api import RepoFile, RepoFolder

        if not (self.folder / revision).is_dir():
            raise OSError("out of reach")
        folder, file = cast(Any, RepoFolder), cast(Any, RepoFile)
        names = sorted(path.name for path in (self.folder / revision).iterdir())
        return [
            file(path=".gitattributes", oid="", size=1),
            *(folder(path=name, oid="") for name in names),
        ]


EXPORT = "refs/convert/parquet"


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Hub:
    library = pytest.importorskip("huggingface_hub")
    pytest.importorskip("pyarrow.parquet")
    made = Hub(tmp_path_factory.mktemp("hub"))
    monkeypatch.setattr(library, "snapshot_download", made.snapshot_download)
    monkeypatch.setattr(library, "HfApi", lambda: made)
    return made


@pytest.mark.parametrize("name", PACKAGED)
def test_a_name_without_an_owner_is_never_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub, name: str
) -> None:
    """Regression test: `load_dataset("pandas")` unpickled ``train.pkl`` of the working directory, and
    `load_dataset("json")` sent its ``train.jsonl`` to the model."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.jsonl", questions(3))
    (tmp_path / "train.pkl").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    program = loads(f"{SYSTEM}data: {{path: {name}}}\n", path=tmp_path / "theirs" / "f.yaml")
    assert program.data is not None
    for data in (Dataset(name), program.data, Dataset(f"hf://datasets/{name}")):
        with pytest.raises(DataError, match=rf"no file or folder .* hub id .*'owner/{name}'"):
            data.examples("train", ["question"])
    assert not (tmp_path / "ran").exists()
    assert hub.asked == []


def test_what_a_file_means_on_the_hub_is_not_looked_for_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub
) -> None:
    """A hub id of a file read the user's own folder of that name, wherever a command was started."""
    monkeypatch.chdir(tmp_path)
    for folder in ("private/notes", "hf:/datasets/private/notes"):
        (tmp_path / folder).mkdir(parents=True)
        write(tmp_path / folder / "train.jsonl", questions(3))
        (tmp_path / folder / "notes.py").write_text("raise SystemExit('ran')")
    hub.put(EXPORT, "default/train/0000.parquet", questions(1, start=7))
    for path in ("private/notes", "hf://datasets/private/notes"):
        program = loads(f"{SYSTEM}data: {{path: {path}}}\n", path=tmp_path / "theirs" / "f.yaml")
        assert program.data is not None
        assert ids(program.data) == ["q7"]
    assert {name for name, _, _ in hub.asked} == {"private/notes"}


def test_a_file_names_no_data_set_of_the_hub_without_an_owner(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"f.yaml:7:14: data.path: .* hf://datasets/OWNER/NAME"):
        loads(f"{SYSTEM}data: {{path: hf://datasets/json}}\n", path=tmp_path / "f.yaml")


def test_a_hub_data_set_is_read_by_subset_and_split(hub: Hub) -> None:
    hub.put(EXPORT, "small/validation/0000.parquet", questions(2))
    hub.put(EXPORT, "small/validation/0001.parquet", questions(1, start=2))
    data = Dataset("owner/name", valid="validation", subset="small")
    assert ids(data, "valid") == ["q0", "q1", "q2"]
    asked = [row.inputs["question"] for row in data.examples("valid", ["question"])]
    assert asked == [f"{i} + 1?" for i in range(3)]
    name, revision, patterns = hub.asked[0]
    assert (name, revision) == ("owner/name", "refs/convert/parquet")
    assert patterns == ["small/validation/*.parquet"]
    with pytest.raises(DataError, match=r"no file or .* hub has no .* split 'dev'.*; check the"):
        ids(Dataset("owner/name", valid="dev", subset="other"), "valid")


def test_only_the_kinds_that_hold_plain_rows_are_asked_for(hub: Hub) -> None:
    """A repository may hold scripts, pickles and archives: they are not even downloaded."""
    hub.put(None, "train.jsonl", questions(1))
    (hub.folder / "None" / "train.pkl").write_bytes(b"x")
    (hub.folder / "None" / "name.py").write_text("raise SystemExit('ran')")
    assert ids(Dataset("owner/name")) == ["q0"]
    patterns = [pattern for _, _, asked in hub.asked for pattern in asked]
    assert patterns
    assert all(p.endswith((*EXTENSIONS, "*.parquet")) for p in patterns)


def test_a_subset_is_chosen_only_where_there_is_one(hub: Hub) -> None:
    hub.put(EXPORT, "plain_text/train/0000.parquet", questions(1))
    assert ids(Dataset("owner/name")) == ["q0"]
    hub.put(EXPORT, "other/train/0000.parquet", questions(2))
    with pytest.raises(DataError, match="has several subsets; set subset to .* other, plain_text"):
        ids(Dataset("owner/name"))
    hub.put(EXPORT, "default/train/0000.parquet", questions(3))
    assert len(ids(Dataset("owner/name"))) == 3


@pytest.mark.parametrize(
    ("subset", "files"),
    [
        (None, ["train.jsonl"]),
        (None, ["data/train.csv"]),
        (None, ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
        ("small", ["small/train-00000-of-00001.parquet"]),
        ("small", ["data/small/train.jsonl.gz"]),
    ],
)
def test_a_data_set_of_which_the_hub_made_no_copy_is_read_from_its_own_files(
    hub: Hub, subset: str | None, files: list[str]
) -> None:
    for number, file in enumerate(files):
        rows: list[Any] = questions(1, start=number)
        hub.put(None, file, ["id,question", f"q{number},?"] if file.endswith(".csv") else rows)
    assert ids(Dataset("owner/name", subset=subset)) == [f"q{i}" for i in range(len(files))]
    with pytest.raises(DataError, match=r"the hub has no data set of that id with a split 'test'"):
        ids(Dataset("owner/name", subset=subset), "test")


def test_an_unusable_row_of_the_hub_is_named(hub: Hub) -> None:
    hub.put(None, "train.jsonl", ["{}", "[]"])
    with pytest.raises(DataError, match=r"^hf://datasets/owner/name/train.jsonl:2: a row must be"):
        ids(Dataset("owner/name"))


@pytest.mark.parametrize("part", ["../x", "a/b", "*", "t[r]ain", ".", "..", "", "a\\b"])
def test_a_split_or_subset_of_the_hub_is_a_plain_name(hub: Hub, part: str) -> None:
    hub.put(EXPORT, "default/train/0000.parquet", questions(1))
    for data in (Dataset("owner/name", train=part), Dataset("owner/name", subset=part)):
        with pytest.raises(DataError, match="not a valid name of a split or a subset"):
            ids(data)
    assert hub.asked == []


def test_media_of_the_hub_are_not_opened(hub: Hub, tmp_path: Path) -> None:
    """The library that shows images opens the paths and addresses that a row names."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    hub.put(
        EXPORT,
        "default/train/0000.parquet",
        [{"image": {"bytes": None, "path": str(tmp_path / "secret.png")}}],
    )
    (example,) = Dataset("owner/name").examples("train", [])
    assert example.gold["image"] == {"bytes": None, "path": str(tmp_path / "secret.png")}


def test_other_errors_of_the_hub_are_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError("gated: ask for access")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refused)
    with pytest.raises(DataError, match="the hub has no data set .*: gated: ask for access"):
        ids(Dataset("owner/name"))


SERVED = """
import hashlib, http.server, json, os, re, sys, threading
from pathlib import Path

folder = Path(sys.argv[1])
os.environ |= {"HF_HUB_OFFLINE": "0", "HF_HOME": sys.argv[2], "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
SHA = "a" * 40

def named(path):
    return hashlib.sha1(str(path).encode()).hexdigest()

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.path.partition("?")[0]
        files = [p for p in folder.rglob("*") if p.is_file()]
        resolved = re.fullmatch(r"/datasets/owner/name/resolve/[^/]+/(.*)", path)
        if re.fullmatch(r"/api/datasets/owner/name/revision/refs(/|%2F)convert(/|%2F)parquet", path):
            body = json.dumps({"id": "owner/name", "sha": SHA, "siblings": []}).encode()
        elif path.startswith("/api/datasets/owner/name/tree/"):
            deep = "recursive=True" in self.path or "recursive=true" in self.path
            tree = [{"type": "file", "path": p.relative_to(folder).as_posix(), "size": p.stat().st_size,
                     "oid": named(p)} for p in files] if deep else [
                    {"type": "directory", "path": p.name, "oid": "c" * 40} for p in folder.iterdir()]
            body = json.dumps(tree).encode()
        elif resolved and (folder / resolved[1]).is_file():
            body = (folder / resolved[1]).read_bytes()
        else:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("ETag", f'"{named(folder / resolved[1]) if resolved else SHA}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET
    log_message = lambda *_: None

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"

from compound.evaluation.dataset import Dataset
data = Dataset("owner/name", valid="validation")
print([e.id for e in data.examples("train", [])], [e.id for e in data.examples("valid", [])])
server.shutdown()
server.server_close()
print([e.id for e in data.examples("train", [])], "again, without the hub")
"""


def test_the_hub_is_asked_as_its_library_asks_it(tmp_path: Path) -> None:
    """The whole way, with a server that answers as the hub does; then once more when it is gone."""
    pytest.importorskip("huggingface_hub")
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    for number, split in enumerate(("train", "validation", "unwanted")):
        folder = tmp_path / "hub" / "plain" / split
        folder.mkdir(parents=True)
        parquet.write_table(
            pyarrow.Table.from_pylist(questions(2, start=10 * number)), folder / "0000.parquet"
        )
    (tmp_path / "work").mkdir()
    folders = str(tmp_path / "hub"), str(tmp_path / "cache")
    ran = python("-c", SERVED, *folders, cwd=tmp_path / "work")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "['q0', 'q1'] ['q10', 'q11']",
        "['q0', 'q1'] again, without the hub",
    ]
    assert not list((tmp_path / "cache").rglob("unwanted"))


@pytest.mark.parametrize("name", ["valid", "validation", "val"])
def test_the_validation_split_may_have_its_other_names(tmp_path: Path, name: str, hub: Hub) -> None:
    """Regression test: the command line speaks of train, valid and test, and so do people's folders."""
    write(tmp_path / "train.jsonl", questions(2))
    path = write(tmp_path / f"{name}.jsonl", [{"question": "?"}])
    assert ids(Dataset(tmp_path), "valid") == [f"{name}-1"]
    assert Dataset(tmp_path).digest("valid") == file_digest(path)
    hub.put(EXPORT, f"default/{name}/0000.parquet", [{"question": "?"}])
    assert ids(Dataset("owner/name"), "valid") == [f"{name}-1"]
    write(tmp_path / "dev.jsonl", questions(3))
    assert ids(Dataset(tmp_path), "valid") == ["q0", "q1", "q2"]


def test_cells_of_a_split_under_another_name_are_converted_too(tmp_path: Path) -> None:
    (tmp_path / "valid.csv").write_text("x\n5\n")
    (example,) = read_examples(Dataset(tmp_path), "valid", {"x": int})
    assert example.inputs["x"] == 5
    assert Dataset(tmp_path).file("valid") == tmp_path / "valid.csv"
    assert Dataset.of(valid=[{"x": 1}]).file("valid") is None
    assert Dataset("owner/name").file("valid") is None


def test_of_several_names_of_the_validation_split_none_is_chosen(tmp_path: Path) -> None:
    for name in ("train", "valid", "val"):
        write(tmp_path / f"{name}.jsonl", questions(2))
    with pytest.raises(DataError, match="no file of split 'dev'; val and valid match: choose one"):
        ids(Dataset(tmp_path), "valid")


def test_a_split_that_is_named_by_its_file_says_how_to_name_it(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", questions(2))
    with pytest.raises(DataError, match=r"no file of .*'a.jsonl'; .*without the suffix: a"):
        ids(Dataset(tmp_path, train="a.jsonl"))


@pytest.mark.parametrize("given", ["{train: a.jsonl, valid: b.jsonl}", "{}", "{split_by: part}"])
def test_data_without_a_path_say_how_to_write_it(tmp_path: Path, given: str) -> None:
    """Regression test: it said only that the path is missing. What it says to write can be read."""
    with pytest.raises(SpecError) as caught:
        loads(f"{SYSTEM}data: {given}\n", path=tmp_path / "f.yaml")
    (problem,) = caught.value.problems
    assert problem.startswith(
        f"{tmp_path}/f.yaml:7:1: data: 'path' is missing; for a folder with train.jsonl"
    )
    forms = re.findall(r"`(data: .*?)`", problem)
    assert len(forms) == 3
    (tmp_path / "FOLDER").mkdir()
    for name in ("train", "dev", "test", "a", "b"):
        write(tmp_path / "FOLDER" / f"{name}.jsonl", questions(2))
    write(tmp_path / "rows.jsonl", questions(60))
    for form in forms:
        data = loads(f"{SYSTEM}{form}\n", path=tmp_path / "f.yaml").data
        assert data is not None
        assert all(ids(data, role) for role in ("train", "valid", "test") if data.has(role))


def test_rows_in_memory_are_named_by_split_and_position() -> None:
    data = Dataset.of(train=[{"q": "1"}], valid=iter([{"q": "2"}, {"r": "3"}]))
    assert ids(data) == ["train-1"]
    with pytest.raises(DataError, match=r"^memory valid:2: no column 'q'"):
        data.examples("valid", ["q"])
    with pytest.raises(DataError, match="memory has no test split"):
        data.examples("test", ["q"])
    with pytest.raises(DataError, match="memory valid:2: a row must be a mapping, got str"):
        Dataset.of(valid=[{"q": "1"}, "2"])  # type: ignore[list-item]


def test_a_role_that_does_not_exist_is_refused() -> None:
    with pytest.raises(DeclarationError, match="unknown role 'dev'; roles: train, valid, test"):
        ids(Dataset.of(train=questions(1)), "dev")


def test_the_digest_is_that_of_the_file_and_follows_rows_in_memory(folder: Path) -> None:
    expected = hashlib.sha256((folder / "dev.jsonl.gz").read_bytes()).hexdigest()
    assert Dataset(folder).digest("valid") == expected == file_digest(folder / "dev.jsonl.gz")
    digests = {
        Dataset.of(train=rows).digest("train")
        for rows in ([{"a": 1}], [{"a": 2}], [{"a": 1}, {"a": 2}])
    }
    assert len(digests) == 3
    assert Dataset.of(train=[{"a": 1, "b": 2}]).digest("train") == Dataset.of(
        train=[{"b": 2, "a": 1}]
    ).digest("train")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "all.feather", ["x"])
    with pytest.raises(DataError, match=r"all.feather: a data file must end in one of \.jsonl"):
        list(read_rows(path))
    with pytest.raises(DataError, match="no file"):
        list(read_rows(tmp_path / "none.jsonl"))


def test_a_data_set_may_lack_a_test_split_when_it_says_so(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text('{"q": "a"}\n')
    assert Dataset(tmp_path).has("test")
    with pytest.raises(DataError, match="no file of .*'test'.*if .*, set test: null"):
        Dataset(tmp_path).examples("test", ["q"])
    without = Dataset(tmp_path, test=None)
    assert [without.has(role) for role in ("train", "valid", "test")] == [True, True, False]
    with pytest.raises(DataError, match="has no test split"):
        without.examples("test", ["q"])
    assert not Dataset(tmp_path, split_by={"train": 0.5, "valid": 0.5}).has("test")


def bomb(path: Path, row: bytes, mebibytes: int) -> Path:
    """Write a small gzip file that decompresses to many equal rows."""
    with gzip.open(path, "wb", compresslevel=9) as file:
        block = row * (2**20 // len(row))
        for _ in range(mebibytes):
            file.write(block)
    return path


@pytest.mark.parametrize("name", ["train.jsonl.gz", "train.csv.gz"])
def test_a_file_that_decompresses_to_too_much_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Regression test: ten megabytes became ten gigabytes, of which half were kept."""
    monkeypatch.setenv("COMPOUND_MAX_DATA_MB", "3")
    path = bomb(tmp_path / name, b'{"question":1}' + b" " * 1000 + b"\n", 8)
    assert path.stat().st_size < 2**15
    read = read_rows(path)
    seen = list(itertools.islice(read, 3000))
    assert len(seen) == 3000
    with pytest.raises(DataError, match=rf"{name}:\d+: .* more than 3 MiB; .*COMPOUND_MAX_DATA_MB"):
        list(itertools.islice(read, 200))
    monkeypatch.setenv("COMPOUND_MAX_DATA_MB", "9")
    assert sum(1 for _ in read_rows(path)) >= 8 * 1000


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz", "train.csv"])
def test_a_line_that_does_not_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COMPOUND_MAX_LINE_MB", "1")
    opened = gzip.open if name.endswith(".gz") else open
    with opened(tmp_path / name, "wb") as file:
        file.write(b'"' + b"a" * 2**21)
    with pytest.raises(DataError, match=rf"{name}:1: .* longer than 1 MiB; .*COMPOUND_MAX_LINE_MB"):
        list(read_rows(tmp_path / name))


@pytest.mark.parametrize("chosen", ["0", "-1", "many", "", "1e3"])
def test_a_limit_that_is_no_number_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    write(tmp_path / "train.jsonl.gz", questions(2))
    monkeypatch.setenv("COMPOUND_MAX_DATA_MB", chosen)
    with pytest.raises(DeclarationError, match="COMPOUND_MAX_DATA_MB must be a positive whole"):
        list(read_rows(tmp_path / "train.jsonl.gz"))


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "train.jsonl", questions(2))

    opened = os.open

    def refused(name: Any, flags: int, *rest: Any, **options: Any) -> int:
        if name == "train.jsonl":
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return opened(name, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(DataError, match=r"train\.jsonl .*: Permission denied; change its"):
        list(read_rows(path))
