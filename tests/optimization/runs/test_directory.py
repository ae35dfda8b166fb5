"""Run directories: one writer, nothing half-written, and what is not ours stays as it is."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compound.api.description import open_run
from compound.core.errors import RunDirectoryError
from compound.optimization.runs.changes import FORMAT
from compound.optimization.runs.directory import (
    RunDirectory,
    load_checkpoint,
    read_json,
    read_records,
    report_full_disk,
    write_atomically,
)
from compound.optimization.runs.state import OptimizationState
from run_files import lock_no_folders

CONFIG = {"format": FORMAT, "system": "demo", "optimize": {"seed": 0, "budget": {"calls": 10}}}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"(folder)"
        for path in sorted(folder.rglob("*"))
    }


def begun(path: Path) -> RunDirectory:
    return RunDirectory.create(path, "system: demo", CONFIG)


def with_records(path: Path, events: int, traces: int = 0) -> None:
    run = begun(path)
    for name, count in (("events.jsonl", events), ("traces.jsonl", traces)):
        for i in range(count):
            run.append(name, {"i": i})
    run.checkpoint(OptimizationState(announced=1))
    run.close()


class TestCreating:
    def test_a_new_run_holds_the_file_and_the_config_as_given(self, tmp_path: Path) -> None:
        run = begun(tmp_path / "deep" / "run")
        run.checkpoint(OptimizationState())
        run.close()
        names = ["checkpoint.json", "config.json", "lock", "system.yaml"]
        assert sorted(path.name for path in run.path.iterdir()) == names  # nothing temporary
        assert (run.path / "system.yaml").read_text(encoding="utf-8") == "system: demo"
        assert read_json(run.path, "config.json") == CONFIG

    @pytest.mark.parametrize(
        "left_over",
        [
            [],
            ["lock"],
            ["lock", ".system.yaml.tmp"],
            ["lock", "system.yaml"],
            ["lock", "system.yaml", ".config.json.tmp"],
        ],
        ids=" ".join,
    )
    def test_a_crash_between_making_the_folder_and_writing_the_config_can_be_gone_over(
        self, tmp_path: Path, left_over: list[str]
    ) -> None:
        folder = tmp_path / "run"
        folder.mkdir()
        for name in left_over:
            (folder / name).write_text("half", encoding="utf-8")
        run = open_run(folder, "system: demo", CONFIG)
        run.close()
        assert read_json(folder, "config.json") == CONFIG
        assert (folder / "system.yaml").read_text(encoding="utf-8") == "system: demo"
        assert not list(folder.glob(".*"))

    @pytest.mark.parametrize(
        "files",
        [
            {"notes.txt": "mine"},
            {"lock": "", "events.jsonl": "{}\n"},
            {"system.yaml": "a", "weights.safetensors": "b"},
            {"sub/file": "x"},
        ],
        ids=lambda files: "+".join(files),
    )
    def test_foreign_folders_are_left_alone(self, tmp_path: Path, files: dict[str, str]) -> None:
        folder = tmp_path / "mine"
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        before = contents(folder)
        with pytest.raises(RunDirectoryError, match="already exists and is not an unfinished run"):
            open_run(folder, "system: demo", CONFIG)
        assert contents(folder) == before

    def test_a_file_in_place_of_the_folder_is_refused_and_kept(self, tmp_path: Path) -> None:
        place = tmp_path / "run"
        place.write_text("a file", encoding="utf-8")
        with pytest.raises(RunDirectoryError, match="already exists"):
            begun(place)
        assert place.read_text(encoding="utf-8") == "a file"


class TestOpening:
    def test_an_unfinished_run_of_the_same_configuration_opens(self, tmp_path: Path) -> None:
        with_records(tmp_path / "run", 2)
        run = open_run(tmp_path / "run", "system: demo", CONFIG)
        assert [e["i"] for e in run.read("events.jsonl")] == [0, 1]
        run.close()

    def test_a_model_folder_with_its_own_config_is_refused_and_kept(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
        (tmp_path / "model.safetensors").write_bytes(b"\x00\x01")
        before = contents(tmp_path)
        with pytest.raises(RunDirectoryError, match="model_type"):
            open_run(tmp_path, "", CONFIG)
        assert contents(tmp_path) == before

    @pytest.mark.parametrize(
        "config",
        ["", "{", "[1]", "null", "\x00\x01", "[" * 100_000, '{"a": "b'],
        ids=["empty", "torn", "a list", "null", "binary", "too deep", "cut in a string"],
    )
    def test_a_broken_config_is_refused_and_left_alone(self, tmp_path: Path, config: str) -> None:
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
        before = contents(tmp_path)
        for open_it in (RunDirectory.open, lambda p: open_run(p, "", CONFIG)):
            with pytest.raises(RunDirectoryError, match=r"config\.json"):
                open_it(tmp_path)
        assert contents(tmp_path) == before

    def test_a_folder_without_a_config_is_no_run_directory(self, tmp_path: Path) -> None:
        with pytest.raises(RunDirectoryError, match="is not a run directory"):
            RunDirectory.open(tmp_path)
        assert contents(tmp_path) == {}


class TestLock:
    def test_a_second_writer_in_the_same_process_is_refused(self, tmp_path: Path) -> None:
        run = begun(tmp_path / "run")
        with pytest.raises(RunDirectoryError, match="in use by another process"):
            RunDirectory.open(tmp_path / "run")
        run.close()
        RunDirectory.open(tmp_path / "run").close()

    @pytest.mark.parametrize("how", ["deleted", "replaced"])
    def test_a_lost_lock_file_admits_no_second_writer(self, tmp_path: Path, how: str) -> None:
        """Regression test: whoever came after ``rm lock`` was a second writer."""
        run = begun(tmp_path / "run")
        (tmp_path / "run" / "lock").unlink()
        if how == "replaced":
            (tmp_path / "run" / "lock").touch()
        with pytest.raises(RunDirectoryError, match="in use by another process"):
            RunDirectory.open(tmp_path / "run")
        run.append("events.jsonl", {"i": 0})
        run.checkpoint(OptimizationState())
        run.close()
        RunDirectory.open(tmp_path / "run").close()

    def test_where_folders_cannot_be_locked_the_writer_notices_another(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lock_no_folders(monkeypatch)
        run = begun(tmp_path / "run")
        with pytest.raises(RunDirectoryError, match="in use by another process"):
            RunDirectory.open(tmp_path / "run")
        run.append("events.jsonl", {"i": 0})
        (tmp_path / "run" / "lock").unlink()
        other = RunDirectory.open(tmp_path / "run")
        writes: list[Callable[[], None]] = [
            lambda: run.append("events.jsonl", {"i": 1}),
            lambda: run.checkpoint(OptimizationState()),
        ]
        for write in writes:
            with pytest.raises(RunDirectoryError, match="lock was deleted or replaced during"):
                write()
        assert list(other.read("events.jsonl")) == [{"i": 0}]
        other.close()
        run.close()

    def test_a_file_system_without_locks_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def none(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", none)
        with pytest.raises(RunDirectoryError, match="has no locks"):
            begun(tmp_path / "run")

    def test_a_run_directory_that_vanishes_is_named(self, tmp_path: Path) -> None:
        run = begun(tmp_path / "run")
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(RunDirectoryError, match=r"run.* cannot be used: .*moved or deleted"):
            run.checkpoint(OptimizationState())
        (tmp_path / "run").mkdir()  # another one in its place is not written to
        with pytest.raises(RunDirectoryError, match="No such file"):
            run.checkpoint(OptimizationState())
        assert contents(tmp_path / "run") == {}
        run.close()


class TestRecords:
    def test_a_torn_last_line_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        whole = '{"i": 0}\n{"i": 1, "text": "ä"}\n'.encode()
        for end in range(len(whole) + 1):
            path.write_bytes(whole[:end])
            assert len(list(read_records(path))) == whole[:end].count(b"\n")

    @pytest.mark.parametrize("line", ["{", "nonsense", '{"i": 1}{"i": 2}', "", "[" * 100_000])
    def test_a_broken_line_within_is_told_with_its_place(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "events.jsonl"
        path.write_text(f'{{"i": 0}}\n{line}\n{{"i": 2}}\n', encoding="utf-8")
        with pytest.raises(RunDirectoryError, match=r"events\.jsonl:2: not a JSON line"):
            list(read_records(path))

    @pytest.mark.parametrize(
        "how", ["swapped", "dropped", "repeated", "changed", "without a checksum"]
    )
    def test_changed_records_are_refused_with_their_place(self, tmp_path: Path, how: str) -> None:
        with_records(tmp_path / "run", 4)
        path = tmp_path / "run" / "events.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        lines[1:3] = {
            "swapped": [lines[2], lines[1]],
            "dropped": [lines[2]],
            "repeated": [lines[1], lines[1], lines[2]],
            "changed": [lines[1].replace(b"1", b"7", 1), lines[2]],
            "without a checksum": [b'{"i": 1}\n', lines[2]],
        }[how]
        path.write_bytes(b"".join(lines))
        number = 3 if how == "repeated" else 2
        with pytest.raises(RunDirectoryError, match=rf"events\.jsonl:{number}: "):
            list(read_records(tmp_path / "run", "events.jsonl"))

    @given(
        st.lists(
            st.dictionaries(
                st.text(),
                st.none() | st.integers() | st.text() | st.floats(allow_nan=False),
                max_size=3,
            ),
            max_size=5,
        )
    )
    def test_records_come_back_as_they_were_appended(
        self, tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]
    ) -> None:
        run = begun(tmp_path_factory.mktemp("records") / "run")
        for record in records:
            run.append("events.jsonl", record)
        assert list(run.read("events.jsonl")) == records
        run.close()


class TestCheckpoints:
    def test_restoring_cuts_back_what_was_written_since_then(self, tmp_path: Path) -> None:
        run = begun(tmp_path / "run")
        run.append("events.jsonl", {"i": 0})
        run.append("traces.jsonl", {"t": 0})
        run.checkpoint(OptimizationState(announced=1))
        covered = contents(run.path)
        run.append("events.jsonl", {"i": 1})
        run.append("traces.jsonl", {"t": 1})
        run.close()
        with (run.path / "traces.jsonl").open("a", encoding="utf-8") as file:
            file.write('{"t": 2, "torn')
        again = RunDirectory.open(run.path)
        assert again.restore() == OptimizationState(announced=1)
        assert contents(run.path) == covered
        assert again.step == 1
        again.append("events.jsonl", {"i": 1})
        assert list(again.read("events.jsonl")) == [{"i": 0}, {"i": 1}]
        again.close()

    def test_a_crash_before_the_first_checkpoint_starts_from_nothing(self, tmp_path: Path) -> None:
        run = begun(tmp_path / "run")
        run.append("events.jsonl", {"i": 0})
        run.close()
        again = RunDirectory.open(run.path)
        assert again.restore() is None
        assert list(again.read("events.jsonl")) == []
        again.close()

    def test_a_checkpoint_waits_for_files_in_a_thread_while_the_run_continues(
        self, tmp_path: Path
    ) -> None:
        """Until they are written, and if they cannot be, a crash goes back to the one before."""
        run, written = begun(tmp_path / "run"), threading.Event()
        run.append("events.jsonl", {"i": 0})
        run.checkpoint(OptimizationState(announced=1))
        run.append("events.jsonl", {"i": 1})
        run.checkpoint(OptimizationState(announced=2), written=written.wait)  # type: ignore[arg-type]
        run.append("events.jsonl", {"i": 2})  # meanwhile, and not a part of it
        before = load_checkpoint(run.path)
        assert before is not None
        assert before.state.announced == 1
        written.set()
        run.flush()
        after = load_checkpoint(run.path)
        assert after is not None
        assert (after.state.announced, after.step) == (2, 2)

        def fail() -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        run.checkpoint(OptimizationState(announced=3), written=fail)
        with pytest.raises(OSError, match="No space left"):
            run.checkpoint(OptimizationState(announced=4))
        run.close()
        again = RunDirectory.open(run.path)
        assert again.restore() == OptimizationState(announced=2)
        assert list(again.read("events.jsonl")) == [{"i": 0}, {"i": 1}]
        again.close()

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[]",
            "{}",
            '{"step": 1, "lengths": {}, "state": {}}',
            '{"step": 1, "lengths": {"events.jsonl": "x", "traces.jsonl": 0}, "state": {}}',
            '{"step": 1, "lengths": {"events.jsonl": -5, "traces.jsonl": 0}, "state": {}}',
            '{"step": 1, "lengths": {"events.jsonl": 0, "traces.jsonl": 0}, "state": [1]}',
            '{"step": "one", "lengths": {"events.jsonl": 0, "traces.jsonl": 0}, "state": {}}',
            '{"step": 1, "lengths": {"events.jsonl": 9999, "traces.jsonl": 0}, "state": {}}',
            '{"step": 1, "lengths": {"events.jsonl": 8, "traces.jsonl": 9999}, "state": {}}',
        ],
    )
    def test_a_broken_checkpoint_is_refused_and_not_cut(self, tmp_path: Path, text: str) -> None:
        with_records(tmp_path / "run", 3, 3)
        (tmp_path / "run" / "checkpoint.json").write_text(text, encoding="utf-8")
        before = contents(tmp_path / "run")
        run = RunDirectory.open(tmp_path / "run")
        with pytest.raises(RunDirectoryError, match=r"checkpoint\.json|shorter"):
            run.restore()
        run.close()
        assert contents(tmp_path / "run") == before


class TestAtomicWrite:
    def test_the_old_file_survives_a_crash_at_any_step(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "best.json"
        write_atomically(path, "old")

        def crash(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        for name in ("fsync", "replace"):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, crash)
                with pytest.raises(KeyboardInterrupt):
                    write_atomically(path, "new and much longer")
            assert path.read_text(encoding="utf-8") == "old"
        write_atomically(path, "new")
        assert path.read_text(encoding="utf-8") == "new"
        assert [p.name for p in tmp_path.iterdir()] == ["best.json"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        sqlite3.OperationalError("database or disk is full"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_named_whoever_was_writing(error: Exception, tmp_path: Path) -> None:
    with (
        pytest.raises(RunDirectoryError, match="no space left on the disk") as caught,
        report_full_disk(tmp_path),
    ):
        raise error
    assert caught.value.__cause__ is error


def test_a_line_that_meets_a_full_disk_leaves_no_part_of_itself(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "system: demo", {"seed": 0})
    run.append("events.jsonl", {"event": "start"})
    full = (tmp_path / "run" / "events.jsonl").stat().st_size + 10
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (full, before[1]))
    try:
        with pytest.raises(RunDirectoryError, match="no space left on the disk"):
            run.append("events.jsonl", {"event": "a longer line than fits"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run.append("events.jsonl", {"event": "end"})
    assert [record["event"] for record in run.read("events.jsonl")] == ["start", "end"]
    run.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_run_on_a_full_disk_is_closed_and_unlocked(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "system: demo", {"seed": 0})
    full = run._files["events.jsonl"] = Path("/dev/full").open("ab")  # noqa: SIM115 - the run closes it
    full.write(b"not written yet")
    run.close()
    assert full.closed
    RunDirectory.open(tmp_path / "run").close()


def test_other_errors_are_left_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="denied"), report_full_disk(tmp_path):
        raise OSError(errno.EACCES, "denied")
