"""What every part of a file is built with: where it stands, what it may import, which models there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compound.components.engines.credentials import is_model_name
from compound.engines import EMBEDDED
from compound.errors import CompoundError, DeclarationError, nearest
from compound.spec.document import Address, Document, shown
from compound.spec.python_code import find_code


@dataclass(frozen=True)
class Context:
    """What every entry of a file is made with."""

    document: Document
    folder: Path
    allow_import: bool
    models: Collection[str]
    trusted: Collection[str] = ()
    """The servers and keys that the caller trusts; see `compound.trust`."""
    names: dict[str, Address] = field(default_factory=dict)
    """Where each component's name was first seen: it must be the only one, bodies included."""
    without_model: dict[str, Address] = field(default_factory=dict)
    """LLM components that neither name a model nor are fed one."""

    def code(self, spec: str, address: Address) -> Any:
        """Return the Python object an entry names, or None after noting why there is none."""
        if not self.allow_import:
            self.document.report(address, f"names Python code ({spec}), and imports are not allowed")
            return None
        try:
            return find_code(spec, self.folder)
        except DeclarationError as error:
            self.document.report_error(address, error)
            return None

    def function(self, spec: str, address: Address) -> Any:
        """Return the function an entry names, or None after noting why there is none."""
        found = self.code(spec, address)
        if found is not None and not callable(found):
            self.document.report(address, f"{spec} is not a function")
            return None
        return found

    def attempt(self, address: Address, make: Callable[[], Any], who: str = "") -> Any:
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

    def check_models(self, names: Iterable[object], address: Address) -> None:
        """Note model names that no engine answers to."""
        for name in names:
            if not isinstance(name, str) or not self._is_model(name):
                close = nearest(str(name), [*self.models, *EMBEDDED])
                hint = close if close.endswith("?") else f"{close}, a folder, local/HUB-ID, provider/model"
                self.document.report(address, f"no engine for the model {shown(name)}", hint)

    def _is_model(self, name: str) -> bool:
        if name in self.models or name in EMBEDDED or os.path.isdir(name):
            return True
        return "/" in name and (name.startswith("local/") or is_model_name(name))
