"""Optional dialects of an environment endpoint, besides the edition's."""

import math
from collections.abc import Collection

from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.server.drain import Drain
from rlmesh_ray.server.enabled_dialects import DM_ENV_RPC
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.leaves import leaves
from rlmesh_ray.wire.rlmesh_v1.limits import MAX_MESSAGE_BYTES

_LONGEST_INTEGER_BYTES = 10
_REST_BYTES = 2**20  # settings, names, shapes


def max_dialect_request_bytes(contract: EnvContract) -> int:
    """Return the size that no sensible request exceeds: integers may take ten bytes each."""
    num_elements = sum(
        math.prod(leaf.shape) for leaf in leaves(contract.action_space) if leaf.dtype is not None
    )
    wanted = contract.num_envs * num_elements * _LONGEST_INTEGER_BYTES + _REST_BYTES
    return min(wanted, MAX_MESSAGE_BYTES)


def streams_per_session(dialects: Collection[str], contract: EnvContract) -> int:
    """Return how many streams a session may have: each agent of a dm_env_rpc world has its own.

    Args:
        dialects: Names of the dialects that the endpoint enables and that are installed.
        contract: What the endpoint promises.
    """
    if DM_ENV_RPC not in dialects:
        return 1
    from rlmesh_ray.dialects.dm_env_rpc.wire.agent_codecs import agent_names

    return contract.num_envs * max(1, len(agent_names(contract)))


def additional_services(
    dialects: Collection[str],
    pool: WorkerPool,
    contract: EnvContract,
    step_grace_s: float,
    drain: Drain,
    idle_timeout_s: float | None = None,
) -> list[grpc.GenericRpcHandler]:
    """Return what a gRPC server dispatches to.

    Args:
        dialects: Names of the dialects that the endpoint enables and that are installed.
        pool: Started; where environments come from.
        contract: What the endpoint promises.
        step_grace_s: See ``EnvServer``.
        drain: The endpoint's.
        idle_timeout_s: See ``EnvServer``.
    """
    if DM_ENV_RPC not in dialects:
        return []
    # Needs the extra.
    from rlmesh_ray.dialects.dm_env_rpc.server.service import EnvironmentService

    service = EnvironmentService(pool, contract, step_grace_s, drain, idle_timeout_s)
    return [service.handlers()]
