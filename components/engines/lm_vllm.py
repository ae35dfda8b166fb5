"""Fast sampling by a vLLM server, with adapters that are swapped while it runs.

Token ids and log-probabilities come from the server, which sampled them. They are those of the distribution
sampled from: our own server runs with ``--logprobs-mode processed_logprobs``, and any server is asked once
before its records at a temperature other than 0 and 1 are believed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from compound.components.engines import vllm_chat, vllm_link
from compound.components.engines.background import in_background
from compound.components.engines.prefilled import Prefilled
from compound.components.engines.remote import longest_prompt
from compound.components.engines.vllm_link import Link
from compound.contracts import Completion, Request, Usage
from compound.errors import CallError, CompoundError, DeclarationError, TransientError


class VLLMEngine:
    """An engine over a vLLM server: one that runs already, or one of its own.

    Without ``api_base`` it starts a server at the first call, and ends it when it is closed or when this
    process ends in any way. If the server ends by itself, the calls in flight fail as `TransientError`, and
    the next try starts another.

    An adapter is loaded at its first use, under a name made of its digest, and the server is asked whether it
    really samples with it; see `compound.components.engines.probe`. That waits for the calls in flight.

    Args:
        model: ``smollm2``, a folder, or a hub id; with ``api_base``, the name it has there.
        api_base: the address of a running server, such as ``http://127.0.0.1:8000/v1``. For adapters it
            must read the same files and run with ``--enable-lora`` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.
        api_key_env: the environment variable that holds that server's key, if it wants one.
        command: how to call vLLM, by default ``$COMPOUND_VLLM``, or ``vllm``.
        args: further arguments of ``vllm serve``, such as ``["--dtype", "bfloat16"]``.
        max_lora_rank: the largest rank of an adapter.
        max_loras: how many adapters are kept on the server.
        concurrency: how many calls may be in flight.
        timeout: seconds for one try, unless the request says otherwise.
        start_timeout: seconds for the server to get ready.
        restarts: how many more times a server that ended by itself is started.
        extra: further fields of the requests (``top_p``, ``chat_template_kwargs`` …); not those that
            components set.

    Attributes:
        prefill: a `Prefill`: how much of the prompts the server's prefix cache saved.

    Example:
        >>> engine = VLLMEngine("smollm2", args=["--dtype", "bfloat16"])
        >>> engine.name, engine.remote
        ('vllm:smollm2:["--dtype", "bfloat16"]', False)
    """

    runs: ClassVar[tuple[str, ...]] = ("command", "args")  # settings that can make a machine run other code

    def __init__(
        self,
        model: str = "smollm2",
        *,
        api_base: str | None = None,
        api_key_env: str | None = None,
        command: str | None = None,
        args: tuple[str, ...] | list[str] = (),
        max_lora_rank: int = 16,
        max_loras: int = 4,
        concurrency: int = 64,
        timeout: float = 300.0,
        start_timeout: float = 900.0,
        restarts: int = 3,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.api_base, self.api_key_env = model, api_base, api_key_env
        self.command, self.args = command, tuple(args)
        self.max_lora_rank, self.max_loras = max_lora_rank, max_loras
        self.timeout, self.start_timeout, self.restarts = timeout, start_timeout, restarts
        self.extra = dict(extra or {})
        self.prefill = Prefilled()
        self._concurrency = concurrency
        self._link: Link | None = None
        self._opening: asyncio.Task[Link] | None = None
        self._starts = 0
        if owned := sorted(vllm_chat.OWNED & set(self.extra)):
            raise DeclarationError(
                f"engine {model!r}: extra must not set {', '.join(owned)}",
                hint="components set these, and budgets and token records go by them",
            )

    @property
    def name(self) -> str:  # noqa: D102
        server = f"@{self.api_base}" if self.api_base else ""
        settings = [json.dumps(found, sort_keys=True) for found in (self.args, self.extra) if found]
        return ":".join([f"vllm:{self.model}{server}", *settings])

    @property
    def trainable(self) -> str:
        """The model whose adapters it samples with."""
        return self.model

    @property
    def concurrency(self) -> int:  # noqa: D102
        return self._concurrency

    @property
    def remote(self) -> bool:
        """Whether the server is somebody else's; our own is waited for as long as the settings here say."""
        return self.api_base is not None

    @property
    def priced(self) -> bool:  # noqa: D102
        return True  # it runs on hardware of one's own

    @property
    def adapters(self) -> Mapping[str, str]:
        """The adapters on the server by digest, each with what checking it said."""
        served = self._link.adapters.served if self._link is not None else {}
        return {digest: version.verdict for digest, version in served.items()}

    def worst_case(self, request: Request) -> Usage:  # noqa: D102
        return Usage(1, longest_prompt(request), request.max_tokens)

    async def generate(self, request: Request) -> Completion:  # noqa: D102
        return await in_background(self._generate(request))

    async def aclose(self) -> None:
        """End the server if it is ours; a later call starts afresh."""
        await in_background(self._close())

    # -- on the background loop, where the connections live ----------------------------------------------

    async def _generate(self, request: Request) -> Completion:
        link = await self._connect()
        try:
            async with link.adapters.sampling(request.adapter) as name:
                return await self._sample(link, name, request)
        except CompoundError as error:
            # A dying server can answer anything, but a refused call comes from one in good health.
            if _is_refusal(error) or not await link.is_ending():
                raise
            assert link.server is not None
            raise TransientError(
                f"the vLLM server of {self.model!r} ended during the call (exit code "
                f"{link.server.exit_code}); its log is {link.server.log}"
            ) from error

    async def _sample(self, link: Link, name: str, request: Request) -> Completion:
        if request.want_tokens and request.temperature not in {0, 1}:
            await self._check_temperature(link)
        sent = vllm_chat.body(request, name, self.extra)
        answer = await link.api.send("chat/completions", sent, request.timeout or self.timeout)
        if answer.status == 404 and request.adapter is not None:
            link.adapters.forget(request.adapter)
            raise TransientError(f"{self.model}: the server has lost the adapter {name}; it is loaded again")
        completion, cached = vllm_chat.completion(request, link.api.read(answer))
        prompt = completion.usage.prompt_tokens
        self.prefill += Prefilled(prompt, cached)
        return completion

    async def _check_temperature(self, link: Link) -> None:
        """Refuse records whose log-probabilities are not of the distribution sampled from."""
        if link.tempered is None:
            link.tempered = await link.api.tempered(self.model, self.timeout)
        if not link.tempered:
            raise CompoundError(
                f"the log-probabilities from the server of {self.model!r} leave the temperature out",
                hint="start it with --logprobs-mode processed_logprobs, or sample at temperature 1",
            )

    async def _connect(self) -> Link:
        """Return the server, started (again) if need be; all calls wait for one start."""
        if self._link is not None and not self._link.ended:
            return self._link
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, task: asyncio.Task[Link]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # retrieved here: whoever waited may have been cancelled

    async def _open(self) -> Link:
        ended, self._link = self._link, None
        if ended is not None:
            await ended.close()
        self._link = await (self._find(self.api_base) if self.api_base else self._start(ended))
        return self._link

    async def _find(self, address: str) -> Link:
        return await vllm_link.find(
            address,
            self.model,
            key_env=self.api_key_env,
            connections=self.concurrency,
            adapters=self.max_loras,
            seconds=self.timeout,
        )

    async def _start(self, ended: Link | None) -> Link:
        if self._starts > self.restarts:
            last = f"; the log of the last is {ended.server.log}" if ended and ended.server else ""
            raise CompoundError(f"{self._starts} vLLM servers of {self.model!r} ended by themselves{last}")
        self._starts += 1
        loras = ["--max-lora-rank", str(self.max_lora_rank), "--max-loras", str(self.max_loras)]
        caching = ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        logprobs = ["--logprobs-mode", "processed_logprobs"]
        return await vllm_link.start(
            self.model,
            command=self.command,
            arguments=["--enable-lora", *loras, *caching, *logprobs, *self.args],
            connections=self.concurrency,
            adapters=self.max_loras,
            seconds=self.timeout,
            start_seconds=self.start_timeout,
        )

    async def _close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        link, self._link, self._starts = self._link, None, 0
        if link is not None:
            await link.close()


def _is_refusal(error: CompoundError) -> bool:
    return isinstance(error, CallError) and not isinstance(error, TransientError)
