"""Language models in this process: concurrent calls are gathered into batches for one worker thread.

Nothing of torch runs on the event loop. The worker takes what waits, once the loop has gone idle, so that
calls made together are answered together; while it works, the next batch forms. A batch has one adapter, or
none: that of the call that has waited longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from compound.components.engines.local import loading
from compound.components.engines.options import Count, Wait, check_settings
from compound.components.engines.prefilled import Prefilled
from compound.engine import Completion, Message, Request, TokenRecord, Usage
from compound.errors import CallError, TransientError
from compound.formatting import plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from compound.components.engines.local.decoding import Decoder
    from compound.components.engines.local.sampling import Row

DType = Literal["auto", "float32", "bfloat16", "float16"]
HEAD, TURN = 128, 16  # tokens that chat templates add to a prompt, and to each of its messages


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request, who waits for it, and its row once it has one."""

    request: Request
    loop: asyncio.AbstractEventLoop
    future: Future[Completion] = field(default_factory=Future)
    row: Row | None = None
    abandoned: bool = False

    def abandon(self) -> None:
        """Let the row leave its batch at the next token."""
        self.abandoned = True
        if self.row is not None:
            self.row.abandoned = True


class TransformersEngine:
    """An engine over a local model, loaded at the first call.

    Args:
        model: ``smollm2``, a folder, or a hub id; see `compound.components.engines.models`.
        dtype: of the weights; ``auto`` takes bfloat16 on a GPU and the faster one on a CPU, by measuring.
        max_batch: the most calls decoded together.
        max_wait_ms: the longest wait for further calls before a batch starts.
        deterministic: results are the same bits whatever is called at the same time, for a price in speed.
        max_batch_tokens: the most tokens, prompts and answers, that a batch may hold in memory.
        max_adapters: how many LoRA adapters stay in memory, beside the one base model.

    Example:
        >>> engine = TransformersEngine("smollm2", dtype="float32")
        >>> engine.name
        'transformers:smollm2:float32'
        >>> engine.worst_case(Request((Message("user", "Hi"),), max_tokens=8)).completion_tokens
        8
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        dtype: DType = "auto",
        max_batch: Count = 64,
        max_wait_ms: Wait = 20.0,
        deterministic: bool = False,
        max_batch_tokens: Count = 49_152,
        max_adapters: Count = 8,
    ) -> None:
        given = {
            "dtype": dtype, "max_batch": max_batch, "max_wait_ms": max_wait_ms,
            "deterministic": deterministic, "max_batch_tokens": max_batch_tokens,
            "max_adapters": max_adapters,
        }  # fmt: skip
        check_settings(TransformersEngine, given)
        self.model, self.max_batch, self._max_wait = model, max_batch, max_wait_ms / 1000
        self.deterministic, self.max_batch_tokens = deterministic, max_batch_tokens
        self.max_adapters = max_adapters
        self._dtype = dtype
        self._lock = threading.Lock()
        self._tokenizing = threading.Lock()  # a tokenizer is not made for two threads
        self._worker: ThreadPoolExecutor | None = None
        self._waiting: list[PendingRequest] = []
        self._running: list[PendingRequest] = []
        self._arrived = 0  # calls so far: what the gathering looks at
        self._busy = False  # whether the worker is at it, or told to be
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._decoder: Decoder | None = None
        self._context = 0
        self._prefilled = Prefilled()  # by decoders that are closed
        self._encode = functools.lru_cache(maxsize=4096)(self._tokenize)

    @property
    def name(self) -> str:  # noqa: D102
        return f"transformers:{self.model}:{self.dtype}" + ":deterministic" * self.deterministic

    @property
    def dtype(self) -> str:
        """The number format of the weights: its trainer's, too."""
        return loading.fastest_dtype() if self._dtype == "auto" else self._dtype

    @property
    def trainable(self) -> str:
        """The model whose adapters it samples with."""
        return self.model

    @property
    def prefill(self) -> Prefilled:
        """How many prompt tokens it read so far, and how many of them were in a beginning it had read."""
        decoder = self._decoder
        return self._prefilled + decoder.prefilled if decoder is not None else self._prefilled

    @property
    def concurrency(self) -> int:  # noqa: D102
        return 2 * self.max_batch  # one batch at work and one forming

    @property
    def remote(self) -> bool:  # noqa: D102
        return False

    @property
    def priced(self) -> bool:  # noqa: D102
        return True  # it runs here, for nothing

    def worst_case(self, request: Request) -> Usage:  # noqa: D102
        if self._tokenizer is not None:
            with contextlib.suppress(CallError):
                return Usage(1, len(self._encode(request.messages, request.cue)), request.max_tokens)
        size = sum(len(message.content.encode()) + TURN for message in request.cued)
        return Usage(1, size + HEAD, request.max_tokens)  # a token holds at least a byte

    async def generate(self, request: Request) -> Completion:  # noqa: D102
        job = PendingRequest(request, asyncio.get_running_loop())
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
        """Give up what is running, join the worker and free the model; a later call starts afresh."""
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
        """Answer batches until nothing waits; an error reaches those who wait for that batch."""
        while (jobs := self._gather()) is not None:
            try:
                batches = self._batches(jobs)
            except BaseException as error:  # noqa: BLE001 - whoever waits must hear of it, whatever it is
                _fail(jobs, error)
                continue
            for batch in batches:
                try:
                    self._answer(batch)
                except BaseException as error:  # noqa: BLE001 - as above
                    _fail(batch, error)

    def _gather(self) -> list[PendingRequest] | None:
        """Take what waits, once the event loops have nothing more to send or the longest wait is over."""
        until = time.monotonic() + self._max_wait
        seen = -1
        while time.monotonic() < until and len(self._waiting) < self.max_batch and seen != self._arrived:
            seen = self._arrived
            for loop in {job.loop for job in tuple(self._waiting)}:
                _settle(loop, until)
            time.sleep(self._max_wait / 5)
        with self._lock:
            taken = self._first()
            self._running = [job for job in taken if job.future.set_running_or_notify_cancel()]
            self._busy = bool(taken)
            return self._running if taken else None

    def _first(self) -> list[PendingRequest]:
        """Take the call that has waited longest, and those behind it that want the same adapter."""
        wanted = self._waiting[0].request.adapter if self._waiting else None
        taken = [job for job in self._waiting if job.request.adapter == wanted][: self.max_batch]
        chosen = set(taken)
        self._waiting = [job for job in self._waiting if job not in chosen]
        return taken

    def _batches(self, jobs: Sequence[PendingRequest]) -> list[list[PendingRequest]]:
        """Turn requests into rows, and rows into batches; a request that cannot be a row fails alone."""
        from compound.components.engines.local.sampling import Row

        self._decoder = self._decoder or self._load()
        owners: dict[int, PendingRequest] = {}
        rows: list[Row] = []
        for job in jobs:
            r = job.request
            try:
                prompt = self._prompt(r)
            except CallError as error:
                _fail([job], error)
                continue
            job.row = Row(prompt, r.max_tokens, r.temperature, r.stop, r.seed, r.want_tokens)
            job.row.abandoned = job.abandoned
            owners[id(job.row)] = job
            rows.append(job.row)
        return [[owners[id(row)] for row in batch] for batch in self._decoder.batches(rows)]

    def _answer(self, batch: Sequence[PendingRequest]) -> None:
        """Run a batch, whose calls want one adapter, and hand out its completions."""
        decoder = self._decoder
        assert decoder is not None
        rows = [job.row for job in batch if job.row is not None]
        adapter = batch[0].request.adapter
        version = adapter.sha256 if adapter else ""
        try:
            decoder.run(rows, adapter)
        except (RuntimeError, MemoryError) as error:
            told = f"{self.name} failed on {plural(len(rows), 'call')}: {error}"
            if isinstance(error, MemoryError) or "memory" in str(error):
                told += "; lower max_batch or max_batch_tokens"
            raise TransientError(told) from error  # it says nothing of what was asked
        for job, row in zip(batch, rows, strict=True):
            if row.finish is None:
                _fail([job], CallError(f"{self.name} was closed during the call"))
                continue
            sampled = tuple(row.sampled)
            record = TokenRecord(row.prompt, sampled, tuple(row.logprobs), row.finish, version)
            usage = Usage(1, len(row.prompt), len(sampled))
            kept = record if job.request.want_tokens else None
            job.future.set_result(Completion(decoder.text(row), usage, row.finish, kept))

    def _load(self) -> Decoder:
        model, self._tokenizer = loading.load(self.model, self._dtype)
        self._context = model.config.max_position_embeddings
        from compound.components.engines.local.decoding import Decoder

        return Decoder(
            model,
            self._tokenizer,
            exact=self.deterministic,
            max_batch_tokens=self.max_batch_tokens,
            max_adapters=self.max_adapters,
        )

    def _prompt(self, request: Request) -> tuple[int, ...]:
        """Return a request's prompt, if it and the answer fit into the model's context."""
        tokens = self._encode(request.messages, request.cue)
        if request.max_tokens < 1:
            raise CallError(f"max_tokens must be at least 1, not {request.max_tokens}")
        if len(tokens) + request.max_tokens > self._context:
            raise CallError(
                f"a prompt of {len(tokens)} tokens and max_tokens={request.max_tokens} exceed the "
                f"{self._context} tokens of {self.model!r}",
                hint="shorten the prompt or its demonstrations, or lower max_tokens",
            )
        return tokens

    def _tokenize(self, messages: tuple[Message, ...], cue: str) -> tuple[int, ...]:
        """Return the tokens of a chat and its answer's cue; `worst_case` calls it on the event loop."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        with self._tokenizing:
            try:
                tokenizer = self._tokenizer
                assert tokenizer is not None  # it is loaded, with the model
                text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            except Exception as error:  # a template raises whatever it likes
                raise CallError(
                    f"the chat template of {self.model!r} refuses the messages: {error}"
                ) from error
            return tuple(tokenizer(text + cue, add_special_tokens=False).input_ids)


def _settle(loop: asyncio.AbstractEventLoop, until: float) -> None:
    """Wait until an event loop has run what was ready when asked."""
    answered = threading.Event()
    with contextlib.suppress(RuntimeError):  # the loop is closed: it sends nothing more
        loop.call_soon_threadsafe(answered.set)
        answered.wait(max(0.0, until - time.monotonic()))


def _fail(jobs: Sequence[PendingRequest], error: BaseException) -> None:
    for job in jobs:
        if not job.future.done():
            job.future.set_exception(error)
