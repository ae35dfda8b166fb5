"""Access to folders that may have been prepared by someone else.

Run directories, adapters, stored rewards, caches and reports may come from another person. They are
read and written through `UntrustedFolder`, so that nothing in such a folder can refer outside it:
files are opened relative to the descriptor of their folder, so that no part of a path can be
replaced between a check and its use, symbolic links are rejected instead of followed, only
regular files are opened (a FIFO would block forever), and the size read is limited. Libraries that
only accept a path get one from `UntrustedFolder.place`, which checks it first.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, Literal, Self

from compound.core.errors import CompoundError, RunDirectoryError
from compound.core.security.limits import ARTIFACT, FILE, Limit
from compound.core.security.trust import is_store

Kind = Literal["file", "folder"]
FolderStatus = tuple[tuple[str, int, int, int, int, int], ...]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FOLDER = os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a FIFO must not block
CHUNK = 2**20
TEMPORARY = ".tmp"
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
_HINTS = {
    errno.EACCES: "change its permissions, or choose another location",
    errno.EPERM: "change its permissions, or choose another location",
    errno.EROFS: "the disk is read-only: choose another location",
    errno.ENOENT: "it was moved or deleted, or the path is misspelled",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "it is a folder, but a file is needed",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "close other programs, or raise the limit of open files (ulimit -n)",
    errno.EIO: "the disk reports an error: check the disk",
    errno.ESTALE: "the network folder was changed on its server: try again",
}


def error_hint(error: OSError) -> str:
    """Return advice on an operating system error; ``""`` if there is no general advice."""
    if error.errno in FULL:
        return "free some space, then run the same command again; a run resumes from its last checkpoint"
    return _HINTS.get(error.errno or 0, "")


def error_text(error: OSError, place: object) -> str:
    """Return a message with the location and the cause."""
    if error.errno in FULL:
        return f"no space left on the disk of {place}: {error.strerror}"
    return f"{place} cannot be used: {error.strerror or error}"


@contextmanager
def os_errors_as(place: object, error: type[CompoundError] = RunDirectoryError) -> Iterator[None]:
    """Turn an `OSError` into an error with the location and advice."""
    try:
        yield
    except OSError as failure:
        raise error(error_text(failure, place), hint=error_hint(failure)) from failure


def _is_path(path: str | Path) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte of a name
        return False


class UntrustedFolder:
    """A folder, and safe access to its content.

    Names are relative and may have several parts (``rewards/card.json``). The folder's own path is
    chosen by the user and may contain links; paths below it may not.

    Args:
        root: the folder, as given by the user.
        inside: parts of the path below it.
        error: class of the errors raised.
        directory: a descriptor of ``root``; by default the folder is opened by its path each time.
    """

    def __init__(
        self,
        root: str | Path,
        inside: tuple[str, ...] = (),
        *,
        error: type[CompoundError] = RunDirectoryError,
        directory: int | None = None,
    ) -> None:
        if not _is_path(root):
            raise error(f"{str(root)!r} is not a path")
        if is_store(root):  # of data sets, which are not opened here
            raise error(
                f"{root} is in a store, which has no locks, so that no run is written or opened there",
                hint="name a local folder; `compound runs copy` copies finished runs to stores, and back",
            )
        self._root = Path(root)
        self._inside = inside
        self._error = error
        self._directory = directory

    @property
    def path(self) -> Path:
        """Path of the folder, for messages."""
        return self._root.joinpath(*self._inside)

    def __str__(self) -> str:
        return str(self.path)

    def below(self, name: str) -> Self:
        """Return a folder inside this one; it may not exist."""
        inside = (*self._inside, *self._parts(name))
        return type(self)(self._root, inside, error=self._error, directory=self._directory)

    def opened(self) -> int:
        """Return a descriptor of the folder, which is reached through no link below its root.

        Raises:
            OSError: it does not exist, or cannot be opened.
            CompoundError: the path contains a link or similar.
        """
        with self._open_folder() as folder:
            return os.dup(folder)

    # --- looking ---------------------------------------------------------------------------------------

    def kind(self, name: str) -> Kind | None:
        """Return whether a name is a file or a folder, or ``None`` if it does not exist."""
        found = self._status(name)
        if found is None:
            return None
        return "folder" if stat.S_ISDIR(found.st_mode) else "file"

    def size(self, name: str) -> int:
        """Return the size of a file in bytes, or 0 if it does not exist."""
        found = self._status(name)
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else 0

    def is_same(self, name: str, file: IO[bytes]) -> bool:
        """Return whether a name still refers to an open file."""
        found = self._status(name)
        return found is not None and os.path.samestat(found, os.fstat(file.fileno()))

    def names(self) -> list[str]:
        """Return the names in the folder, sorted; empty if it does not exist."""
        with self._report_errors():
            try:
                with self._open_folder() as folder:
                    return sorted(os.listdir(folder))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def files(self) -> Iterator[tuple[str, ...]]:
        """Yield the path parts of every file in the folder and below, in no particular order."""
        for name in self.names():
            if self.kind(name) == "folder":
                yield from ((name, *rest) for rest in self.below(name).files())
            else:
                yield (name,)

    def check(self) -> None:
        """Check that the folder contains only files and folders."""
        for _ in self.files():
            pass

    def place(self, name: str) -> Path:
        """Return the path of a file for a library that opens files by path; the file may not exist."""
        found = self._status(name)
        if found is not None:
            self._check_hard_links(found, name)
        return self.path.joinpath(*self._parts(name))

    def status(self) -> FolderStatus:
        """Return identity, size and times of change of all files in the folder, without reading them."""
        found = []
        for parts in sorted(self.files()):
            name = "/".join(parts)
            if (at := self._status(name)) is not None:
                found.append(
                    (name, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)
                )
        return tuple(found)

    def digest(self, known: Mapping[str, bytes] | None = None) -> str:
        """Return the SHA-256 of the names and contents of all files in the folder."""
        hashed, total = hashlib.sha256(), 0
        for parts in sorted(self.files()):
            name = "/".join(parts)
            content = (known or {}).get(name)
            if content is None:
                content, size = self._file_digest(name, ARTIFACT.bytes - total)
                total += size
            hashed.update(hashlib.sha256(name.encode()).digest() + content)
        return hashed.hexdigest()

    def _file_digest(self, name: str, most: int) -> tuple[bytes, int]:
        """Return the SHA-256 of a file and its size, which may be at most ``most``."""
        content, size = hashlib.sha256(), 0
        with self.reader(name) as file:
            while chunk := self._chunk(name, file):
                size += len(chunk)
                if size > most:
                    raise self._error(f"{self} holds more than {ARTIFACT}", hint=ARTIFACT.hint)
                content.update(chunk)
        return content.digest(), size

    # --- reading ---------------------------------------------------------------------------------------

    @contextmanager
    def reader(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for reading for the duration of the block."""
        with self._report_errors(name):
            descriptor = self._open(name, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            yield file

    def read(self, name: str, limit: Limit = FILE) -> bytes:
        """Return the content of a file."""
        most = limit.bytes
        with self.reader(name) as file, self._report_errors(name):
            found = file.read(most + 1)
        if len(found) > most:
            raise self._error(f"{self._shown(name)} is larger than {limit}", hint=limit.hint)
        return found

    def _chunk(self, name: str, file: IO[bytes]) -> bytes:
        with self._report_errors(name):
            return file.read(CHUNK)

    # --- writing ---------------------------------------------------------------------------------------

    def make(self) -> Self:
        """Create the folder, and missing folders above it."""
        with os_errors_as(self._root, self._error):
            self._root.mkdir(parents=True, exist_ok=True)
        for depth in range(len(self._inside)):
            above = type(self)(
                self._root, self._inside[:depth], error=self._error, directory=self._directory
            )
            name = self._inside[depth]
            if above.kind(name) is None:
                with (
                    self._report_errors(),
                    above._open_folder() as folder,
                    suppress(FileExistsError),
                ):
                    os.mkdir(name, dir_fd=folder)
            elif above.kind(name) != "folder":
                raise self._error(f"{above._shown(name)} is a file, but must be a folder")
        return self

    def write(self, name: str, content: str | bytes) -> None:
        """Replace a file atomically: readers, also after a crash, see either the old or the new content."""
        raw = content.encode(errors="backslashreplace") if isinstance(content, str) else content
        with self.writer(name) as file:
            file.write(raw)

    @contextmanager
    def writer(self, name: str) -> Iterator[BinaryIO]:
        """Open a file whose content replaces that of ``name`` atomically when the block ends.

        If the block raises, the old content is kept.
        """
        *above, last = self._parts(name)
        if (found := self._status(name)) is not None:
            self._check_file_type(found, self._shown(name), stat.S_IFDIR)
        temporary = f".{last}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}"
        with self._report_errors(name), self._open_folder(*above) as folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE
            descriptor = os.open(temporary, flags, 0o666, dir_fd=folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                # after fsync, so that a crash cannot leave the new name with incomplete content
                os.replace(temporary, last, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    def appender(self, name: str) -> BinaryIO:
        """Open a file for appending, creating it if missing; the caller closes it."""
        with self._report_errors(name):
            return os.fdopen(self._open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")

    def truncate(self, name: str, size: int) -> None:
        """Truncate a file to a size."""
        with self._report_errors(name):
            descriptor = self._open(name, os.O_WRONLY)
            try:
                os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)

    def remove(self, name: str) -> None:
        """Delete a file if it exists; of a link, delete the link itself."""
        *above, last = self._parts(name)
        with (
            self._report_errors(name),
            self._open_folder(*above) as folder,
            suppress(FileNotFoundError),
        ):
            os.unlink(last, dir_fd=folder)

    def remove_temporaries(self) -> None:
        """Delete temporary files left by a crash; only safe with a single writer."""
        for name in self.names():
            if name.startswith(".") and name.endswith(TEMPORARY) and self.kind(name) == "file":
                self.remove(name)

    # --- below -----------------------------------------------------------------------------------------

    def _parts(self, name: str) -> tuple[str, ...]:
        parts = tuple(name.split("/"))
        if any(part in ("", ".", "..") for part in parts) or not _is_path(name):
            raise self._error(f"{name!r} is not a valid file name in a folder")
        return parts

    def _shown(self, name: str) -> str:
        return str(self.path / name) if name else str(self)

    @contextmanager
    def _open_folder(self, *more: str) -> Iterator[int]:
        """Open the folder, or one below it, without following links below the root.

        Raises:
            OSError: it does not exist, or cannot be opened.
            CompoundError: the path contains a link or similar.
        """
        given, flags = self._directory, os.O_RDONLY | _FOLDER
        folder = os.open(self._root, flags) if given is None else os.dup(given)
        try:
            for part in (*self._inside, *more):
                try:
                    deeper = os.open(part, flags | os.O_NOFOLLOW, dir_fd=folder)
                except OSError:
                    self._status_in(folder, part, f"{part} in {self._root}")
                    raise
                os.close(folder)
                folder = deeper
            yield folder
        finally:
            os.close(folder)

    def _open(self, name: str, flags: int) -> int:
        """Open a regular file; a file that is written in place must not have another name."""
        *above, last = self._parts(name)
        with self._open_folder(*above) as folder:
            self._status_in(folder, last, self._shown(name))
            descriptor = os.open(last, flags | _FILE, 0o666, dir_fd=folder)
        try:
            opened = os.fstat(descriptor)
            self._check_file_type(opened, self._shown(name), stat.S_IFDIR)
            if flags & os.O_WRONLY:
                self._check_hard_links(opened, name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _status(self, name: str) -> os.stat_result | None:
        """Return the status of a name, without following links; ``None`` if it does not exist."""
        *above, last = self._parts(name)
        with self._report_errors(name):
            try:
                with self._open_folder(*above) as folder:
                    return self._status_in(folder, last, self._shown(name))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def _status_in(self, folder: int, name: str, shown: str) -> os.stat_result | None:
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        self._check_file_type(found, shown)
        return found

    def _check_file_type(self, found: os.stat_result, shown: str, other: int = 0) -> None:
        """Reject anything other than a file or a folder, and the type ``other``."""
        kind = stat.S_IFMT(found.st_mode)
        if kind == other:
            raise self._error(f"{shown} is {_KINDS[kind]}, but must be a file")
        if kind not in (stat.S_IFREG, stat.S_IFDIR):
            raise self._error(
                f"{shown} is {_KINDS.get(kind, 'of an unknown kind')}, not a regular file or folder",
                hint="it could lead outside the folder: replace it with a copy of its target, if you "
                "trust it",
            )

    def _check_hard_links(self, found: os.stat_result, name: str) -> None:
        """Reject a file that is written in place and has another name, whose content would change too."""
        if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
            raise self._error(
                f"{self._shown(name)} is a hard link: writing it would change another file",
                hint="copy the folder with its content (cp -r) and use the copy",
            )

    @contextmanager
    def _report_errors(self, name: str = "") -> Iterator[None]:
        with os_errors_as(self._shown(name), self._error):
            yield
