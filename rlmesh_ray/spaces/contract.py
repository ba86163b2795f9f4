"""EnvContract: the description of an environment that its endpoint sends in the handshake."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlmesh_ray.errors import ContractMismatchError
from rlmesh_ray.spaces.space_description import describe_difference
from rlmesh_ray.spaces.spec import DictSpec, SpaceSpec


class AutoresetMode(enum.Enum):
    """When a lane whose episode has ended starts the next one; gymnasium's names and values."""

    NEXT_STEP = "NextStep"
    """The next Step ignores the lane's action and returns the first observation."""
    SAME_STEP = "SameStep"
    """The ending Step already returns the first observation; the last one is in the infos."""
    DISABLED = "Disabled"
    """The lane starts no episode before the next Reset."""

    @property
    def option(self) -> str:
        """The mode as options spell it, such as ``next_step``; texts for people do, too."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class EnvContract:
    """Id, spaces, width and modes of an environment; constant during a session."""

    id: str
    """The name that the environment was given as ``module:factory``, or its id in Gymnasium."""
    observation_space: SpaceSpec
    """Observation space of one lane."""
    action_space: SpaceSpec
    """Action space of one lane."""
    num_envs: int
    """Number of lanes."""
    autoreset_mode: AutoresetMode
    render_mode: str = ""
    """Gymnasium's render mode; empty for None."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    spec: Mapping[str, object] = field(default_factory=dict)
    """Fields of gymnasium's EnvSpec of the environment, by name; empty where none are known."""


def require_same_contract(expected: EnvContract, found: EnvContract, address: str) -> None:
    """Require that two contracts agree in width, autoreset mode and spaces, as RLlib needs it.

    Raises:
        ContractMismatchError: They differ; the message names the differences, with both values.
    """
    differences = [
        f"{name} = {other} where {own} is expected"
        for name, own, other in (
            ("num_envs", expected.num_envs, found.num_envs),
            ("autoreset_mode", expected.autoreset_mode.option, found.autoreset_mode.option),
        )
        if own != other
    ]
    if spaces := space_difference(expected, found):
        differences.append(spaces)
    if differences:
        raise ContractMismatchError(
            f"{address} serves {found.id} with another contract than {expected.id} elsewhere: "
            f"{'; '.join(differences)}; all endpoints of one algorithm must serve the same "
            "environment at the same width"
        )


def space_difference(expected: EnvContract, found: EnvContract) -> str:
    """Return the differences of the spaces of two contracts; empty where they are equal."""
    own, other = (
        DictSpec(
            (
                ("observation_space", contract.observation_space),
                ("action_space", contract.action_space),
            )
        )
        for contract in (expected, found)
    )
    return describe_difference(own, other)
