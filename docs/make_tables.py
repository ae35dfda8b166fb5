"""Generate the tables of the pages in `PAGES` from the results of the benchmarks.

A table is between ``<!-- table NAME -->`` and ``<!-- end -->``; the text around it is not changed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import Any

from compound.evaluation.statistics import binomial_tail, interval_of_means
from compound.report.comparison import accuracies, methods, trainings
from compound.report.facts.text import p_value
from compound.report.rendering.markdown import render_block
from compound.settings.optimize import OptimizeSettings

ROOT = Path(__file__).resolve().parents[1]
PAGES = tuple(
    ROOT / "docs" / name
    for name in (
        "evidence/local_rewards.md",
        "evidence/training.md",
        "adr/0024-intervals-stay-in-the-range.md",
        "guides/nothing_found.md",
        "evidence/reliability.md",
        "evidence/README.md",
        "evidence/benchmarks.md",
        "evidence/acceptance.md",
        "guides/serving.md",
    )
)
DATA = ROOT / "benchmarks" / "data"
PARTS = ("first", "second", "third", "asked", "found", "f1", "right")
PUBLIC = ("optimas", "search", "coordinate", "random", "llm_selector")
COURSE = ("penalty", "entropy", "similarity")
NAMES = {"coordinate": "coordinate search", "random": "random search"}


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


def with_tables(page: str) -> str:
    """Replace every table of a page."""

    def table(found: re.Match[str]) -> str:
        kind, *rest = found[1].split()
        return f"<!-- table {found[1]} -->\n{TABLES[kind](*rest)}\n<!-- end -->"

    return re.sub(r"<!-- table ([^>]*) -->\n.*?<!-- end -->", table, page, flags=re.S)


def summary(part: str) -> Mapping[str, Any]:
    """Return the summary of a part of the simulated benchmark."""
    found: Mapping[str, Any] = json.loads((DATA / "local_rewards.json").read_text(encoding="utf-8"))
    return found[part]["summary"]  # type: ignore[no-any-return]


def search() -> str:
    """Tabulate the methods' results on simulated systems, as shares of the optimum."""
    found = summary("search")
    kinds = [name for name in found if name != "start"]
    shapes = list(found["start"])
    rows = [["as it starts", "–", *(f"{found['start'][shape]['mean']:.2f}" for shape in shapes)]]
    for kind in kinds:
        name = kind.removesuffix(" twice")
        shown = "optimas, shuffled labels" if name == "shuffled" else NAMES.get(name, name)
        rows.append(
            [shown, str(found[kind]["runs"]), *(spread(found[kind]["reached"][shape]) for shape in shapes)]
        )
    return markdown(["", "system runs", *shapes], rows)


def accuracy() -> str:
    """Tabulate the ranking accuracy of learned rewards on simulated systems, and its upper limit."""
    found = summary("accuracy")
    shapes = list(next(iter(found.values()))["learned"])
    rows = [
        [
            kind,
            *(
                f"{found[kind]['learned'][s]['mean']:.3f} of {found[kind]['limit'][s]['mean']:.3f}"
                for s in shapes
            ),
        ]
        for kind in found
    ]
    return markdown(["", *shapes], rows)


def lora() -> str:
    """Tabulate the ranking accuracy of rewards on a trained backbone, by seed."""
    found = next(iter(summary("lora").values()))
    columns = zip(found["accuracy"], found["loss_before"], found["loss_after"], strict=True)
    rows = [
        [str(seed), *(f"{value:.{digits}f}" for value, digits in zip(row, (3, 2, 2), strict=True))]
        for seed, row in enumerate(columns)
    ]
    return markdown(["seed", "held-out accuracy", "held-out loss, untrained", "trained"], rows)


def interaction() -> str:
    """Tabulate the results of `optimas` by interaction strength."""
    found = summary("interaction")
    shapes = list(next(iter(found.values()))["reached"])
    rows = [
        [
            strength,
            *(f"{part['reached'][s]['mean']:.3f}, {part['single'][s]['mean']:.3f}" for s in shapes),
        ]
        for strength, part in found.items()
    ]
    return markdown(["strength", *shapes], rows)


def misaligned() -> str:
    """Tabulate the gain of one step of each component, by the share of shuffled labels."""
    found = summary("misaligned")
    rows = [
        [f"{float(share):.0%}", spread(next(iter(part.values())), signed=True)]
        for share, part in found.items()
    ]
    return markdown(["shuffled", "gain, share of the optimum"], rows)


def regret() -> str:
    """Tabulate the regret of the schedulers."""
    found = summary("regret")
    rows = [
        [name, spread(part, digits=1), "–" if name == "uniform" else p_value(part["p_less_than_uniform"])]
        for name, part in found.items()
    ]
    return markdown(["scheduler", "regret", "p, less than uniform"], rows)


def same() -> str:
    """Return a sentence on how often a change was accepted although no gain was possible."""
    found = summary("same")
    accepted = f"{found['accepted']} of {found['runs']} runs accepted something"
    return f"{accepted}; chance allows {found['bound']} (99 %)."


def sweep(name: str) -> str:
    """Tabulate the methods of a sweep."""
    facts = json.loads((DATA / f"sweep_{name}.json").read_text(encoding="utf-8"))
    return render_block(methods(facts, name))


def rewards(name: str) -> str:
    """Tabulate the accuracies of a sweep's local rewards."""
    facts = json.loads((DATA / f"sweep_{name}.json").read_text(encoding="utf-8"))
    return render_block(accuracies(facts, name))


def judged(name: str) -> str:
    """Tabulate the accuracy of local rewards and of a judge on the same pairs, by component."""
    runs = json.loads((DATA / f"judged_{name}.json").read_text(encoding="utf-8"))["runs"]
    components = dict.fromkeys(component for rows in runs.values() for component in rows)
    rows = []
    for component in components:
        found = [rows[component] for rows in runs.values() if component in rows]
        means = (
            f"{fmean(row[kind]['mean'] for row in found):.3f} "
            f"({', '.join(format(row[kind]['mean'], '.2f') for row in found)})"
            for kind in ("local", "judge")
        )
        rows.append([component, *means, ", ".join(str(row["pairs"]) for row in found)])
    return markdown(["component", "local reward (each run)", "judge (each run)", "pairs"], rows)


def trained(name: str, file: str = "") -> str:
    """Tabulate single-method sweeps of one system together, and the cost of their training."""
    paths = sorted((DATA / f"weights_{name}").glob("*.json"))
    sweeps = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    rows = [row for sweep in sweeps for row in sweep["rows"]]
    first = next(row for row in rows if row["method"] == "unoptimized")
    others = [row for row in rows if row["method"] != "unoptimized"]
    times = Counter(row["method"] for row in others)
    named = [
        {**row, "method": f"{row['method']}, seed {row['seeds'][0]}"} if times[row["method"]] > 1 else row
        for row in others
    ]
    facts = {"rows": [first, *named]}
    return "\n\n".join(render_block(made(facts, file or name)) for made in (methods, trainings))


def learned() -> str:
    """Tabulate the scores of trained toy systems by seed, and of their agents."""
    found = json.loads((DATA / "learning_curves.json").read_text(encoding="utf-8")).values()
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
    found = json.loads((DATA / f"weights_{name}_course.json").read_text(encoding="utf-8"))
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
    found = json.loads((DATA / f"weights_{name}_course.json").read_text(encoding="utf-8"))
    rows = []
    for run, parts in found.items():
        means = [part["rollouts"] for part in parts.values()]
        earned = " → ".join(f"{mean['reward']:.3f}" for mean in means)
        rows.append([run, earned, " → ".join(f"{mean['skipped']:.0%}" for mean in means)])
    return markdown(["method", "reward of rollouts", "groups of equal rewards"], rows)


def speed() -> str:
    """Compare a training step with TRL's: medians, and the range over the turns of one run."""
    found = json.loads((DATA / "weights_speed.json").read_text(encoding="utf-8"))
    step, shared = found["step"], found["shared"]
    rows = [
        ["32 × (192 + 32) tokens, every prompt read", step["trl"], step["ours"]],
        ["the same, equal prompts read once", step["trl"], step["ours with shared prompts"]],
        ["32 × (320 + 32) tokens, equal prompts read once", shared["trl"], shared["once"]],
    ]
    return markdown(
        ["a step on", "TRL, s", "ours, s", "time", "TRL, MiB", "ours, MiB", "memory"],
        [
            [
                name, in_range(a["seconds"], *a["spread"], digits=1),
                in_range(b["seconds"], *b["spread"], digits=1), in_range(*ratios(b, a)),
                f"{a['peak']:,.0f}", f"{b['peak']:,.0f}", f"{b['peak'] / a['peak']:.2f}",
            ]
            for name, a, b in rows
        ],
    )  # fmt: skip


def ratios(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return median, minimum and maximum of the ratios of one measurement's seconds to another's.

    If the measurements alternated, each ratio belongs to one turn; otherwise the limits follow from the
    spreads.

    >>> alternated = {"each": [1.0, 2.0, 9.0]}, {"each": [2.0, 2.0, 10.0]}
    >>> ratios(*alternated)
    (0.9, 0.5, 1.0)
    >>> ratios({"seconds": 1.0, "spread": [1.0, 3.0]}, {"seconds": 4.0, "spread": [2.0, 5.0]})
    (0.25, 0.2, 1.5)
    """
    if "each" in one and "each" in other:
        found = [a / b for a, b in zip(one["each"], other["each"], strict=True)]
        return median(found), min(found), max(found)
    (low, high), (least, most) = one["spread"], other["spread"]
    return one["seconds"] / other["seconds"], low / most, high / least


def in_range(middle: float, low: float, high: float, *, digits: int = 2) -> str:
    """Format a median with the minimum and the maximum.

    >>> in_range(0.5, 0.25, 1.0)
    '0.50 (0.25 to 1.00)'
    """
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def sampling() -> str:
    """Tabulate tokens per second through a graph, as a share of those of the engine alone."""
    found = json.loads((DATA / "weights_speed.json").read_text(encoding="utf-8"))["sampling"]
    low, high = found["spread"]
    row = [f"{found['ratio']:.2f}", f"{low:.2f} to {high:.2f}", f"{found['tokens_per_second']:.0f}"]
    return markdown(
        ["through the graph, share of the engine alone", "three repeats", "tokens/s, alone"], [row]
    )


def prefill() -> str:
    """Tabulate the prompt tokens of a training step on Atlas, and the reused share."""
    found = json.loads((DATA / "weights_speed.json").read_text(encoding="utf-8"))["prefill"]
    rows = [
        [
            name,
            f"{one['prompt_tokens']:,}",
            f"{one['prompt_tokens'] - one['cached']:,}",
            f"{one['share']:.0%}",
        ]
        for name, one in found.items()
    ]
    return markdown(["method", "prompt tokens of a step", "computed", "reused"], rows)


def several() -> str:
    """Tabulate the memory of training several adapters on one base, and the increase per adapter."""
    found = json.loads((DATA / "weights_speed.json").read_text(encoding="utf-8"))["adapters"]
    rows = [[count, f"{one['peak']:,.0f}"] for count, one in found.items() if count.isdecimal()]
    grown, expected = (f"{found[name]:.1f}" for name in ("grown_by_each", "adapter_and_optimizer"))
    rows.append(["each further one", grown])
    rows.append(["its weights, gradients and optimizer state", expected])
    return markdown(["adapters", "peak, MiB"], rows)


def batches() -> str:
    """Tabulate time and memory of a training step by the number of tokens per micro-batch."""
    found = json.loads((DATA / "weights_speed.json").read_text(encoding="utf-8"))["batches"]
    rows = [
        [
            f"{int(most):,}",
            f"{one['seconds']:.1f}",
            f"{one['peak']:,.0f}",
            f"{one['peak'] - one['idle']:,.0f}",
        ]
        for most, one in found.items()
    ]
    return markdown(["`micro_tokens`", "a step, s", "peak, MiB", "of it for the step, MiB"], rows)


def coverage() -> str:
    """Tabulate coverage and width of intervals for the mean of bounded scores."""
    found = json.loads((DATA / "interval_coverage.json").read_text(encoding="utf-8"))
    rows = [
        [
            name,
            f"{row['least_coverage']:.1%} ({row['at']})",
            f"{row['least_coverage_from_n_10']:.1%}",
            f"{row['places_below_94_percent']} of {row['places']}",
            f"{row['left_range']:.0%}",
            f"{row['no_width']:.0%}",
            f"{row['width_beside_gaffke_from_n_10']:.2f}",
        ]
        for name, row in found["worst"].items()
    ]
    headings = [
        "interval", "least coverage (where)", "least, n ≥ 10", "below 94 %", "leaves the range, at most",
        "no width, at most", "width, n ≥ 10, relative to Gaffke's",
    ]  # fmt: skip
    return markdown(headings, rows)


def of_seeds() -> str:
    """Tabulate coverage and width of intervals over seeds."""
    found = json.loads((DATA / "interval_coverage.json").read_text(encoding="utf-8"))["seeds"]
    names = list(next(iter(found.values())))

    def cell(row: Mapping[str, Any]) -> str:
        return f"{row['coverage']:.1%}, {row['width']:.3f}, {row['left_range']:.0%}"

    rows = [[case, *(cell(row[name]) for name in names)] for case, row in found.items()]
    return markdown(["means of 60 scores", *names], rows)


def needed() -> str:
    """Tabulate how many binary examples must improve for acceptance, by the number that get worse."""
    worse = (0, 1, 2, 3, 5, 10)
    rows = []
    for decisions in (1, 2, 3, 6):
        level = OptimizeSettings().alpha / decisions
        least = [
            next(up for up in count(down) if binomial_tail(up, up + down, 0.5) <= level) for down in worse
        ]
        rows.append([str(decisions), f"{level:.4f}", *map(str, least)])
    headings = ["none wrong" if down == 0 else f"{down} wrong" for down in worse]
    return markdown(["planned decisions", "level", *headings], rows)


def kills() -> str:
    """Tabulate the results of runs that were killed at random times and resumed, by workload."""

    def row(name: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
        same = [sum(run[what] for run in runs) for what in ("same_best", "same_events", "same_spent")]
        return [
            name,
            str(len(runs)),
            str(sum(len(run["codes"]) - 1 for run in runs)),
            *(f"{count} of {len(runs)}" for count in same),
            str(sum(run["repeated"] for run in runs)),
        ]

    headings = [
        "workload", "runs", "times ended", "same configuration", "same decisions", "same spending",
        "requests made twice",
    ]  # fmt: skip
    return by("kills", "workload", headings, row)


def faults() -> str:
    """Tabulate the results of runs against a server with faults, by kind of fault."""

    def row(kind: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
        results = [run for run in runs if run["same_best"] is not None]
        ended = [run for run in runs if run["code"] == 0]
        covered = sum(run["metered"] >= run["billed"] - 1e-12 for run in ended)
        codes = Counter(run["code"] for run in runs)
        return [
            kind.replace("_", " "),
            str(sum(run["injected"] for run in runs)),
            ", ".join(f"{codes[code]} × {code}" for code in sorted(codes)),
            str(sum(run["failed"] for run in runs)),
            f"{sum(run['same_best'] for run in results)} of {len(results)}" if results else "not required",
            f"{covered} of {len(ended)}" if ended else "–",
        ]

    headings = [
        "fault", "faults injected", "exit codes", "failed calls", "same configuration",
        "with a result: counted at least the bill",
    ]  # fmt: skip
    return by("faults", "kind", headings, row)


def damages() -> str:
    """Tabulate the results of commands on damaged run directories, by kind of damage."""

    def row(damage: str, commands: Sequence[Mapping[str, Any]]) -> list[str]:
        refused = sum(command["code"] != 0 for command in commands)
        return [
            damage.replace("_", " "),
            str(len(commands)),
            str(len(commands) - refused),
            str(refused),
            str(sum(bool(command["problems"]) for command in commands)),
        ]

    headings = ["damage", "commands", "ended as usual", "ended with a message", "tracebacks or other results"]
    return by("damages", "damage", headings, row)


def disks() -> str:
    """Tabulate the results of runs with a file size limit, by limit."""
    found = json.loads((DATA / "chaos.json").read_text(encoding="utf-8"))["disk"]
    rows = [
        [f"{run['limit']:,}", *map(str, run["codes"]), "; ".join(run["problems"]) or "none"] for run in found
    ]
    return markdown(["bytes of a file", "exit code", "exit code after freeing space", "problems"], rows)


def by(
    part: str,
    key: str,
    headings: Sequence[str],
    row: Callable[[str, Sequence[Mapping[str, Any]]], list[str]],
) -> str:
    """Tabulate a part of the fault-injection record, with a row for each value of a key and a total."""
    found = json.loads((DATA / "chaos.json").read_text(encoding="utf-8"))[part]
    names = list(dict.fromkeys(record[key] for record in found))
    rows = [row(name, [record for record in found if record[key] == name]) for name in names]
    return markdown(headings, [*rows, row("**all**", found)])


def spread(found: Mapping[str, float], *, digits: int = 3, signed: bool = False) -> str:
    """Format a mean with its limits."""
    form = f"{'+' if signed else ''}.{digits}f"
    return f"{found['mean']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rule = ["---"] * len(headings)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows))


def controls() -> str:
    """Test scores of sweeps with the embedded model, next to the best constant answer."""
    constant = json.loads((DATA / "constant_answers.json").read_text(encoding="utf-8"))
    rows = []
    for file in ("atlas", "hotpotqa", "pubmedqa", "amazon"):
        found = json.loads((DATA / f"sweep_{file}.json").read_text(encoding="utf-8"))
        seeds = found["seeds"]
        scores = [one["mean"] for one in constant[file] if one["seed"] in seeds]
        rows += [
            [file, render_block(row["method"]), str(len(seeds)), spread(row["test"])]
            for row in found["rows"]
            if row["test"] is not None
        ]
        if not any(row.get("control") == "constant" for row in found["rows"]):  # sweeps before 0.4
            rows.append([file, "the best constant answer", str(len(seeds)), f"{fmean(scores):.3f}"])
    return markdown(["system", "method", "seeds", "test score"], rows)


def settings(file: str) -> str:
    """Scores of the best five, the initial and the worst of all combinations of a system's choices."""
    found = json.loads((DATA / f"{file}_settings.json").read_text(encoding="utf-8"))
    scored, names = found["rows"], sorted(found["start"])
    start = next(i for i, row in enumerate(scored) if row["settings"] == found["start"])
    shown = sorted({*range(5), start, len(scored) - 1})
    rows = [
        [
            f"{i + 1}{' (start)' if i == start else ''}",
            *(render_block(str(scored[i]["settings"][name])) for name in names),
            spread(scored[i]),
        ]
        for i in shown
    ]
    rows.append(["all", *("" for _ in names), f"{found['mean']:.3f} ± {found['deviation']:.3f}"])
    return markdown(["rank", *(f"`{name}`" for name in names), "score"], rows)


def stark() -> str:
    """Test scores of the scorers of the stark system, alone and combined."""
    found = json.loads((DATA / "stark_settings.json").read_text(encoding="utf-8"))
    hits = ("hit@1", "hit@5")
    rows = [
        [row["name"], spread(row), *(f"{row['parts'][hit]:.2f}" for hit in hits)] for row in found["rows"]
    ]
    return markdown(["ranking", "MRR", *hits], rows)


def false_accepts_file(part: str) -> Mapping[str, Any]:
    """Return a part of the measurement of false accepts."""
    found: Mapping[str, Any] = json.loads((DATA / "false_accepts.json").read_text(encoding="utf-8"))
    return found[part]  # type: ignore[no-any-return]


def false_accepts(part: str, level: str) -> str:
    """Tabulate how often each test accepts gains that are 0 on average; the largest of a row's five sizes."""
    found = false_accepts_file(part)
    at, draws = int(level), found.get("samples", 1)

    def cells(sizes: Mapping[str, Any], test: str) -> list[str]:
        shares = {n: rates[test][at] / draws for n, rates in sizes.items()}
        worst = max(shares, key=lambda n: shares[n])
        return [f"{shares['40']:.2%}", f"{shares[worst]:.2%} ({worst})"]

    rows = [
        [case, *cells(sizes, "bounded mean"), *cells(sizes, "sign flips and t"), *cells(sizes, "sign flips")]
        for case, sizes in found["cases"].items()
    ]
    headings = ["gain of an example"]
    headings += [
        f"{test}, {size}"
        for test in ("bounded mean", "sign flips and t", "sign flips")
        for size in ("n = 40", "largest (n)")
    ]
    return markdown(headings, rows)


def false_runs() -> str:
    """Tabulate the whole runs that accepted a change although no candidate is better."""
    found = false_accepts_file("runs")
    rows = [
        [name, f"{row['gain']:+.4f}", str(row["runs"]), str(row["accepted"]), str(found["limit"])]
        for name, row in found["worlds"].items()
    ]
    return markdown(["candidates", "true gain", "runs", "runs that accepted one", "limit (99.9 %)"], rows)


def acceptance_power(level: str) -> str:
    """Tabulate how often each test accepts typical improvements."""
    found, at = false_accepts_file("power"), int(level)
    rows = [
        [f"{case}, n = {n}", *(f"{rates[at]:.0%}" for rates in tests.values())]
        for case, sizes in found["cases"].items()
        for n, tests in sizes.items()
    ]
    names = list(next(iter(next(iter(found["cases"].values())).values())))
    return markdown(["gain of an example", *names], rows)


def decision_rules() -> str:
    """Tabulate the results of a decision for each round and for each component, where they differ."""
    found = json.loads((DATA / "decision_rules.json").read_text(encoding="utf-8"))
    rows = []
    for each, single in zip(found["rows"][::2], found["rows"][1::2], strict=True):
        if not single["by_component"]:
            continue
        gains = [b - a for a, b in zip(each["reached"], single["reached"], strict=True)]
        rows.append([
            f"{each['system']}, `{each['method']}`", str(each["valid"]), str(each["runs"]),
            f"{found['start'][each['system']]:.3f}",
            *(f"{row['mean']:.3f} ({row['accepted']:.2f}, {row['false']:.2f})" for row in (each, single)),
            spread(interval_of_means(gains).to_json(), signed=True) if any(gains) else "0",
        ])  # fmt: skip
    headings = ["system, method", "n", "system runs", "start", "round", "component", "difference"]
    return markdown(headings, rows)


def of_searches() -> str:
    """Tabulate the test scores of searches with several seeds."""
    found = json.loads((DATA / "spread.json").read_text(encoding="utf-8"))
    rows = [
        [name, str(len(row["scores"])), spread(row["mean"]), f"{row['sd']:.3f}", f"{row['worst']:.3f}",
         f"{max(row['scores']):.3f}"]
        for name, row in found["methods"].items()
    ]  # fmt: skip
    rows.append(["difference", str(found["gain"]["n"]), spread(found["gain"], signed=True), "–", "–", "–"])
    return markdown(["search", "seeds", "mean", "standard deviation", "lowest", "highest"], rows)


def relay_searches(system: str) -> str:
    """Tabulate the scores of configurations found on a relay, by method and system runs."""
    found = json.loads((DATA / "relay_searches.json").read_text(encoding="utf-8"))
    name = system.replace("_", " ")
    budgets = list(found["methods"]["optimas"][name])
    rows = [
        [f"`{method}`" if method in PUBLIC else f"`optimas`, {method}", *map(spread, values[name].values())]
        for method, values in found["methods"].items()
    ]
    start = ["as it starts", *([f"{found['start'][name]:.3f}"] * len(budgets))]
    return markdown(["method", *budgets], [start, *rows])


def serving() -> str:
    """Tabulate the throughput of the server relative to its engine, and the time that it adds to a run."""
    found = json.loads((DATA / "serving.json").read_text(encoding="utf-8"))
    rows = [
        [f"{float(seconds):g} s per answer, {found['connections']} connections",
         f"{median(row['engine_per_second']):,.0f} runs/s", f"{median(row['server_per_second']):,.0f} runs/s",
         f"{row['ratio']:.2f} ×"]
        for seconds, row in found["throughput_by_seconds_per_answer"].items()
    ]  # fmt: skip
    rows.append([
        "0 s per answer, 1 connection, median", f"{median(found['p50_ms_engine']):.2f} ms",
        f"{median(found['p50_ms_server']):.2f} ms", f"+{found['p50_ms_added']:.2f} ms",
    ])  # fmt: skip
    rows.append(
        [
            f"0 s per answer, {found['connections']} connections",
            "–",
            f"{found['most_per_second']:,} runs/s",
            "–",
        ]
    )
    return markdown(["", "engine alone", "server", "server relative to engine"], rows)


GENERATED: tuple[Callable[..., str], ...] = (
    search, accuracy, lora, interaction, misaligned, regret, same, sweep, rewards, judged,
    trained, course, rollouts, learned, speed, several, batches, prefill, sampling,
    coverage, of_seeds, needed, kills, faults, damages, disks, controls,
    settings, stark,
    false_accepts, false_runs, acceptance_power, decision_rules, of_searches, relay_searches, serving,
)  # fmt: skip
TABLES: Mapping[str, Callable[..., str]] = {table.__name__: table for table in GENERATED}


if __name__ == "__main__":
    main()
