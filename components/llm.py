"""Language model component; its settings are the prompt, demonstrations, model and sampling parameters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from compound.components.answers.answer_types import answer_format, is_plain, takes_any_text
from compound.components.answers.type_notes import Layout, field_label, json_note, type_note
from compound.components.fields import answer_cue, parse, render, take_images
from compound.engine import Adapter, AnswerFormat, Completion, Message, Request, format_bytes
from compound.errors import DeclarationError, ParseError
from compound.execution.calls.answer_text import after_thoughts
from compound.graph.bounds import (
    CHARACTER,
    CallBound,
    Extent,
    Limits,
    Reach,
    extent_of_setting,
    extent_of_type,
)
from compound.graph.component import CallContext, Operation, check_name
from compound.graph.configuration import digest
from compound.graph.space import Choice, Demo, Demos, Float, Int, Text, Weights, as_demos
from compound.graph.types import Port, identify_type
from compound.narrowing import check_fields, entry, report_wrong_arguments
from compound.storage.artifacts import is_reference

PROMPT_FORMAT = 2  # version of the prompt format; increment it when the same settings render another prompt
LIST_ITEM_BYTES = 8  # bytes of the number and line break before a list item
BLOCK_BYTES = 16  # bytes of the blank lines around a prompt block
MAX_ERROR_CHARACTERS = 500  # of the error that a re-ask shows
MAX_DEMO_CHARACTERS = 2_000  # of a demonstration in a prompt; searches accept at most 1,500 as JSON


@report_wrong_arguments
@dataclass(frozen=True, eq=False, repr=False)
class LLM(Operation):
    """A call to a language model.

    The connected edges define the inputs, unless ``takes`` declares them. Values of type `Image`, also within
    collections, pydantic models and dataclasses, are sent as images to models that take them. Each setting
    may be a plain value, a space to tune, or an edge from another node.

    Attributes:
        name: the component's name.
        prompt: the instruction.
        output: one type (field ``output``), or types by field name. The prompt states every type except a
            single text, and an answer that cannot be converted to its type is an error. A pydantic model, a
            dataclass, a TypedDict or a JSON schema (`json_type`) is answered as JSON.
        demos: demonstrations shown before the inputs.
        lm: the model's name; ``None`` uses the system's model.
        temperature: sampling temperature; 0 is greedy and makes the component deterministic.
        max_tokens: maximum length of the answer in tokens.
        stop: strings that end the answer.
        format: output layout: ``text`` (one field), ``fields`` (``name: value`` lines) or ``json``; ``auto``
            is ``text`` for one field, and for several ``fields``, or ``json`` if one of them is structured.
        enforce: whether engines that can restrict the answer to its type: by constrained decoding, or by the
            response format of a provider. The layout ``fields`` is not enforced.
        reasks: maximum number of further requests after an answer that cannot be parsed; each shows the
            model its answer and the error. Default: 1; 0 for a single text, and for trained components, whose
            samples must be single answers.
        weights: LoRA adapter weights; tunable if given.
        takes: declared inputs and their types.
        system: the system message.
        timeout: time limit of one attempt of a remote model in seconds; models in this process have none.
        retries: how often transient errors are retried.

    Example:
        >>> from compound import Input
        >>> answerer = LLM("answerer", prompt=Text("Answer in a few words."), max_tokens=16)
        >>> answerer(question=Input("question")).label, list(answerer.parameters)
        ('$answerer', ['prompt'])
    """

    name: str
    prompt: str | Text = ""
    output: object = str
    demos: Demos | Sequence[Demo] = ()
    lm: str | Choice | None = None
    temperature: float | Float | Choice = 0.0
    max_tokens: int | Int | Choice = 256
    stop: tuple[str, ...] = ()
    format: Literal["auto", "text", "fields", "json"] = "auto"
    enforce: bool = True
    reasks: int | None = None
    weights: Weights | None = None
    takes: Mapping[str, object] | None = None
    system: str = ""
    timeout: float | None = 120.0
    retries: int = 3

    kind = "llm"
    cacheable = True

    def __post_init__(self) -> None:
        check_name("LLM", self.name)
        check_fields(self)
        if not self.outputs:
            raise DeclarationError(f"LLM {self.name!r} has no output fields")
        if self.format == "text" and len(self.outputs) > 1:
            raise DeclarationError(
                f"LLM {self.name!r} has {len(self.outputs)} output fields, but format 'text' supports one",
                hint="use format='fields' or 'json'",
            )
        if self.reasks is not None and self.reasks < 0:
            raise DeclarationError(f"LLM {self.name!r}: reasks must be >= 0, but got {self.reasks!r}")
        if self.reasks and self.weights is not None:
            raise DeclarationError(
                f"LLM {self.name!r}: a component with weights cannot ask again, because each sample that "
                "trains it must be a single answer",
                hint="set reasks=0, or remove weights",
            )
        for name in ("temperature", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, int | float) and value < (name == "max_tokens"):
                least = int(name == "max_tokens")
                raise DeclarationError(f"LLM {self.name!r}: {name} must be >= {least}, but got {value!r}")

    @property
    def inputs(self) -> Mapping[str, Port] | None:  # noqa: D102
        return None if self.takes is None else {name: Port(kind) for name, kind in self.takes.items()}

    @property
    def outputs(self) -> Mapping[str, Port]:  # noqa: D102
        fields = self.output if isinstance(self.output, Mapping) else {"output": self.output}
        return {name: Port(kind) for name, kind in fields.items()}

    @property
    def settings(self) -> Mapping[str, object]:  # noqa: D102
        names = ("prompt", "demos", "lm", "temperature", "max_tokens", "weights")
        return {name: getattr(self, name) for name in names}

    @property
    def layout(self) -> Layout:
        """Layout of the output fields, with ``auto`` resolved."""
        if self.format != "auto":
            return self.format
        if len(self.outputs) == 1:
            return "text"
        return "fields" if all(is_plain(port.type) for port in self.outputs.values()) else "json"

    @property
    def answer_format(self) -> AnswerFormat | None:
        """Format of the answers that engines are asked to enforce."""
        return answer_format(self.outputs, self.layout) if self.enforce else None

    @property
    def most_reasks(self) -> int:
        """Maximum number of re-asks, with the default resolved."""
        if self.reasks is not None or self.weights is not None:
            return self.reasks or 0
        return int(self.layout != "text" or not all(takes_any_text(p.type) for p in self.outputs.values()))

    @property
    def version(self) -> str:  # noqa: D102
        fields = {name: identify_type(port.type) for name, port in self.outputs.items()}
        trained = self.weights is not None  # its results contain token records, so caches must differ
        parts = [PROMPT_FORMAT, fields, self.layout, self.stop, self.system, trained]
        note = type_note(self.outputs, self.layout) or json_note(self.outputs, self.layout)
        enforced = self.answer_format.to_json() if self.answer_format else ""
        reasks = {"reasks": self.most_reasks} if self.most_reasks else ""
        return "llm:" + digest([*parts, *filter(None, (note, enforced, reasks))])

    def deterministic(self, values: Mapping[str, object]) -> bool:  # noqa: D102
        return not values["temperature"]

    def reach(self, given: Mapping[str, Extent], limits: Limits) -> Reach:  # noqa: D102
        longest = given.get("max_tokens", extent_of_setting(self.max_tokens)).largest
        models = given.get("lm", extent_of_setting(self.lm) if self.lm else Extent()).values
        outputs = {name: written_extent(port.type, longest) for name, port in self.outputs.items()}
        prompt = self._longest_prompt(given, outputs, limits)
        lms = tuple(str(model) for model in models) or limits.lms
        messages = 2 if self.system else 1
        request = CallBound(self.name, 1, prompt, longest, lms, messages=messages)
        if not self.most_reasks:
            return Reach(outputs, (request,))
        shown = len(correction("", self.answer_format).encode()) + CHARACTER * MAX_ERROR_CHARACTERS
        turn = Extent(shown + len(answer_cue(self.outputs, self.layout).encode()), longest)
        again = CallBound(
            f"{self.name} (re-ask)",
            self.most_reasks,
            prompt + turn.times(self.most_reasks),
            longest,
            lms,
            messages=messages + 2 * self.most_reasks,
        )
        return Reach(outputs, (request, again))

    def _longest_prompt(
        self, given: Mapping[str, Extent], outputs: Mapping[str, Extent], limits: Limits
    ) -> Extent:
        """Bound the text of a request: `messages` and the cue applied to the longest values."""
        if "prompt" in given:
            text = given["prompt"]
        elif isinstance(self.prompt, Text):
            text = limits.text(f"{self.name}.prompt", self.prompt)
        else:
            text = Extent(len((self.prompt or "").encode()))
        shown = {name: extent for name, extent in given.items() if name not in self.settings}
        cue = answer_cue(self.outputs, self.layout)
        note = render("", (), {}, self.outputs, self.layout) + self.system + cue
        fixed = Extent(len(note.encode()) + BLOCK_BYTES + format_bytes(self.answer_format))
        inputs = labelled(shown)
        demos = Extent()
        if isinstance(self.demos, Demos):
            answers = {name: extent.union(limits.gold) for name, extent in outputs.items()}
            one = (inputs + labelled(answers) + Extent(BLOCK_BYTES)).truncated(MAX_DEMO_CHARACTERS)
            demos = one.times(self.demos.max)
        declared = self.demos.value if isinstance(self.demos, Demos) else self.demos
        start_demos = as_demos(limits.value(f"{self.name}.demos", declared) or ())
        if start_demos:
            own = len(render("", start_demos, {}, self.outputs, self.layout).encode())
            demos = demos.union(Extent(own))
        return fixed + text + demos + inputs

    def messages(self, inputs: Mapping[str, object], values: Mapping[str, object]) -> tuple[Message, ...]:
        """Return the messages of a request for these inputs and values."""
        shown = {name: value for name, value in inputs.items() if name not in self.settings}
        prompt = entry(values, "prompt", str) if values["prompt"] else ""
        demos = as_demos(values["demos"] or ())
        marked, images = take_images(shown)
        text = render(prompt, demos, marked, self.outputs, self.layout)
        head = (Message("system", self.system),) if self.system else ()
        return (*head, Message("user", (text, *images) if images else text))

    def request(self, inputs: Mapping[str, object], values: Mapping[str, object]) -> Request:
        """Return the first request for inputs, of which some may be missing, and values; its seed is 0."""
        return self._request(self.messages(inputs, values), values, 0)

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        if not values["lm"]:
            raise DeclarationError(
                f"LLM {self.name!r} has no model",
                hint="set lm, for example lm='smollm2', on it or on the system",
            )
        messages = self.messages(inputs, values)
        attempts = self.most_reasks + 1
        for attempt in range(attempts):
            completion = await call.generate(
                entry(values, "lm", str), self._request(messages, values, call.seed + attempt)
            )
            is_cut = completion.finish_reason == "length"
            try:
                found = parse(completion.text, self.outputs, self.layout, is_cut=is_cut)
            except ParseError as error:
                problem = with_cause(error, completion, values["max_tokens"])
                if attempt + 1 == attempts:
                    raise problem from None
                answer = Message("assistant", completion.text)
                asked = correction(problem.message, self.answer_format)
                messages = (*messages, answer, Message("user", asked))
            else:
                self._warn_of_thoughts(completion.text)
                return found
        raise AssertionError("the last attempt returns or raises")

    def _warn_of_thoughts(self, text: str) -> None:
        """Warn if an answer that is a text has thoughts, which training needs, but other uses rarely."""
        is_text = self.layout == "text" and [port.type for port in self.outputs.values()] == [str]
        if is_text and self.weights is None and after_thoughts(text) != text:
            warnings.warn(
                f"{self.name!r}: the text starts with thoughts; to read it without them, turn them off "
                "(chat_template_kwargs: {enable_thinking: false}), or declare the output as str | None",
                stacklevel=2,
            )

    def _request(self, messages: tuple[Message, ...], values: Mapping[str, object], seed: int) -> Request:
        weights = values["weights"]
        return Request(
            messages=messages,
            max_tokens=entry(values, "max_tokens", int),
            temperature=entry(values, "temperature", (int, float)),
            stop=tuple(self.stop),
            seed=seed % 2**64,
            adapter=Adapter(**weights) if is_reference(weights) else None,
            want_tokens=self.weights is not None,
            cue=answer_cue(self.outputs, self.layout),
            format=self.answer_format,
        )


def with_cause(error: ParseError, completion: Completion, max_tokens: object) -> ParseError:
    """Return the error, with the remark that the text was truncated if it was."""
    if completion.finish_reason != "length":
        return error
    message = f"{error.message} (the text was truncated at max_tokens={max_tokens})"
    return ParseError(message, outputs=error.outputs)


def correction(problem: str, answer: AnswerFormat | None) -> str:
    """Return the message of a re-ask."""
    only = "the corrected JSON" if answer is not None and answer.schema else "the corrected answer"
    return f"The answer is invalid: {problem[:MAX_ERROR_CHARACTERS]}\nReply with {only} only."


def labelled(values: Mapping[str, Extent]) -> Extent:
    """Bound the size of labelled values, one per line."""
    labels = sum(len(field_label(name).encode()) + len(": \n\n") for name in values)
    return sum(values.values(), Extent(labels))


def written_extent(kind: object, tokens: float) -> Extent:
    """Bound the value of a type that a model can write with the given number of tokens."""
    fixed = extent_of_type(kind, "")
    if fixed.finite:
        return fixed
    if kind is str:
        return Extent(0, tokens)
    return Extent(LIST_ITEM_BYTES * tokens, tokens, items=tokens)  # prompts number the items of a list
