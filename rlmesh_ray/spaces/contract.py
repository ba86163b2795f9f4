"""The contract of an environment: what a handshake tells about it."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlmesh_ray.errors import ContractMismatchError
from rlmesh_ray.spaces.spec import SpaceSpec


class AutoresetMode(enum.Enum):
    """What happens in a lane whose episode has ended (names as gymnasium has them)."""

    NEXT_STEP = "NextStep"
    """The next Step ignores the lane's action and returns the first observation."""
    SAME_STEP = "SameStep"
    """The ending Step already returns the first observation; the last one is in the infos."""
    DISABLED = "Disabled"
    """Nothing, until a Reset."""


@dataclass(frozen=True, slots=True)
class EnvContract:
    """What the environment behind an endpoint is; fixed for the life of a session."""

    id: str
    observation_space: SpaceSpec
    """Of one lane."""
    action_space: SpaceSpec
    """Of one lane."""
    num_envs: int
    autoreset_mode: AutoresetMode
    render_mode: str = ""
    """As gymnasium has it; empty for none."""
    metadata: Mapping[str, object] = field(default_factory=dict)


def require_same_contract(expected: EnvContract, found: EnvContract, address: str) -> None:
    """Compare what RLlib relies on: width, autoreset mode and spaces.

    Raises:
        ContractMismatchError: Something differs; the message names it and both sides.
    """
    for name in ("num_envs", "autoreset_mode", "observation_space", "action_space"):
        ours, theirs = getattr(expected, name), getattr(found, name)
        if ours != theirs:
            raise ContractMismatchError(
                f"{address} serves {found.id} with {name} = {theirs}, but {expected.id} with "
                f"{ours} is expected; all endpoints of one algorithm must serve the same "
                "environment at the same width"
            )
