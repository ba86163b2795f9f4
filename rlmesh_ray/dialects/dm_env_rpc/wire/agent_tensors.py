"""What an agent sends and gets each step: actions into columns, columns into responses.

What does not change from step to step (names, bounds, the bytes round a tensor) is made once. The
agent of a slot is a lane, one of several agents of a lane, or all lanes (a batched join); which
rows of a batch are its own is in the functions ``read`` and ``ending``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.dialects.dm_env_rpc.protocol import SequenceState
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import (
    ACTION,
    OBSERVATION,
    PRESENT,
    RAW_KINDS,
    REWARD,
    TERMINATED,
    TRUNCATED,
    AgentSpecs,
    Array,
    DataType,
    TensorSpec,
    encode_flat,
    flat_payload,
    kind_of,
    shape_field,
    shaped,
    specs_to_proto,
    tensor_name,
    tensor_spec,
)
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.messages import message
from rlmesh_ray.spaces import multi_agent
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import Column, Path, leaves
from rlmesh_ray.wire.protobuf import varint

# A single one of these is a Python number in the message.
_NUMBERS = set(DataType) - {
    DataType.INVALID,
    DataType.INT8,
    DataType.UINT8,
    DataType.STRING,
    DataType.PROTO,
}


class ActionTensor:
    """One action of an agent.

    Args:
        spec: Its tensor's.
        position: Index of its leaf in the action space.
        dtype: The leaf's; None for text.
        filler: Its default, for an agent that does not send it.
    """

    def __init__(
        self, spec: TensorSpec, position: int, dtype: np.dtype[Any] | None, filler: Any
    ) -> None:
        self.spec = spec
        self.position = position
        self.dtype = dtype
        self.filler = filler
        self._name = f"action {spec.name!r}"
        self._field = spec.dtype.field
        self._is_number = not spec.shape and spec.dtype in _NUMBERS and spec.dtype.numpy == dtype
        self._is_uniform = not any(
            bound is not None and bound.ndim for bound in (spec.low, spec.high)
        )
        self._low: Any = -np.inf
        self._high: Any = np.inf
        if self._is_uniform:
            self._low = -np.inf if spec.low is None else spec.low.item()
            self._high = np.inf if spec.high is None else spec.high.item()

    def read(self, tensor: Any) -> Any:
        """Return the value in a ``pb.Tensor``, at the leaf's dtype.

        Returns:
            An array of the spec's shape, perhaps read-only; a number, or text.

        Raises:
            CodecError: It has another dtype or shape, or an element out of its bounds.
        """
        if self._is_number and not tensor.shape and tensor.WhichOneof("payload") == self._field:
            elements = getattr(tensor, self._field).array
            # One of them is out of range, or NaN.
            if len(elements) == 1 and self._low <= elements[0] <= self._high:
                return elements[0]
        return self._read(tensor)

    def _read(self, tensor: Any) -> Any:
        spec, name = self.spec, self._name
        kind = kind_of(tensor, name)
        if kind is not spec.dtype:
            raise CodecError(f"{name} is {kind.name}, expected {spec.dtype.name}")
        flat = flat_payload(tensor, kind)
        value = shaped(flat, tensor.shape, name)
        if value.shape != spec.shape:
            raise CodecError(f"{name} has shape {list(value.shape)}, expected {list(spec.shape)}")
        if kind is DataType.STRING:
            return value if spec.shape else flat[0]
        self._check_range(flat)
        if flat.dtype != self.dtype:
            with np.errstate(over="ignore"):  # a narrowing may lose precision
                value = value.astype(self.dtype)
        return value

    def _check_range(self, flat: Array) -> None:
        if not flat.size:
            return
        least, greatest = np.minimum.reduce(flat), np.maximum.reduce(flat)
        # NaN is outside of every interval.
        if self._low <= least and greatest <= self._high and self._is_uniform:
            return
        if least != least:
            raise CodecError(f"{self._name} holds NaN")
        self._check_elements(flat, self.spec.low, np.less, "below")
        self._check_elements(flat, self.spec.high, np.greater, "above")

    def _check_elements(self, flat: Array, bound: Array | None, is_outside: Any, word: str) -> None:
        if bound is None:
            return
        limits = bound.reshape(-1)
        outside = is_outside(flat, limits)
        if not np.count_nonzero(outside):
            return
        at = int(outside.argmax())
        value, limit = flat[at % len(flat)], limits[at % len(limits)]
        shape = self.spec.shape
        where = f" (element {list(map(int, np.unravel_index(at, shape)))})" if shape else ""
        raise CodecError(f"{self._name}: {value} is {word} {limit}{where}")


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


class ObservationTensor:
    """One observation of an agent.

    Args:
        spec: Its tensor's.
        read: Returns its value out of the results of a step: an array or number of any dtype that
            goes into ``spec.dtype``, or text.
        is_reward: Whether it is 0 in an answer without an action before it.
    """

    def __init__(
        self, spec: TensorSpec, read: Callable[[LaneFrame], Any], *, is_reward: bool = False
    ) -> None:
        self.spec = spec
        self._dtype = spec.dtype.numpy
        self._read = read
        self._nothing = np.zeros(spec.shape) if is_reward else None
        self._is_constant = spec.dtype in RAW_KINDS and 0 not in spec.shape
        self._around: tuple[bytes, bytes] | None = None

    def entry(self, uid: int, frame: LaneFrame, *, is_acted: bool) -> bytes:
        """Return its entry of ``StepResponse.observations``; it always has the same ``uid``."""
        is_zero = self._nothing is not None and not is_acted
        value = np.asarray(self._nothing if is_zero else self._read(frame), self._dtype)
        if self._around is not None:
            head, tail = self._around
            return b"%b%b%b" % (head, value.tobytes(), tail)
        tensor = encode_flat(value.reshape(-1), self.spec.dtype, self.spec.shape)
        start = b"\x08%b\x12%b" % (varint(uid), varint(len(tensor)))
        entry = b"\x12%b%b%b" % (varint(len(start) + len(tensor)), start, tensor)
        if self._is_constant:
            # The bytes round the numbers never change, since all of them have the same size.
            tail = shape_field(self.spec.shape)
            self._around = entry[: len(entry) - len(tail) - value.nbytes], tail
        return entry


Ending = Callable[[LaneFrame], tuple[bool, bool]]
"""Returns whether a step has terminated and truncated the episode of an agent."""


class AgentSlot:
    """A slot for one agent, and the codec of its steps; all worlds of an endpoint have the same.

    Args:
        number: Index among the slots of a world.
        row: Its rows of a column: a lane's, or all, whose agent has joined batched.
        agent: The agent's name; empty if the lane has one agent.
        actions: Their uids count from 1.
        observations: Likewise.
        ending: The agent's.
    """

    def __init__(
        self,
        number: int,
        row: int | slice,
        agent: str,
        actions: Sequence[ActionTensor],
        observations: Sequence[ObservationTensor],
        ending: Ending,
    ) -> None:
        self.number = number
        self.row = row
        self.agent = agent
        self.is_batched = isinstance(row, slice)
        """Whether its agent drives all lanes."""
        self.lane = row if isinstance(row, int) else 0
        self._actions = dict(enumerate(actions, 1))
        self._observations = dict(enumerate(observations, 1))
        self._ending = ending
        self.specs: Any = specs_to_proto(
            AgentSpecs(
                {uid: action.spec for uid, action in self._actions.items()},
                {uid: tensor.spec for uid, tensor in self._observations.items()},
            )
        )
        """``pb.ActionObservationSpecs``"""
        self.fillers: Mapping[int, Any] = {each.position: each.filler for each in actions}
        """Defaults of the actions, by leaf."""

    @property
    def actions(self) -> Iterable[ActionTensor]:
        return self._actions.values()

    def state(self, frame: LaneFrame) -> SequenceState:
        is_terminated, is_truncated = self._ending(frame)
        if is_terminated:
            return SequenceState.TERMINATED
        return SequenceState.INTERRUPTED if is_truncated else SequenceState.RUNNING

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
            action = self._actions.get(uid)
            if action is None:
                raise CodecError(f"there is no action {uid}; there are {_some(self._actions)}")
            values[action.position] = action.read(tensor)
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
            self._observations[uid].entry(uid, frame, is_acted=is_acted)
            for uid in dict.fromkeys(requested)
        ]
        step = b"".join(parts)
        return b"\x1a%b%b" % (varint(len(step)), step)  # EnvironmentResponse.step


def _some(uids: Iterable[int]) -> str:
    first = [str(uid) for uid in uids][:20]
    return ", ".join(first) or "none"


def agent_names(contract: EnvContract) -> tuple[str, ...]:
    """Return the names of the agents of each lane; empty: a lane is one agent.

    It is empty, too, if the environment's metadata name agents for which it has no spaces.
    """
    own: Any = contract.metadata.get(capabilities.MULTI_AGENT)
    names: Any = own.get("agents") if isinstance(own, Mapping) else None
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return ()
    observed = {leaf.path[:2] for leaf in leaves(contract.observation_space)}
    acted = {leaf.path[:1] for leaf in leaves(contract.action_space)}
    needed: set[Path] = {
        (shared,)
        for shared in (
            multi_agent.REWARDS,
            multi_agent.PRESENT,
            multi_agent.TERMINATED,
            multi_agent.TRUNCATED,
        )
    }
    needed |= {(multi_agent.OBSERVATIONS, name) for name in names}
    is_such = needed <= observed and {(name,) for name in names} <= acted
    return tuple(names) if is_such else ()


def lane_agent(contract: EnvContract, lane: int) -> AgentSlot:
    def ending(frame: LaneFrame) -> tuple[bool, bool]:
        return bool(frame.terminated[lane]), bool(frame.truncated[lane])

    reward = _extra(REWARD, DataType.DOUBLE, lambda frame: frame.rewards[lane])
    observed = [*_observed(contract, (), lane), reward]
    return AgentSlot(lane, lane, "", _actions(contract, ()), observed, ending)


def agent_among_others(contract: EnvContract, lane: int, agent: str) -> AgentSlot:
    names = agent_names(contract)
    place = names.index(agent)
    shared = {leaf.path: at for at, leaf in enumerate(leaves(contract.observation_space))}
    rewards, present = shared[(multi_agent.REWARDS,)], shared[(multi_agent.PRESENT,)]
    terminated, truncated = shared[(multi_agent.TERMINATED,)], shared[(multi_agent.TRUNCATED,)]

    def ending(frame: LaneFrame) -> tuple[bool, bool]:
        # The agent may end before its lane.
        columns: Any = frame.columns
        is_terminated = columns[terminated][lane][place] or frame.terminated[lane]
        return bool(is_terminated), bool(columns[truncated][lane][place] or frame.truncated[lane])

    observed = [
        *_observed(contract, (multi_agent.OBSERVATIONS, agent), lane),
        _extra(REWARD, DataType.DOUBLE, lambda frame: frame.columns[rewards][lane][place]),
        _extra(PRESENT, DataType.BOOL, lambda frame: frame.columns[present][lane][place]),
    ]
    number = lane * len(names) + place
    return AgentSlot(number, lane, agent, _actions(contract, (agent,)), observed, ending)


def all_lanes(contract: EnvContract) -> AgentSlot:
    """Return the slot of a batched join, whose sequence never ends by itself."""
    width = contract.num_envs
    observed = [
        *_observed(contract, (), slice(None), width),
        _extra(REWARD, DataType.DOUBLE, lambda frame: frame.rewards, (width,)),
        _extra(TERMINATED, DataType.BOOL, lambda frame: frame.terminated, (width,)),
        _extra(TRUNCATED, DataType.BOOL, lambda frame: frame.truncated, (width,)),
    ]
    actions = _actions(contract, (), width)
    return AgentSlot(0, slice(None), "", actions, observed, lambda _: (False, False))


def _actions(contract: EnvContract, own: Path, width: int | None = None) -> list[ActionTensor]:
    actions = []
    for at, leaf in enumerate(leaves(contract.action_space)):
        if leaf.path[: len(own)] == own:
            spec = tensor_spec(leaf, tensor_name(leaf.path[len(own) :], ACTION), width)
            filler = multi_agent.filler_of_leaf(leaf)
            if leaf.dtype is None and width is not None:
                filler = [filler] * width
            actions.append(ActionTensor(spec, at, leaf.dtype, filler))
    return actions


def _observed(
    contract: EnvContract, own: Path, row: int | slice, width: int | None = None
) -> list[ObservationTensor]:
    return [
        ObservationTensor(
            tensor_spec(leaf, tensor_name(leaf.path[len(own) :], OBSERVATION), width),
            _cell(at, row),
        )
        for at, leaf in enumerate(leaves(contract.observation_space))
        if leaf.path[: len(own)] == own
    ]


def _cell(at: int, row: int | slice) -> Callable[[LaneFrame], Any]:
    return lambda frame: frame.columns[at][row]


def _extra(
    name: str, kind: DataType, read: Callable[[Any], Any], shape: tuple[int, ...] = ()
) -> ObservationTensor:
    return ObservationTensor(TensorSpec(name, kind, shape), read, is_reward=name == REWARD)


def agent_slots(contract: EnvContract) -> tuple[AgentSlot, ...]:
    names = agent_names(contract)
    lanes = range(contract.num_envs)
    if not names:
        return tuple(lane_agent(contract, lane) for lane in lanes)
    return tuple(agent_among_others(contract, lane, name) for lane in lanes for name in names)
