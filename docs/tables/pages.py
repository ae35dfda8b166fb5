"""Pages with generated tables, and the tables by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tables import (
    acceptance,
    agents,
    cluster,
    decoding,
    fleet,
    gateway,
    interchange,
    intervals,
    learner_processes,
    local_rewards,
    real_systems,
    reliability,
    serving,
    sweeps,
    systems,
    training,
    training_speed,
)
from tables.data import ROOT

PAGES = tuple(
    ROOT / "docs" / name
    for name in (
        "evidence/local_rewards.md",
        "evidence/real_systems.md",
        "evidence/training.md",
        "adr/0024-intervals-stay-in-the-range.md",
        "adr/0037-constrained-decoding.md",
        "guides/nothing_found.md",
        "guides/structured_output.md",
        "evidence/reliability.md",
        "evidence/README.md",
        "evidence/benchmarks.md",
        "evidence/acceptance.md",
        "guides/serving.md",
        "guides/imports.md",
        "guides/existing_agents.md",
        "guides/vllm.md",
        "guides/cluster.md",
        "guides/agents.md",
        "guides/weights.md",
    )
)
MODULES = (
    acceptance, agents, cluster, decoding, fleet, gateway, interchange, intervals, learner_processes,
    local_rewards, real_systems, reliability, serving, sweeps, systems, training, training_speed,
)  # fmt: skip
TABLES: Mapping[str, Callable[..., str]] = {
    table.__name__: table for module in MODULES for table in module.TABLES
}


def with_tables(page: str) -> str:
    """Return a page with all of its tables generated again."""

    def table(found: re.Match[str]) -> str:
        kind, *rest = found[1].split()
        return f"<!-- table {found[1]} -->\n{TABLES[kind](*rest)}\n<!-- end -->"

    return re.sub(r"<!-- table ([^>]*) -->\n.*?<!-- end -->", table, page, flags=re.S)


def write_pages() -> None:
    """Generate the tables of all pages again."""
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
