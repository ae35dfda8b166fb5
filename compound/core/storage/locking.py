"""Exclusive write access to a folder.

The folder itself is locked, so that deleting a lock file does not admit a second writer. Where
folders cannot be locked (NFS), the file ``lock`` inside it is used, and its owner detects
when it is replaced. The file is always locked as well, for versions that only know the file.

The system releases the lock of a process that ends. But a shared file system may keep the lock of a
machine that is gone. The file therefore names its owner, so that the error names the process, its
machine, and the file to delete if they are gone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
from dataclasses import asdict, dataclass
from typing import BinaryIO

from compound.core.errors import CompoundError, RunDirectoryError
from compound.core.security.sanitize import sanitize_text
from compound.core.security.untrusted import UntrustedFolder, os_errors_as

FILE = "lock"
UNSUPPORTED = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
TAKEN = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    host: str
    process: int

    @classmethod
    def current(cls) -> Owner:
        """Return this process."""
        return cls(platform.node(), os.getpid())

    @classmethod
    def read(cls, folder: UntrustedFolder) -> Owner | None:
        """Return the last owner that a lock file names; ``None`` if it names none that can be read."""
        try:
            found = json.loads(folder.read(FILE))
            host, process = sanitize_text(str(found["host"]))[:100], int(found["process"])
        except (CompoundError, LookupError, TypeError, ValueError, OverflowError, RecursionError):
            return None
        return cls(host, process) if 0 < process < 2**32 else None

    def write(self, file: BinaryIO) -> None:
        """Write the owner to its lock file, for other machines, too."""
        file.truncate(0)
        file.write(json.dumps(asdict(self)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


class Lock:
    """Exclusive right to write into a folder, until `release` or the end of the process.

    Attributes:
        folder: the locked folder; its files are accessed through a descriptor that stays with this
            folder even if another one takes its path.

    Raises:
        RunDirectoryError: another process holds the lock, or the folder cannot be written.
    """

    def __init__(self, unlocked: UntrustedFolder) -> None:
        path = unlocked.path
        with os_errors_as(path):
            self._directory: int | None = unlocked.opened()
        self.folder = UntrustedFolder(path, directory=self._directory)
        self._file: BinaryIO | None = None
        try:
            self._whole = self._lock(self._directory)
            self._file = self.folder.appender(FILE)
            self._require_lock(self._lock(self._file.fileno(), deletable=not self._whole))
            with os_errors_as(path):
                Owner.current().write(self._file)
        except BaseException:
            self.release()
            raise

    def _lock(self, descriptor: int, *, deletable: bool = False) -> bool:
        """Lock a file or folder; return whether its file system supports it.

        ``deletable``: whether another process could take the lock if the file was deleted.
        """
        try:
            # libraries for locks open the file by its path, and would follow a link
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in TAKEN:
                raise self._taken(deletable) from None
            if error.errno not in UNSUPPORTED:
                raise RunDirectoryError(
                    f"{self.folder} cannot be locked: {error.strerror}"
                ) from error
            return False
        return True

    def _taken(self, deletable: bool) -> RunDirectoryError:
        """Return the error for a lock that another process holds."""
        taken = f"{self.folder} is in use by another process"
        hint = "wait until it ends, or choose another --run"
        owner = Owner.read(self.folder)
        if owner is None:
            return RunDirectoryError(taken, hint=hint)
        if owner.host == platform.node():
            return RunDirectoryError(f"{taken}, {owner.process} of this machine", hint=hint)
        gone = (
            f"delete {self.folder}/{FILE}"
            if deletable
            else "retry until its file system releases the lock"
        )
        return RunDirectoryError(
            f"{taken}, {owner.process} of machine {owner.host}, which cannot be checked from this one",
            hint=f"{hint}; if the process has ended or its machine is gone, {gone}",
        )

    def _require_lock(self, locked: bool) -> None:
        if not (locked or self._whole):
            raise RunDirectoryError(
                f"the file system of {self.folder} has no locks, so two runs could write to it at once",
                hint="choose a location on another disk",
            )

    def check(self) -> None:
        """Check that the lock is still effective."""
        if self._whole or self._file is None:
            return
        if not self.folder.is_same(FILE, self._file):
            raise RunDirectoryError(
                f"{self.folder}/{FILE} was deleted or replaced during the run: another process may be "
                "writing to the folder",
                hint="end the other run, then run the same command to resume from the last checkpoint",
            )

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None
