"""Environments anywhere, training and serving on Ray, one protocol between them.

The names below load on first use: a worker process that only runs an environment imports
this package and must not pay for gRPC, nor may it have gRPC's threads.
"""

import importlib
from typing import TYPE_CHECKING

from rlmesh_ray.errors import RlmeshError

if TYPE_CHECKING:
    from rlmesh_ray.auth.client_tls import ClientTls
    from rlmesh_ray.auth.ray_credentials import RayTls
    from rlmesh_ray.auth.server_tls import ServerTls
    from rlmesh_ray.auth.token_file import TokenFile
    from rlmesh_ray.client.channel import ConnectOptions
    from rlmesh_ray.client.env.observer import EndpointObserver
    from rlmesh_ray.client.env.remote_env import RemoteEnv, RemoteVectorEnv
    from rlmesh_ray.client.model.chunk_player import ChunkPlayer
    from rlmesh_ray.client.model.remote_model import ActionPlayer, RemoteModel, Slots
    from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
    from rlmesh_ray.dialects.rllink.client import LocalAgent, RemoteAgent, RLlinkClient
    from rlmesh_ray.evaluation.result import EvaluationResult
    from rlmesh_ray.evaluation.run import evaluate
    from rlmesh_ray.server.endpoint.endpoint_options import ListenOptions
    from rlmesh_ray.server.env.env_server import EnvServer
    from rlmesh_ray.server.model.model_server import ModelServer
    from rlmesh_ray.server.observe.metrics_server import serve_metrics
    from rlmesh_ray.server.observe.statistics import MeasuredEndpoint
    from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
    from rlmesh_ray.spaces.gym_conversion import from_gymnasium
    from rlmesh_ray.spaces.observation_map import ObservationMap

__version__ = "0.1.0"

_HOMES = {
    "ActionPlayer": "rlmesh_ray.client.model.remote_model",
    "AutoresetMode": "rlmesh_ray.spaces.contract",
    "ChunkPlayer": "rlmesh_ray.client.model.chunk_player",
    "ClientTls": "rlmesh_ray.auth.client_tls",
    "ConnectOptions": "rlmesh_ray.client.channel",
    "DmEnvRpcSettings": "rlmesh_ray.dialects.dm_env_rpc.client.settings",
    "EndpointObserver": "rlmesh_ray.client.env.observer",
    "EnvContract": "rlmesh_ray.spaces.contract",
    "EnvServer": "rlmesh_ray.server.env.env_server",
    "EvaluationResult": "rlmesh_ray.evaluation.result",
    "ListenOptions": "rlmesh_ray.server.endpoint.endpoint_options",
    "LocalAgent": "rlmesh_ray.dialects.rllink.client",
    "MeasuredEndpoint": "rlmesh_ray.server.observe.statistics",
    "ModelServer": "rlmesh_ray.server.model.model_server",
    "ObservationMap": "rlmesh_ray.spaces.observation_map",
    "RLlinkClient": "rlmesh_ray.dialects.rllink.client",
    "RayTls": "rlmesh_ray.auth.ray_credentials",
    "RemoteAgent": "rlmesh_ray.dialects.rllink.client",
    "RemoteEnv": "rlmesh_ray.client.env.remote_env",
    "RemoteModel": "rlmesh_ray.client.model.remote_model",
    "RemoteVectorEnv": "rlmesh_ray.client.env.remote_env",
    "ServerTls": "rlmesh_ray.auth.server_tls",
    "Slots": "rlmesh_ray.client.model.remote_model",
    "TokenFile": "rlmesh_ray.auth.token_file",
    "evaluate": "rlmesh_ray.evaluation.run",
    "from_gymnasium": "rlmesh_ray.spaces.gym_conversion",
    "serve_metrics": "rlmesh_ray.server.observe.metrics_server",
}

__all__ = [
    "ActionPlayer",
    "AutoresetMode",
    "ChunkPlayer",
    "ClientTls",
    "ConnectOptions",
    "DmEnvRpcSettings",
    "EndpointObserver",
    "EnvContract",
    "EnvServer",
    "EvaluationResult",
    "ListenOptions",
    "LocalAgent",
    "MeasuredEndpoint",
    "ModelServer",
    "ObservationMap",
    "RLlinkClient",
    "RayTls",
    "RemoteAgent",
    "RemoteEnv",
    "RemoteModel",
    "RemoteVectorEnv",
    "RlmeshError",
    "ServerTls",
    "Slots",
    "TokenFile",
    "evaluate",
    "from_gymnasium",
    "serve_metrics",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
