"""Tables of the server's benchmark."""

from __future__ import annotations

from statistics import median

from tables.data import markdown, results


def serving() -> str:
    """Tabulate the throughput of the server relative to its engine, and the time that it adds to a run."""
    found = results("serving")
    connections = f"{found['connections']} connections"
    rows = [
        [
            f"{float(seconds):g} s per answer, {connections}",
            f"{median(row['engine_per_second']):,.0f} runs/s",
            f"{median(row['server_per_second']):,.0f} runs/s",
            f"{row['ratio']:.2f} ×",
        ]
        for seconds, row in found["throughput_by_seconds_per_answer"].items()
    ]
    engine, server = (median(found[f"p50_ms_{name}"]) for name in ("engine", "server"))
    added = f"+{found['p50_ms_added']:.2f} ms"
    rows.append(
        ["0 s per answer, 1 connection, median", f"{engine:.2f} ms", f"{server:.2f} ms", added]
    )
    rows.append(
        [f"0 s per answer, {connections}", "–", f"{found['most_per_second']:,} runs/s", "–"]
    )
    return markdown(["", "engine alone", "server", "server relative to engine"], rows)


TABLES = (serving,)
