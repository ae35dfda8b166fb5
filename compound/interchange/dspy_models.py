"""Models and predictors of DSPy; their options are carried over or refused by name."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from compound.components.llm import LLM, ask
from compound.core.engine import Completion, Engine, Message, Request
from compound.core.errors import CompoundError, DeclarationError, ParseError
from compound.core.narrowing import entry
from compound.core.security.sanitize import remember_secret
from compound.engines.litellm import LiteLLMEngine
from compound.engines.options import RemoteOptions
from compound.graph.component import CallContext
from compound.graph.configuration import digest
from compound.graph.fingerprint import code_digest
from compound.graph.registry.engines import find_engine
from compound.graph.space import Choice, Demo, as_demos
from compound.graph.types import Port, format_type

if TYPE_CHECKING:
    import dspy

# of components
SETTINGS = ("temperature", "max_tokens", "max_completion_tokens", "stop", "timeout")
UNUSED = (
    "n",
    "num_generations",
    "rollout_id",
    "cache",
    "num_retries",
)  # checked elsewhere, or unused
SERVER = ("api_base", "api_key")
REMEDY = "run the program unchanged as an external agent, cp.components.ExternalAgent"
HINTS = {
    "seed": "remove it: each request has a seed of its own, derived from the seed of the run",
    "api_version": "remove it, and export AZURE_API_VERSION=…",
}


class DSPyModels:
    """The models of a program, by the names that its components give to engines."""

    def __init__(self, lm: str | Choice | None) -> None:
        self._given = lm
        self._names = lm.options if isinstance(lm, Choice) else (lm,)
        self._known: dict[str, dict[str, Any]] = {}

    def use(self, place: str, lm: Any, config: Mapping[str, object]) -> str | Choice | None:  # noqa: ANN401
        """Return the name of a model with the options of a predictor.

        Raises:
            DeclarationError: an option cannot be carried over.
        """
        if lm is not None and (self._given is None or getattr(lm, "model", None) in self._names):
            found = self._register(place, lm, config)
            if self._given is not None and found != lm.model:
                hint = "omit lm=, or give the models of DSPy different names"
                raise DeclarationError(
                    f"{place}: two models {lm.model!r} have different options", hint=hint
                )
            return self._given or found
        sampling = {key for key in options(lm, {}) if key in RemoteOptions.model_fields}
        dropped = sorted((sampling | set(options(None, config))) - {*SETTINGS, *UNUSED})
        if dropped:
            raise _refusal(
                place,
                dropped[0],
                f"remove it in DSPy, as by lm.copy({dropped[0]}=None), and set it on the engine of lm="
                f"{self._given!r}: engines={{'NAME': cp.engines.LiteLLM(…, extra={{{dropped[0]!r}: …}})}}",
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
        extra = {
            key: value for key, value in given.items() if key not in (*SETTINGS, *UNUSED, *SERVER)
        }
        for name in extra:
            if name not in RemoteOptions.model_fields:
                raise _refusal(place, name, HINTS.get(name, REMEDY))
        key, address = given.get("api_key"), given.get("api_base")
        if not isinstance(key, str | None):
            raise _refusal(
                place, f"an api_key of type {type(key).__name__}", f"give a text; or {REMEDY}"
            )
        remember_secret(key)
        engine = {"model": lm.model, "api_base": address, "extra": extra}
        LiteLLMEngine(**engine)  # checks them
        settings, own, number = {**engine, "api_key": key}, str(lm.model), 1
        while self._known.setdefault(own, settings) != settings:  # the same model, other options
            number += 1
            own = f"{lm.model}#{number}"
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


def _check_kind(place: str, lm: Any) -> None:  # noqa: ANN401
    """Refuse a model whose requests are not plain requests to a provider's chat API."""
    import dspy

    if type(lm) is not dspy.LM:
        kind = f"{type(lm).__name__} is no plain dspy.LM"
        raise DeclarationError(
            f"the model of {place}: {kind}", hint=f"give lm= and engines=; or {REMEDY}"
        )
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
    return DeclarationError(
        f"the model of {place} has {option}, which cannot be carried over", hint=hint
    )


ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, eq=False, repr=False)
class DSPyPredictor(LLM):
    """A DSPy predictor: instructions and demonstrations are settings, fields come from its signature."""

    signature: Any = None
    adapter: Any = None

    kind = "dspy_predictor"

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {
            name: Port(field.annotation, optional=True)
            for name, field in self.signature.input_fields.items()
        }

    @property
    def version(self) -> str:  # noqa: D102
        import dspy

        fields = [
            [
                name,
                format_type(field.annotation),
                {k: str(v) for k, v in field.json_schema_extra.items()},
            ]
            for name, field in self.signature.fields.items()
        ]
        adapter = f"{type(self.adapter).__module__}.{type(self.adapter).__qualname__}"
        trained = self.weights is not None
        return "dspy:" + digest(
            [dspy.__version__, adapter, fields, self.stop, self.most_reasks, trained]
        )

    @property
    def most_reasks(self) -> int:
        """1 if the adapter falls back to JSON after an answer that it cannot read, as in DSPy."""
        if self.reasks is not None or self.weights is not None:
            return self.reasks or 0
        return int(_fallback(self.adapter) is not None)

    def messages(
        self, inputs: Mapping[str, object], values: Mapping[str, object]
    ) -> tuple[Message, ...]:
        """Return the messages that DSPy would send for these inputs, instructions and demonstrations."""
        return self._messages(self.adapter, inputs, values)

    def request(self, inputs: Mapping[str, object], values: Mapping[str, object]) -> Request:
        """Return the first request, without a cue and a format: the messages describe the answer."""
        return replace(super().request(inputs, values), cue="", format=None)

    def _messages(
        self, adapter: dspy.Adapter, inputs: Mapping[str, object], values: Mapping[str, object]
    ) -> tuple[Message, ...]:
        signature = self.signature.with_instructions(entry(values, "prompt", str))
        given = {
            name: value
            for name, value in inputs.items()
            if name in signature.input_fields and (value is not None or self._may_be_none(name))
        }
        demos = [flat(demo) for demo in as_demos(values["demos"] or ())]
        return tuple(self._message(item) for item in adapter.format(signature, demos, given))

    def _may_be_none(self, field: str) -> bool:
        return type(None) in get_args(self.signature.input_fields[field].annotation)

    def _message(self, item: Mapping[str, Any]) -> Message:
        role, content = item["role"], item["content"]
        if role not in ROLES or not isinstance(content, str) or item.get("tool_calls"):
            raise DeclarationError(
                f"predictor {self.name!r}: DSPy's {type(self.adapter).__name__} writes a message with role "
                f"{role!r} and {type(content).__name__} content",
                hint="images, audio and native tool calls of DSPy cannot be imported; " + REMEDY,
            )
        return Message(role, content)

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        if not values["lm"]:
            raise DeclarationError(
                f"predictor {self.name!r} has no model",
                hint="give from_dspy(program, lm='openai/gpt-4o-mini')",
            )
        adapter = self.adapter

        def read(completion: Completion) -> Mapping[str, object]:
            return self._parse(adapter, completion)

        def fall_back(request: Request, *_: object) -> Request | None:
            nonlocal adapter
            adapter = _fallback(adapter)
            return adapter and replace(request, messages=self._messages(adapter, inputs, values))

        request, lm = self.request(inputs, values), entry(values, "lm", str)
        return await ask(call, lm, request, read, self.most_reasks, fall_back)

    def _parse(self, adapter: dspy.Adapter, completion: Completion) -> Mapping[str, object]:
        from dspy.utils.exceptions import AdapterParseError

        try:
            return dict(adapter.parse(self.signature, completion.text))
        except AdapterParseError as error:
            parsed = error.parsed_result if isinstance(error.parsed_result, dict) else {}
            missing = [name for name in self.signature.output_fields if name not in parsed]
            cut = " (the text was truncated)" if completion.finish_reason == "length" else ""
            raise ParseError(
                f"{type(adapter).__name__} found no {', '.join(missing) or 'valid fields'}{cut} in "
                f"{completion.text!r:.300}",
                outputs=parsed,
            ) from None
        except (ValueError, TypeError, KeyError) as error:
            raise ParseError(
                f"{type(error).__name__}: {error} in {completion.text!r:.300}"
            ) from error


def flat(demo: Demo) -> dict[str, object]:
    """Return a demonstration as DSPy stores it: input and output fields beside each other."""
    return {
        name: thaw(value) for part in ("inputs", "outputs") for name, value in demo[part].items()
    }


def thaw(value: object) -> object:
    """Return a value with lists and dicts in place of the immutable containers of a configuration.

    >>> thaw(({"tags": ("a",)},))
    [{'tags': ['a']}]
    """
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return [thaw(item) for item in value]
    return value


def _fallback(adapter: Any) -> Any:  # noqa: ANN401 - an adapter of DSPy, which has no types
    """Return the adapter that DSPy uses after an answer that ``adapter`` cannot read, if any."""
    from dspy.adapters.json_adapter import JSONAdapter

    if isinstance(adapter, JSONAdapter) or not getattr(adapter, "use_json_adapter_fallback", False):
        return None
    return JSONAdapter()


TEMPERATURE = 1.0  # of all attempts, as in DSPy
OWN_MODEL = {
    "Refine": "creates a predictor in each run, which writes advice for the next attempt",
    "RLM": "calls models from the code that it generates",
}
"""Modules of DSPy that call a model outside of their predictors, and how."""


def check_modules(program: dspy.Module) -> None:
    """Reject a program with a module that calls a model outside of its predictors.

    Raises:
        DeclarationError: it has one; the message names the reason.
    """
    import dspy

    for name, why in OWN_MODEL.items():
        kind = getattr(dspy, name, None)
        if kind is not None and any(program.named_sub_modules(type_=kind)):
            more = "use dspy.BestOfN, or " if name == "Refine" else ""
            raise DeclarationError(
                f"dspy.{name} cannot be imported: it {why}, so that not all of its prompts can be tuned",
                hint=more + REMEDY,
            )


def own_adapter() -> dspy.Adapter:
    """Return the adapter that is set in DSPy.

    Raises:
        DeclarationError: it does more than to write messages and to read answers.
    """
    import dspy

    adapter = dspy.settings.adapter or dspy.ChatAdapter()
    kind = type(adapter)
    if isinstance(adapter, dspy.TwoStepAdapter):
        why = "reads answers by a model of its own"
    elif not kind.__call__.__module__.startswith("dspy."):
        why = "calls the model itself, in __call__"
    else:
        return adapter
    raise DeclarationError(
        f"programs cannot be imported with the adapter {kind.__name__}: it {why}",
        hint=f"set another adapter; or {REMEDY}",
    )


def sampled_predictors(program: dspy.Module) -> set[int]:
    """Return the identities of the predictors that a `dspy.BestOfN` samples."""
    import dspy

    return {
        id(predictor)
        for _, module in program.named_sub_modules(type_=dspy.BestOfN)
        for _, predictor in module.named_sub_modules(type_=dspy.Predict)
    }


def bind_attempts(program: dspy.Module) -> None:
    """Make each `dspy.BestOfN` call its module itself instead of copies of it with other models.

    DSPy draws different answers by copies of the model with different ``rollout_id``. Here, each
    call of a predictor has a seed of its own.
    """
    import dspy

    for _, module in program.named_sub_modules(type_=dspy.BestOfN):
        module.forward = functools.partial(_forward, module)


def describe_attempts(program: dspy.Module) -> list[list[object]]:
    """Return the number of attempts, the threshold and the code of the reward of each `dspy.BestOfN`."""
    import dspy

    found = []
    for _, module in program.named_sub_modules(type_=dspy.BestOfN):
        # DSPy wraps the user's function in a lambda
        held = inspect.getclosurevars(module.reward_fn).nonlocals
        reward = held.get("reward_fn", module.reward_fn)
        found.append([module.N, module.threshold, module.fail_count, code_digest(reward)])
    return found


def _forward(module: Any, **given: object) -> object:  # noqa: ANN401 - a dspy.BestOfN, which has no types
    """Return the prediction with the highest reward, or the first one that reaches the threshold."""
    best, best_reward, allowed = None, float("-inf"), module.fail_count
    failure: Exception | None = None
    for attempt in range(module.N):
        try:
            prediction = module.module(**given)
            reward = module.reward_fn(given, prediction)
        except CompoundError:
            raise
        except Exception as error:
            failure = error
            if attempt > allowed:
                raise
            allowed -= 1
            continue
        if reward > best_reward:
            best, best_reward = prediction, reward
        if reward >= module.threshold:
            break
    if best is None and failure is not None:
        raise failure
    return best
