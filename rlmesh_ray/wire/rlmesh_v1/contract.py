"""Conversion between EnvContract and ``rlmesh.env.v1.EnvContract``."""

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.capabilities import SPEC
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.wire._pb.rlmesh.env.v1 import contract_pb2 as pb
from rlmesh_ray.wire.rlmesh_v1.meta import decode_peer_meta, encode_meta
from rlmesh_ray.wire.rlmesh_v1.specs import spec_from_proto, spec_to_proto
from rlmesh_ray.wire.validation import named_space, require_width

_MODE_NUMBERS = {
    AutoresetMode.NEXT_STEP: pb.AUTORESET_MODE_NEXT_STEP,
    AutoresetMode.SAME_STEP: pb.AUTORESET_MODE_SAME_STEP,
    AutoresetMode.DISABLED: pb.AUTORESET_MODE_DISABLED,
}
_MODES = {number: mode for mode, number in _MODE_NUMBERS.items()} | {
    pb.AUTORESET_MODE_UNSPECIFIED: AutoresetMode.DISABLED
}


def contract_to_proto(contract: EnvContract) -> pb.EnvContract:
    """Return the message of ``contract``; metadata without a wire form become text."""
    metadata = dict(contract.metadata)
    if contract.spec:
        metadata[SPEC] = dict(contract.spec)
    return pb.EnvContract(
        id=contract.id,
        action_space=spec_to_proto(contract.action_space),
        observation_space=spec_to_proto(contract.observation_space),
        metadata=encode_meta(metadata, tag_arrays=False),
        render_mode=contract.render_mode,
        num_envs=contract.num_envs,
        autoreset_mode=_MODE_NUMBERS[contract.autoreset_mode],
    )


def contract_from_proto(message: pb.EnvContract) -> EnvContract:
    """Return the contract in ``message``.

    Raises:
        CodecError: A space is invalid, the autoreset mode is unknown, or the lanes do not fit
            into one message.
    """
    if message.autoreset_mode not in _MODES:
        raise CodecError(f"autoreset mode {message.autoreset_mode} is not known")
    metadata = decode_peer_meta(message.metadata)
    spec = metadata.pop(SPEC, {})
    return require_width(
        EnvContract(
            id=message.id,
            observation_space=named_space(
                "observation space", spec_from_proto, message.observation_space
            ),
            action_space=named_space("action space", spec_from_proto, message.action_space),
            num_envs=message.num_envs,
            autoreset_mode=_MODES[message.autoreset_mode],
            render_mode=message.render_mode,
            metadata=metadata,
            spec=spec if isinstance(spec, dict) else {},
        )
    )
