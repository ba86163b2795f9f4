"""Error texts about lanes of several agents, for clients that know one."""

from collections.abc import Iterable

from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.protocol.capabilities import MULTI_AGENT
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.multi_agent import agents_from_metadata

_MOST_NAMES = 8
_REMEDY = (
    "use RLlib's multi-agent runner: rlmesh_ray.rllib.configure(config, ADDRESS), with policies "
    "and their mapping in config.multi_agent(...); docs/how_to/several_agents.md says what takes "
    "several agents"
)


def agents_notice(contract: EnvContract) -> str:
    """Return that a lane holds several agents, and which, as a sentence; empty: it holds one."""
    agents = agents_from_metadata(contract.metadata.get(MULTI_AGENT))
    if not agents:
        return ""
    return f"each lane of {contract.id} holds several agents ({_listed(agents)}); {_REMEDY}"


def _listed(values: Iterable[object]) -> str:
    names = [repr(one) for one in values]
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown


def action_error(error: ConformanceError, contract: EnvContract) -> ConformanceError:
    """Return the error as one about an action, which names the agents that act, if there are any.

    Args:
        error: About an action of a whole lane.
        contract: Of the endpoint.
    """
    agents = agents_notice(contract)
    if not agents:
        return error.about("action")
    keys = _listed(agents_from_metadata(contract.metadata.get(MULTI_AGENT)).values())
    reason = (
        f"{error.reason}; the action of a lane is a dict with an entry for each agent, under the "
        f"keys {keys}: {agents}"
    )
    return ConformanceError(error.kind, error.path, reason, error.lane, "action")
