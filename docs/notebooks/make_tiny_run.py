"""Create the run that the notebook opens by default, and its comparison: `python docs/notebooks/make_tiny_run.py`.

The run optimizes a scripted system of six calls with method `optimas`: a planner names three key
words of a subject, a writer puts them into a phrase, and four later steps each lose some phrases.
Planner and writer have eight styles each, of unknown skill. The metric is the share of the phrase's
words that belong to the topic. Its expectation has a closed form, so the best styles are known. The
comparison is the same optimization for ten seeds, each with its own skills, with and without local
rewards (method `search`), at equal numbers of system runs. It takes a few minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compound as cp
from compound.core.example import Example
from compound.execution.rng import generator
from compound.rewards.pairs import Pair
from compound.optimization.runs.directory import read_json, read_records

FOLDER = Path(__file__).parent / "tiny_run"
COMPARISON = Path(__file__).parent / "tiny_searches.json"
COPIED = ("config.json", "events.jsonl", "memory.jsonl", "checkpoint.json", "best.json", "candidates.jsonl")
SEEDS, BUDGETS, METHODS = 10, (60, 120, 240, 400), ("optimas", "search")
VALID = 60
TOPICS = {
    "rivers": "water bank bridge current delta spring ferry flood mouth fish",
    "bread": "flour oven yeast crust salt dough loaf grain baker slice",
    "clocks": "hour hand spring face tower alarm tick wheel minute repair",
    "forests": "tree leaf moss trail owl shade wood root fern deer",
    "ships": "sail deck harbour anchor captain rope mast crew voyage cargo",
    "music": "note rhythm piano choir drum score song string concert chord",
}
FILLER = "well it is often said that one may perhaps also think of many other things in this respect".split()
STYLES, WORDS = tuple("ABCDEFGH"), 3
TAIL, LOST = ("checker", "editor", "translator", "printer"), 0.15  # steps after the writer, and what each loses
CORE, FRINGE = 1.0, 0.4  # what a word from the first and second half of a topic counts


class Call(cp.Function):
    """Function that counts as a call of a model."""

    kind, cacheable = "call", True


@dataclass(frozen=True)
class World:
    """The scripted system and its metric; `seed` draws the skills of the styles and all replies."""

    seed: int

    def skill(self, component: str, style: str) -> float:
        """Return the probability that a word of a component is of use."""
        return 0.3 + 0.6 * float(generator(self.seed, "skill", component, style).random())

    def value(self, styles: Mapping[str, str]) -> float:
        """Return the expected score of a choice of styles."""
        length = sum(WORDS / (WORDS + more) for more in range(4)) / 4
        skills = [self.skill(name, styles.get(f"{name}.style", STYLES[0])) for name in ("planner", "writer")]
        return skills[0] * skills[1] * (CORE + FRINGE) / 2 * length * (1 - LOST) ** len(TAIL)

    def optimum(self) -> float:
        """Return the expected score of the best styles."""
        return max(self.value({"planner.style": p, "writer.style": w}) for p in STYLES for w in STYLES)

    def plan(self, subject: str, style: str) -> str:
        """Name three words; each is of the topic with the probability of the style."""
        rng, skill = generator(self.seed, "plan", subject, style), self.skill("planner", style)
        words = rng.permutation(TOPICS[subject.split(",")[0]].split())
        return " ".join(str(word if rng.random() < skill else rng.choice(FILLER)) for word in words[:WORDS])

    def write(self, subject: str, plan: str, style: str) -> str:
        """Keep each word of a plan with the probability of the style, and add up to three others."""
        rng, skill = generator(self.seed, "write", subject, plan, style), self.skill("writer", style)
        kept = [word if rng.random() < skill else str(rng.choice(FILLER)) for word in plan.split()]
        return " ".join([*kept, *map(str, rng.choice(FILLER, rng.integers(4)))])

    def pass_on(self, subject: str, text: str, step: int) -> str:
        """Return a phrase, or nothing if this step loses it."""
        return "nothing" if generator(self.seed, step, subject, text).random() < LOST else text

    def system(self) -> cp.System:
        """Return the system with the first style of each component."""
        subject, style = cp.Input("subject", str), cp.Choice(*STYLES)
        plan = Call("planner", self.plan, style=style)(subject=subject)
        text = Call("writer", self.write, style=style)(subject=subject, plan=plan)
        for step, name in enumerate(TAIL):
            text = Call(name, self.pass_on, step=step)(subject=subject, text=text)
        return cp.System("tiny", outputs={"phrase": text})


def on_topic(outputs: Mapping[str, Any], example: Example) -> float:
    """Return the share of a phrase's words that belong to the topic; those of its second half count 0.4."""
    topic, found = example.gold["words"].split(), outputs["phrase"].split()
    return sum(CORE if word in topic[:5] else FRINGE if word in topic else 0.0 for word in found) / len(found)


def worth(pair: Pair, output: Mapping[str, Any]) -> float:
    """Return the score of an output of the planner or the writer if nothing after it lost a word."""
    words = TOPICS[pair.inputs["subject"].split(",")[0]]
    return on_topic({"phrase": output["output"]}, Example("", {}, {"words": words}))


def optimize(path: Path, method: str = "optimas", seed: int = 0, runs: int = 240, backbone: str = "none") -> cp.Result:
    """Optimize the scripted system of a seed into a run directory.

    Args:
        path: the run directory to create.
        method: `optimas`, or `search`, which is the same without local rewards.
        seed: the seed of the system and of the run.
        runs: the budget in system runs, besides the initial evaluation and the decision.
        backbone: the backbone of the local rewards.
    """

    def rows(split: str, n: int) -> list[dict[str, str]]:
        names = list(TOPICS)
        return [{"subject": f"{names[i % 6]}, {split} {i}", "words": TOPICS[names[i % 6]]} for i in range(n)]

    data = {"train": rows("train", 200), "valid": rows("valid", VALID), "test": rows("test", 30)}
    own = {"optimas": {"backbone": {"model": backbone}}} if method == "optimas" else {}
    return cp.optimize(
        World(seed).system(), data, cp.metrics.custom(on_topic, bounds=(0, 1), thread="never"), run_dir=path, progress=False,
        method=method, seed=seed, budget=runs + 2 * VALID, valid_size=VALID, **own,
    )


def share(method: str, runs: int, seed: int) -> float:
    """Return the expected score of the result, as a share of the best."""
    with tempfile.TemporaryDirectory() as folder:
        best = optimize(Path(folder) / "run", method, seed, runs).best
    world = World(seed)
    return round(world.value({key: str(best[key]) for key in best}) / world.optimum(), 4)


def compare() -> None:
    """Write the shares of the best score that each method finds, by budget and seed."""
    worlds = [World(seed) for seed in range(SEEDS)]
    found: dict[str, Any] = {"start": [round(world.value({}) / world.optimum(), 4) for world in worlds]}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for method in METHODS:
            jobs = {runs: [pool.submit(share, method, runs, seed) for seed in range(SEEDS)] for runs in BUDGETS}
            found[method] = {str(runs): [job.result() for job in made] for runs, made in jobs.items()}
    COMPARISON.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


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
    candidates = [{**record, "seconds": 0.0} for record in read_records(source, "candidates.jsonl")]
    for name, records in (("memory.jsonl", read_records(source, "memory.jsonl")), ("candidates.jsonl", candidates)):
        (target / name).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (target / "checkpoint.json").write_text(_without_times(source, target), encoding="utf-8")


def _without_times(source: Path, target: Path) -> str:
    """Return a checkpoint of the copied records, without times and checksums."""
    stored = read_json(source, "checkpoint.json")
    state = stored["state"]
    of_candidates = [part for candidate in state["candidates"] for part in candidate.values() if isinstance(part, dict)]
    for part in (*state["meters"], *of_candidates):
        if "seconds" in part:
            part["seconds"] = 0.0
    files = {name: target / name for name in stored["lengths"]}
    lengths = {name: file.stat().st_size if file.exists() else 0 for name, file in files.items()}
    kept = {name: stored[name] for name in ("format", "step", "state")}
    return json.dumps({**kept, "lengths": lengths}) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        optimize(Path(temporary) / "run")
        copy_run(Path(temporary) / "run", FOLDER)
    compare()
    print(f"{FOLDER}: {sum(file.stat().st_size for file in FOLDER.rglob('*') if file.is_file()) / 1000:.0f} kB")
