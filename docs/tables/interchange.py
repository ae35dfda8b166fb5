"""Tables of imported programs and exported prompts."""

from __future__ import annotations

from tables.data import markdown, results


def interchange() -> str:
    """Tabulate the scores of imported programs, and the outputs that they share with their exported forms."""
    rows = []
    for row in results("interchange")["rows"]:
        total = row["test_rows"]
        same = ", ".join(f"{name} {count}/{total}" for name, count in row["same_outputs"].items())
        scores = f"{row['test_before']:.2f} → {row['test_after']:.2f}"
        rows.append([f"{row['library']}, `{row['form']}`", row["model"], scores, same])
    return markdown(
        ["program", "model", "test score", "same outputs as the optimized system"], rows
    )


TABLES = (interchange,)
