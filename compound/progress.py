"""Live news of a run: a table on a terminal, one plain line per event otherwise; always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from compound.recorder import Listener


def describe(event: Mapping[str, Any]) -> str:
    """Return an event as one line of text.

    >>> describe({"event": "baseline", "mean": 0.25, "low": 0.1, "high": 0.4, "n": 40, "failed": 0})
    'baseline  valid 0.250 [0.100, 0.400] on 40'
    """
    kind = event["event"]
    prefix = f"{event['method']}: " if event.get("method") else ""
    text = {
        "baseline": lambda: f"valid {_score(event)}",
        "progress": lambda: str(event["note"]),
        "job": lambda: _job(event),
        "decision": lambda: _decision(event),
        "test_before": lambda: f"test, before {_score(event)}",
        "test_after": lambda: f"test, after {_score(event)}",
    }.get(kind, lambda: str(event.get("note") or event.get("reason") or ""))()
    return f"{prefix}{kind:<9} {text}".rstrip()


def _score(event: Mapping[str, Any]) -> str:
    if event.get("mean") is None:
        return "not read"
    failed = f", {event['failed']} failed" if event.get("failed") else ""
    limits = "" if event["low"] is None else f" [{event['low']:.3f}, {event['high']:.3f}]"
    return f"{event['mean']:.3f}{limits} on {event['n']}{failed}"


def _job(event: Mapping[str, Any]) -> str:
    keys = ", ".join(event["keys"])
    if not event["values"]:
        return f"{event['optimizer']} on {keys}: {event['note']}"
    changed = ", ".join(event["values"])
    before, after = event["train_before"], event["train_after"]
    compared = "" if before is None or after is None else f"train {before:.3f} -> {after:.3f}, "
    return f"{event['optimizer']} on {keys}: {compared}proposes {changed}"


def _decision(event: Mapping[str, Any]) -> str:
    if "p" not in event:
        return str(event.get("note", ""))
    verdict = "accepted" if event["accepted"] else "rejected"
    return (
        f"{verdict}: valid {event['before']['mean']:.3f} -> {event['after']['mean']:.3f}, "
        f"p = {event['p']:.4f} against {event['level']:.4f}"
    )


def status(event: Mapping[str, Any], started: float, limits: Mapping[str, Any]) -> str:
    """Return what is spent so far, with limits, as one line."""
    spent = event.get("spent") or {}
    limit = limits.get("system_runs")
    runs = f"{spent.get('system_runs', 0):.0f}" + (f" of {limit:g}" if limit else "")
    tokens = spent.get("prompt_tokens", 0) + spent.get("completion_tokens", 0)
    money = f" · ${spent['cost']:.4f}" if spent.get("cost") else ""
    seconds = time.monotonic() - started
    return (
        f"{runs} system runs (+{spent.get('test_runs', 0):.0f} test) · {spent.get('calls', 0)} calls · "
        f"{tokens:,} tokens{money} · {seconds // 60:.0f}:{seconds % 60:02.0f}"
    )


@contextmanager
def watching(
    limits: Mapping[str, Any], *, quiet: bool = False, plain: bool | None = None
) -> Iterator[Listener]:
    """Give a listener that shows events for as long as the context lasts."""
    started = time.monotonic()
    if quiet:
        yield lambda event: None
    elif plain if plain is not None else not sys.stderr.isatty():
        yield _print
    else:
        with _live(limits, started) as listener:
            yield listener


def _print(event: Mapping[str, Any]) -> None:
    if event["event"] != "call":
        print(describe(event), file=sys.stderr, flush=True)


@contextmanager
def _live(limits: Mapping[str, Any], started: float) -> Iterator[Listener]:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)
    line = Text("starting", style="dim")
    shown = 0.0
    with Live(line, console=console, refresh_per_second=4, transient=True) as live:

        def listen(event: Mapping[str, Any]) -> None:
            nonlocal shown
            if event["event"] != "call":
                style = {"decision": "bold green" if event.get("accepted") else "yellow"}.get(
                    event["event"], ""
                )
                live.console.print(Text(describe(event), style=style))
            if event["event"] != "call" or time.monotonic() - shown > 0.2:
                shown = time.monotonic()
                live.update(Text(status(event, started, limits), style="dim"))

        yield listen


@contextmanager
def counting(*, quiet: bool = False) -> Iterator[Any]:
    """Give an ``on_trace`` that shows how many examples are done and their running mean."""
    scores: list[float] = []

    def count(_: Any, trace: Any) -> None:
        scores.append(trace.score)
        if not quiet and (sys.stderr.isatty() or len(scores) % 50 == 0):
            end = "\r" if sys.stderr.isatty() else "\n"
            print(
                f"{len(scores)} runs, mean {sum(scores) / len(scores):.4f}",
                end=end,
                file=sys.stderr,
                flush=True,
            )

    yield count
    if not quiet and sys.stderr.isatty():
        print(file=sys.stderr)
