"""Spaces of a multi-agent lane: one environment with several agents, in the form of a single one.

The lane's observation is a Dict of ``observations`` (a Dict by agent) and of four arrays with one
element for each agent, in the order of that Dict: ``present``, ``rewards``, ``terminated`` and
``truncated``. Its action is a Dict by agent. An agent acts if it is present and has not ended;
the entries of all other agents are fillers without meaning.

The keys of a Dict are strings; agent ids need not be. ``agent_keys`` maps each id to its key, and
the contract's metadata (``describe_agents``) carry both, so that a client can restore the ids.
"""

import struct
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, assert_never

import numpy as np

from rlmesh_ray.spaces.batch import unflatten
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    Leaf,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
    leaves,
)

OBSERVATIONS = "observations"
PRESENT = "present"
"""Flags of the agents that have an observation."""
REWARDS = "rewards"
"""The agents' rewards of the last step; 0 after a reset."""
TERMINATED = "terminated"
TRUNCATED = "truncated"

ALL_AGENTS = "__all__"
"""RLlib's key for all agents together; no agent has this id."""
AGENT_ID_KINDS = "strings, integers of 64 bits, and tuples of these"
"""The allowed types of agent ids, for messages."""

AgentId = Hashable
"""A string, an integer of 64 bits, a bool, or a tuple of these."""

_KEYS, _IDS = "agents", "ids"
_INT64 = range(-(2**63), 2**63)
_MAX_ID_DEPTH = 8


def is_agent_id(value: object, depth: int = 0) -> bool:
    if isinstance(value, tuple):
        return depth < _MAX_ID_DEPTH and all(is_agent_id(part, depth + 1) for part in value)
    if isinstance(value, (int, np.integer)):
        return int(value) in _INT64
    return isinstance(value, (str, np.bool_)) and value != ALL_AGENTS


def agent_keys(agent_ids: Iterable[AgentId]) -> dict[AgentId, str]:
    """Return a unique key for each agent of a lane, for its Dicts and infos.

    The key of a string is the string itself; of 0 it is ``"0"``, of ``("car", 1)`` it is
    ``"car_1"``, each followed by underscores where another agent has that key already.
    """
    agent_ids = list(agent_ids)
    taken = {_text(_to_plain(each)) for each in agent_ids if isinstance(each, str)} | {ALL_AGENTS}
    keys: dict[AgentId, str] = {}
    for agent_id in agent_ids:
        key = _text(_to_plain(agent_id))
        if not isinstance(agent_id, str):
            while key in taken:
                key += "_"
            taken.add(key)
        keys[agent_id] = key
    return keys


def describe_agents(keys: Mapping[AgentId, str]) -> dict[str, Any]:
    """Return the metadata entry that describes a lane's agents, in plain values and their order."""
    metadata: dict[str, Any] = {_KEYS: list(keys.values())}
    if not all(isinstance(agent_id, str) for agent_id in keys):
        metadata[_IDS] = [_to_plain(agent_id) for agent_id in keys]
    return metadata


def agents_from_metadata(metadata: object) -> dict[AgentId, str]:
    """Return the keys by id from the entry of ``describe_agents``; empty for any other value."""
    entry = metadata if isinstance(metadata, Mapping) else {}
    keys = entry.get(_KEYS)
    plain_ids = entry.get(_IDS, keys)
    if not isinstance(keys, list) or not isinstance(plain_ids, list):
        return {}
    agent_ids = [_from_plain(value) for value in plain_ids]
    are_valid = all(map(is_agent_id, agent_ids)) and all(isinstance(key, str) for key in keys)
    if not are_valid or not len(set(keys)) == len(keys) == len(agent_ids) == len(set(agent_ids)):
        return {}
    return dict(zip(agent_ids, keys, strict=True))


def _text(plain: object) -> str:
    return "_".join(map(_text, plain)) if isinstance(plain, list) else str(plain)


def _to_plain(agent_id: Any) -> Any:
    """Return an id in plain types: subclasses, NumPy scalars and enums become their base value."""
    if isinstance(agent_id, tuple):
        return [_to_plain(part) for part in agent_id]
    if isinstance(agent_id, (bool, np.bool_)):
        return bool(agent_id)
    return str.__str__(agent_id) if isinstance(agent_id, str) else int(agent_id)


def _from_plain(value: object) -> Any:
    return tuple(map(_from_plain, value)) if isinstance(value, list) else value


def lane_observation_space(observations: DictSpec) -> DictSpec:
    num_agents = len(observations.items)
    flags = MultiBinarySpec(num_agents)
    bounds = (struct.pack("<d", -np.inf), struct.pack("<d", np.inf))
    return DictSpec(
        (
            (OBSERVATIONS, observations),
            (PRESENT, flags),
            (REWARDS, BoxSpec((num_agents,), "float64", *bounds)),
            (TERMINATED, flags),
            (TRUNCATED, flags),
        )
    )


def filler(spec: SpaceSpec) -> Any:
    return unflatten(spec, [filler_of_leaf(leaf) for leaf in leaves(spec)])


def filler_of_leaf(leaf: Leaf) -> Any:
    """Return a constant value of a leaf: an array within its bounds, or a string."""
    match leaf.spec:
        case BoxSpec():
            low, high = leaf.spec.bounds()
            zeros = np.zeros(leaf.shape, leaf.dtype)
            return np.asarray(np.minimum(np.maximum(zeros, low), high), leaf.dtype)
        case DiscreteSpec():
            return np.asarray(leaf.spec.start, leaf.dtype)
        case MultiBinarySpec() | MultiDiscreteSpec():
            return np.zeros(leaf.shape, leaf.dtype)
        case TextSpec():
            return (leaf.spec.charset[:1] or " ") * leaf.spec.min_length
    assert_never(leaf.spec)
