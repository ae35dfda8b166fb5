"""Predictors of DSPy as components."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

from compound.components.llm import LLM, ask
from compound.core.engine import Completion, Message, Request
from compound.core.errors import DeclarationError, ParseError
from compound.core.narrowing import entry
from compound.graph.component import CallContext
from compound.graph.configuration import digest
from compound.graph.space import Demo, as_demos
from compound.graph.types import Port, format_type

if TYPE_CHECKING:
    import dspy

REMEDY = "run the program unchanged as an external agent, cp.components.ExternalAgent"
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


OWN_MODEL = {
    "BestOfN": "calls copies of its module with other models",
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
            raise DeclarationError(
                f"dspy.{name} cannot be imported: it {why}, so that not all of its prompts can be tuned",
                hint=REMEDY,
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
