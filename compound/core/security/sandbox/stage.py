"""The last step before a sandboxed program: apply the limits, drop privileges, write the files, and start it.

The source of this module runs as ``python -I -S -c SOURCE PAYLOAD STATUS`` inside the namespaces;
it must import only the standard library. PAYLOAD is a descriptor of a JSON document (`Payload`),
STATUS one that receives ``ready`` when everything is in place, or a message. The program inherits
neither.

With bubblewrap, the view of the file system and the filter are in place already. Otherwise
(`Payload.view`) this module builds the view with the mount system call, and loads the filter.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import socket
import sys
from typing import NoReturn, TypedDict

RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18  # MS_*
DETACH = 2  # MNT_DETACH
SET_DUMPABLE, CAPBSET_DROP, SET_SECCOMP, NO_NEW_PRIVS = 4, 24, 22, 38  # PR_*
CAPABILITY_VERSION = 0x20080522
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR = 442
HERE = -100  # AT_FDCWD
RECURSIVE = 0x8000  # AT_RECURSIVE
READY = b"ready"
FILES = "files: "  # start of the message when they cannot be written


class Links(TypedDict):
    """The file system that a program sees, where bubblewrap does not build it."""

    paths: list[str]
    links: dict[str, str]
    devices: list[str]
    writable: list[str]
    sealed: list[str]
    disk: int
    inodes: int


class Payload(TypedDict):
    """What to run, and how; sizes in bytes, times in seconds."""

    argv: list[str]
    files: dict[str, str]
    folder: str
    uid: int | None
    rlimits: dict[str, list[int]]
    view: Links | None
    filter: int | None


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "namespace")]


libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise `OSError` if a call of the C library failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, first: int = 0, second: int = 0) -> None:
    """Change an attribute of this process."""
    none = ctypes.c_ulong(0)
    found = libc.prctl(option, ctypes.c_ulong(first), ctypes.c_ulong(second), none, none)
    check(found, f"prctl {option}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount a file system, or bind a path to another one."""
    given = source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
    check(libc.mount(*given), f"mounting {target}")


def bind(source: str, target: str) -> None:
    """Make a path and all mounts below it visible at another one: read-only, no devices, no setuid."""
    mount(source, target, "", BIND | REC)
    attributes = _MountAttributes(RDONLY | NOSUID | NODEV, 0, 0, 0)
    given = ctypes.byref(attributes), ctypes.sizeof(attributes)
    found = libc.syscall(MOUNT_SETATTR, HERE, target.encode(), RECURSIVE, *given)
    check(found, f"protecting {target}")


def create(path: str, folder: bool) -> None:
    """Create a mount point."""
    os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
    if not folder:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))


def enter(view: Links) -> None:
    """Replace the root of the mount namespace by a view of it."""
    if platform.machine() not in PIVOT_ROOT:
        raise OSError(f"not supported on {platform.machine()}")
    pivot = PIVOT_ROOT[platform.machine()]
    os.umask(0o022)
    mount("", "/", "", REC | PRIVATE)
    mount("none", "/tmp", "tmpfs", NOSUID | NODEV, "mode=755,size=1m")  # nosec B108  # private
    os.chdir("/tmp")  # nosec B108  # private
    os.mkdir("old")
    os.mkdir("new")
    check(libc.syscall(pivot, b".", b"old"), "changing the root")
    os.chdir("/")
    mount("/new", "/new", "", BIND)
    for place in view["writable"]:
        create("/new" + place, True)
        options = f"mode=1777,size={view['disk']},nr_inodes={view['inodes']}"
        mount("none", "/new" + place, "tmpfs", NOSUID | NODEV, options)
    for place in view["sealed"]:
        create("/new" + place, True)
        mount("none", "/new" + place, "tmpfs", NOSUID | NODEV, "mode=755,size=1m")
    for path in view["paths"]:
        create("/new" + path, os.path.isdir("/old" + path))
        bind("/old" + path, "/new" + path)
    for path, target in view["links"].items():
        create("/new" + os.path.dirname(path), True)
        os.symlink(target, "/new" + path)
    for name in view["devices"]:
        create("/new/dev/" + name, False)
        mount(f"/old/dev/{name}", f"/new/dev/{name}", "", BIND)
    for place in (*view["sealed"], ""):
        mount("", "/new" + place, "", REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    check(libc.umount2(b"/old", DETACH), "leaving the old root")
    os.chdir("/new")
    check(libc.syscall(pivot, b".", b"."), "changing the root")
    check(libc.umount2(b".", DETACH), "leaving the old root")
    os.chdir("/")
    socket.sethostname("sandbox")


def drop_privileges(uid: int | None) -> None:
    """Give up all capabilities for good, and change the user if one is given."""
    prctl(NO_NEW_PRIVS, 1)
    for capability in range(64):  # fails above the last one, or where bubblewrap has done it
        libc.prctl(CAPBSET_DROP, ctypes.c_ulong(capability), ctypes.c_ulong(0), ctypes.c_ulong(0))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(header, none), "dropping capabilities")


def load_filter(descriptor: int) -> None:
    """Load a compiled seccomp filter into this process."""
    with os.fdopen(descriptor, "rb") as file:
        code = file.read()
    program = _Program(len(code) // 8, ctypes.cast(ctypes.c_char_p(code), ctypes.c_void_p))
    prctl(SET_SECCOMP, 2, ctypes.addressof(program))


def write_files(files: dict[str, str], status: int) -> None:
    """Write the files of the program into its working directory."""
    try:
        for name, text in files.items():
            os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
            with open(name, "w", encoding="utf-8", newline="") as file:
                file.write(text)
    except OSError as error:
        os.write(status, f"{FILES}{error}".encode())
        os._exit(125)


def start(payload: Payload, status: int) -> NoReturn:
    """Replace this process by the program."""
    if payload["view"] is not None or payload["uid"] is not None:
        drop_privileges(payload["uid"])
    os.umask(0o077)
    os.mkdir(payload["folder"])
    os.chdir(payload["folder"])
    write_files(payload["files"], status)
    for name, (soft, hard) in payload["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (soft, hard))
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP) and number not in range(32, 34):
            signal.signal(number, signal.SIG_DFL)
    if payload["filter"] is not None:
        load_filter(payload["filter"])
    os.set_inheritable(status, False)
    os.closerange(3, status)
    os.closerange(status + 1, 1 << 16)
    os.write(status, READY)
    os.execv(payload["argv"][0], payload["argv"])


def supervise(child: int) -> int:
    """Wait for the program as process 1 of its namespace; the others die with this process."""
    prctl(SET_DUMPABLE, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while True:
        found, state = os.wait()
        if found == child:
            return os.WEXITSTATUS(state) if os.WIFEXITED(state) else 128 + os.WTERMSIG(state)


def main() -> None:
    """Run the program of the payload."""
    source, status = int(sys.argv[1]), int(sys.argv[2])
    try:
        with os.fdopen(source, "rb") as file:
            payload: Payload = json.load(file)
        if payload["view"] is None:
            start(payload, status)
        enter(payload["view"])
        child = os.fork()
        if child == 0:
            os.setsid()
            start(payload, status)
        os.close(status)
        os.close(0)
        os._exit(supervise(child))
    except BaseException as error:  # noqa: BLE001 - nothing must run after a failure
        os.write(status, f"{type(error).__name__}: {error}".encode())
        os._exit(125)


if __name__ == "__main__":
    main()
