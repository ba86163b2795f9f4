"""Servers that the clause suite is run against."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlmesh_ray import EnvServer, ModelServer

PROBE = "rlmesh_ray.testing.probe_env:RLMeshProbe-v0"


@pytest.fixture(scope="module")
def probe() -> Iterator[EnvServer]:
    with EnvServer(PROBE, num_envs=2) as server:
        yield server


@pytest.fixture(scope="module")
def model() -> Iterator[ModelServer]:
    with ModelServer(leaning) as server:
        yield server


def zeros(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


def leaning(observations: Any) -> Any:
    """Return actions that show whose observation each one answers."""
    return (observations[:, 0] > 0).astype(np.int64)
