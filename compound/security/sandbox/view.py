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
DEVICES = ("null", "zero", "full", "random", "urandom")


@dataclass(frozen=True)
class View:
    """Paths of this machine that are visible, read-only, at the same place in the sandbox.

    Attributes:
        paths: files and folders, none inside another; parents of symbolic links come first.
        links: symbolic links, by path, with their targets.
        python: the interpreter's command.
    """

    paths: tuple[str, ...]
    links: dict[str, str]
    python: str

    def parents(self) -> list[str]:
        """Return the folders that contain the paths and links, outermost first."""
        found = {str(parent) for path in (*self.paths, *self.links) for parent in Path(path).parents}
        return sorted(found - {"/"})


@functools.cache
def python_view() -> View:
    """Return what this interpreter needs: its standard library, its site-packages, and shared libraries.

    In a virtual environment only its ``pyvenv.cfg`` and its site-packages are visible. Programs of the
    system, such as a shell, are not.
    """
    executable = sys.executable
    interpreter = os.path.realpath(executable)
    home = Path(sys.base_prefix)
    wanted = [*_LIBRARIES, *_DATA, interpreter, str(home / "lib"), str(home / "lib64")]
    wanted += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    wanted += site.getsitepackages()
    if sys.prefix != sys.base_prefix:
        wanted.append(str(Path(sys.prefix, "pyvenv.cfg")))
    links = {path: os.readlink(path) for path in wanted if os.path.islink(path)}
    if executable != interpreter:
        links[executable] = interpreter
    existing = {os.path.realpath(path) for path in wanted if os.path.exists(path)}
    paths = [path for path in sorted(existing) if not any(_is_below(path, other) for other in existing)]
    outside = {path: to for path, to in links.items() if not any(_is_below(path, shown) for shown in paths)}
    return View(tuple(paths), outside, executable)


def _is_below(path: str, folder: str) -> bool:
    return path != folder and path.startswith(folder.rstrip("/") + "/")
