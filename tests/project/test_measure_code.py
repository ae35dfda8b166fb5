"""The script that measures the package, on a package of two modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "measure_code.py"
FILES = {
    "pyproject.toml": '[tool.importlinter]\ncontracts = [{containers = ["compound"], layers = ["b", "a | c"]}]\n',
    "README.md": "two words\n",
    "docs/guide.md": "three more words\n",
    "docs/adr/0001.md": "not counted\n",
    "compound/__init__.py": '"""Doc."""\n',
    "compound/__init__.pyi": "from compound.a import A as A\nfrom compound.b import B\n\nC = B\n",
    "compound/empty.py": '"""Doc."""\n',
    "compound/a.py": '"""Doc."""\n\n\nclass OwnSettings(Settings):\n    x: int\n    y: int = 1\n',
    "optimizers/b.py": "from compound.a import A\n\n\n@app.command()\ndef run():\n    return 1  # one\n\n\nclass A: ...\n",
    "rewards/c.py": "class A: ...\n",
    "tests/test_a.py": "x = 1\ny = 2\n",
}
FOUND = {
    "lines": 1 + 1 + 6 + 9 + 1,
    "tokens": 0 + 0 + 14 + 23 + 4,
    "modules": 3,
    "layers": 2,
    "top-level names": 0 + 1 + 2 + 1,
    "public names": 2,
    "settings": 2,
    "commands": 1,
    "repeated class names": 1,
    "repeated file names": 0,
    "imports per module": 0.3,
    "lines of tests": 2,
    "words of the user's documentation": 5,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "compound" / "optimizers").symlink_to(tmp_path / "optimizers")
    return tmp_path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_measures_are_those_of_the_definitions(project: Path) -> None:
    lines = [
        line.split("  of ")[0].rsplit(maxsplit=1)
        for line in run(project).stdout.splitlines()
        if " exceed " not in line
    ]
    found = {name.strip(): float(value.replace(",", "")) for name, value in lines}
    assert {name: found[name] for name in FOUND} == FOUND


@pytest.mark.slow
def test_what_exceeds_its_budget_fails(project: Path) -> None:
    ran = run(project, "--check")
    assert ran.returncode == 1
    assert ran.stdout.startswith("repeated class names: 1 exceed the budget of 0")
    (project / "rewards" / "c.py").unlink()
    assert run(project, "--check").returncode == 0
    (project / "compound" / "a.py").write_text("x = 1\n" * 1_000_000)
    assert run(project, "--check").stdout.startswith("lines: 1,000,011 exceed the budget of ")
