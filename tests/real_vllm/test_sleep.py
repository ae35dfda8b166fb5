"""Sleep mode of a real vLLM. On the CPU, vLLM has the routes, but refuses the option and releases no memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from compound.core.engine import Message, Request
from compound.core.errors import CompoundError
from compound.core.loops import run_in_background
from compound.engines.vllm import server
from compound.engines.vllm.engine import VLLMEngine

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated"
)  # peft's
ARGS = ("--dtype", "bfloat16", "--max-model-len", "2048")
PARSE = """
import sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
found = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
print(found.enable_sleep_mode, found.gpu_memory_utilization, found.middleware)
"""


@pytest.fixture(autouse=True)
def _command() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPOUND_VLLM", os.environ["REAL_VLLM"])
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield


def test_the_arguments_are_those_of_the_parser() -> None:
    python = Path(os.environ["REAL_VLLM"]).with_name("python")
    given = [
        "m",
        *server.SLEEP_ARGUMENTS,
        "--gpu-memory-utilization",
        "0.42",
        "--middleware",
        "a.B",
    ]
    ran = subprocess.run([python, "-c", PARSE, *given], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "True 0.42 ['a.B']"


def test_the_cpu_has_no_sleep_mode() -> None:
    lm = VLLMEngine("smollm2", args=ARGS, gpu_memory=0.3, sleep=True)
    with pytest.raises(CompoundError, match="Sleep mode is not supported on current platform"):
        asyncio.run(lm.connect())


def test_the_routes_pause_with_adapters(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SLEEP_ARGUMENTS", ())  # which the CPU refuses
    lm = VLLMEngine("smollm2", args=ARGS, gpu_memory=0.3, max_lora_rank=8, sleep=True)
    adapter, asked = reference.save("one"), Message("user", "Name three rivers of Europe.")
    tuned = Request((asked,), 16, adapter=adapter, want_tokens=True)

    async def run() -> None:
        async with contextlib.aclosing(lm):
            before = await lm.generate(tuned)
            assert lm._link is not None
            api = lm._link.api
            async with httpx.AsyncClient(base_url=api.address.removesuffix("/v1")) as stranger:
                for path in ("/collective_rpc", "/sleep", "/wake_up"):
                    assert (await stranger.post(path, json={"method": "sleep"})).status_code == 401
            async with lm.asleep(["0"]) as slept:
                assert slept
                found = await run_in_background(api.send(server.STATE, None, 10.0, root=True))
                assert found.text.replace(" ", "") == '{"is_sleeping":true}'
                later = asyncio.create_task(lm.generate(tuned))
            after = await later
            assert lm._starts == 1
            assert before.text == after.text
            for completion in (before, after):
                assert completion.tokens is not None
                assert completion.tokens.adapter == adapter.sha256

    asyncio.run(run())
