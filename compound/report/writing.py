"""Write ``report.md`` and ``report.html`` of a run from the files of its run directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compound.report.facts.documents import ChangeDocument, ReportFacts, RunFacts
from compound.report.facts.facts import summarize
from compound.report.facts.text import escape_invisible, line_diff
from compound.report.rendering.html import page
from compound.report.rendering.markdown import markdown
from compound.report.rendering.tables import brief, methods, versus
from compound.report.rewards.section import reward_facts
from compound.report.sections import sections, spending
from compound.report.training.steps import training_facts
from compound.runs.directory import inconsistency_errors
from compound.security.untrusted import UntrustedFolder

SHOWN = ("method", "validation", "test", "gain on test", "search runs")  # columns that fit in a terminal


def write(path: str | Path) -> None:
    """Write ``report.md`` and ``report.html`` into the directory of a finished or unfinished run.

    Without matplotlib, the reports have no figures and explain how to install it.

    Raises:
        RunDirectoryError: the folder is not a run directory, one of its files is broken or links outside of
            it, or the reports cannot be written.
    """
    folder = UntrustedFolder(path)
    folder.check()
    facts: ReportFacts = {
        **summarize(path),
        "rewards": reward_facts(path),
        "training": training_facts(path),
    }
    with inconsistency_errors(path):
        parts = sections(facts)
        pages = {"report.md": markdown(facts, parts), "report.html": page(facts, parts)}
    for name, text in pages.items():
        folder.write(name, escape_invisible(text))


def terminal_summary(path: str | Path) -> str:
    """Return the summary that a terminal shows at the end of a run: result, changes, cost and files.

    Raises:
        RunDirectoryError: the folder is not a run directory, or one of its files is broken.
    """
    facts, folder = summarize(path), Path(path)
    with inconsistency_errors(path):
        blocks = [
            [f"{facts['system']}: {facts['title']}", facts["sentence"], *facts["notes"]],
            _compared(facts),
            [line for change in facts["changes"] for line in _changed(change)],
            [
                f"training, job {job['job'] + 1}: {job['note']}"
                for job in facts["jobs"]
                if job["best_step"] is not None  # it proposed the best of several steps
            ],
            [f"spent: {spending(facts['spent'])}", f"report: {folder / 'report.html'}"],
        ]
        if facts["files"]["best.json"]:
            blocks[-1].append(f"best configuration: {folder / 'best.json'}")
    return escape_invisible("\n\n".join("\n".join(lines) for lines in blocks if lines))


def _compared(facts: RunFacts) -> list[str]:
    """Return the table of the methods and their differences, if there is more than one method."""
    if len(facts["methods"]) < 3:  # the unoptimized system and this method
        return []
    table = methods(facts)
    kept = [i for i, heading in enumerate(table.headings) if heading.split(",")[0] in SHOWN]
    lines = align_columns([[str(row[i]) for i in kept] for row in (table.headings, *table.rows)])
    return [*lines, *versus(facts)]


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines of equal columns.

    >>> align_columns([["method", "test"], ["hbc", "0.5"]])
    ['method  test', 'hbc     0.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _changed(change: ChangeDocument) -> list[str]:
    """Return the lines of a change: a diff for a text, otherwise the old and the new value."""
    if change["kind"] != "text":
        return [f"{change['key']}: {brief(change['before'])} -> {brief(change['after'])}"]
    lines = line_diff(str(change["before"] or ""), str(change["after"] or ""))
    return [f"{change['key']}:", *(f"  {line[0]} {line[1:]}" for line in lines if line[0] in "-+")]
