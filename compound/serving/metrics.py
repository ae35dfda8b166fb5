"""Prometheus metrics of a server, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from starlette.types import Scope

from compound.execution.trace import Call

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PLAIN = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts of requests, runs, calls, tokens, cost, reloads and feedback.

    Attributes:
        paths: paths that requests are counted by.
    """

    def __init__(self) -> None:
        self.paths: frozenset[str] = frozenset()
        self.registry = CollectorRegistry()
        registry = self.registry
        self._requests = Counter(
            "compound_http_requests", "Answers by route and status.", ["route", "status"], registry=registry
        )
        self._runs = Histogram(
            "compound_run_seconds", "Duration of runs, without their wait.", ["outcome"], buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self._waits = Histogram(
            "compound_wait_seconds", "Wait of runs for a place.", buckets=SECONDS, registry=registry
        )
        self._calls = Counter(
            "compound_calls", "Calls by component and outcome.", ["component", "outcome"], registry=registry
        )
        self._tokens = Counter("compound_tokens", "Tokens by kind.", ["kind"], registry=registry)
        self._cost = Counter("compound_cost_dollars", "Known cost in US dollars.", registry=registry)
        self._feedback = Counter("compound_feedback", "Feedback by kind.", ["kind"], registry=registry)
        self._reloads = Counter(
            "compound_reloads",
            "Readings of the configuration file by outcome.",
            ["outcome"],
            registry=registry,
        )
        self._lost = Counter("compound_unrecorded_runs", "Runs that could not be written.", registry=registry)
        self._running = Gauge("compound_runs_executing", "Runs that execute.", registry=registry)
        self._waiting = Gauge("compound_runs_waiting", "Runs that wait for a place.", registry=registry)
        self._configuration = Gauge(
            "compound_configuration_info", "The configuration in use.", ["digest"], registry=registry
        )

    def watch(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Read the numbers of runs when the metrics are collected."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)

    def answered(self, scope: Scope, status: int) -> None:
        """Count an answer; requests to unknown paths share one label."""
        path = scope["path"]
        self._requests.labels(path if path in self.paths else "other", str(status)).inc()

    def ran(self, seconds: float, waited: float, outcome: str) -> None:
        """Count a run."""
        self._runs.labels(outcome).observe(seconds)
        self._waits.observe(waited)

    def called(self, call: Call) -> None:
        """Count a finished call and its usage, also of a run that times out."""
        self._calls.labels(call.component, call.failure.kind if call.failure else "ok").inc()
        if call.reused:
            return
        self._tokens.labels("prompt").inc(call.usage.prompt_tokens)
        self._tokens.labels("completion").inc(call.usage.completion_tokens)
        self._cost.inc(call.usage.cost)

    def reloaded(self, succeeded: bool) -> None:
        """Count a reading of the configuration file."""
        self._reloads.labels("used" if succeeded else "rejected").inc()

    def deployed(self, digest: str) -> None:
        """Show the configuration in use."""
        self._configuration.clear()
        self._configuration.labels(digest).set(1)

    def rated(self, kind: str) -> None:
        """Count feedback."""
        self._feedback.labels(kind).inc()

    def lost(self, runs: int) -> None:
        """Count runs that could not be written."""
        self._lost.inc(runs)

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics in the format that is asked for, and its content type."""
        if "application/openmetrics-text" in accept:
            return generate_openmetrics(self.registry), OPENMETRICS  # type: ignore[no-untyped-call]
        return generate_latest(self.registry), PLAIN
