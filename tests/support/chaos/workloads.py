"""Small optimizations for the fault-injection harness: one YAML file per method, with its data and code.

A *remote* workload calls a server on the loopback interface through litellm. A *training* workload
samples from and trains a tiny random model in the process. Both take seconds, and both are
deterministic given the same answers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimas_settings import proposals
from training_settings import trainings

REMOTE_METHODS = (
    "search",
    "random",
    "mipro",
    "gepa",
    "textgrad",
    "opro",
    "llm_selector",
    "hbc",
    "optimas",
)
TRAINING_METHODS = (
    "mmgrpo",
    "mhgpo_is",
    "mhgpo_fof",
    "mhgpo_rr",
    "ppo",
    "mappo",
    "mygo",
    "better_together",
)
PRICES = (100.0, 200.0)  # dollars per million tokens, of the server and of the meter
IN_FLIGHT = 4  # concurrent requests of each engine, which a kill can lose
CALL_SECONDS = 20.0  # time limit of one call
RETRIES = 11  # with faults in 40 % of the requests, one call in 60,000 fails after these retries

PARTS = """
def end(answer: str, mark: str) -> str:
    return answer + mark
"""


@dataclass(frozen=True)
class Workload:
    """One optimization: its method, and its changes to the settings of its kind."""

    name: str
    method: str
    trains: bool = False
    optimize: Mapping[str, Any] = field(default_factory=dict)

    def write(
        self,
        folder: Path,
        url: str = "",
        model: Path | None = None,
        *,
        timeout: float = CALL_SECONDS,
    ) -> Path:
        """Write the YAML file with its data into a folder, and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        document = _training(model) if self.trains else _remote(folder, url, timeout)
        document["optimize"] = {**document["optimize"], "method": self.method, **self.optimize}
        rows = _chain_rows() if self.trains else _number_rows()
        (folder / "data").mkdir(exist_ok=True)
        for split, examples in rows.items():
            lines = "".join(json.dumps(example) + "\n" for example in examples)
            (folder / "data" / f"{split}.jsonl").write_text(lines, encoding="utf-8")
        path = folder / "system.yaml"
        path.write_text(json.dumps(document, indent=1), encoding="utf-8")  # JSON is YAML
        return path


_REWARDS: dict[str, Any] = {
    "lm": "writer",
    "backbone": {"model": "none"},
    "pairs": {"inputs": 6, "samples": 2, "min_rollouts": 1, "max_rollouts": 2, "level": 1},
    "reward": {"min_accuracy": 0.5, "trust_level": 1},
}
_CLONED = {
    **{name: _REWARDS[name] for name in ("lm", "backbone")},
    "pairs": {"inputs": 6, "samples": 2, "min_rollouts": 1, "max_rollouts": 2, "level": 1},
}


def workloads() -> list[Workload]:
    longer = {"optimas": {"budget": {"system_runs": 200}}}  # until its local rewards are trusted
    remote = [Workload(name, name, optimize=longer.get(name, {})) for name in REMOTE_METHODS]
    learned = {
        "optimas": {
            **_REWARDS,
            "backbone": {"model": "minilm"},
            "reward": {**_REWARDS["reward"], "lora": {"epochs": 1, "batch": 8, "rank": 2}},
        }
    }
    training = [Workload(method, method, trains=True) for method in TRAINING_METHODS]
    return [*remote, Workload("optimas_lora", "optimas", optimize=learned), *training]


def answer(body: Mapping[str, Any]) -> str:
    """Answer a chat request deterministically.

    A prompt with instructions, a strong model and a right hint make right answers more likely, so that
    local rewards of hints can be learned.
    """
    model, text = str(body["model"]), str(body["messages"][-1]["content"])
    draw = (
        int.from_bytes(hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest()[:4])
        / 2**32
    )
    if model == "writer":
        return f"<prompt>\nAnswer the question with its number, form {int(draw * 90)}.\n</prompt>"
    asked = re.findall(r"what is \w+ (\d+)", text)
    number = asked[-1] if asked else "0"
    chance = 0.35 + 0.3 * (model == "strong") + 0.3 * ("form" in text or "number" in text)
    if hint := re.search(r"Hint: (.*)", text):
        chance += 0.3 if hint[1] == number else -0.3
    return number if draw < chance else f"{number}{int(draw * 9)}"


def _number_rows() -> dict[str, list[dict[str, str]]]:
    sizes = {"train": 16, "valid": 12, "test": 6}
    return {
        split: [{"question": f"what is {split} {i}", "answer": str(i)} for i in range(n)]
        for split, n in sizes.items()
    }


def _chain_rows() -> dict[str, list[dict[str, Any]]]:
    from benchmarks.simulated.toys import toy

    task = toy("chain", "local/any")
    splits = {"train": task.train[:8], "valid": task.valid[:6], "test": task.test[:3]}
    return {
        split: [{"id": e.id, **e.inputs, **e.gold} for e in examples]
        for split, examples in splits.items()
    }


def _remote(folder: Path, url: str, timeout: float) -> dict[str, Any]:
    (folder / "parts.py").write_text(PARTS, encoding="utf-8")
    served = {"api_base": url, "concurrency": IN_FLIGHT, "price": PRICES, "timeout": timeout}
    engines = {
        name: {"litellm": {"model": f"openai/{name}", **served}}
        for name in ("small", "strong", "writer")
    }
    question = {"question": "$question"}
    hinter = {
        "prompt": {"tune": "Write a hint."},
        "max_tokens": 12,
        "temperature": 1.0,
        "retries": RETRIES,
    }
    answerer = {
        "prompt": {"tune": "Answer the question."},
        "demos": {"tune": 2},
        "lm": {"choice": ["small", "strong"]},
        "max_tokens": 8,
        "temperature": 1.0,
        "retries": RETRIES,
    }
    ending = {"call": "parts:end", "mark": {"choice": ["", " or so", "!"], "value": " or so"}}
    return {
        "system": "numbers",
        "lm": "small",
        "engines": engines,
        "inputs": {"question": "str"},
        "components": {
            "hinter": {"llm": hinter, "in": question},
            "answerer": {"llm": answerer, "in": {**question, "hint": "$hinter"}},
            "ending": {"function": ending, "in": {"answer": "$answerer"}, "out": "str"},
        },
        "outputs": {"answer": "$ending"},
        "data": {"path": "data", "train": "train", "valid": "valid", "test": "test"},
        "metric": {"exact_match": {"output": "answer", "gold": "answer"}},
        "optimize": {
            "seed": 3,
            "valid_size": None,
            "minibatch": 3,
            "candidates": 4,
            "iterations": 2,
            "alpha": 0.2,
            "concurrency": 8,
            "budget": {"system_runs": 120},
            **proposals("demos", "edits", "opro", lm="writer"),
            "optimas": _REWARDS,
            "hbc": _CLONED,
        },
    }


def _training(model: Path | None) -> dict[str, Any]:
    def agent(reads: Mapping[str, str]) -> dict[str, Any]:
        llm = {"max_tokens": 1, "weights": {"lora": {"rank": 4}}}
        return {"llm": llm, "in": dict(reads), "out": {"say": "str"}}

    said = {"first": "$first", "second": "$second", "third": "$third"}
    return {
        "system": "chain",
        "lm": "toy",
        "engines": {
            "toy": {
                "transformers": {"model": str(model), "dtype": "float32", "deterministic": True}
            }
        },
        "inputs": {"colour": "str", "animal": "str", "fruit": "str"},
        "components": {
            "first": agent({"word": "$colour"}),
            "second": agent({"word": "$animal", "before": "$first"}),
            "third": agent({"word": "$fruit", "before": "$second"}),
            "together": {
                "function": {"call": "benchmarks.simulated.toys:together"},
                "in": said,
                "out": "list[str]",
            },
        },
        "outputs": {"said": "$together"},
        "data": {"path": "data", "train": "train", "valid": "valid", "test": "test"},
        "metric": {"custom": {"call": "benchmarks.simulated.toys:chain_score"}},
        "optimize": {
            "seed": 3,
            "valid_size": None,
            "alpha": 0.2,
            "concurrency": 8,
            "budget": {"system_runs": 300},
            **trainings(
                steps=3,
                examples=3,
                runs=3,
                lr=0.01,
                minibatches=2,
                attempts=3,
                keep=2,
                threshold=0.0,
            ),
            "better_together": {"stages": ["mhgpo_fof", "mmgrpo"]},
        },
    }
