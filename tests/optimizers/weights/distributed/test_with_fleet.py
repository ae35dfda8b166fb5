"""Learner processes train what a fleet samples, whose servers are found by their addresses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest

from fake_vllm import FakeVLLM

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("httpx")

from compound import Example, Score
from compound.engines.fleet import FleetEngine
from compound.metrics import custom
from trainings.jobs import train_toy, training_records


class TrainedServer(FakeVLLM):
    """Serves adapters of a trainer: it answers their probes as they say."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.probes: dict[str, dict[str, Any]] = {}
        self.tokens = cycle((7, 9, 11))

    def load_lora_adapter(self, body: dict[str, Any]) -> tuple[int, Any]:
        name = body["lora_name"]
        self.probes[name] = json.loads((Path(body["lora_path"]) / "probe.json").read_text())
        self.loaded[name] = 0.1 * len(self.probes)  # the bias of its answers to other texts
        return 200, "Success"

    def completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        probe = self.probes.get(body["model"])
        if probe is None or body["prompt"] != probe["tokens"]:
            return super().completions(body)
        pairs = zip(probe["tokens"][1:], probe["logprobs"], strict=True)
        entries = [None, *({str(token): {"logprob": value}} for token, value in pairs)]
        choice = {"prompt_token_ids": probe["tokens"], "prompt_logprobs": entries}
        return 200, {"choices": [choice]}

    def chat_completions(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Vary the first token, as equal answers with rewards around their mean have no gradient."""
        status, answer = super().chat_completions(body)
        if status == 200 and "token_ids" in (choice := answer["choices"][0]):
            choice["token_ids"] = [next(self.tokens), *choice["token_ids"][1:]]
        return status, answer

    def close(self) -> None:
        self.stop()


@pytest.fixture
def servers(toy_model: Path) -> Iterator[list[TrainedServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(closing(TrainedServer(str(toy_model)))) for _ in range(2)]


@pytest.mark.slow
def test_processes_train_what_servers_at_addresses_sample(
    servers: list[TrainedServer], toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer of a step comes from the weights of the step before, on each server."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for server in servers:
        server.serve()
    numbers = count()

    def alternating(outputs: Mapping[str, Any], example: Example) -> Score:
        return Score(float(next(numbers) % 2))

    engine = FleetEngine([each.address for each in servers], vllm={"model": str(toy_model)})
    how: Any = {"engine": engine, "metric": custom(alternating, "alternating")}
    given: Any = {"steps": 3, "examples": 4, "runs": 4, "micro_tokens": 64}
    train_toy(toy_model, tmp_path / "run", learner={"processes": 2}, **how, **given)
    records = training_records(tmp_path / "run")
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all(min(record["norms"].values()) > 0 for record in records)
    stored = {path.name.rpartition("-")[2] for path in (tmp_path / "run/memory").glob("*-*")}
    for server in servers:
        used = {body["model"] for body in server.sent("chat/completions")} - {str(toy_model)}
        assert used <= set(server.probes)  # none before it was loaded
        assert len(used) >= 2 * 3  # the adapters of two steps, of three components
        assert stored & used
