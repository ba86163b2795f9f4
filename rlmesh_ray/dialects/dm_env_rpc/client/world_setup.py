"""Opening a session: fetch the contract, join, and choose the transport."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.dialects.dm_env_rpc.client.batched_stream import BatchedStream
from rlmesh_ray.dialects.dm_env_rpc.client.lane_streams import LaneStreams, ServerQuirks
from rlmesh_ray.dialects.dm_env_rpc.client.lane_tensors import LaneTensors, same_tensors
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.dialects.dm_env_rpc.client.world_contract import contract_of_world, fetch_contract
from rlmesh_ray.dialects.dm_env_rpc.client.world_join import ConnectRetry, JoiningAgent, WorldJoiner
from rlmesh_ray.dialects.dm_env_rpc.client.world_transport import WorldTransport
from rlmesh_ray.errors import ContractMismatchError
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract

_OWN_SEED = "seed"


@dataclass(frozen=True, slots=True)
class WorldSetup:
    """A session that has been opened."""

    joiner: WorldJoiner
    """Its agents, all joined."""
    transport: WorldTransport
    contract: EnvContract
    seed: str | None
    """The reset setting that takes a lane's seed; None: there is none."""
    is_ours: bool
    """Whether the server is one of this package's."""


def open_world(connect_options: ConnectOptions, settings: DmEnvRpcSettings) -> WorldSetup:
    """Open a session; ``joiner.leave`` ends it.

    Raises:
        RlmeshError: As ``WorldClient`` does.
    """
    retry = ConnectRetry(connect_options.timeout_s)
    published = fetch_contract(connect_options, settings, retry)
    seed = settings.seed or (_OWN_SEED if published else None)
    joiner = WorldJoiner(connect_options, settings, retry)
    joiner.enter()
    try:
        if settings.batched:
            assert published is not None, "else fetch_contract would have raised"
            contract = replace(published, autoreset_mode=AutoresetMode.NEXT_STEP, render_mode="")
            [agent] = joiner.agents
            transport: WorldTransport = BatchedStream(
                agent, contract, seed or _OWN_SEED, connect_options.address
            )
        else:
            agents, address = joiner.agents, connect_options.address
            _require_one_kind(agents, address)
            first = agents[0].joined_specs
            world = contract_of_world(first, published, settings, address)
            contract = world.contract
            tensors = [
                LaneTensors(
                    agent.joined_specs, world.actions, world.observations, settings, address
                )
                for agent in agents
            ]
            space = contract.observation_space
            is_one_vector = settings.one_world and published is not None
            quirks = ServerQuirks(settings.termination_rules, seed, begin_last=is_one_vector)
            transport = LaneStreams(agents, tensors, space, quirks, address)
    except BaseException:
        joiner.leave()
        raise
    return WorldSetup(joiner, transport, contract, seed, published is not None)


def _require_one_kind(agents: Sequence[JoiningAgent], address: str) -> None:
    first, *others = agents
    for agent in others:
        if not same_tensors(first.joined_specs, agent.joined_specs):
            raise ContractMismatchError(
                f"{address} gives lane {agent.lane} other actions or observations than lane 0; "
                "the lanes of one session are of one kind, so open a session for each kind"
            )
