"""Folders referenced by a configuration: trained adapters, and rewards that choose per input.

A reference holds the path and the digest of a folder. Only the digest counts: references with the
same digest are equal wherever their folders are. A stored folder is never changed, and is named by
its content.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TypeGuard, overload

from compound.core.errors import ConfigurationError
from compound.core.security.untrusted import FolderStatus, UntrustedFolder, os_errors_as

Reference = Mapping[str, str]
TEMPORARY = ".artifact-"  # prefix of folders in which a stored folder is written
SHOWN = 16  # digits of a digest in a folder name
_NO_PATH = re.compile("[\0\ud800-\udfff]")
_STORED = re.compile(rf"[^/\\]+-[0-9a-f]{{{SHOWN}}}")


def is_reference(value: object) -> TypeGuard[Reference]:
    """Return whether a value is ``{"path": folder, "sha256": digest}``.

    >>> is_reference({"path": "adapter", "sha256": "9f"}), is_reference({"path": "adapter"})
    (True, False)
    """
    return (
        isinstance(value, Mapping)
        and set(value) == {"path", "sha256"}
        and all(isinstance(part, str) for part in value.values())
    )


def references_in(value: object) -> Iterator[Reference]:
    """Yield the references in a JSON value.

    >>> list(references_in({"a": [{"path": "adapter", "sha256": "9f"}, None]}))
    [{'path': 'adapter', 'sha256': '9f'}]
    """
    if is_reference(value):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from references_in(part)


def without_path(value: object) -> object:
    """Return a reference without its path; any other value unchanged.

    >>> without_path({"path": "adapter", "sha256": "9f"}), without_path("adapter")
    ({'sha256': '9f'}, 'adapter')
    """
    return {"sha256": value["sha256"]} if is_reference(value) else value


@overload
def with_absolute_path(value: Reference, folder: Path) -> Reference: ...
@overload
def with_absolute_path(value: object, folder: Path) -> object: ...
def with_absolute_path(value: object, folder: Path) -> object:
    """Return a reference with its path made absolute, relative to ``folder``; any other value unchanged."""
    return (
        {**value, "path": str(folder.absolute() / value["path"])} if is_reference(value) else value
    )


def leads_outside(path: str) -> bool:
    """Return whether a path is absolute, may refer above its base folder, or holds NUL or half a character.

    >>> leads_outside("adapters/one"), leads_outside("../one"), leads_outside("/one")
    (False, True, True)
    """
    pure = PurePosixPath(path)
    return pure.is_absolute() or ".." in pure.parts or not pure.parts or bool(_NO_PATH.search(path))


def folder_digest(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of all files in a folder."""
    return UntrustedFolder(folder, error=ConfigurationError).digest()


def verify_reference(
    reference: Reference, folder: Path | None = None, *, reread: bool = False
) -> Path:
    """Return the folder of a reference, relative to ``folder``, after verifying its digest.

    With ``reread``, files that this process wrote and that were not changed since are read, too.

    Raises:
        ConfigurationError: the folder is missing, has other content, or is above ``folder``.
    """
    given = reference["path"]
    path = (folder or Path()) / given
    if folder is None or PurePosixPath(given).is_absolute():
        found = UntrustedFolder(path.parent, error=ConfigurationError)
        name = path.name
    else:
        check_inside("a reference", given)
        found = UntrustedFolder(folder, error=ConfigurationError)
        name = PurePosixPath(given).as_posix()
    if found.kind(name) != "folder":
        raise ConfigurationError(
            f"the configuration needs the folder {path}, which does not exist",
            hint="keep it next to the configuration file, or restore it from its run",
        )
    place = found.below(name)
    digest = (None if reread else WRITTEN.digest(place)) or place.digest()
    if digest != reference["sha256"]:
        raise ConfigurationError(
            f"{path} was changed: its files have the digest {digest[:SHOWN]}…, but the configuration expects "
            f"{reference['sha256'][:SHOWN]}…",
            hint="restore the folder from its run",
        )
    return path


def check_inside(entry: str, path: str) -> None:
    """Reject a path in an untrusted file that refers outside of the file's folder."""
    if leads_outside(path):
        raise ConfigurationError(
            f"{entry} refers to the folder {path!r}, which is outside of the file's folder",
            hint="only folders next to the file are read: copy it there and use its relative path",
        )


def store_folder(
    write: Callable[[Path], object],
    folder: Path,
    name: str,
    known: Mapping[str, bytes] | None = None,
) -> dict[str, str]:
    """Store what ``write`` writes into an empty folder, and return its reference, relative to ``folder``.

    ``known`` holds the SHA-256 of written files by name, where the caller knows them.

    Equal content is stored once. A crash leaves either all of it or nothing; `sync` ensures
    that it outlasts a loss of power.
    """
    with (
        os_errors_as(folder),
        tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as temporary,
    ):
        made = Path(temporary) / "made"
        made.mkdir()
        write(made)
        # the usual permissions: libraries write for one user, but a server may run as another
        for path in (made, *made.rglob("*")):
            os.chmod(path, (0o777 if path.is_dir() else 0o666) & ~UMASK)
            set_back(path)
        written = UntrustedFolder(made, error=ConfigurationError)
        status, digest = written.status(), written.digest(known)
        reference = {"path": f"{name}-{digest[:SHOWN]}", "sha256": digest}
        target = folder / reference["path"]
        try:
            verify_reference(reference, folder)
        except ConfigurationError:  # it is new, or was lost in part with the power
            discard(target.name, folder)
            os.replace(made, target)
            WRITTEN.add(UntrustedFolder(target), digest, status)
    return reference


def sync(*folders: Path) -> None:
    """Write the files of stored folders, and their names, from the memory of the system to the disk."""
    for folder in folders:
        for path in (*folder.iterdir(), folder, folder.parent):
            with os_errors_as(path):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)


UMASK = os.umask(0o077)  # the process's umask can only be read by setting it
os.umask(UMASK)


def discard(name: str, folder: Path) -> None:
    """Delete a folder stored by `store_folder`; anything else is kept, whatever its name.

    The name may come from an untrusted file.
    """
    if _STORED.fullmatch(name) and not (folder / name).is_symlink():
        shutil.rmtree(folder / name, ignore_errors=True)


def discard_temporaries(folder: Path) -> None:
    """Delete what a killed process was writing; only safe with a single writer."""
    for path in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)  # of a link, neither it nor its target


@overload
def copy_into(value: Reference, folder: Path) -> dict[str, str]: ...
@overload
def copy_into(value: object, folder: Path) -> object: ...
def copy_into(value: object, folder: Path) -> object:
    """Return a reference relative to ``folder``, copying its folder if it is outside.

    Any other value is returned unchanged.

    Raises:
        ConfigurationError: the referenced folder is missing or has other content.
    """
    if not is_reference(value):
        return value
    source, here = verify_reference(value).resolve(), folder.resolve()
    if source.is_relative_to(here):
        return {**value, "path": source.relative_to(here).as_posix()}
    name = source.name.removesuffix(f"-{value['sha256'][:SHOWN]}")
    return store_folder(
        lambda made: shutil.copytree(source, made, dirs_exist_ok=True), folder, name
    )


CAPACITY = 256  # of `WrittenFolders`
BACK = 10**9  # by which modification times of written files are set back, in ns


class WrittenFolders:
    """Digests of the latest folders that this process wrote, valid while no file in them is changed.

    A change is recognized by the status of the files: identity, size and times of change.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[
            str, tuple[str, FolderStatus]
        ] = {}  # by real path, in the order of writing

    def add(self, folder: UntrustedFolder, sha256: str, status: FolderStatus) -> None:
        """Remember the digest of a written folder, and the status of its files before they were hashed."""
        with self._lock:
            self._known.pop(os.path.realpath(folder.path), None)
            self._known[os.path.realpath(folder.path)] = sha256, status
            while len(self._known) > CAPACITY:
                del self._known[next(iter(self._known))]

    def digest(self, folder: UntrustedFolder) -> str | None:
        """Return the digest of a folder; ``None`` if this process did not write it, or it was changed."""
        with self._lock:
            known = self._known.get(os.path.realpath(folder.path))
        return known[0] if known is not None and known[1] == folder.status() else None


def set_back(path: Path) -> None:
    """Set a file's modification time back, so that a later change gives it another one.

    Otherwise a change within the same tick of the file system's clock could leave it equal.
    """
    before = time.time_ns() - BACK
    os.utime(path, ns=(before, before))


WRITTEN = WrittenFolders()
