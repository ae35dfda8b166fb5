"""The context in which a file is built: its location, permitted imports, and known models."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeVar

from compound.components.engines.credentials import is_model_name
from compound.errors import CompoundError, DeclarationError, nearest
from compound.registry.code import find_code
from compound.registry.engines import EMBEDDED
from compound.security.untrusted import UntrustedFolder
from compound.spec.yaml.document import Address, Document, dotted, shown
from compound.storage.artifacts import Reference, located

Made = TypeVar("Made")
_ENGINES = ("local/", "vllm/")  # what the name of a model's engine puts before a folder or hub id
OUTSIDE = "leads out of the file's folder, and --no-import refuses that"


@dataclass(frozen=True)
class Context:
    """What every entry of a file is made with."""

    document: Document
    folder: Path
    allow_import: bool
    models: Collection[str]
    trusted: Collection[str] = ()
    """The servers and keys that the caller trusts; see `compound.security.trust`."""
    names: dict[str, Address] = field(default_factory=dict)
    """Where each component's name was first seen: it must be the only one, bodies included."""
    without_model: dict[str, Address] = field(default_factory=dict)
    """LLM components that neither name a model nor are fed one."""
    outside: set[str] = field(default_factory=set)
    """What the command line names outside of the file's folder."""

    def code(self, spec: str, address: Address) -> object:
        """Return the Python object an entry names, or None after noting why there is none."""
        if not self.allow_import:
            self.document.report(address, f"names Python code ({spec}), and imports are not allowed")
            return None
        try:
            return find_code(spec, self.folder)
        except DeclarationError as error:
            self.document.report_error(address, error)
            return None

    def function(self, spec: str, address: Address) -> Callable[..., object] | None:
        """Return the function an entry names, or None after noting why there is none."""
        found = self.code(spec, address)
        if callable(found):
            return found
        if found is not None:
            self.document.report(address, f"{spec} is not a function")
        return None

    def attempt(self, address: Address, make: Callable[[], Made], who: str = "") -> Made | None:
        """Return what ``make`` returns, or None after noting why it failed; ``who`` names code it runs."""
        try:
            return make()
        except CompoundError as error:
            self.document.report_error(address, error)
        except Exception as error:
            if not who:
                raise
            self.document.report(address, f"{who} failed: {type(error).__name__}: {error}")
        return None

    def place(self, given: str, address: Address, *, key: bool = False) -> tuple[Path, Path | None]:
        """Return a path of the file, and the folder below which no link is followed on the way to it, if any.

        Paths count from the file's folder, and no link in it is followed: whoever prepared the folder could
        have a secret read by it. A path that leads out of the folder is in plain sight, and may lead through
        links; without imports only the command line may name one.
        """
        if not self.may_lead_to(given, address, key=key):
            return self.folder / given, None
        root = os.path.abspath(self.folder)
        inside = os.path.relpath(os.path.normpath(os.path.join(root, given)), root)
        if inside == os.curdir:
            return self.folder, self.folder
        if leads_out(inside):
            return self.folder / given, None
        try:
            UntrustedFolder(self.folder, error=DeclarationError).kind(inside)
        except DeclarationError as error:
            target, hint = os.path.realpath(self.folder / inside), error.hint
            if not key and target != os.path.join(os.path.realpath(self.folder), inside):
                hint = f"if you trust what it leads to, name that: --set {dotted(address)}={target}"
            self.document.report(address, error.message, hint, key=key)
        except ValueError:
            self.document.report(address, "is no path that a file can have", key=key)
        return self.folder / inside, self.folder

    def stored(self, value: Reference, address: Address) -> Reference:
        """Return a reference to a stored folder with an absolute path; report a path that is refused."""
        self.place(value["path"], (*address, "path"))
        return located(value, self.folder)

    def may_lead_to(self, given: str, address: Address, *, key: bool = False) -> bool:
        """Return whether a path or model may be read; note that it may not, without imports, outside."""
        if self.allow_import or not leads_out(given):
            return True
        if self.document.is_override(address):
            self.outside.add(given)
            return True
        again = f"if you trust it, say so: --set {dotted(address)}={given}"
        hint = "copy it beside the file, and name it there" if key else again
        self.document.report(address, f"{shown(given)} {OUTSIDE}", hint, key=key)
        return False

    def check_models(self, names: Iterable[object], address: Address) -> None:
        """Note model names that no engine answers to."""
        for name in names:
            if isinstance(name, str) and name not in self.models and not self.may_lead_to(name, address):
                continue
            if not isinstance(name, str) or not self._is_model(name):
                close = nearest(str(name), [*self.models, *EMBEDDED])
                hint = close if close.endswith("?") else f"{close}, a folder, local/HUB-ID, provider/model"
                self.document.report(address, f"no engine for the model {shown(name)}", hint)

    def _is_model(self, name: str) -> bool:
        if name in self.models or name in EMBEDDED or os.path.isdir(name):
            return True
        return "/" in name and (name.startswith("local/") or is_model_name(name))


def leads_out(path: str) -> bool:
    """Return whether a path, or the folder of a model, is absolute or may lead above where it starts.

    >>> leads_out("data/qa"), leads_out("../qa"), leads_out("/qa"), leads_out("local//qa"), leads_out("a/b")
    (False, True, True, True, False)
    """
    prefix = next((name for name in _ENGINES if path.startswith(name)), "")
    pure = PurePosixPath(path.removeprefix(prefix))
    return pure.is_absolute() or ".." in pure.parts
