"""A run directory or configuration of someone else is used without executing the code that its system names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import compound as cp

CODE = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\ndef trap(x: str) -> str:\n    return x\n"
PLAIN = """
system: qa
lm: openai/gpt-4o-mini
inputs: {question: str}
components:
  a: {llm: {prompt: {tune: First.}}, in: {question: $question}}
outputs: {answer: $a}
"""
NAMING_CODE = PLAIN.replace(
    "outputs: {answer: $a}",
    "  b: {function: {call: 'their_module:trap'}, in: {x: $a}, out: str}\noutputs: {answer: $b}",
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a folder with a configuration, and a system that names code beside it."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "system.yaml").write_text(PLAIN)
    cp.load_system(folder / "system.yaml").bind({"a.prompt": "Best."}).configuration.save(
        folder / "best.json"
    )
    (folder / "system.yaml").write_text(NAMING_CODE)
    (folder / "their_module.py").write_text(CODE)
    return folder


def test_exporting_a_configuration_executes_no_code_beside_it(run: Path, cli: Any) -> None:
    ran = cli("export", str(run / "best.json"), "--to", "messages")
    assert ran.code == 2
    assert not (run / "executed").exists()
    assert "names Python code" in ran.err
    assert "if you trust this file, add --system" in " ".join(ran.err.split())


def test_a_system_that_the_user_names_may_name_code(run: Path, cli: Any) -> None:
    ran = cli(
        "export", str(run / "best.json"), "--system", str(run / "system.yaml"), "--to", "messages"
    )
    assert ran.code == 0, ran.err
    assert (run / "executed").exists()


def test_the_system_beside_it_is_read_through_no_link(run: Path, cli: Any, tmp_path: Path) -> None:
    (tmp_path / "outside.yaml").write_text(PLAIN)
    (run / "system.yaml").unlink()
    (run / "system.yaml").symlink_to(tmp_path / "outside.yaml")
    ran = cli("export", str(run / "best.json"), "--to", "messages")
    assert ran.code == 2
    assert "symbolic link" in ran.err
