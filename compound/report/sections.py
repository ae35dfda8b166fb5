"""Sections of a report, in order, as blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from compound.errors import MissingExtra
from compound.formatting import plural
from compound.report.facts.documents import (
    FrontFacts,
    ProposalFacts,
    ReportFacts,
    RetryFacts,
    RunFacts,
    SpentFacts,
)
from compound.report.facts.text import count, money, number, p_value, seconds, shown
from compound.report.figures.curve import curve_svg
from compound.report.figures.graph import graph_svg
from compound.report.rendering import tables
from compound.report.rendering.blocks import Block, Change, Code, Examples, Figure, Pairs, Section
from compound.report.rewards.section import reward_blocks
from compound.report.training.tables import training_blocks
from compound.runs.candidate_record import FEWEST
from compound.settings.optimize import OptimizeSettings
from compound.settings.sections import defaults


def sections(facts: ReportFacts) -> list[Section]:
    """Return the report's sections."""
    none = "No changes: the best configuration is the initial one."
    has_scores = any(curve["start"] for curve in facts["curves"])
    curve = _figure("curve", CURVE, curve_svg, facts) if has_scores else "There are no scores yet."
    return [
        Section("Methods", _methods(facts)),
        Section("Changes", [Change(**change) for change in facts["changes"]] or [none]),
        Section("Score by iteration", [curve]),
        Section("Decisions", _decisions(facts)),
        *([Section("Score and cost", _front(front))] if (front := facts["front"]) else []),
        Section("Jobs", [tables.jobs(facts)] if facts["jobs"] else ["No optimizer job has finished."]),
        *([Section("Proposals", _proposals(facts["proposals"]))] if facts["proposals"] else []),
        *([Section("Detectable gains", list(facts["outlook"]["told"]))] if facts["outlook"] else []),
        *([Section("Training", training_blocks(trained))] if (trained := facts.get("training")) else []),
        *([Section("Local rewards", reward_blocks(learned))] if (learned := facts.get("rewards")) else []),
        Section("Graph", [replace(_figure("graph", GRAPH, graph_svg, facts["graph"]), graph=facts["graph"])]),
        Section("Costs by component", _costs(facts)),
        Section("Failures", _failures(facts)),
        Section("Examples", _examples(facts)),
        Section("Usage", _use(facts)),
        Section("Provenance", _provenance(facts)),
    ]


Drawn = TypeVar("Drawn")
CURVE = (
    "Lines show the validation score of the best configuration so far. Dots are the validation scores of the "
    "tested candidates, labelled with the changed parameters (in brackets if rejected); bars are 95 % "
    "confidence intervals. Stems are comparisons on train examples, from the incumbent (dash) to the "
    "proposal (triangle)."
)
GRAPH = "Data flows from left to right; edges are labelled with the ports that they feed."


def _figure(name: str, caption: str, draw: Callable[[Drawn], str], facts: Drawn) -> Figure:
    try:
        return Figure(name, caption, svg=draw(facts))
    except MissingExtra as error:
        return Figure(name, caption, missing="The figure needs matplotlib, which is not installed: "
                      f"{error.hint}, then run `compound report` on this run.")  # fmt: skip


def _methods(facts: RunFacts) -> list[Block]:
    how = (
        "Means over examples with 95 % confidence intervals; gains are paired by example. Validation scores "
        "are biased upward, because the configuration was selected on that split; the test split is read "
        "once, at the end. Calls, tokens, cost and time cover the search and the test split."
    )
    return [tables.methods(facts), *tables.versus(facts), how]


CLAIMS = {
    "bounded mean": "The test holds for every distribution of scores within the metric's declared range.",
    "sign flips and t": "The range of the scores is unknown: p is the larger one of a sign-flip permutation "
    "test and of Student's t-test, which can be too small if a few examples get much worse.",
    "sign flips": "The test was a sign-flip permutation test, whose p can be too small if a few examples get "
    "much worse.",
}  # by test, the limits of its claim


def _decisions(facts: RunFacts) -> list[Block]:
    if not facts["decisions"]:
        return ["No candidate was tested on the validation split."]
    planned = facts["plan"]["decisions"] if facts["plan"] else 0
    tests = {decision["test"] or "sign flips" for decision in facts["decisions"] if decision["p"] is not None}
    how = (
        "A candidate is compared with the last supported configuration, at first the initial one. It is "
        "supported if p, from a one-sided paired test of the mean gain on validation examples, is at most "
        f"the level. The levels of the {plural(planned, 'planned decision')} sum to at most "
        f"{p_value(facts['alpha'])}. If no candidate is better than the initial configuration, this bounds "
        "the probability that the run calls any supported. Promising candidates only scored higher; they are "
        "better with the stated probability. Kept ones became the best configuration."
    )
    return [
        tables.decisions(facts),
        " ".join([how, *(CLAIMS[test] for test in sorted(tests & CLAIMS.keys()))]),
    ]


def _front(found: FrontFacts) -> list[Block]:
    what = "dollars" if found["cost"] == "usd" else "tokens"
    how = (
        f"Of {plural(found['candidates'], 'evaluated candidate')}, those that no other one beats in both "
        f"gain and {what} per run, the initial and the chosen one. Gains are over the initial configuration, "
        f"on the examples that both were run on; candidates of fewer than {FEWEST} evaluations are left out, "
        "since the highest of many are lucky ones. The hypervolume of the front is "
        f"{found['hypervolume']:.3g}, relative to the lowest gain and the most {what}. All candidates are in "
        "candidates.jsonl."
    )
    return [tables.front(found), how]


def _proposals(found: ProposalFacts) -> list[Block]:
    spent = (
        f"Proposals used {count(found['calls'])} calls, {count(found['prompt_tokens'])} prompt tokens, "
        f"{count(found['completion_tokens'])} completion tokens and {money(found['cost'])}, in addition to "
        "the system runs. Failed: the call returned no answer. Unusable: the answer contained no valid value "
        "for the parameter. Duplicate: the value had been proposed before."
    )
    return [tables.proposals(found["models"]), spent]


def _costs(facts: RunFacts) -> list[Block]:
    if not facts["components"]:
        return ["No run is recorded."]
    how = (
        "All calls on validation and test examples are recorded; the last row covers everything else. Calls "
        "run concurrently, so their summed seconds exceed the elapsed time."
    )
    return [tables.costs(facts), how]


def _failures(facts: RunFacts) -> list[Block]:
    retries: list[Block] = [_retried(retry) for retry in facts["retries"]]
    if not facts["failures"]:
        return ["No run on validation or test examples failed.", *retries]
    more = facts["other_failures"]
    others = [f"Other messages: {plural(more, 'failed run')}."] if more else []
    return [tables.failures(facts), *others, *retries]


def _retried(facts: RetryFacts) -> str:
    """Return a sentence on the failed test rows that were retried."""
    which = {"test_before": "the unoptimized system", "test_after": facts["method"]}[facts["evaluation"]]
    rows = f"{facts['retried']:,} of {plural(facts['failed'], 'failed test row')} of {which}"
    verb = "was" if facts["retried"] == 1 else "were"
    means = f"{number(facts['before']['mean'])} → {number(facts['after']['mean'])}"
    note = f" The others were not retried: {facts['note']}." if facts["note"] else ""
    return (
        f"After the end of the run, {rows} {verb} retried; {facts['recovered']:,} succeeded, which changed "
        f"the mean test score {means}.{note} Acceptance decisions and validation scores did not change."
    )


def _examples(facts: RunFacts) -> list[Block]:
    found = facts["examples"]
    if found["counts"] is None:
        return ["There are no scored examples yet."]
    split = {"test": "test", "valid": "validation"}[found["split"]]
    counts, changed, repeats = found["counts"], bool(facts["changes"]), found.get("repeats", 1)
    total = plural(sum(counts.values()), f"{split} example")
    moved = f"{counts['gained']:,} improved, {counts['lost']:,} got worse, {counts['same']:,} did not change."
    several = f" Scores are means of {repeats} runs; the first run is shown." if repeats > 1 else ""
    groups = [
        ("Largest losses", found["lost"]),
        ("Largest gains", found["gained"]),
        ("Lowest scores after optimization", found["worst"]),
    ]
    visible_groups = groups if changed else [("Lowest scores", found["worst"])]
    return [
        f"Of {total}, {moved}{several}" if changed else f"The lowest scores of {total}.{several}",
        *(Examples(title, items, changed) for title, items in visible_groups if items),
    ]


def _use(facts: RunFacts) -> list[Block]:
    if not facts["files"]["best.json"]:
        return ["best.json is written at the end of the search. To resume the run, repeat the command that "
                "started it."]  # fmt: skip
    names = [name.lstrip("$") for name, kind in facts["graph"]["nodes"] if kind == "input"]
    words, inputs = (
        join.join(form % name for name in names) for join, form in ((" ", "%s=…"), (", ", '"%s": …'))
    )
    return [
        Code("sh", f"compound run FILE --config best.json {words}".rstrip()),
        Code("python", "import compound as cp\n\nbest = cp.load(\"best.json\")\n"
             f"trace = cp.run(system.bind(best), {{{inputs}}})\n"
             "best.save(\"elsewhere/best.json\")  # also copies the folders that it refers to"),
        "best.json is in the same directory as this report. To use it elsewhere, copy it together with the "
        "folders that it refers to, if any.",
    ]  # fmt: skip


def _provenance(facts: RunFacts) -> list[Block]:
    found, settings = facts["provenance"], facts["provenance"]["settings"]
    limits = {name: value for name, value in settings["budget"].items() if value is not None}
    others = {name: value for name, value in _chosen(settings) if name not in ("method", "seed")}
    pairs = [
        ("system", facts["system"]), ("signature", found["signature"]), ("metric", facts["metric"]),
        ("method", facts["method"]), ("seed", str(facts["seed"])), ("budget", _spelled(limits)),
        ("non-default settings", _spelled(others)), ("defaults", _spelled(found["defaults"])),
        ("models", _spelled(found["engines"])),
        ("initial configuration", found["start"]), ("best configuration", found["best"]),
        ("started", _moment(found["began"])), ("last event", _moment(found["ended"])),
        ("spent", spending(facts["spent"])),
        ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
    ]  # fmt: skip
    return [Pairs([(name, value) for name, value in pairs if value]), tables.data(facts)]


def _chosen(settings: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the settings that differ from their defaults, except the budget."""
    usual = {
        **OptimizeSettings().model_dump(mode="json"),
        **defaults(),
    }
    yield from _different({name: value for name, value in settings.items() if name != "budget"}, usual, "")


def _different(values: Mapping[str, Any], usual: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        other = usual.get(name)
        if isinstance(value, Mapping) and value:
            yield from _different(value, other if isinstance(other, Mapping) else {}, f"{prefix}{name}.")
        elif value != other:
            yield f"{prefix}{name}", value


def spending(spent: SpentFacts) -> str:
    """Return a phrase on what the run spent."""
    tokens = spent.get("prompt_tokens", 0) + spent.get("completion_tokens", 0)
    cost = money(spent.get("cost", 0.0), spent.get("unpriced", 0))
    trouble = _incidents(spent.get("incidents") or {})
    return (
        f"{count(spent.get('system_runs', 0))} system runs in the search and "
        f"{count(spent.get('test_runs', 0))} on the test split, {count(spent.get('calls', 0))} calls, "
        f"{count(tokens)} tokens, {cost}, {seconds(spent.get('seconds', 0.0))}{_metric_part(spent)}{trouble}"
    )


def _metric_part(spent: SpentFacts) -> str:
    """Return a phrase on the part of the amounts that the metric spent, such as a judge."""
    if not spent.get("metric_calls"):
        return ""
    cost = f", {money(spent['metric_cost'], 0)}" if spent.get("metric_cost") else ""
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
    found = [f"{count(counts[name])} {words}" for name, words in descriptions.items() if counts.get(name)]
    return f"; {', '.join(found)}" if found else ""


def _spelled(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {shown(value)}" for name, value in values.items())


def _moment(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at)) if at else ""
