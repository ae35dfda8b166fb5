"""A predictor of a DSPy program as an LLM component with the prompt format of DSPy's adapter.

The format is kept, because an instruction is only known to be better in the format that it was tested in: the
optimized program runs in DSPy afterwards, with exactly these messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from compound.components.llm import LLM, MAX_DEMO_CHARACTERS, written_extent
from compound.engine import Completion, Message, Request
from compound.errors import DeclarationError, ParseError
from compound.graph.bounds import CHARACTER, CallBound, Extent, Limits, Reach, extent_of_setting
from compound.graph.component import CallContext
from compound.graph.configuration import digest
from compound.graph.space import Demo, Demos, Text, as_demos
from compound.graph.types import Port, format_type
from compound.narrowing import entry

if TYPE_CHECKING:
    import dspy

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, eq=False, repr=False)
class DSPyPredictor(LLM):
    """A DSPy predictor: instructions and demonstrations are settings, fields come from its signature.

    Attributes:
        signature: the signature, whose instructions the setting ``prompt`` replaces.
        adapter: DSPy's adapter, which writes the messages and reads the answers.
    """

    signature: Any = None
    adapter: Any = None

    kind = "dspy_predictor"

    @property
    def inputs(self) -> Mapping[str, Port]:  # noqa: D102
        return {
            name: Port(field.annotation, optional=True) for name, field in self.signature.input_fields.items()
        }

    @property
    def version(self) -> str:  # noqa: D102
        import dspy

        fields = [
            [name, format_type(field.annotation), {k: str(v) for k, v in field.json_schema_extra.items()}]
            for name, field in self.signature.fields.items()
        ]
        adapter = f"{type(self.adapter).__module__}.{type(self.adapter).__qualname__}"
        trained = self.weights is not None
        return "dspy:" + digest([dspy.__version__, adapter, fields, self.stop, self.most_reasks, trained])

    @property
    def most_reasks(self) -> int:
        """1 if the adapter falls back to JSON after an answer that it cannot read, as in DSPy."""
        if self.reasks is not None or self.weights is not None:
            return self.reasks or 0
        return int(_fallback(self.adapter) is not None)

    def messages(self, inputs: Mapping[str, object], values: Mapping[str, object]) -> tuple[Message, ...]:
        """Return the messages that DSPy would send for these inputs, instructions and demonstrations."""
        return self._messages(self.adapter, inputs, values)

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
                hint="images, audio and native tool calls of DSPy cannot be imported; import the module as "
                "one component with cp.from_dspy_module",
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
        lm, adapter = entry(values, "lm", str), self.adapter
        for attempt in range(self.most_reasks + 1):
            messages = self._messages(adapter, inputs, values)
            completion = await call.generate(lm, self._plain_request(messages, values, call.seed + attempt))
            try:
                return self._parse(adapter, completion)
            except ParseError:
                adapter = _fallback(adapter)
                if attempt == self.most_reasks or adapter is None:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _plain_request(
        self, messages: tuple[Message, ...], values: Mapping[str, object], seed: int
    ) -> Request:
        request = self._request(messages, values, seed)
        return Request(
            messages=request.messages, max_tokens=request.max_tokens, temperature=request.temperature,
            stop=request.stop, seed=request.seed, adapter=request.adapter, want_tokens=request.want_tokens,
        )  # fmt: skip

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
            raise ParseError(f"{type(error).__name__}: {error} in {completion.text!r:.300}") from error

    def reach(self, given: Mapping[str, Extent], limits: Limits) -> Reach:
        """Bound one call by the adapter's own text, the instructions, the demonstrations and the fields.

        The adapter indents instructions: lines are assumed to have at least eight characters on average.
        """
        longest = given.get("max_tokens", extent_of_setting(self.max_tokens)).largest
        models = given.get("lm", extent_of_setting(self.lm) if self.lm else Extent()).values
        if "prompt" in given:
            text = given["prompt"]
        elif isinstance(self.prompt, Text):
            text = limits.text(f"{self.name}.prompt", self.prompt)
        else:
            text = Extent(len(self.prompt.encode()))
        fields = sum(
            (given[name].times(2) for name in self.signature.input_fields if name in given), Extent()
        )
        fixed, demos = self._fixed_text()
        most = self.demos.max if isinstance(self.demos, Demos) else len(demos)
        longest_demo = max([MAX_DEMO_CHARACTERS * CHARACTER, *demos])
        prompt = Extent(fixed) + text.times(2) + fields + Extent(longest_demo).times(most)
        request = CallBound(
            self.name, 1 + self.most_reasks, prompt, longest,
            tuple(map(str, models)) or limits.lms, messages=2 + 2 * most,
        )  # fmt: skip
        outputs = {name: written_extent(port.type, longest) for name, port in self.outputs.items()}
        return Reach(outputs, (request,))

    def _fixed_text(self) -> tuple[int, list[int]]:
        """Return the bytes of the adapters' own text, and those of each initial demonstration."""
        start = self.demos.value if isinstance(self.demos, Demos) else as_demos(self.demos)
        sizes = []
        for demos in [[], *[[demo] for demo in start]]:
            values = {"prompt": "", "demos": demos}
            for adapter in filter(None, (self.adapter, _fallback(self.adapter))):
                sent = self._messages(adapter, dict.fromkeys(self.signature.input_fields, ""), values)
                sizes.append(sum(len(message.text.encode()) for message in sent))
        return max(sizes[:2]), sizes[1:]


def flat(demo: Demo) -> dict[str, object]:
    """Return a demonstration as DSPy stores it: input and output fields beside each other."""
    return {name: thaw(value) for part in ("inputs", "outputs") for name, value in demo[part].items()}


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
