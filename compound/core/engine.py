"""Engine protocol, with its requests, completions and usage records."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from compound.core.image import Image
import functools
from collections.abc import Iterable
from operator import itemgetter

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls"]
ToolChoice = Literal["auto", "none"]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Number of prompt tokens so far, and how many of them were reused from a shared prefix.

    >>> Prefilled(tokens=1000, cached=640).share
    0.64
    >>> Prefilled(10, 4) + Prefilled(20, 6)
    Prefilled(tokens=30, cached=10)
    """

    tokens: int = 0
    cached: int = 0

    @property
    def share(self) -> float:
        """Fraction of prompt tokens that were reused."""
        return self.cached / self.tokens if self.tokens else 0.0

    def __add__(self, other: Prefilled) -> Prefilled:
        return Prefilled(self.tokens + other.tokens, self.cached + other.cached)

    def __sub__(self, other: Prefilled) -> Prefilled:
        return Prefilled(self.tokens - other.tokens, self.cached - other.cached)


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage of a call: engine calls, tokens, and cost in US dollars.

    ``unpriced`` counts the calls whose price is unknown; they add nothing to ``cost``.

    >>> Usage(calls=1, prompt_tokens=10) + Usage(calls=1, completion_tokens=4)
    Usage(calls=2, prompt_tokens=10, completion_tokens=4, cost=0.0, unpriced=0)
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    unpriced: int = 0

    @property
    def tokens(self) -> int:
        """Total of prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {
            "calls": self.calls,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cost": self.cost,
            "unpriced": self.unpriced,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Usage:
        """Parse the output of `to_json`."""
        return Usage(**data)

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cost + other.cost,
            self.unpriced + other.unpriced,
        )


OnText = Callable[[str], None]  # receives a piece of text; may be called from any thread

NO_USAGE = Usage()


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Format of an answer's text: a JSON schema or a list of choices.

    Exactly one of the two is set. Engines enforce it where they can; others ignore it, so the
    prompt must also describe it, and the answer must still be parsed.
    """

    schema: str = ""
    choices: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the field that is set, as JSON types."""
        return {"schema": self.schema} if self.schema else {"choices": list(self.choices)}


FORMAT_OVERHEAD = 1024  # bytes around a schema in the request of a provider


def format_bytes(answer: AnswerFormat | None) -> int:
    """Bound the prompt tokens that a format adds if a provider shows it to the model, by its bytes."""
    if answer is None:
        return 0
    return (
        FORMAT_OVERHEAD
        + len(answer.schema.encode())
        + sum(len(c.encode()) + 8 for c in answer.choices)
    )


ESCAPED = 6  # maximum bytes of a byte in JSON text, as in \\u003c
TOOL_OVERHEAD = 256  # bytes around the declaration of a tool, or around a call of one
MAX_IMAGE_TOKENS = 50_000  # of one image, by the price list of the most expensive provider


def _json_bytes(*texts: str) -> int:
    return TOOL_OVERHEAD + ESCAPED * sum(len(text.encode()) for text in texts)


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """Declaration of a tool for a model.

    Attributes:
        name: name by which the model calls it.
        description: what it does, and when to call it.
        parameters: JSON schema of its arguments, as JSON text.
    """

    name: str
    description: str
    parameters: str

    @property
    def size(self) -> int:
        """Upper bound of its prompt tokens, by its bytes in JSON."""
        return _json_bytes(self.name, self.description, self.parameters)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a tool by a model.

    Attributes:
        id: identifies the call in the message that answers it.
        name: name of the tool as the model wrote it.
        arguments: the arguments as the model wrote them, which may be invalid JSON.
    """

    id: str
    name: str
    arguments: str

    @property
    def size(self) -> int:
        """Upper bound of its prompt tokens, by its bytes in JSON."""
        return _json_bytes(self.id, self.name, self.arguments)


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message.

    Attributes:
        role: ``system``, ``user``, ``assistant``, or ``tool`` for the result of a tool call.
        content: a text, or parts, each a text or an `Image`.
        tool_calls: tools that an assistant's message calls.
        tool_call_id: the call that a tool's message answers.

    >>> Message("user", ("Which animal", "is this?")).text
    'Which animal\\nis this?'
    """

    role: Role
    content: str | tuple[str | Image, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    @property
    def text(self) -> str:
        """The content as text; an image becomes a short description."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part if isinstance(part, str) else part.label for part in self.content)

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of the content."""
        if isinstance(self.content, str):
            return ()
        return tuple(part for part in self.content if not isinstance(part, str))

    @property
    def size(self) -> int:
        """Upper bound of its prompt tokens: bytes of texts and tool calls, and the most that images take."""
        calls = sum(call.size for call in self.tool_calls)
        return (
            len(self.text.encode())
            + MAX_IMAGE_TOKENS * len(self.images)
            + calls
            + len(self.tool_call_id)
        )


# The values of a `TokenRecord`; rows of calls without a constraint end after the adapter.
TokenRow = (
    tuple[Sequence[int], Sequence[int], Sequence[float], FinishReason, str]
    | tuple[Sequence[int], Sequence[int], Sequence[float], FinishReason, str, str]
)


@dataclass(frozen=True, slots=True, repr=False)
class TokenRecord:
    """Tokens of one completion, captured at sampling time and never re-tokenized.

    ``prompt`` and ``sampled`` are token ids; ``logprobs[i]`` is the sampler's log-probability
    (nats) of ``sampled[i]`` under the distribution it was drawn from (after temperature). A sampled
    end-of-turn token is part of ``sampled``. ``adapter`` is the digest of the adapter used, ``""``
    for the base model.

    ``constraint`` describes the restriction of a constrained answer as JSON, ``""`` without one.
    Each token of a constrained answer was drawn among the tokens that the restriction allowed, and
    ``logprobs`` belong to that renormalized distribution; see `compound.engines.local.constraints`.
    """

    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    adapter: str = ""
    constraint: str = ""

    @property
    def row(self) -> TokenRow:
        """The field values in declaration order, as JSON types."""
        prompt, sampled, logprobs = list(self.prompt), list(self.sampled), list(self.logprobs)
        if not self.constraint:
            return prompt, sampled, logprobs, self.finish_reason, self.adapter
        return prompt, sampled, logprobs, self.finish_reason, self.adapter, self.constraint

    @staticmethod
    def from_row(row: TokenRow) -> TokenRecord:
        """Build a record from a row."""
        prompt, sampled, logprobs, reason, adapter, *rest = row
        return TokenRecord(
            token_ids(prompt), token_ids(sampled), tuple(logprobs), reason, adapter, *rest
        )

    def __repr__(self) -> str:
        sizes = f"{len(self.prompt)} prompt tokens, {len(self.sampled)} sampled"
        return (
            f"TokenRecord({sizes}, finish_reason={self.finish_reason!r}, adapter={self.adapter!r})"
        )


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter: its folder, and the digest of the folder's content, which serves as its version."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Forward:
    """A request in the format of OpenAI's API, which an engine with `forwards` sends as it is.

    Attributes:
        route: the route, such as ``chat/completions``.
        body: the body as JSON text; the engine sets ``model`` and the fields of streams.
        stream: whether the engine reports the server's events to ``on_text`` as they arrive,
            unchanged.
    """

    route: str
    body: str
    stream: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a language model.

    ``seed`` (64 bits) selects the random stream: the same request with the same seed gives the same
    text on an engine that supports it. ``temperature`` 0 means greedy. ``stop`` strings end the
    text and are not part of it. ``adapter`` is applied to the base model. ``want_tokens`` requests
    a `TokenRecord`. ``cue`` is the start of the answer: engines that support prefilling prefill it,
    others append it to the last message; it is never part of the completion's text. ``format`` is
    the format of the answer, which engines enforce where they can, unless it may be a tool call.
    ``tools`` may be called; with the ``tool_choice`` ``none`` they are declared, but the model must
    answer. ``forward`` is a whole request in OpenAI's format; only engines with ``forwards``
    receive it, and they send it in place of the other fields.
    """

    messages: tuple[Message, ...]
    max_tokens: int = 256
    temperature: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int = 0
    adapter: Adapter | None = None
    want_tokens: bool = False
    timeout: float | None = None
    cue: str = ""
    format: AnswerFormat | None = None
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = "auto"
    forward: Forward | None = None

    @property
    def may_call(self) -> bool:
        """Whether the answer may be a tool call, which need not have the ``format``."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def uses_tools(self) -> bool:
        """Whether tools are declared, or messages call tools."""
        return bool(self.tools) or any(m.tool_calls or m.role == "tool" for m in self.messages)

    @property
    def size(self) -> int:
        """Upper bound of the prompt tokens of its messages and tools, without what a chat format adds."""
        return sum(message.size for message in self.cued) + sum(tool.size for tool in self.tools)

    @property
    def cued(self) -> tuple[Message, ...]:
        """Messages with the cue appended, for engines without prefilling."""
        if not self.cue:
            return self.messages
        *earlier, last = self.messages
        if isinstance(last.content, str):
            return (*earlier, replace(last, content=f"{last.content}\n{self.cue}"))
        return (*earlier, replace(last, content=(*last.content, self.cue)))


@dataclass(frozen=True, slots=True)
class Completion:
    """Answer of a language model: a text, calls of the request's tools, or both.

    ``body`` is the server's whole answer as JSON text, if the request was forwarded as it is.
    """

    text: str
    usage: Usage = NO_USAGE
    finish_reason: FinishReason = "stop"
    tokens: TokenRecord | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    body: str = ""


@runtime_checkable
class Engine(Protocol):
    """A language model that answers requests.

    ``concurrency`` is the maximum number of requests in flight, enforced by the executor. Raise
    `TransientError` for errors worth retrying, and `CallError` or any other exception otherwise. An
    engine that can report text as it arrives also has ``stream``; see `StreamingEngine`. Further
    members are optional; see `Capabilities`.

    The cache of `cp.evaluate` outlives the process. It holds answers only of an engine whose own
    class, or which itself, sets ``stable_name = True``: equal names then mean equal answers, also
    in other processes.
    """

    @property
    def name(self) -> str:
        """Name used in cache keys: the model and every option that changes its answers."""
        ...

    @property
    def concurrency(self) -> int:
        """Maximum number of requests in flight."""
        ...

    @property
    def remote(self) -> bool:
        """Whether an answer may never arrive; time limits exclude waits for a model in this process."""
        ...

    @property
    def priced(self) -> bool:
        """Whether the cost in `Usage` is known; an unpriced engine cannot be used under a cost budget."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Answer one request."""
        ...

    def worst_case(self, request: Request) -> Usage:
        """Return an upper bound of the request's usage, which the budget reserves."""
        ...

    async def aclose(self) -> None:
        """Release the engine's resources."""
        ...


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """An engine that can release the memory of GPUs while other work of this process computes on them.

    Optional: without ``asleep``, an engine keeps its memory.
    """

    def asleep(self, gpus: Collection[str]) -> AbstractAsyncContextManager[bool]:
        """Release the memory of GPUs while the block runs, after the requests in flight; later ones wait.

        Yields whether memory was released. ``gpus`` are names as in CUDA_VISIBLE_DEVICES.
        """
        ...


@runtime_checkable
class AdapterEngine(Engine, Protocol):
    """An engine that can load adapters before it samples with them.

    Optional: without ``admit``, an engine loads an adapter at its first use.
    """

    @property
    def max_loras(self) -> int:
        """Maximum number of adapters that are loaded at the same time."""
        ...

    async def admit(self, adapter: Adapter) -> None:
        """Load an adapter and check it, without sampling.

        Adapters that are requested at the same time should be loaded together.

        Raises:
            CompoundError: the engine does not support the adapter.
        """
        ...


@runtime_checkable
class StreamingEngine(Engine, Protocol):
    """An engine that reports the text of an answer as it arrives.

    Optional: without ``stream``, an answer is reported as a whole.
    """

    async def stream(self, request: Request, on_text: OnText) -> Completion:
        """Answer one request like `generate`, and call ``on_text`` with each piece of the text, in order.

        The pieces of a complete answer form the completion's text. ``on_text`` does not block.
        """
        ...


T = TypeVar("T")


class _Optional(Generic[T]):
    """A member of engines with a default; it is read on access, because some members load files."""

    def __init__(self, default: T) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, capabilities: Capabilities, owner: type) -> T:
        found: T | None = getattr(capabilities.engine, self._name, None)
        return self._default if found is None else found


async def _no_warm_up() -> None: ...


@dataclass(frozen=True)
class Capabilities:
    """Optional members of an engine or its class, with the defaults for one that lacks them.

    With ``native_tools`` an engine receives `Request.tools` and returns `Completion.tool_calls`;
    others receive a text that describes the tools (see `compound.execution.tool_text`).
    ``writes_prompts`` declares whether searches ask it for new prompts; by default they do if it is
    ``remote``.

    >>> from compound.testing import ScriptedLM
    >>> Capabilities(ScriptedLM([], takes_images=True)).takes_images, Capabilities(object()).max_wait
    (True, 600.0)
    """

    engine: object

    native_tools = _Optional(False)
    takes_images = _Optional(False)
    takes_format = _Optional(True)  # in another way than in the prompt
    unsupported = _Optional[Collection[str]](())  # fields of requests that are left out
    forwards = _Optional(False)  # requests in OpenAI's format, as they are
    writes_prompts = _Optional[bool | None](None)
    max_wait = _Optional(600.0)  # seconds that a call waits for rate limits
    warm_up = _Optional[Callable[[], Awaitable[object]]](_no_warm_up)  # awaited before each request
    require_key = _Optional[Callable[[], object]](bool)  # raises if the API key is missing
    model = _Optional("")
    api_base = _Optional[object](None)
    code_settings = _Optional[tuple[str, ...]](())  # settings that can execute code
    trainable = _Optional[str | None](None)  # the model whose adapters it serves
    max_lora_rank = _Optional[int | None](None)
    max_loras = _Optional(0)  # adapters that are loaded at the same time
    distribution_options = _Optional[Sequence[str]](())
    dtype = _Optional("auto")
    quantization = _Optional("auto")
    chat_template = _Optional("")
    chat_template_kwargs = _Optional[Mapping[str, object] | None](None)
    prefill = _Optional(Prefilled())
    prepare = _Optional[Callable[[int], object]](bool)  # with the rank that adapters need
    limit_gpu_memory = _Optional[Callable[[Mapping[str, float]], object]](
        bool
    )  # of a server, by GPU


SIZE = 300_000  # above the largest vocabularies; larger ids are kept, but not shared


@functools.cache
def _integers() -> tuple[int, ...]:
    """Return the shared objects, which take about 10 MiB."""
    return tuple(range(SIZE))


def token_ids(ids: Iterable[int]) -> tuple[int, ...]:
    """Return token ids as a tuple; in tuples of two and more, equal ids are one object in this process.

    Otherwise each id above 256 is an object of 28 bytes, in addition to 8 bytes in the tuple.

    >>> one, other = token_ids([5000, 7]), token_ids([int("5000"), 8])
    >>> one, one[0] is other[0]
    ((5000, 7), True)
    """
    found = tuple(ids)
    if len(found) < 2:  # `itemgetter` returns tuples for two and more
        return found
    try:
        shared: tuple[int, ...] = itemgetter(*found)(_integers())
    except (
        IndexError,
        TypeError,
    ):  # ids above `SIZE`, or a malformed file, which is not checked here
        return found
    return shared if min(found) >= 0 else found  # negative ids would count from the end
