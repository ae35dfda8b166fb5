"""Finished runs, run directories without checksums, and file systems that cannot lock folders."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.optimization.runs.directory import APPENDED, read_json, read_records


def finished_run(path: Path, **settings: Any) -> Path:
    """Write a finished run of a system that calls no model."""

    def line(number: int, slope: int, start: int) -> str:
        return str(number * slope + start)

    node = cp.Function("line", line, slope=cp.Int(0, 4), start=cp.Int(0, 4))
    system = cp.System("line", {"answer": node(number=cp.Input("number", int))})
    rows = [{"id": str(i), "number": i, "answer": str(i * 3 + 2)} for i in range(60)]
    data = {"train": rows[:20], "valid": rows[20:40], "test": rows[40:]}
    chosen = {"budget": 400, "method": "random", "progress": False, **settings}
    cp.optimize(system, data, "exact_match", run_dir=path, **chosen)
    return path


def without_checksums(path: Path) -> Path:
    """Rewrite the files of a run without checksums."""
    for name in APPENDED:
        if (path / name).exists():
            lines = [json.dumps(record) + "\n" for record in read_records(path, name)]
            (path / name).write_text("".join(lines))
    for name in ("config.json", "checkpoint.json"):
        if (path / name).exists():
            value = read_json(path, name)
            if name == "checkpoint.json":
                files = {n: path / n for n in APPENDED}
                sizes = {n: f.stat().st_size if f.exists() else 0 for n, f in files.items()}
                kept = ("format", "step", "state")
                value = {**{name: value[name] for name in kept}, "lengths": sizes}
            (path / name).write_text(json.dumps(value, indent=1))
    return path


def lock_no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make locking a folder fail, as on file systems that lock files only, such as NFS."""
    import fcntl  # not on Windows

    locked = fcntl.flock

    def only_files(descriptor: int, operation: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        locked(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", only_files)
