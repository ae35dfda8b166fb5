"""Models of DSPy as engines; an option of a `dspy.LM` or a predictor is carried over or refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from compound.components.engines.litellm import LiteLLMEngine
from compound.components.engines.options import RemoteOptions
from compound.engine import Engine
from compound.errors import DeclarationError
from compound.graph.space import Choice
from compound.registry.engines import find_engine
from compound.security.sanitize import remember_secret

SETTINGS = ("temperature", "max_tokens", "max_completion_tokens", "stop", "timeout")  # of components
UNUSED = ("n", "num_generations", "rollout_id", "cache", "num_retries")  # checked elsewhere, or DSPy's cache
SERVER = ("api_base", "api_key")
SECRETS = ("key", "token", "headers", "secret", "password", "credentials")
REMEDY = "import the module as one component with cp.from_dspy_module, which calls its model through DSPy"
HINTS = {
    "seed": "remove it: each request has a seed of its own, derived from the seed of the run",
    "api_version": "remove it, and export AZURE_API_VERSION=…",
}


class DSPyModels:
    """The models of a program, by the names that its components give to engines.

    Args:
        lm: the model that replaces those of DSPy, if the user gives one. Where it has the name of one of
            them, it is that one.
    """

    def __init__(self, lm: str | Choice | None) -> None:
        self._given = lm
        self._names = lm.options if isinstance(lm, Choice) else (lm,)
        self._known: dict[str, dict[str, Any]] = {}

    def use(self, place: str, lm: Any, config: Mapping[str, object]) -> str | Choice | None:  # noqa: ANN401
        """Return the name of a model with the options of a predictor.

        Args:
            place: what has the model, for messages.
            lm: the `dspy.LM`, if any.
            config: options of the predictor, which precede those of the model.

        Raises:
            DeclarationError: an option cannot be carried over.
        """
        if lm is not None and (self._given is None or getattr(lm, "model", None) in self._names):
            found = self._register(place, lm, config)
            if self._given is not None and found != lm.model:
                hint = "omit lm=, or give the models of DSPy different names"
                raise DeclarationError(f"{place}: two models {lm.model!r} have different options", hint=hint)
            return self._given or found
        sampling = {key for key in options(lm, {}) if key in RemoteOptions.model_fields}
        dropped = sorted((sampling | set(options(None, config))) - {*SETTINGS, *UNUSED})
        if dropped:
            raise _refusal(
                place,
                dropped[0],
                f"remove it in DSPy, as by lm.copy({dropped[0]}=None), and set it on the engine of lm="
                f"{self._given!r}: engines={{'NAME': cp.LiteLLM(…, extra={{{dropped[0]!r}: …}})}}",
            )
        return self._given

    def find(self, name: str) -> Engine:
        """Return the engine of a model; a name that is none of the program's is found as usual."""
        if name not in self._known:
            return find_engine(name)
        settings = dict(self._known[name])
        key = settings.pop("api_key")
        engine = LiteLLMEngine(**settings)
        if key is not None:
            engine.hold_key(key)
        return engine

    def _register(self, place: str, lm: Any, config: Mapping[str, object]) -> str:  # noqa: ANN401
        _check_kind(place, lm)
        given = options(lm, config)
        extra = {key: value for key, value in given.items() if key not in (*SETTINGS, *UNUSED, *SERVER)}
        for name in extra:
            if name not in RemoteOptions.model_fields:
                raise _refusal(place, name, HINTS.get(name, REMEDY))
        key, address = given.get("api_key"), given.get("api_base")
        if not isinstance(key, str | None):
            raise _refusal(place, f"an api_key of type {type(key).__name__}", f"give a text; or {REMEDY}")
        remember_secret(key)
        engine = {"model": lm.model, "api_base": address, "extra": extra}
        LiteLLMEngine(**engine)  # checks them
        number, own = 1, str(lm.model)
        while self._known.setdefault(own, {**engine, "api_key": key}) != {**engine, "api_key": key}:
            number, own = number + 1, f"{lm.model}#{number + 1}"  # the same model with other options
        return own


def options(lm: Any, config: Mapping[str, object]) -> dict[str, Any]:  # noqa: ANN401
    """Return the options of a model and a predictor that are set; those of the predictor take precedence."""
    merged: dict[str, Any] = {}
    for given in (getattr(lm, "kwargs", None) or {}, config):
        own = {"api_base" if key == "base_url" else key: value for key, value in given.items()}
        if "api_base" in own and own["api_base"] != merged.get("api_base"):
            merged.pop("api_key", None)  # it was given for another server
        merged |= own
    return {key: value for key, value in merged.items() if value is not None}


def describe_model(lm: Any) -> list[object]:  # noqa: ANN401
    """Return a model's name and options without its keys, as JSON types."""
    public = {k: str(v) for k, v in options(lm, {}).items() if not any(word in k for word in SECRETS)}
    return [str(getattr(lm, "model", "")), str(getattr(lm, "model_type", "")), public]


def _check_kind(place: str, lm: Any) -> None:  # noqa: ANN401
    """Refuse a model whose requests are not plain requests to a provider's chat API."""
    import dspy

    if type(lm) is not dspy.LM:
        kind = f"{type(lm).__name__} is no plain dspy.LM"
        raise DeclarationError(f"the model of {place}: {kind}", hint=f"give lm= and engines=; or {REMEDY}")
    unusual = {
        f"model_type={lm.model_type!r}": lm.model_type != "chat",
        "an engine of its own": not isinstance(getattr(lm, "engine", "auto"), str),
        "use_developer_role": getattr(lm, "use_developer_role", False),
        "callbacks": lm.callbacks,
        "a provider that is registered in DSPy": _is_registered(lm),
    }
    for option, given in unusual.items():
        if given:
            raise _refusal(place, option, REMEDY)


def _is_registered(lm: Any) -> bool:  # noqa: ANN401
    """Return whether the address of a model is that of `dspy.lm15.register_provider`."""
    provider = re.split("[/:]", lm.model)[0].replace("_", "-")
    known = [each.definition for each in getattr(lm, "_providers", ())]
    return any(provider in (definition.id, *definition.aliases) for definition in known)


def _refusal(place: str, option: str, hint: str) -> DeclarationError:
    return DeclarationError(f"the model of {place} has {option}, which cannot be carried over", hint=hint)
