"""Stored folders: what is deleted of them, and when their files are read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import pytest

from compound.core.errors import ConfigurationError
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage import artifacts
from compound.core.storage.artifacts import (
    Reference,
    WrittenFolders,
    discard,
    folder_digest,
    store_folder,
    sync,
    verify_reference,
)


def stored(folder: Path, name: str = "adapter") -> str:
    return store_folder(lambda made: (made / "weights").write_text(name), folder, name)["path"]


def test_what_was_stored_can_be_deleted(tmp_path: Path) -> None:
    kept, gone = stored(tmp_path, "kept"), stored(tmp_path, "gone")
    discard(gone, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [kept]
    discard(gone, tmp_path)


@pytest.mark.parametrize("how", ["absolute", "above", "plain", "link"])
def test_nothing_else_is_deleted(how: str, tmp_path: Path) -> None:
    """The name may come from a run directory that somebody else made."""
    folder, outside = tmp_path / "memory", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    victim = outside / stored(outside)
    (folder / "plain").mkdir()
    (folder / f"link-{'0' * 16}").symlink_to(victim)
    names = {"absolute": str(victim), "above": f"../outside/{victim.name}", "plain": "plain"}
    discard(names.get(how, f"link-{'0' * 16}"), folder)
    assert (victim / "weights").exists()
    assert (folder / "plain").exists()
    assert (folder / f"link-{'0' * 16}").is_symlink()


def write(made: Path) -> None:
    (made / "weights").write_text("weights")
    (made / "sub").mkdir()
    (made / "sub" / "config").write_text("config")


@pytest.fixture
def written(tmp_path: Path) -> tuple[Reference, Path]:
    """A stored folder with two files."""
    reference = store_folder(write, tmp_path, "adapter")
    return reference, tmp_path / reference["path"]


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the name of every file that is read."""
    names: list[str] = []
    reader = UntrustedFolder.reader

    def counted(folder: UntrustedFolder, name: str) -> AbstractContextManager[BinaryIO]:
        names.append(name)
        return reader(folder, name)

    monkeypatch.setattr(UntrustedFolder, "reader", counted)
    return names


def test_files_that_this_process_wrote_are_not_read_again(
    written: tuple[Reference, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, path = written
    names = count_reads(monkeypatch)
    assert verify_reference(reference, path.parent) == path
    assert verify_reference({**reference, "path": str(path)}) == path
    assert names == []
    verify_reference(reference, path.parent, reread=True)
    assert sorted(names) == ["sub/config", "weights"]


def test_a_file_of_known_content_is_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = count_reads(monkeypatch)
    known = {"weights": hashlib.sha256(b"adapter").digest()}
    reference = store_folder(
        lambda made: (made / "weights").write_text("adapter"), tmp_path, "adapter", known
    )
    assert names == []
    assert folder_digest(tmp_path / reference["path"]) == reference["sha256"]


def in_place(path: Path) -> None:
    with (path / "weights").open("r+") as file:
        file.write("W")


def by_another(path: Path) -> None:
    (path / "new").write_text("Weights")
    (path / "new").replace(path / "weights")


CHANGES: Mapping[str, Callable[[Path], object]] = {
    "in place": in_place,
    "by another": by_another,
    "below": lambda path: (path / "sub" / "config").write_text("CONFIG"),
    "added": lambda path: (path / "more").write_text(""),
    "removed": lambda path: (path / "weights").unlink(),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_change_of_written_files_is_noticed(how: str, written: tuple[Reference, Path]) -> None:
    reference, path = written
    CHANGES[how](path)
    with pytest.raises(ConfigurationError, match="was changed"):
        verify_reference(reference, path.parent)


def test_a_link_in_a_written_folder_is_refused(
    written: tuple[Reference, Path], tmp_path: Path
) -> None:
    reference, path = written
    (path / "weights").rename(tmp_path / "elsewhere")
    (path / "weights").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="symbolic link"):
        verify_reference(reference, path.parent)


def test_a_folder_that_was_there_before_is_read_and_replaced_if_damaged(
    written: tuple[Reference, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal content is stored once, but a loss of power may have left the name with a part of it."""
    reference, path = written
    monkeypatch.setattr(artifacts, "WRITTEN", WrittenFolders())  # as in another process
    in_place(path)
    with pytest.raises(ConfigurationError, match="was changed"):
        verify_reference(reference, path.parent)
    assert store_folder(write, path.parent, "adapter") == reference
    sync(verify_reference(reference, path.parent))
