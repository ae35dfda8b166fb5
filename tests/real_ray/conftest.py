"""A real Ray cluster on this machine for the tests of this folder.

Not part of the normal run: ``make test-ray`` sets REAL_RAY. Without it nothing here is collected.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

collect_ignore_glob = [] if os.environ.get("REAL_RAY") else ["*"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cluster with places for eight workers, which this process is connected to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        import ray

        ray.init(
            address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
            object_store_memory=100 * 2**20,
        )  # fmt: skip
        yield
        ray.shutdown()
