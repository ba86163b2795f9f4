"""How a lane holds several agents: the spaces of a multi-agent environment.

Its observation is a Dict of ``observations`` (a Dict by agent), and of four arrays with one
element an agent, in the order of that Dict: ``present``, ``rewards``, ``terminated`` and
``truncated``. Its action is a Dict by agent. An agent acts if it is present and has not ended;
the entries of all others are fillers, which have no meaning.
"""

import struct
from typing import Any, assert_never

import numpy as np

from rlmesh_ray.spaces.batch import unflatten
from rlmesh_ray.spaces.leaves import Leaf, leaves
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
)

OBSERVATIONS = "observations"
PRESENT = "present"
"""Which agents the observations are of."""
REWARDS = "rewards"
"""Of the last step; 0 after a reset."""
TERMINATED = "terminated"
TRUNCATED = "truncated"


def lane_observation(observations: DictSpec) -> DictSpec:
    """Return the observation space of a lane.

    Args:
        observations: The agents' own, by agent.
    """
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
    """Return a value of the space that stands where there is none, the same every time."""
    return unflatten(spec, [filler_of_leaf(leaf) for leaf in leaves(spec)])


def filler_of_leaf(leaf: Leaf) -> Any:
    """Return an array of ``leaf.shape`` and ``leaf.dtype`` within its bounds, or a string."""
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
