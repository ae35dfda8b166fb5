"""Stored folders: what is deleted of them, and what is not, whatever a file says."""

from __future__ import annotations

from pathlib import Path

import pytest

from compound.storage.artifacts import discard, store_folder


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
