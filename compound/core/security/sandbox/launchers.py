"""The two ways to start a sandbox: bubblewrap, or the namespaces of util-linux with the mounts of `stage`."""

from __future__ import annotations

import functools
import inspect
import os
import secrets
import shutil
import site
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from compound.core.security.sandbox import stage
from compound.core.security.sandbox.limits import INODES, MIB, SandboxLimits

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

    None for other users: their programs run as themselves, in a user namespace without
    capabilities.
    """
    return _FIRST_UID + secrets.randbelow(2**27) if is_full_root() else None


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
    def command(self, limits: SandboxLimits, filter_: int, *stage_: int) -> Sequence[str]:
        """Return the command that runs the stage in new namespaces.

        ``filter_`` and the arguments of the stage, payload and status, are inherited descriptors.
        """


def _stage_command(descriptors: Sequence[int]) -> list[str]:
    python = [python_view().python, "-I", "-S", "-c", _stage_source()]
    return [*python, *map(str, descriptors)]


@functools.cache
def _stage_source() -> str:
    return inspect.getsource(stage)


class Bubblewrap(Launcher):
    """Bubblewrap builds the view and loads the filter."""

    name: LauncherName = "bubblewrap"
    programs = ("bwrap",)
    package = "bubblewrap"

    def command(self, limits: SandboxLimits, filter_: int, *stage_: int) -> Sequence[str]:
        """Return the command that runs the stage in new namespaces."""
        view, disk = python_view(), str(limits.disk * MIB)
        spaces = [f"--unshare-{space}" for space in ("ipc", "pid", "net", "uts", "cgroup-try")]
        if is_full_root():
            user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            user = ["--unshare-user", "--disable-userns"]
        # bubblewrap would create a folder of its user only
        shown = ["--perms", "0755", "--dir", "/dev"]
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
        life = ["--hostname", "sandbox", "--die-with-parent", "--new-session"]
        end = ["--chdir", "/", "--seccomp", str(filter_), "--", *_stage_command(stage_)]
        return [_found("bwrap"), *spaces, *user, *life, *shown, *end]


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

    def command(self, limits: SandboxLimits, filter_: int, *stage_: int) -> Sequence[str]:
        """Return the command that runs the stage in new namespaces."""
        user = [] if is_full_root() else ["--user", "--map-root-user"]
        spaces = ["--mount", "--net", "--pid", "--ipc", "--uts", "--cgroup"]
        start = [_found("setpriv"), "--pdeathsig", "KILL", _found("unshare"), *user, *spaces]
        return [*start, "--fork", "--kill-child=KILL", "--", *_stage_command(stage_)]


def _found(program: str) -> str:
    return shutil.which(program) or program


LAUNCHERS: tuple[Launcher, ...] = (Bubblewrap(), Namespaces())
"""The launchers, the preferred one first."""


_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib")
_DATA = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/usr/share/zoneinfo")
WRITABLE = ("/tmp", "/dev/shm")  # nosec B108  # private file systems, empty at the start
DEVICES = ("null", "zero", "full", "random", "urandom")


@dataclass(frozen=True)
class View:
    """Paths of this machine that are visible, read-only, at the same place in the sandbox.

    Attributes:
        paths: files and folders, none inside another.
        links: symbolic links, by path, with their targets; no parent of a link is a link.
        python: the interpreter's command.
    """

    paths: tuple[str, ...]
    links: dict[str, str]
    python: str

    def parents(self) -> list[str]:
        """Return the folders that contain the paths and links, outermost first."""
        found = {
            str(parent) for path in (*self.paths, *self.links) for parent in Path(path).parents
        }
        return sorted(found - {"/"})

    def sealed(self) -> list[str]:
        """Return the folders directly below a writable one that contain paths or links.

        Each needs a read-only mount of its own, or a program could replace what it contains.
        """
        return [
            folder
            for folder in self.parents()
            if os.path.dirname(folder) in WRITABLE and folder not in WRITABLE
        ]


@functools.cache
def python_view() -> View:
    """Return what this interpreter needs: its standard library, its site-packages, and shared libraries.

    In a virtual environment only its ``pyvenv.cfg`` and its site-packages are visible. Programs of
    the system, such as a shell, are not.
    """
    home = Path(sys.base_prefix)
    wanted = [*_LIBRARIES, *_DATA, sys.executable, str(home / "lib"), str(home / "lib64")]
    wanted += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    wanted += site.getsitepackages()
    if sys.prefix != sys.base_prefix:
        wanted.append(str(Path(sys.prefix, "pyvenv.cfg")))
    links: dict[str, str] = {}
    existing = {_resolve(path, links) for path in wanted if os.path.exists(path)}
    paths = [
        path for path in sorted(existing) if not any(_is_below(path, other) for other in existing)
    ]
    outside = {
        path: to for path, to in links.items() if not any(_is_below(path, shown) for shown in paths)
    }
    return View(tuple(paths), outside, sys.executable)


def _resolve(path: str, links: dict[str, str]) -> str:
    """Return a path without symbolic links, and add those that lead to it."""
    found, rest = "/", [part for part in reversed(path.split("/")) if part]
    while rest:
        part = rest.pop()
        found = os.path.normpath(os.path.join(found, part))
        if os.path.islink(found):
            folder, target = os.path.dirname(found), os.readlink(found)
            if (
                folder in WRITABLE and rest
            ):  # a program could replace this link, but none in a sealed folder
                links[os.path.join(found, rest[-1])] = os.path.join(folder, target, rest[-1])
            else:
                links[found] = target
            rest += [piece for piece in reversed(target.split("/")) if piece]
            found = "/" if target.startswith("/") else folder
    return found


def _is_below(path: str, folder: str) -> bool:
    return path != folder and path.startswith(folder.rstrip("/") + "/")
