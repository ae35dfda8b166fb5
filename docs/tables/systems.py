"""Tables of benchmark systems: settings scored without a search, and system runs of searches."""

from __future__ import annotations

from compound.report.rendering import escape
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
            *(escape(str(scored[i]["settings"][name])) for name in names),
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
        [row["name"], spread(row), *(f"{row['parts'][hit]:.2f}" for hit in hits)]
        for row in found["rows"]
    ]
    return markdown(["ranking", "MRR", *hits], rows)


TABLES = (settings, stark)
