"""Context in which a file is built: its location, permitted imports, and known models."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from compound.core.errors import CompoundError, DeclarationError, suggest_name
from compound.core.security.trust import Trust, refusal, store_refusal
from compound.core.security.untrusted import UntrustedFolder
from compound.core.storage.artifacts import Reference, with_absolute_path
from compound.engines.credentials import is_model_name
from compound.graph.registry.code import find_code
from compound.graph.registry.engines import EMBEDDED
from compound.yaml.document import Address, Document, format_address, format_value

T = TypeVar("T")
_ENGINES = ("local/", "vllm/")  # engine prefixes of a model's folder or hub id
OUTSIDE = "is outside the file's folder, which --no-import does not allow"


@dataclass(frozen=True)
class FileContext:
    """Shared state for building the entries of a file."""

    document: Document
    folder: Path
    allow_import: bool
    models: Collection[str]
    trusted: Collection[str] = ()
    """Servers and keys that the caller trusts; see `compound.core.security.trust`."""
    names: dict[str, Address] = field(default_factory=dict)
    """First address of each component name; names must be unique across the file, including bodies."""
    without_model: dict[str, Address] = field(default_factory=dict)
    """LLM components with neither a model setting nor a connected model port."""
    sends: bool = True
    """Whether engines may send requests, for which servers and keys need consent."""
    reads: bool = False
    """Whether data and corpora must exist."""
    outside: set[str] = field(default_factory=set)
    """Paths and models outside the file's folder that the command line names."""

    def load_code(self, spec: str, address: Address) -> object:
        """Return the Python object that an entry names, or None after reporting why it cannot be loaded."""
        if not self.allow_import:
            self.document.report(
                address, f"names Python code ({spec}), and imports are not allowed"
            )
            return None
        try:
            return find_code(spec, self.folder)
        except DeclarationError as error:
            self.document.report_error(address, error)
            return None

    def load_function(self, spec: str, address: Address) -> Callable[..., object] | None:
        """Return the function that an entry names, or None after reporting why it cannot be loaded."""
        found = self.load_code(spec, address)
        if callable(found):
            return found
        if found is not None:
            self.document.report(address, f"{spec} is not a function")
        return None

    def check_trust(
        self,
        server: object,
        key: object,
        wrong: Address,
        place: Address,
        *,
        model: str = "",
        **options: Any,  # noqa: ANN401 - those of `refusal`
    ) -> bool:
        """Return whether a server and key may be used, or report why not.

        A malformed address is reported at ``wrong``, and missing consent at ``place``.
        """
        given = [None if value is None else str(value) for value in (server, key)]
        try:
            trust = Trust.of_user(self.trusted, strict=not self.allow_import)
            refused = refusal(trust, model, *given, **options)
        except DeclarationError as error:
            self.document.report_error(wrong, error)
            return False
        if refused is not None:
            self.document.report(place, *refused)
        return refused is None

    def check_store(self, path: str, address: Address) -> None:
        """Report data in a store that the user has not trusted, unless the command line names it."""
        try:
            trust = Trust.of_user(self.trusted, strict=not self.allow_import)
            refused = store_refusal(trust, path)
        except DeclarationError as error:
            self.document.report_error(address, error)
            return
        if refused is not None and self.sends and not self.document.is_override(address):
            self.document.report(address, *refused)

    def attempt(self, address: Address, make: Callable[[], T], code: str = "") -> T | None:
        """Return ``make()``, or None after reporting why it failed.

        ``code`` names the user's code that ``make`` runs; only then are unexpected exceptions
        reported.
        """
        try:
            return make()
        except CompoundError as error:
            self.document.report_error(address, error)
        except Exception as error:
            if not code:
                raise
            self.document.report(address, f"{code} failed: {type(error).__name__}: {error}")
        return None

    def resolve_data(self, given: str, address: Address) -> tuple[Path, Path | None]:
        """Resolve a path like `resolve_path`; report a file or folder that must exist and does not."""
        path, within = self.resolve_path(given, address)
        if self.reads and not self.document.has_errors(address) and not os.path.lexists(path):
            hint = "create it, or correct the path, which is relative to the folder of this file"
            self.document.report(address, f"no file or folder {given!r}", hint)
        return path, within

    def resolve_path(
        self, given: str, address: Address, *, key: bool = False
    ) -> tuple[Path, Path | None]:
        """Resolve a path of the file; return it and the folder below which no link may be followed, if any.

        Paths are relative to the file's folder. Links inside it are not followed, because the
        author of the folder could use one to read a secret. A path that visibly leads out of the
        folder may pass through links; without imports, only the command line may name such a path.
        """
        if not self.may_read(given, address, key=key):
            return self.folder / given, None
        root = os.path.abspath(self.folder)
        inside = os.path.relpath(os.path.normpath(os.path.join(root, given)), root)
        if inside == os.curdir:
            return self.folder, self.folder
        if is_outside(inside):
            return self.folder / given, None
        try:
            UntrustedFolder(self.folder, error=DeclarationError).kind(inside)
        except DeclarationError as error:
            target, hint = os.path.realpath(self.folder / inside), error.hint
            if not key and target != os.path.join(os.path.realpath(self.folder), inside):
                hint = f"if you trust its target, name the target: --set {format_address(address)}={target}"
            self.document.report(address, error.message, hint, key=key)
        except ValueError:
            self.document.report(address, "is not a valid path", key=key)
        return self.folder / inside, self.folder

    def resolve_stored(self, value: Reference, address: Address) -> Reference:
        """Return a reference to a stored folder with an absolute path; report a path that is rejected."""
        self.resolve_path(value["path"], (*address, "path"))
        return with_absolute_path(value, self.folder)

    def may_read(self, given: str, address: Address, *, key: bool = False) -> bool:
        """Return whether a path or model may be read; report one outside the folder without imports."""
        if self.allow_import or not is_outside(given):
            return True
        if self.document.is_override(address):
            self.outside.add(given)
            return True
        consent = f"if you trust it, pass --set {format_address(address)}={given}"
        hint = "copy it into the file's folder, and name the copy" if key else consent
        self.document.report(address, f"{format_value(given)} {OUTSIDE}", hint, key=key)
        return False

    def check_models(self, names: Iterable[object], address: Address) -> None:
        """Report model names that no engine serves."""
        for name in names:
            if (
                isinstance(name, str)
                and name not in self.models
                and not self.may_read(name, address)
            ):
                continue
            if not isinstance(name, str) or not self._is_model(name):
                close = suggest_name(str(name), [*self.models, *EMBEDDED])
                hint = (
                    close
                    if close.endswith("?")
                    else f"{close}, a folder, local/HUB-ID, provider/model"
                )
                self.document.report(address, f"no engine for the model {format_value(name)}", hint)

    def _is_model(self, name: str) -> bool:
        if name in self.models or name in EMBEDDED or os.path.isdir(name):
            return True
        return "/" in name and (name.startswith("local/") or is_model_name(name))


def is_outside(path: str) -> bool:
    """Return whether a path, or the folder of a model, is absolute or contains ``..``.

    >>> [is_outside(path) for path in ("data/qa", "../qa", "/qa", "local//qa", "a/b")]
    [False, True, True, True, False]
    """
    prefix = next((name for name in _ENGINES if path.startswith(name)), "")
    pure = PurePosixPath(path.removeprefix(prefix))
    return pure.is_absolute() or ".." in pure.parts
