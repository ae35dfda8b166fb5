"""Script that runs vLLM, with the standard library only.

``python guard.py COMMAND …`` runs a command until its standard input is closed. The process that
starts a server through this script holds the other end. When that process ends for any reason, even
``kill -9``, the system closes the pipe, and the script ends the command with all its child
processes. It requires POSIX.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

GRACE = 10.0  # seconds between SIGTERM and SIGKILL


def main(command: Sequence[str]) -> int:
    """Run the command in a new process group, and return its exit code."""
    # Signals write to a pipe, so that one `select` waits for them and for the standard input.
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # a handler is required for the byte to be written
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    stopping = False
    while child.poll() is None and not stopping:
        ready, _, _ = select.select([0, signals], [], [])
        stopping = 0 in ready or (
            signals in ready and bool(set(os.read(signals, 64)) - {signal.SIGCHLD})
        )
    if child.poll() is None:
        _signal(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
    _signal(child.pid, signal.SIGKILL)  # the rest of the group, even if the command ended by itself
    return child.wait()


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)
