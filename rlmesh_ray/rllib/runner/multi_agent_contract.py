"""Which agents a contract holds."""

from dataclasses import dataclass

from rlmesh_ray.errors import ContractMismatchError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.multi_agent import (
    OBSERVATIONS,
    AgentId,
    described_agents,
    lane_observation,
)
from rlmesh_ray.spaces.space_description import space_lines
from rlmesh_ray.spaces.spec import DictSpec, SpaceSpec


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """One agent of a multi-agent environment."""

    agent_id: AgentId
    """As the environment and RLlib have it."""
    key: str
    """What stands for it in the lane's spaces and infos."""
    observation: SpaceSpec
    action: SpaceSpec


def agents_of_lane(contract: EnvContract) -> tuple[AgentSpec, ...]:
    """Return the agents of a lane, in the order of its arrays.

    Args:
        contract: Of an endpoint that says in its metadata that a lane holds several agents.

    Raises:
        ContractMismatchError: Its metadata and spaces do not fit together as
            ``spaces.multi_agent`` says.
    """
    keys = described_agents(contract.metadata.get(capabilities.MULTI_AGENT))
    space, actions = contract.observation_space, contract.action_space
    parts = dict(space.items) if isinstance(space, DictSpec) else {}
    observations = parts.get(OBSERVATIONS)
    if (
        not keys
        or not isinstance(observations, DictSpec)
        or not isinstance(actions, DictSpec)
        or not _keys(observations) == _keys(actions) == list(keys.values())
        or space != lane_observation(observations)
    ):
        raise ContractMismatchError(
            f"{contract.id} is said to have the agents {list(keys)}, but its observation space "
            f"({', '.join(space_lines(space))}) and its action space "
            f"({', '.join(space_lines(actions))}) are not those of a lane that holds these agents; "
            "serve it with this package's EnvServer, or as that does"
        )
    return tuple(
        AgentSpec(agent_id, key, observation, action)
        for (agent_id, key), (_, observation), (_, action) in zip(
            keys.items(), observations.items, actions.items, strict=True
        )
    )


def _keys(spec: DictSpec) -> list[str]:
    return [key for key, _ in spec.items]
