"""The RLlib plug-in."""

from importlib import import_module
from typing import TYPE_CHECKING

from rlmesh_ray.errors import MissingPackageError, install_command

try:
    from rlmesh_ray.rllib.config.configure import configure
    from rlmesh_ray.rllib.runner.env_runner import RLMeshEnvRunner, RLMeshMultiAgentEnvRunner
    from rlmesh_ray.rllib.training import saved_progress, tracked, train
    from rlmesh_ray.rllib.weights.publisher import WeightPublisher, publish_weights
except ModuleNotFoundError as error:
    raise MissingPackageError(
        f"rlmesh_ray.rllib needs RLlib, and {error.name} is not installed: "
        f"{install_command('rllib')}"
    ) from error

if TYPE_CHECKING:
    from rlmesh_ray.dialects.rllink.runner.env_runner import (
        RLMeshRLlinkEnvRunner,
        configure_rllink,
    )

__all__ = [
    "RLMeshEnvRunner",
    "RLMeshMultiAgentEnvRunner",
    "RLMeshRLlinkEnvRunner",
    "WeightPublisher",
    "configure",
    "configure_rllink",
    "publish_weights",
    "saved_progress",
    "tracked",
    "train",
]


# They import this package: imported with it, they would make a cycle.
_LAZY = {"RLMeshRLlinkEnvRunner", "configure_rllink"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("rlmesh_ray.dialects.rllink.runner.env_runner"), name)
