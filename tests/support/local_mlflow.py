"""A local MLflow store for tests, in a database whose tables are created once."""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # mlflow's imports
    import mlflow
    from mlflow import MlflowClient


@contextlib.contextmanager
def local_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowClient]:
    """Make an empty store in a folder the one that MLflow uses, and the folder the working directory."""
    monkeypatch.chdir(folder)
    empty_store(folder / "mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    try:
        yield MlflowClient()
    finally:
        mlflow.set_tracking_uri(None)


def empty_store(path: Path) -> None:
    """Create an empty database; its default experiment stores artifacts in a folder of the first one."""
    shutil.copy(_tables(), path)


@functools.cache
def _tables() -> Path:
    path = Path(tempfile.mkdtemp(prefix="mlflow-")) / "empty.db"
    with contextlib.chdir(path.parent):  # where mlruns of the default experiment is
        MlflowClient(f"sqlite:///{path}").search_experiments()
    return path
