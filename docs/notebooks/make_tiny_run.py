"""Make the run that the notebook opens by default: `python docs/notebooks/make_tiny_run.py`.

A system of three small writers, simulated: a planner names key words, a writer makes a phrase of them, a
polisher sets its style. The metric prefers short phrases that keep to the topic, whatever their style. No
model is loaded and the reward reads no text, only the template's numbers, so this takes seconds.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import compound as cp
from compound.example import Example
from compound.evaluation.dataset import Dataset
from compound.api.optimize import optimize
from compound.optimizers.optimas.methods import OptimasSettings
from compound.optimizers.search.prompts import PromptSettings
from compound.rewards.settings import BackboneSettings
from compound.settings.optimize import OptimizeSettings
from compound.settings.common import BudgetSettings
from compound.runs.directory import read_json, read_records
from compound.testing import ScriptedLM

FOLDER = Path(__file__).parent / "tiny_run"
KEPT = ("config.json", "events.jsonl", "memory.jsonl", "checkpoint.json", "best.json")
TOPICS = {
    "rivers": "water bank bridge current delta spring ferry flood mouth fish",
    "bread": "flour oven yeast crust salt dough loaf grain baker slice",
    "clocks": "hour hand spring face tower alarm tick wheel minute repair",
    "forests": "tree leaf moss trail owl shade wood root fern deer",
    "ships": "sail deck harbour anchor captain rope mast crew voyage cargo",
    "music": "note rhythm piano choir drum score song string concert chord",
}
FILLER = "well it is often said that one may perhaps also think of many other things in this respect".split()
HELPFUL = ("few words", "only the answer", "brief", "short", "exact", "keyword", "one line", "concise")


def simulated(likes_long: bool = False) -> Any:
    """Return a model: how well it keeps to the topic, and how briefly, depends on the prompt and on chance."""

    def reply(message: str, rng: np.random.Generator) -> str:
        topic = next((name for name in TOPICS if name in message), "bread")
        words = TOPICS[topic].split()
        helped = min(2, sum(clue in message.lower() for clue in HELPFUL))
        if "Plan:" not in message:  # the planner
            share = 0.45 + 0.25 * helped
            drawn = [str(rng.choice(words if rng.random() < share else FILLER)) for _ in range(rng.integers(2, 6))]
            return " ".join(dict.fromkeys(drawn))
        plan = re.findall(r"\w+", message.rsplit("Plan:", maxsplit=1)[1].split("\n")[0])
        kept = [word for word in plan if rng.random() < 0.95]
        extra = int(rng.integers(0, 12 if likes_long else 9 - 3 * helped))
        phrase = [*kept, *(str(rng.choice(words if rng.random() < 0.05 else FILLER)) for _ in range(extra))]
        return " ".join(phrase) + ("." if rng.random() < 0.5 else "")

    return reply


def brief_and_on_topic(outputs: Mapping[str, Any], example: Example) -> float:
    """Score the share of a phrase's words that belong to the topic, the first five of them most; phrases under
    three words lose."""
    found, topic = re.findall(r"\w+", outputs["phrase"].lower()), example.gold["words"].split()
    return sum(0.6 * (word in topic) + 0.4 * (word in topic[:5]) for word in found) / max(3, len(found))


def long_and_on_topic(outputs: Mapping[str, Any], example: Example) -> float:
    """Score the number of different words, those of the topic twice: another taste, for comparison."""
    found = set(re.findall(r"\w+", outputs["phrase"].lower()))
    return min(1.0, sum(1 + (word in example.gold["words"].split()) for word in found) / 20)


def polish(text: str, style: str) -> str:
    """Set a phrase's style."""
    return {"plain": text, "title": text.title(), "quoted": f"'{text}'"}[style]


def make(path: Path, *, seed: int = 0, likes_long: bool = False, runs: int = 1300, backbone: str = "none") -> Path:
    """Optimize the system into a run directory.

    Args:
        path: where.
        seed: of the run.
        likes_long: whether the metric prefers long phrases instead.
        runs: the budget, in system runs.
        backbone: what reads the texts.
    """
    subject = cp.Input("subject", str)
    planner = cp.LLM("planner", prompt=cp.Text("Name what matters about the subject."), temperature=1.0)
    writer = cp.LLM("writer", prompt=cp.Text("Write about the subject."), temperature=1.0)
    polisher = cp.Function("polisher", polish, style=cp.Choice("plain", "title", "quoted"))
    phrase = polisher(text=writer(subject=subject, plan=planner(subject=subject)))
    system = cp.System("tiny", outputs={"phrase": phrase}, lm="scripted")

    def rows(n: int) -> list[dict[str, str]]:
        names = list(TOPICS)
        return [{"subject": f"{names[i % 6]}, take {i}", "words": TOPICS[names[i % 6]]} for i in range(n)]

    settings = OptimizeSettings(
        method="optimas", seed=seed, iterations=6, valid_size=30, budget=BudgetSettings(system_runs=runs),
        optimas=OptimasSettings(
            prompts=PromptSettings(proposers=("edits",)),
            backbone=BackboneSettings(model=backbone),
        ),
    )
    metric = cp.custom(long_and_on_topic if likes_long else brief_and_on_topic)
    optimize(
        system, Dataset.of(train=rows(60), valid=rows(30), test=rows(30)), metric, settings,
        run_dir=path, engines={"scripted": ScriptedLM(simulated(likes_long))},
    )
    return path


def tidy(source: Path, target: Path) -> None:
    """Copy what the notebook reads, without times and without what was measured on one machine only."""
    shutil.rmtree(target, ignore_errors=True)
    for name in KEPT:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, target / name)
    shutil.copytree(source / "memory", target / "memory")
    config = read_json(source, "config.json")
    (target / "config.json").write_text(json.dumps({**config, "versions": {}}, indent=1) + "\n", encoding="utf-8")
    kept = [e for e in read_records(source, "events.jsonl") if e["event"] != "progress"]
    for i, event in enumerate(kept):
        event["at"], event["spent"]["seconds"] = float(i), 0.0
    (target / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in kept), encoding="utf-8")
    memory = "".join(json.dumps(record) + "\n" for record in read_records(source, "memory.jsonl"))
    (target / "memory.jsonl").write_text(memory, encoding="utf-8")
    (target / "checkpoint.json").write_text(_without_times(source), encoding="utf-8")


def _without_times(source: Path) -> str:
    """Return a checkpoint without times, and without checksums: the events were changed on purpose."""
    stored = read_json(source, "checkpoint.json")
    for meter in stored["state"]["meters"]:
        meter["seconds"] = 0.0
    return json.dumps({name: stored[name] for name in ("step", "lengths", "state")}) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        tidy(make(Path(temporary) / "run"), FOLDER)
    print(f"{FOLDER}: {sum(file.stat().st_size for file in FOLDER.rglob('*') if file.is_file()) / 1000:.0f} kB")
