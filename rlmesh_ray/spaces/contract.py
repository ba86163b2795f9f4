"""The contract of an environment: what a handshake tells about it."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlmesh_ray.errors import ContractMismatchError
from rlmesh_ray.spaces.space_description import describe_difference
from rlmesh_ray.spaces.spec import DictSpec, SpaceSpec


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
        ContractMismatchError: Something differs; the message names what differs, on both sides.
    """
    differences = [
        f"{name} = {theirs} where {ours} is expected"
        for name, ours, theirs in (
            ("num_envs", expected.num_envs, found.num_envs),
            ("autoreset_mode", expected.autoreset_mode.value, found.autoreset_mode.value),
        )
        if ours != theirs
    ]
    if spaces := space_difference(expected, found):
        differences.append(spaces)
    if differences:
        raise ContractMismatchError(
            f"{address} serves {found.id} otherwise than {expected.id} is served elsewhere: "
            f"{'; '.join(differences)}; all endpoints of one algorithm must serve the same "
            "environment at the same width"
        )


def space_difference(expected: EnvContract, found: EnvContract) -> str:
    """Return where the spaces of two contracts differ; empty where they are equal."""
    ours, theirs = (
        DictSpec(
            (
                ("observation_space", contract.observation_space),
                ("action_space", contract.action_space),
            )
        )
        for contract in (expected, found)
    )
    return describe_difference(ours, theirs)
