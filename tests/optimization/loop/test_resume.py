"""Killed at any instant, a run goes on to the same end and asks nothing twice.

A server on this machine counts its requests. Runs are processes of their own: a warm process that
has imported everything forks a child for each attempt. The child is killed (``SIGKILL``) at the
n-th request to the server, or at the n-th write to the run directory: before it, after it, or
half-way through it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from compound.optimization.runs.directory import RunDirectory

ROOT = Path(__file__).parents[3]
CONCURRENCY = 4  # of the engine: the maximum number of requests in flight when a run is killed
INTERRUPTED = 75
WORKERS = 2
SEEDS = {"search": 1, "optimas": 2}  # seeds whose runs have every phase

PROGRAM = '''
"""Runs optimizations: reads one request a line, forks a child for each, says how it ended."""

import asyncio
import gc
import json
import os
import pathlib
import signal
import sys
from urllib.parse import urlsplit

import scipy.stats  # imported once: each attempt is a fork of this process
import sklearn.linear_model

import compound.report
from compound.execution import cache
from compound.optimization.runs import directory as store
from compound.graph.component import Input
from compound.components.function import Function
from compound.components.llm import LLM
from compound.core.engine import Completion, Usage
from compound.evaluation.dataset import Dataset
from compound.core.errors import TransientError
from compound.evaluation.metrics.built_in import exact_match
from compound.optimizers import methods
from compound.api.optimize import run_optimization
from compound.optimization.runs.recorder import Interrupted
from compound.optimization.settings.optimize import make_settings
from compound.optimization.settings.base import BudgetSettings
from optimas_settings import optimas, proposals
from compound.graph.space import Choice, Demos, Text
from compound.graph.system import System

os.fsync = compound.report.write = lambda _: None  # a killed process loses nothing that it wrote


class Remote:
    """An engine behind HTTP. It counts its tries, so that a server can refuse first ones."""

    name = "remote"
    concurrency = CONCURRENCY

    def __init__(self, url):
        self.url = urlsplit(url)
        self.tries = {}

    def worst_case(self, request):
        return Usage(1, 100, request.max_tokens)

    async def generate(self, request):
        text = request.messages[-1].content
        seen = self.tries[text, request.seed] = self.tries.get((text, request.seed), -1) + 1
        body = json.dumps({"text": text, "seed": request.seed, "try": seen}).encode()
        reader, writer = await asyncio.open_connection(self.url.hostname, self.url.port)
        head = f"POST {self.url.path} HTTP/1.0\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
        writer.write(head.encode() + body)
        reply = await reader.read()
        writer.close()
        await writer.wait_closed()
        if b" 503 " in reply.split(b"\\r\\n", 1)[0]:
            raise TransientError("overloaded", retry_after=0.001)
        answer = json.loads(reply.split(b"\\r\\n\\r\\n", 1)[1])
        return Completion(answer["text"], Usage(1, len(text.split()), len(answer["text"].split())))

    async def aclose(self):
        pass

    priced = remote = True


def suffix(answer: str, end: str) -> str:
    return answer + end


def rows(n, kind):
    return [{"question": f"what is {kind} {i}", "answer": f"{i}"} for i in range(n)]


def run(folder, url):
    answer = LLM("answerer", prompt=Text("Answer the question."), demos=Demos(max=2), temperature=1.0)
    replied = answer(question=Input("question"))
    if METHOD == "optimas":  # a second model calls after the first one, which a local reward can save
        checker = LLM("checker", prompt="Repeat the answer.")
        replied = checker(question=Input("question"), reply=replied)
    ended = Function("suffix", suffix, end=Choice("", " or so", "!"))(answer=replied)
    system = System("resumed", outputs={"answer": ended}, lm="remote")
    data = Dataset.of(train=rows(24, "tr"), valid=rows(12, "va"), test=rows(6, "te"))
    wanted = dict(
        seed=SEED, minibatch=3, candidates=4, iterations=2, valid_size=None, concurrency=8, alpha=0.2,
        budget=BudgetSettings(system_runs=300), baselines=("random",) if METHOD == "search" else (),
        method=METHOD,
    )
    writing = proposals("demos", "edits", "opro")
    own = optimas(model="none", min_rollouts=1, max_rollouts=2, level=1)
    learned = {**own.model_dump(exclude_unset=True), **writing["optimas"]}
    settings = make_settings({**wanted, **writing, "optimas": learned})

    def stop_on_interrupt(recorder):
        signal.signal(signal.SIGINT, lambda *_: recorder.stop())

    run_optimization(
        system, data, exact_match("answer"), settings, run_dir=folder, engines={"remote": Remote(url)},
        on_start=stop_on_interrupt,
    )


def counted_writes(kill):
    """Count every write to the run directory, and die at one of them, or after one of the events."""
    made, appended = [0], [0]

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def watch(owner, name, torn=None):
        original = getattr(owner, name)

        def wrapped(*arguments, **options):
            made[0] += 1
            here = kill is not None and made[0] == kill.get("write")
            if kill is not None and "event" in kill and arguments[1:2] == ("events.jsonl",):
                appended[0] += 1
                here = appended[0] == kill["event"]
            if here and kill.get("when") == "before":
                die()
            if here and kill.get("when") == "torn" and torn is not None:
                torn(*arguments, **options)
                die()
            result = original(*arguments, **options)
            if here:
                die()
            return result

        setattr(owner, name, wrapped)

    def half_a_line(run, name, record):
        with (run.path / name).open("a", encoding="utf-8") as file:
            text = json.dumps(record)
            file.write(text[: len(text) // 2])

    def half_a_file(temporary, target, src_dir_fd, dst_dir_fd):
        file = os.open(temporary, os.O_WRONLY, dir_fd=src_dir_fd)
        os.ftruncate(file, 20)

    watch(store.RunDirectory, "append", half_a_line)
    watch(os, "replace", half_a_file)
    watch(cache.DiskCache, "put")
    return made


def child(request):
    made = counted_writes(request["kill"])
    try:
        run(request["folder"], request["url"])
    except Interrupted:
        return INTERRUPTED
    pathlib.Path(request["folder"], "writes").write_text(str(made[0]))
    return 0


gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = child(request)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    print(json.dumps({"pid": pid}), flush=True)
    print(json.dumps({"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)
'''


def answered(text: str, seed: int) -> str:
    """Answer by what was asked and its seed alone."""
    draw = int.from_bytes(hashlib.sha256(f"{seed} {text}".encode()).digest()[:8], "big") / 2**64
    if "improved instruction" in text:
        return f"<prompt>Think {int(draw * 100)} times.\nThen reply in few words.</prompt>"
    asked = text.rsplit("Question: ", 1)[-1].splitlines()[0].rsplit(maxsplit=1)[-1]
    if "Repeat the answer." in text:
        return text.rsplit("Reply: ", 1)[-1].splitlines()[0]
    chance = 0.25 + 0.35 * ("few words" in text) + 0.2 * (text.count("Question:") - 1)
    return asked if draw < chance else "dunno"


def refused_first(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] < 10  # one of 25


@dataclass
class Seen:
    """What one run asked, and what to do to it at a request."""

    asked: Counter[str] = field(default_factory=Counter)
    total: int = 0
    at: int = -1
    then: int = signal.SIGKILL
    pid: int = 0
    started: threading.Event = field(default_factory=threading.Event)  # the pid is known


class Server(ThreadingHTTPServer):
    """Answers ``POST /name``; kills the run of that name at the request it is told to."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: dict[str, Seen] = {}
        self.guard = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: whoever asked was killed."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seen = self.server.runs[self.path]
        refused = body["try"] == 0 and refused_first(body["text"])
        with self.server.guard:
            seen.total += 1
            seen.asked[f"{body['seed']} {body['text']}"] += 1
            ends = seen.total == seen.at
        if ends and seen.started.wait(120):
            with contextlib.suppress(ProcessLookupError):
                os.kill(seen.pid, seen.then)
        time.sleep(0.001 + 0.002 * random.random())
        answer = json.dumps({"text": answered(body["text"], body["seed"])}).encode()
        self.send_response(503 if refused else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Say nothing."""


class Worker:
    """A warm process that forks runs."""

    def __init__(self, program: Path, errors: Path) -> None:
        self.errors = errors
        with errors.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'support'}"},
            )

    def attempt(self, folder: Path, url: str, seen: Seen, kill: Any = None) -> int:
        """Run until it ends or is killed, and return its exit code (negative for a signal)."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        seen.started.clear()
        self.process.stdin.write(
            json.dumps({"folder": str(folder), "url": url, "kill": kill}) + "\n"
        )
        self.process.stdin.flush()
        seen.pid = json.loads(self.process.stdout.readline())["pid"]
        seen.started.set()
        status: int = json.loads(self.process.stdout.readline())["status"]
        seen.started.clear()  # another process may have its pid from now on
        return status

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@dataclass
class Site:
    """Where runs happen: a server, warm workers, and what an uninterrupted run leaves."""

    server: Server
    folder: Path
    workers: queue.Queue[Worker]
    method: str
    whole: Path = Path()
    asked: Counter[str] = field(default_factory=Counter)
    writes: int = 0

    def play(self, name: str, plan: list[dict[str, Any]]) -> tuple[Path, Seen, list[int]]:
        """Run with interruptions, one after the other, and then to the end."""
        folder = self.folder / name
        seen = self.server.runs[f"/{name}"] = Seen()
        url = f"http://127.0.0.1:{self.server.server_port}/{name}"
        worker = self.workers.get()
        statuses = []
        try:
            for step in [*plan, {}]:
                seen.at = seen.total + step["request"] if "request" in step else -1
                seen.then = step.get("signal", signal.SIGKILL)
                status = worker.attempt(
                    folder, url, seen, step if {"write", "event"} & set(step) else None
                )
                statuses.append(status)
                if status == 0:
                    break
                assert status in (-signal.SIGKILL, INTERRUPTED), worker.errors.read_text()
        finally:
            self.workers.put(worker)
        assert statuses[-1] == 0
        return folder, seen, statuses


@pytest.fixture(scope="module", params=["search", "optimas"])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("resume")
    program = folder / "program.py"
    seed = SEEDS[request.param]
    method = request.param
    head = f"CONCURRENCY, INTERRUPTED, SEED, METHOD = {CONCURRENCY}, {INTERRUPTED}, {seed}, {method!r}\n"
    program.write_text(head + PROGRAM, encoding="utf-8")
    workers = [Worker(program, folder / f"errors{i}") for i in range(WORKERS)]
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    made = Site(server, folder, queue.Queue(), request.param)
    for worker in workers:
        made.workers.put(worker)
    try:
        made.whole, seen, _ = made.play("whole", [])
        made.asked = seen.asked
        made.writes = int((made.whole / "writes").read_text())
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        for worker in workers:
            worker.close()


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    return list(RunDirectory.read_only(folder, name))


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the events without their clocks."""
    found = records(folder, "events.jsonl")
    for event in found:
        del event["at"], event["spent"]["seconds"]
    return found


def traces(folder: Path) -> list[dict[str, Any]]:
    found = records(folder, "traces.jsonl")
    for trace in found:
        for call in trace["calls"]:
            del call["seconds"], call["attempts"]
    return found


def candidates(folder: Path) -> list[dict[str, Any]]:
    found = records(folder, "candidates.jsonl")
    for candidate in found:
        del candidate["seconds"]
    return found


def same_end(site: Site, folder: Path) -> None:
    for part in ("", "baselines/random") if site.method == "search" else ("",):
        one, other = site.whole / part, folder / part
        assert (one / "best.json").read_bytes() == (other / "best.json").read_bytes()
        assert (one / "config.json").read_bytes() == (other / "config.json").read_bytes()
        assert events(one) == events(other)
        assert traces(one) == traces(other)
        assert candidates(one) == candidates(other)
        assert records(one, "memory.jsonl") == records(other, "memory.jsonl")
        assert cached(one) == cached(other)


def cached(folder: Path) -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(folder / "cache.sqlite")) as db:
        rows = db.execute("SELECT key, value FROM outcome")
        return sorted((key, re.sub(r'"seconds": ?[^,}]+', "", value)) for key, value in rows)


def asked_no_more(site: Site, seen: Seen, kills: int) -> None:
    """Beyond the uninterrupted run's, only what was in flight when the run was killed."""
    again = seen.asked - site.asked
    assert not site.asked - seen.asked
    assert set(seen.asked) == set(site.asked)
    # A request in flight that was to be refused first is refused again: two requests for one call.
    calls = {text for text in again if not refused_first(text.split(" ", 1)[1])}
    assert sum(again[text] for text in calls) <= CONCURRENCY * kills
    assert again.total() <= 2 * CONCURRENCY * kills


@pytest.mark.slow
def test_the_uninterrupted_run_has_every_phase(site: Site) -> None:
    """Else the kills below would not reach them."""
    kinds = [event["event"] for event in events(site.whole)]
    assert [kind for kind in kinds if kind != "note"][:2] == ["outlook", "start"]
    assert kinds[-3:] == ["test_before", "test_after", "done"]
    jobs = [event["optimizer"] for event in events(site.whole) if event["event"] == "job"]
    assert set(jobs) == {"joint"}
    decisions = [event for event in events(site.whole) if event["event"] == "decision"]
    assert any(decision["accepted"] for decision in decisions)
    assert any("improved instruction" in text for text in site.asked)
    assert any(refused_first(text.split(" ", 1)[1]) for text in site.asked)
    assert any(text.count("Question:") > 1 for text in site.asked)
    if site.method == "search":
        assert [e["event"] for e in events(site.whole / "baselines" / "random")][-1] == "done"
    else:
        (facts,) = (event["facts"] for event in events(site.whole) if event["event"] == "job")
        assert set(facts["local"]) == {"answerer"}
        assert facts["local"]["answerer"]["price"] == 0.5
        assert facts["local"]["answerer"]["evaluations"] > 0
        assert "answerer" in {r["draw"]["component"] for r in records(site.whole, "memory.jsonl")}
    assert all(c == 1 + refused_first(text.split(" ", 1)[1]) for text, c in site.asked.items())


def plans(site: Site, seed: int, slow: bool) -> list[list[dict[str, Any]]]:
    """Return what to do to 7 or, slow, 13 runs: kill at requests and at writes spread over the whole run."""
    draw = random.Random(seed)
    total, writes = site.asked.total(), site.writes
    found: list[list[dict[str, Any]]] = []
    requests, written, repeated = (5, 6, 2) if slow else (3, 3, 1)
    for i in range(requests):
        low, high = total * i // requests, total * (i + 1) // requests
        found.append([{"request": draw.randrange(low + 1, high + 1)}])
    for i in range(written):
        low, high = writes * i // written, writes * (i + 1) // written
        when = ("before", "torn", "after")[i % 3]
        found.append([{"write": draw.randrange(low + 1, high + 1), "when": when}])
    several: list[list[dict[str, Any]]] = [
        [
            {"request": draw.randrange(1, total // 3)},
            {
                "write": draw.randrange(1, writes // 3),
                "when": draw.choice(["before", "torn", "after"]),
            },
            {"request": draw.randrange(1, total // 4)},
            {"request": 2},
        ]
        for _ in range(repeated)
    ]
    return found + several


@pytest.mark.slow
def test_killed_at_any_instant_a_run_goes_on_to_the_same_end(
    site: Site, pytestconfig: pytest.Config
) -> None:
    every = plans(site, seed=11, slow=pytestconfig.getoption("--slow"))

    def check(numbered: tuple[int, list[dict[str, Any]]]) -> list[int]:
        number, plan = numbered
        folder, seen, statuses = site.play(f"killed{number}", plan)
        same_end(site, folder)
        asked_no_more(site, seen, statuses.count(-signal.SIGKILL))
        return statuses

    with ThreadPoolExecutor(WORKERS) as pool:
        ended = list(pool.map(check, enumerate(every)))
    killed = [statuses.count(-signal.SIGKILL) for statuses in ended]
    assert sum(count > 0 for count in killed) >= len(every) - 3
    assert max(killed) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("site", ["optimas"], indirect=True)
def test_killed_at_every_event_of_a_search_with_rewards_a_run_goes_on_to_the_same_end(
    site: Site, pytestconfig: pytest.Config
) -> None:
    """No call is paid twice: local evaluations are in the checkpoint of each step.

    Without ``--slow``, at about six events.
    """
    whole = events(site.whole)
    last = next(i for i, e in enumerate(whole) if e["event"] == "job" and e["facts"]["local"])
    first = max(i for i, e in enumerate(whole[:last]) if e["event"] in ("start", "job", "decision"))

    def check(number: int) -> int:
        folder, seen, statuses = site.play(f"event{number}", [{"event": number}])
        same_end(site, folder)
        asked_no_more(site, seen, 1)
        return statuses[0]

    numbers = range(first + 1, last + 2)
    every = 1 if pytestconfig.getoption("--slow") else max(2, len(numbers) // 6)
    with ThreadPoolExecutor(WORKERS) as pool:
        ended = list(pool.map(check, numbers[::every]))
    assert set(ended) == {-signal.SIGKILL}
    assert len(ended) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.05, 0.4, 0.75, 0.97])
def test_interrupted_politely_a_run_says_so_and_ends_the_same(site: Site, share: float) -> None:
    """One Ctrl-C ends it after the next checkpoint, and nothing at all is asked again."""
    request = max(1, int(share * site.asked.total()))
    folder, seen, statuses = site.play(
        f"polite{share}", [{"request": request, "signal": signal.SIGINT}]
    )
    assert statuses == [INTERRUPTED, 0]
    same_end(site, folder)
    assert seen.asked == site.asked
