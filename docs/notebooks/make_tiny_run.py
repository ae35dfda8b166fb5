"""Create the run that the notebook opens by default: `python docs/notebooks/make_tiny_run.py`.

The run optimizes a simulated system with method `optimas`. A planner names key words, a writer writes a phrase
with them, and a polisher formats it. The metric prefers short phrases about the topic and ignores their
format. Replies are scripted, and local rewards read the numeric features only, so this takes seconds.
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
from compound.rewards.settings import BackboneSettings
from compound.settings.optimize import OptimizeSettings
from compound.settings.common import BudgetSettings
from compound.runs.directory import read_json, read_records
from compound.testing import ScriptedLM

FOLDER = Path(__file__).parent / "tiny_run"
COPIED = ("config.json", "events.jsonl", "memory.jsonl", "checkpoint.json", "best.json")
TOPICS = {
    "rivers": "water bank bridge current delta spring ferry flood mouth fish",
    "bread": "flour oven yeast crust salt dough loaf grain baker slice",
    "clocks": "hour hand spring face tower alarm tick wheel minute repair",
    "forests": "tree leaf moss trail owl shade wood root fern deer",
    "ships": "sail deck harbour anchor captain rope mast crew voyage cargo",
    "music": "note rhythm piano choir drum score song string concert chord",
}
FILLER = "well it is often said that one may perhaps also think of many other things in this respect".split()
# A prompt with such clues leads to more words of the topic and shorter phrases; at most two of them count.
CLUES = ("few words", "only the answer", "brief", "short", "exact", "keyword", "one line", "concise")


def scripted_model(likes_long: bool = False) -> Any:
    """Return the reply function of the scripted model.

    The share of topic words and the length of a reply depend on the clues in the prompt and on chance.

    Args:
        likes_long: whether the writer's phrases are long whatever the prompt is.
    """

    def reply(message: str, rng: np.random.Generator) -> str:
        topic = next((name for name in TOPICS if name in message), "bread")
        words = TOPICS[topic].split()
        clues = min(2, sum(clue in message.lower() for clue in CLUES))
        if "Plan:" not in message:  # the planner
            share = 0.45 + 0.25 * clues
            drawn = [str(rng.choice(words if rng.random() < share else FILLER)) for _ in range(rng.integers(2, 6))]
            return " ".join(dict.fromkeys(drawn))
        plan = re.findall(r"\w+", message.rsplit("Plan:", maxsplit=1)[1].split("\n")[0])
        kept = [word for word in plan if rng.random() < 0.95]
        extra = int(rng.integers(0, 12 if likes_long else 9 - 3 * clues))
        phrase = [*kept, *(str(rng.choice(words if rng.random() < 0.05 else FILLER)) for _ in range(extra))]
        return " ".join(phrase) + ("." if rng.random() < 0.5 else "")

    return reply


def brief_and_on_topic(outputs: Mapping[str, Any], example: Example) -> float:
    """Return the share of a phrase's words that belong to the topic.

    The first five words of a topic count 1, the others 0.6. Phrases count as at least three words long.
    """
    found, topic = re.findall(r"\w+", outputs["phrase"].lower()), example.gold["words"].split()
    return sum(0.6 * (word in topic) + 0.4 * (word in topic[:5]) for word in found) / max(3, len(found))


def long_and_on_topic(outputs: Mapping[str, Any], example: Example) -> float:
    """Return the number of distinct words divided by 20, at most 1; words of the topic count twice."""
    found = set(re.findall(r"\w+", outputs["phrase"].lower()))
    return min(1.0, sum(1 + (word in example.gold["words"].split()) for word in found) / 20)


def polish(text: str, style: str) -> str:
    """Return a phrase in a style."""
    return {"plain": text, "title": text.title(), "quoted": f"'{text}'"}[style]


def make(path: Path, *, seed: int = 0, likes_long: bool = False, runs: int = 600, backbone: str = "none") -> Path:
    """Optimize the simulated system, and return the run directory.

    Args:
        path: the run directory to create.
        seed: the seed of the run.
        likes_long: whether the metric prefers long phrases.
        runs: the budget in system runs.
        backbone: the backbone of the local rewards.
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
            sources=("edits",), backbone=BackboneSettings(model=backbone)
        ),
    )
    metric = cp.custom(long_and_on_topic if likes_long else brief_and_on_topic)
    optimize(
        system, Dataset.of(train=rows(54), valid=rows(30), test=rows(30)), metric, settings,
        run_dir=path, engines={"scripted": ScriptedLM(scripted_model(likes_long))},
    )
    return path


def copy_run(source: Path, target: Path) -> None:
    """Copy the files that the notebook reads, without times and versions, so that they can be compared."""
    shutil.rmtree(target, ignore_errors=True)
    for name in COPIED:
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
    """Return a checkpoint without times, and without the checksums of the events, which were changed."""
    stored = read_json(source, "checkpoint.json")
    for meter in stored["state"]["meters"]:
        meter["seconds"] = 0.0
    return json.dumps({name: stored[name] for name in ("step", "lengths", "state")}) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        copy_run(make(Path(temporary) / "run"), FOLDER)
    print(f"{FOLDER}: {sum(file.stat().st_size for file in FOLDER.rglob('*') if file.is_file()) / 1000:.0f} kB")
