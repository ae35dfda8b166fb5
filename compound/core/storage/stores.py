"""Folders and files in S3, or in a store with its API, through fsspec.

Keys and the address of another endpoint come from the user's environment and AWS configuration; the
address of a file holds neither. A file that changes while it is read is an error.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from compound.core.errors import CompoundError, DataError, check_installed
from compound.core.security.trust import Origin

BLOCK = 2**23  # bytes of a request; at most 10,000 make one file
HINT = "check the address, the keys (AWS_PROFILE, AWS_ACCESS_KEY_ID …) and AWS_ENDPOINT_URL"


class StoreFolder:
    """A folder in a store, or the place of one file.

    Args:
        address: ``s3://BUCKET/PATH``.
        error: class of the errors raised.

    Raises:
        DeclarationError: it is not the address of a folder in a store.
        MissingExtra: s3fs is not installed.
    """

    def __init__(self, address: object, error: type[CompoundError] = DataError) -> None:
        address = re.sub("^s3:/+", "s3://", str(address))  # `Path` has removed a slash
        Origin.of_store(address)
        check_installed("s3fs", f"{address}: S3")
        import fsspec

        self._address, self._error = address.rstrip("/"), error
        # without lists of an earlier time
        self._system: Any = fsspec.filesystem("s3", use_listings_cache=False)

    def __str__(self) -> str:
        return self._address

    def kind(self, name: str = "") -> str | None:
        """Return whether a name is a file or a folder, or ``None`` if it does not exist."""
        with self._errors(name):
            try:
                found = self._system.info(self._path(name))["type"]
            except FileNotFoundError:
                return None
        return "file" if found == "file" else "folder"

    def names(self) -> list[str]:
        """Return the names in the folder, sorted."""
        with self._errors():
            found = self._system.ls(self._path(), detail=False)
        return sorted({str(path).rstrip("/").rpartition("/")[2] for path in found})

    def files(self) -> dict[str, int]:
        """Return the size of each file in the folder and below by its name."""
        with self._errors():
            found = self._system.find(self._path(), detail=True).items()
        start = len(self._path()) + 1  # a name that ends with a slash is a folder of a console
        return {path[start:]: facts["size"] for path, facts in found if path[-1] != "/"}

    @contextmanager
    def reader(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for reading for the duration of the block."""
        with self._errors(name):
            file = self._system.open(self._path(name), "rb", block_size=BLOCK, cache_type="none")
        with file:
            yield cast("BinaryIO", io.BufferedReader(_Reader(self, name, file), BLOCK))

    @contextmanager
    def writer(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for writing, which replaces that of the name."""
        path = self._path(name)
        with self._errors(name), self._system.open(path, "wb", block_size=BLOCK) as file:
            yield file

    def _path(self, name: str = "") -> str:
        return self._address.removeprefix("s3://") + (f"/{name}" if name else "")

    @contextmanager
    def _errors(self, name: str = "") -> Iterator[None]:
        try:
            yield
        except CompoundError:
            raise
        except Exception as error:  # of the library, of its libraries, and of the network
            place = f"s3://{self._path(name)}"
            said = f"{place} cannot be used: {type(error).__name__}: {error}"
            raise self._error(said, hint=HINT) from error


class _Reader(io.RawIOBase):
    """A file whose errors are those of its folder."""

    def __init__(self, folder: StoreFolder, name: str, file: Any) -> None:  # noqa: ANN401 - fsspec has no types
        self._folder, self._name, self._file = folder, name, file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - a writable buffer
        with self._folder._errors(self._name):
            return int(self._file.readinto(buffer))
