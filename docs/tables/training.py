"""Tables of methods that train weights: scores and the course of a training."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import Any

from compound.evaluation.statistics import UNIT, Interval, interval_of_means, paired_interval
from compound.report.rendering import markdown_table
from compound.report.sweep import methods_of_file, trainings_of_file
from tables.data import DATA, markdown, results, spread

PARTS = ("first", "second", "third", "asked", "found", "f1", "right")
COSTS = ("steps", "sampled", "tokens", "sample_seconds", "train_seconds")
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
        {**row, "method": f"{row['method']}, seed {row['seeds'][0]}"}
        if times[row["method"]] > 1
        else row
        for row in others
    ]
    facts, shown = {"rows": [first, *named]}, file or name
    tables = methods_of_file(facts, shown), trainings_of_file(facts, shown)
    return "\n\n".join(map(markdown_table, tables))


def trained_seeds(name: str, first: str) -> str:
    """Tabulate trainings of several seeds: scores with intervals over the seeds, and their cost.

    Args:
        name: the name of the system in ``weights_NAME_seeds``, which has a sweep for each training.
        first: the training that the others are compared with, paired by seed.
    """
    paths = sorted(
        (DATA / f"weights_{name}_seeds").glob("*.json"), key=lambda path: (path.stem != first, path)
    )
    runs: dict[str, list[dict[str, Any]]] = {
        path.stem: results(f"weights_{name}_seeds/{path.stem}")["runs"] for path in paths
    }
    base = [run["test_after"] for run in runs[first]]
    rows = []
    for training, own in runs.items():
        after = [run["test_after"] for run in own]
        difference = (
            "–" if training == first else _spread(paired_interval(base, after), signed=True)
        )
        means = {fact: fmean(run["training"][fact] for run in own) for fact in COSTS}
        rows.append(
            [
                f"`{training}`",
                ", ".join(f"{score:.3f}" for score in after),
                _spread(interval_of_means(after, bounds=UNIT)),
                difference,
                f"{sum(run['accepted'] for run in own)} of {sum(run['decisions'] for run in own)}",
                f"{fmean(run['system_runs'] for run in own):,.0f}",
                *(f"{means[fact]:,.0f}" for fact in ("steps", "sampled", "tokens")),
                f"{means['sample_seconds'] / 60:.0f} min",
                f"{means['train_seconds'] / 60:.0f} min",
            ]
        )
    start = fmean(run["test_before"] for run in next(iter(runs.values())))
    rows.insert(0, ["as it starts", f"{start:.3f}", *[""] * 9])
    headings = [
        "training",
        "test score, each seed",
        "mean",
        f"difference from `{first}`",
        "accepted",
        "system runs",
        "steps",
        "tokens sampled",
        "tokens trained",
        "sampling",
        "training",
    ]
    return markdown(headings, rows)


def trained_systems() -> str:
    """Tabulate one training of each further system: scores, controls, and cost."""
    rows = []
    for path in sorted((DATA / "weights_systems").glob("*.json")):
        sweep = results(f"weights_systems/{path.stem}")
        scores = {row["control"] or row["method"]: row for row in sweep["rows"]}
        (run,) = sweep["runs"]
        own, training = scores[run["method"]], run["training"]
        controls = (scores.get(name) for name in ("constant", "direct call"))
        rows.append(
            [
                f"`{path.stem}`",
                f"`{run['method']}`",
                f"{own['test']['examples']}",
                spread(scores["unoptimized"]["test"]),
                spread(own["test"]),
                spread(own["gain"], signed=True),
                f"{run['accepted']} of {run['decisions']}",
                *(spread(found["test"]) if found else "–" for found in controls),
                f"{run['system_runs']:,.0f}",
                *(f"{training[fact]:,.0f}" for fact in ("steps", "tokens")),
                *(f"{training[fact] / 60:.0f} min" for fact in ("sample_seconds", "train_seconds")),
            ]
        )
    headings = [
        "system",
        "method",
        "n",
        "before",
        "after",
        "gain",
        "accepted",
        "constant answer",
        "direct call",
        "system runs",
        "steps",
        "tokens trained",
        "sampling",
        "training",
    ]
    return markdown(headings, rows)


def rejected_systems() -> str:
    """Tabulate the scores of trained weights on the validation examples that rejected them."""
    rows = [
        [
            f"`{name}`",
            f"{found['before']['n']}",
            spread(found["before"]),
            spread(found["after"]),
            spread(found["gain"], signed=True),
            f"{found['p']:.2f}",
        ]
        for name, found in results("weights_systems_rejected").items()
    ]
    return markdown(["system", "n", "before", "after", "gain", "p"], rows)


def _spread(found: Interval, *, signed: bool = False) -> str:
    return spread({"mean": found.mean, "low": found.low, "high": found.high}, signed=signed)


def distilled() -> str:
    """Tabulate test scores before and after a distillation, and the tokens of a validation run."""
    measured = results("distill_atlas")
    tokens = dict(zip(("optimized", "distilled"), measured["decision"]["tokens"], strict=True))
    rows = [
        [
            name,
            spread(found["score"]),
            "–" if name == "optimized" else spread(found["difference"], signed=True),
            f"{tokens[name]:,.0f}" if name in tokens else "–",
        ]
        for name, found in measured["rows"].items()
    ]
    return markdown(
        ["configuration", "test score", "difference from optimized", "tokens of a run"], rows
    )


def learned() -> str:
    """Tabulate the scores of trained toy systems by seed, and of their agents."""
    found = results("learning_curves").values()
    kinds = dict.fromkeys((one["task"], one["method"], one["control"]) for one in found)
    rows = []
    for task, method, control in kinds:
        own = [
            one
            for one in found
            if (one["task"], one["method"], one["control"]) == (task, method, control)
        ]
        ends = ", ".join(f"{one['after']['score']:.2f}" for one in own)
        parts = [name for name in own[0]["after"] if name in PARTS]
        means = ", ".join(
            f"{name} {fmean(one['after'][name] for one in own):.2f}" for name in parts
        )
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


TABLES = (
    trained,
    trained_seeds,
    trained_systems,
    rejected_systems,
    learned,
    distilled,
    course,
    rollouts,
)
