"""Requests of an external agent train the weights of the model that answers them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import compound as cp
from compound.components.external_agent import ExternalAgent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("peft") is None,
    reason="needs torch and peft",
)


def speak(word: str, base_url: str, api_key: str) -> str:
    import openai

    messages: Any = [
        {"role": "system", "content": "Say something."},
        {"role": "user", "content": word},
    ]
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        made = client.chat.completions.create(model="m", messages=messages, max_tokens=6)
        return made.choices[0].message.content or ""


@pytest.fixture
def system(make_model: Callable[..., Path], tmp_path: Path) -> cp.System:
    folder = make_model(tmp_path / "model")
    prompt = cp.components.AgentPrompt(
        "speaker", system="Say something.", weights=cp.LoRA(4), max_tokens=6
    )
    agent = ExternalAgent("agent", call=speak, prompts=[prompt])
    return cp.System("speaking", {"text": agent(word=cp.Input("word"))}, lm=str(folder))


def test_a_recognized_request_has_a_token_record(system: cp.System) -> None:
    trace = cp.run(system, {"word": "lima"})
    (call,) = trace.calls
    (record,) = call.tokens
    assert call.component == "speaker"
    assert len(record.sampled) == len(record.logprobs) == call.usage.completion_tokens
    assert len(record.prompt) == call.usage.prompt_tokens


@pytest.mark.slow
def test_weights_are_trained_on_the_requests_of_an_agent(system: cp.System, tmp_path: Path) -> None:
    rows = [{"id": str(i), "word": f"word {i}"} for i in range(20)]

    def vowels(outputs: Any, example: cp.Example) -> float:
        text = str(outputs["text"])
        return sum(letter in "aeiou" for letter in text) / max(1, len(text))

    result = cp.optimize(
        system,
        {"train": rows[:4], "valid": rows[4:12], "test": rows[12:]},
        cp.metrics.custom(vowels, bounds=(0, 1)),
        method="mmgrpo",
        budget=200,
        run_dir=tmp_path / "run",
        progress=False,
        mmgrpo={
            "steps": 2,
            "rollouts": {"examples": 2, "runs": 3},
            "optimizer": {"lr": 1e-2},
            "evaluation": {"every": 0},
        },
    )
    assert result.test_after is not None
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    (job,) = [event for event in events if event["event"] == "job"]
    assert job["facts"]["steps"] == 2
    assert job["facts"]["samples"] > 0
    assert job["values"]["speaker.weights"]["sha256"]  # an adapter was trained and evaluated
    assert any(event["event"] == "decision" for event in events)


def test_weights_need_a_limit_of_tokens() -> None:
    with pytest.raises(cp.CompoundError, match="no max_tokens"):
        cp.components.AgentPrompt("speaker", system="Say something.", weights=cp.LoRA(4))
