"""Lanes that hold several agents, explained to clients that know one."""

from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.protocol.capabilities import MULTI_AGENT
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.multi_agent import described_agents

_MOST_NAMES = 8
_REMEDY = (
    "use RLlib's multi-agent runner: rlmesh_ray.rllib.configure(config, ADDRESS), with policies "
    "and their mapping in config.multi_agent(...)"
)


def named_agents(contract: EnvContract) -> str:
    """Return that a lane holds several agents, and which, as a sentence; empty: it holds one."""
    agents = [repr(one) for one in described_agents(contract.metadata.get(MULTI_AGENT))]
    if not agents:
        return ""
    names = ", ".join(agents[:_MOST_NAMES])
    if len(agents) > _MOST_NAMES:
        names += f" and {len(agents) - _MOST_NAMES} more"
    return f"each lane of {contract.id} holds several agents ({names}); {_REMEDY}"


def naming_agents(error: ConformanceError, contract: EnvContract) -> ConformanceError:
    """Return the error about an action, with the agents whose actions are wanted, if there are any.

    Args:
        error: About an action of a whole lane.
        contract: Of the endpoint.
    """
    agents = named_agents(contract)
    if not agents:
        return error
    reason = f"{error.reason}; the action of a lane has an entry for each agent: {agents}"
    return ConformanceError(error.kind, error.path, reason, error.lane)
