"""Live progress of a run: on a terminal, a bar below what happened; otherwise short lines.

Output always goes to stderr.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from compound.core import notebook
from compound.core.engine import NO_USAGE
from compound.core.formatting import cut, plural, width_of
from compound.core.security.sanitize import encodable, sanitize_for_terminal, underlying_stream
from compound.optimization.loop.context import must_load
from compound.optimization.method import ROLLOUTS
from compound.optimization.runs.recorder import Listener
from compound.report.rendering import render_text
from compound.report.text import wrapped

if TYPE_CHECKING:
    from rich.console import Console, Group

    from compound.core.example import Example
    from compound.evaluation.evaluate import OnTrace
    from compound.execution.executor import Executor
    from compound.execution.trace import Call, Trace
    from compound.graph.system import System

NOTEBOOK_EVENTS = 12  # lines that a notebook shows
NOTEBOOK_INTERVAL = 0.5  # minimum seconds between redraws for calls
BAR_WIDTH = 28  # columns
FREQUENT = ("call", "notice", "progress", "phase")  # events that lines and bars only sum up
PAUSE = 10.0  # seconds between such lines, at least
GROWTH = 0.5  # and as a share of the time since the phase began
LEAST_SECONDS, LEAST_SHARE = 5.0, 0.05  # of what is left, must be done before it is estimated
WINDOW = 300  # seconds of which the speed is the mean


def format_event(event: Mapping[str, Any]) -> str:
    """Format an event as text, a line for each thing that it says.

    >>> format_event({"event": "start", "mean": 0.25, "low": 0.1, "high": 0.4, "n": 40, "failed": 0})
    'validation score of the start: 0.250 [0.100, 0.400] on 40 examples'
    """
    text = render_text("event.jinja", {"event": event, "ROLLOUTS": ROLLOUTS})
    return sanitize_for_terminal("\n".join(line for line in text.split("\n") if line))


class Course:
    """The course of a run, from its events: the phase, what is done and left, and the best score.

    Args:
        limits: the limits of the budget.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self, limits: Mapping[str, Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock, self.started = clock, clock()
        self._limits = limits
        self._told: set[str] = set()
        self._phase = ""
        self._loads, self._calls = False, 0  # whether a model is loaded, and the calls before
        self._best: float | None = None
        self.note = ""
        self._spent: Mapping[str, Any] = {}
        self._total: float | None = None  # system runs, with those of the test
        self._steps = 0.0, 0.0  # those of a job that are done, and all
        self._rest: float | None = None  # system runs after the job, if it is the last one
        self._samples: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=WINDOW)

    def follow(self, event: Mapping[str, Any]) -> list[str]:
        """Take in an event, and return the lines to show: no note twice, and none if it is frequent."""
        kind = event["event"]
        self._spent = event.get("spent") or self._spent
        if kind == "phase":
            self._phase, self._total, self._rest = event["name"], event["total"], event.get("rest")
            self._best = event.get("best")
            self._loads, self.note, self._steps = bool(event.get("loads")), "", (0.0, 0.0)
            self._calls = self._spent.get("calls", 0)
        elif self._spent.get("calls", 0) > self._calls:
            self._loads = False
        if kind in ("progress", "notice"):
            self.note = " ".join(sanitize_for_terminal(str(event["note"])).split())
        if kind == "progress" and event.get("of") is not None:
            self._steps = event["step"], event["of"]
        now = self.clock()
        if not self._loads and (not self._samples or now - self._samples[-1][0] >= 1):
            self._samples.append((now, self._used()))
        if kind in FREQUENT:
            return []
        lines = format_event(event).split("\n")
        new = [line for line in lines if not (line.startswith("note: ") and line in self._told)]
        self._told |= {*lines}
        return [line for line in new if line]

    @property
    def phase(self) -> str:
        """What the run does now."""
        return "loading the model" if self._loads else self._phase

    def _used(self) -> dict[str, float]:
        """Return the amounts used so far, and the steps of the job."""
        spent = self._spent
        return {
            "system_runs": spent.get("system_runs", 0.0) + spent.get("test_runs", 0.0),
            "calls": spent.get("calls", 0),
            "tokens": spent.get("prompt_tokens", 0) + spent.get("completion_tokens", 0),
            "cost": spent.get("cost", 0.0),
            "minutes": spent.get("seconds", 0.0) / 60,
            "steps": self._steps[0],
        }

    def _ends(self) -> dict[str, float]:
        """Return the amounts at which the run ends."""
        # a part of the other limits is reserved for the test, which need not use it up
        limits = {} if self._phase == "testing" else self._limits
        _, steps = self._steps
        last = steps if self._rest is not None else None
        found = {**limits, "system_runs": self._total, "steps": last}
        return {name: limit for name, limit in found.items() if limit}

    @property
    def share(self) -> float | None:
        """The share that is done, of the steps of a job or of the whole run; ``None`` if it is unknown."""
        step, steps = self._steps
        if steps:
            return step / steps
        used = self._used()
        shares = [used[name] / limit for name, limit in self._ends().items()]
        return min(1.0, max(shares)) if shares else None

    @property
    def seconds_left(self) -> float | None:
        """The seconds until a limit is reached, at the present speed; ``None`` before it is known."""
        if not self._samples:
            return None
        began, first = self._samples[0]
        elapsed, used, found = self.clock() - began, self._used(), list[float]()
        done = {name: used[name] - first[name] for name in used}
        for name, limit in self._ends().items():
            left = max(0.0, limit - used[name])
            if elapsed >= LEAST_SECONDS and done[name] > max(0.0, LEAST_SHARE * left):
                seconds = left / done[name] * elapsed
                if name == "steps" and done["system_runs"] > 0:
                    seconds += (self._rest or 0.0) / done["system_runs"] * elapsed
                found.append(seconds)
        return min(found, default=None)

    @property
    def position(self) -> str:
        """How far the run is, in a few words."""
        (step, steps), share = self._steps, self.share
        if steps:
            return f"step {step:g} of {steps:g}"
        return "" if share is None else f"{share:.0%}"

    @property
    def summary(self) -> str:
        """The time left, and the best score so far."""
        left, parts = self.seconds_left, list[str]()
        if left is not None:
            hours, minutes = divmod(round(left / 60), 60)
            about = f"{hours} h {minutes} min" if hours else f"{minutes} min"
            parts.append(f"about {about} left" if left >= 60 else "under 1 min left")
        if self._best is not None:
            parts.append(f"best so far {self._best:.3f}")
        return " · ".join(parts)

    @property
    def spending(self) -> str:
        """What is spent so far, with the limit of system runs, and the time since the start."""
        elapsed = timedelta(seconds=round(self.clock() - self.started))
        limit = self._limits.get("system_runs")
        about = {"event": "spent", "spent": self._spent, "limit": limit, "elapsed": elapsed}
        return format_event(about)


@contextmanager
def progress_display(limits: Mapping[str, Any], *, quiet: bool = False) -> Iterator[Listener]:
    """Yield a listener that displays events within the context."""
    course = Course(limits)
    if quiet:
        yield lambda event: None
    elif notebook.in_notebook():
        with _in_notebook(course) as listener:
            yield listener
    elif sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        with _live(course) as listener:
            yield listener
    else:
        yield Lines(course).listen


class Lines:
    """Prints a line for each event, and the more rarely the longer a phase takes, how far it is."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._phase, self._began, self._next = "", 0.0, 0.0

    def listen(self, event: Mapping[str, Any]) -> None:
        """Show an event."""
        course = self._course
        lines, now = course.follow(event), course.clock()
        if event["event"] not in FREQUENT:
            self._print(*lines)
        elif course.phase != self._phase:
            self._phase, self._began, self._next = course.phase, now, now + PAUSE
            self._print(course.phase)
        elif event["event"] != "phase" and now >= self._next:
            self._next = now + max(PAUSE, GROWTH * (now - self._began))
            text = " · ".join(filter(None, [course.position, course.summary, course.note]))
            self._print(f"  {course.spending if text in ('', '0%') else text}")

    def _print(self, *lines: str) -> None:
        for line in lines:
            print(wrapped(line, width_of(sys.stderr)), file=sys.stderr, flush=True)


class Watched:
    """Tells a listener about the calls and the scores of an evaluation of a number of system runs."""

    def __init__(self, listener: Listener, total: int, on_trace: OnTrace | None) -> None:
        self._listener, self._on_trace = listener, on_trace
        self._usage, self._sum, self._runs, self._total = NO_USAGE, 0.0, 0, total

    def begin(self, executor: Executor, system: System) -> None:
        """Tell that the evaluation begins, and whether a model is loaded first."""
        loads = must_load(executor, system)
        self._tell("phase", name="evaluating", total=self._total, loads=loads)

    def _tell(self, event: str, **facts: object) -> None:
        spent = {**self._usage.to_json(), "system_runs": self._runs}
        self._listener({"event": event, "spent": spent, **facts})

    def on_call(self, call: Call) -> None:
        """Take in a finished call."""
        self._usage += NO_USAGE if call.reused else call.usage
        self._tell("call")

    def on_trace(self, example: Example, trace: Trace) -> None:
        """Take in a finished run, and pass it on."""
        self._runs, self._sum = self._runs + 1, self._sum + (trace.score or 0.0)
        note = f"mean score {self._sum / self._runs:.3f} on {plural(self._runs, 'run')}"
        self._tell("progress", note=note)
        if self._on_trace is not None:
            self._on_trace(example, trace)


@contextmanager
def _in_notebook(course: Course) -> Iterator[Listener]:
    from IPython.display import display

    cell = NotebookCell(course)
    show: Callable[..., Any] = display
    handle = show(cell, display_id=True)
    cell.redraw = handle.update
    try:
        yield cell.listen
    finally:
        cell.done = True
        handle.update(cell)


class NotebookCell:
    """Display in a notebook, redrawn in place: the last events, a bar, and the amounts spent."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._events: deque[str] = deque(maxlen=NOTEBOOK_EVENTS)
        self._drawn = float("-inf")
        self.redraw: Callable[[NotebookCell], object] = lambda cell: None
        self.done = False

    def listen(self, event: Mapping[str, Any]) -> None:
        """Show an event; frequent ones are thinned out."""
        lines, now = self._course.follow(event), self._course.clock()
        self._events.extend(lines)
        if lines or now - self._drawn > NOTEBOOK_INTERVAL:
            self._drawn = now
            self.redraw(self)

    def _repr_html_(self) -> str:
        course = self._course
        parts = [notebook.preformatted(list(self._events))] if self._events else []
        if not self.done:
            share = course.share
            bar = "" if share is None else f'<progress value="{share:.3f}" max="1"></progress> '
            texts = (course.phase, course.position, course.summary, course.note)
            about = notebook.escape(" · ".join(filter(None, texts)))
            parts.append(f"<div>{bar}{about}</div>")
        parts.append(f"<div>{notebook.escape(course.spending)}</div>")
        return notebook.block("Progress: ended" if self.done else "Progress", *parts)

    def __repr__(self) -> str:
        return "\n".join(self._events) or "starting"


@contextmanager
def _live(course: Course) -> Iterator[Listener]:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=underlying_stream(sys.stderr))
    screen = Screen(console, course)
    with Live(console=console, get_renderable=screen.render, transient=True):
        yield screen.listen


class Screen:
    """Terminal display: what happened, above a bar, the best score with the time left, and the spending."""

    def __init__(self, console: Console, course: Course) -> None:
        self._console, self._course = console, course

    def listen(self, event: Mapping[str, Any]) -> None:
        """Show an event."""
        from rich.text import Text

        for line in self._course.follow(event):
            bold = "bold green" if event.get("accepted") else "yellow"
            style = bold if event["event"] == "decision" else ""
            self._console.print(Text(encodable(line, self._console.encoding), style=style))

    def render(self) -> Group:
        """Return what stands below; it is drawn several times per second."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        course, width, encoding = self._course, self._console.width - 1, self._console.encoding

        def line(text: str, style: str = "", room: int = width) -> Text:
            shown = cut(encodable(text, encoding), room)
            return Text(encodable(shown, encoding), style, no_wrap=True)

        position, share = course.position, course.share
        phase = line(course.phase or "starting", room=width - len(position) - 1)
        head = Table.grid(padding=(0, 1))
        room = width - phase.cell_len - len(position) - 2
        bar = (
            [ProgressBar(1.0, share, width=min(BAR_WIDTH, room))]
            if share is not None and room > 3
            else []
        )
        head.add_row(phase, *bar, line(position))
        below = [line(text) for text in (course.summary, course.note) if text]
        return Group(head, *below, line(course.spending, "dim"))
