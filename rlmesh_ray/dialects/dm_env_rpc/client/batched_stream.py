"""All lanes of a world of this package's servers on one stream: one message a vector step.

The join setting ``batched`` requests it. Every tensor has one more axis, in front; ``terminated``
and ``truncated`` are flags by lane, and the state of the sequence is always RUNNING. Lanes reset
themselves as in the autoreset mode NEXT_STEP; a reset with the setting ``lanes`` resets only those.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlmesh_ray.dialects.dm_env_rpc.client import frames
from rlmesh_ray.dialects.dm_env_rpc.client.frames import RequestKind, WorldResponse
from rlmesh_ray.dialects.dm_env_rpc.client.lane_tensors import cast, tensor_of, with_uids
from rlmesh_ray.dialects.dm_env_rpc.client.settings import Settings
from rlmesh_ray.dialects.dm_env_rpc.client.tensor_space import exact_space
from rlmesh_ray.dialects.dm_env_rpc.client.world_join import JoiningAgent
from rlmesh_ray.dialects.dm_env_rpc.client.world_transport import VectorStep, require_unchanged
from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import SequenceState
from rlmesh_ray.dialects.dm_env_rpc.wire import specs as names
from rlmesh_ray.dialects.dm_env_rpc.wire.specs import TensorSpec
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import Array, DataType, encode_tensor
from rlmesh_ray.errors import HandshakeRefusedError, RemoteEnvError, RemoteProtocolError
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.leaves import Column, leaves
from rlmesh_ray.spaces.spec import SpaceSpec

_FLAGS = (names.REWARD, names.TERMINATED, names.TRUNCATED)


class BatchedStream:
    """The one stream; see the module.

    Args:
        agent: Joined, ``batched``.
        contract: The world's.
        seed: The reset setting that takes seeds.
        address: The server's, for messages.

    Raises:
        HandshakeRefusedError: The agent's specs are no batch of the contract's spaces.
    """

    def __init__(self, agent: JoiningAgent, contract: EnvContract, seed: str, address: str) -> None:
        self._agent = agent
        self._seed = seed
        self._address = address
        self._width = contract.num_envs
        self._leaves = leaves(contract.observation_space)
        specs = agent.joined_specs
        self._actions = _tensors(specs.actions, contract.action_space, names.ACTION, contract)
        self._observations = _tensors(
            specs.observations, contract.observation_space, names.OBSERVATION, contract
        )
        own = {spec.name: (uid, spec) for uid, spec in specs.observations.items()}
        if self._width < 1 or any(
            name not in own or not _is_flag(own[name][1], self._width) for name in _FLAGS
        ):
            raise _no_batch(contract)
        self._flags = [own[name] for name in _FLAGS]
        wanted = [uid for uid, _ in (*self._observations, *self._flags)]
        self._requested = frames.observed(wanted)

    def send_reset(self, lanes: Sequence[int], seeds: Sequence[int], settings: Settings) -> None:
        """Begin new sequences in ``lanes``; see ``WorldTransport``."""
        own: dict[str, Any] = dict(settings)
        if len(lanes) < self._width:
            own["lanes"] = list(lanes)
        if seeds:
            own[self._seed] = list(seeds)
        self._agent.open_stream.send(frames.reset_request(own))
        self._agent.open_stream.send(frames.step_request((), self._requested))

    def receive_reset(self, end_s: float) -> list[Column]:
        """Return all lanes' observations after a reset; see ``WorldTransport``."""
        stream = self._agent.open_stream
        failure: RemoteEnvError | None = None
        try:
            specs = stream.receive(RequestKind.RESET, end_s).payload.specs
            require_unchanged(self._agent.specs_message, specs, self._address, 0)
        except RemoteEnvError as error:
            failure = error
        try:
            answer = stream.receive(RequestKind.STEP, end_s)
        except RemoteEnvError as error:
            raise failure or error from None
        if failure is not None:
            raise failure
        return self._observation(answer)

    def send_step(self, actions: Sequence[Column]) -> None:
        """Apply one action a lane, without waiting."""
        tensors = [
            (uid, encode_tensor(_whole(column, spec), spec.dtype))
            for (uid, spec), column in zip(self._actions, actions, strict=True)
        ]
        self._agent.open_stream.send(frames.step_request(tensors, self._requested))

    def receive_step(self, end_s: float) -> VectorStep:
        """Return the result of a step; see ``WorldTransport``."""
        answer = self._agent.open_stream.receive(RequestKind.STEP, end_s)
        found = answer.payload.observations
        rewards, terminated, truncated = [tensor_of(found, *flag) for flag in self._flags]
        return VectorStep(
            self._observation(answer),
            rewards.astype(np.float64),
            terminated.astype(np.bool_),
            truncated.astype(np.bool_),
        )

    def _observation(self, answer: WorldResponse) -> list[Column]:
        if answer.payload.state != SequenceState.RUNNING:
            raise RemoteProtocolError(
                f"a batch of lanes answered a step with the state {answer.payload.state}; it is "
                f"{SequenceState.RUNNING.value} (RUNNING) as long as the batch lasts"
            )
        found = answer.payload.observations
        columns: list[Column] = []
        for leaf, (uid, spec) in zip(self._leaves, self._observations, strict=True):
            value = tensor_of(found, uid, spec)
            # Own, writable memory: callers keep it.
            dtype = leaf.dtype
            columns.append(tuple(value) if dtype is None else cast(value, dtype, spec.name))
        return columns


def _tensors(
    specs: Mapping[int, TensorSpec], space: SpaceSpec, root: str, contract: EnvContract
) -> list[tuple[int, TensorSpec]]:
    exact = exact_space(space, tuple(specs.values()), root, contract.num_envs)
    if exact is None:
        raise _no_batch(contract)
    return with_uids(specs, exact.tensors)


def _is_flag(spec: TensorSpec, width: int) -> bool:
    """Return whether a tensor can be a reward or a flag: one number a lane."""
    is_number = spec.dtype not in (DataType.INVALID, DataType.STRING, DataType.PROTO)
    return is_number and spec.shape == (width,)


def _no_batch(contract: EnvContract) -> HandshakeRefusedError:
    return HandshakeRefusedError(
        "the server's specs for a batch of lanes do not fit its contract, "
        f"{contract.id} over {contract.num_envs} lanes; join without batched=True"
    )


def _whole(column: Column, spec: TensorSpec) -> Array:
    dtype = object if spec.dtype is DataType.STRING else spec.dtype.numpy
    return np.asarray(column, dtype)
