"""Folders for the output of learner processes, of which the latest are kept.

A learner locks its folder, and only unlocked folders are deleted: other runs of this user may train at
the same time.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from compound.errors import CompoundError
from compound.security.sanitize import sanitize_text
from compound.security.untrusted import UntrustedFolder
from compound.storage.locking import Lock
from compound.storage.paths import cache_folder

SHOWN = 20  # lines of a log in an error message
KEPT = 16  # number of folders of earlier logs
NEW = "."  # prefix of folders that are not locked yet


class LogFolder:
    """A new folder for the logs of a learner; folders of ended learners are deleted, except the latest.

    Attributes:
        path: the folder, which is not deleted before `close`.
    """

    def __init__(self) -> None:
        parent = cache_folder() / "learner"
        parent.mkdir(parents=True, exist_ok=True)
        _delete_old(parent)
        new = Path(tempfile.mkdtemp(prefix=NEW + time.strftime("%Y%m%d-%H%M%S-"), dir=parent))
        self._lock: Lock | None = None
        with suppress(CompoundError):  # without locks, nothing is deleted
            self._lock = Lock(UntrustedFolder(new))
        self.path = new.rename(parent / new.name.removeprefix(NEW))

    def tail(self, rank: int) -> str:
        """Return the last lines of a process's log, indented."""
        try:
            text = (self.path / f"{rank}.log").read_text("utf-8", "replace")
        except OSError as error:  # it was deleted
            return f"    (the log cannot be read: {error.strerror})"
        lines = text.splitlines()[-SHOWN:]
        return "\n".join(f"    {sanitize_text(line)[:300]}" for line in lines) or "    (no output)"

    def close(self) -> None:
        """Let later learners delete the folder."""
        if self._lock is not None:
            self._lock.release()


def _delete_old(parent: Path) -> None:
    """Delete folders except the latest ones and those of learners that run."""
    folders = sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith(NEW))
    for old in folders[:-KEPT]:
        try:
            lock = Lock(UntrustedFolder(old))
        except CompoundError:  # it is in use, or cannot be locked
            continue
        shutil.rmtree(old, ignore_errors=True)
        lock.release()
