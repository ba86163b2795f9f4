"""Environments anywhere, training and serving on Ray, one protocol between them.

The names below load on first use: a worker process that only runs an environment imports
this package and must not pay for gRPC, nor may it have gRPC's threads.
"""

import importlib
from typing import TYPE_CHECKING

from rlmesh_ray.errors import RlmeshError

if TYPE_CHECKING:
    from rlmesh_ray.auth.token_file import TokenFile
    from rlmesh_ray.client.remote_env import RemoteEnv
    from rlmesh_ray.client.remote_model import RemoteModel, Slots
    from rlmesh_ray.client.remote_vector_env import RemoteVectorEnv
    from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
    from rlmesh_ray.evaluation import EvaluationResult, evaluate
    from rlmesh_ray.server.env_server import EnvServer
    from rlmesh_ray.server.model_server import ModelServer

__version__ = "0.1.0"

_HOMES = {
    "DmEnvRpcSettings": "rlmesh_ray.dialects.dm_env_rpc.client.settings",
    "EnvServer": "rlmesh_ray.server.env_server",
    "EvaluationResult": "rlmesh_ray.evaluation",
    "ModelServer": "rlmesh_ray.server.model_server",
    "RemoteEnv": "rlmesh_ray.client.remote_env",
    "RemoteModel": "rlmesh_ray.client.remote_model",
    "RemoteVectorEnv": "rlmesh_ray.client.remote_vector_env",
    "Slots": "rlmesh_ray.client.remote_model",
    "TokenFile": "rlmesh_ray.auth.token_file",
    "evaluate": "rlmesh_ray.evaluation",
}

__all__ = [
    "DmEnvRpcSettings",
    "EnvServer",
    "EvaluationResult",
    "ModelServer",
    "RemoteEnv",
    "RemoteModel",
    "RemoteVectorEnv",
    "RlmeshError",
    "Slots",
    "TokenFile",
    "evaluate",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
