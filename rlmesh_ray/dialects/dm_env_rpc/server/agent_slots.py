"""Slots for the agents of a world, with the tensors that the agent in each sends and receives."""

from dataclasses import dataclass

from rlmesh_ray.dialects.dm_env_rpc.wire.agent_tensors import (
    AgentTensors,
    agent_among_others,
    agent_names,
    all_lanes,
    lane_agent,
)
from rlmesh_ray.spaces.contract import EnvContract

Row = int | slice
"""The rows of a column that belong to a slot."""


@dataclass(frozen=True, slots=True)
class AgentSlot:
    """A slot for one agent; every world of an endpoint has the same slots."""

    number: int
    row: Row
    lane: int
    agent: str
    """Empty if the lane has one agent."""
    tensors: AgentTensors

    @property
    def is_batched(self) -> bool:
        """Whether its agent drives all lanes."""
        return isinstance(self.row, slice)


def agent_slots(contract: EnvContract) -> tuple[AgentSlot, ...]:
    """Return a slot for each lane, or for each agent of each lane."""
    agents = agent_names(contract)
    slots: list[AgentSlot] = []
    for lane in range(contract.num_envs):
        if not agents:
            slots.append(AgentSlot(len(slots), lane, lane, "", lane_agent(contract, lane)))
        for agent in agents:
            tensors = agent_among_others(contract, lane, agent)
            slots.append(AgentSlot(len(slots), lane, lane, agent, tensors))
    return tuple(slots)


def batched_slot(contract: EnvContract) -> AgentSlot:
    """Return the slot of an agent that drives all lanes."""
    return AgentSlot(0, slice(None), 0, "", all_lanes(contract))
