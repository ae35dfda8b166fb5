"""Chat templates of engines in files: given inline, or as a file beside the system's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from compound.core.errors import SpecError
from compound.yaml import loads

INLINE = "{% for turn in messages %}{{ turn.content }}{% endfor %}"
FILE = """
system: demo
lm: base
engines: {base: {transformers: {model: smollm2, chat_template: %s}}}
inputs: {question: str}
components:
  answerer: {llm: {prompt: Answer.}, in: {question: $question}}
outputs: {answer: $answerer}
"""


def template(folder: Path, given: str, *, imports: bool = True) -> object:
    program = loads(FILE % given, path=folder / "system.yaml", allow_import=imports)
    return vars(program.find_engine)["engines"]["base"][1]["chat_template"]


def test_a_template_is_given_inline(tmp_path: Path) -> None:
    assert template(tmp_path, f'"{INLINE}"') == INLINE


@pytest.mark.parametrize("imports", [True, False])
def test_a_template_is_read_from_a_file_beside_the_system(tmp_path: Path, imports: bool) -> None:
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "plain.jinja").write_text(INLINE)
    assert template(tmp_path, "chat/plain.jinja", imports=imports) == INLINE


def test_a_missing_file_is_named_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"base\.transformers\.chat_template: no .*'none\.jinja'"):
        template(tmp_path, "none.jinja")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match=r"'plain\.jinja' is not a text in UTF-8"):
        template(tmp_path, "plain.jinja")


def test_a_link_to_a_secret_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(INLINE)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "plain.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(SpecError, match=r"chat_template.*plain\.jinja.* link"):
        template(folder, "plain.jinja")


def test_a_file_outside_the_folder_needs_imports(tmp_path: Path) -> None:
    (tmp_path / "plain.jinja").write_text(INLINE)
    folder = tmp_path / "folder"
    folder.mkdir()
    assert template(folder, "../plain.jinja") == INLINE
    with pytest.raises(SpecError, match="outside the file's folder"):
        template(folder, "../plain.jinja", imports=False)
