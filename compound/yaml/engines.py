"""Engines of a file: their entries, their chat templates, and what of them the user must allow.

A file may name servers, keys, models in folders, and commands; see `compound.core.security.trust`.
"""

from __future__ import annotations

import functools
import inspect
import typing
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from compound.core.engine import Capabilities
from compound.core.errors import DeclarationError
from compound.core.example import Values
from compound.core.security.untrusted import UntrustedFolder
from compound.engines.credentials import CONFIGURABLE_PROVIDERS, Connection
from compound.graph.registry.engines import KINDS, engine_class, open_engine
from compound.graph.registry.engines import installed as installed_engines
from compound.graph.registry.user_code import check_signature
from compound.yaml.context import FileContext
from compound.yaml.document import Address
from compound.yaml.kind import report_wrong_settings
from compound.yaml.spaces import entry_model, settings_model
from compound.yaml.types import Code, Model, Name, SelectedModel, parse_at, tagged

EngineSettings = tuple[str, Values]
"""Kind and settings of an engine."""
LOCAL = ("transformers", "vllm")  # engines that may read a model from a folder
REPLICA = ("vllm", "openai")
"""Kinds of engines that a replica can be."""
if typing.TYPE_CHECKING:
    FleetForm = list[str] | Model
else:
    _REPLICAS = {
        kind: settings_model(f"fleet_{kind}", engine_class(kind), skip=("api_base",)) | None
        for kind in REPLICA
    }
    FLEET = settings_model("fleet", engine_class("fleet"), forms={"urls": list[str], **_REPLICAS})
    FleetForm = Annotated[
        Annotated[list[str], Field(min_length=1), Tag("~urls")] | tagged("~fleet", FLEET),
        Discriminator(lambda value: "~urls" if isinstance(value, list) else "~fleet"),
    ]


class FleetEntry(Model):
    """Engine of several replicas of one model."""

    fleet: FleetForm
    """The addresses of the servers, or the settings of the fleet."""


class ClassEngine(Model):
    """An engine of your own, made as Class(**settings)."""

    code: Code = Field(alias="class")
    """The class, as module:name; modules are also found beside this file."""
    settings: dict[Name, Any] = Field(default={})
    """What it is made with."""


if typing.TYPE_CHECKING:
    EngineEntry = Model
else:
    _BUILT_IN = {kind: entry_model(kind, engine_class(kind)) for kind in KINDS if kind != "fleet"}
    EngineEntry = Annotated[
        Model,
        SelectedModel(
            "engine",
            {**_BUILT_IN, "fleet": FleetEntry, "class": ClassEngine},
            installed_engines,
            lambda kind: entry_model(kind, engine_class(kind), "engine_"),
        ),
    ]


def read_engines(context: FileContext) -> dict[str, EngineSettings]:
    """Return the engines of a file by name, after reporting what of them may not be used."""
    section = context.document.at(("engines",))
    engines: dict[str, EngineSettings] = {}
    for name in section if isinstance(section, dict) else ():
        entry = parse_at(context.document, EngineEntry, ("engines", name))
        found = None if entry is None else _engine(context, entry, ("engines", name))
        if found is not None:
            engines[name] = found
    return engines


def _engine(context: FileContext, entry: Model, address: Address) -> EngineSettings | None:
    if isinstance(entry, ClassEngine):
        return _own_engine(context, entry, address)
    ((kind, form),) = entry.given.items()
    inside = (*address, kind)
    if kind == "fleet":
        given: Values = _check_fleet(context, form, inside)
    else:
        given = _with_template(context, form.given, inside)
        _check_consent(context, kind, given, inside)
        _check_local(context, kind, given, inside, served=given.get("api_base") is not None)
    if kind in (*REPLICA, "fleet") and not context.document.has_errors(address):
        make = functools.partial(open_engine, kind, **given)
        context.attempt(inside, make)  # settings that exclude each other
    return kind, given


def _own_engine(
    context: FileContext, found: ClassEngine, address: Address
) -> EngineSettings | None:
    place, inside = (*address, "class"), (*address, "settings")
    code = context.load_function(found.code, place)
    _check_consent(context, found.code, found.settings, inside)
    if code is None or report_wrong_settings(context, code, found.settings, inside):
        return None

    def check() -> EngineSettings:
        check_signature(code, f"engine {found.code!r}", **found.settings)
        return found.code, found.settings

    return context.attempt(place, check)


def _check_fleet(context: FileContext, form: Any, address: Address) -> dict[str, Any]:  # noqa: ANN401
    """Return the settings of a fleet, after the checks of an engine for each of its servers."""
    settings: dict[str, Any] = {"urls": form} if isinstance(form, list) else dict(form.given)
    settings |= {name: settings[name].given for name in REPLICA if settings.get(name) is not None}
    kind = next((kind for kind in REPLICA if kind in settings), "openai")
    own: Values = settings.get(kind) or {}
    urls: list[str] = settings.get("urls", [])
    for at, url in enumerate(urls):
        place = (*address, at) if isinstance(form, list) else (*address, "urls", at)
        _check_server(context, own, url, own.get("api_key_env"), place, place)
    _check_local(context, kind, own, (*address, kind), served=bool(urls))
    return settings


def _check_local(
    context: FileContext, kind: str, settings: Values, address: Address, *, served: bool
) -> None:
    """Report a model in a folder, unless a server has it, and commands that a file may not name."""
    if kind in LOCAL and not served:
        context.may_read(str(settings.get("model", "")), (*address, "model"))
    for key in Capabilities(inspect.unwrap(engine_class(kind))).code_settings:
        if key in settings and not context.allow_import:
            context.document.report(
                (*address, key), "is a command to run, and imports are not allowed"
            )


def _check_consent(context: FileContext, kind: str, settings: Values, address: Address) -> None:
    """Report a server or key that an engine would use without the user's consent."""
    server_setting, server = "api_base", settings.get("api_base")
    if kind not in KINDS:  # of a package, or the user's own: any setting may hold an address
        for name, value in settings.items():
            if isinstance(value, str) and (name == "api_base" or "://" in value):
                server_setting, server = name, value
                break
    key_setting = next((name for name in settings if name.endswith("key_env")), "api_key_env")
    key, model = settings.get(key_setting), str(settings.get("model", ""))
    named = (*address, server_setting if server is not None else "model")
    if kind == "litellm":
        try:
            _check_provider(model, None if server is None else str(server))
        except DeclarationError as error:
            context.document.report_error(named, error)
            return
    place = (*address, server_setting if key is None else key_setting)
    _check_server(context, settings, server, key, named, place)


def _check_provider(model: str, server: str | None) -> None:
    """Reject a URL in a model's name, and a server of a provider that is not known to be safe."""
    Connection(model, server, None)
    provider = model.partition("/")[0]
    if server is not None and provider not in CONFIGURABLE_PROVIDERS:
        raise DeclarationError(
            f"a file cannot name the server of a model of {provider!r}",
            hint=f"most servers are openai/NAME; possible: {', '.join(sorted(CONFIGURABLE_PROVIDERS))}",
        )


def _check_server(
    context: FileContext,
    settings: Values,
    server: object,
    key: object,
    wrong: Address,
    place: Address,
) -> None:
    if (server is not None or key is not None) and context.sends:
        context.check_trust(server, key, wrong, place, model=str(settings.get("model", "")))


SETTING, SUFFIX = "chat_template", ".jinja"


def _with_template(context: FileContext, given: Values, engine: Address) -> Values:
    """Return an engine's settings with the text of the template whose file they name.

    A name ends with ``.jinja`` and is relative to the system's file; any other text is a template
    itself.
    """
    name, address = given.get(SETTING), (*engine, SETTING)
    if not (isinstance(name, str) and name.endswith(SUFFIX)):
        return given
    place, _ = context.resolve_path(name, address)
    if context.document.has_errors(address):
        return given

    def read() -> str:
        folder = UntrustedFolder(place.parent, error=DeclarationError)
        if folder.kind(place.name) != "file":
            raise DeclarationError(
                f"no file {name!r}", hint="its path is relative to the system's file"
            )
        try:
            return folder.read(place.name).decode()
        except UnicodeDecodeError:
            raise DeclarationError(f"{name!r} is not a text in UTF-8") from None

    text = context.attempt(address, read)
    return given if text is None else {**given, SETTING: text}
