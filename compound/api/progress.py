"""Live progress of a run: on a terminal, events and a progress bar; otherwise one plain line per event.

Output always goes to stderr.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from compound.core import notebook
from compound.core.formatting import plural
from compound.core.security.sanitize import sanitize_for_terminal, underlying_stream
from compound.optimization.method import ROLLOUTS
from compound.optimization.runs.recorder import Listener
from compound.report.text import p_value

if TYPE_CHECKING:
    from rich.live import Live

    from compound.core.example import Example
    from compound.execution.trace import Trace


NOTEBOOK_EVENTS = 12  # events that a notebook shows
NOTEBOOK_INTERVAL = 0.5  # minimum seconds between redraws for calls
BAR_WIDTH = 28  # width in characters
NOTICE_INTERVAL = 10.0  # minimum seconds between notices, if lines cannot be replaced
LABELS = {
    "outlook": "note",
    "proposals": "note",
    "test_before": "test",
    "test_after": "test",
}  # of events whose own name says less to a reader


def format_event(event: Mapping[str, Any]) -> str:
    """Format an event as one line of text.

    >>> format_event({"event": "start", "mean": 0.25, "low": 0.1, "high": 0.4, "n": 40, "failed": 0})
    'start     valid 0.250 [0.100, 0.400] on 40'
    """
    kind = event["event"]
    label = LABELS.get(kind, kind)
    prefix = f"{event['method']}: " if event.get("method") else ""
    text = {
        "start": lambda: f"valid {_score(event)}",
        "progress": lambda: _progress(event),
        "job": lambda: _job(event),
        "outlook": lambda: f"\n{label:<9} ".join([*event["duplicates"], *event["told"]]),
        "decision": lambda: _decision(event),
        "test_before": lambda: f"before {_score(event)}",
        "test_after": lambda: f"after {_score(event)}",
    }.get(kind, lambda: str(event.get("note") or event.get("reason") or ""))()
    return sanitize_for_terminal(f"{prefix}{label:<9} {text}".rstrip())


def _progress(event: Mapping[str, Any]) -> str:
    """Format the progress of a job, with its note."""
    note = str(event["note"])
    if event.get("step") is None:
        return note
    total = f" of {event['of']}" if event.get("of") is not None else ""
    steps = f"step {event['step']}{total}"
    return f"{steps}: {note}" if note else steps


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
    compared = before is not None and after is not None and not event.get("facts", {}).get(ROLLOUTS)
    chosen = event.get("facts", {}).get("best_step") is not None  # the note is more informative
    result = f"train {before:.3f} -> {after:.3f}" if compared and not chosen else event["note"]
    return f"{event['optimizer']} on {keys}: {result}{', ' if result else ''}proposes {changed}"


def _decision(event: Mapping[str, Any]) -> str:
    if "p" not in event:
        return str(event.get("note", ""))
    verdict = event["verdict"]
    covered = f"; {event['note']}" if event.get("note") else ""
    claim = f"no loss above {event['margin']:g}" if event.get("margin") else "better"
    if verdict == "promising":
        kept = "kept" if event["accepted"] else "not kept"
        verdict += f" ({kept}; {claim} with probability {event['probability']:.2f})"
    elif event.get("margin"):
        verdict += f" ({claim})"
    if event.get("over"):
        verdict += f", but over the limits ({', '.join(event['over'])})"
    lost = ""
    if event.get("lost"):
        lost = f" ({plural(event['lost'], 'example')} lost to transient failures before the change)"
    p = f"p = {p_value(event['p'])}".replace("= <", "<")
    return (
        f"{verdict}: valid {event['before']['mean']:.3f} -> {event['after']['mean']:.3f}, "
        f"{p} at level {p_value(event['level'])}{lost}{covered}"
    )


def format_status(event: Mapping[str, Any], started: float, limits: Mapping[str, Any]) -> str:
    """Format what is spent so far, with limits, as one line."""
    spent = event.get("spent") or {}
    limit = limits.get("system_runs")
    runs = f"{spent.get('system_runs', 0):.0f}" + (f" of {limit:g}" if limit else "")
    tokens = spent.get("prompt_tokens", 0) + spent.get("completion_tokens", 0)
    money = f" · ${spent['cost']:.4f}" if spent.get("cost") else ""
    judged = f" ({spent['metric_calls']} by the metric)" if spent.get("metric_calls") else ""
    money += " · unknown cost" if spent.get("unpriced") else ""
    return (
        f"{runs} system runs (+{spent.get('test_runs', 0):.0f} test) · {spent.get('calls', 0)} calls{judged}"
        f" · {tokens:,} tokens{money} · {timedelta(seconds=round(time.monotonic() - started))}"
    )


def _has_steps(event: Mapping[str, Any]) -> bool:
    """Return whether an event reports the progress of a job with a known number of steps."""
    known = event.get("step") is not None and event.get("of") is not None
    return event["event"] == "progress" and known


@contextmanager
def progress_display(
    limits: Mapping[str, Any], *, quiet: bool = False, plain: bool | None = None
) -> Iterator[Listener]:
    """Yield a listener that displays events within the context."""
    started = time.monotonic()
    if quiet:
        yield lambda event: None
    elif plain is None and notebook.in_notebook():
        with _in_notebook(limits, started) as listener:
            yield listener
    elif plain if plain is not None else not sys.stderr.isatty():
        yield Lines().listen
    else:
        with _live(limits, started) as listener:
            yield listener


class Lines:
    """Prints one line per event; notices, such as waits for a rate limit, are thinned out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noticed = float("-inf")

    def listen(self, event: Mapping[str, Any]) -> None:
        """Show an event."""
        if event["event"] == "call":
            return
        if event["event"] == "notice":
            now = self._clock()
            if now - self._noticed < NOTICE_INTERVAL:
                return
            self._noticed = now
        print(format_event(event), file=sys.stderr, flush=True)


@contextmanager
def _in_notebook(limits: Mapping[str, Any], started: float) -> Iterator[Listener]:
    from IPython.display import display

    cell = NotebookCell(limits, started)
    show: Callable[..., Any] = display
    handle = show(cell, display_id=True)
    cell.redraw = handle.update
    try:
        yield cell.listen
    finally:
        cell.done = True
        handle.update(cell)


class NotebookCell:
    """Display in a notebook, redrawn in place: the last events, the job's steps, and the amounts spent."""

    def __init__(
        self, limits: Mapping[str, Any], started: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits, self._started, self._clock = limits, started, clock
        self._events: deque[str] = deque(maxlen=NOTEBOOK_EVENTS)
        self._last: Mapping[str, Any] = {}
        self._steps: Mapping[str, Any] | None = None
        self._drawn = float("-inf")
        self.redraw: Callable[[NotebookCell], object] = lambda cell: None
        self.done = False

    def listen(self, event: Mapping[str, Any]) -> None:
        """Show an event; frequent ones are thinned out."""
        self._last = event
        frequent = event["event"] in ("call", "notice")
        if not frequent:
            self._steps = event if _has_steps(event) else None
            if self._steps is None:
                self._events.append(format_event(event))
        if not frequent or self._clock() - self._drawn > NOTEBOOK_INTERVAL:
            self._drawn = self._clock()
            self.redraw(self)

    def _repr_html_(self) -> str:
        parts = [notebook.preformatted(list(self._events))] if self._events else []
        if (steps := self._steps) is not None and not self.done:
            done, total = int(steps["step"]), int(steps["of"])
            text = notebook.escape(f"step {done} of {total}: {steps['note']}")
            parts.append(f'<div><progress value="{done}" max="{total}"></progress> {text}</div>')
        if self._last:
            spent = format_status(self._last, self._started, self._limits)
            parts.append(f"<div>{notebook.escape(spent)}</div>")
        return notebook.block("Optimization: ended" if self.done else "Optimization", *parts)

    def __repr__(self) -> str:
        return "\n".join(self._events) or "starting"


@contextmanager
def _live(limits: Mapping[str, Any], started: float) -> Iterator[Listener]:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=underlying_stream(sys.stderr))
    with Live(
        Text("starting", style="dim"), console=console, refresh_per_second=4, transient=True
    ) as live:
        yield Screen(live, limits, started).listen


class Screen:
    """Terminal display: scrolling events above a progress bar of the current job and the amounts spent."""

    def __init__(self, live: Live, limits: Mapping[str, Any], started: float) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._live, self._limits, self._started = live, limits, started
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(BAR_WIDTH),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(compact=True),
            get_time=time.monotonic,
            speed_estimate_period=3600.0,
        )
        self._job: tuple[object, ...] = ()  # of the bar
        self._shown = 0.0

    def listen(self, event: Mapping[str, Any]) -> None:
        """Show an event; a step of a long job only moves the bar, so that other events stay visible."""
        from rich.console import Group
        from rich.text import Text

        called, noticed = event["event"] == "call", event["event"] == "notice"
        if not called and not noticed:
            self._follow(event)
            if not _has_steps(event):
                bold = "bold green" if event.get("accepted") else "yellow"
                style = bold if event["event"] == "decision" else ""
                self._live.console.print(Text(format_event(event), style=style))
        # call events are frequent: redraw at most five times per second
        if not called or time.monotonic() - self._shown > 0.2:
            self._shown = time.monotonic()
            notice = f" · {sanitize_for_terminal(str(event['note']))}" if noticed else ""
            spent = f"{format_status(event, self._started, self._limits)}{notice}"
            bar = [self._bar.get_renderable()] if self._bar.tasks else []
            self._live.update(Group(*bar, Text(spent, style="dim")))

    def _follow(self, event: Mapping[str, Any]) -> None:
        """Move the bar, or remove it when its job has ended."""
        job = (event["job"], event.get("method")) if _has_steps(event) else ()
        if job != self._job:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
        if job:
            method = f"{event['method']}: " if event.get("method") else ""
            about: dict[str, Any] = {
                "description": f"{method}step {event['step']} of {event['of']}",
                "completed": event["step"],
                "note": sanitize_for_terminal(str(event["note"])),
            }
            if job == self._job:
                self._bar.update(self._bar.task_ids[0], **about)
            else:
                self._bar.add_task(total=event["of"], **about)
        self._job = job


@contextmanager
def count_display(*, quiet: bool = False) -> Iterator[Callable[[Example, Trace], None]]:
    """Yield an ``on_trace`` callback that shows the number of finished examples and their mean score."""
    scores: list[float] = []

    def count(_: Example, trace: Trace) -> None:
        scores.append(trace.score or 0.0)
        if not quiet and (sys.stderr.isatty() or len(scores) % 50 == 0):
            end = "\r" if sys.stderr.isatty() else "\n"
            print(
                f"{plural(len(scores), 'run')}, mean {sum(scores) / len(scores):.4f}",
                end=end,
                file=sys.stderr,
                flush=True,
            )

    yield count
    if not quiet and sys.stderr.isatty():
        print(file=sys.stderr)
