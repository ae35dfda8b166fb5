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
    layouts,
    learner_processes,
    local_rewards,
    one_gpu,
    real_systems,
    reliability,
    serving,
    sweeps,
    systems,
    training,
    training_speed,
    training_variants,
    writers,
)
from tables.data import ROOT

PAGES = tuple(
    ROOT / name
    for name in (
        "README.md",
        "docs/evidence/local_rewards.md",
        "docs/evidence/real_systems.md",
        "docs/evidence/training.md",
        "docs/adr/0004-acceptance.md",
        "docs/adr/0014-constrained-decoding.md",
        "docs/guides/nothing_found.md",
        "docs/evidence/reliability.md",
        "docs/evidence/README.md",
        "docs/evidence/benchmarks.md",
        "docs/evidence/acceptance.md",
        "docs/evidence/scale.md",
        "docs/evidence/components.md",
        "docs/guides/scale.md",
    )
)
MODULES = (
    acceptance,
    agents,
    cluster,
    decoding,
    fleet,
    gateway,
    interchange,
    intervals,
    layouts,
    learner_processes,
    local_rewards,
    one_gpu,
    real_systems,
    reliability,
    serving,
    sweeps,
    systems,
    training,
    training_speed,
    training_variants,
    writers,
)
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
