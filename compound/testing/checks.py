"""Helpers of the kits: run one without pytest, compare values, serve a model, and watch random generators."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from unittest import SkipTest

import numpy as np

from compound.graph.registry.user_code import place_of_error
from compound.optimization.role_checks import json_problem

__all__ = [
    "json_problem",
    "run_kit",
    "seeded_global_generators",
    "temporary_folder",
    "through_json",
    "without_global_generators",
]


def run_kit(kit: type[object]) -> dict[str, str]:
    """Run the checks of a kit without pytest.

    Each check runs on a new instance. pytest fixtures are not available.

    Args:
        kit: a subclass of one of the kits.

    Returns:
        The message of each failed check by its name; empty if all checks passed.
    """
    failures = {}
    for name in dir(kit):
        if not name.startswith("test_"):
            continue
        try:
            getattr(kit(), name)()
        except SkipTest:
            continue
        except AssertionError as error:
            failures[name] = str(error)
        except Exception as error:  # noqa: BLE001 - any exception of the tested code is a failed check
            failures[name] = f"{type(error).__name__}: {error}{place_of_error(error)}"
    return failures


def temporary_folder(owner: object) -> Path:
    """Return a new folder that is deleted when its owner is garbage-collected."""
    folder = Path(tempfile.mkdtemp(prefix="compound-kit-"))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder


def through_json(value: object) -> object:
    """Return a value after a round trip through JSON."""
    found: object = json.loads(json.dumps(value))
    return found


SEED = 20_250_923  # an unlikely seed: code under test that seeds with the same number would go unnoticed


@contextmanager
def seeded_global_generators(seed: int) -> Iterator[None]:
    """Seed the global generators for a block, and restore their states afterwards."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    of_torch = None if torch is None else torch.get_rng_state()
    if torch is not None:
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(of_torch)


@contextmanager
def without_global_generators(what: str, seed: int = SEED) -> Iterator[None]:
    """Check that a block neither draws from nor seeds a global random generator.

    Args:
        what: the code that runs in the block, for the message.
        seed: the seed of the generators before the block.
    """
    with seeded_global_generators(seed):
        before = _global_states()
        yield
        after = _global_states()
    used = [name for name, state in before.items() if after[name] != state]
    assert not used, (
        f"{what} used or seeded the global generator of {' and '.join(used)}; use "
        "compound.execution.rng.generator(seed, ...) instead, so that equal seeds give equal results"
    )


def _global_states() -> dict[str, object]:
    """Return the states of the global generators by module name."""
    _, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, object] = {
        "random": random.getstate(),
        "numpy.random": (np.asarray(keys).tobytes(), *rest),
    }
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state().numpy().tobytes()
    return states


ChatScript = Callable[[Sequence[Mapping[str, str]]], str]


class ChatServer:
    """Server of ``POST /v1/chat/completions`` whose answers are a function of the messages.

    Usage counts words as tokens. Use it as a context manager.

    Args:
        script: returns the answer to a list of messages with ``role`` and ``content``.
        model: name of the model that the answers state.

    Attributes:
        requests: the bodies of the requests, in order of arrival.
        keys: the key of each request, or an empty text.

    Example:
        >>> import urllib.request
        >>> with ChatServer(lambda messages: messages[-1]["content"].upper()) as server:
        ...     body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
        ...     asked = urllib.request.Request(f"{server.url}/chat/completions", body)
        ...     with urllib.request.urlopen(asked) as answer:
        ...         json.load(answer)["choices"][0]["message"]["content"]
        'HI'
    """

    def __init__(self, script: ChatScript, *, model: str = "scripted") -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        answer, keys = self._answer, self.keys

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                """Answer one request."""
                keys.append(self.headers.get("Authorization", "").removeprefix("Bearer "))
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, document = answer(self.path, body)
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Keep the terminal quiet."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._script, self._model = script, model
        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )

    @property
    def url(self) -> str:
        """Base URL for clients, ending in ``/v1``."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.requests.append(body)
        if path.rstrip("/") != "/v1/chat/completions":
            return 404, {"error": {"message": f"no route {path}"}}
        try:
            text = self._script(body["messages"])
        except Exception as error:  # noqa: BLE001 - a mistake in the script is shown to the client
            return 500, {
                "error": {"message": f"{type(error).__name__}: {error}", "type": "server_error"}
            }
        asked = sum(len(str(message["content"]).split()) for message in body["messages"])
        answered = len(text.split())
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        usage = {
            "prompt_tokens": asked,
            "completion_tokens": answered,
            "total_tokens": asked + answered,
        }
        return 200, {
            "id": f"chatcmpl-{len(self.requests)}",
            "object": "chat.completion",
            "created": 0,
            "model": self._model,
            "choices": [choice],
            "usage": usage,
        }
