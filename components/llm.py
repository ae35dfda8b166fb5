"""Language model component; its settings are the prompt, demonstrations, model and sampling parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from compound.components.answers.answer_types import answer_format, is_plain, takes_any_text
from compound.components.answers.type_notes import Layout, json_note, type_note
from compound.components.fields import answer_cue, parse, render, take_images
from compound.core.engine import Adapter, AnswerFormat, Completion, Message, Request
from compound.core.errors import DeclarationError, ParseError
from compound.core.narrowing import check_fields, entry, report_wrong_arguments
from compound.core.storage.artifacts import is_reference
from compound.execution.answer_text import after_thoughts
from compound.graph.component import CallContext, Operation, check_name
from compound.graph.configuration import digest
from compound.graph.space import Choice, Demo, Demos, Float, Int, Text, Weights, as_demos
from compound.graph.types import Port, identify_type

PROMPT_FORMAT = 2  # version; increment it when the same settings render another prompt


@report_wrong_arguments
@dataclass(frozen=True, eq=False, repr=False)
class LLM(Operation):
    """A call to a language model.

    The connected edges define the inputs, unless ``takes`` declares them. Values of type `Image`,
    also within collections, pydantic models and dataclasses, are sent as images to models that take
    them. Each setting may be a plain value, a space to tune, or an edge from another node.

    Attributes:
        name: the component's name.
        prompt: the instruction.
        output: one type (field ``output``), or types by field name. The prompt states every type
            except a single text, and an answer that cannot be converted to its type is an error. A
            pydantic model, a dataclass, a TypedDict or a JSON schema (`json_type`) is answered as
            JSON.
        demos: demonstrations shown before the inputs.
        lm: the model's name; ``None`` uses the system's model.
        temperature: sampling temperature; 0 is greedy and makes the component deterministic.
        max_tokens: maximum length of the answer in tokens.
        stop: strings that end the answer.
        format: output layout: ``text`` (one field), ``fields`` (``name: value`` lines) or ``json``;
            ``auto`` is ``text`` for one field, and for several ``fields``, or ``json`` if one of
            them is structured.
        enforce: whether engines that can restrict the answer to its type: by constrained decoding,
            or by the response format of a provider. The layout ``fields`` is not enforced.
        reasks: maximum number of further requests after an answer that cannot be parsed; each shows
            the model its answer and the error. Default: 1; 0 for a single text, and for trained
            components, whose samples must be single answers.
        weights: LoRA adapter weights; tunable if given.
        takes: declared inputs and their types.
        system: the system message.
        timeout: time limit of one attempt of a remote model in seconds; models in this process have
            none.
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
    temperature: NonNegativeFloat | Float | Choice = 0.0
    max_tokens: PositiveInt | Int | Choice = 256
    stop: tuple[str, ...] = ()
    format: Literal["auto", "text", "fields", "json"] = "auto"
    enforce: bool = True
    reasks: NonNegativeInt | None = None
    weights: Weights | None = None
    takes: Mapping[str, object] | None = None
    system: str = ""
    timeout: PositiveFloat | None = 120.0
    retries: NonNegativeInt = 3

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
        if self.reasks and self.weights is not None:
            raise DeclarationError(
                f"LLM {self.name!r}: a component with weights cannot ask again, because each sample that "
                "trains it must be a single answer",
                hint="set reasks=0, or remove weights",
            )

    @property
    def inputs(self) -> Mapping[str, Port] | None:  # noqa: D102
        return (
            None if self.takes is None else {name: Port(kind) for name, kind in self.takes.items()}
        )

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
        return int(
            self.layout != "text" or not all(takes_any_text(p.type) for p in self.outputs.values())
        )

    @property
    def version(self) -> str:  # noqa: D102
        fields = {name: identify_type(port.type) for name, port in self.outputs.items()}
        trained = self.weights is not None  # results have token records, so caches must differ
        parts = [PROMPT_FORMAT, fields, self.layout, self.stop, self.system, trained]
        note = type_note(self.outputs, self.layout) or json_note(self.outputs, self.layout)
        enforced = self.answer_format.to_json() if self.answer_format else ""
        reasks = {"reasks": self.most_reasks} if self.most_reasks else ""
        return "llm:" + digest([*parts, *filter(None, (note, enforced, reasks))])

    def deterministic(self, values: Mapping[str, object]) -> bool:  # noqa: D102
        return not values["temperature"]

    def messages(
        self, inputs: Mapping[str, object], values: Mapping[str, object]
    ) -> tuple[Message, ...]:
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
        return self.build_request(self.messages(inputs, values), values)

    def build_request(self, messages: tuple[Message, ...], values: Mapping[str, object]) -> Request:
        """Return a request of messages with the sampling parameters, adapter and format; its seed is 0."""
        weights = values["weights"]
        return Request(
            messages=messages,
            max_tokens=entry(values, "max_tokens", int),
            temperature=entry(values, "temperature", (int, float)),
            stop=tuple(self.stop),
            adapter=Adapter(**weights) if is_reference(weights) else None,
            want_tokens=self.weights is not None,
            cue=answer_cue(self.outputs, self.layout),
            format=self.answer_format,
        )

    async def run(  # noqa: D102
        self, inputs: Mapping[str, object], values: Mapping[str, object], call: CallContext
    ) -> Mapping[str, object]:
        if not values["lm"]:
            raise DeclarationError(
                f"LLM {self.name!r} has no model",
                hint="set lm, for example lm='smollm2', on it or on the system",
            )
        request, lm = self.request(inputs, values), entry(values, "lm", str)

        def read(completion: Completion) -> Mapping[str, object]:
            is_cut = completion.finish_reason == "length"
            with noting_truncation(completion, request.max_tokens):
                found = parse(completion.text, self.outputs, self.layout, is_cut=is_cut)
            self._warn_of_thoughts(completion.text)
            return found

        return await ask(call, lm, request, read, self.most_reasks)

    def _warn_of_thoughts(self, text: str) -> None:
        """Warn if an answer that is a text has thoughts, which training needs, but other uses rarely."""
        is_text = self.layout == "text" and [port.type for port in self.outputs.values()] == [str]
        if is_text and self.weights is None and after_thoughts(text) != text:
            warnings.warn(
                f"{self.name!r}: the text starts with thoughts; to read it without them, turn them off "
                "(chat_template_kwargs: {enable_thinking: false}), or declare the output as str | None",
                stacklevel=2,
            )


T = TypeVar("T")
Revise = Callable[[Request, Completion | None, ParseError], Request | None]

MAX_ERROR_CHARACTERS = 500  # of the error that a re-ask shows


def correction(problem: str, answer: AnswerFormat | None) -> str:
    """Return the message of a re-ask."""
    only = "the corrected JSON" if answer is not None and answer.schema else "the corrected answer"
    return f"The answer is invalid: {problem[:MAX_ERROR_CHARACTERS]}\nReply with {only} only."


def corrected(request: Request, completion: Completion | None, error: ParseError) -> Request:
    """Return a request that shows the model its answer and the error."""
    said = [Message("assistant", completion.text)] if completion and completion.text else []
    asked = Message("user", correction(error.message, request.format))
    return replace(request, messages=(*request.messages, *said, asked))


async def ask(
    call: CallContext,
    lm: str,
    request: Request,
    read: Callable[[Completion], T],
    reasks: int,
    revise: Revise = corrected,
) -> T:
    """Send a request, and return its answer as read; ask again while it cannot be read.

    Args:
        call: the running call, whose seed is that of the first request; each further one adds 1.
        lm: the name of the model.
        request: the first request.
        read: reads an answer, or raises `ParseError`.
        reasks: maximum number of further requests.
        revise: returns the next request; ``None`` to ask no further.

    Raises:
        ParseError: the last answer cannot be read.
    """
    attempt = 0
    while True:
        completion = None
        try:
            completion = await call.generate(
                lm, replace(request, seed=(call.seed + attempt) % 2**64)
            )
            return read(completion)
        except ParseError as error:
            revised = revise(request, completion, error) if attempt < reasks else None
            if revised is None:
                raise
        request, attempt = revised, attempt + 1


@contextmanager
def noting_truncation(completion: Completion, max_tokens: int) -> Iterator[None]:
    """Add to a `ParseError` of the block that the text was truncated, if it was."""
    try:
        yield
    except ParseError as error:
        if completion.finish_reason != "length":
            raise
        message = f"{error.message} (the text was truncated at max_tokens={max_tokens})"
        raise ParseError(message, outputs=error.outputs) from None
