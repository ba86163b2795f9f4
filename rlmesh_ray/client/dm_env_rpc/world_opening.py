"""Opening a session: ask for the contract, join, and find out how values travel."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlmesh_ray.client.channel import Dial
from rlmesh_ray.client.dm_env_rpc.batched_stream import BatchedStream
from rlmesh_ray.client.dm_env_rpc.joining import Agent, Joining
from rlmesh_ray.client.dm_env_rpc.lane_streams import LaneStreams, Manners
from rlmesh_ray.client.dm_env_rpc.lane_tensors import LaneTensors, same_tensors
from rlmesh_ray.client.dm_env_rpc.settings import DmEnvRpcSettings
from rlmesh_ray.client.dm_env_rpc.tries import Tries
from rlmesh_ray.client.dm_env_rpc.vector_step import Carrier
from rlmesh_ray.client.dm_env_rpc.world_contract import ask_contract, world_of
from rlmesh_ray.errors import ContractMismatchError
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract

_OWN_SEED = "seed"


@dataclass(frozen=True, slots=True)
class OpenWorld:
    """A session that has been opened."""

    joining: Joining
    """Its agents, all of them in."""
    carrier: Carrier
    contract: EnvContract
    seed: str | None
    """The reset setting that takes a lane's seed; None: there is none."""
    is_ours: bool
    """Whether the server is one of this package's."""


def open_world(dial: Dial, settings: DmEnvRpcSettings) -> OpenWorld:
    """Open a session; ``joining.leave`` ends it.

    Raises:
        RlmeshError: As ``WorldClient`` does.
    """
    tries = Tries(dial.timeout_s)
    published = ask_contract(dial, settings, tries)
    seed = settings.seed or (_OWN_SEED if published else None)
    joining = Joining(dial, settings, tries)
    joining.enter()
    try:
        if settings.batched:
            assert published is not None, "else nobody would have joined"
            contract = replace(published, autoreset_mode=AutoresetMode.NEXT_STEP, render_mode="")
            [agent] = joining.agents
            carrier: Carrier = BatchedStream(agent, contract, seed or _OWN_SEED, dial.address)
        else:
            agents, address = joining.agents, dial.address
            _require_one_kind(agents, address)
            first = agents[0].joined_specs
            world = world_of(first, published, settings, address)
            contract = world.contract
            tensors = [
                LaneTensors(
                    agent.joined_specs, world.actions, world.observations, settings, address
                )
                for agent in agents
            ]
            space = contract.observation_space
            is_one_vector = settings.one_world and published is not None
            manners = Manners(settings.end_rules, seed, begin_last=is_one_vector)
            carrier = LaneStreams(agents, tensors, space, manners, address)
    except BaseException:
        joining.leave()
        raise
    return OpenWorld(joining, carrier, contract, seed, published is not None)


def _require_one_kind(agents: Sequence[Agent], address: str) -> None:
    first, *others = agents
    for agent in others:
        if not same_tensors(first.joined_specs, agent.joined_specs):
            raise ContractMismatchError(
                f"{address} gives lane {agent.lane} other actions or observations than lane 0; "
                "the lanes of one session are of one kind, so open a session for each kind"
            )
