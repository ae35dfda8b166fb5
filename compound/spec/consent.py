"""Check the user's consent for the servers and keys that the engines of a file name.

See `compound.security.trust`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compound.components.engines.credentials import CONFIGURABLE_PROVIDERS, Connection
from compound.errors import DeclarationError
from compound.registry.engines import KINDS
from compound.security.trust import Trust, refusal
from compound.spec.context import Context
from compound.spec.yaml.document import Address


def check_consent(context: Context, kind: str, settings: Mapping[str, object], address: Address) -> None:
    """Report a server or key that an engine of the file would use without the user's consent.

    Args:
        context: the context of the file.
        kind: the kind of engine.
        settings: the settings of the engine.
        address: the address of the settings in the file.

    Raises:
        ConfigurationError: the user's configuration file cannot be read.
    """
    server_setting, server = _server(kind, settings)
    key_setting = next((name for name in settings if name.endswith("key_env")), "api_key_env")
    key = _text(settings.get(key_setting))
    model = str(settings.get("model", ""))
    named = (*address, server_setting if server is not None else "model")
    try:
        if kind == "litellm":
            _check_provider(model, server)
    except DeclarationError as error:
        context.document.report_error(named, error)
        return
    place = (*address, server_setting if key is None else key_setting)
    _check_server(context, model, server, key, (named, place))


def check_fleet_consent(
    context: Context, urls: Sequence[str], settings: Mapping[str, object], addresses: Sequence[Address]
) -> None:
    """Report each server of a fleet, or its key, that would be used without the user's consent.

    Args:
        context: the context of the file.
        urls: the addresses of the servers.
        settings: the settings of the engines of the replicas.
        addresses: the address of each server in the file.

    Raises:
        ConfigurationError: the user's configuration file cannot be read.
    """
    key, model = _text(settings.get("api_key_env")), str(settings.get("model", ""))
    for url, address in zip(urls, addresses, strict=True):
        _check_server(context, model, url, key, (address, address))


def check_cluster_consent(context: Context, cluster: str, address: Address) -> None:
    """Report the address of a cluster that the user has not trusted, even if it is on this machine.

    A cluster receives the examples, and its answers can execute code in this process. ``auto`` is the cluster
    that the user started, joined or named in the environment (`compound.cluster.own_cluster`), and ``local``
    is one that the run starts.

    Args:
        context: the context of the file.
        cluster: the address, as in `compound.settings.common.RaySettings`.
        address: the address of the setting in the file.

    Raises:
        ConfigurationError: the user's configuration file cannot be read.
    """
    if cluster in ("auto", "local") or context.document.is_override(address):
        return
    try:
        trust = Trust.of_user(context.trusted, strict=not context.allow_import)
        refused = refusal(trust, "", f"http://{cluster}", None, sends="examples", only_listed=True)
    except DeclarationError as error:
        context.document.report_error(address, error)
        return
    if refused is not None:
        context.document.report(address, *refused)


def _check_server(
    context: Context, model: str, server: str | None, key: str | None, places: tuple[Address, Address]
) -> None:
    """Report a server or key without consent.

    Args:
        context: the context of the file.
        model: the name of the model.
        server: the address of the server.
        key: the environment variable of its key.
        places: where a wrong address is reported, and where missing consent is.
    """
    if (server is None and key is None) or not context.sends:
        return
    try:
        trust = Trust.of_user(context.trusted, strict=not context.allow_import)
        refused = refusal(trust, model, server, key)
    except DeclarationError as error:
        context.document.report_error(places[0], error)
        return
    if refused is not None:
        context.document.report(places[1], *refused)


def _server(kind: str, settings: Mapping[str, object]) -> tuple[str, str | None]:
    """Return the setting that names a server, and the server.

    For an engine of an installed package, this is any setting that holds a URL.
    """
    if kind not in KINDS:
        for name, value in settings.items():
            if isinstance(value, str) and (name == "api_base" or "://" in value):
                return name, value
    return "api_base", _text(settings.get("api_base"))


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _check_provider(model: str, server: str | None) -> None:
    """Reject a URL in a model's name, and a custom server of a provider that is not known to be safe."""
    Connection(model, server, None)
    provider = model.partition("/")[0]
    if server is not None and provider not in CONFIGURABLE_PROVIDERS:
        raise DeclarationError(
            f"a file cannot name the server of a model of {provider!r}",
            hint=f"most servers are openai/NAME; possible: {', '.join(sorted(CONFIGURABLE_PROVIDERS))}",
        )
