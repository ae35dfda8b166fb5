"""Swapping adapters on a vLLM server: concurrency of calls, propagation of failures, and load balancing.

Events order the tests, not time: a scripted server tells how many are inside, and waits where it is
told to.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

import fake_vllm as fake
from compound.core.engine import Adapter
from compound.core.errors import AdapterNotServed, CompoundError, TransientError
from compound.core.loops import RWLock
from compound.core.storage.artifacts import SHOWN
from compound.engines.adapter_files import CHECKS
from compound.engines.server_api import ServerAnswer
from compound.engines.vllm.adapters import ServedAdapters
from compound.engines.vllm.engine import VLLMEngine
from vllm_requests import request

pytest.importorskip("httpx")

CALLS = 64
Write = Callable[..., Adapter]


def name(adapter: Adapter) -> str:
    return adapter.sha256[:SHOWN]


class Scripted:
    """A server in this process; it knows the adapters' numbers from their folders.

    Attributes:
        log: loads and unloads, in order.
        fails: what the next loads answer or raise, first come first served; None is a success.
        held: where it is set, a load waits for it.
    """

    model = "tiny"

    def __init__(self) -> None:
        self.fake = fake.FakeVLLM()  # for its answers only: it does not serve
        self.fake.http.server_close()
        self.log: list[tuple[str, str]] = []
        self.fails: list[ServerAnswer | Exception | None] = []
        self.held: asyncio.Event | None = None
        self.loading = asyncio.Event()
        self.inside = 0
        self.checked_among: list[int] = []

    async def send(self, path: str, body: dict[str, Any], seconds: float) -> ServerAnswer:
        self.log.append((path.partition("_")[0], body["lora_name"]))
        if path == "load_lora_adapter":
            assert not self.inside, "a swap waits for the calls in flight"
            self.loading.set()
            if self.held is not None:
                await self.held.wait()
            failure = self.fails.pop(0) if self.fails else None
            if isinstance(failure, Exception):
                raise failure
            if failure is not None:
                return failure
        status, said = getattr(self.fake, path)(body)
        return ServerAnswer(status, str(said))

    async def logprobs(
        self, model: str, prompt: str | Sequence[int], seconds: float, *, fresh: bool = False
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        self.checked_among.append(self.inside)
        _, said = self.fake.completions({"model": model, "prompt": prompt})
        choice = said["choices"][0]
        tokens = tuple(choice["prompt_token_ids"])
        found = (
            entry[str(t)]["logprob"]
            for t, entry in zip(tokens[1:], choice["prompt_logprobs"][1:], strict=True)
        )
        return tokens, tuple(found)

    @property
    def loads(self) -> list[str]:
        return [name for what, name in self.log if what == "load"]


class Burst:
    """Calls that sample; each holds its version until its whole burst holds one, or the test releases it."""

    def __init__(self, api: Scripted, adapters: ServedAdapters) -> None:
        self.api, self.adapters = api, adapters
        self.most: Counter[str] = Counter()
        self.now: Counter[str] = Counter()
        self.leave = asyncio.Event()

    async def call(self, adapter: Adapter | None) -> None:
        async with self.adapters.sampling(adapter) as served:
            self.api.inside += 1
            self.now[served] += 1
            self.most[served] = max(self.most[served], self.now[served])
            await self.leave.wait()
            self.now[served] -= 1
            self.api.inside -= 1


def made(api: Any, most: int = 4) -> ServedAdapters:
    return ServedAdapters(api, most, 10.0)


async def settled(turns: int = 200) -> None:
    """Let all ready tasks run, including the threads that read and hash a small folder."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def reached(holds: Callable[[], bool]) -> None:
    for _ in range(5000):
        if holds():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came to hold")


async def together(
    api: Scripted, adapters: ServedAdapters, wanted: Sequence[Adapter | None]
) -> Burst:
    """Make calls concurrently, and release them once the maximum number is sampling."""
    burst = Burst(api, adapters)
    calls = [asyncio.create_task(burst.call(adapter)) for adapter in wanted]
    await reached(lambda: api.inside == len(wanted))
    burst.leave.set()
    await asyncio.gather(*calls)
    return burst


async def test_calls_that_want_a_version_all_sample_at_once_after_one_load(write: Write) -> None:
    api = Scripted()
    adapters = made(api)
    for adapter in (
        write(0.5),
        write(0.8, before=0.5),
    ):  # a step's version, and that of the next
        burst = await together(api, adapters, [adapter] * CALLS)
        assert burst.most == {name(adapter): CALLS}
    assert len(api.loads) == 2


async def test_more_versions_than_it_keeps_are_loaded_once_each_while_wanted(write: Write) -> None:
    api = Scripted()
    adapters = made(api, most=2)
    wanted = [write(bias) for bias in (0.5, 0.6, 0.7, 0.8, 0.9)]
    await together(api, adapters, [wanted[i % 5] for i in range(CALLS)])
    assert sorted(api.loads) == sorted(map(name, wanted))
    assert not [name for what, name in api.log if what == "unload"]
    await together(api, adapters, [write(1.0)])
    assert len(adapters.served) == 2
    assert len([name for what, name in api.log if what == "unload"]) == 4


async def test_the_least_recently_used_version_is_unloaded_unless_awaited(write: Write) -> None:
    api = Scripted()
    adapters = made(api, most=2)
    old, older, new = write(0.5), write(0.6), write(0.7)
    for adapter in (older, old, older, old):
        await together(api, adapters, [adapter])
    api.held = asyncio.Event()
    api.loading.clear()
    burst = Burst(api, adapters)
    burst.leave.set()
    calls = [asyncio.create_task(burst.call(adapter)) for adapter in (new, older)]
    await api.loading.wait()  # the lock is closed, and a call waits for `older`
    api.held.set()
    await asyncio.gather(*calls)
    assert api.log[-2:] == [("unload", name(old)), ("load", name(new))]


async def test_waiting_calls_run_before_the_next_load(write: Write) -> None:
    lock, seen = RWLock(), []

    async def exclusive(label: str, until: asyncio.Event) -> None:
        async with lock.write():
            seen.append(label)
            await until.wait()

    async def passing(label: str) -> None:
        async with lock.read():
            seen.append(label)

    first, second = asyncio.Event(), asyncio.Event()
    second.set()
    tasks = [asyncio.create_task(exclusive("one", first))]
    await settled()
    tasks += [asyncio.create_task(exclusive("two", second))]
    tasks += [asyncio.create_task(passing(f"call {i}")) for i in range(3)]
    await settled()
    first.set()
    await asyncio.gather(*tasks)
    assert seen == ["one", "call 0", "call 1", "call 2", "two"]


async def test_a_call_cancelled_on_entry_releases_the_lock() -> None:
    lock, closed = RWLock(), asyncio.Event()

    async def exclusive() -> None:
        async with lock.write():
            await closed.wait()

    async def passing() -> None:
        async with lock.read():
            raise AssertionError("it was cancelled")

    holder = asyncio.create_task(exclusive())
    await settled()
    caller = asyncio.create_task(passing())
    await settled()
    lock._admit()  # what opening does
    caller.cancel()
    closed.set()
    await holder
    with suppress(asyncio.CancelledError):
        await caller
    async with asyncio.timeout(30), lock.write():
        pass


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (TransientError("busy"), TransientError),
        (ServerAnswer(500, "LoRA rank 64 is greater than max_lora_rank 16."), CompoundError),
    ],
)
async def test_a_failed_load_reaches_every_call_that_waits_for_it_and_no_other(
    write: Write, failure: Any, kind: type[Exception]
) -> None:
    api = Scripted()
    adapters = made(api)
    bad, good = write(0.5), write(0.8)
    api.fails = [failure]
    burst = Burst(api, adapters)
    burst.leave.set()
    calls = [bad] * 8 + [good] * 8
    ends = await asyncio.gather(*(burst.call(adapter) for adapter in calls), return_exceptions=True)
    assert [type(end) for end in ends[:8]] == [kind] * 8
    assert ends[8:] == [None] * 8
    assert api.loads == [name(bad), name(good)]  # one try for all
    await together(api, adapters, [bad] * 8)  # the next call tries again
    assert api.loads == [name(bad), name(good), name(bad)]


async def test_a_cancelled_call_stops_no_load_that_others_wait_for(write: Write) -> None:
    api = Scripted()
    adapters = made(api)
    api.held = asyncio.Event()
    wanted = write(0.5)
    burst = Burst(api, adapters)
    calls = [asyncio.create_task(burst.call(wanted)) for _ in range(3)]
    await api.loading.wait()
    calls[0].cancel()  # it was the first, which began the load
    await settled()
    api.held.set()
    await reached(lambda: api.inside == 2)
    burst.leave.set()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError, type(None), type(None)]
    assert api.loads == [name(wanted)]
    assert not adapters._calls


async def test_closing_while_an_adapter_is_loaded_fails_the_calls_that_wait(write: Write) -> None:
    api = Scripted()
    adapters = made(api)
    api.held = asyncio.Event()
    burst = Burst(api, adapters)
    calls = [asyncio.create_task(burst.call(write(bias))) for bias in (0.5, 0.6)]
    await api.loading.wait()
    await adapters.aclose()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(end) for end in ends] == [TransientError] * 2
    assert "closed" in str(ends[0])


class Balanced(fake.FakeVLLM):
    """Several servers that share an address; each is given the requests whose turn it is.

    Args:
        bad: what each server does with adapters: "" serves them, "base" computes without them,
            "unknown" does not know them, "says" computes without them and says so.
        turns: which server each request after loading goes to; taken round and round.
    """

    def __init__(self, bad: Sequence[str], turns: Sequence[int]) -> None:
        super().__init__()
        self.bad, self.turns = bad, itertools.cycle(turns)

    def _server(self, model: str) -> str:
        return self.bad[next(self.turns)] if model != self.model else ""

    def completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        kind = self._server(body["model"])
        if kind == "unknown":
            return fake.unknown(body["model"])
        return super().completions({**body, "model": self.model} if kind else body)

    def chat_completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        kind = self._server(body["model"])
        if kind == "unknown":
            return fake.unknown(body["model"])
        status, said = super().chat_completions({**body, "model": self.model} if kind else body)
        said["model"] = self.model if kind == "says" else body["model"]
        return status, said


@pytest.fixture
def balanced() -> Iterator[Callable[..., Balanced]]:
    serving: list[Balanced] = []

    def serve(bad: Sequence[str], turns: Sequence[int]) -> Balanced:
        server = Balanced(bad, turns)
        server.serve()
        serving.append(server)
        return server

    yield serve
    for server in serving:
        server.stop()


def sample(server: Balanced, adapter: Adapter, times: int = 1) -> list[float]:
    """Sample with an adapter; return the first log-probability of each answer."""
    lm = VLLMEngine("tiny", api_base=server.address)

    async def run() -> list[float]:
        try:
            found = []
            for _ in range(times):
                wanted = request(adapter=adapter, want_tokens=True, temperature=1.0)
                answer = await lm.generate(wanted)
                assert answer.tokens
                found.append(answer.tokens.logprobs[0])
            return found
        finally:
            await lm.aclose()

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["base", "unknown"])
@pytest.mark.parametrize("bias", [0.5, 0.002], ids=["far", "near"])
@pytest.mark.parametrize("turns", [(0, 1), (0, 0, 0, 1), (0,) * (CHECKS - 1) + (1,)], ids=len)
def test_round_robin_servers_are_all_checked_before_the_first_sample(
    balanced: Any, write: Write, kind: str, bias: float, turns: Sequence[int]
) -> None:
    server = balanced(["", kind], turns)
    with pytest.raises(AdapterNotServed, match="several servers behind one address") as caught:
        sample(server, write(bias))
    assert server.sent("chat/completions") == []
    assert ("identical to those of tiny" if kind == "base" else "does not exist") in str(
        caught.value
    )


def test_a_server_that_returns_to_the_base_ends_the_run(balanced: Any, write: Write) -> None:
    server = balanced(["", "says"], [0] * CHECKS + [0, 0, 1])
    with pytest.raises(AdapterNotServed, match="answered with the model 'tiny', but the adapter"):
        sample(server, write(0.5), 3)
    assert len(server.sent("chat/completions")) == 3


def test_servers_that_all_serve_the_version_are_sampled_from(balanced: Any, write: Write) -> None:
    server = balanced(["", ""], (0, 1))
    assert sample(server, write(0.5), 4) == [-1.0] * 4


def test_each_check_has_its_own_connection_and_beginning(balanced: Any, write: Write) -> None:
    server = balanced([""], (0,))
    adapter = write(0.5)
    opened: list[int] = []
    begun = server.http.verify_request

    def counted(channel: Any, address: Any) -> bool:
        opened.append(len(server.received))
        return bool(begun(channel, address))

    server.http.verify_request = counted
    sample(server, adapter)
    asked = [b["prompt"] for b in server.sent("completions") if b["model"] == name(adapter)]
    assert len(asked) == CHECKS
    assert len({prompt[0] for prompt in asked}) == CHECKS
    checks = [i for i, (path, _) in enumerate(server.received) if path == "completions"]
    assert set(checks) <= set(opened)


def test_a_server_of_our_own_is_checked_once_unless_it_runs_as_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from compound.engines.vllm import engine
    from compound.engines.vllm.server import Link

    class Started:
        address, key, exit_code = "http://127.0.0.1:1/v1", "", None

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        async def stop(self) -> None:
            pass

    async def ready(*_: Any) -> None:
        pass

    monkeypatch.setattr(engine, "VLLMServer", Started)
    monkeypatch.setattr(Link, "ready", ready)

    async def checks(*arguments: str) -> int:
        link = await VLLMEngine("m", args=arguments)._start(None)
        await link.close()
        return link.adapters._checks

    assert asyncio.run(checks()) == 1
    for several in ("--data-parallel-size=2", "--data_parallel_size", "-dp", "--api-server-count"):
        assert asyncio.run(checks(several)) == CHECKS
