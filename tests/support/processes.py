"""Python in another process, on the modules of this repository."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]
EMPTY: Mapping[str, str] = MappingProxyType({})


def python(
    *arguments: str, cwd: Path | None = None, env: Mapping[str, str] = EMPTY
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments, such as ``-c`` and code, and return what it printed."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
    )
