"""Measure the throughput of a fleet of two replicas against one, on simulated servers of known rate.

Run ``python -m benchmarks.measure.serving.fleet``.

Prints one JSON object and writes it to ``benchmarks/data/fleet.json``. A simulated server is a
process of its own with OpenAI's API: it answers `SLOTS` requests at a time and takes `SECONDS` for
each, so that its rate is known. A step has one of the numbers of requests in `STEPS`, in groups of
`GROUP` equal prompts. Steps with one replica, with two, and with two of which one is killed in the
middle of the step alternate. Every answer repeats its prompt and names its server, so that lost
answers, and servers that read the same prompt, are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

import compound as cp
from compound.core.engine import Completion, Message, Request

OUTPUT = Path(__file__).parents[2] / "data" / "fleet.json"
MODULE = "benchmarks.measure.serving.fleet"
SLOTS, SECONDS = 8, 0.4  # requests at a time, and seconds of each: 20 requests per second
STEPS, GROUP = (240, 480), 8  # requests of a step, and of equal prompts in it
TOKENS = 20  # completion tokens of an answer
MODEL = "simulated"


class Simulated:
    """A server of known rate."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(SLOTS)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        while head := await _head(reader):
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            body = await reader.readexactly(int(length or 0))
            found = await self._document(head, body)
            sent = json.dumps(found).encode()
            status = b"200 OK" if found else b"404 Not Found"
            lines = (b"HTTP/1.1 " + status, b"Content-Type: application/json")
            writer.write(
                b"\r\n".join((*lines, f"Content-Length: {len(sent)}\r\n\r\n".encode())) + sent
            )
            await writer.drain()
        writer.close()

    async def _document(self, head: bytes, body: bytes) -> dict[str, object]:
        if head.startswith(b"GET"):
            return {"data": [{"id": MODEL}]} if b"/models " in head else {}
        async with self._slots:
            await asyncio.sleep(SECONDS)
        content = f"{json.loads(body)['messages'][-1]['content']}@{os.getpid()}"
        message = {"role": "assistant", "content": content}
        usage = {"prompt_tokens": 10, "completion_tokens": TOKENS}
        return {
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": usage,
        }


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


async def serve() -> None:
    """Serve until the process is ended; print the port."""
    server = await asyncio.start_server(Simulated().answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Servers:
    """Processes of simulated servers."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-m", MODULE, "--role", "serve"]
        self.processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)
        ]
        self.urls = []
        for process in self.processes:
            assert process.stdout is not None
            self.urls.append(f"http://127.0.0.1:{int(process.stdout.readline())}/v1")

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.wait()


def requests(step: int, count: int) -> list[Request]:
    """Return the requests of a step, in groups of equal prompts."""
    texts = [f"step {step}, example {i // GROUP}" for i in range(count)]
    return [
        Request((Message("user", text),), max_tokens=TOKENS, seed=i) for i, text in enumerate(texts)
    ]


async def step(engine: cp.ext.Engine, asked: Sequence[Request]) -> list[Completion]:
    """Send the requests of a step, with as many in flight as the engine allows."""
    places = asyncio.Semaphore(engine.concurrency)

    async def one(request: Request) -> Completion:
        async with places:
            return await engine.generate(request)

    return await asyncio.gather(*map(one, asked))


async def timed(number: int, count: int, replicas: int, *, kill: bool = False) -> dict[str, float]:
    """Run a step on new servers; return its time, and what is wrong with its answers."""
    servers = await asyncio.to_thread(Servers, replicas)
    fleet = cp.engines.Fleet(
        servers.urls, openai={"model": MODEL, "concurrency": 2 * SLOTS, "price": (0.0, 0.0)}
    )
    asked = requests(number, count)
    try:
        await fleet.warm_up()
        started = time.perf_counter()
        working = asyncio.create_task(step(fleet, asked))
        if kill:
            await asyncio.sleep(count / (2 * SLOTS / SECONDS * replicas))  # in the middle
            servers.processes[0].kill()
        completions = await working
        seconds = time.perf_counter() - started
        stats = fleet.replicas
    finally:
        await fleet.aclose()
        servers.stop()
    pairs = zip(completions, asked, strict=True)
    right = [c.text.rpartition("@")[0] == r.messages[0].text for c, r in pairs]
    return {
        "seconds": seconds,
        "lost": count - sum(right),
        "calls": sum(c.usage.calls for c in completions),
        "answered": sum(each.requests for each in stats),
        "moved": sum(each.moved for each in stats),
        "servers_per_group": len({c.text for c in completions}) / (count / GROUP),
        "tokens_per_second": sum(c.usage.completion_tokens for c in completions) / seconds,
    }


def summary(rows: Sequence[dict[str, float]], count: int) -> dict[str, float]:
    """Return medians and quartiles of the rates of steps, and totals of what is wrong."""
    rates = [count / row["seconds"] for row in rows]
    low, middle, high = quantiles(rates, n=4)
    totals = {
        name: sum(row[name] for row in rows) for name in ("lost", "calls", "answered", "moved")
    }
    tokens = median(row["tokens_per_second"] for row in rows)
    return {
        "requests_per_second": round(middle, 2),
        "p25_requests_per_second": round(low, 2),
        "p75_requests_per_second": round(high, 2),
        "tokens_per_second": round(tokens, 1),
        "servers_per_group": round(median(row["servers_per_group"] for row in rows), 3),
        **totals,
    }


def ratios(rows: Sequence[dict[str, float]], base: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median and the spread of the speed relative to one replica in the same round."""
    found = [one["seconds"] / other["seconds"] for other, one in zip(rows, base, strict=True)]
    low, middle, high = quantiles(found, n=4)
    keys = ("p25", "median", "p75", "least", "most")
    values = (low, middle, high, min(found), max(found))
    return {key: round(value, 3) for key, value in zip(keys, values, strict=True)}


def measure(count: int, rounds: int) -> dict[str, object]:
    """Alternate the three kinds of steps of ``count`` requests."""
    cases = {"one": (1, False), "two": (2, False), "two_one_killed": (2, True)}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for number in range(rounds):
        order = list(cases) if number % 2 else list(reversed(cases))
        for name in order:
            replicas, kill = cases[name]
            rows[name].append(asyncio.run(timed(number, count, replicas, kill=kill)))
    return {
        "requests": count,
        "cases": {name: summary(found, count) for name, found in rows.items()},
        "speed": {
            name: ratios(found, rows["one"]) for name, found in rows.items() if name != "one"
        },
    }


def main() -> None:
    """Measure, or serve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--role", choices=["measure", "serve"], default="measure")
    parser.add_argument("--rounds", type=int, default=6, help="steps of each kind")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    if given.role == "serve":
        asyncio.run(serve())
        return
    found = {
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "rounds": given.rounds,
        "group": GROUP,
        "server_requests_per_second": SLOTS / SECONDS,
        "steps": [measure(count, given.rounds) for count in STEPS],
    }
    given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
