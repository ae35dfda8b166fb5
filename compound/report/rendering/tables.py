"""Tables of the report: headings and cells as text, for both Markdown and HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from compound.evaluation.evaluate import Summary
from compound.optimization.proposals import OUTCOMES
from compound.report.facts.documents import DecisionFacts, FrontFacts, MethodRow, RunFacts, TallyFacts
from compound.report.facts.text import count, interval, limits, line, money, number, p_value, seconds, signed

Row = Sequence[str]
Split = Literal["valid", "test"]


@dataclass(frozen=True)
class Table:
    """Headings, rows, and the indices of numeric columns, which are aligned to the right."""

    headings: Sequence[str]
    rows: Sequence[Row]
    numeric: frozenset[int]


def table(headings: Sequence[str], rows: Sequence[Row]) -> Table:
    """Return a table; the prefix ``#`` of a heading marks a numeric column."""
    numeric = frozenset(i for i, heading in enumerate(headings) if heading.startswith("#"))
    return Table([heading.removeprefix("#") for heading in headings], rows, numeric)


def methods(facts: RunFacts) -> Table:
    """Return the table of the unoptimized system, this method and the baselines."""
    headings = (
        "method", f"#validation{_same_n(facts, 'valid')}", f"#test{_same_n(facts, 'test')}", "#gain on test",
        "#failed", "#supported", "#search runs", "#test runs", "#calls", "#tokens", "#cost", "#time",
    )  # fmt: skip
    rows = [
        (
            row["method"] + (" (unfinished)" if row.get("missing") else ""),
            _measured(facts, row, "valid"), _measured(facts, row, "test"), interval(row["gain"], signed),
            count(row["failed"]), f"{row['accepted']} of {row['decisions']}" if "accepted" in row else "–",
            count(row.get("system_runs")), count(row.get("test_runs")), count(row.get("calls")),
            count(_tokens(row)), money(row.get("cost"), row.get("unpriced")), seconds(row.get("seconds")),
        )
        for row in facts["methods"]
    ]  # fmt: skip
    return table(headings, rows)


def _tokens(row: MethodRow) -> int | None:
    prompt, completion = row.get("prompt_tokens"), row.get("completion_tokens")
    if row.get("calls") is None or prompt is None or completion is None:
        return None
    return prompt + completion


def _on(row: MethodRow, split: Split) -> Summary | None:
    return row["valid"] if split == "valid" else row["test"]


def _ns(facts: RunFacts, split: Split) -> set[int]:
    return {measured["n"] for row in facts["methods"] if (measured := _on(row, split))}


def _same_n(facts: RunFacts, split: Split) -> str:
    """Return the number of examples for the heading, or ``""`` if it differs between methods."""
    ns = _ns(facts, split)
    return f", n\u00a0=\u00a0{count(*ns)}" if len(ns) == 1 else ""


def _measured(facts: RunFacts, row: MethodRow, split: Split) -> str:
    measured = _on(row, split)
    different = len(_ns(facts, split)) > 1 and measured
    return interval(measured) + (f", n = {measured['n']}" if measured and different else "")


def decisions(facts: RunFacts) -> Table:
    """Return the table of acceptance decisions on the validation split."""
    headings = (
        "#no.",
        "#after runs",
        "changed",
        "#reference",
        "#candidate",
        "#gain",
        "#p",
        "#level",
        "verdict",
        "#better with probability",
    )
    rows = [
        (
            str(d["decision"]), count(d["at"]), ", ".join(change[0] for change in d["changes"]),
            interval(d["before"]), interval(d["after"]), interval(d["gain"], signed), p_value(d["p"]),
            p_value(d["level"]), _verdict(d), number(d["probability"]),
        )
        for d in facts["decisions"]
    ]  # fmt: skip
    return table(headings, rows)


def _verdict(decision: DecisionFacts) -> str:
    """Return the verdict of a decision, and whether the candidate became the best configuration."""
    known = decision["verdict"]
    if decision["over"]:
        return f"{known}, but over the limits"
    if known is None:  # without a comparison, or of an earlier version
        return "accepted" if decision["accepted"] else decision["note"] or "rejected"
    return f"{known}, kept" if decision["accepted"] else known


def front(facts: FrontFacts) -> Table:
    """Return the table of the candidates that no other one beats in both gain and cost."""
    headings = ("#$ per run" if facts["cost"] == "usd" else "#tokens per run", "#mean score",
                "#gain", "#evaluations", "fate", "on the front", "changed")  # fmt: skip
    rows = [
        (
            money(row["cost"]) if facts["cost"] == "usd" else count(row["cost"]), interval(row),
            signed(row["gain"]), count(row["evaluations"]),
            f"{row['fate']}, chosen" if row["chosen"] else row["fate"],
            "yes" if row["on_front"] else "no", ", ".join(row["changed"]) or "–",
        )
        for row in facts["rows"]
    ]  # fmt: skip
    return table(headings, rows)


def jobs(facts: RunFacts) -> Table:
    """Return the table of optimizer jobs with their results on train examples."""
    headings = (
        "#no.", "optimizer", "parameters", "#tried", "#train before", "#train after", "#runs", "outcome",
    )  # fmt: skip
    rows = [
        (
            str(j["job"] + 1), j["optimizer"], ", ".join(j["keys"]), count(j["tried"]),
            number(j["train_before"]), number(j["train_after"]), count(j["runs"]),
            _outcome(j["values"], line(j["note"] or "")),
        )
        for j in facts["jobs"]
    ]  # fmt: skip
    return table(headings, rows)


def _outcome(values: Mapping[str, object], note: str) -> str:
    proposal = "; ".join(f"{key} = {brief(value)}" for key, value in values.items())
    return f"{proposal} ({note})" if proposal and note else proposal or note or "no proposal"


def brief(value: object) -> str:
    """Format a value in a few words."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return f"{len(value)} demonstrations"
    return line(value, 60)


def proposals(models: Mapping[str, TallyFacts]) -> Table:
    """Return the table of requests for proposals by model and outcome."""
    headings = ("model", "#asked", *(f"#{name}" for name in OUTCOMES), "failures")
    rows = [
        (
            lm,
            count(tally["asked"]),
            *(count(tally[name]) for name in OUTCOMES),
            "; ".join(f"{times} × {line(reason)}" for reason, times in tally["reasons"].items()) or "–",
        )
        for lm, tally in models.items()
    ]
    return table(headings, rows)


def costs(facts: RunFacts) -> Table:
    """Return the table of the costs of recorded runs by component, and of everything else."""
    headings = (
        "component", "#executed", "#from cache", "#model calls", "#tokens in", "#tokens out", "#cost",
        "#seconds, summed", "#seconds each",
    )  # fmt: skip
    rows = [
        (
            c["component"] or "train runs and prompt writing", count(c["executed"]), count(c["reused"]),
            count(c["calls"]), count(c["prompt_tokens"]), count(c["completion_tokens"]),
            money(c["cost"], c["unpriced"]), "–" if c["seconds"] is None else f"{c['seconds']:,.1f}",
            f"{(c['seconds'] or 0.0) / c['executed']:.3f}" if c["executed"] else "–",
        )
        for c in facts["components"]
    ]  # fmt: skip
    return table(headings, rows)


def failures(facts: RunFacts) -> Table:
    """Return the table of failures of recorded runs."""
    headings = ("kind", "message", "component", "#validation", "#test", "#total")
    rows = [
        (
            f["kind"],
            line(f["message"], 300),
            f["where"] or "–",
            count(f["valid"]),
            count(f["test"]),
            count(f["count"]),
        )
        for f in facts["failures"]
    ]
    return table(headings, rows)


def data(facts: RunFacts) -> Table:
    """Return the table of splits with their sizes and digests."""
    rows = [(role, count(d["n"]), d["digest"]) for role, d in facts["provenance"]["data"].items()]
    return table(("split", "#examples", "digest"), rows)


def versus(facts: RunFacts) -> list[str]:
    """Return a sentence for each baseline on the difference of test scores."""
    found = []
    for row in facts["methods"]:
        gap = row["versus"]
        if not gap:
            continue
        low, high = gap["low"], gap["high"]
        open_ = low is None or high is None or low <= 0 <= high
        word = "better than" if gap["mean"] > 0 else "worse than"
        claim = f"not significantly different from {row['method']}" if open_ else f"{word} {row['method']}"
        found.append(
            f"On the test split, {facts['method']} is {claim}: "
            f"the paired difference is {signed(gap['mean'])} {limits(gap)}".rstrip()
            + "."
        )
    return found
