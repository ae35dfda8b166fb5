"""The part of the file system that a sandboxed program can read: what Python needs, and nothing else."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

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
        found = {str(parent) for path in (*self.paths, *self.links) for parent in Path(path).parents}
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

    In a virtual environment only its ``pyvenv.cfg`` and its site-packages are visible. Programs of the
    system, such as a shell, are not.
    """
    home = Path(sys.base_prefix)
    wanted = [*_LIBRARIES, *_DATA, sys.executable, str(home / "lib"), str(home / "lib64")]
    wanted += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    wanted += site.getsitepackages()
    if sys.prefix != sys.base_prefix:
        wanted.append(str(Path(sys.prefix, "pyvenv.cfg")))
    links: dict[str, str] = {}
    existing = {_resolve(path, links) for path in wanted if os.path.exists(path)}
    paths = [path for path in sorted(existing) if not any(_is_below(path, other) for other in existing)]
    outside = {path: to for path, to in links.items() if not any(_is_below(path, shown) for shown in paths)}
    return View(tuple(paths), outside, sys.executable)


def _resolve(path: str, links: dict[str, str]) -> str:
    """Return a path without symbolic links, and add those that lead to it."""
    found, rest = "/", [part for part in reversed(path.split("/")) if part]
    while rest:
        part = rest.pop()
        found = os.path.normpath(os.path.join(found, part))
        if os.path.islink(found):
            folder, target = os.path.dirname(found), os.readlink(found)
            if folder in WRITABLE and rest:  # a program could replace this link, but none in a sealed folder
                links[os.path.join(found, rest[-1])] = os.path.join(folder, target, rest[-1])
            else:
                links[found] = target
            rest += [piece for piece in reversed(target.split("/")) if piece]
            found = "/" if target.startswith("/") else folder
    return found


def _is_below(path: str, folder: str) -> bool:
    return path != folder and path.startswith(folder.rstrip("/") + "/")
