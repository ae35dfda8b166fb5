"""The two ways to start a sandbox: bubblewrap, or the namespaces of util-linux with the mounts of `stage`."""

from __future__ import annotations

import functools
import inspect
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compound.security.sandbox import stage
from compound.security.sandbox.limits import INODES, MIB, SandboxLimits
from compound.security.sandbox.view import DEVICES, WRITABLE, python_view

LauncherName = Literal["bubblewrap", "namespaces"]
_FULL_MAP = ["0", "0", "4294967295"]
_FIRST_UID = 2_000_000_000  # above the numbers that systems give to users and containers


@functools.cache
def is_full_root() -> bool:
    """Return whether this process is root and not itself inside a user namespace."""
    try:
        mapped = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
    except OSError:
        return False
    return os.geteuid() == 0 and mapped == _FULL_MAP


def unused_uid() -> int | None:
    """Return a random unused user for a program that root starts, which limits of processes exempt.

    None for other users: their programs run as themselves, in a user namespace without capabilities.
    """
    return _FIRST_UID + secrets.randbelow(2**27) if is_full_root() else None


@dataclass(frozen=True)
class Descriptors:
    """Descriptors that the stage or bubblewrap inherits: the payload, the status, the filter."""

    payload: int
    status: int
    filter: int


class Launcher(ABC):
    """One way to start a program in new namespaces."""

    name: LauncherName
    programs: tuple[str, ...]
    package: str

    def missing(self) -> str:
        """Return the names of the programs that are not installed."""
        return ", ".join(program for program in self.programs if shutil.which(program) is None)

    def view(self, limits: SandboxLimits) -> stage.Links | None:
        """Return the view that the stage builds, or None if the launcher does."""
        return None

    @abstractmethod
    def command(self, limits: SandboxLimits, inherited: Descriptors) -> Sequence[str]:
        """Return the command that runs the stage in new namespaces."""


def _stage_command(inherited: Descriptors) -> list[str]:
    python = [python_view().python, "-I", "-S", "-c", _stage_source()]
    return [*python, str(inherited.payload), str(inherited.status)]


@functools.cache
def _stage_source() -> str:
    return inspect.getsource(stage)


class Bubblewrap(Launcher):
    """Bubblewrap builds the view and loads the filter."""

    name: LauncherName = "bubblewrap"
    programs = ("bwrap",)
    package = "bubblewrap"

    def command(self, limits: SandboxLimits, inherited: Descriptors) -> Sequence[str]:
        """Return the command that runs the stage in new namespaces."""
        view, disk = python_view(), str(limits.disk * MIB)
        spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        if is_full_root():
            user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            user = ["--unshare-user", "--disable-userns"]
        shown = ["--perms", "0755", "--dir", "/dev"]  # bubblewrap would create a folder of its user only
        for place in WRITABLE:
            shown += ["--perms", "1777", "--size", disk, "--tmpfs", place]
        for path in view.parents():
            shown += ["--perms", "0755", "--tmpfs" if path in view.sealed() else "--dir", path]
        shown += [option for path in view.paths for option in ("--ro-bind", path, path)]
        shown += [option for path, to in view.links.items() for option in ("--symlink", to, path)]
        for name in DEVICES:
            shown += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
        for place in (*view.sealed(), "/"):
            shown += ["--remount-ro", place]
        return [
            _found("bwrap"), *spaces, *user, "--hostname", "sandbox", "--die-with-parent", "--new-session",
            *shown, "--chdir", "/", "--seccomp", str(inherited.filter), "--",
            *_stage_command(inherited),
        ]  # fmt: skip


class Namespaces(Launcher):
    """The programs ``unshare`` and ``setpriv`` create the namespaces; the stage does the rest."""

    name: LauncherName = "namespaces"
    programs = ("unshare", "setpriv")
    package = "util-linux"

    def view(self, limits: SandboxLimits) -> stage.Links:
        """Return the view that the stage builds."""
        seen = python_view()
        return {
            "paths": list(seen.paths),
            "links": seen.links,
            "devices": list(DEVICES),
            "writable": list(WRITABLE),
            "sealed": seen.sealed(),
            "disk": limits.disk * MIB,
            "inodes": INODES,
        }

    def command(self, limits: SandboxLimits, inherited: Descriptors) -> Sequence[str]:
        """Return the command that runs the stage in new namespaces."""
        user = [] if is_full_root() else ["--user", "--map-root-user"]
        spaces = ["--mount", "--net", "--pid", "--ipc", "--uts", "--cgroup"]
        return [
            _found("setpriv"), "--pdeathsig", "KILL",
            _found("unshare"), *user, *spaces, "--fork", "--kill-child=KILL", "--",
            *_stage_command(inherited),
        ]  # fmt: skip


def _found(program: str) -> str:
    return shutil.which(program) or program


LAUNCHERS: tuple[Launcher, ...] = (Bubblewrap(), Namespaces())
"""The launchers, the preferred one first."""
