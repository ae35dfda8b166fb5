"""A load test: clients that retry lose nothing while servers are reloaded, drained and killed.

Ten minutes with ``--slow`` and ``SERVING_MINUTES=10``; the default of the slow test is one minute.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

import compound as cp
from compound.evaluation.feedback import read_feedback

pytest.importorskip("fastapi")
ROOT = Path(__file__).parents[3]
KINDS = ("reload", "drain", "kill")
ENGINE = """
from compound.testing import ScriptedLM

class Echo(ScriptedLM):
    def __init__(self):
        super().__init__(lambda m: m.split(".")[0] + " " + m.rsplit(" ", 2)[-2],
                         latency=lambda rng: 0.02 * float(rng.random()))
"""
SYSTEM = """
system: echo
lm: echo
inputs: {question: str}
components:
  answerer: {llm: {prompt: {tune: P0.}}, in: {question: $question}}
outputs: {answer: $answerer}
engines: {echo: {class: "engine:Echo"}}
"""


class Fleet:
    """A server that is started again on the same port whenever it ends."""

    def __init__(self, folder: Path) -> None:
        (folder / "engine.py").write_text(ENGINE)
        (folder / "system.yaml").write_text(SYSTEM)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.url = folder, f"http://127.0.0.1:{self.port}"
        self.system = cp.load_system(folder / "system.yaml")
        self.exits: list[int] = []
        self.configure(0)
        self.start()

    def configure(self, number: int) -> None:
        """Write another configuration."""
        self.system.bind({"answerer.prompt": f"P{number}."}).configuration.save(
            self.folder / "best.json"
        )

    def start(self) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "compound",
                "serve",
                "system.yaml",
                "--config",
                "best.json",
                "--port",
                str(self.port),
                "--reload",
                "0.05",
                "--feedback",
                "served",
            ],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        line = ""
        while not re.search(r"http://", line):
            line = self.process.stderr.readline()
            assert line, "the server ended"
        self.log = threading.Thread(target=self.process.stderr.read, daemon=True)
        self.log.start()

    def end(self, how: signal.Signals) -> None:
        self.process.send_signal(how)
        self.exits.append(self.process.wait(120))
        self.log.join(120)
        assert self.process.stderr is not None
        self.process.stderr.close()


def call(client: httpx.Client, path: str, body: Any, deadline: float) -> httpx.Response:
    """Send a request until it is answered, as clients of a restarted service do."""
    while True:
        try:
            answer = client.post(path, json=body)
            if answer.status_code < 500 and (
                path != "/v1/run/stream" or "event: usage" in answer.text
            ):
                return answer
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, "a request was not answered for a minute"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.user_cache
def test_nothing_is_lost_while_servers_are_reloaded_drained_and_killed(tmp_path: Path) -> None:
    seconds = 60 * float(os.environ.get("SERVING_MINUTES", "1"))
    fleet, stop = Fleet(tmp_path), threading.Event()
    problems: list[str] = []
    acknowledged: list[str] = []
    answered = [0]

    def work(worker: int) -> None:
        with httpx.Client(base_url=fleet.url, timeout=120, trust_env=False) as client:
            number = 0
            while not stop.is_set():
                number += 1
                word, path = f"w{worker}x{number}", ("/v1/run", "/v1/run/stream")[number % 2]
                body = {"inputs": {"question": f"{word} ."}}
                answer = call(client, path, body, time.monotonic() + 120)
                if answer.status_code != 200 or word not in answer.text:
                    problems.append(f"{path} {answer.status_code} {answer.text[:300]}")
                answered[0] += 1
                run = answer.headers["x-run-id"]
                rated = call(
                    client, "/v1/feedback", {"run_id": run, "score": 1}, time.monotonic() + 120
                )
                if rated.status_code == 201:
                    acknowledged.append(run)
                elif (
                    rated.status_code != 404
                ):  # the record of a run may be lost with a killed server
                    problems.append(f"feedback {rated.status_code} {rated.text[:300]}")

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(16)]
    for thread in threads:
        thread.start()
    rng, end, counts = random.Random(0), time.monotonic() + seconds, dict.fromkeys(KINDS, 0)
    while time.monotonic() < end and not problems:
        time.sleep(rng.uniform(0.3, 1.0))
        kind = rng.choices(KINDS, [8, 1, 1])[0]
        counts[kind] += 1
        if kind == "reload":
            fleet.configure(sum(counts.values()))
        else:
            fleet.end(signal.SIGTERM if kind == "drain" else signal.SIGKILL)
            fleet.start()
    stop.set()
    for thread in threads:
        thread.join(90)
    fleet.end(signal.SIGTERM)
    log = read_feedback(tmp_path / "served")
    print(
        json.dumps(
            {"answered": answered[0], "rated": len(acknowledged), **counts, "exits": fleet.exits}
        )
    )
    assert problems == []
    assert set(acknowledged) <= set(log.about) & set(log.runs)
    assert fleet.exits.count(0) == counts["drain"] + 1
    assert answered[0] > 100
