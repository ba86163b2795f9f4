"""Whom a training can send its weights to, in a form that an AlgorithmConfig can carry."""

import uuid
import weakref
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import ray

from rlmesh_ray.actors.calls import answer
from rlmesh_ray.actors.named_model_fleet import NamedModelFleet
from rlmesh_ray.errors import ConfigurationError, EndpointUnreachableError


@runtime_checkable
class WeightsTarget(Protocol):
    """Acts with the weights that it is given: a ``ModelFleet``, a ``ModelServer``, ..."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that act."""

    def set_weights(self, weights: object, version: int | None = None) -> int:
        """Let new weights act; return the version that acts from now on."""


def weights_target(target: object) -> WeightsTarget:
    """Return ``target`` in a form that can be copied, and sent to other processes.

    Args:
        target: A ``ModelFleet`` or its name, the handle of a ``ModelServiceActor``, or a
            ``ModelServer`` of this process.

    Raises:
        ConfigurationError: It is something else.
    """
    if isinstance(target, _Actor | _InThisProcess):
        return target
    if isinstance(target, str):
        return NamedModelFleet(target)
    if isinstance(target, NamedModelFleet):
        return NamedModelFleet(target.name)
    if isinstance(target, ray.actor.ActorHandle):
        return _Actor(target)
    if isinstance(target, WeightsTarget):
        return _InThisProcess(target)
    raise ConfigurationError(
        f"weights cannot be sent to a {type(target).__name__}: name a ModelFleet, a "
        "ModelServiceActor or a ModelServer"
    )


class _Actor:
    """A ModelServiceActor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @property
    def policy_version(self) -> int:
        return int(answer(self._handle.policy_version.remote()))

    def set_weights(self, weights: object, version: int | None = None) -> int:
        return int(answer(self._handle.set_weights.remote(weights, version)))


_LOCAL: "weakref.WeakValueDictionary[str, WeightsTarget]" = weakref.WeakValueDictionary()


class _InThisProcess:
    """A ModelServer, which cannot leave its process; copies of this elsewhere find nothing."""

    def __init__(self, server: WeightsTarget) -> None:
        self._key = uuid.uuid4().hex
        _LOCAL[self._key] = server

    @property
    def policy_version(self) -> int:
        return self._server().policy_version

    def set_weights(self, weights: object, version: int | None = None) -> int:
        if isinstance(weights, Mapping):
            weights = {name: _value(part) for name, part in weights.items()}
        return self._server().set_weights(weights, version=version)

    def _server(self) -> WeightsTarget:
        server = _LOCAL.get(self._key)
        if server is None:
            raise EndpointUnreachableError(
                "the ModelServer is gone, or in another process than the Algorithm: serve with a "
                "ModelFleet instead"
            )
        return server


def _value(part: object) -> object:
    return ray.get(part) if isinstance(part, ray.ObjectRef) else part
