"""What both generations check of a contract that a peer told."""

from collections.abc import Callable
from typing import TypeVar

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.leaves import leaves
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.wire.rlmesh_v1.limits import MAX_MESSAGE_BYTES

MessageT = TypeVar("MessageT")

_REWARD_BYTES = 8


def named_space(name: str, read: Callable[[MessageT], SpaceSpec], message: MessageT) -> SpaceSpec:
    """Return what ``read`` makes of ``message``. Raises CodecError, with ``name``, as that does."""
    try:
        return read(message)
    except CodecError as error:
        raise CodecError(f"{name}: {error}") from error


def checked_width(contract: EnvContract) -> EnvContract:
    """Return ``contract`` if its lanes fit into a message, before anybody makes arrays of them.

    Raises:
        CodecError: They do not.
    """
    for spec in (contract.observation_space, contract.action_space):
        lane_bytes = sum(leaf.lane_bytes for leaf in leaves(spec)) + _REWARD_BYTES
        if contract.num_envs * lane_bytes > MAX_MESSAGE_BYTES:
            raise CodecError(
                f"{contract.num_envs} lanes of {lane_bytes} bytes do not fit into a message, which "
                f"ends at {MAX_MESSAGE_BYTES} bytes; serve fewer lanes"
            )
    return contract
