"""A finished run is copied to a store and back; this folder stands for the store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

import compound as cp
from compound.api.verify import copy_run, verify
from compound.core.errors import CompoundError, RunDirectoryError
from run_files import finished_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "store"
    (place / "bucket").mkdir(parents=True)
    made = DirFileSystem(str(place), LocalFileSystem(auto_mkdir=True))
    monkeypatch.setattr("compound.core.storage.stores.check_installed", lambda *_: None)
    monkeypatch.setattr(fsspec, "filesystem", lambda *_args, **_options: made)
    return place / "bucket"


def test_a_run_comes_back_from_a_store(
    finished: Path, store: Path, tmp_path: Path, cli: Any
) -> None:
    copied = len([path for path in finished.rglob("*") if path.is_file() and path.name != "lock"])
    assert (
        cli("runs", "copy", str(finished), "s3://bucket/runs/one").out
        == f"{copied} files copied to s3://bucket/runs/one\n"
    )
    back = tmp_path / "deep" / "back"
    assert cli("runs", "copy", "s3://bucket/runs/one/", str(back)).code == 0
    assert verify(back) == []
    assert cp.load_result(back).best == cp.load_result(finished).best
    assert [path.name for path in back.parent.iterdir()] == ["back"]
    assert back.stat().st_mode == finished.stat().st_mode


def test_a_run_in_progress_is_refused_with_the_remedy(
    finished: Path, store: Path, tmp_path: Path, cli: Any
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    for name in ("checkpoint.json", "events.jsonl"):
        (run / name).unlink()
    found = cli("runs", "copy", str(run), "s3://bucket/one")
    assert found.code == 2
    said = " ".join(found.err.split())
    assert f"{run} is not finished, and a store has no locks" in said
    assert "run the command that started it again, which finishes it, and copy it then" in said
    assert list(store.iterdir()) == []


def test_damaged_runs_are_not_copied(finished: Path, store: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(finished, tmp_path / "copy")
    (copy / "best.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="damaged, and is not copied"):
        copy_run(copy, "s3://bucket/one")
    assert list(store.iterdir()) == []
    copy_run(finished, "s3://bucket/one")
    (store / "one" / "best.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match=r"not copied: s3://bucket/one/best\.json"):
        copy_run("s3://bucket/one", tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "store"}


def test_places_in_use_are_refused(
    finished: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_run(finished, "s3://bucket/one")
    (store / "notes").mkdir()
    (store / "notes" / "a.txt").write_text("mine")
    for place in ("s3://bucket/one", "s3://bucket", "s3://bucket/notes"):
        with pytest.raises(RunDirectoryError, match="holds other files"):
            copy_run(finished, place)
    with pytest.raises(RunDirectoryError, match="is not empty"):
        copy_run("s3://bucket/one", tmp_path)
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        copy_run("s3://bucket", tmp_path / "new")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(RunDirectoryError, match="is not the name of a folder"):
        copy_run("s3://bucket/one", ".")


def test_an_interrupted_copy_is_no_run_and_can_be_repeated(
    finished: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def stop(*given: Any) -> None:
        calls.append(given)
        if len(calls) > 3:
            raise KeyboardInterrupt
        copyfileobj(*given)

    copyfileobj = shutil.copyfileobj
    monkeypatch.setattr(shutil, "copyfileobj", stop)
    with pytest.raises(KeyboardInterrupt):
        copy_run(finished, "s3://bucket/one")
    monkeypatch.setattr(shutil, "copyfileobj", copyfileobj)
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        copy_run("s3://bucket/one", tmp_path / "new")
    assert copy_run(finished, "s3://bucket/one") > 5
    calls.clear()
    monkeypatch.setattr(shutil, "copyfileobj", stop)
    with pytest.raises(KeyboardInterrupt):
        copy_run("s3://bucket/one", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_copy_has_one_end_in_a_store(finished: Path, store: Path, tmp_path: Path) -> None:
    with pytest.raises(CompoundError, match="is not an address in a store"):
        copy_run(finished, tmp_path / "new")
    with pytest.raises(CompoundError, match="is in a store"):
        copy_run("s3://bucket/one", "s3://bucket/two")


def test_a_store_beyond_the_limit_is_not_read(
    finished: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_run(finished, "s3://bucket/one")
    (store / "one" / "large").write_text(json.dumps("x" * 2**20))
    monkeypatch.setenv("COMPOUND_MAX_ARTIFACT_MB", "1")
    with pytest.raises(RunDirectoryError, match="holds more than 1 MiB"):
        copy_run("s3://bucket/one", tmp_path / "new")
