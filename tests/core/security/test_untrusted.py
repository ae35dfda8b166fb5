"""Folders from other people: nothing in them leads outside, blocks, or fills the memory."""

from __future__ import annotations

import ast
import functools
import json
import os
import shutil
import signal
import socket
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compound.api.verify import verify
from compound.core.errors import CompoundError, ConfigurationError, RunDirectoryError
from compound.core.narrowing import entry
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.artifacts import folder_digest, store_folder, verify_reference
from compound.core.storage.paths import run_folder
from compound.execution.cache import DiskCache
from compound.graph.configuration import Configuration, load
from compound.optimization.runs.directory import RunDirectory, read_records
from compound.rewards.backbone import FeatureStore

ROOT = Path(__file__).parents[3]
GAME = Path(__file__).parents[2] / "files" / "game"
SECRET = "what nobody else may read or change\n"


@contextmanager
def guarded(seconds: int = 120) -> Iterator[None]:
    """End a test that blocks, such as on a FIFO."""

    def blocked(*_: object) -> None:
        raise AssertionError("it blocks")

    before = signal.signal(signal.SIGALRM, blocked)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def link(place: Path, victim: Path) -> None:
    place.symlink_to(victim)


def dangling(place: Path, victim: Path) -> None:
    place.symlink_to(victim.with_name("new"))


def hard(place: Path, victim: Path) -> None:
    place.hardlink_to(victim)


def fifo(place: Path, _: Path) -> None:
    os.mkfifo(place)


def listening(place: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as door, pytest.MonkeyPatch.context() as patch:
        patch.chdir(place.parent)  # such names must be short
        door.bind(place.name)


TRAPS = (link, dangling, fifo, listening)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a system, its data, a finished run, and one that was killed in the middle."""
    from compound.api.optimize import run_optimization
    from compound.yaml import load as load_spec

    folder = tmp_path_factory.mktemp("played")
    shutil.copytree(GAME, folder, dirs_exist_ok=True)
    rows = [{"id": str(i), "x": i % 9, "target": 2.0 * (i % 9)} for i in range(120)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def copy(event: Any) -> None:
        if event["event"] == "decision" and not (folder / "runs" / "killed").exists():
            shutil.copytree(folder / "runs" / "game", folder / "runs" / "killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        program = load_spec(Path("game.yaml"))
        assert program.data is not None
        assert program.metric is not None
        run_optimization(
            program.system,
            program.data,
            program.metric,
            program.optimize,
            folder=program.folder,
            text=program.text,
            listener=copy,
        )
    return folder


@pytest.fixture
def place(played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder as the working directory, and a file that must stay as it is beside it."""
    folder = tmp_path / "work"
    shutil.copytree(played, folder)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "victim").write_text(SECRET)
    monkeypatch.chdir(folder)
    return folder


def is_untouched(place: Path) -> bool:
    outside = place.parent / "outside"
    return [p.name for p in outside.iterdir()] == ["victim"] and (
        outside / "victim"
    ).read_text() == SECRET


def trap(run: Path, name: str, kind: Callable[[Path, Path], None], place: Path) -> None:
    target = run / name
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)
    target.parent.mkdir(exist_ok=True)
    kind(target, place.parent / "outside" / "victim")


RUN_FILES = (
    "config.json",
    "checkpoint.json",
    "events.jsonl",
    "traces.jsonl",
    "memory.jsonl",
    "best.json",
    "lock",
    "system.yaml",
    "report.md",
    "report.html",
    ".report.md.tmp",
    ".report.html.tmp",
    ".checkpoint.json.tmp",
    "cache.sqlite",
    "cache.sqlite-wal",
    "cache.sqlite-shm",
    "cache.sqlite-journal",
    "STOP",
    "memory",
    "memory/rewards",
    "memory/features-256.bin",
)


SOME = [(k, n) for k in (dangling, listening) for n in ("config.json", "report.md", "memory")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, name) for kind in (link, fifo) for name in RUN_FILES), *SOME],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_trap_in_a_run_directory_is_refused_by_every_command(
    place: Path, cli: Any, name: str, kind: Callable[[Path, Path], None]
) -> None:
    """Regression test: ``report`` wrote into, and ``optimize`` emptied, whatever a link led to."""
    for run in ("runs/game", "runs/killed"):
        trap(place / run, name, kind, place)
    with guarded():
        report = cli("runs", "report", "runs/game")
        assert report.code == 2, (report.out, report.err)
        assert Path(name).name.split("/")[0] in report.err or "config.json" in report.err
        assert cli("optimize", "game.yaml", "--run", "killed", "--quiet").code == 2
        assert cli("runs", "verify").code == 1
        listed = cli("runs", "list", "--json")
        assert listed.code == 0
        assert cli("runs", "report", "runs/game", "--json").code in (0, 2)
        if name == "best.json":
            assert cli("evaluate", "game.yaml", "--config", "runs/game/best.json").code == 2
    assert is_untouched(place)
    assert SECRET.strip() not in listed.out


@pytest.mark.parametrize(
    "name", ["lock", "events.jsonl", "traces.jsonl", "cache.sqlite", "cache.sqlite-wal"]
)
def test_a_hard_link_is_not_written_through(place: Path, cli: Any, name: str) -> None:
    run = place / "runs" / "killed"
    before = (run / name).read_bytes() if (run / name).exists() else b""
    victim = place.parent / "outside" / "victim"
    if name != "cache.sqlite":
        victim.write_bytes(before)
    else:
        shutil.copy(run / name, victim)
        before = victim.read_bytes()
    trap(run, name, hard, place)
    assert cli("optimize", "game.yaml", "--run", "killed", "--quiet").code == 2
    assert victim.read_bytes() == before


def test_a_run_directory_named_through_a_link_is_the_users_choice(place: Path, cli: Any) -> None:
    (place / "elsewhere").symlink_to(place / "runs")
    assert cli("runs", "report", "elsewhere/game").code == 0
    assert cli("runs", "list", "--dir", "elsewhere").code == 0


@pytest.mark.parametrize("kind", TRAPS, ids=lambda kind: kind.__name__)
def test_a_trap_in_the_cache_of_evaluations_is_refused(
    place: Path, cli: Any, kind: Callable[[Path, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOUND_CACHE", str(place / "cache"))
    (place / "cache").mkdir()
    kind(place / "cache" / "evaluate.sqlite", place.parent / "outside" / "victim")
    with guarded():
        ran = cli("evaluate", "game.yaml")
    assert ran.code == 2
    assert "evaluate.sqlite" in ran.err
    assert is_untouched(place)


def stored(folder: Path) -> dict[str, str]:
    return store_folder(lambda made: (made / "weights").write_text("weights"), folder, "adapter")


def saved(folder: Path, reference: dict[str, str]) -> Path:
    """Write a configuration file that names a folder, as another person may."""
    values = {"answerer.weights": reference}
    path = folder / "best.json"
    path.write_text(
        json.dumps({"format": 1, "digest": Configuration(values).digest, "values": values})
    )
    return path


@pytest.mark.parametrize(
    "how", ["absolute", "above", "inside and above", "empty", "nul", "surrogate"]
)
def test_a_configuration_from_elsewhere_names_only_folders_beside_it(
    tmp_path: Path, how: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "theirs").mkdir()
    reference = stored(tmp_path / "mine")
    paths = {
        "absolute": str(tmp_path / "mine" / reference["path"]),
        "above": f"../mine/{reference['path']}",
        "inside and above": f"x/../../mine/{reference['path']}",
        "empty": "",
        "nul": "a\0b",
        "surrogate": "\ud800",
    }
    (tmp_path / "theirs" / "x").mkdir()
    path = saved(tmp_path / "theirs", {**reference, "path": paths[how]})
    message = r"answerer\.weights in .*best\.json refers to the folder"
    if how == "surrogate":
        message = "best.json holds a lone surrogate"
    with pytest.raises(ConfigurationError, match=message):
        load(path)


def test_a_configuration_with_its_folder_beside_it_is_read(tmp_path: Path) -> None:
    reference = stored(tmp_path)
    found = entry(load(saved(tmp_path, reference)), "answerer.weights", dict)
    assert found["path"] == str(tmp_path / reference["path"])


@pytest.mark.parametrize("where", ["the folder", "a file", "a folder inside"])
@pytest.mark.parametrize("kind", TRAPS, ids=lambda kind: kind.__name__)
def test_a_trap_in_an_adapter_is_refused(
    tmp_path: Path, where: str, kind: Callable[[Path, Path], None]
) -> None:
    (tmp_path / "outside").mkdir()
    victim = tmp_path / "outside" / "victim"
    victim.write_text("weights")
    mine = tmp_path / "mine"
    mine.mkdir()
    reference = stored(mine)
    folder = mine / reference["path"]
    if where == "the folder":
        shutil.rmtree(folder)
        kind(folder, victim.parent)
    else:
        target = folder / ("weights" if where == "a file" else "more")
        target.unlink(missing_ok=True)
        kind(target, victim if where == "a file" else victim.parent)
    with guarded():
        for use in (
            lambda: load(saved(mine, reference)),
            lambda: verify_reference(reference, mine),
        ):
            with pytest.raises(ConfigurationError, match=r"not a regular file or|was changed"):
                use()


def test_a_too_large_adapter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOUND_MAX_ARTIFACT_MB", "1")
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(2**40)  # no block of it is on the disk
    with (
        guarded(),
        pytest.raises(ConfigurationError, match=r"more than 1 MiB; .*COMPOUND_MAX_ARTIFACT_MB"),
    ):
        folder_digest(tmp_path)


def test_a_file_of_a_run_beyond_the_limit_is_refused(
    place: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "checkpoint.json", "events.jsonl", "best.json"):
        with (place / "runs" / "game" / name).open("ab") as file:
            file.truncate(2**40)
    with guarded():
        assert "config.json is larger than 512 MiB" in cli("runs", "report", "runs/game").err
        assert (
            "best.json is larger than"
            in cli("run", "game.yaml", "--config", "runs/game/best.json", "x=1").err
        )
        with pytest.raises(RunDirectoryError, match=r"events\.jsonl:\d+: .* longer than 64 MiB"):
            list(read_records(place / "runs" / "game", "events.jsonl"))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/../b", "/etc/passwd", "a//b", "a\0b", "a\ud800", "a/"]
)
def test_names_that_lead_outside_are_refused(tmp_path: Path, name: str) -> None:
    folder = UntrustedFolder(tmp_path)
    uses: list[Callable[[], object]] = [
        lambda: folder.read(name),
        lambda: folder.write(name, ""),
        lambda: folder.below(name),
        lambda: folder.appender(name),
        lambda: folder.place(name),
        lambda: folder.remove(name),
    ]
    for use in uses:
        with pytest.raises(RunDirectoryError, match="not a valid file name in a folder"):
            use()


@pytest.mark.parametrize("name", ["a\0b", "a\ud800"])
def test_a_name_that_no_folder_can_have_is_refused(name: str) -> None:
    with pytest.raises(RunDirectoryError, match=r"'a\\.* is not a path"):
        UntrustedFolder(name)


@pytest.mark.parametrize("above", ["link", "link/deeper"])
def test_a_link_on_the_way_is_refused(tmp_path: Path, above: str) -> None:
    (tmp_path / "outside" / "deeper").mkdir(parents=True)
    (tmp_path / "outside" / "deeper" / "file").write_text(SECRET)
    (tmp_path / "outside" / "file").write_text(SECRET)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "outside")
    folder = UntrustedFolder(tmp_path / "folder")
    inside = folder.below(above)
    uses: list[Callable[[], object]] = [
        lambda: folder.read(f"{above}/file"),
        lambda: inside.read("file"),
        lambda: inside.write("file", ""),
        lambda: inside.appender("file"),
        lambda: inside.truncate("file", 0),
        lambda: inside.remove("file"),
        inside.names,
        inside.digest,
        inside.make,
        folder.check,
        lambda: inside.below("new").make(),
    ]
    for use in uses:
        with pytest.raises(RunDirectoryError, match="is a symbolic link"):
            use()
    assert (tmp_path / "outside" / "deeper" / "file").read_text() == SECRET
    assert sorted(p.name for p in (tmp_path / "outside").iterdir()) == ["deeper", "file"]


def test_features_are_not_kept_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text(SECRET)
    (tmp_path / "features.bin").symlink_to(tmp_path / "victim")
    with pytest.raises(RunDirectoryError, match="is a symbolic link"):
        FeatureStore(tmp_path / "features.bin", 2)
    (tmp_path / "features.bin").unlink()
    store = FeatureStore(tmp_path / "features.bin", 2)
    (tmp_path / "features.bin").symlink_to(tmp_path / "victim")
    with pytest.raises(RunDirectoryError, match="is a symbolic link"):
        store.put([b"k" * 16], np.zeros((1, 2), np.float32))
    assert (tmp_path / "victim").read_text() == SECRET


@pytest.mark.parametrize("ending", ["", "-wal", "-shm", "-journal"])
def test_no_file_of_a_database_is_opened_through_a_link(tmp_path: Path, ending: str) -> None:
    (tmp_path / "victim").write_text("")
    (tmp_path / f"cache.sqlite{ending}").symlink_to(tmp_path / "victim")
    with pytest.raises(RunDirectoryError, match="is a symbolic link"):
        DiskCache(tmp_path / "cache.sqlite")
    assert (tmp_path / "victim").read_text() == ""


MAGIC = bytes.fromhex("d9d505f920a163d7")


def journal(victim: str, kind: str) -> bytes:
    """Return a rollback journal of SQLite; all but the last name a file, which SQLite would delete."""
    name = os.fsencode(victim)
    total = sum(byte if byte < 128 else byte - 256 for byte in name) & 0xFFFFFFFF
    end = name + struct.pack(">II", len(name), total) + MAGIC
    head = MAGIC + struct.pack(">IIIII", 0, 0, 0 if "empty" in kind else 1, 512, 4096)
    page = struct.pack(">I", 1) + bytes(4096) + struct.pack(">I", 0)
    return {
        "header": head.ljust(512, b"\0") + struct.pack(">I", 0x40000000 // 4096 + 1) + end,
        "empty database": head.ljust(512, b"\0") + end,
        "page": head.ljust(512, b"\0") + page + end,
        "long": head.ljust(512, b"\0") + bytes(2**20) + end,
        "no header": b"x" * 600 + end,
        "short": end,
        "only pages": head.ljust(512, b"\0") + page,
    }[kind]


KINDS = ("header", "empty database", "page", "long", "no header", "short", "only pages")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["used", "new", "empty", "missing"])
def test_no_journal_of_someone_else_is_rolled_back(tmp_path: Path, kind: str, first: str) -> None:
    """Regression test: a journal can name any file of the user, and SQLite deleted it."""
    victim = tmp_path / "victim"
    victim.write_text(SECRET)
    run = RunDirectory.create(tmp_path / "run", "", {"seed": 0})
    run.close()
    path = run.path / "cache.sqlite"
    cache = DiskCache(path)
    if first == "used":
        cache.put("k", {"outputs": 1})
    cache.close()
    if first == "empty":
        path.write_bytes(b"")
    if first == "missing":
        path.unlink()
    theirs = journal(str(victim), kind)
    (run.path / "cache.sqlite-journal").write_bytes(theirs)
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(RunDirectoryError, match=r"cache\.sqlite-journal .*; delete this") as error:
        DiskCache(path)
    assert verify(run.path) == [error.value.message]
    assert victim.read_text() == SECRET
    assert (path.read_bytes() if path.exists() else None) == before
    assert (run.path / "cache.sqlite-journal").read_bytes() == theirs


def test_a_run_directory_deletes_no_file_of_the_user(place: Path, cli: Any) -> None:
    victim = place.parent / "outside" / "victim"
    theirs = journal(str(victim), "header")
    for run in ("game", "killed"):
        (place / "runs" / run / "cache.sqlite-journal").write_bytes(theirs)
    ran = cli("optimize", "game.yaml", "--run", "killed", "--quiet")
    assert ran.code == 2
    assert "runs/killed/cache.sqlite-journal" in ran.err
    listed = cli("runs", "verify")
    assert listed.code == 1
    for run in ("game", "killed"):
        assert f"runs/{run}/cache.sqlite-journal" in " ".join((listed.out + listed.err).split())
    assert is_untouched(place)


@pytest.mark.parametrize("ending", ["", "-wal", "-shm", "-journal"])
def test_verifying_writes_through_no_hard_link(place: Path, ending: str) -> None:
    """Regression test: SQLite empties the shared memory of a log even of a file that it may only read."""
    run = place / "runs" / "killed"
    assert (run / "cache.sqlite-wal").stat().st_size
    victim = place.parent / "outside" / "victim"
    (run / f"cache.sqlite{ending}").unlink(missing_ok=True)
    (run / f"cache.sqlite{ending}").hardlink_to(victim)
    assert any(f"cache.sqlite{ending} is a hard link" in problem for problem in verify(run))
    assert is_untouched(place)


def test_a_log_of_someone_else_changes_only_its_cache(tmp_path: Path) -> None:
    """A write-ahead log names no file, and what it makes of the cache is checked as the cache is."""
    (tmp_path / "theirs").mkdir()
    other = sqlite3.connect(tmp_path / "theirs" / "cache.sqlite", isolation_level=None)
    other.execute("PRAGMA journal_mode=WAL")
    other.execute(
        "CREATE TABLE outcome (key TEXT PRIMARY KEY, step INTEGER, value TEXT, checksum TEXT) WITHOUT ROWID"
    )
    other.execute("PRAGMA user_version=2")
    other.execute("CREATE TRIGGER t AFTER INSERT ON outcome BEGIN DELETE FROM outcome; END")
    run = RunDirectory.create(tmp_path / "run", "", {"seed": 0})
    run.close()
    DiskCache(run.path / "cache.sqlite").close()
    for ending in ("-wal", "-shm"):
        shutil.copy(tmp_path / "theirs" / f"cache.sqlite{ending}", run.path)
    other.close()
    with pytest.raises(RunDirectoryError, match="it holds the trigger 't'"):
        DiskCache(run.path / "cache.sqlite")


FILE_CALLS = {
    "open",
    "write_text",
    "write_bytes",
    "read_text",
    "read_bytes",
    "mkdir",
    "makedirs",
    "touch",
    "unlink",
    "rename",
    "symlink_to",
    "hardlink_to",
    "rmtree",
    "copytree",
    "copyfile",
    "copy2",
    "move",
    "mkdtemp",
    "TemporaryDirectory",
    "NamedTemporaryFile",
    "save_file",
    "load_file",
    "fromfile",
    "tofile",
    "savez",
    "connect",
    "iterdir",
    "rglob",
    "glob",
    "exists",
    "is_file",
    "is_dir",
    "listdir",
    "scandir",
    "walk",
}
HARMLESS = {
    "gate",
    "_gate",
    "door",
    "sessions",
    "webbrowser",
}  # receivers of ``open`` and ``connect`` that are no files
# Everything else that opens, creates or looks for files, and why it may. Nobody may open files of
# run directories, adapters, caches or reports in another way than by UntrustedFolder.
ALLOWED = {
    "compound/core/storage/stores.py": "files of a store, which is no folder",
    "compound/core/security/untrusted.py": "the one way",
    "compound/execution/cache.py": "SQLite, after UntrustedFolder.place",
    "compound/api/studio/application.py": "a temporary folder of its own",
    "compound/api/studio/traces.py": "a database in the temporary folder of the studio",
    "compound/api/verify.py": "SQLite, after UntrustedFolder.place; asks whether the folder is there",
    "compound/optimization/runs/directory.py": "asks whether the user's own path is taken",
    "compound/core/storage/artifacts.py": "fills a new folder, and deletes a folder by its full name after a check",
    "compound/evaluation/dataset.py": "asks whether the user's own path is there",
    "compound/evaluation/rows.py": "unpacks what UntrustedFolder opened",
    "compound/evaluation/hub.py": "looks through what the hub's library fetched",
    "compound/graph/registry/engines.py": "asks whether a model's name is a folder",
    "compound/engines/local/engine.py": "asks whether a model's name is a folder",
    "compound/engines/vllm/engine.py": "asks whether a model's name is a folder",
    "compound/interchange/source_strings.py": "looks through an agent's folder, whose files UntrustedFolder opens",
    "compound/cli/script.py": "the script that the user names; asks whether a file is beside it",
    "compound/interchange/dspy_import.py": "walks through a syntax tree",
    "compound/core/errors.py": "asks whether this package lies in a clone",
    "compound/cli/init.py": "asks whether the user's own data are there",
    "compound/cli/tables.py": "asks whether the user's own data are a folder",
    "compound/api/arguments.py": "asks whether the user's own path is a file",
    "compound/cli/runs.py": "asks whether the user's own folder of runs is there",
    "compound/cli/export.py": "asks whether the user's own path is a folder",
    "compound/api/description.py": "asks whether a teacher, which the user's own file names, is there",
    "compound/cli/entry_point.py": "the standard output",
    "compound/testing/checks.py": "a temporary folder of its own",
    "compound/testing/doubles.py": "copies folders that the kits themselves made",
    "compound/testing/optimizer_kit.py": "a temporary folder of its own",
    "compound/core/security/sandbox/launchers.py": "a file of the kernel",
    "compound/core/security/sandbox/stage.py": "inside the sandbox, on a file system of its own",
    "compound/cluster/pool.py": "starts workers, and connects to them",
    "compound/cluster/ray_cluster.py": "connects to a cluster, at the address that Ray wrote, if the file is this user's",
    "optimizers/weights/distributed/processes.py": "a temporary folder of its own",
    "compound/engines/replicas.py": "connects to a replica",
    "compound/engines/local/loading.py": "asks for sizes and times of the files of a model's folder",
    "compound/engines/local/footprint.py": "reads the limits of memory from files of the kernel",
    "compound/evaluation/code_tests/candidate.py": "inside the sandbox",
    "compound/evaluation/code_tests/tester.py": "inside the sandbox",
    "compound/core/security/trust.py": "the user's own configuration file",
    "compound/api/check.py": "asks whether the data that the user's own file names is there",
    "compound/engines/model_folder.py": "looks through a model's folder before a library reads it",
    "compound/yaml/program.py": "the user's own file",
    "compound/core/image.py": "an image that the user's own code names; paths in data files are read by `read_examples`",
    "components/gateway/worker.py": "its own standard streams and the null device",
    "compound/core/lazy.py": "reads the stubs of the package",
    "compound/graph/registry/code.py": "looks for Python files beside the user's own file",
    "components/index.py": "fills a new folder; reads a corpus that the user's own file names",
    "compound/optimization/preflight.py": "asks whether a model's name is a folder",
    "compound/engines/models.py": "the user's own model cache and model folders, and packages that pip has just downloaded",
    "compound/engines/vllm/server.py": "logs of our own server in the user's cache",
    "rewards/backbone.py": "asks whether an adapter is there, after its folder was checked",
    "rewards/model.py": "files in the new folder that `store_folder` fills",
    "optimizers/weights/learner/adapters.py": "files in the new folder that `store_folder` fills, or that `verify_reference` has read",
    "optimizers/weights/learner/trainer.py": "files in the new folder that `store_folder` fills, or that `verify_reference` has read",
    "optimizers/weights/interchange.py": "files and folders that the user's own code names; files in the new folder that `store_folder` fills",
    "optimizers/weights/steps.py": "files in the new folder that `store_folder` fills, or that `verify_reference` has read",
    "optimizers/weights/distributed/worker.py": "its own temporary folder",
    "optimizers/weights/distributed/node.py": "its own temporary folder; a file of the run, which a signed job names; the user's stop file",
    "optimizers/weights/training.py": "lists names of folders to delete, which `discard` checks",
}


def file_calls(tree: ast.AST) -> list[tuple[str, int]]:
    """Return the calls that open, create or look for files, with their lines."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in FILE_CALLS - {"connect", "walk"}:
            found.append((node.func.id, node.lineno))
        if isinstance(node.func, ast.Attribute) and node.func.attr in FILE_CALLS:
            receiver = node.func.value
            name = receiver.id if isinstance(receiver, ast.Name) else getattr(receiver, "attr", "")
            own = name[:1].isupper() and name != "Path"  # such as RunDirectory.open
            if own or name in HARMLESS:
                continue
            found.append((node.func.attr, node.lineno))
    return found


@functools.cache
def calls_by_source() -> dict[str, list[tuple[str, int]]]:
    """Return those calls of every module, each module under its own folder."""
    found = {}
    for package in ("compound", "components", "rewards", "optimizers"):
        for folder, folders, names in os.walk(ROOT / package):  # follows no links
            folders[:] = [name for name in folders if name not in ("__pycache__", "benchmarks")]
            for path in (Path(folder, name) for name in names if name.endswith(".py")):
                calls = file_calls(ast.parse(path.read_text(encoding="utf-8")))
                found[path.relative_to(ROOT).as_posix()] = calls
    return found


def test_no_run_is_written_or_opened_in_a_store(place: Path, cli: Any) -> None:
    for command in (
        ("optimize", "game.yaml", "--run-dir", "s3://bucket/runs/game", "--quiet"),
        ("optimize", "game.yaml", "--run", "new", "--from", "s3://bucket/runs/game", "--quiet"),
        ("sweep", "game.yaml", "--methods", "random", "--run", "s3://bucket/sweep"),
        ("runs", "report", "s3://bucket/runs/game"),
        ("runs", "list", "--dir", "s3://bucket/runs"),
        ("runs", "verify", "s3://bucket/runs/game"),
        ("runs", "compare", "runs/game", "s3://bucket/runs/game"),
        ("run", "game.yaml", "--config", "s3://bucket/runs/game/best.json", "number=1"),
        ("ui", "s3://bucket/runs", "--no-browser"),
    ):
        found = cli(*command)
        assert found.code == 2, command
        said = " ".join(found.err.split())
        assert "is in a store, which has no locks" in said, (command, said)
        assert "name a local folder; `compound runs copy` copies finished runs" in said
    assert not list(place.glob("s3*"))


def test_a_run_is_not_written_through_a_link_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "outside" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "theirs")
    Path("runs").symlink_to("../outside")
    with pytest.raises(RunDirectoryError, match="runs is a link to ../outside; pass the folder"):
        run_folder("x")
    Path("runs").unlink()
    Path("runs").mkdir()
    assert run_folder("x") == Path("runs/x")
    Path("runs/x").symlink_to("../../outside/x")
    with pytest.raises(RunDirectoryError, match="runs/x is a link"):
        run_folder("x")


def test_files_are_opened_in_one_way_only() -> None:
    wrong = {name: c for name, c in calls_by_source().items() if c and name not in ALLOWED}
    assert wrong == {}, "open files with compound.core.security.untrusted.UntrustedFolder"


def test_every_exception_from_that_is_needed() -> None:
    assert {name for name in ALLOWED if not calls_by_source()[name]} == set()


def test_the_search_for_other_ways_would_find_one() -> None:
    source = (
        "import sqlite3\ndef f(path, gate):\n    path.open('w')\n    open(path)\n    gate.open()\n"
        "    RunDirectory.open(path)\n    (path / 'x').mkdir()\n    sqlite3.connect(path)\n"
    )
    assert [name for name, _ in file_calls(ast.parse(source))] == [
        "open",
        "open",
        "mkdir",
        "connect",
    ]


def test_an_error_of_the_operating_system_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(CompoundError, match=r"gone/file cannot be used: No such file or directory"):
        UntrustedFolder(tmp_path / "gone").read("file")
