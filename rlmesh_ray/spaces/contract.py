"""The contract of an environment: what a handshake tells about it."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

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
