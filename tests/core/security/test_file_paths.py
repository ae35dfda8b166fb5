"""Paths that a YAML file names: what is read through them, and what the file of somebody else may not name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from compound.components.index import BM25
from compound.core.errors import DataError, DeclarationError, SpecError
from compound.evaluation.dataset import Dataset
from compound.evaluation.rows import file_digest, read_rows
from compound.yaml import load, loads
from compound.yaml.program import Program

ROOT = Path(__file__).parents[3]
SECRET = "id,text,question,answer\n1,aws_secret_access_key,aws_secret_access_key,x\n"
TEXT = """\
system: demo
lm: smollm2
inputs: {question: str}
components:
  answerer: {llm: {prompt: {tune: Answer.}}, in: {question: $question}}
outputs: {answer: $answerer}
"""
SEARCH = """\
system: demo
inputs: {question: str}
components:
  searcher: {retriever: {index: bm25, corpus: CORPUS}, in: {query: $question}}
outputs: {answer: $searcher}
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that somebody else prepared, as the working directory, and a secret of the user outside."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "credentials").write_text(SECRET)
    for split in ("train", "dev", "test"):
        (tmp_path / "home" / f"{split}.csv").write_text(SECRET)
    folder = tmp_path / "theirs"
    folder.mkdir()
    rows = [json.dumps({"question": f"{i}?", "answer": str(i)}) for i in range(4)]
    (folder / "data").mkdir()
    for split in ("train", "dev", "test"):
        (folder / "data" / f"{split}.jsonl").write_text("\n".join(rows))
    (folder / "all.jsonl").write_text("\n".join(rows))
    (folder / "corpus.jsonl").write_text('{"text": "Lima"}')
    monkeypatch.chdir(folder)
    return folder


def problems(
    text: str, *, allow_import: bool = True, overrides: Sequence[tuple[str, str]] = ()
) -> list[str]:
    with pytest.raises(SpecError) as caught:
        loads(text, path="f.yaml", allow_import=allow_import, overrides=overrides)
    return list(caught.value.problems)


def data(program: Program) -> Dataset:
    assert program.data is not None
    return program.data


def corpus(program: Program) -> BM25:
    index = program.system.components["searcher"].index  # type: ignore[attr-defined]
    assert isinstance(index, BM25)
    return index


@pytest.mark.parametrize("options", [(), ("--no-import",)])
@pytest.mark.parametrize(
    ("link", "target", "path"),
    [
        ("rows.csv", "../home/credentials", "rows.csv"),
        ("linked", "../home", "linked"),
        ("linked", "../home", "linked/train.csv"),
        ("linked", "../home", "./data/../linked/train.csv"),
        ("linked", "/etc", "linked/hosts.csv"),
        ("data/more.csv", "../../home/credentials", "data/more.csv"),
        ("own.jsonl", "all.jsonl", "own.jsonl"),
        ("gone.csv", "nothing", "gone.csv"),
    ],
)
def test_no_link_beside_a_file_leads_to_the_users_data(
    theirs: Path, cli: Any, link: str, target: str, path: str, options: tuple[str, ...]
) -> None:
    """Regression test: ``rows.csv -> ~/.aws/credentials`` was sent to the model, row by row."""
    (theirs / link).symlink_to(target)
    if ".." in path and options:
        pytest.skip("refused for another reason")
    (theirs / "f.yaml").write_text(
        f"{TEXT}data: {{path: {path}, split_by: {{train: 0.5, valid: 0.5}}}}\n"
    )
    ran = cli("check", "f.yaml", *options)
    assert ran.code == 2
    assert "f.yaml:7:14: data.path: " in ran.err
    assert "is a symbolic link" in ran.err
    assert "aws_secret" not in ran.out + ran.err
    (theirs / "f.yaml").write_text(SEARCH.replace("CORPUS", path))
    ran = cli("check", "f.yaml", *options)
    assert ran.code == 2
    assert "f.yaml:4:47: components.searcher.retriever.corpus: " in ran.err
    assert "is a symbolic link" in ran.err


def test_a_link_is_refused_with_the_path_that_it_stands_for(theirs: Path, tmp_path: Path) -> None:
    big = tmp_path / "big" / "qa"
    shutil.copytree(theirs / "data", big)
    (theirs / "linked").symlink_to(big)
    text = f"{TEXT}data: {{path: linked}}\n"
    (problem,) = problems(text)
    assert problem == (
        "f.yaml:7:14: data.path: linked is a symbolic link, not a regular file or folder; if you trust "
        f"its target, name the target: --set data.path={big}"
    )
    chosen = loads(text, path="f.yaml", overrides=[("data.path", str(big))])
    assert len(data(chosen).examples("train", ["question"])) == 4
    there = loads(text.replace("linked", str(big)), path="f.yaml")
    assert len(data(there).examples("valid", ["question"])) == 4


def test_a_link_that_comes_after_the_check_is_not_followed(theirs: Path) -> None:
    folder = loads(f"{TEXT}data: {{path: data}}\n", path="f.yaml")
    whole = loads(f"{TEXT}data: {{path: all.jsonl, split_by: {{train: 1}}}}\n", path="f.yaml")
    found = loads(SEARCH.replace("CORPUS", "deep/corpus.csv"), path="f.yaml")
    shutil.rmtree(theirs / "data")
    (theirs / "data").symlink_to("../home")
    (theirs / "deep").symlink_to("../home")
    shutil.copy(theirs.parent / "home" / "credentials", theirs.parent / "home" / "corpus.csv")
    (theirs / "all.jsonl").unlink()
    (theirs / "all.jsonl").symlink_to("../home/credentials")
    for read in (
        lambda: data(folder).examples("train", ["question"]),
        lambda: data(folder).digest("train"),
        lambda: data(whole).examples("train", ["question"]),
        lambda: corpus(found).digest,
    ):
        with pytest.raises(DataError, match="is a symbolic link"):
            read()


@pytest.mark.parametrize("name", ["train.csv", "dev.csv"])
def test_a_data_folder_is_read_through_no_link_wherever_it_lies(tmp_path: Path, name: str) -> None:
    """A data set is not trusted where a file or Python code names it, either."""
    (tmp_path / "credentials").write_text(SECRET)
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / name).symlink_to("../credentials")
    role: Any = "train" if name == "train.csv" else "valid"
    for dataset in (Dataset(folder), Dataset(folder, within=tmp_path)):
        with pytest.raises(DataError, match=f"{name} is a symbolic link"):
            dataset.examples(role, ["question"])
        with pytest.raises(DataError, match=f"{name} is a symbolic link"):
            dataset.digest(role)
    for read in (
        lambda: list(read_rows(folder / name)),
        lambda: file_digest(folder / name),
        lambda: BM25(folder / name).open(),
    ):
        with pytest.raises(DataError, match="is a symbolic link"):
            read()


def test_the_folder_that_the_user_names_may_be_a_link(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(theirs)
    assert len(Dataset(tmp_path / "link" / "data").examples("train", ["question"])) == 4
    (theirs / "f.yaml").write_text(f"{TEXT}data: {{path: data}}\n")
    program = load(tmp_path / "link" / "f.yaml")
    assert len(data(program).examples("train", ["question"])) == 4
    (tmp_path / "set").symlink_to(theirs / "data")
    for path in (tmp_path / "set", "../set"):
        program = load(theirs / "f.yaml", overrides=[("data.path", str(path))])
        assert len(data(program).examples("train", ["question"])) == 4


@pytest.mark.parametrize("again", ["../theirs/linked", "data/../linked", "ABSOLUTE/linked"])
def test_a_way_round_leads_through_no_link_either(theirs: Path, again: str) -> None:
    (theirs / "linked").symlink_to("../home")
    path = again.replace("ABSOLUTE", str(theirs))
    (problem,) = problems(f"{TEXT}data: {{path: {path}}}\n")
    assert "data.path: linked is a symbolic link" in problem


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_file_is_refused_and_nobody_waits(theirs: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(theirs / "x.csv")
    elif kind == "folder":
        (theirs / "x.csv").mkdir()
    elif os.geteuid() == 0:
        try:
            os.mknod(theirs / "x.csv", 0o020600, os.makedev(1, 5))
        except OSError:
            pytest.skip("no devices can be made here")
    else:
        pytest.skip("only root can make a device")
    with pytest.raises(DataError, match=r"x.csv is a|no file '.*x.csv'"):
        list(read_rows(theirs / "x.csv"))
    with pytest.raises(DataError, match=r"x.csv is a|no corpus '.*x.csv'"):
        BM25(theirs / "x.csv").open()
    if kind != "folder":
        (problem,) = problems(f"{TEXT}data: {{path: x.csv, split_by: part}}\n")
        assert "data.path: x.csv is a" in problem


def test_the_folder_of_the_file_may_itself_hold_the_data(theirs: Path) -> None:
    for split in ("train", "dev"):
        shutil.copy(theirs / "all.jsonl", theirs / f"{split}.jsonl")
    for path in (".", "./", "data/..", str(theirs)):
        program = loads(f"{TEXT}data: {{path: {path}}}\n", path="f.yaml")
        assert len(data(program).examples("train", ["question"])) == 4
    assert loads(f"{TEXT}data: {{path: .}}\n", path="f.yaml", allow_import=False).data is not None


def test_a_corpus_of_a_file_is_shown_without_the_folder_it_is_kept_in(theirs: Path) -> None:
    program = loads(SEARCH.replace("CORPUS", "corpus.jsonl"), path="f.yaml")
    assert corpus(program).digest == BM25("corpus.jsonl").digest
    assert "within" not in repr(corpus(program))
    assert len(corpus(program).open().passages) == 1


OUTSIDE = ("../home/train.csv", "/etc/hosts", "data/../../home", "..", "/", "data/../data")
STORED = "{path: PATH, sha256: 9f}"
PLACES = {
    "data.path": f"{TEXT}data: {{path: PATH}}\n",
    "components.searcher.retriever.corpus": SEARCH.replace("CORPUS", "PATH"),
    "components.searcher.retriever.model": SEARCH.replace(
        "bm25, corpus: CORPUS", "dense, corpus: c.csv, model: PATH"
    ),
    "components.ranker.retriever.model": (
        'system: demo\ninputs: {question: str, context: "list[str]"}\ncomponents:\n'
        "  ranker: {retriever: {index: passages, model: PATH}, in: {query: $question, passages: $context}}\n"
        "outputs: {answer: $ranker}\n"
    ),
    "lm": TEXT.replace("smollm2", "PATH"),
    "components.answerer.llm.lm": TEXT.replace("{llm: {", "{llm: {lm: PATH, "),
    "components.answerer.llm.lm.choice": TEXT.replace(
        "{llm: {", "{llm: {lm: {choice: [smollm2, PATH]}, "
    ),
    "components.answerer.in.lm": TEXT.replace(
        "components:\n",
        "components:\n  model: {selector: {options: [smollm2, PATH]}, in: {question: $question}}\n",
    ).replace("in: {question: $question}}\nout", "in: {question: $question, lm: $model}}\nout"),
    "components.answerer.llm.weights.value.path": TEXT.replace(
        "{llm: {", f"{{llm: {{weights: {{lora: {{rank: 4}}, value: {STORED}}}, "
    ),
    "components.model.selector.value.path": TEXT.replace(
        "components:\n",
        f"components:\n  model: {{selector: {{options: [a, b], per_input: true, value: {STORED}}}, in: {{question: $question}}}}\n",
    ).replace("in: {question: $question}}\nout", "in: {question: $question, hint: $model}}\nout"),
    "components.model.hyperparameter.value.path": TEXT.replace(
        "components:\n",
        f"components:\n  model: {{hyperparameter: {{lora: {{rank: 4}}, value: {STORED}}}}}\n",
    ).replace("in: {question: $question}}\nout", "in: {question: $question, hint: $model}}\nout"),
    "engines.own.transformers.model": f"{TEXT}engines: {{own: {{transformers: {{model: PATH}}}}}}\n",
    "engines.own.vllm.model": f"{TEXT}engines: {{own: {{vllm: {{model: PATH}}}}}}\n",
    "optimize.optimas.backbone.model": f"{TEXT}optimize: {{optimas: {{backbone: {{model: PATH}}}}}}\n",
    "optimize.search.lm": f"{TEXT}optimize: {{search: {{lm: PATH}}}}\n",
    "optimize.mmgrpo.teachers.PATH": f"{TEXT}optimize: {{mmgrpo: {{teachers: {{PATH: 1}}}}}}\n",
}


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("place", PLACES)
def test_a_file_without_imports_names_nothing_outside_its_folder(
    theirs: Path, place: str, path: str
) -> None:
    """Every entry that names something to be read is refused at its line, before anything is looked at."""
    text = PLACES[place].replace("PATH", path)
    found = problems(text, allow_import=False)
    shown = place.replace("PATH", path).removesuffix(".choice")
    (problem,) = (li for li in found if f" {shown}: " in li or f" {shown}: " in li.replace("'", ""))
    assert problem.startswith("f.yaml:")
    assert problem.split(": ")[0].count(":") == 2
    assert "is outside the file's folder, which --no-import does not allow" in problem


@pytest.mark.parametrize("name", ["local//etc", "local/../model", "vllm//etc", "vllm/../../model"])
def test_a_model_that_is_named_with_its_engine_leads_out_no_more(theirs: Path, name: str) -> None:
    (problem,) = problems(TEXT.replace("smollm2", name), allow_import=False)
    assert problem.startswith("f.yaml:2:5: lm: ")
    assert "is outside the file's folder" in problem


def test_hub_ids_and_paths_below_the_file_are_read_without_imports(theirs: Path) -> None:
    for lm in ("local/owner/name", "openai/gpt-4o-mini", "smollm2"):
        loads(TEXT.replace("smollm2", lm), path="f.yaml", allow_import=False)
    for path in (
        "owner/name",
        "hf://datasets/owner/name",
        "data",
        "./data",
        "all.jsonl",
        "nothing/here/yet",
    ):
        loads(f"{TEXT}data: {{path: {path}}}\n", path="f.yaml", allow_import=False)
    loads(SEARCH.replace("CORPUS", "corpus.jsonl"), path="f.yaml", allow_import=False)


def test_files_of_the_command_line_lie_anywhere(theirs: Path, tmp_path: Path, cli: Any) -> None:
    """The command line is the user's own: ``--set data.path=$COMPOUND_DATA/hotpotqa``."""
    shutil.copytree(theirs / "data", tmp_path / "mine")
    (theirs / "f.yaml").write_text(
        f"{TEXT}data: {{path: ../home}}\nmetric: {{exact_match: {{output: answer}}}}\n"
    )
    for path in (tmp_path / "mine", "../mine"):
        ran = cli("check", "f.yaml", "--no-import", "--set", f"data.path={path}")
        assert ran.code == 0, ran.err
        assert "not checked" not in ran.out
    assert (
        cli("check", "f.yaml", "--no-import", "--set", f"data={{path: {tmp_path / 'mine'}}}").code
        == 0
    )
    assert cli("check", "f.yaml", "--no-import", "--set", "data.train=train").code == 2


def test_a_model_that_is_chosen_in_a_run_leads_out_no_more(theirs: Path) -> None:
    """An edge may feed the model's name, so that the file need not spell it."""
    program = loads(TEXT, path="f.yaml", allow_import=False)
    for name in ("/etc", "../home", "local//etc", "vllm/../x"):
        with pytest.raises(DeclarationError, match="is outside the file's folder"):
            program.find_engine(name)
    assert loads(TEXT, path="f.yaml").find_engine(str(theirs / "data")).name
    mine = str(theirs / "data")
    chosen = loads(TEXT, path="f.yaml", allow_import=False, overrides=[("lm", mine)])
    assert chosen.find_engine(mine).name
    with pytest.raises(DeclarationError, match="is outside the file's folder"):
        chosen.find_engine("/etc")
