"""Table of the gateway's benchmark."""

from __future__ import annotations

from tables.data import markdown, results

NAMES = {
    "forwarded": "forwarded to a server",
    "forwarded_stream": "forwarded to a server, until the first event of a stream",
    "in_process": "answered by an engine in the process",
    "in_process_stream": "answered by an engine in the process, until the first event of a stream",
}


def gateway() -> str:
    """Tabulate the time that the gateway adds to a request."""
    rows = []
    for name, found in results("gateway")["cases"].items():
        direct = f"{found['p50_ms_direct']:.2f} ms" if found["p50_ms_direct"] else "–"
        low, high = found["p25_ms_added"], found["p75_ms_added"]
        added = f"+{found['p50_ms_added']:.2f} ms ({low:.2f} to {high:.2f})"
        rows.append(
            [
                NAMES[name],
                f"{found['requests']:,}",
                direct,
                f"{found['p50_ms_gateway']:.2f} ms",
                added,
            ]
        )
    headings = ["request", "pairs", "without gateway", "with gateway", "difference (quartiles)"]
    return markdown(headings, rows)


TABLES = (gateway,)
