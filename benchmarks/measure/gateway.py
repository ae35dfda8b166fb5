"""Measure the time that the gateway adds to a request of an agent, without a model.

Run ``python -m benchmarks.measure.gateway``.

Prints one JSON object and writes it to ``benchmarks/data/gateway.json``. The agent is a program of
its own that sends each request twice, in alternating order: to a scripted server with OpenAI's API,
in another process, and to the gateway, which forwards it to the same server. The difference within
a pair is the added time. A second agent asks a scripted engine in the process of the gateway, whose
answers take no time, so that all of the time of a request is added. Streams are measured until
their first event.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import cast
from urllib.parse import urlsplit

import compound as cp
from compound.core.engine import Request
from compound.testing import ScriptedLM

OUTPUT = Path(__file__).parents[1] / "data" / "gateway.json"
MODULE = "benchmarks.measure.gateway"
REQUESTS, WARM_UP = 60, 10  # per run of the agent; the first ones are not counted
DIRECT = "MEASURED_SERVER"  # environment variable with the address of the scripted server
SYSTEM = "You are a geographer. Answer in a few words."
ANSWER = "The Rímac flows through Lima into the Pacific."
Pair = tuple[float, float]


class Forgetful(list[Request]):
    """A list that stays empty."""

    def append(self, item: Request) -> None:
        """Forget a request."""


def scripted() -> ScriptedLM:
    """Return an engine that answers at once."""
    lm = ScriptedLM(lambda message: ANSWER)
    lm.requests = Forgetful()
    return lm


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection with one text, as a document or as a stream."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": ANSWER},
        "finish_reason": "stop",
    }
    usage = {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}
    document = json.dumps(
        {"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage}
    ).encode()
    delta = {"index": 0, "delta": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}
    event = json.dumps(
        {"id": "1", "object": "chat.completion.chunk", "choices": [delta], "usage": usage}
    )
    events = f"data: {event}\n\ndata: [DONE]\n\n".encode()
    while head := await _head(reader):
        body = await reader.readexactly(
            int(head.lower().split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0])
        )
        streams = json.loads(body).get("stream") is True
        kind, sent = ("text/event-stream", events) if streams else ("application/json", document)
        start = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(sent)}\r\n\r\n"
        writer.write(start.encode() + sent)
        await writer.drain()
    writer.close()


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


async def serve() -> None:
    """Serve until the process is ended; print the port."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Target:
    """A connection to a server with OpenAI's API."""

    def __init__(self, url: str, key: str) -> None:
        found = urlsplit(url)
        self._connection = http.client.HTTPConnection(found.hostname or "", found.port)
        self._path = f"{found.path}/chat/completions"
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def seconds(self, number: int, stream: bool) -> float:
        """Return the time of a request; of a stream, the time to its first event."""
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Which river flows through Lima? ({number})"},
        ]
        body = json.dumps({"model": "m", "max_tokens": 32, "messages": messages, "stream": stream})
        started = time.perf_counter()
        self._connection.request("POST", self._path, body, self._headers)
        response = self._connection.getresponse()
        assert response.status == 200, response.read()
        if stream:
            response.readline()
            found = time.perf_counter() - started
            response.read()
            return found
        response.read()
        return time.perf_counter() - started


def agent() -> None:
    """Send requests in pairs, and print their times; without a server, only those of the gateway."""
    stream = json.loads(sys.stdin.read())["stream"]
    gateway = Target(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    server = Target(os.environ[DIRECT], "none") if os.environ.get(DIRECT) else None
    pairs = []
    for number in range(REQUESTS):
        targets = [server, gateway] if number % 2 else [gateway, server]
        found = {id(t): t.seconds(number, stream) for t in targets if t is not None}
        pairs.append((found.get(id(server), 0.0), found[id(gateway)]))
    print(json.dumps({"pairs": pairs[WARM_UP:]}))


def system(isolated: bool) -> cp.System:
    """Return a system of the agent, whose prompt is recognized and rewritten."""
    prompt = cp.components.AgentPrompt("geographer", system=cp.Text(SYSTEM))
    made = cp.components.ExternalAgent(
        "agent",
        command=[sys.executable, "-m", MODULE, "--role", "agent"],
        prompts=[prompt],
        output={"pairs": list[tuple[float, float]]},
        max_requests=REQUESTS,
        env=[] if isolated else [DIRECT],
    )
    return cp.System("measured", {"pairs": made(stream=cp.Input("stream", bool))}, lm="lm")


def pairs_of(url: str, runs: int, *, stream: bool, forwarded: bool) -> list[Pair]:
    """Return the seconds without and with the gateway of each request of several runs."""
    os.environ[DIRECT] = url
    engine = cp.engines.OpenAI("m", api_base=url) if forwarded else scripted()
    found: list[Pair] = []
    for seed in range(runs):
        trace = cp.run(
            system(isolated=not forwarded), {"stream": stream}, engines={"lm": engine}, seed=seed
        )
        found += cast("list[Pair]", trace.outputs["pairs"])
    return found


def summary(pairs: list[Pair]) -> dict[str, float]:
    """Return the medians in milliseconds, and quartiles of the added time."""
    added = [1000 * (through - alone) for alone, through in pairs]
    low, middle, high = quantiles(added, n=4)
    return {
        "requests": len(pairs),
        "p50_ms_direct": round(1000 * median(alone for alone, _ in pairs), 3),
        "p50_ms_gateway": round(1000 * median(through for _, through in pairs), 3),
        "p50_ms_added": round(middle, 3),
        "p25_ms_added": round(low, 3),
        "p75_ms_added": round(high, 3),
    }


def measure(runs: int) -> dict[str, object]:
    """Run every measurement."""
    command = [sys.executable, "-m", MODULE, "--role", "serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
            cases = {}
            for name, forwarded in (("forwarded", True), ("in_process", False)):
                for stream in (False, True):
                    pairs = pairs_of(url, runs, stream=stream, forwarded=forwarded)
                    cases[f"{name}{'_stream' * stream}"] = summary(pairs)
        finally:
            server.terminate()
    return {
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "runs": runs,
        "cases": cases,
    }


def main() -> None:
    """Measure, or play one of the roles."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--role", choices=["measure", "serve", "agent"], default="measure")
    parser.add_argument("--runs", type=int, default=20, help="runs of the agent per case")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    if given.role == "agent":
        agent()
    elif given.role == "serve":
        asyncio.run(serve())
    else:
        found = measure(given.runs)
        given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
