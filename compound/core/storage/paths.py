"""Locations of files: the user's cache folder, run folders, and unused paths."""

from __future__ import annotations

import os
from pathlib import Path

from compound.core.errors import RunDirectoryError


def cache_folder() -> Path:
    """Return ``$COMPOUND_CACHE``, or ``~/.cache/compound``."""
    chosen = os.environ.get("COMPOUND_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "compound"


def run_folder(name: str) -> Path:
    """Return ``runs/NAME`` in the working directory, which may belong to someone else.

    Raises:
        RunDirectoryError: it or ``runs`` is a link, so that the run would be written elsewhere.
    """
    path = Path("runs") / name
    for place in (path.parent, path):
        if place.is_symlink():
            raise RunDirectoryError(
                f"{place} is a link to {place.readlink()}",
                hint="pass the folder itself: --run-dir (a sweep: --run; in Python: run_dir)",
            )
    return path


def unused_path(path: Path) -> Path:
    """Return the path, or the first of ``path-2``, ``path-3`` … that does not exist.

    >>> unused_path(Path("no/such/folder"))
    PosixPath('no/such/folder')
    """
    path = path if path.name else path.absolute()
    number, free = 2, path
    while os.path.lexists(free):  # lexists: a broken link also counts as used
        free = path.with_name(f"{path.name}-{number}")
        number += 1
    return free
