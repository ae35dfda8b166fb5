"""Engine for language models in this process, which gathers concurrent calls into batches for one thread.

No torch code runs on the event loop. The worker takes the waiting calls once the loop is idle, so
that calls made together form one batch; while it works, the next batch accumulates. All calls of a
batch use the same adapter, or none: that of the call that has waited longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from compound.core.engine import (
    Completion,
    Message,
    OnText,
    Prefilled,
    Request,
    TokenRecord,
    ToolCall,
    ToolSpec,
    Usage,
    token_ids,
)
from compound.core.errors import CallError, DeclarationError, TransientError
from compound.core.formatting import plural
from compound.core.narrowing import report_wrong_arguments
from compound.engines.chat_format import ReportedText, finish_reason
from compound.engines.local import loading
from compound.engines.local.chat_tokens import ChatTokenizer, has_tools, read_calls
from compound.engines.local.devices import (
    Attention,
    DeviceName,
    DType,
    Placement,
    Quantization,
    is_out_of_memory,
    naming_settings,
)
from compound.engines.options import Count, Plain, Wait, takes_settings
from compound.engines.remote import HEAD, TURN
from compound.graph.configuration import digest

if TYPE_CHECKING:
    from compound.engines.local.decoding import Decoder, SamplingRow

RESERVED = {  # arguments of `apply_chat_template`
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
    *("documents", "max_length", "messages", "padding", "return_assistant_tokens_mask"),
    *("return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
}


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request, the event loop and future that wait for it, and its row once it has one."""

    request: Request
    loop: asyncio.AbstractEventLoop
    future: Future[Completion] = field(default_factory=Future)
    row: SamplingRow | None = None
    abandoned: bool = False
    reported: ReportedText | None = None

    def abandon(self) -> None:
        """Cancel the request; its row leaves the batch at the next token."""
        self.abandoned = True
        if self.row is not None:
            self.row.abandoned = True


@dataclass(frozen=True)
class TransformersSettings:
    """Settings of `TransformersEngine`, which describes them."""

    model: str = "smollm2"
    _: KW_ONLY
    dtype: DType = "auto"
    device: DeviceName = "auto"
    attn_implementation: Attention = "auto"
    quantization: Quantization = "none"
    max_batch: Count = 64
    max_wait_ms: Wait = 20.0
    deterministic: bool = False
    max_batch_tokens: Count = 49_152
    max_adapters: Count = 8
    chat_template: str = ""
    chat_template_kwargs: dict[str, Plain] | None = None
    native_tools: bool | None = None
    skip_special_tokens: bool = True


@report_wrong_arguments
class TransformersEngine:
    """Engine that runs a local model with transformers; the model is loaded at the first call.

    Args:
        model: ``smollm2``, ``gemma3-270m``, a folder, or a hub id; see `compound.engines.models`.
        dtype: number format of the weights; ``auto`` uses bfloat16 on a GPU, and the faster of
            bfloat16 and float32 on a CPU, which is measured.
        device: ``auto`` (CUDA if available, else the CPU), ``cpu``, ``cuda``, ``cuda:1``, ``xpu``
            or ``mps``.
        attn_implementation: the attention kernels: ``eager``, ``sdpa`` or ``flash_attention_2``
            (CUDA, with flash-attn installed); ``auto`` is transformers' choice, or a faster one for
            bfloat16 on a CPU.
        quantization: ``8bit`` or ``4bit`` (NF4) quantizes the linear layers by bitsandbytes (extra
            ``quantized``), on CUDA only.
        max_batch: maximum number of calls in a batch.
        max_wait_ms: maximum time in milliseconds to wait for more calls before a batch starts.
        deterministic: make results bit-identical for any concurrent calls, at lower speed.
        max_batch_tokens: maximum number of tokens in a batch, prompts and answers together.
        max_adapters: maximum number of LoRA adapters in memory, in addition to the base model.
        chat_template: a Jinja template that replaces the model's own, or serves a base model that
            has none; in YAML also the name of a ``.jinja`` file. It runs in a sandbox, with
            ``messages`` (each with ``role`` and ``content``), ``add_generation_prompt``,
            ``bos_token`` and ``eos_token``.
        chat_template_kwargs: further variables of the chat template, such as ``{"enable_thinking":
            False}``.
        native_tools: whether tools are declared by the chat template, instead of in the prompt. By
            default they are if the template has ``tools`` and asks for calls as
            ``<tool_call>{…}</tool_call>``. Calls in the prompt's form are enforced by constrained
            decoding; those of a template are not.
        skip_special_tokens: whether special tokens that the model samples are left out of the text.
            The end token always is.

    Example:
        >>> engine = TransformersEngine("smollm2", dtype="float32")
        >>> engine.name
        'transformers:smollm2:float32'
        >>> engine.worst_case(Request((Message("user", "Hi"),), max_tokens=8)).completion_tokens
        8
    """

    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers", "safetensors")

    remote = False
    priced = True  # local computation: the cost is 0

    @takes_settings(TransformersSettings)
    def __init__(self, settings: TransformersSettings) -> None:
        self.settings, self.model = settings, settings.model
        self.placement = Placement(
            settings.device, settings.dtype, settings.attn_implementation, settings.quantization
        )
        self.chat_template = settings.chat_template
        self.chat_template_kwargs = dict(settings.chat_template_kwargs or {})
        self._check_settings()
        self.concurrency = 2 * settings.max_batch  # one batch runs while the next accumulates
        self._template_has_tools: bool | None = None  # known once the template has been read
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # of the chat template
        self._tokenizing = threading.Lock()  # tokenizers are not thread-safe
        self._worker: ThreadPoolExecutor | None = None
        self._waiting: list[PendingRequest] = []
        self._running: list[PendingRequest] = []
        self._arrived = 0  # number of calls so far; `_gather` waits until it stops increasing
        self._busy = False  # whether the worker runs or is scheduled
        self._tokenizer: ChatTokenizer | None = None
        self._decoder: Decoder | None = None
        self._context = 0
        self._prefilled = Prefilled()  # counts of closed decoders
        self._encode = functools.lru_cache(maxsize=4096)(self._tokenize)

    def _check_settings(self) -> None:
        try:
            self.placement.check("transformers")
        except DeclarationError as error:
            raise DeclarationError(
                f"engine {self.model!r}: {error.message}", hint=error.hint
            ) from None
        if self.chat_template and "messages" not in self.chat_template:
            raise DeclarationError(
                f"the chat template {self.chat_template!r:.100} does not contain the messages",
                hint="for example {{ bos_token }}{% for turn in messages %}{{ turn.content }}\n{% endfor %}",
            )
        if reserved := RESERVED & self.chat_template_kwargs.keys():
            raise DeclarationError(
                f"engine {self.model!r}: chat_template_kwargs must not set {min(reserved)!r}, "
                "set by the engine"
            )

    @property
    def name(self) -> str:  # noqa: D102
        given = self.settings
        template = f":template-{digest(self.chat_template)[:12]}" if self.chat_template else ""
        tools = "" if given.native_tools is None else f":native_tools={given.native_tools}"
        # the device and the attention kernels change results only by rounding
        bits = "" if self.quantization == "none" else f":{self.quantization}"
        values = self.chat_template_kwargs
        variables = f":variables-{digest(values)[:12]}" if values else ""
        special = "" if given.skip_special_tokens else ":skip_special_tokens=False"
        own = f"transformers:{self.model}:{self.dtype}{bits}{template}{variables}{tools}{special}"
        return own + ":deterministic" * given.deterministic

    @property
    def native_tools(self) -> bool:
        """Whether tools are declared by the chat template; loads the tokenizer if that decides."""
        if self.settings.native_tools is not None:
            return self.settings.native_tools
        with self._reading:
            if self._template_has_tools is None:
                template = self.chat_template or loading.chat_template(self.model)
                self._template_has_tools = has_tools(template)
            return self._template_has_tools

    @property
    def dtype(self) -> str:
        """Number format of the weights, which a trainer of this model uses as well."""
        return loading.dtype_of(self.placement)

    @property
    def quantization(self) -> str:
        """Quantization of the weights, which a trainer of this model uses as well."""
        return self.placement.quantization

    @property
    def loaded(self) -> bool:
        """Whether the model is in memory."""
        return self._decoder is not None

    @property
    def trainable(self) -> str:
        """Base model of the adapters that it supports."""
        return self.model

    @property
    def prefill(self) -> Prefilled:
        """Number of prompt tokens so far, and how many of them were reused from a shared prefix."""
        decoder = self._decoder
        return self._prefilled + decoder.prefilled if decoder is not None else self._prefilled

    @property
    def stable_name(self) -> bool:
        """Whether the name is that of a published model; the weights in a folder may change."""
        return not Path(self.model).is_dir()

    def worst_case(self, request: Request) -> Usage:  # noqa: D102
        if self._tokenizer is not None:
            with contextlib.suppress(CallError):
                return Usage(1, len(self._encode_request(request)), request.max_tokens)
        # at most the whole template is repeated for each message
        own = len(self.chat_template.encode())
        size = request.size + (TURN + own) * len(request.cued)
        return Usage(1, size + HEAD + own, request.max_tokens)  # a token has at least one byte

    async def generate(self, request: Request) -> Completion:  # noqa: D102
        return await self._enqueue(PendingRequest(request, asyncio.get_running_loop()))

    async def stream(self, request: Request, on_text: OnText) -> Completion:
        """Answer one request, and report its text after each token."""
        reported = ReportedText(request.stop, on_text)
        return await self._enqueue(
            PendingRequest(request, asyncio.get_running_loop(), reported=reported)
        )

    async def _enqueue(self, job: PendingRequest) -> Completion:
        """Add a request to the waiting ones, start the worker if it is idle, and wait for the answer."""
        with self._lock:
            self._waiting.append(job)
            self._arrived += 1
            if not self._busy:
                self._busy = True
                self._worker = self._worker or ThreadPoolExecutor(1, "compound-transformers")
                self._worker.submit(self._work)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            job.abandon()
            raise

    async def aclose(self) -> None:
        """Cancel running calls, join the worker and free the model; a later call reloads it."""
        with self._lock:
            worker, self._worker = self._worker, None
            for job in (*self._waiting, *self._running):
                job.abandon()
        if worker is not None:
            await asyncio.to_thread(worker.shutdown)
        self._prefilled = self.prefill
        loaded, self._decoder, self._tokenizer = self._decoder is not None, None, None
        self._encode.cache_clear()
        if loaded:
            await asyncio.to_thread(loading.release)

    # -- in the worker thread --------------------------------------------------------------------------

    def _work(self) -> None:
        """Run batches until no call waits; an error fails the calls of its batch."""
        while (jobs := self._gather()) is not None:
            try:
                batches = self._batches(jobs)
            except BaseException as error:  # noqa: BLE001 - every error must reach the waiting calls
                _fail(jobs, error)
                continue
            for batch in batches:
                try:
                    self._answer(batch)
                except BaseException as error:  # noqa: BLE001 - as above
                    _fail(batch, error)

    def _gather(self) -> list[PendingRequest] | None:
        """Take the waiting calls, once the event loops are idle or the maximum wait is over."""
        max_wait = self.settings.max_wait_ms / 1000
        until = time.monotonic() + max_wait
        seen = -1
        while (
            time.monotonic() < until
            and len(self._waiting) < self.settings.max_batch
            and seen != self._arrived
        ):
            seen = self._arrived
            for loop in {job.loop for job in tuple(self._waiting)}:
                _wait_until_idle(loop, until)
            time.sleep(max_wait / 5)
        with self._lock:
            taken = self._take_oldest()
            self._running = [job for job in taken if job.future.set_running_or_notify_cancel()]
            self._busy = bool(taken)
            return self._running if taken else None

    def _take_oldest(self) -> list[PendingRequest]:
        """Take the call that has waited longest, and the later calls with the same adapter."""
        adapter = self._waiting[0].request.adapter if self._waiting else None
        taken = [job for job in self._waiting if job.request.adapter == adapter]
        taken = taken[: self.settings.max_batch]
        chosen = set(taken)
        self._waiting = [job for job in self._waiting if job not in chosen]
        return taken

    def _batches(self, jobs: Sequence[PendingRequest]) -> list[list[PendingRequest]]:
        """Convert requests to rows, and rows to batches; an invalid request fails without the others."""
        from compound.engines.local.constraints import Constraint
        from compound.engines.local.decoding import SamplingRow

        self._decoder = self._decoder or self._load()
        owners: dict[int, PendingRequest] = {}
        rows: list[SamplingRow] = []
        for job in jobs:
            r = job.request
            try:
                prompt = self._prompt(r)
                # the grammar of an answer excludes tool calls
                enforced = None if r.may_call else r.format
                constraint = Constraint(enforced, bool(r.cue), r.max_tokens) if enforced else None
                state = self._decoder.start(constraint) if constraint else None
            except CallError as error:
                _fail([job], error)
                continue
            job.row = SamplingRow(
                prompt, r.max_tokens, r.temperature, r.stop, r.seed, r.want_tokens
            )
            job.row.abandoned = job.abandoned
            job.row.constraint, job.row.state = constraint, state
            if job.reported is not None:
                job.row.on_token = functools.partial(self._report, job)
            owners[id(job.row)] = job
            rows.append(job.row)
        return [[owners[id(row)] for row in batch] for batch in self._decoder.batches(rows)]

    def _answer(self, batch: Sequence[PendingRequest]) -> None:
        """Run a batch, whose calls share one adapter, and set the results of its calls."""
        decoder = self._decoder
        assert decoder is not None
        rows = [job.row for job in batch if job.row is not None]
        adapter = batch[0].request.adapter
        version = adapter.sha256 if adapter else ""
        try:
            decoder.run(rows, adapter)
        except (RuntimeError, MemoryError) as error:
            message = f"{self.name} failed on {plural(len(rows), 'call')}: {error}"
            if is_out_of_memory(error):
                message += "; lower max_batch or max_batch_tokens"
            raise TransientError(message) from error  # not caused by a particular request
        for job, row in zip(batch, rows, strict=True):
            if row.failure is not None:
                _fail([job], row.failure)
                continue
            if row.finish is None:
                _fail([job], CallError(f"{self.name} was closed during the call"))
                continue
            sampled = token_ids(row.sampled)
            constraint = row.constraint.to_text() if row.constraint else ""
            record = TokenRecord(
                row.prompt, sampled, tuple(row.logprobs), row.finish, version, constraint
            )
            usage = Usage(1, len(row.prompt), len(sampled))
            tokens = record if job.request.want_tokens else None
            text = decoder.text(row)
            if job.reported is not None:
                job.reported.update(text, complete=True)
            calls: tuple[ToolCall, ...] = ()
            if job.request.tools:
                text, calls = read_calls(text)
            finish = finish_reason(row.finish, calls)
            job.future.set_result(Completion(text, usage, finish, tokens, calls))

    def _report(self, job: PendingRequest, row: SamplingRow) -> None:
        """Report the text of a row after a token; the last part follows with the answer."""
        if self._decoder is not None and job.reported is not None and row.finish is None:
            job.reported.update(self._decoder.text(row))

    def _load(self) -> Decoder:
        with naming_settings(
            f"loading {self.model!r} on {self.placement.device}",
            "use a smaller model, dtype: bfloat16 or quantization: 4bit of its engine, or another device",
        ):
            model, tokenizer = loading.load(self.model, self.placement, self.chat_template)
        self._tokenizer = ChatTokenizer(tokenizer, self.model, self.chat_template_kwargs)
        self._context = model.config.max_position_embeddings
        from compound.engines.local.decoding import Decoder

        return Decoder(
            model,
            tokenizer,
            exact=self.settings.deterministic,
            skip_special_tokens=self.settings.skip_special_tokens,
            max_batch_tokens=self.settings.max_batch_tokens,
            max_adapters=self.settings.max_adapters,
        )

    def _prompt(self, request: Request) -> tuple[int, ...]:
        """Return a request's prompt tokens, after checking that they and the answer fit into the context."""
        tokens = self._encode_request(request)
        if request.max_tokens < 1:
            raise CallError(f"max_tokens must be at least 1, not {request.max_tokens}")
        if len(tokens) + request.max_tokens > self._context:
            raise CallError(
                f"a prompt of {len(tokens)} tokens and max_tokens={request.max_tokens} exceed the "
                f"{self._context} tokens of {self.model!r}",
                hint="shorten the prompt or its demonstrations, or lower max_tokens",
            )
        return tokens

    def _encode_request(self, request: Request) -> tuple[int, ...]:
        return self._encode(request.messages, request.cue, request.tools)

    def _tokenize(
        self, messages: tuple[Message, ...], cue: str, tools: tuple[ToolSpec, ...]
    ) -> tuple[int, ...]:
        """Return the tokens of a chat and of its cue; `worst_case` calls this on the event loop."""
        with self._tokenizing:
            assert self._tokenizer is not None  # loaded together with the model
            return self._tokenizer.encode(messages, cue, tools)


def _wait_until_idle(loop: asyncio.AbstractEventLoop, until: float) -> None:
    """Wait until an event loop has run all callbacks that are ready now."""
    answered = threading.Event()
    with contextlib.suppress(RuntimeError):  # a closed loop makes no more calls
        loop.call_soon_threadsafe(answered.set)
        answered.wait(max(0.0, until - time.monotonic()))


def _fail(jobs: Sequence[PendingRequest], error: BaseException) -> None:
    for job in jobs:
        if not job.future.done():
            job.future.set_exception(error)
