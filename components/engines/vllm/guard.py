"""Run a command for as long as somebody holds our standard input open: ``python guard.py COMMAND …``.

Whoever starts a server through this script keeps the other end of its standard input. However that process
ends, even by ``kill -9``, the system closes the pipe, and the command is ended with everything it started.
Run as a script; standard library only. POSIX.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

GRACE = 10.0  # seconds for the command to end by itself once asked


def main(command: Sequence[str]) -> int:
    """Run the command in a process group of its own, and return its exit code."""
    news, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the byte on the pipe is what counts
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    asked = False
    while child.poll() is None and not asked:
        ready, _, _ = select.select([0, news], [], [])
        asked = 0 in ready or (news in ready and bool(set(os.read(news, 64)) - {signal.SIGCHLD}))
    if child.poll() is None:
        _signal(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE)
    _signal(child.pid, signal.SIGKILL)  # what is left of the group, also when the command ended by itself
    return child.wait()


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)
