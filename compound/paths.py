"""Where things are kept that belong to the user rather than to a run."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``$COMPOUND_CACHE``, or ``~/.cache/compound``."""
    chosen = os.environ.get("COMPOUND_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "compound"
