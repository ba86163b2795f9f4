"""The steps of one agent: its actions and observations, and the state of its sequence.

An agent is a lane, or all lanes of a world of this package's servers (the join setting
``batched``): then every tensor has one more axis, in front, ``terminated`` and ``truncated`` are
flags by lane, the state of the sequence is always RUNNING, lanes reset themselves as in the
autoreset mode NEXT_STEP, and a reset with the setting ``lanes`` resets only those.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlmesh_ray.dialects.dm_env_rpc.client import frames
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.dialects.dm_env_rpc.client.tensor_space import BATCH_FLAGS, TensorSpace
from rlmesh_ray.dialects.dm_env_rpc.client.world_join import JoiningAgent
from rlmesh_ray.dialects.dm_env_rpc.protocol import SequenceState
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import (
    AgentSpecs,
    Array,
    DataType,
    TensorSpec,
    encode_flat,
    flat_payload,
    kind_of,
    unpack_tensor,
)
from rlmesh_ray.errors import (
    CodecError,
    ConformanceError,
    ContractMismatchError,
    RemoteEnvError,
    RemoteProtocolError,
    UnsupportedSpaceError,
)
from rlmesh_ray.spaces.spec import Column


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
    """Return a tensor at its leaf's dtype, which may be narrower.

    A float beyond its range becomes infinite.

    Raises:
        RemoteProtocolError: There is an integer that ``dtype`` does not hold.
    """
    if value.dtype == dtype:
        return value
    with np.errstate(over="ignore"):
        held = value.astype(dtype)
    if dtype.kind in "iu" and (held != value).any():
        raise RemoteProtocolError(f"observation {name!r} has an integer beyond {dtype}")
    return held


def with_uids(
    specs: Mapping[int, TensorSpec], tensors: Sequence[TensorSpec]
) -> list[tuple[int, TensorSpec]]:
    uids = {spec.name: uid for uid, spec in specs.items()}
    return [(uids[spec.name], spec) for spec in tensors]


def _number(specs: Mapping[int, TensorSpec], name: str, address: str) -> tuple[int, str] | None:
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


def _to_send(value: Any, spec: TensorSpec, shift: Array | None) -> Array:
    if spec.dtype is DataType.STRING:
        return np.asarray(value, object)
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


class LaneState:
    """The state of a lane's sequence, and gymnasium's flags from it.

    Rule 1: A step from a state that is not RUNNING begins the next sequence and ignores the action.
    That is the autoreset mode NEXT_STEP: such a step has no reward and ends nothing.
    Rule 2: The answer to such a step must be RUNNING, since a sequence has at least one step.
    Rule 3: A step from RUNNING to TERMINATED terminates the episode, one to INTERRUPTED truncates
    it.
    Rule 4: TERMINATED with a discount above 0 is a truncation, too, as in dm_env. Servers that have
    no truncations send TERMINATED at time limits, which the settings identify.

    Args:
        lane: Index, for messages.
        settings: When TERMINATED is a truncation.
    """

    def __init__(self, lane: int, settings: DmEnvRpcSettings) -> None:
        self._lane = lane
        self._settings = settings
        self._state = SequenceState.TERMINATED
        self._num_steps = 0

    @property
    def is_running(self) -> bool:
        return self._state is SequenceState.RUNNING

    def reset(self) -> None:
        if self.is_running:
            self._state = SequenceState.INTERRUPTED

    def step(self, state: int, reward: float, discount: float | None) -> tuple[float, bool, bool]:
        """Return reward, terminated and truncated of a step.

        Args:
            state: The state's number on the wire.
            reward: The server's; ignored if the step begins a sequence.
            discount: The server's; None: it sends none.

        Raises:
            RemoteProtocolError: There is no such state, or it must not follow the last one.
        """
        before = self._state
        try:
            now = SequenceState(state)
        except ValueError:
            raise RemoteProtocolError(
                f"lane {self._lane} answered a step with the state {state}, which dm_env_rpc does "
                "not have"
            ) from None
        if before is SequenceState.RUNNING:
            self._state = now
            self._num_steps += 1
            is_cut = now is SequenceState.INTERRUPTED
            if now is SequenceState.TERMINATED:
                is_cut = self._is_truncation(discount)
            return reward, now is SequenceState.TERMINATED and not is_cut, is_cut
        if now is not SequenceState.RUNNING:
            raise RemoteProtocolError(
                f"lane {self._lane} went from {before.name} to {now.name}: a sequence must begin "
                "with RUNNING, and have a step at least"
            )
        self._state, self._num_steps = now, 0
        return 0.0, False, False

    def _is_truncation(self, discount: float | None) -> bool:
        settings = self._settings
        if settings.truncate_on_terminated or (discount is not None and discount > 0.0):
            return True
        limit = settings.time_limit_steps
        return limit is not None and self._num_steps >= limit


class LaneAgent:
    """An agent in its world: its requests for steps, their answers, and its sequence.

    Args:
        joined: The agent, which has joined.
        specs: Its own, from the answer to its join; the spaces' tensors are among them.
        actions: The action space, of all agents.
        observations: The observation space, of all agents.
        settings: Names of the reward and the discount, and whether the agent is all lanes.
        address: The server's, for messages.

    Raises:
        UnsupportedSpaceError: The reward or the discount is no number.
    """

    def __init__(
        self,
        joined: JoiningAgent,
        specs: AgentSpecs,
        actions: TensorSpace,
        observations: TensorSpace,
        settings: DmEnvRpcSettings,
        address: str,
    ) -> None:
        self.joined = joined
        self.stream = joined.open_stream
        self.row: int | slice = slice(None) if settings.batched else joined.lane
        """Its lanes."""
        self._state = None if settings.batched else LaneState(joined.lane, settings)
        """None: it is all lanes, and its sequence always runs."""
        self.held: list[bytes] = []
        """Requests to send once the steps of the other lanes have been answered."""
        self.answer: Any = None
        """The ``pb.StepResponse`` to its latest step; None: there is none yet."""
        own = with_uids(specs.actions, actions.tensors)
        self._actions = [(*one, shift) for one, shift in zip(own, actions.shifts(), strict=True)]
        self._observations = with_uids(specs.observations, observations.tensors)
        self._reward = self._discount = None
        self._flags: list[tuple[int, TensorSpec]] = []
        if settings.batched:
            by_name = {spec.name: (uid, spec) for uid, spec in specs.observations.items()}
            self._flags = [by_name[name] for name in BATCH_FLAGS]
        else:
            self._reward = _number(specs.observations, settings.reward, address)
            self._discount = _number(specs.observations, settings.discount, address)
        extra = [one[0] for one in (self._reward, self._discount, *self._flags) if one is not None]
        wanted = dict.fromkeys([uid for uid, _ in self._observations] + extra)
        self._requested = frames.observed(wanted)
        self.blind_step = frames.step_request((), self._requested)
        """The request for a step without actions, which begins a sequence."""

    @property
    def is_running(self) -> bool:
        return self._state is None or self._state.is_running

    def end_sequence(self) -> None:
        if self._state is not None:
            self._state.reset()

    def receive(self, kind: str, end_s: float) -> Any:
        """Wait for the answer to the oldest request; errors name the lane."""
        where = "" if self._state is None else f"lane {self.joined.lane}: "
        try:
            return self.stream.receive(kind, end_s)
        except RemoteEnvError as error:
            raise RemoteEnvError(
                error.code, f"{where}{error.message}", True, error.debug_info
            ) from error
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{where}{error.message}") from error

    def receive_step(self, end_s: float) -> tuple[Any, Any, Any]:
        """Wait for the answer to a step; return reward, terminated and truncated, or columns."""
        self.answer = self.receive("step", end_s).step
        return self.outcome()

    def step_request(self, columns: Sequence[Column]) -> bytes:
        """Return the request for a step.

        Args:
            columns: One a leaf of the action space, over all lanes.

        Raises:
            CodecError: A text cannot be encoded.
            ConformanceError: A number is out of the range of its tensor.
        """
        actions = []
        for (uid, spec, shift), column in zip(self._actions, columns, strict=True):
            value = _to_send(column[self.row], spec, shift)
            actions.append((uid, encode_flat(value.ravel(), spec.dtype, value.shape)))
        return frames.step_request(actions, self._requested)

    def show(self, rows: Sequence[Any]) -> None:
        """Write its latest observation into ``rows``.

        Args:
            rows: One a leaf of the observation space, over all lanes: arrays, and lists of text.

        Raises:
            RemoteProtocolError: A tensor is missing, does not match its spec, or has an integer
                that its leaf's dtype does not hold.
        """
        for (uid, spec), column in zip(self._observations, rows, strict=True):
            value = tensor_of(self.answer.observations, uid, spec)
            if spec.dtype is DataType.STRING:
                column[self.row] = value[()]
            else:
                column[self.row] = cast(value, column.dtype, spec.name)

    def outcome(self) -> tuple[Any, Any, Any]:
        """Return reward, terminated and truncated of its latest step; of a batch, by lane.

        Raises:
            RemoteProtocolError: A tensor is missing or does not match its spec, a reward is no
                single number, or the state must not follow the last one.
        """
        answer, found = self.answer, self.answer.observations
        if self._state is not None:
            reward = 0.0 if self._reward is None else _value(found, *self._reward)
            discount = None if self._discount is None else _value(found, *self._discount)
            return self._state.step(answer.state, reward, discount)
        if answer.state != SequenceState.RUNNING:
            raise RemoteProtocolError(
                f"a batch of lanes answered a step with the state {answer.state}; it is "
                f"{SequenceState.RUNNING.value} (RUNNING) as long as the batch lasts"
            )
        rewards, terminated, truncated = [tensor_of(found, *flag) for flag in self._flags]
        return rewards, terminated, truncated


def require_unchanged(joined: Any, now: Any, address: str, lane: int) -> None:
    """Compare the specs after a reset with those after the join.

    Args:
        joined: The ``pb.ActionObservationSpecs`` after the join.
        now: Those after the reset; empty: the server does not repeat them.
        address: The server's, for the message.
        lane: The agent's, for the message.

    Raises:
        ContractMismatchError: They differ, in a tensor or in a uid.
    """
    if now == joined or not (now.actions or now.observations):
        return
    # NaN in bounds does not equal itself.
    if now.SerializeToString(deterministic=True) == joined.SerializeToString(deterministic=True):
        return
    raise ContractMismatchError(
        f"{address} has changed the actions or observations of lane {lane} with its reset: "
        f"{_difference(joined, now)}; spaces are fixed while a session lasts, so reset with "
        "settings that leave them alone, or join with other ones in a new session"
    )


def _difference(joined: Any, now: Any) -> str:
    for domain, old, new in (
        ("actions", joined.actions, now.actions),
        ("observations", joined.observations, now.observations),
    ):
        for uid in sorted({*old, *new}):
            if uid not in new:
                return f"{old[uid].name!r} is gone from its {domain}"
            if uid not in old:
                return f"{new[uid].name!r} is new among its {domain}"
            if old[uid] != new[uid]:
                return f"{new[uid].name!r} is another one among its {domain}"
    return "its specs differ"
