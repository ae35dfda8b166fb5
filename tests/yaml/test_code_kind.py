"""The kind ``code`` in YAML: its settings, its errors, and the file that is written again."""

from __future__ import annotations

from pathlib import Path

import pytest

from compound.components.code import CodeRunner
from compound.core.errors import SpecError
from compound.core.security.sandbox.limits import SandboxLimits
from compound.yaml import load

FILE = """
system: programs
inputs: {program: str, text: str}
components:
  runner:
    code: %s
    in: {code: $program, stdin: $text}
outputs: {answer: $runner.stdout, ok: $runner.ok}
"""


def written(folder: Path, settings: str) -> Path:
    path = folder / "f.yaml"
    path.write_text(FILE % settings, encoding="utf-8")
    return path


def test_limits_are_read(tmp_path: Path) -> None:
    program = load(written(tmp_path, "{wall: 5, memory: 256, reproducible: true}"))
    runner = program.system.components["runner"]
    assert isinstance(runner, CodeRunner)
    assert runner.limits == SandboxLimits(wall=5.0, memory=256)
    assert runner.deterministic({})
    assert runner.reproducible


def test_other_limits_are_another_version() -> None:
    assert CodeRunner("a").version != CodeRunner("a", SandboxLimits(wall=5.0)).version
    assert not CodeRunner("a").deterministic({})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{wal: 5}", "f.yaml:6:12: components.runner.code.wal: unknown key; did you mean 'wall'?"),
        ("{wall: 0}", "components.runner.code.wall: "),
        ("{memory: 0.5}", "components.runner.code.memory: "),
        ("{wall: .inf}", "components.runner.code.wall: a number must be finite"),
    ],
)
def test_wrong_limits_are_told_with_their_line(tmp_path: Path, settings: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        load(written(tmp_path, settings))
    assert message in str(error.value)


def test_without_imports_no_program_runs(tmp_path: Path) -> None:
    path = written(tmp_path, "{}")
    with pytest.raises(SpecError, match="components.runner.code: .*, and imports are not allowed"):
        load(path, allow_import=False)
