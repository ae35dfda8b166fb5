"""Tables of benchmark systems: settings scored without a search, and system runs of searches."""

from __future__ import annotations

from compound.report.rendering.markdown import render_block
from tables.data import markdown, results, spread


def settings(file: str) -> str:
    """Scores of the best five, the initial and the worst of all combinations of a system's choices."""
    found = results(f"{file}_settings")
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
    found = results("stark_settings")
    hits = ("hit@1", "hit@5")
    rows = [
        [row["name"], spread(row), *(f"{row['parts'][hit]:.2f}" for hit in hits)] for row in found["rows"]
    ]
    return markdown(["ranking", "MRR", *hits], rows)


def predicted_runs() -> str:
    """Tabulate the system runs that jobs were predicted to take, and those that they took."""
    rows = []
    for title, jobs in results("predicted_runs")["jobs"].items():
        system, method = title.split(", ")
        first = [job for job in jobs if job["predicted"] is not None]
        limited = [job for job in jobs if job["ended"] == "share"]
        share, spent = (sum(job[key] for job in limited) for key in ("share", "spent"))
        rows.append([
            system, f"`{method}`", str(len(first)),
            *(f"{sum(job[key] for job in first):.1f}" for key in ("predicted", "spent")),
            f"{len(limited)} of {len(jobs)}", f"{spent / share:.1%}",
        ])  # fmt: skip
    headings = [
        "system", "method", "jobs of the first round", "predicted runs", "spent runs",
        "jobs limited by their share", "spent part of it",
    ]  # fmt: skip
    return markdown(headings, rows)


TABLES = (settings, stark, predicted_runs)
