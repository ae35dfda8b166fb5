"""Adapters on a fleet: loaded and checked at each replica, which drains for it alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import pytest

import fake_vllm as fake
from compound import CompoundError
from compound.core.engine import Adapter, Request
from compound.core.errors import AdapterNotServed, CallError, DeclarationError, TransientError
from compound.engines.fleet import FleetEngine
from vllm_requests import request, until

pytest.importorskip("httpx")
Servers = list[fake.FakeVLLM]
Write = Callable[..., Adapter]


def fleet(servers: Sequence[fake.FakeVLLM]) -> FleetEngine:
    return FleetEngine([server.address for server in servers], vllm={"model": "tiny"})


def sampled(adapter: Adapter, text: str) -> Request:
    return request(text, adapter=adapter, want_tokens=True, temperature=1.0)


async def test_every_sample_comes_from_its_version_checked_there(
    servers: Servers, write: Write
) -> None:
    """Two steps of training, with a version each: no replica samples before it has loaded and probed it."""
    versions = [write(0.5), write(0.8, before=0.5)]
    async with contextlib.aclosing(fleet(servers)) as lm:
        found = [
            await asyncio.gather(*(lm.generate(sampled(version, str(i))) for i in range(24)))
            for version in versions
        ]
    for version, completions, logprob in zip(versions, found, (-1.0, -1.3), strict=True):
        records = [completion.tokens for completion in completions]
        assert {record.adapter for record in records if record} == {version.sha256}
        assert [record.logprobs[0] for record in records if record] == [logprob] * 24
    for server in servers:
        paths = [path for path, body in server.received]
        for version in versions:
            name = version.sha256[:16]
            first = next(
                at
                for at, (path, body) in enumerate(server.received)
                if path == "chat/completions" and body["model"] == name
            )
            loaded = next(
                at
                for at, (path, body) in enumerate(server.received)
                if path == "load_lora_adapter" and body["lora_name"] == name
            )
            assert loaded < first
            assert "completions" in paths[loaded:first]  # its probe
        assert len(server.sent("load_lora_adapter")) == 2


async def test_a_replica_drains_while_the_others_answer(servers: Servers, write: Write) -> None:
    adapter = write(0.5)
    lm = fleet(servers[:2])

    async with contextlib.aclosing(lm):
        await lm.generate(request())
        servers[0].hang = True
        calls = []
        for i in range(40):  # some of them go to the replica that hangs
            calls.append(asyncio.create_task(lm.generate(request(str(i)))))
            await asyncio.sleep(0)
        await until(lambda: servers[0].chatting > 0)
        swaps = [asyncio.create_task(lm.generate(sampled(adapter, str(i)))) for i in range(8)]
        await until(lambda: len(servers[1].sent("load_lora_adapter")) == 1)
        await until(lambda: any(swap.done() for swap in swaps))
        assert servers[0].sent("load_lora_adapter") == []
        servers[0].hang = False
        servers[0].stopping.set()
        await asyncio.gather(*calls, *swaps)
    assert len(servers[1].sent("load_lora_adapter")) == 1


async def test_a_version_is_admitted_by_every_replica(servers: Servers, write: Write) -> None:
    adapter = write(0.5)
    lm = fleet(servers)

    async with contextlib.aclosing(lm):
        await lm.admit(adapter)
    assert [len(server.sent("load_lora_adapter")) for server in servers] == [1, 1, 1]
    assert not any(server.answered for server in servers)


@pytest.mark.parametrize("admit", [True, False])
async def test_one_replica_that_computes_without_the_version_ends_the_run(
    servers: Servers, write: Write, admit: bool
) -> None:
    adapter = write(0.5)
    servers[1].stale = "base"
    said = "those of the weights that the adapter replaces"
    async with contextlib.aclosing(fleet(servers)) as lm:
        with pytest.raises(AdapterNotServed, match=said) as caught:  # noqa: PT012
            if admit:
                await lm.admit(adapter)
            await asyncio.gather(*(lm.generate(sampled(adapter, str(i))) for i in range(24)))
    assert not isinstance(caught.value, CallError)
    assert not servers[1].answered


async def test_an_adapter_is_admitted_unless_no_replica_answers(
    servers: Servers, write: Write
) -> None:
    first, second = write(0.5), write(0.6)
    async with contextlib.aclosing(fleet(servers[:2])) as lm:
        await lm.generate(request())
        await asyncio.to_thread(servers[0].kill)
        await lm.admit(first)
        await asyncio.to_thread(servers[1].kill)
        with pytest.raises(TransientError):
            await lm.admit(second)
    with pytest.raises(CompoundError):
        await lm.admit(first)


def test_servers_of_the_openai_engine_refuse_adapters(servers: Servers, write: Write) -> None:
    lm = FleetEngine([servers[0].address], openai={"model": "tiny"})
    with pytest.raises(DeclarationError, match="openai does not serve adapters"):
        asyncio.run(lm.admit(write(0.5)))
    assert not servers[0].received
