"""Engine that samples from a vLLM server, with adapters that are swapped while the server runs.

Token ids and log-probabilities come from the server and belong to the distribution that it sampled
from: a server started here runs with ``--logprobs-mode processed_logprobs``, and any server is
tested once before records at a temperature other than 0 and 1 are accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from compound.core.engine import NO_USAGE, Adapter, Completion, Prefilled, Request, Usage
from compound.core.errors import CallError, CompoundError, DeclarationError, TransientError
from compound.core.loops import RWLock, in_background, run_in_background
from compound.core.narrowing import report_wrong_arguments
from compound.core.security.sanitize import sanitize_for_terminal
from compound.core.security.trust import Origin
from compound.engines import models
from compound.engines.adapter_files import CHECKS, TEXT, check_probe_model
from compound.engines.credentials import read_key
from compound.engines.model_folder import check_model_folder
from compound.engines.options import (
    Count,
    Natural,
    Seconds,
    Share,
    VLLMOptions,
    Wait,
    takes_settings,
    validate_options,
)
from compound.engines.remote import max_answer_bytes, max_prompt_tokens
from compound.engines.server_api import model_entries
from compound.engines.vllm import api as vllm_api
from compound.engines.vllm import arguments
from compound.engines.vllm.adapters import ServedAdapters
from compound.engines.vllm.api import FOR_ADAPTERS, VLLMAPI
from compound.engines.vllm.arguments import gpu_name
from compound.engines.vllm.server import EXIT_TIMEOUT, Link, ServerEnded, VLLMServer
from compound.execution.budget import clip_usage

if TYPE_CHECKING:
    Extra = VLLMOptions | Mapping[str, object]
else:
    Extra = VLLMOptions

Fingerprint = tuple[tuple[int, ...], tuple[float, ...]]  # n tokens, n - 1 log-probabilities
PER_PROMPT_TOKEN = 16  # bytes of an answer that repeats the prompt's token ids
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM accepts for --max-lora-rank
MIN_RANK = 16
# Arguments of `vllm serve` with which several processes answer.
SEVERAL_PROCESSES = ("data-parallel", "data_parallel", "-dp", "api-server-count", "-asc")


@dataclass(frozen=True)
class VLLMSettings:
    """Settings of `VLLMEngine`, which describes them."""

    model: str = "smollm2"
    _: KW_ONLY
    api_base: str | None = None
    api_key_env: str | None = None
    command: str | None = None
    args: tuple[str, ...] | list[str] = ()
    max_lora_rank: Count | None = None
    max_loras: Count = 4
    concurrency: Count = 64
    timeout: Seconds = 300.0
    max_wait: Wait = 600.0
    start_timeout: Seconds = 900.0
    restarts: Natural = 3
    extra: Extra | None = None
    native_tools: bool = False
    takes_images: bool = False
    deterministic: bool = False
    gpu_memory: Share | None = None
    sleep: bool = False


@report_wrong_arguments
class VLLMEngine:
    """Engine that calls a vLLM server, which may be running already or is started by the engine.

    Without ``api_base`` the engine starts a server at the first call, and ends it when the engine
    is closed or this process ends for any reason. If the server ends by itself, the calls in flight
    fail with `TransientError`, and the next attempt starts a new server.

    An adapter is loaded at its first use, under a name derived from its digest, and the engine
    verifies that the server samples with it; see `compound.engines.adapter_files`. This waits for
    the calls in flight.

    Args:
        model: ``smollm2``, a folder, or a hub id; with ``api_base``, the model's name on that
            server.
        api_base: the address of a running server, such as ``http://127.0.0.1:8000/v1``. For
            adapters it must read the same files and run with ``--enable-lora`` and
            VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.
        api_key_env: the environment variable that holds the server's key, if it requires one.
        command: the vLLM command; default ``$COMPOUND_VLLM``, or else ``vllm``.
        args: additional arguments of ``vllm serve``, such as ``["--dtype", "bfloat16"]``, except
            those that the engine sets.
        max_lora_rank: maximum rank of an adapter. By default a server started by the engine allows
            the rank that the system needs, and at least 16; the limit of a running server is not
            known in advance.
        max_loras: maximum number of adapters on the server.
        concurrency: maximum number of concurrent calls; lowered while the server limits the rate.
        timeout: time limit of one attempt in seconds, from connecting to the end of the answer; a
            request may override it.
        max_wait: maximum total time in seconds that a call waits for a server that limits the rate.
        start_timeout: time limit in seconds for the server to become ready.
        restarts: how often a server that ended by itself, or did not fall asleep or wake up, is
            restarted.
        gpu_memory: share of the memory of each GPU that a server started by the engine uses, in (0,
            1]. By default, a run that trains weights on the same GPU computes the share that the
            trainer leaves; otherwise vLLM's default applies.
        sleep: whether a server started by the engine releases the memory of its GPUs while training
            computes on them; see `compound.engines.vllm.server`. It has no effect on other GPUs.
        extra: sampling and reasoning options (``top_p``, ``chat_template_kwargs`` …); see
            `VLLMOptions`.
        native_tools: whether to declare tools to the model, instead of describing them in the
            prompt. The server needs a parser of the model's calls: ``--enable-auto-tool-choice``
            and ``--tool-call-parser`` in ``args``.
        takes_images: whether the model takes images.
        deterministic: whether answers are drawn with the seed of their request, so that equal
            requests get equal answers as far as vLLM's batching allows. vLLM then draws for each
            request by itself, which costs time; otherwise it draws from its own random state, and
            only recorded answers are repeated.

    Attributes:
        prefill: a `Prefilled`, the prompt tokens and those served from the server's prefix cache.
        environment: variables set for a server that the engine starts, such as
            ``CUDA_VISIBLE_DEVICES``.

    Example:
        >>> engine = VLLMEngine("smollm2", args=["--dtype", "bfloat16"])
        >>> engine.name, engine.remote
        ('vllm:smollm2:["--dtype", "bfloat16"]', False)
    """

    requires: ClassVar[tuple[str, ...]] = ("httpx",)
    code_settings: ClassVar[tuple[str, ...]] = ("command", "args")  # which can execute any code

    priced = True  # local hardware: the cost is 0
    writes_prompts = True  # also one that this process starts is large enough

    @takes_settings(VLLMSettings)
    def __init__(self, settings: VLLMSettings) -> None:
        self.settings, self.model, self.api_base = settings, settings.model, settings.api_base
        self.api_key_env, self.args = settings.api_key_env, tuple(settings.args)
        self.concurrency, self.max_wait = settings.concurrency, settings.max_wait
        self.max_loras, self.takes_images = settings.max_loras, settings.takes_images
        self.native_tools = settings.native_tools
        self._check_settings()
        self.extra = validate_options(VLLMOptions, settings.extra, self.model)
        self.prefill = Prefilled()
        self.environment: Mapping[str, str] = {}
        self._rank_needed = MIN_RANK
        self._gpu_memory_left: float | None = None
        self._awake = RWLock()  # held by requests, and exclusively while the server is asleep
        self._link: Link | None = None
        self._opening: asyncio.Task[Link] | None = None
        self._starts = 0

    def _check_settings(self) -> None:
        given, limited = self.settings, self.settings.gpu_memory is not None
        if self.model.startswith("-"):
            raise DeclarationError(
                f"{self.model!r} is not a model name", hint="vLLM would parse it as an option"
            )
        arguments.check_arguments(self.args, self.model, gpu_memory=limited)
        if self.api_base is not None:
            Origin.of(self.api_base)
            if limited or given.sleep:
                raise DeclarationError(
                    f"engine {self.model!r}: {'sleep' if given.sleep else 'gpu_memory'} is a setting of "
                    f"servers that the engine starts, but the server at {self.api_base} is running",
                    hint="remove it; set the memory of that server with --gpu-memory-utilization",
                )

    @property
    def name(self) -> str:  # noqa: D102
        server = f"@{self.api_base}" if self.api_base else ""
        settings = [json.dumps(found, sort_keys=True) for found in (self.args, self.extra) if found]
        flags = [name for name in ("native_tools", "deterministic") if getattr(self.settings, name)]
        return ":".join([f"vllm:{self.model}{server}", *settings, *flags])

    @property
    def trainable(self) -> str:
        """Base model of the adapters that it supports."""
        return self.model

    @property
    def stable_name(self) -> bool:
        """Whether the name is that of a published model; the weights in a folder may change."""
        return not Path(self.model).is_dir()

    @property
    def remote(self) -> bool:
        """Whether the server is independent of the engine; if not, only the engine's time limits apply."""
        return self.api_base is not None

    @property
    def distribution_options(self) -> list[str]:
        """Fields of `extra` that make the sampling distribution differ from the one a trainer computes."""
        return vllm_api.distribution_options(self.extra)

    @property
    def chat_template_kwargs(self) -> Mapping[str, object]:
        """Further variables of the chat template."""
        return cast("Mapping[str, object]", self.extra.get("chat_template_kwargs") or {})

    @property
    def max_lora_rank(self) -> int | None:
        """Maximum rank of an adapter; ``None`` if it is not fixed yet, or not known."""
        given = self.settings.max_lora_rank
        if given is None and self.api_base is None and self._link is not None:
            return self._server_rank  # the server was started with it
        return given

    @property
    def _server_rank(self) -> int:
        """``--max-lora-rank`` of a started server: the needed rank, rounded up to one that vLLM accepts."""
        needed = self.settings.max_lora_rank or self._rank_needed
        return next((rank for rank in RANKS if rank >= needed), needed)

    def require_key(self) -> None:
        """Check that the server's key is set.

        Raises:
            CompoundError: the environment variable named by ``api_key_env`` is not set.
        """
        read_key(self.model, self.api_key_env)

    def prepare(self, lora_rank: int) -> None:
        """Raise the adapter rank of a server that is started later, unless ``max_lora_rank`` is set."""
        if self._link is None and self._opening is None:
            self._rank_needed = max(self._rank_needed, lora_rank)

    @property
    def gpus(self) -> tuple[str, ...]:
        """GPUs of a server that the engine starts, by their names in CUDA_VISIBLE_DEVICES."""
        if self.api_base is not None:
            return ()
        variables = {**os.environ, **self.environment}
        named = (gpu_name(index, variables) for index in range(arguments.gpu_count(self.args)))
        return tuple(name for name in named if name is not None)

    @property
    def started(self) -> bool:
        """Whether the server is running or being started, so that its memory is in use."""
        return self._opening is not None or (self._link is not None and not self._link.ended)

    def limit_gpu_memory(self, shares: Mapping[str, float]) -> None:
        """Set the share of memory by GPU of a server started later, unless a setting determines it."""
        if self.settings.gpu_memory is None and not arguments.sets_memory(self.args):
            self._gpu_memory_left = min(
                (shares[gpu] for gpu in self.gpus if gpu in shares), default=None
            )

    @contextlib.asynccontextmanager
    async def asleep(self, gpus: Collection[str]) -> AsyncIterator[bool]:
        """Release the memory of the server while the block runs, if it uses one of the GPUs.

        Yields whether it does.

        This waits for the requests in flight, and later ones wait for the end of the block. The
        first of them wakes the server.

        Raises:
            CompoundError: the server has no sleep mode.
        """
        if not self.settings.sleep or set(gpus).isdisjoint(self.gpus):
            yield False
            return
        stack = contextlib.AsyncExitStack()
        try:
            await run_in_background(self._fall_asleep(stack))
            yield True
        finally:
            # else later calls would wait forever
            await asyncio.shield(run_in_background(stack.aclose()))

    @in_background
    async def admit(self, adapter: Adapter) -> None:
        """Load an adapter on the server and check it, without sampling.

        Raises:
            CompoundError: the server does not support the adapter; see `ServedAdapters.sampling`.
        """
        async with self._connected() as link, link.adapters.sampling(adapter):
            pass

    @in_background
    async def connect(self) -> None:
        """Connect to the server, or start it if the engine does so and it does not run.

        Raises:
            CompoundError: the server does not serve the model, or does not start.
            TransientError: the server does not answer.
        """
        async with self._connected():
            pass

    @in_background
    async def fingerprint(self) -> Fingerprint:
        """Return the base model's log-probabilities of a fixed text, while no other request is in flight."""
        async with self._connected() as link, link.adapters.drained():
            return await link.api.logprobs(link.api.model, TEXT, self.settings.timeout)

    @property
    def server_ended(self) -> bool:
        """Whether the engine has started a server, and none is running."""
        return self._starts > 0 if self._link is None else self._link.ended

    def forget_adapters(self) -> None:
        """Load adapters again at their next use, because the server was restarted."""
        if self._link is not None:
            self._link.adapters.served.clear()

    @property
    def adapters(self) -> Mapping[str, str]:
        """Adapters on the server by digest, each with the result of its check."""
        served = self._link.adapters.served if self._link is not None else {}
        return {digest: version.verdict for digest, version in served.items()}

    def worst_case(self, request: Request) -> Usage:  # noqa: D102
        return Usage(1, max_prompt_tokens(request), request.max_tokens)

    @in_background
    async def generate(self, request: Request) -> Completion:  # noqa: D102
        async with self._connected() as link:
            return await self._answer(link, request)

    @in_background
    async def aclose(self) -> None:
        """Close the connections, and end the server if the engine started it; a later call reconnects."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        link, self._link, self._starts = self._link, None, 0
        if link is not None:
            await link.close()

    # -- on the background loop, where the connections live ----------------------------------------------

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Link]:
        """Keep the server awake while the block runs; start it or wake it up if needed."""
        async with self._awake.read():
            yield await self._connect()

    async def _fall_asleep(self, stack: contextlib.AsyncExitStack) -> None:
        """Put the server to sleep, if there is one, and hold back requests until the stack is closed."""
        try:
            await stack.enter_async_context(self._awake.write())
            if self._opening is not None:  # for a request that was cancelled
                await asyncio.wait([self._opening])
            if self._link is not None:
                await self._link.sleep(self.settings.timeout)
        except BaseException:
            # the caller may have closed the stack before this task noticed that it was cancelled
            await stack.aclose()
            raise

    async def _answer(self, link: Link, request: Request) -> Completion:
        try:
            async with link.adapters.sampling(request.adapter) as name:
                return await self._sample(link, name, request)
        except CompoundError as error:
            # A server that is shutting down may return any error, but a refusal comes from a
            # healthy one.
            refused = isinstance(error, CallError) and not isinstance(error, TransientError)
            if refused or link.server is None or not await link.server.ended(EXIT_TIMEOUT):
                raise
            raise ServerEnded(
                f"the vLLM server of {self.model!r} ended during the call (exit code "
                f"{link.server.exit_code}); its log is {link.server.log}",
                charged=getattr(
                    error, "charged", None
                ),  # nothing if it could not be reached any more
            ) from error

    async def _sample(self, link: Link, name: str, request: Request) -> Completion:
        if request.want_tokens and request.temperature not in {0, 1}:
            await self._check_temperature(link)
        sent = vllm_api.body(request, name, self.extra, seeded=self.settings.deterministic)
        worst = self.worst_case(request)
        largest = max_answer_bytes(request) + PER_PROMPT_TOKEN * worst.prompt_tokens
        answer = await link.api.send(
            "chat/completions", sent, request.timeout or self.settings.timeout, largest
        )
        if answer.status == 404 and request.adapter is not None:
            link.adapters.forget(request.adapter)
            raise TransientError(
                f"{self.model}: the server lost the adapter {name}; the next attempt reloads it",
                charged=NO_USAGE,
            )
        data = link.api.read(answer)
        if request.adapter is not None:
            check_probe_model(data.get("model"), name)
        completion, cached = vllm_api.completion(request, data, worst, self.model)
        used, _ = clip_usage(completion.usage, worst)
        self.prefill += Prefilled(used.prompt_tokens, cached)
        return completion

    async def _check_temperature(self, link: Link) -> None:
        """Reject token records whose log-probabilities ignore the sampling temperature."""
        if link.logprobs_are_tempered is None:
            link.logprobs_are_tempered = await link.api.logprobs_are_tempered(
                self.model, self.settings.timeout
            )
        if not link.logprobs_are_tempered:
            raise CompoundError(
                f"the log-probabilities from the server of {self.model!r} ignore the temperature",
                hint="start it with --logprobs-mode processed_logprobs, or sample at temperature 1",
            )

    async def _connect(self) -> Link:
        """Return the connected server; start it or wake it up if needed, once for concurrent calls."""
        if self._link is not None and self._link.state == "awake" and not self._link.ended:
            return self._link
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, task: asyncio.Task[Link]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # retrieve it even if every waiting call was cancelled, or asyncio logs an error

    async def _open(self) -> Link:
        if self._link is not None and await self._link.wake(self.settings.timeout):
            return self._link
        ended, self._link = self._link, None
        if ended is not None:
            await ended.close()
        self._link = await (self._find(self.api_base) if self.api_base else self._start(ended))
        return self._link

    async def _find(self, address: str) -> Link:
        key, key_name = read_key(self.model, self.api_key_env), self.api_key_env or "api_key_env"
        connections = self.concurrency + FOR_ADAPTERS
        api = VLLMAPI(address, self.model, key=key, key_name=key_name, connections=connections)
        link = Link(api, ServedAdapters(api, self.max_loras, self.settings.timeout), None)
        try:
            listing = await api.ask("models", None, self.settings.timeout)
        except BaseException:
            await link.close()
            raise
        names = [str(entry.get("id")) for entry in model_entries(listing)]
        if self.model in names:
            return link
        await link.close()
        raise CompoundError(
            f"the server at {address} does not serve {self.model!r}",
            hint=f"it serves {', '.join(map(sanitize_for_terminal, names)) or 'nothing'}",
        )

    async def _start(self, ended: Link | None) -> Link:
        """Start a server, and wait until it is ready; ``ended`` is the connection to an earlier one."""
        if self._starts > self.settings.restarts:
            last = f"; the log of the last is {ended.server.log}" if ended and ended.server else ""
            raise CompoundError(
                f"{self._starts} vLLM servers of {self.model!r} ended by themselves, or did not fall asleep "
                f"or wake up{last}"
            )
        self._starts += 1
        loras = ["--max-lora-rank", str(self._server_rank), "--max-loras", str(self.max_loras)]
        caching = ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        logprobs = ["--logprobs-mode", "processed_logprobs"]
        share = self.settings.gpu_memory or self._gpu_memory_left
        memory = [] if share is None else ["--gpu-memory-utilization", f"{share:g}"]
        folder = self.model
        if folder in models.KNOWN:
            folder = str(await asyncio.to_thread(models.resolve, folder))
        await asyncio.to_thread(check_model_folder, Path(folder))
        server = VLLMServer(
            folder,
            self.model,
            command=self.settings.command,
            arguments=["--enable-lora", *loras, *caching, *logprobs, *memory, *self.args],
            environment=self.environment,
            sleeps=self.settings.sleep,
        )
        connections = self.concurrency + FOR_ADAPTERS
        api = VLLMAPI(server.address, self.model, key=server.key, connections=connections, own=True)
        several = any(name in argument for argument in self.args for name in SEVERAL_PROCESSES)
        checks = CHECKS if several else 1
        link = Link(api, ServedAdapters(api, self.max_loras, self.settings.timeout, checks), server)
        try:
            await link.ready(self.settings.start_timeout)
        except BaseException:
            await link.close()
            raise
        return link
