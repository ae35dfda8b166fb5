"""Sections of a report, in order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from compound.core.formatting import plural
from compound.optimization.proposals import OUTCOMES
from compound.optimization.runs.candidate_record import FEWEST
from compound.optimization.settings.optimize import OptimizeSettings
from compound.optimization.settings.sections import defaults
from compound.report.figures import curve_svg
from compound.report.graph import graph_svg
from compound.report.headline import SPLITS
from compound.report.record import Facts
from compound.report.rendering import (
    NONE,
    Block,
    ChangedParameter,
    Code,
    Columns,
    ExampleCards,
    Pairs,
    Section,
    Table,
    draw_figure,
    table,
    tabulate,
)
from compound.report.rewards import reward_blocks
from compound.report.text import (
    count,
    interval,
    limits,
    line,
    money,
    number,
    p_value,
    seconds,
    shown,
    signed,
)
from compound.report.training_section import training_blocks

CURVE = (
    "Lines show the validation score of the best configuration so far. Dots are the validation "
    "scores of the tested candidates, with the numbers of their decisions (in brackets if "
    "rejected); bars are 95 % confidence intervals. Stems are comparisons on train examples, from "
    "the incumbent (dash) to the proposal (triangle)."
)
GRAPH = "Data flows from left to right; edges are labelled with the ports that they feed."
METHODS = (
    "Means over examples with 95 % confidence intervals; gains are paired by example. Validation "
    "scores are biased upward, because the configuration was selected on that split; the test "
    "split is read once, at the end. Calls, tokens, cost and time cover the search and the test "
    "split."
)
CLAIMS = {
    "bounded mean": (
        "The test holds for every distribution of scores within the metric's declared range."
    ),
    "sign flips": (
        "The test was a sign-flip permutation test, whose p can be too small if a few examples get "
        "much worse."
    ),
    "sign flips and t": (
        "The range of the scores is unknown: p is the larger one of a sign-flip permutation test "
        "and of Student's t-test, which can be too small if a few examples get much worse."
    ),
}  # by test, the limits of its claim
COSTS = (
    "All calls on validation and test examples are recorded; the last row covers everything else. "
    "Calls run concurrently, so their summed seconds exceed the elapsed time."
)
USE = (
    "best.json is in the same directory as this report. To use it elsewhere, copy it together with "
    "the folders that it refers to, if any."
)


def sections(facts: Facts) -> list[Section]:
    """Return the report's sections; those that a run does not have are left out."""
    unchanged = "No changes: the best configuration is the initial one."
    graph = draw_figure("graph", GRAPH, lambda: graph_svg(facts["graph"]))
    found: dict[str, Sequence[Block]] = {
        "Methods": [methods_table(facts), *versus(facts), METHODS],
        "Changes": [ChangedParameter(**change) for change in facts["changes"]] or [unchanged],
        "Score by iteration": _curve(facts),
        "Decisions": _decisions(facts),
        "Score and cost": _front(facts["front"]) if facts["front"] else (),
        "Jobs": _jobs(facts["jobs"]),
        "Proposals": _proposals(facts["proposals"]) if facts["proposals"] else (),
        "Detectable gains": facts["outlook"].get("told", ()),
        "Training": training_blocks(facts["training"]) if facts.get("training") else (),
        "Local rewards": reward_blocks(facts["rewards"]) if facts.get("rewards") else (),
        "Graph": [replace(graph, graph=facts["graph"])],
        "Costs by component": _costs(facts["components"]),
        "Failures": _failures(facts),
        "Examples": _examples(facts),
        "Usage": _use(facts),
        "Provenance": _provenance(facts),
    }
    return [Section(title, blocks) for title, blocks in found.items() if blocks]


def _curve(facts: Facts) -> list[Block]:
    if not any(curve["start"] for curve in facts["curves"]):
        return ["There are no scores yet."]
    return [draw_figure("curve", CURVE, lambda: curve_svg(facts))]


# --- methods --------------------------------------------------------------------------------------


def methods_table(facts: Facts) -> Table:
    """Return the table of the unoptimized system, this method and the baselines."""
    rows: list[Facts] = facts["methods"]

    def measured(split: str) -> tuple[str, Any]:
        """Return heading and cells of a split, with its size in the cells if it differs."""
        sizes = {row[split]["n"] for row in rows if row[split]}
        same = f", n\u00a0=\u00a0{count(*sizes)}" if len(sizes) == 1 else ""

        def cell(row: Facts) -> str:
            size = f", n = {row[split]['n']}" if len(sizes) > 1 and row[split] else ""
            return interval(row[split]) + size

        return f"#{SPLITS[split]}{same}", cell

    return tabulate(
        rows,
        {
            "method": lambda row: row["method"] + (" (unfinished)" if row.get("missing") else ""),
            **dict(measured(split) for split in ("valid", "test")),
            "#gain on test": lambda row: interval(row["gain"], signed),
            "#failed": lambda row: count(row["failed"]),
            "#supported": supported,
            **SPENDING,
        },
    )


def supported(row: Mapping[str, Any]) -> str:
    """Format how many decisions supported their candidates."""
    return f"{row['accepted']} of {row['decisions']}" if "accepted" in row else NONE


def _tokens(row: Mapping[str, Any]) -> float | None:
    prompt, completion = row.get("prompt_tokens"), row.get("completion_tokens")
    return None if prompt is None or completion is None else prompt + completion


SPENDING: Columns = {
    "#search runs": lambda row: count(row.get("system_runs")),
    "#test runs": lambda row: count(row.get("test_runs")),
    "#calls": lambda row: count(row.get("calls")),
    "#tokens": lambda row: count(_tokens(row)),
    "#cost": lambda row: money(row.get("cost"), row.get("unpriced")),
    "#time": lambda row: seconds(row.get("seconds")),
}


def versus(facts: Facts) -> list[str]:
    """Return a sentence for each baseline on the difference of test scores."""
    return [_versus(facts["method"], row) for row in facts["methods"] if row["versus"]]


def _versus(method: str, row: Facts) -> str:
    gap = row["versus"]
    low, high = gap["low"], gap["high"]
    if low is None or high is None or low <= 0 <= high:
        claim = "not significantly different from"
    else:
        claim = "better than" if gap["mean"] > 0 else "worse than"
    difference = f"{signed(gap['mean'])} {limits(gap)}".rstrip()
    return (
        f"On the test split, {method} is {claim} {row['method']}: "
        f"the paired difference is {difference}."
    )


# --- the search -----------------------------------------------------------------------------------


def _decisions(facts: Facts) -> list[Block]:
    if not facts["decisions"]:
        return ["No candidate was tested on the validation split."]
    planned = facts["plan"]["decisions"] if facts["plan"] else 0
    tests = {d["test"] or "sign flips" for d in facts["decisions"] if d["p"] is not None}
    how = (
        "A candidate is compared with the last supported configuration, at first the initial one. "
        "It is supported if p, from a one-sided paired test of the mean gain on validation "
        f"examples, is at most the level. The levels of the {plural(planned, 'planned decision')} "
        f"sum to at most {p_value(facts['alpha'])}. If no candidate is better than the initial "
        "configuration, this bounds the probability that the run calls any supported. Promising "
        "candidates only scored higher; they are better with the stated probability. Kept ones "
        "became the best configuration."
    )
    columns: Columns = {
        "#no.": lambda d: str(d["decision"]),
        "#after runs": lambda d: count(d["at"]),
        "changed": lambda d: ", ".join(change[0] for change in d["changes"]),
        "#reference": lambda d: interval(d["before"]),
        "#candidate": lambda d: interval(d["after"]),
        "#gain": lambda d: interval(d["gain"], signed),
        "#p": lambda d: p_value(d["p"]),
        "#level": lambda d: p_value(d["level"]),
        "verdict": _verdict,
        "#better with probability": lambda d: number(d["probability"]),
    }
    claims = (CLAIMS[test] for test in sorted(tests & CLAIMS.keys()))
    return [tabulate(facts["decisions"], columns), " ".join([how, *claims])]


def _verdict(decision: Facts) -> str:
    """Return the verdict of a decision, and whether the candidate became the best configuration."""
    known = decision["verdict"]
    if decision["over"]:
        return f"{known}, but over the limits"
    if known is None:  # without a comparison, or of an earlier version
        return "accepted" if decision["accepted"] else decision["note"] or "rejected"
    return f"{known}, kept" if decision["accepted"] else known


def _front(found: Facts) -> list[Block]:
    is_usd = found["cost"] == "usd"
    unit = "dollars" if is_usd else "tokens"
    how = (
        f"Of {plural(found['candidates'], 'evaluated candidate')}, those that no other one beats "
        f"in both gain and {unit} per run, the initial and the chosen one. Gains are over the "
        "initial configuration, on the examples that both were run on; candidates of fewer than "
        f"{FEWEST} evaluations are left out, since the highest of many are lucky ones. The "
        f"hypervolume of the front is {found['hypervolume']:.3g}, relative to the lowest gain and "
        f"the most {unit}. All candidates are in candidates.jsonl."
    )
    columns: Columns = {
        "#$ per run" if is_usd else "#tokens per run": lambda row: (
            money(row["cost"]) if is_usd else count(row["cost"])
        ),
        "#mean score": interval,
        "#gain": lambda row: signed(row["gain"]),
        "#evaluations": lambda row: count(row["evaluations"]),
        "fate": lambda row: f"{row['fate']}, chosen" if row["chosen"] else row["fate"],
        "on the front": lambda row: "yes" if row["on_front"] else "no",
        "changed": lambda row: ", ".join(row["changed"]) or NONE,
    }
    return [tabulate(found["rows"], columns), how]


def _jobs(found: Sequence[Facts]) -> list[Block]:
    columns: Columns = {
        "#no.": lambda job: str(job["job"] + 1),
        "optimizer": itemgetter("optimizer"),
        "parameters": lambda job: ", ".join(job["keys"]),
        "#tried": lambda job: count(job["tried"]),
        "#train before": lambda job: number(job["train_before"]),
        "#train after": lambda job: number(job["train_after"]),
        "#runs": lambda job: count(job["runs"]),
        "outcome": lambda job: _job_outcome(job["values"], line(job["note"] or "")),
    }
    return [tabulate(found, columns) if found else "No optimizer job has finished."]


def _job_outcome(values: Mapping[str, object], note: str) -> str:
    proposal = "; ".join(f"{key} = {brief(value)}" for key, value in values.items())
    return f"{proposal} ({note})" if proposal and note else proposal or note or "no proposal"


def brief(value: object) -> str:
    """Format a value in a few words."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return f"{len(value)} demonstrations"
    return line(value, 60)


def _proposals(found: Facts) -> list[Block]:
    spent = (
        f"Proposals used {count(found['calls'])} calls, {count(found['prompt_tokens'])} prompt "
        f"tokens, {count(found['completion_tokens'])} completion tokens and "
        f"{money(found['cost'])}, in addition to the system runs. Failed: the call returned no "
        "answer. Unusable: the answer contained no valid value for the parameter. Duplicate: the "
        "value had been proposed before."
    )
    rows = [
        (
            lm,
            *(count(tally[name]) for name in ("asked", *OUTCOMES)),
            "; ".join(f"{n} × {line(reason)}" for reason, n in tally["reasons"].items()) or NONE,
        )
        for lm, tally in found["models"].items()
    ]
    headings = ("model", "#asked", *(f"#{name}" for name in OUTCOMES), "failures")
    return [table(headings, rows), spent]


# --- runs of the system ---------------------------------------------------------------------------


def _costs(found: Sequence[Facts]) -> list[Block]:
    columns: Columns = {
        "component": lambda c: c["component"] or "train runs and prompt writing",
        "#executed": lambda c: count(c["executed"]),
        "#from cache": lambda c: count(c["reused"]),
        "#model calls": lambda c: count(c["calls"]),
        "#tokens in": lambda c: count(c["prompt_tokens"]),
        "#tokens out": lambda c: count(c["completion_tokens"]),
        "#cost": lambda c: money(c["cost"], c["unpriced"]),
        "#seconds, summed": lambda c: NONE if c["seconds"] is None else f"{c['seconds']:,.1f}",
        "#seconds each": lambda c: f"{c['seconds'] / c['executed']:.3f}" if c["executed"] else NONE,
    }
    return [tabulate(found, columns), COSTS] if found else ["No run is recorded."]


def _failures(facts: Facts) -> list[Block]:
    retries = [_retried(retry) for retry in facts["retries"]]
    if not facts["failures"]:
        return ["No run on validation or test examples failed.", *retries]
    more = facts["other_failures"]
    others = [f"Other messages: {plural(more, 'failed run')}."] if more else []
    columns: Columns = {
        "kind": itemgetter("kind"),
        "message": lambda group: line(group["message"], 300),
        "component": lambda group: group["where"] or NONE,
        "#validation": lambda group: count(group["valid"]),
        "#test": lambda group: count(group["test"]),
        "#total": lambda group: count(group["count"]),
    }
    return [tabulate(facts["failures"], columns), *others, *retries]


def _retried(facts: Facts) -> str:
    """Return a sentence on the failed test rows that were retried."""
    which = "the unoptimized system" if facts["evaluation"] == "test_before" else facts["method"]
    rows = f"{facts['retried']:,} of {plural(facts['failed'], 'failed test row')} of {which}"
    verb = "was" if facts["retried"] == 1 else "were"
    means = f"{number(facts['before']['mean'])} → {number(facts['after']['mean'])}"
    note = f" The others were not retried: {facts['note']}." if facts["note"] else ""
    return (
        f"After the end of the run, {rows} {verb} retried; {facts['recovered']:,} succeeded, which "
        f"changed the mean test score {means}.{note} Acceptance decisions and validation scores "
        "did not change."
    )


def _examples(facts: Facts) -> list[Block]:
    found = facts["examples"]
    if found["counts"] is None:
        return ["There are no scored examples yet."]
    counts, repeats = found["counts"], found.get("repeats", 1)
    total = plural(sum(counts.values()), f"{SPLITS[found['split']]} example")
    several = f" Scores are means of {repeats} runs; the first run is shown." if repeats > 1 else ""
    if changed := bool(facts["changes"]):
        lead = (
            f"Of {total}, {counts['gained']:,} improved, {counts['lost']:,} got worse, "
            f"{counts['same']:,} did not change."
        )
        groups = {
            "Largest losses": found["lost"],
            "Largest gains": found["gained"],
            "Lowest scores after optimization": found["worst"],
        }
    else:
        lead, groups = f"The lowest scores of {total}.", {"Lowest scores": found["worst"]}
    cards = (ExampleCards(title, items, changed) for title, items in groups.items() if items)
    return [lead + several, *cards]


# --- use and provenance ---------------------------------------------------------------------------


def _use(facts: Facts) -> list[Block]:
    if not facts["files"]["best.json"]:
        return [
            "best.json is written at the end of the search. To resume the run, repeat the command "
            "that started it."
        ]
    names = [name.lstrip("$") for name, kind in facts["graph"]["nodes"] if kind == "input"]
    words = " ".join(f"{name}=…" for name in names)
    inputs = ", ".join(f'"{name}": …' for name in names)
    code = (
        'import compound as cp\n\nbest = cp.load("best.json")\n'
        f"trace = cp.run(system.bind(best), {{{inputs}}})\n"
        'best.save("elsewhere/best.json")  # also copies the folders that it refers to'
    )
    command = f"compound run FILE --config best.json {words}".rstrip()
    return [Code("sh", command), Code("python", code), USE]


def _provenance(facts: Facts) -> list[Block]:
    found, settings = facts["provenance"], facts["provenance"]["settings"]
    budget = {name: value for name, value in settings["budget"].items() if value is not None}
    others = {n: v for n, v in changed_settings(settings) if n not in ("method", "seed")}
    pairs = {
        "system": facts["system"],
        "signature": found["signature"],
        "metric": facts["metric"],
        "method": facts["method"],
        "seed": str(facts["seed"]),
        "budget": _spelled(budget),
        "non-default settings": _spelled(others),
        "defaults": _spelled(found["defaults"]),
        "models": _spelled(found["engines"]),
        "initial configuration": found["start"],
        "best configuration": found["best"],
        "started": _moment(found["began"]),
        "last event": _moment(found["ended"]),
        "spent": spending(facts["spent"]),
        "versions": ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
    }
    rows = [(role, count(d["n"]), d["digest"]) for role, d in found["data"].items()]
    shown_pairs = Pairs({name: value for name, value in pairs.items() if value})
    return [shown_pairs, table(("split", "#examples", "digest"), rows)]


def changed_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings that differ from their defaults, except the budget."""
    usual = {**OptimizeSettings().model_dump(mode="json"), **defaults()}
    yield from _different({**settings, "budget": usual["budget"]}, usual)


def _different(
    values: Mapping[str, Any], usual: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        other = usual.get(name)
        if isinstance(value, Mapping) and value:
            known = other if isinstance(other, Mapping) else {}
            yield from _different(value, known, f"{prefix}{name}.")
        elif value != other:
            yield f"{prefix}{name}", value


def spending(spent: Facts) -> str:
    """Return a phrase on what the run spent."""
    return (
        f"{count(spent.get('system_runs', 0))} system runs in the search and "
        f"{count(spent.get('test_runs', 0))} on the test split, {count(spent.get('calls', 0))} "
        f"calls, {count(spent.get('prompt_tokens', 0) + spent.get('completion_tokens', 0))} "
        f"tokens, {money(spent.get('cost', 0.0), spent.get('unpriced', 0))}, "
        f"{seconds(spent.get('seconds', 0.0))}{_metric_part(spent)}"
        f"{_incidents(spent.get('incidents') or {})}"
    )


def _metric_part(spent: Facts) -> str:
    """Return a phrase on the part of the amounts that the metric spent, such as a judge."""
    if not spent.get("metric_calls"):
        return ""
    cost = f", {money(spent['metric_cost'])}" if spent.get("metric_cost") else ""
    return (
        f"; of these, the metric used {count(spent['metric_calls'])} calls and "
        f"{count(spent.get('metric_tokens', 0))} tokens{cost}"
    )


def _incidents(counts: Mapping[str, float]) -> str:
    """Return a phrase on the incidents at servers."""
    descriptions = {
        "rate_limited": "requests rejected by a rate limit and retried",
        "lost": "requests without an answer, charged at their maximum",
        "usage_corrected": "answers with invalid usage, corrected",
    }
    found = [
        f"{count(counts[kind])} {words}" for kind, words in descriptions.items() if counts.get(kind)
    ]
    return f"; {', '.join(found)}" if found else ""


def _spelled(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {shown(value)}" for name, value in values.items())


def _moment(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at)) if at else ""
