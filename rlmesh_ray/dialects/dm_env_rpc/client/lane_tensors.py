"""Tensors of one agent: the uids of leaves, reward and discount, and the requests for steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlmesh_ray.dialects.dm_env_rpc.client import frames
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.dialects.dm_env_rpc.client.tensor_space import TensorSpace
from rlmesh_ray.dialects.dm_env_rpc.wire.specs import AgentSpecs, TensorSpec, spec_to_proto
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import (
    Array,
    DataType,
    encode_tensor,
    flat_payload,
    kind_of,
    unpack_tensor,
)
from rlmesh_ray.errors import (
    CodecError,
    ConformanceError,
    RemoteProtocolError,
    UnsupportedSpaceError,
)
from rlmesh_ray.spaces.leaves import Column


@dataclass(frozen=True, slots=True)
class StepScalars:
    """Reward and discount of a step."""

    reward: float
    discount: float | None


class LaneTensors:
    """Codec of one agent's values.

    Args:
        specs: The agent's, from the answer to its join; the spaces' tensors are among them.
        actions: The action space, of all agents.
        observations: The observation space, of all agents.
        settings: Names of the reward and the discount.
        address: The server's, for messages.

    Raises:
        UnsupportedSpaceError: The reward or the discount is no number.
    """

    def __init__(
        self,
        specs: AgentSpecs,
        actions: TensorSpace,
        observations: TensorSpace,
        settings: DmEnvRpcSettings,
        address: str,
    ) -> None:
        own = with_uids(specs.actions, actions.tensors)
        self._actions = [(*one, shift) for one, shift in zip(own, actions.shifts(), strict=True)]
        self._observations = with_uids(specs.observations, observations.tensors)
        self._reward = _number(specs.observations, settings.reward, address)
        self._discount = _number(specs.observations, settings.discount, address)
        extra = [one[0] for one in (self._reward, self._discount) if one is not None]
        wanted = dict.fromkeys([uid for uid, _ in self._observations] + extra)
        self._requested = frames.observed(wanted)
        self.blind_step = frames.step_request((), self._requested)
        """The request for a step without actions, which begins a sequence."""

    def step_request(self, columns: Sequence[Column], lane: int) -> bytes:
        """Return the request for a step with the actions of a lane.

        Args:
            columns: One a leaf of the action space, over all lanes.
            lane: Index.

        Raises:
            CodecError: A text cannot be encoded.
            ConformanceError: A number is out of the range of its tensor.
        """
        return frames.step_request(
            (
                (uid, encode_tensor(_to_send(column[lane], spec, shift), spec.dtype))
                for (uid, spec, shift), column in zip(self._actions, columns, strict=True)
            ),
            self._requested,
        )

    def read(self, answer: frames.WorldResponse, rows: Sequence[Any], lane: int) -> None:
        """Write a step's observation into ``rows``.

        Args:
            answer: The step's.
            rows: One a leaf of the observation space, over all lanes: arrays, and lists of text.
            lane: Index.

        Raises:
            RemoteProtocolError: A tensor is missing, does not match its spec, or has an integer
                that its leaf's dtype does not hold.
        """
        found = answer.payload.observations
        for (uid, spec), row in zip(self._observations, rows, strict=True):
            value = tensor_of(found, uid, spec)
            if spec.dtype is DataType.STRING:
                row[lane] = value[()]
            else:
                row[lane] = cast(value, row.dtype, spec.name)

    def scalars(self, answer: frames.WorldResponse) -> StepScalars:
        """Return the reward and the discount of a step.

        Raises:
            RemoteProtocolError: A tensor is missing, or is no single number.
        """
        found = answer.payload.observations
        reward = 0.0 if self._reward is None else _value(found, *self._reward)
        discount = None if self._discount is None else _value(found, *self._discount)
        return StepScalars(reward, discount)


def tensor_of(found: Any, uid: int, spec: TensorSpec) -> Array:
    """Return a tensor out of a step's observations; it may be a read-only view.

    Args:
        found: The map of observations.
        uid: The tensor's.
        spec: The tensor's.

    Raises:
        RemoteProtocolError: It is missing, or does not match its spec.
    """
    if uid not in found:
        raise RemoteProtocolError(f"observation {spec.name!r} was asked for, and did not come")
    tensor = found[uid]
    try:
        kind = kind_of(tensor, spec.name)
        value = unpack_tensor(tensor, spec.name)
    except CodecError as error:
        raise RemoteProtocolError(f"observation {error}") from error
    if kind is not spec.dtype or value.shape != spec.shape:
        raise RemoteProtocolError(
            f"observation {spec.name!r} came as {kind.name} {list(value.shape)}; its spec says "
            f"{spec.dtype.name} {list(spec.shape)}"
        )
    return value


def cast(value: Array, dtype: np.dtype[Any], name: str) -> Array:
    """Return a tensor at its leaf's dtype, which may be narrower; a copy.

    A float beyond its range becomes infinite.

    Raises:
        RemoteProtocolError: There is an integer that ``dtype`` does not hold.
    """
    with np.errstate(over="ignore"):
        held = value.astype(dtype)
    if dtype.kind in "iu" and value.dtype != dtype and (held != value).any():
        raise RemoteProtocolError(f"observation {name!r} has an integer beyond {dtype}")
    return held


def with_uids(
    specs: Mapping[int, TensorSpec], tensors: Sequence[TensorSpec]
) -> list[tuple[int, TensorSpec]]:
    """Return ``tensors``, each with the uid that its name has in an agent's ``specs``."""
    uids = {spec.name: uid for uid, spec in specs.items()}
    return [(uids[spec.name], spec) for spec in tensors]


def same_tensors(one: AgentSpecs, other: AgentSpecs) -> bool:
    """Return whether two agents have the same tensors; their uids may differ."""
    return all(
        {spec.name: _serialized(spec) for spec in mine.values()}
        == {spec.name: _serialized(spec) for spec in theirs.values()}
        for mine, theirs in (
            (one.actions, other.actions),
            (one.observations, other.observations),
        )
    )


def _serialized(spec: TensorSpec) -> bytes:
    data: bytes = spec_to_proto(spec).SerializeToString(deterministic=True)
    return data


def _number(specs: Mapping[int, TensorSpec], name: str, address: str) -> tuple[int, str] | None:
    """Return uid and name of the observation ``name``, if there is one."""
    for uid, spec in specs.items():
        if spec.name == name:
            is_number = spec.dtype not in (DataType.STRING, DataType.PROTO)
            if not is_number or any(axis != 1 for axis in spec.shape):
                raise UnsupportedSpaceError(
                    f"{address}: the observation {name!r} is {spec.dtype.name} "
                    f"{list(spec.shape)}, but a reward or discount is a single number; name "
                    "another one, or none: DmEnvRpcSettings(reward=..., discount=...)"
                )
            return uid, name
    return None


def _value(found: Any, uid: int, name: str) -> float:
    if uid not in found:
        raise RemoteProtocolError(f"observation {name!r} was asked for, and did not come")
    try:
        flat = flat_payload(found[uid], kind_of(found[uid], name))
    except CodecError as error:
        raise RemoteProtocolError(f"observation {error}") from error
    if len(flat) != 1 or flat.dtype.kind not in "biuf":
        raise RemoteProtocolError(f"observation {name!r} is no single number")
    return float(flat[0])


def _to_send(value: Any, spec: TensorSpec, shift: Array | None) -> Any:
    if spec.dtype is DataType.STRING:
        return value
    dtype = spec.dtype.numpy
    if shift is not None:
        # The bounds of choices are never farther apart than the largest value of their dtype.
        if np.any(value < 0) or np.any(value > spec.high - shift):
            raise _out_of_range(value, spec)
        return np.asarray(np.asarray(value, dtype) + shift, dtype)
    sent = np.asarray(value, dtype)
    if dtype.kind in "biu" and sent.dtype != np.asarray(value).dtype and np.any(sent != value):
        raise _out_of_range(value, spec)
    return sent


def _out_of_range(value: Any, spec: TensorSpec) -> ConformanceError:
    return ConformanceError("dtype", spec.name, f"{value} is out of the range of {spec.dtype.name}")
