"""Write ``report.md`` and ``report.html`` of a run, and its summary for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compound.core.security.untrusted import UntrustedFolder
from compound.optimization.runs.directory import inconsistency_errors
from compound.report.facts import summarize
from compound.report.record import Facts
from compound.report.rendering import brief, escape, render_html, render_markdown
from compound.report.rewards import reward_facts
from compound.report.sections import methods_table, report_context, spending, versus
from compound.report.text import align_columns, escape_invisible, line_diff
from compound.report.training import training_facts

SHOWN = ("method", "validation", "test", "gain on test", "search runs")  # columns for a terminal


def write(path: str | Path) -> None:
    """Write ``report.md`` and ``report.html`` into the directory of a finished or unfinished run.

    Without matplotlib, the reports have no plots and explain how to install it.

    Raises:
        RunDirectoryError: the folder is not a run directory, one of its files is broken or links
            outside of it, or the reports cannot be written.
    """
    folder = UntrustedFolder(path)
    folder.check()
    learned = {"rewards": reward_facts(path), "training": training_facts(path)}
    facts = {**summarize(path), **learned}
    with inconsistency_errors(path):
        context = report_context(facts)
        notes = "\n".join(f"- {escape(note)}" for note in facts["notes"])
        start = (
            f"# {escape(facts['system'])}: {escape(facts['title'])}\n\n{escape(facts['sentence'])}"
        )
        pages = {
            "report.md": render_markdown("report.jinja", context, f"{start}\n\n{notes}"),
            "report.html": render_html("report.jinja", context),
        }
    for name, text in pages.items():
        folder.write(name, text)


def terminal_summary(path: str | Path) -> str:
    """Return the result, changes, cost and files of a run, as a terminal shows them.

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
    return join_blocks(blocks)


def join_blocks(blocks: Sequence[Sequence[str]]) -> str:
    """Return blocks of lines, separated by empty lines, for a terminal."""
    return escape_invisible("\n\n".join("\n".join(lines) for lines in blocks if lines))


def _compared(facts: Facts) -> list[str]:
    """Return the table of the methods and their differences, if there is more than one method."""
    if len(facts["methods"]) < 3:  # the unoptimized system and this method
        return []
    table = methods_table(facts)
    kept = [i for i, heading in enumerate(table.headings) if heading.split(",")[0] in SHOWN]
    lines = align_columns([[row[i] for i in kept] for row in (table.headings, *table.rows)])
    return [*lines, *versus(facts)]


def _changed(change: Facts) -> list[str]:
    """Return the lines of a change: a diff for a text, otherwise the old and the new value."""
    if change["kind"] != "text":
        return [f"{change['key']}: {brief(change['before'])} -> {brief(change['after'])}"]
    lines = line_diff(str(change["before"] or ""), str(change["after"] or ""))
    return [f"{change['key']}:", *(f"  {line[0]} {line[1:]}" for line in lines if line[0] in "-+")]
