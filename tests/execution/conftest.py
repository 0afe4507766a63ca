"""One small cluster for all tests of a file, and agents that follow a script."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray with two cores in this process; runs use it and leave it as it is."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.fixture
def by_value(cluster: Any) -> Iterator[None]:
    """The agents' processes cannot import the file of the scripted agents."""
    import scripted_agents

    cluster.cloudpickle.register_pickle_by_value(scripted_agents)
    yield
    cluster.cloudpickle.unregister_pickle_by_value(scripted_agents)
