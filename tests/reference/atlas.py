"""Optimize ``benchmarks/atlas.yaml`` and summarize everything that the run decided, without times.

``python -m reference.atlas`` in the folder ``tests`` writes the fixtures. They were made before the
packages were arranged anew; write them again only where results are meant to change, and say so in
the changelog.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from compound.api.optimize import run_optimization
from compound.core.engine import Message, Request
from compound.testing import ScriptedLM
from compound.yaml import loads

ATLAS = Path(__file__).parents[2] / "benchmarks" / "atlas.yaml"
SMALL = {
    "optimize.valid_size": "16",
    "optimize.test_size": "12",
    "optimize.budget.system_runs": "150",
    "optimize.candidates": "4",
}
NEWER = {
    "format": None,
    "tools": (),
    "tool_choice": "auto",
    "forward": None,
}  # fields of requests since then
OPTIMAS = {
    "backbone": {"model": "none"},
    "pairs": {"inputs": 6, "samples": 2, "min_rollouts": 1, "max_rollouts": 1},
}
METHODS: Mapping[str, Mapping[str, str]] = {
    "search": {},
    "random": {},
    "opro": {},
    "mipro": {"optimize.mipro.proposers": '["edits"]'},
    "textgrad": {},
    "gepa": {},
    "optimas": {"optimize.optimas": json.dumps(OPTIMAS)},
}  # by name, what is set besides


SCRIPTED_FILE = Path(__file__).with_name("atlas_scripted.json")
EMBEDDED_FILE = Path(__file__).with_name("atlas_embedded.json")
DATA = ATLAS.parent / "data" / "atlas"
ROWS = [
    json.loads(row)
    for split in ("train", "dev", "test")
    for row in (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
]
ANSWERS = {row["question"]: row["answer"] for row in ROWS}


def reply(message: str, rng: np.random.Generator) -> str:
    """Return a rewritten prompt where one is asked for; else the answer, or some words of the message.

    The answer is the more likely the better the prompt: demonstrations, rewritten instructions and
    few passages help, so that every kind of parameter has something to find.
    """
    if "<prompt>" in message:
        return f"<prompt>Answer in {rng.integers(2, 5)} words, using the passages.</prompt>"
    if "```" in message:  # the form of the library gepa
        return f"```\nAnswer in {rng.integers(2, 5)} words, using the passages.\n```"
    questions = re.findall(r"Question: (.*)", message)
    if not questions or questions[-1] not in ANSWERS:  # a request for criticism
        return f"Use {rng.integers(2, 5)} words."
    question = questions[-1]
    shown = message.count("Question:") - 1
    passages = message.rpartition("Passages:")[2].count("\n") - 2
    likely = 0.15 + 0.2 * min(shown, 2) + 0.2 * (" words" in message) + 0.1 * (passages < 3)
    if rng.random() < likely:
        return str(ANSWERS[question])
    words = message.split()
    first = int(rng.integers(0, len(words) - 2))
    return " ".join(words[first : first + 2])


def summary(
    method: str, overrides: Mapping[str, str], *, scripted: bool = True
) -> dict[str, object]:
    """Return what one run decided, and a digest of all its requests where the engine is scripted."""
    lm = ScriptedLM(reply)
    merged = {**SMALL, **overrides, "optimize.method": method}
    text = ATLAS.read_text(encoding="utf-8")
    if scripted:  # a scripted model has no weights to train
        text = "".join(
            line for line in text.splitlines(keepends=True) if "weights: {lora" not in line
        )
    program = loads(text, path=ATLAS, overrides=list(merged.items()))
    assert program.data
    assert program.metric
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        result = run_optimization(
            program.system,
            program.data,
            program.metric,
            program.optimize,
            run_dir=run,
            engines=(lambda name: lm) if scripted else program.find_engine,
            folder=program.folder,
        )
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    jobs = [
        {
            name: event[name]
            for name in (
                "optimizer",
                "keys",
                "values",
                "train_before",
                "train_after",
                "tried",
                "runs",
            )
        }
        for event in events
        if event["event"] == "job"
    ]
    decisions = [
        {name: event.get(name) for name in ("decision", "level", "accepted", "p", "changes")}
        for event in events
        if event["event"] == "decision"
    ]
    requests = sorted(
        json.dumps(described(request), sort_keys=True, default=str) for request in lm.requests
    )
    spent = {name: value for name, value in result.spent.items() if name != "seconds"}
    found = {
        "best": result.best.to_json(),
        "valid": [result.before.mean, result.after.mean],
        "test": [e.mean if e else None for e in (result.test_before, result.test_after)],
        "spent": spent,
        "jobs": jobs,
        "decisions": decisions,
        "requests": [len(requests), hashlib.sha256("\n".join(requests).encode()).hexdigest()],
    }
    return {name: without_scores(value) for name, value in found.items()}


def described(request: Request) -> dict[str, object]:
    """Return the fields of a request, without newer ones that are not set."""
    found = asdict(request)
    found["messages"] = [
        {"role": message.role, "content": message.text} for message in request.messages
    ]
    assert not any(message.tool_calls or message.images for message in request.messages)
    return {
        name: value for name, value in found.items() if name not in NEWER or value != NEWER[name]
    }


def without_scores(value: object) -> object:
    """Leave out the scores of passages: processors round logarithms differently."""
    if isinstance(value, dict):
        return {name: without_scores(part) for name, part in value.items() if name != "score"}
    return [without_scores(part) for part in value] if isinstance(value, list | tuple) else value


EMBEDDED = {
    "lm": "exact",
    "engines": json.dumps({"exact": {"transformers": {"model": "smollm2", "deterministic": True}}}),
    "optimize.valid_size": "8",
    "optimize.test_size": "6",
    "optimize.alpha": "0.3",
    "optimize.budget.system_runs": "64",
}


def embedded() -> dict[str, object]:
    """Return a run with the embedded model, and by what its processor can be told from others."""
    return {"processor": fingerprint(), "search": summary("search", EMBEDDED, scripted=False)}


def fingerprint() -> list[float]:
    """Return log-probabilities of the embedded model, whose last bits differ between kinds of processors."""
    program = loads(ATLAS.read_text(encoding="utf-8"), path=ATLAS, overrides=list(EMBEDDED.items()))
    request = Request(
        (Message("user", "Name some cities of Europe."),), max_tokens=24, want_tokens=True
    )
    completion = asyncio.run(program.find_engine("exact").generate(request))
    assert completion.tokens
    return list(completion.tokens.logprobs)


def main() -> None:
    """Write both fixtures."""
    scripted = {method: summary(method, overrides) for method, overrides in METHODS.items()}
    for path, found in ((SCRIPTED_FILE, scripted), (EMBEDDED_FILE, embedded())):
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
