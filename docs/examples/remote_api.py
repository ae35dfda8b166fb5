"""Optimize a system that calls a remote API: consent for its server, rate limits, and a budget in dollars.

The API is a stand-in on this machine, which the example starts and stops. It speaks the protocol of
OpenAI, demands a key, and rejects some requests because of their rate. For a real one, change
`api_base` and the key.

Needs ``pip install -e ".[remote]"``.
Run: python docs/examples/remote_api.py [FOLDER]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import compound as cp

FILE = """
system: capitals
lm: remote
engines:
  remote:
    litellm: {model: openai/stand-in, api_base: "%s/v1", api_key_env: EXAMPLE_KEY, price: [1.0, 4.0]}
inputs: {question: str}
components:
  answerer:
    llm: {prompt: "Answer the question.", demos: {tune: 2}, max_tokens: 16}
    in: {question: $question}
    out: {answer: str}
outputs: {answer: $answerer}
"""
CAPITALS = {
    **{"Peru": "Lima", "Chile": "Santiago", "Cuba": "Havana", "Spain": "Madrid", "France": "Paris"},
    **{"Italy": "Rome", "Norway": "Oslo", "Egypt": "Cairo", "Kenya": "Nairobi", "Ghana": "Accra"},
    **{"Japan": "Tokyo", "Nepal": "Kathmandu", "Fiji": "Suva", "Iraq": "Baghdad", "Iran": "Tehran"},
    **{
        "Latvia": "Riga",
        "Poland": "Warsaw",
        "Greece": "Athens",
        "Malta": "Valletta",
        "Oman": "Muscat",
    },
}


class StandIn(BaseHTTPRequestHandler):
    """A chat model that answers in a sentence, or in one word where the prompt shows an example."""

    protocol_version = "HTTP/1.1"
    lock, answered, rejected = threading.Lock(), 0, 0

    def do_POST(self) -> None:
        """Reject every twentieth request because of its rate, and answer the others."""
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1][
            "content"
        ]
        with StandIn.lock:
            reject = (StandIn.answered + StandIn.rejected) % 20 == 0
            StandIn.rejected, StandIn.answered = (
                StandIn.rejected + reject,
                StandIn.answered + (not reject),
            )
        country = max(CAPITALS, key=prompt.rfind)
        has_example = prompt.count("What is") > 1
        text = (
            CAPITALS[country]
            if has_example
            else f"The capital of {country} is {CAPITALS[country]}."
        )
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(text.split())}
        answer = {"id": "1", "object": "chat.completion", "model": "stand-in", "choices": [choice]}
        body = json.dumps(
            {"error": "too many requests"} if reject else {**answer, "usage": usage}
        ).encode()
        self.send_response(429 if reject else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if reject:
            self.send_header("Retry-After", "0.1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Print nothing."""


def optimize(folder: Path, server: str) -> cp.Result:
    """Load the system, optimize it with a budget in dollars, and print what was spent."""
    path = folder / "system.yaml"
    path.write_text(FILE % server, encoding="utf-8")
    try:
        cp.load_system(path)
    except cp.CompoundError as error:
        print(
            f"rejected without consent: {str(error).partition('api_key_env: ')[2].partition(';')[0]}"
        )
    system = cp.load_system(path, trust=[f"EXAMPLE_KEY@{server}"])
    rows = [
        {"question": f"What is the capital of {name}?", "answer": CAPITALS[name]}
        for name in CAPITALS
    ]
    budget = cp.Budget(cost=0.01)
    result = cp.optimize(
        system,
        data={"train": rows[:6], "valid": rows[6:14], "test": rows[14:]},
        metric=cp.metrics.token_f1("answer"),
        budget=budget,
        run_dir=folder / "remote_api",
        progress=False,
    )
    before, after = result.test_before, result.test_after
    assert before is not None
    assert after is not None
    print(f"token F1 on test questions: {before.mean:.2f} -> {after.mean:.2f}")
    print(f"spent ${result.spent['cost']:.4f} of at most ${budget.cost:.4f}")
    print(
        f"{result.spent['calls']} calls answered; "
        f"{StandIn.rejected} rejected by the rate limit and sent again"
    )
    return result


def main(folder: Path) -> cp.Result:
    """Start the stand-in, optimize, and stop it."""
    os.environ["EXAMPLE_KEY"] = "not-a-secret"
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        return optimize(folder, f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else temporary))
