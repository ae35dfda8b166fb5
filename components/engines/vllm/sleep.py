"""Sleep mode of vLLM: a server that the engine started releases the memory of its GPUs, and takes it back.

At level 1, vLLM copies the weights of the model and of its adapters to the memory of the host, and discards
the cache of keys and values, and with it the prefix cache. Adapters stay loaded. The context of CUDA, CUDA
graphs and some buffers stay on the GPU. vLLM 0.32 supports this on CUDA, ROCm and XPU, not on the CPU.

A server whose state is unknown, since a request to sleep failed or was cancelled, is ended and started again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from compound.components.engines.remote import first_line
from compound.errors import CallError, CompoundError, TransientError

if TYPE_CHECKING:
    from compound.components.engines.vllm.link import Link

SLEEP, WAKE, STATE = "sleep?level=1", "wake_up", "is_sleeping"
_LOG = logging.getLogger("compound")


async def put_to_sleep(link: Link, seconds: float) -> None:
    """Let a server release its memory, by its end if it does not fall asleep; no request may be in flight.

    Raises:
        CompoundError: the server has no sleep mode.
    """
    if link.server is None or link.ended or link.state == "asleep":
        return
    link.state = "unknown"
    try:
        answer = await link.api.send(SLEEP, {}, seconds, root=True)
    except TransientError as error:
        problem = error.message
    else:
        if answer.status == 200:
            link.state = "asleep"
            return
        problem = first_line(answer.message)
        if answer.status < 500:
            link.state = "awake"
            raise CompoundError(
                f"the vLLM server of {link.api.model!r} has no sleep mode: {problem}",
                hint="sleep needs vLLM 0.32 or later; upgrade it, or set sleep of the engine to false",
            )
    _LOG.warning(
        "the vLLM server of %r did not fall asleep, and is started again: %s", link.api.model, problem
    )
    await link.server.stop()


async def wake(link: Link, seconds: float) -> bool:
    """Wake a server; return whether it is awake. If not, it must be started again."""
    if link.ended or link.state == "unknown":
        return False
    try:
        await _expect_success(link, seconds)
    except CompoundError as error:
        _LOG.warning(
            "the vLLM server of %r did not wake up, and is started again: %s", link.api.model, error.message
        )
        return False
    link.state = "awake"
    return True


async def _expect_success(link: Link, seconds: float) -> None:
    """Wake a server, and ask whether it is awake; its answers differ between versions of vLLM."""
    answer = await link.api.send(WAKE, {}, seconds, root=True)
    if answer.status != 200:
        link.api.read(answer)
    found = link.api.read(await link.api.send(STATE, None, seconds, root=True))
    if found.get("is_sleeping") is not False:
        raise CallError("it is still asleep")
