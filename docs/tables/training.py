"""Tables of methods that train weights: scores and the course of a training."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import cast

from compound.report.comparison import SweepFacts, methods, trainings
from compound.report.rendering.markdown import render_block
from tables.data import DATA, markdown, results

PARTS = ("first", "second", "third", "asked", "found", "f1", "right")
COURSE = ("penalty", "entropy", "similarity")


def trained(name: str, file: str = "") -> str:
    """Tabulate single-method sweeps of one system together, and the cost of their training."""
    paths = sorted((DATA / f"weights_{name}").glob("*.json"))
    sweeps = [results(f"weights_{name}/{path.stem}") for path in paths]
    rows = [row for sweep in sweeps for row in sweep["rows"]]
    first = next(row for row in rows if row["method"] == "unoptimized")
    others = [row for row in rows if row["method"] != "unoptimized"]
    times = Counter(row["method"] for row in others)
    named = [
        {**row, "method": f"{row['method']}, seed {row['seeds'][0]}"} if times[row["method"]] > 1 else row
        for row in others
    ]
    facts = cast("SweepFacts", {"rows": [first, *named]})
    return "\n\n".join(render_block(made(facts, file or name)) for made in (methods, trainings))


def learned() -> str:
    """Tabulate the scores of trained toy systems by seed, and of their agents."""
    found = results("learning_curves").values()
    kinds = dict.fromkeys((one["task"], one["method"], one["control"]) for one in found)
    rows = []
    for task, method, control in kinds:
        own = [
            one for one in found if (one["task"], one["method"], one["control"]) == (task, method, control)
        ]
        ends = ", ".join(f"{one['after']['score']:.2f}" for one in own)
        parts = [name for name in own[0]["after"] if name in PARTS]
        means = ", ".join(f"{name} {fmean(one['after'][name] for one in own):.2f}" for name in parts)
        before = f"{fmean(one['before']['score'] for one in own):.2f}"
        seconds = str(round(fmean(sum(one["seconds"].values()) for one in own)))
        name = f"{method}, {control}" if control else method
        rows.append([task, name, f"{own[0]['chance']:.2f}", before, ends, means, seconds])
    headings = ["task", "method", "chance", "before", "after, each seed", "parts, mean", "seconds"]
    return markdown(headings, rows)


def course(name: str, *agents: str) -> str:
    """Tabulate penalties and variety of agents' replies, by range of training steps."""
    found = results(f"weights_{name}_course")
    stretches = list(next(iter(found.values())))
    rows = []
    for run, parts in found.items():
        for agent in agents:
            means = [parts[stretch][agent] for stretch in stretches]
            columns = (" → ".join(f"{mean[fact]:.2f}" for mean in means) for fact in COURSE)
            rows.append([run, agent, *columns])
    return markdown(["method", "agent", *COURSE], rows)


def rollouts(name: str) -> str:
    """Tabulate the reward of rollouts and the share of skipped groups, by range of training steps."""
    found = results(f"weights_{name}_course")
    rows = []
    for run, parts in found.items():
        means = [part["rollouts"] for part in parts.values()]
        earned = " → ".join(f"{mean['reward']:.3f}" for mean in means)
        rows.append([run, earned, " → ".join(f"{mean['skipped']:.0%}" for mean in means)])
    return markdown(["method", "reward of rollouts", "groups of equal rewards"], rows)


TABLES = (trained, learned, course, rollouts)
