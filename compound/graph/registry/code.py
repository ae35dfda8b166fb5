"""Python code that a YAML file names: ``module:name``, found on ``sys.path`` or beside the file.

Importing runs the code: a file that names code is as trusted as Python, and `load` can reject such
files.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from compound.core.errors import CompoundError, DeclarationError, suggest_name
from compound.graph.registry.user_code import place_of_error

_LOCK = threading.RLock()
# Modules that came from the folder of a YAML file. Two folders may each have a `parts.py`: the
# modules of the other folder are forgotten before an import, so that neither file gets the other's
# code.
_BESIDE: dict[str, Path] = {}


def find_code(spec: str, folder: Path) -> Any:  # noqa: ANN401 - whatever the user's module holds
    """Return what ``module:name`` stands for.

    >>> find_code("math:sqrt", Path())(9.0)
    3.0
    """
    module_name, _, path = spec.partition(":")
    found: Any = _import(module_name, folder.resolve())
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            public = [known for known in dir(found) if not known.startswith("_")]
            raise DeclarationError(
                f"{module_name} has no {name!r}", hint=suggest_name(name, public)
            ) from None
        except Exception as error:  # noqa: BLE001 - a module's own __getattr__ may raise anything
            raise _failed(module_name, error) from None
    return found


def importable_problem(place: str, folder: Path) -> str:
    """Return why the module of ``module:name`` cannot be found, or ``""``; nothing is imported.

    >>> importable_problem("json:loads", Path()), importable_problem("no_such_module:f", Path())
    ('', "no module 'no_such_module' beside the file or on sys.path")
    """
    top = place.partition(":")[0].partition(".")[0]
    path = [str(folder), *sys.path]
    if top in sys.builtin_module_names or PathFinder.find_spec(top, path) is not None:
        return ""
    return f"no module {top!r} beside the file or on sys.path"


def place_of(found: object) -> str | None:
    """Return ``module:name`` of a function or class, or ``None`` where it cannot be found by it.

    >>> import math
    >>> place_of(math.sqrt)
    'math:sqrt'
    """
    module, path = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if (
        not isinstance(module, str)
        or not isinstance(path, str)
        or module == "__main__"
        or "<" in path
    ):
        return None
    try:
        here: object = importlib.import_module(module)
        for part in path.split("."):
            here = getattr(here, part)
    except (ImportError, AttributeError):
        return None
    # a function may be inside a component with its name, which `compound.component` made
    return f"{module}:{path}" if here == found or getattr(here, "function", None) is found else None


def sources_beside(folder: Path) -> dict[str, Path]:
    """Return the source files of the modules that were imported from a folder, by module."""
    home = folder.resolve()
    with _LOCK:
        names = sorted(name for name, where in _BESIDE.items() if where == home)
        files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    return {name: Path(file) for name, file in files.items() if file and os.path.isfile(file)}


@functools.cache
def package_digest() -> str:
    """Return a digest of the source files of this package."""
    root = Path(__file__).parents[2]
    found = hashlib.sha256()
    # in a checkout, packages are links
    for folder, folders, names in os.walk(root, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder, name)
                found.update(f"{path.relative_to(root)}\n{file_digest(path)}\n".encode())
    return found.hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Return a digest of a source file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _import(name: str, folder: Path) -> ModuleType:
    with _LOCK, _searching(folder):
        _check_not_hidden(name.partition(".")[0], folder)
        before = set(sys.modules)
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise _failed(name, error) from None
            beside = [path.stem for path in folder.glob("*.py") if path.stem.isidentifier()]
            raise DeclarationError(
                f"no module {name!r}",
                hint=f"looked beside the file and on sys.path; {suggest_name(name, beside)}",
            ) from None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything
            raise _failed(name, error) from None
        finally:
            tops = {
                top
                for top in set(sys.modules) - before
                if "." not in top and _only_beside(top, folder)
            }
            for module in set(sys.modules) - before:
                if module.partition(".")[0] in tops | set(_BESIDE):
                    _BESIDE[module] = folder


def _failed(name: str, error: BaseException) -> DeclarationError:
    if isinstance(error, CompoundError):  # of a decorator, for example, which has named the place
        return DeclarationError(f"importing {name!r} failed: {error.message}", hint=error.hint)
    return DeclarationError(
        f"importing {name!r} failed: {message_of(error)}{place_of_error(error)}",
        hint=import_hint(error),
    )


def message_of(error: BaseException) -> str:
    """Return an error as text; for a syntax error without its place, which `place_of_error` returns."""
    what = error.msg if isinstance(error, SyntaxError) else error
    return f"{type(error).__name__}: {what}"


def import_hint(error: BaseException) -> str:
    """Return how to fix an import that failed; ``""`` where the error says it."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install it where compound is installed, or correct the name {error.name!r}"
    return ""


@contextmanager
def _searching(folder: Path) -> Iterator[None]:
    """Look in a folder first, as ``python file.py`` does, and leave ``sys.path`` as it was."""
    for name in [name for name, home in _BESIDE.items() if home != folder]:
        sys.modules.pop(name, None)
        del _BESIDE[name]
    importlib.invalidate_caches()
    path = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = path


def _check_not_hidden(top: str, folder: Path) -> None:
    """Reject a module beside the file when another one of its name is already imported."""
    file = getattr(sys.modules.get(top), "__file__", None)
    here = [
        path
        for path in (folder / f"{top}.py", folder / top / "__init__.py")
        if os.path.isfile(path)
    ]
    if file and here and not Path(file).resolve().is_relative_to(folder):
        raise DeclarationError(
            f"{here[0]} cannot be imported: {file} has the same name and is already imported",
            hint="rename the first file",
        )


def _only_beside(top: str, folder: Path) -> bool:
    """Return whether a new module comes from the folder, and Python alone would not have found it."""
    file = getattr(sys.modules.get(top), "__file__", None)
    inside = isinstance(file, str) and Path(file).resolve().is_relative_to(folder)
    return inside and PathFinder.find_spec(top, sys.path[1:]) is None
