"""The targets of published weights, in a form that an AlgorithmConfig can hold."""

import uuid
import weakref
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import ray

from rlmesh_ray.actors.model_fleet import NamedModelFleet
from rlmesh_ray.actors.ray_calls import get_result
from rlmesh_ray.errors import ConfigurationError, EndpointUnreachableError


@runtime_checkable
class WeightSink(Protocol):
    """A served policy whose weights can be replaced: a ``ModelFleet``, a ``ModelServer``, ..."""

    @property
    def policy_version(self) -> int:
        """Version of the current weights."""

    def set_weights(self, weights: object, version: int | None = None) -> int:
        """Replace the weights; return the version of the current ones."""


def weight_sink(target: object) -> WeightSink:
    """Return ``target`` in a form that can be copied and pickled.

    Args:
        target: A ``ModelFleet`` or its name, the handle of a ``ModelServiceActor``, or a
            ``ModelServer`` of this process.

    Raises:
        ConfigurationError: It has another type.
    """
    if isinstance(target, _ActorSink | _LocalServerSink):
        return target
    if isinstance(target, str):
        return NamedModelFleet(target)
    if isinstance(target, NamedModelFleet):
        return NamedModelFleet(target.name)
    if isinstance(target, ray.actor.ActorHandle):
        return _ActorSink(target)
    if isinstance(target, WeightSink):
        return _LocalServerSink(target)
    raise ConfigurationError(
        f"weights cannot be sent to a {type(target).__name__}: give a ModelFleet, a "
        "ModelServiceActor or a ModelServer"
    )


class _ActorSink:
    """A ModelServiceActor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @property
    def policy_version(self) -> int:
        return int(get_result(self._handle.policy_version.remote()))

    def set_weights(self, weights: object, version: int | None = None) -> int:
        return int(get_result(self._handle.set_weights.remote(weights, version)))


_LOCAL: "weakref.WeakValueDictionary[str, WeightSink]" = weakref.WeakValueDictionary()


class _LocalServerSink:
    """A ModelServer, which cannot leave its process; copies in other processes do not work."""

    def __init__(self, server: WeightSink) -> None:
        self._key = uuid.uuid4().hex
        _LOCAL[self._key] = server

    @property
    def policy_version(self) -> int:
        return self._server().policy_version

    def set_weights(self, weights: object, version: int | None = None) -> int:
        if isinstance(weights, Mapping):
            weights = {name: _value(part) for name, part in weights.items()}
        return self._server().set_weights(weights, version=version)

    def _server(self) -> WeightSink:
        server = _LOCAL.get(self._key)
        if server is None:
            raise EndpointUnreachableError(
                "the ModelServer is gone, or in another process than the Algorithm: serve with a "
                "ModelFleet instead"
            )
        return server


def _value(part: object) -> object:
    return ray.get(part) if isinstance(part, ray.ObjectRef) else part
