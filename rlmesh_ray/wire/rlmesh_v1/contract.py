"""Contracts to ``rlmesh.env.v1.EnvContract`` and back."""

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.leaves import leaves
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.wire._pb.rlmesh.env.v1 import contract_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import spaces_pb2
from rlmesh_ray.wire.rlmesh_v1.limits import MAX_MESSAGE_BYTES
from rlmesh_ray.wire.rlmesh_v1.meta import decode_meta, encode_meta
from rlmesh_ray.wire.rlmesh_v1.specs import spec_from_proto, spec_to_proto

_REWARD_BYTES = 8
_MODE_NUMBERS = {
    AutoresetMode.NEXT_STEP: pb.AUTORESET_MODE_NEXT_STEP,
    AutoresetMode.SAME_STEP: pb.AUTORESET_MODE_SAME_STEP,
    AutoresetMode.DISABLED: pb.AUTORESET_MODE_DISABLED,
}
_MODES = {number: mode for mode, number in _MODE_NUMBERS.items()} | {
    pb.AUTORESET_MODE_UNSPECIFIED: AutoresetMode.DISABLED
}


def contract_to_proto(contract: EnvContract) -> pb.EnvContract:
    """Return the message that tells ``contract``; odd metadata becomes text."""
    return pb.EnvContract(
        id=contract.id,
        action_space=spec_to_proto(contract.action_space),
        observation_space=spec_to_proto(contract.observation_space),
        metadata=encode_meta(contract.metadata, tag_arrays=False),
        render_mode=contract.render_mode,
        num_envs=contract.num_envs,
        autoreset_mode=_MODE_NUMBERS[contract.autoreset_mode],
    )


def contract_from_proto(message: pb.EnvContract) -> EnvContract:
    """Return the contract that ``message`` tells.

    Raises:
        CodecError: A space makes no sense, the autoreset mode is unknown, or so many lanes have
            no place in one message.
    """
    if message.autoreset_mode not in _MODES:
        raise CodecError(f"autoreset mode {message.autoreset_mode} is not known")
    contract = EnvContract(
        id=message.id,
        observation_space=_space("observation space", message.observation_space),
        action_space=_space("action space", message.action_space),
        num_envs=message.num_envs,
        autoreset_mode=_MODES[message.autoreset_mode],
        render_mode=message.render_mode,
        metadata=decode_meta(message.metadata),
    )
    for spec in (contract.observation_space, contract.action_space):
        _check_width(spec, contract.num_envs)
    return contract


def _check_width(spec: SpaceSpec, num_envs: int) -> None:
    """Refuse a width that nobody could use, before anybody makes arrays of it."""
    lane_bytes = sum(leaf.lane_bytes for leaf in leaves(spec)) + _REWARD_BYTES
    if num_envs * lane_bytes > MAX_MESSAGE_BYTES:
        raise CodecError(
            f"{num_envs} lanes of {lane_bytes} bytes do not fit into a message, which ends at "
            f"{MAX_MESSAGE_BYTES} bytes; serve fewer lanes"
        )


def _space(name: str, message: spaces_pb2.SpaceSpec) -> SpaceSpec:
    try:
        return spec_from_proto(message)
    except CodecError as error:
        raise CodecError(f"{name}: {error}") from error
