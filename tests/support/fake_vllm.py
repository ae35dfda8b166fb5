"""Fake vLLM server without a model, as a class or a command: ``python fake_vllm.py serve MODEL --port N …``.

Token i of a prompt has the log-probability ``logprob(bias, i, token)``. An adapter is a folder
whose ``adapter_config.json`` contains a bias as its revision; the bias of the base is 0. Standard
library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKENS = list(range(20, 60))


def logprob(bias: float, i: int, token: int) -> float:
    return -2.0 - token % 5 / 10 + bias * math.cos(i)


class FakeVLLM:
    """The server and its faults.

    Attributes:
        stale: the weights to use instead of an acknowledged adapter: ``base``, or the ``first`` one
            loaded.
        noise: added to a prompt's log-probabilities, with alternating sign.
        raw: whether log-probabilities ignore the temperature.
        fault: status, message and headers of an error to return, by the end of the path.
        change: fields of a chat's answer to replace or, if None, to omit; names in the choice start
            with a dot.
        hang: whether chats wait until `stop` or `kill` is called.
        version: what it says of its version.
        base: the bias of the base, to stand for other weights.
        answered: the last message of each chat whose answer was sent.
        asleep: whether it sleeps; it then answers chats with an error.
        waking: what happens when it is woken, other than that it is awake: ``asleep`` still, or the
            adapters are ``lost``.
        deadly: the path of a request that kills the process.
        endless: the path of a request that is not answered until `stop` or `kill` is called.
        log: a file to which the path of each request is appended, with the process.
    """

    def __init__(self, model: str = "tiny", key: str = "", port: int = 0) -> None:
        self.model, self.key = model, key
        self.chatting, self.fragile = 0, True
        self.version, self.base, self.answered, self.open = (
            "0.32",
            0.0,
            list[str](),
            set[socket.socket](),
        )
        self.asleep, self.waking, self.deadly, self.endless = False, "", "", ""
        self.log: Path | None = None
        self.stale, self.noise, self.raw, self.hang = "", 0.0, False, False
        self.fault: dict[str, tuple[int, str, dict[str, str]]] = {}
        self.change: dict[str, Any] = {}
        self.loaded: dict[str, float] = {}
        self.first: float | None = None
        self.received: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str] = []
        self.stopping = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def _answer(self, body: dict[str, Any]) -> None:
                path = self.path.partition("?")[0].removeprefix("/v1/")
                fake.note(path, body)
                fake.keys.append(self.headers.get("authorization", ""))
                answer: Any
                headers: dict[str, str] = {}
                if fake.key and fake.keys[-1] != f"Bearer {fake.key}":
                    status, answer = 401, error("Unauthorized")
                elif path in fake.fault:
                    status, message, headers = fake.fault[path]
                    answer = error(message) if message else "<html>"
                else:
                    status, answer = getattr(fake, path.replace("/", "_"))(body)
                data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                chats = path == "chat/completions" and status == 200
                if chats:  # before the client can ask about it
                    fake.answered.append(body["messages"][-1]["content"])
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    if chats:
                        fake.answered.remove(body["messages"][-1]["content"])
                    raise

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def process_request(self, request: Any, client_address: Any) -> None:
                fake.open.add(request)
                super().process_request(request, client_address)

            def handle_error(self, *_: Any) -> None:
                pass  # the client sees the error

        self.http = Server(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.http.server_port}/v1"

    def note(self, path: str, body: dict[str, Any]) -> None:
        """Note a request, and do what its path is set to do."""
        self.received.append((path, body))
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()} {path}\n")
        if path == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if path == self.endless:
            self.stopping.wait(60)

    def serve(self) -> FakeVLLM:
        threading.Thread(target=self.http.serve_forever, args=[0.01], daemon=True).start()
        return self

    def restart(self) -> None:
        self.loaded.clear()
        self.received.clear()

    def stop(self) -> None:
        self.stopping.set()
        self.http.shutdown()
        self.http.server_close()

    def kill(self) -> None:
        """Stop as a killed process does: all connections are cut, and later ones are refused."""
        self.http.shutdown()
        self.http.server_close()
        for connection in self.open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.stopping.set()

    def sent(self, path: str) -> list[dict[str, Any]]:
        return [body for received, body in self.received if received == path]

    def bias(self, name: str) -> float | None:
        if name == self.model:
            return self.base
        if name in self.loaded and self.stale:
            return 0.0 if self.stale == "base" else self.first
        return self.loaded.get(name)

    # -- the routes ------------------------------------------------------------------------------------

    def models(self, _: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"data": [{"id": name} for name in (self.model, *self.loaded)]}

    def _version(self, _: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"version": self.version}

    def _sleep(self, _: dict[str, Any]) -> tuple[int, Any]:
        self.asleep = True
        return 200, {"status": "sleeping", "level": 1}

    def _wake_up(self, _: dict[str, Any]) -> tuple[int, Any]:
        self.asleep = self.waking == "asleep"
        if self.waking == "lost":
            self.loaded.clear()
        return 200, {"status": "sleeping" if self.asleep else "awake", "tags": None}

    def _is_sleeping(self, _: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"is_sleeping": self.asleep}

    def load_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        name = body["lora_name"]
        if name in self.loaded:
            return 400, error(f"The lora adapter '{name}' has already been loaded.")
        config = json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())
        self.loaded[name] = float(config["revision"])
        self.first = self.loaded[name] if self.first is None else self.first
        return 200, "Success"

    def unload_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        found = self.loaded.pop(body["lora_name"], None)
        return (404, error("cannot be found")) if found is None else (200, "Success")

    def completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        bias = self.bias(body["model"])
        if bias is None:
            return unknown(body["model"])
        if "logprobs" in body:
            sure = body["temperature"] == 0.01 and not self.raw
            return 200, {"choices": [{"logprobs": {"token_logprobs": [-0.001 if sure else -2.0]}}]}
        if self.chatting and self.fragile:
            raise RuntimeError(
                "vLLM's CPU kernel crashes on prompt log-probabilities among other requests"
            )
        prompt = body["prompt"]
        tokens = [ord(letter) for letter in prompt] if isinstance(prompt, str) else prompt
        entries: list[Any] = [None]
        for i, token in enumerate(tokens[1:], 1):
            value = logprob(bias, i, token) + self.noise * (-1) ** (i // 2)
            entries.append({str(token): {"logprob": value}})
        return 200, {"choices": [{"prompt_token_ids": tokens, "prompt_logprobs": entries}]}

    @staticmethod
    def _limited(body: dict[str, Any]) -> tuple[str, int, str]:
        """Return the answer within the limits of a request, its number of tokens, and its finish reason."""
        text, count = "", 0
        for piece in ("fo", "ur", ""):  # the last token ends the turn
            if count == body.get("max_completion_tokens", body.get("max_tokens")):
                return text, count, "length"
            text, count = text + piece, count + 1
            at = [text.find(stop) for stop in body.get("stop", ()) if stop in text]
            if at:
                return text[: min(at)], count, "stop"
        return text, count, "stop"

    def chat_completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.hang:
            self.chatting += 1
            self.stopping.wait(20)
            self.chatting -= 1
        bias = self.bias(body["model"])
        if bias is None:
            return unknown(body["model"])
        if self.asleep:
            return 400, error("the server is asleep")
        content = body["messages"][0]["content"]
        if content == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if content.startswith("wait for "):
            wait_for(Path(content.removeprefix("wait for ")))
        text, count, finish = self._limited(body)
        choice: dict[str, Any] = {
            "message": {"role": "assistant", "content": text},
            "finish_reason": finish,
        }
        answer: dict[str, Any] = {
            "choices": [choice],
            "usage": {
                "prompt_tokens": 5,
                "completion_tokens": count,
                "prompt_tokens_details": {"cached_tokens": 2},
            },
        }
        if body.get("return_token_ids"):
            answer["prompt_token_ids"] = [1, 10, 11, 12, 13]
            choice["token_ids"] = [7, 8, 2][:count]
            logprobs = (-0.5 - bias, -0.25, 0.0)[:count]
            choice["logprobs"] = {"content": [{"logprob": logprob} for logprob in logprobs]}
        for name, value in self.change.items():
            place = choice if name.startswith(".") else answer
            place.pop(name.removeprefix("."), None)
            if value is not None:
                place[name.removeprefix(".")] = value
        return 200, answer


def write_adapter(
    folder: Path, bias: float, before: float | None = 0.0, *, note: str = "", changes: Any = None
) -> None:
    """Write an adapter with a bias, and a probe with the server's log-probabilities for both biases."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "revision": repr(bias)}
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": note})
    )
    tensors = {"x.lora_A.weight": [0, 8], "x.lora_B.weight": [8, 16]}
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": [1, 2], "data_offsets": at}
            for name, at in tensors.items()
        }
    ).encode()
    data = struct.pack("<Q", len(header)) + header + struct.pack("<4f", 0.5, 0.5, 0.0, bias)
    (folder / "adapter_model.safetensors").write_bytes(data)
    if before is not None:
        probe = {
            "tokens": TOKENS,
            "logprobs": [logprob(bias, i, token) for i, token in enumerate(TOKENS)][1:],
            "before": [logprob(before, i, token) for i, token in enumerate(TOKENS)][1:],
        }
        (folder / "probe.json").write_text(json.dumps(probe | (changes or {})))


def wait_for(path: Path) -> None:
    """Wait until a file exists, at most a minute."""
    for _ in range(3000):
        if path.exists():
            return
        time.sleep(0.02)


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "error", "code": 0}}


def unknown(name: str) -> tuple[int, Any]:
    return 404, error(f"The model `{name}` does not exist.")


def main() -> None:
    """Run the server as a command; the variable FAKE_VLLM sets its behaviour as JSON."""
    behaviour = json.loads(os.environ.get("FAKE_VLLM", "{}"))
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    known, _ = parser.parse_known_args()
    for line in behaviour.get("print", []):
        print(line, flush=True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with Path(behaviour["file"]).open("a") as file:
        row = {"pids": [os.getpid(), child.pid], "argv": sys.argv[1:], "env": dict(os.environ)}
        file.write(json.dumps(row) + "\n")
    if "exit" in behaviour:
        sys.exit(behaviour["exit"])
    if behaviour.get("idle"):
        time.sleep(60)
    fake = FakeVLLM(known.served_model_name, os.environ["VLLM_API_KEY"], known.port)
    fake.log = Path(behaviour["log"]) if "log" in behaviour else None
    fake.fault = {path: tuple(fault) for path, fault in behaviour.get("fault", {}).items()}
    for name in ("waking", "deadly", "endless"):
        setattr(fake, name, behaviour.get(name, ""))
    fake.http.serve_forever()


if __name__ == "__main__":
    main()
