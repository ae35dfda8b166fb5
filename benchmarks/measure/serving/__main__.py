"""Measure the server against the scripted engine that it calls, without a model.

Run ``python -m benchmarks.measure.serving``.

Prints one JSON object and writes it to ``benchmarks/data/serving.json``. Server, engine and client
are processes of their own. Each repeat measures the engine and the server in turn, in alternating
order, so that other load on the machine affects both; ratios and differences are taken within a
repeat. Latency is measured on one connection, throughput with 256 connections, for engines that
take different times per answer: the shorter the answer, the more requests per second the server
must process to keep up.
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
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

import compound as cp
from compound.api.serving import ServerSettings, serve
from compound.core.engine import Message, Request
from compound.testing import ScriptedLM

OUTPUT = Path(__file__).parents[2] / "data" / "serving.json"
MODULE = "benchmarks.measure.serving"
CONNECTIONS = 256
WARM_UP = 2.5  # seconds that are not counted
LATENCIES = (1.0, 0.5, 0.25)  # seconds per answer
ANSWER = "The Rímac flows through Lima into the Pacific."
BODY = json.dumps({"inputs": {"question": "Which river flows through Lima?"}}).encode()
Ask = Callable[[], Awaitable[object]]


def system() -> cp.System:
    """Return a system of one model call."""
    answerer = cp.LLM("answerer", prompt=cp.Text("Answer in a few words."))
    return cp.System("qa", {"answer": answerer(question=cp.Input("question"))}, lm="lm")


def engine(latency: float) -> ScriptedLM:
    """Return an engine that takes some time per answer, and does not keep its requests."""
    lm = ScriptedLM(lambda message: ANSWER, latency=latency, concurrency=CONNECTIONS)
    lm.requests = Forgetful()
    return lm


class Forgetful(list[Request]):
    """A list that stays empty."""

    def append(self, item: Request) -> None:
        """Forget a request."""


async def rate(asks: list[Ask], seconds: float, latency: float) -> float:
    """Return the answers per second of several callers, each of which asks again once it is answered.

    They start evenly distributed over the time of an answer, or the answers would arrive in bursts.
    """
    loop = asyncio.get_running_loop()
    start = loop.time() + WARM_UP
    end = start + seconds
    count = 0

    async def call(place: int, ask: Ask) -> None:
        nonlocal count
        await asyncio.sleep(latency * place / len(asks))
        while loop.time() < end:
            await ask()
            count += start <= loop.time() < end

    await asyncio.gather(*(call(place, ask) for place, ask in enumerate(asks)))
    return count / seconds


async def delays(ask: Ask, requests: int) -> list[float]:
    """Return the seconds of each of some sequential requests, after some that are not counted."""
    found = []
    for number in range(requests + 50):
        started = time.perf_counter()
        await ask()
        if number >= 50:
            found.append(time.perf_counter() - started)
    return found


def direct(lm: ScriptedLM) -> Ask:
    """Return a function that asks the engine."""
    text = "Answer in a few words.\n\nQuestion: Which river flows through Lima?"
    request = Request((Message("user", text),))

    async def ask() -> None:
        await lm.generate(request)

    return ask


async def connected(port: int) -> Ask:
    """Return a function that asks the server on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(BODY)}"
    )
    message = head.encode() + b"\r\n\r\n" + BODY

    async def ask() -> None:
        writer.write(message)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        length = int(answer.lower().split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
        await reader.readexactly(length)

    return ask


async def asks_of(port: int, latency: float, count: int) -> list[Ask]:
    """Return callers of a server, or of an engine in this process if there is no port."""
    if port:
        return [await connected(port) for _ in range(count)]
    return [direct(engine(latency))] * count


async def work(role: str, port: int, latency: float, amount: float) -> object:
    """Measure one thing, in a process of its own."""
    if role == "rate":
        return await rate(await asks_of(port, latency, CONNECTIONS), amount, latency)
    (ask,) = await asks_of(port, latency, 1)
    return median(await delays(ask, int(amount)))


class Server:
    """A server in a process of its own."""

    def __init__(self, latency: float) -> None:
        command = [sys.executable, "-m", MODULE, "--role", "serve", "--latency", str(latency)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        self.port = int(line.split("127.0.0.1:")[1].split()[0])

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)


def made(role: str, port: int, latency: float, amount: float) -> float:
    """Run a measurement in a process of its own."""
    command = [
        sys.executable,
        "-m",
        MODULE,
        "--role",
        role,
        "--port",
        str(port),
        "--latency",
        str(latency),
        "--amount",
        str(amount),
    ]
    return float(
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    )


def pairs(role: str, latency: float, amount: float, repeats: int) -> list[tuple[float, float]]:
    """Return the results of engine and server, in turn."""
    found = []
    with Server(latency) as server:
        made(role, server.port, latency, amount)  # not counted
        for number in range(repeats):
            ports = (0, server.port) if number % 2 else (server.port, 0)
            results = {port: made(role, port, latency, amount) for port in ports}
            found.append((results[0], results[server.port]))
    return found


def measure(repeats: int, seconds: float) -> dict[str, object]:
    """Run every measurement."""
    latency = pairs("delay", 0.0, 1000, repeats)
    rates = {}
    for each in LATENCIES:
        found = pairs("rate", each, seconds, repeats)
        rates[f"{each:g}"] = {
            "engine_per_second": [round(engine, 1) for engine, _ in found],
            "server_per_second": [round(server, 1) for _, server in found],
            "ratio": round(median(server / engine for engine, server in found), 3),
        }
    unlimited = pairs("rate", 0.0, seconds, repeats)
    return {
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "repeats": repeats,
        "connections": CONNECTIONS,
        "p50_ms_engine": [round(1000 * engine, 3) for engine, _ in latency],
        "p50_ms_server": [round(1000 * server, 3) for _, server in latency],
        "p50_ms_added": round(1000 * median(server - engine for engine, server in latency), 3),
        "throughput_by_seconds_per_answer": rates,
        "most_per_second": round(median(server for _, server in unlimited)),
    }


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--role", choices=["all", "serve", "rate", "delay"], default="all")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--amount", type=float, default=0.0)
    given = parser.parse_args()
    if given.role == "serve":
        settings = ServerSettings(port=0, concurrency=CONNECTIONS)
        serve(system(), engines={"lm": engine(given.latency)}, settings=settings)
    elif given.role == "all":
        text = json.dumps(measure(given.repeats, given.seconds), indent=1)
        print(text)
        given.output.write_text(text + "\n", encoding="utf-8")
    else:
        import uvloop  # the event loop of the server

        print(json.dumps(uvloop.run(work(given.role, given.port, given.latency, given.amount))))


if __name__ == "__main__":
    main()
