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
    """A cluster of three nodes on this machine with places for eight workers; this process is connected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        import ray
        from ray.cluster_utils import Cluster

        memory = 100 * 2**20
        head = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": memory}
        nodes = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            nodes.add_node(num_cpus=2, object_store_memory=memory)
        ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()
        nodes.shutdown()
