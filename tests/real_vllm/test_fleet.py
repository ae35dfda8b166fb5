"""A fleet of two real vLLM processes: adapters at both, and one that is killed in the middle of a step."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compound.core.engine import Adapter, Completion, Message, Request, TokenRecord
from compound.engines.fleet import FleetEngine
from compound.engines.vllm.engine import VLLMEngine

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated"
)  # peft's
ARGS = ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.2", "--max-model-len", "1024"]
GROUPS, EACH = 8, 4
NOISE = 0.3  # nats per token, mean over a short answer: bfloat16 against float32


@pytest.fixture(scope="module")
def fleet() -> Iterator[FleetEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPOUND_VLLM", os.environ["REAL_VLLM"])
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")  # the processes share the machine
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        settings = {
            "model": "smollm2",
            "args": ARGS,
            "max_lora_rank": 8,
            "max_loras": 2,
            "restarts": 1,
        }
        engine = FleetEngine(replicas=2, vllm=settings)
        yield engine
        asyncio.run(engine.aclose())


def requests(step: str, adapter: Adapter | None = None, max_tokens: int = 12) -> list[Request]:
    """Return the requests of a step, in groups of equal prompts."""
    return [
        Request(
            (Message("user", f"{step}: tell a story, number {group}."),),
            max_tokens=max_tokens,
            temperature=1.0,
            seed=seed,
            want_tokens=True,
            adapter=adapter,
        )
        for group in range(GROUPS)
        for seed in range(EACH)
    ]


async def answers(fleet: FleetEngine, asked: list[Request]) -> list[Completion]:
    return await asyncio.gather(*map(fleet.generate, asked))


def distance(one: TokenRecord, reference: Any, adapter: str) -> float:
    """Return how far a record's log-probabilities are from those of transformers, nats per token."""
    found = reference.logprobs([*one.prompt, *one.sampled], adapter)[-len(one.sampled) :]
    return float(sum(abs(a - b) for a, b in zip(found, one.logprobs, strict=True)) / len(found))


def worker(fleet: FleetEngine, number: int) -> int:
    """Return the last process of the line below the guard of a replica: the one that computes."""
    engine = fleet.replicas[number].engine
    assert isinstance(engine, VLLMEngine)
    assert engine._link is not None
    assert engine._link.server is not None
    pid = engine._link.server._guard.pid
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[-1])
    return pid


def test_both_replicas_sample_with_each_adapter(fleet: FleetEngine, reference: Any) -> None:
    adapters = {"one": reference.save("one"), "two": reference.save("two", before="one")}

    async def both() -> list[list[Completion]]:
        steps = [answers(fleet, requests("first", adapter)) for adapter in adapters.values()]
        return await asyncio.gather(*steps)

    for name, completions in zip(adapters, asyncio.run(both()), strict=True):
        for completion in completions[::EACH]:
            assert completion.tokens is not None
            assert completion.tokens.adapter == adapters[name].sha256
            near = {o: distance(completion.tokens, reference, o) for o in ("one", "two", "")}
            assert min(near, key=lambda other: near[other]) == name, near
            assert near[name] < NOISE
    assert all(stats.requests >= GROUPS * EACH / 4 for stats in fleet.replicas), fleet.replicas
    assert sum(stats.requests for stats in fleet.replicas) == 2 * GROUPS * EACH


def test_a_replica_killed_in_a_step_loses_nothing(fleet: FleetEngine, reference: Any) -> None:
    adapter, before = (
        reference.save("one"),
        {stats.name: stats.requests for stats in fleet.replicas},
    )

    async def step() -> list[Completion]:
        working = asyncio.create_task(answers(fleet, requests("second", adapter, max_tokens=64)))
        while min(replica.load for replica in fleet.replicas) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        os.kill(worker(fleet, 1), signal.SIGKILL)
        found = await working
        while not all(stats.up for stats in fleet.replicas):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        return [*found, *await answers(fleet, requests("third", adapter))]

    completions = asyncio.run(asyncio.wait_for(step(), 900))
    assert len(completions) == 2 * GROUPS * EACH
    assert all(c.tokens is not None and c.tokens.adapter == adapter.sha256 for c in completions)
    assert sum(s.requests for s in fleet.replicas) - sum(before.values()) == 2 * GROUPS * EACH
    assert fleet.replicas[1].moved > 0
    last = completions[-1].tokens
    assert last is not None
    assert distance(last, reference, "one") < NOISE
