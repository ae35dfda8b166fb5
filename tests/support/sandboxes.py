"""Skip tests where no sandbox works."""

from __future__ import annotations

import asyncio

import pytest

from compound.core.errors import CompoundError
from compound.core.security.sandbox.launchers import LauncherName
from compound.core.security.sandbox.sandbox import find_launcher


def require_sandbox(launcher: LauncherName | None = None) -> None:
    """Skip the test if a launcher, or every one, does not work on this machine."""
    try:
        asyncio.run(find_launcher(launcher))
    except CompoundError as error:
        pytest.skip(str(error))
