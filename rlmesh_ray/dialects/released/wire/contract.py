"""Contracts to ``rlmesh_wire.core.v1.EnvContract`` and back, and the part that policies see."""

from rlmesh_ray.dialects.released.wire.specs import spec_from_proto, spec_to_proto
from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.wire._pb.rlmesh_wire.core.v1 import env_contract_pb2 as pb
from rlmesh_ray.wire.rlmesh_v1.meta import decode_peer_meta, encode_meta
from rlmesh_ray.wire.validation import named_space, require_width

_MODE_NUMBERS = {
    AutoresetMode.NEXT_STEP: pb.AUTORESET_MODE_NEXT_STEP,
    AutoresetMode.SAME_STEP: pb.AUTORESET_MODE_SAME_STEP,
    AutoresetMode.DISABLED: pb.AUTORESET_MODE_DISABLED,
}
_MODES = {number: mode for mode, number in _MODE_NUMBERS.items()} | {
    pb.AUTORESET_MODE_UNSPECIFIED: AutoresetMode.DISABLED
}
_MODE_KEY = "autoreset_mode"
"""Key of the metadata where the released package's clients look for the mode, too."""


def contract_to_proto(contract: EnvContract) -> pb.EnvContract:
    """Return the message of ``contract``; metadata that are not JSON-like become text."""
    spec = env_spec_to_proto(contract)
    spec.metadata.entries[_MODE_KEY].str = contract.autoreset_mode.value
    return pb.EnvContract(
        spec=spec,
        num_envs=contract.num_envs,
        render_mode=contract.render_mode,
        autoreset_mode=_MODE_NUMBERS[contract.autoreset_mode],
    )


def contract_from_proto(message: pb.EnvContract) -> EnvContract:
    """Return the contract in ``message``.

    Raises:
        CodecError: A space makes no sense, the autoreset mode is unknown, or so many lanes have
            no place in one message.
    """
    if message.autoreset_mode not in _MODES:
        raise CodecError(f"autoreset mode {message.autoreset_mode} is not known")
    mode = _MODES[message.autoreset_mode]
    contract = _contract(message.spec, message.num_envs, mode, message.render_mode)
    return require_width(contract)


def env_spec_to_proto(contract: EnvContract) -> pb.EnvSpec:
    """Return the message of the part of ``contract`` that a policy gets."""
    return pb.EnvSpec(
        id=contract.id,
        action_space=spec_to_proto(contract.action_space),
        observation_space=spec_to_proto(contract.observation_space),
        metadata=encode_meta(contract.metadata, tag_arrays=False),
    )


def env_spec_from_proto(message: pb.EnvSpec) -> EnvContract:
    """Return the contract in ``message``, of one lane.

    Raises:
        CodecError: A space is malformed.
    """
    return require_width(_contract(message, 1, AutoresetMode.DISABLED, ""))


def _contract(
    spec: pb.EnvSpec, num_envs: int, mode: AutoresetMode, render_mode: str
) -> EnvContract:
    metadata = decode_peer_meta(spec.metadata)
    metadata.pop(_MODE_KEY, None)
    return EnvContract(
        id=spec.id,
        observation_space=named_space("observation space", spec_from_proto, spec.observation_space),
        action_space=named_space("action space", spec_from_proto, spec.action_space),
        num_envs=num_envs,
        autoreset_mode=mode,
        render_mode=render_mode,
        metadata=metadata,
    )
