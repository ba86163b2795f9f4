"""Codecs of the agents of an environment: a lane, one of several agents of a lane, or all lanes."""

from collections.abc import Callable, Mapping
from typing import Any

from rlmesh_ray.dialects.dm_env_rpc.wire.action_reader import ActionTensor
from rlmesh_ray.dialects.dm_env_rpc.wire.agent_tensors import (
    AgentTensors,
    LaneFrame,
    ObservationTensor,
)
from rlmesh_ray.dialects.dm_env_rpc.wire.space_tensors import (
    ACTION,
    OBSERVATION,
    PRESENT,
    REWARD,
    TERMINATED,
    TRUNCATED,
    tensor_name,
    tensor_spec,
)
from rlmesh_ray.dialects.dm_env_rpc.wire.tensor_specs import TensorSpec
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import DataType
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.spaces import multi_agent
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.leaves import Leaf, Path, leaves


def agent_names(contract: EnvContract) -> tuple[str, ...]:
    """Return the names of the agents of each lane; empty: a lane is one agent.

    It is empty, too, if the environment's metadata name agents for which it has no spaces.
    """
    own: Any = contract.metadata.get(capabilities.MULTI_AGENT)
    names: Any = own.get("agents") if isinstance(own, Mapping) else None
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return ()
    observed = {leaf.path[:2] for leaf in leaves(contract.observation_space)}
    acted = {leaf.path[:1] for leaf in leaves(contract.action_space)}
    needed: set[Path] = {
        (shared,)
        for shared in (
            multi_agent.REWARDS,
            multi_agent.PRESENT,
            multi_agent.TERMINATED,
            multi_agent.TRUNCATED,
        )
    }
    needed |= {(multi_agent.OBSERVATIONS, name) for name in names}
    is_such = needed <= observed and {(name,) for name in names} <= acted
    return tuple(names) if is_such else ()


def lane_agent(contract: EnvContract, lane: int) -> AgentTensors:
    """Return the codec of the only agent of a lane."""
    observed = [
        ObservationTensor(tensor_spec(leaf, tensor_name(leaf.path, OBSERVATION)), _row(at, lane))
        for at, leaf in enumerate(leaves(contract.observation_space))
    ]
    reward = ObservationTensor(
        TensorSpec(REWARD, DataType.DOUBLE), lambda frame: frame.rewards[lane], is_reward=True
    )
    return AgentTensors(_actions(contract, ()), [*observed, reward])


def agent_among_others(contract: EnvContract, lane: int, agent: str) -> AgentTensors:
    """Return the codec of one of the agents of a lane."""
    place = agent_names(contract).index(agent)
    own_path = (multi_agent.OBSERVATIONS, agent)
    observed = []
    shared: dict[Path, int] = {}
    for at, leaf in enumerate(leaves(contract.observation_space)):
        shared[leaf.path] = at
        if leaf.path[:2] == own_path:
            name = tensor_name(leaf.path[2:], OBSERVATION)
            observed.append(ObservationTensor(tensor_spec(leaf, name), _row(at, lane)))
    rewards, present = shared[(multi_agent.REWARDS,)], shared[(multi_agent.PRESENT,)]
    reward = ObservationTensor(
        TensorSpec(REWARD, DataType.DOUBLE),
        lambda frame: frame.columns[rewards][lane][place],
        is_reward=True,
    )
    is_present = ObservationTensor(
        TensorSpec(PRESENT, DataType.BOOL), lambda frame: frame.columns[present][lane][place]
    )
    return AgentTensors(_actions(contract, (agent,)), [*observed, reward, is_present])


def all_lanes(contract: EnvContract) -> AgentTensors:
    """Return the codec of a batched join."""
    num_lanes = contract.num_envs
    observed = [
        ObservationTensor(
            tensor_spec(leaf, tensor_name(leaf.path, OBSERVATION), num_lanes), _column(at)
        )
        for at, leaf in enumerate(leaves(contract.observation_space))
    ]
    width = (num_lanes,)
    extras = [
        ObservationTensor(
            TensorSpec(REWARD, DataType.DOUBLE, width),
            lambda frame: frame.rewards,
            is_reward=True,
        ),
        ObservationTensor(
            TensorSpec(TERMINATED, DataType.BOOL, width), lambda frame: frame.terminated
        ),
        ObservationTensor(
            TensorSpec(TRUNCATED, DataType.BOOL, width), lambda frame: frame.truncated
        ),
    ]
    actions = [
        ActionTensor(tensor_spec(leaf, tensor_name(leaf.path, ACTION), num_lanes), at, leaf.dtype)
        for at, leaf in enumerate(leaves(contract.action_space))
    ]
    return AgentTensors(actions, [*observed, *extras])


def lane_ending(lane: int) -> Callable[[LaneFrame], tuple[bool, bool]]:
    """Return a function for whether a step has terminated and truncated a lane's episode."""
    return lambda frame: (bool(frame.terminated[lane]), bool(frame.truncated[lane]))


def agent_ending(
    contract: EnvContract, lane: int, agent: str
) -> Callable[[LaneFrame], tuple[bool, bool]]:
    """Return such a function for one of several agents of a lane, which may end before the lane."""
    place = agent_names(contract).index(agent)
    by_path = {leaf.path: at for at, leaf in enumerate(leaves(contract.observation_space))}
    terminated = by_path[(multi_agent.TERMINATED,)]
    truncated = by_path[(multi_agent.TRUNCATED,)]

    def ending(frame: LaneFrame) -> tuple[bool, bool]:
        columns: Any = frame.columns
        is_terminated = columns[terminated][lane][place] or frame.terminated[lane]
        return bool(is_terminated), bool(columns[truncated][lane][place] or frame.truncated[lane])

    return ending


def _actions(contract: EnvContract, own_path: Path) -> list[ActionTensor]:
    depth = len(own_path)
    return [
        ActionTensor(_action_spec(leaf, depth), at, leaf.dtype)
        for at, leaf in enumerate(leaves(contract.action_space))
        if leaf.path[:depth] == own_path
    ]


def _action_spec(leaf: Leaf, depth: int) -> TensorSpec:
    return tensor_spec(leaf, tensor_name(leaf.path[depth:], ACTION))


def _row(at: int, lane: int) -> Any:
    return lambda frame: frame.columns[at][lane]


def _column(at: int) -> Any:
    return lambda frame: frame.columns[at]
