"""What one agent sends and gets each step: actions into columns, columns into responses.

What does not change from step to step (names, bounds, the bytes round a tensor) is made once. A
view says which rows of a batch are the agent's: ``column[lane]``, or all for a batched join.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import SequenceState
from rlmesh_ray.dialects.dm_env_rpc.wire.action_reader import ActionReader, ActionTensor
from rlmesh_ray.dialects.dm_env_rpc.wire.data_types import RAW_KINDS
from rlmesh_ray.dialects.dm_env_rpc.wire.tensor_specs import AgentSpecs, TensorSpec, specs_to_proto
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import Array, encode_flat, shape_field
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.messages import message
from rlmesh_ray.spaces.leaves import Column
from rlmesh_ray.wire.protobuf import varint


@message
class LaneFrame:
    """Results of all lanes after a reset or step; immutable."""

    columns: Sequence[Column]
    """Observations, one a leaf."""
    rewards: NDArray[np.float64]
    """``(num_lanes,)``; 0 after a reset."""
    terminated: NDArray[np.bool_]
    """``(num_lanes,)``"""
    truncated: NDArray[np.bool_]
    """``(num_lanes,)``"""


@dataclass(frozen=True, slots=True)
class ObservationTensor:
    """One observation of an agent."""

    spec: TensorSpec
    read: Callable[[LaneFrame], Any]
    """Its value: an array or number of any dtype that goes into ``spec.dtype``, or text."""
    is_reward: bool = False
    """Whether it is 0 in an answer without an action before it."""


class AgentTensors:
    """The codec of one agent's steps.

    Args:
        actions: Their uids count from 1.
        observations: Likewise.
    """

    def __init__(
        self, actions: Sequence[ActionTensor], observations: Sequence[ObservationTensor]
    ) -> None:
        self._actions = dict(enumerate(actions, 1))
        self._readers = {uid: ActionReader(action) for uid, action in self._actions.items()}
        self._observations = {
            uid: _ObservationEncoder(uid, tensor) for uid, tensor in enumerate(observations, 1)
        }
        self.specs: Any = specs_to_proto(
            AgentSpecs(
                {uid: action.spec for uid, action in self._actions.items()},
                {uid: tensor.spec for uid, tensor in enumerate(observations, 1)},
            )
        )
        """``pb.ActionObservationSpecs``"""

    @property
    def actions(self) -> Iterable[ActionTensor]:
        """All of them."""
        return self._actions.values()

    def check_requested(self, uids: Iterable[int]) -> None:
        """Check that there are such observations.

        Raises:
            CodecError: There is one that is not.
        """
        for uid in uids:
            if uid not in self._observations:
                raise CodecError(
                    f"there is no observation {uid}; there are {_some(self._observations)}"
                )

    def read_actions(self, tensors: Mapping[int, Any]) -> dict[int, Any]:
        """Return the values in ``tensors`` (``pb.Tensor`` by uid), by leaf.

        Raises:
            CodecError: There is no such action, or one is not what its spec says.
        """
        values = {}
        for uid, tensor in tensors.items():
            reader = self._readers.get(uid)
            if reader is None:
                raise CodecError(f"there is no action {uid}; there are {_some(self._actions)}")
            values[reader.position] = reader.read(tensor)
        return values

    def pack_step(
        self, state: SequenceState, requested: Iterable[int], frame: LaneFrame, *, is_acted: bool
    ) -> bytes:
        """Return the EnvironmentResponse to a step.

        Args:
            state: The agent's.
            requested: Uids that were checked; repeated ones are ignored.
            frame: Results of all lanes.
            is_acted: Whether an action has led to it, so that its rewards count.
        """
        parts = [b"\x08", varint(state)]  # StepResponse.state
        parts += [
            self._observations[uid].entry(frame, is_acted=is_acted)
            for uid in dict.fromkeys(requested)
        ]
        step = b"".join(parts)
        return b"\x1a%b%b" % (varint(len(step)), step)  # EnvironmentResponse.step


class _ObservationEncoder:
    """Writes one entry of ``StepResponse.observations``."""

    def __init__(self, uid: int, tensor: ObservationTensor) -> None:
        self._key = b"\x08" + varint(uid) if uid else b""
        self._spec = tensor.spec
        self._dtype = tensor.spec.dtype.numpy
        self._read = tensor.read
        self._nothing = np.zeros(tensor.spec.shape) if tensor.is_reward else None
        # The bytes round the numbers never change if the numbers have a constant size.
        self._around: tuple[bytes, bytes] | None = None
        if tensor.spec.dtype in RAW_KINDS and 0 not in tensor.spec.shape:
            zeros = np.zeros(tensor.spec.shape, self._dtype)
            tail = shape_field(tensor.spec.shape)
            whole = self._general(zeros)
            self._around = whole[: len(whole) - len(tail) - zeros.nbytes], tail

    def entry(self, frame: LaneFrame, *, is_acted: bool) -> bytes:
        is_zero = self._nothing is not None and not is_acted
        value = np.asarray(self._nothing if is_zero else self._read(frame), self._dtype)
        if self._around is None:
            return self._general(value)
        head, tail = self._around
        return b"%b%b%b" % (head, value.tobytes(), tail)

    def _general(self, value: Array) -> bytes:
        data = encode_flat(value.reshape(-1), self._spec.dtype, self._spec.shape)
        size = varint(len(data))
        inner = len(self._key) + 1 + len(size) + len(data)
        return b"\x12%b%b\x12%b%b" % (varint(inner), self._key, size, data)


def _some(uids: Iterable[int]) -> str:
    first = [str(uid) for uid in uids][:20]
    return ", ".join(first) or "none"
