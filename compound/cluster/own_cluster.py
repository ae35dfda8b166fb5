"""Find the Ray cluster that this user started or joined, for the address ``auto``."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

ADDRESS = "RAY_ADDRESS"  # the environment variable that Ray reads
FILE = Path("ray", "ray_current_cluster")  # written by `ray start`, below Ray's temporary folder
LONGEST = 300  # bytes of an address


def own_cluster() -> str | None:
    """Return the address of the cluster that the environment names, or that this user's ``ray start`` wrote.

    Ray's own ``auto`` would also take the cluster of any other user on the machine. Its answers could execute
    code in this process, so that a file must not lead to it.
    """
    if address := os.environ.get(ADDRESS, "").strip():
        return address
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    try:
        descriptor = os.open(Path(folder) / FILE, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return None
        return os.read(descriptor, LONGEST).decode("ascii", "replace").strip() or None
    finally:
        os.close(descriptor)
