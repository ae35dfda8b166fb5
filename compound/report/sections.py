"""The sections of a report, in order, as blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from compound.errors import MissingExtra
from compound.formatting import plural
from compound.report.facts.documents import ProposalFacts, ReportFacts, RetryFacts, RunFacts, SpentFacts
from compound.report.facts.text import count, money, number, p_value, seconds, shown
from compound.report.figures.curve import curve_svg
from compound.report.figures.graph import graph_svg
from compound.report.rendering import tables
from compound.report.rendering.blocks import Block, Change, Code, Examples, Figure, Pairs, Section
from compound.report.rewards.section import reward_blocks
from compound.report.training.tables import training_blocks
from compound.settings.optimize import OptimizeSettings
from compound.settings.sections import defaults


def sections(facts: ReportFacts) -> list[Section]:
    """Return the report's sections."""
    none = "Nothing changed: the best configuration is the one the search started from."
    return [
        Section("Methods", _methods(facts)),
        Section("What changed", [Change(**change) for change in facts["changes"]] or [none]),
        Section("Score by iteration", [_curve(facts)]),
        Section("Decisions", _decisions(facts)),
        Section("Jobs", _jobs(facts)),
        *([Section("Proposals", _proposals(facts["proposals"]))] if facts["proposals"] else []),
        *([Section("What could be found", list(facts["outlook"]["told"]))] if facts["outlook"] else []),
        *([Section("Training", training_blocks(trained))] if (trained := facts.get("training")) else []),
        *([Section("Local rewards", reward_blocks(learned))] if (learned := facts.get("rewards")) else []),
        Section(
            "The graph", [replace(_figure("graph", GRAPH, graph_svg, facts["graph"]), graph=facts["graph"])]
        ),
        Section("Costs by component", _costs(facts)),
        Section("Failures", _failures(facts)),
        Section("Examples", _examples(facts)),
        Section("Use it", _use(facts)),
        Section("Provenance", _provenance(facts)),
    ]


Drawn = TypeVar("Drawn")
CURVE = (
    "Lines follow the validation score of the best configuration so far. Dots are the validation scores each "
    "decision rests on, labelled with what changed (in brackets when rejected); bars are 95 % intervals. "
    "Triangles are comparisons on train examples: from the incumbent (dash) to the proposal (triangle)."
)
GRAPH = "Data flows from left to right; what an edge feeds is written on it."


def _figure(name: str, caption: str, draw: Callable[[Drawn], str], facts: Drawn) -> Figure:
    try:
        return Figure(name, caption, svg=draw(facts))
    except MissingExtra as error:
        return Figure(name, caption, missing=f"No figure without matplotlib: {error.hint}, then "
                      "`compound report` on this run.")  # fmt: skip


def _curve(facts: RunFacts) -> Block:
    begun = any(curve["start"] for curve in facts["curves"])
    return _figure("curve", CURVE, curve_svg, facts) if begun else "Nothing is measured yet."


def _methods(facts: RunFacts) -> list[Block]:
    how = (
        "Means over examples with 95 % intervals; gains are paired by example. The validation split chose "
        "the configuration, so its scores lean upward; the test split is read once, at the end. Calls, "
        "tokens, cost and time cover the search and the reading of the test split."
    )
    return [tables.methods(facts), *tables.versus(facts), how]


def _decisions(facts: RunFacts) -> list[Block]:
    if not facts["decisions"]:
        return ["No configuration was put to the test on the validation split."]
    planned = facts["plan"]["decisions"] if facts["plan"] else 0
    how = (
        "A configuration is accepted when p, from a one-sided paired permutation test on validation "
        f"examples, is at most the level. The levels of the {plural(planned, 'planned decision')} sum to "
        f"{p_value(facts['alpha'])}: the chance, over the whole run, of accepting one that is no better."
    )
    return [tables.decisions(facts), how]


def _jobs(facts: RunFacts) -> list[Block]:
    return [tables.jobs(facts)] if facts["jobs"] else ["No optimizer has finished a job."]


def _proposals(found: ProposalFacts) -> list[Block]:
    spent = (
        f"They took {count(found['calls'])} calls, {count(found['prompt_tokens'])} prompt tokens, "
        f"{count(found['completion_tokens'])} completion tokens and {money(found['cost'])}, which system "
        "runs do not count. A failed call gave no answer; an unusable reply held no proposal that the "
        "parameter can take; a duplicate was known already."
    )
    return [tables.proposals(found["models"]), spent]


def _costs(facts: RunFacts) -> list[Block]:
    if not facts["components"]:
        return ["No run is recorded."]
    how = (
        "Each call on validation and test examples is recorded; the last row is what was spent beside them. "
        "Calls run side by side, so their summed seconds exceed the time on the clock."
    )
    return [tables.costs(facts), how]


def _failures(facts: RunFacts) -> list[Block]:
    retries: list[Block] = [_retried(each) for each in facts["retries"]]
    if not facts["failures"]:
        return ["No run on validation or test examples failed.", *retries]
    more = facts["other_failures"]
    others = [f"Other messages: {plural(more, 'failed run')}."] if more else []
    return [tables.failures(facts), *others, *retries]


def _retried(facts: RetryFacts) -> str:
    """Return what came of failed test rows that were run again."""
    which = {"test_before": "the unoptimized system", "test_after": facts["method"]}[facts["evaluation"]]
    rows = f"{facts['retried']:,} of {plural(facts['failed'], 'failed test row')} of {which}"
    verb = "was" if facts["retried"] == 1 else "were"
    means = f"{number(facts['before']['mean'])} → {number(facts['after']['mean'])}"
    note = f" The rest was not run: {facts['note']}." if facts["note"] else ""
    return (
        f"After the run had ended, {rows} {verb} run again; {facts['recovered']:,} succeeded, and the mean "
        f"test score went {means}.{note} Acceptance decisions and validation scores stayed as they were."
    )


def _examples(facts: RunFacts) -> list[Block]:
    found = facts["examples"]
    if found["counts"] is None:
        return ["No scored examples yet."]
    split = {"test": "test", "valid": "validation"}[found["split"]]
    counts, changed, repeats = found["counts"], bool(facts["changes"]), found.get("repeats", 1)
    total = plural(sum(counts.values()), f"{split} example")
    moved = f"{counts['gained']:,} gained, {counts['lost']:,} lost, {counts['same']:,} stayed."
    several = f" Scores are means of {repeats} runs; the first is shown." if repeats > 1 else ""
    groups = [
        ("Lost most", found["lost"]),
        ("Gained most", found["gained"]),
        ("Worst now", found["worst"]),
    ]
    wanted = groups if changed else [("Worst", found["worst"])]
    return [
        f"Of {total}, {moved}{several}" if changed else f"The worst of {total}.{several}",
        *(Examples(title, items, changed) for title, items in wanted if items),
    ]


def _use(facts: RunFacts) -> list[Block]:
    if not facts["files"]["best.json"]:
        return ["The search writes best.json when it ends; the command that started the run resumes it."]
    names = [name.lstrip("$") for name, kind in facts["graph"]["nodes"] if kind == "input"]
    words, inputs = (
        join.join(form % name for name in names) for join, form in ((" ", "%s=…"), (", ", '"%s": …'))
    )
    return [
        Code("sh", f"compound run FILE --config best.json {words}".rstrip()),
        Code("python", "import compound as cp\n\nbest = cp.load(\"best.json\")\n"
             f"trace = cp.run(system.bind(best), {{{inputs}}})\n"
             "best.save(\"elsewhere/best.json\")  # takes the folders along that it refers to"),
        "best.json lies beside this report. Besides the system, another process needs it and the folders it "
        "refers to, if any.",
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
        ("configuration at the start", found["start"]), ("best configuration", found["best"]),
        ("began", _moment(found["began"])), ("last recorded", _moment(found["ended"])),
        ("spent", spending(facts["spent"])),
        ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
    ]  # fmt: skip
    return [Pairs([(name, value) for name, value in pairs if value]), tables.data(facts)]


def _chosen(settings: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the settings that are not as they are by default, the budget's apart."""
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
    """Return what was spent, in words."""
    tokens = spent.get("prompt_tokens", 0) + spent.get("completion_tokens", 0)
    cost = money(spent.get("cost", 0.0), spent.get("unpriced", 0))
    trouble = _incidents(spent.get("incidents") or {})
    return (
        f"{count(spent.get('system_runs', 0))} system runs on the search and "
        f"{count(spent.get('test_runs', 0))} on the test split, {count(spent.get('calls', 0))} calls, "
        f"{count(tokens)} tokens, {cost}, {seconds(spent.get('seconds', 0.0))}{trouble}"
    )


def _incidents(counts: Mapping[str, float]) -> str:
    """Return what went wrong at servers, in words."""
    told = {
        "rate_limited": "requests refused by a rate limit and sent again",
        "lost": "requests without an answer, charged with their worst case",
        "usage_corrected": "answers with impossible usage, corrected",
    }
    found = [f"{count(counts[name])} {words}" for name, words in told.items() if counts.get(name)]
    return f"; {', '.join(found)}" if found else ""


def _spelled(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {shown(value)}" for name, value in values.items())


def _moment(at: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at)) if at else ""
