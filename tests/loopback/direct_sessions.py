"""Sessions whose steps take a direct connection."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray import EnvServer
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient, ResetResult, StepResult

NOTHING = [np.zeros(1, np.int64)]


@contextlib.contextmanager
def served(
    env: Any, transport: str = "shared_memory", *, step_timeout_s: float = 30.0, **options: Any
) -> Iterator[EnvClient]:
    """Yield a session whose lanes have been reset, and which has a direct connection."""
    with EnvServer(env, **options) as server, session(server, transport, step_timeout_s) as client:
        yield client


@contextlib.contextmanager
def session(
    server: EnvServer, transport: str = "shared_memory", step_timeout_s: float = 30.0
) -> Iterator[EnvClient]:
    client = EnvClient(
        ConnectOptions(server.address), step_timeout_s=step_timeout_s, transport=transport
    )
    with contextlib.closing(client):
        client.reset()
        yield client


def has_direct_connection(client: EnvClient) -> bool:
    return client.direct_connector.transport != "grpc"


def array(result: ResetResult | StepResult) -> NDArray[Any]:
    """Return the observations of all lanes."""
    return np.asarray(result.observation[0])
