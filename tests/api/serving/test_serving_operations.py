"""Reloads, drains, readiness, and the command: no request is lost, and exit codes are those of a service."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import compound as cp
from compound.api.serving import ServerSettings, serve
from compound.core.errors import CompoundError, ConfigurationError
from compound.testing import ScriptedLM
from served import client_of, qa, served, until

pytest.importorskip("fastapi")
ROOT = Path(__file__).parents[3]
BODY = {"inputs": {"question": "?"}}
ENGINE = """
import asyncio
from compound.testing import ScriptedLM

class Slow(ScriptedLM):
    def __init__(self, latency: float = 0.0):
        super().__init__(lambda message: message.split(".")[0], latency=latency)
"""
SYSTEM = """
system: qa
lm: slow
inputs: {question: str}
components:
  answerer: {llm: {prompt: {tune: First.}}, in: {question: $question}}
outputs: {answer: $answerer}
engines:
  slow: {class: "engine:Slow", settings: {latency: LATENCY}}
"""


def save(path: Path, prompt: str) -> cp.Configuration:
    configuration = qa(prompt).configuration
    configuration.save(path)
    return configuration


def first_word(message: str) -> str:
    return message.split(".", maxsplit=1)[0]


def test_a_new_configuration_is_used_without_a_restart(tmp_path: Path) -> None:
    first = save(tmp_path / "best.json", "First.")
    path = tmp_path / "best.json"
    with client_of(qa(), ScriptedLM(first_word), config=path) as client:
        before = client.post("/v1/run", json=BODY).json()
        second = save(path, "Second.")
        until(lambda: client.get("/ready").json()["configuration"] == second.digest)
        after = client.post("/v1/run", json=BODY).json()
        metrics = client.get("/metrics").text
    assert (before["outputs"]["answer"], before["configuration"]) == ("First", first.digest)
    assert (after["outputs"]["answer"], after["configuration"]) == ("Second", second.digest)
    assert 'compound_reloads_total{outcome="used"} 1.0' in metrics
    assert f'digest="{second.digest}"' in metrics
    assert first.digest not in metrics


def test_a_run_in_flight_keeps_its_configuration(tmp_path: Path) -> None:
    release = threading.Event()
    asked: list[str] = []

    async def wait(message: str) -> str:
        asked.append(message)
        if "First" in message:
            await asyncio.to_thread(release.wait, 120)
        return first_word(message)

    answerer = cp.LLM("answerer", prompt=cp.Text("Answer."))
    checker = cp.LLM("checker", prompt=cp.Text("Check."))
    system = cp.System(
        "qa", {"answer": checker(text=answerer(question=cp.Input("question")))}, lm="lm"
    )

    def store(prompt: str) -> str:
        configuration = system.bind(
            {"answerer.prompt": prompt, "checker.prompt": prompt}
        ).configuration
        configuration.save(tmp_path / "best.json")
        return configuration.digest

    old = store("First.")
    with served(system, ScriptedLM(wait), config=tmp_path / "best.json") as running:
        answers: list[Any] = []

        def call() -> None:
            with running.client() as client:
                answers.append(client.post("/v1/run", json=BODY).json())

        thread = threading.Thread(target=call)
        thread.start()
        until(lambda: asked)
        new = store("Second.")
        with running.client() as client:
            until(lambda: client.get("/ready").json()["configuration"] == new)
            assert client.post("/v1/run", json=BODY).json()["configuration"] == new
        release.set()
        thread.join(120)
    assert answers[0]["configuration"] == old
    assert asked[-1].startswith("First")  # the second component of the first run, after the reload


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        '{"format": 99}',
        '{"format": 1, "values": {"other.prompt": "x"}}',
        "[]",
        '{"format": 1, "values": {"answerer.prompt": {"path": 5, "sha256": []}}}',
        '{"format": 1, "values": {"answerer.prompt": "half \\ud800"}}',
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "best.json"
    first = save(path, "First.")
    with client_of(qa(), ScriptedLM(first_word), config=path) as client:
        path.write_text(damage)
        until(lambda: "warning" in client.get("/ready").json())
        answer = client.post("/v1/run", json=BODY).json()
        assert answer["configuration"] == first.digest
        assert 'outcome="rejected"' in client.get("/metrics").text
        path.unlink()
        second = save(path, "Second.")
        until(
            lambda: (
                client.get("/ready").json() == {"status": "ready", "configuration": second.digest}
            )
        )


class WithoutKey(ScriptedLM):
    """An engine whose key is not set."""

    def __init__(self) -> None:
        super().__init__([])

    def require_key(self) -> None:
        raise CompoundError("the key of 'strong' is not set", hint="export STRONG_KEY=…")


def test_a_configuration_whose_engine_cannot_be_opened_changes_nothing(tmp_path: Path) -> None:
    answerer = cp.LLM("answerer", prompt="Answer.", lm=cp.Choice("lm", "strong"))
    system = cp.System("qa", {"answer": answerer(question=cp.Input("question"))})
    engines = {"lm": ScriptedLM(first_word), "strong": WithoutKey()}
    path = tmp_path / "best.json"
    system.configuration.save(path)
    with client_of(system, engines=engines, config=path) as client:
        system.bind({"answerer.lm": "strong"}).configuration.save(path)
        until(lambda: "compound_reloads_total{" in client.get("/metrics").text)
        assert "warning" in client.get("/ready").json()
        assert (
            client.post("/v1/run", json=BODY).json()["configuration"] == system.configuration.digest
        )


def test_a_wrong_configuration_prevents_the_start(tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text("{")
    with (
        pytest.raises(ConfigurationError),
        served(qa(), ScriptedLM([]), config=tmp_path / "best.json"),
    ):
        pass


def test_no_request_is_lost_while_configurations_change(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    digests = {save(path, "First.").digest: "First"}
    lm = ScriptedLM(first_word, latency=lambda rng: float(rng.random()) * 0.01)
    with served(qa(), lm, config=path, reload=0.01) as running:
        stop, answers = threading.Event(), []

        def call() -> None:
            with running.client() as client:
                while not stop.is_set():
                    answers.append(client.post("/v1/run", json=BODY))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(10):
            prompt = f"P{number}."
            digests[save(path, prompt).digest] = prompt[:-1]
            seen = len(answers)
            until(lambda seen=seen: len(answers) > seen + 8)
        stop.set()
        for thread in threads:
            thread.join(120)
    assert {answer.status_code for answer in answers} == {200}
    bodies = [answer.json() for answer in answers]
    assert all(body["outputs"]["answer"] == digests[body["configuration"]] for body in bodies)
    assert len({body["configuration"] for body in bodies}) > 2


@contextmanager
def command(
    folder: Path, *arguments: str, latency: float = 0.0, **environment: str
) -> Iterator[tuple[Any, httpx.Client]]:
    """Run the command, and yield the process and a client of the address it prints."""
    (folder / "engine.py").write_text(ENGINE)
    (folder / "system.yaml").write_text(SYSTEM.replace("LATENCY", str(latency)))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", "compound", "serve", "system.yaml", "--port", "0", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        address = None
        printed: list[str] = []
        while address is None:
            line = process.stderr.readline()
            assert line, "".join(printed)
            printed.append(line)
            address = re.search(r"http://\S+", line)
        with httpx.Client(base_url=address[0], trust_env=False, timeout=120) as client:
            yield process, client
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=120)


def test_sigterm_finishes_the_runs_in_flight_and_exits_with_0(tmp_path: Path) -> None:
    with command(tmp_path, "--drain-delay", "0.1", latency=1.0) as (process, client):
        answers: list[httpx.Response] = []

        def call(path: str) -> None:
            answers.append(client.post(path, json=BODY))

        threads = [
            threading.Thread(target=call, args=(p,))
            for p in ("/v1/run", "/v1/run/stream", "/v1/run")
        ]
        for thread in threads:
            thread.start()
        until(lambda: "compound_runs_executing 3.0" in client.get("/metrics").text)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(120)
        assert process.wait(120) == 0
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert all("First" in answer.text for answer in answers)


def test_runs_that_do_not_finish_in_time_are_answered_as_json(tmp_path: Path) -> None:
    with command(tmp_path, "--drain", "0.1", latency=600.0) as (process, client):
        answers: dict[str, httpx.Response] = {}

        def call(path: str) -> None:
            answers[path] = client.post(path, json=BODY)

        threads = [threading.Thread(target=call, args=(p,)) for p in ("/v1/run", "/v1/run/stream")]
        for thread in threads:
            thread.start()
        until(lambda: "compound_runs_executing 2.0" in client.get("/metrics").text)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(120)
        assert process.wait(120) == 0
    assert answers["/v1/run"].status_code == 503
    assert answers["/v1/run"].json()["error"]["type"] == "draining"
    assert "the run did not finish in time" in answers["/v1/run/stream"].text


def test_sighup_reads_the_configuration_and_readiness_ends_before_the_socket_closes(
    tmp_path: Path,
) -> None:
    save(tmp_path / "best.json", "First.")
    arguments = ("--config", "best.json", "--reload", "0", "--drain-delay", "600")
    with command(tmp_path, *arguments) as (process, client):
        second = save(tmp_path / "best.json", "Second.")
        process.send_signal(signal.SIGHUP)
        until(lambda: client.get("/ready").json()["configuration"] == second.digest)
        assert client.get("/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        until(lambda: client.get("/ready").status_code == 503)
        assert client.get("/ready").json()["status"] == "draining"
        assert client.post("/v1/run", json=BODY).status_code == 200
        process.send_signal(signal.SIGTERM)  # a second signal ends the delay
        assert process.wait(120) == 0


def test_a_used_port_is_explained(tmp_path: Path, cli: Any) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "system.yaml").write_text(SYSTEM.replace("LATENCY", "0"))
    with served(qa(), ScriptedLM([])) as running:
        port = running.url.rpartition(":")[2]
        ran = cli("serve", str(tmp_path / "system.yaml"), "--port", port)
    assert (ran.code, f"cannot listen on 127.0.0.1:{port}" in ran.err) == (2, True)
    assert "choose another --port;" in ran.err


def test_the_server_raises_the_error_that_prevents_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ServerSettings(port=0, feedback=tmp_path / "served")
    for _ in range(2):  # the feedback folder is released
        with pytest.raises(CompoundError, match="the key of 'strong' is not set"):
            serve(qa(), engines={"lm": WithoutKey()}, settings=settings)
    assert "Traceback" not in capsys.readouterr().err


def cp_app(lm: Any) -> Any:
    from compound.api.serving import app

    return app(qa(), engines={"lm": lm})


async def test_the_application_runs_in_other_servers() -> None:
    """The ASGI application needs nothing of uvicorn: here, httpx calls it directly."""
    application = cp_app(ScriptedLM(lambda message: "the Rímac"))

    async with application.router.lifespan_context(application):
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            found: dict[str, Any] = (await client.post("/v1/run", json=BODY)).json()
            assert found["outputs"] == {"answer": "the Rímac"}
