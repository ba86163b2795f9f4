"""The metadata that an openpi server sends first: what the policy takes and gives, in plain values.

Servers of other projects put what they like there, so everything is optional for a client.
"""

from collections.abc import Mapping
from typing import Any

from rlmesh_ray.dialects.openpi.wire.space_maps import ACTIONS, OBSERVATION, require_keys
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.space_description import space_lines
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.wire.policy_v1 import PolicyFacts, facts_in

FULL = "full:"
"""Begins the HTTP response of a server of this package that has no place for a connection."""

_SPACES = (("observation_space", OBSERVATION), ("action_space", ACTIONS))
_FACTS = ("kind", "algorithm", "version")
_HORIZON = "action_horizon"


def metadata(facts: PolicyFacts, contract: EnvContract) -> dict[str, Any]:
    """Return the metadata of a served policy.

    Args:
        facts: Its description.
        contract: Has the spaces of its openpi clients.
    """
    return {
        _HORIZON: facts.horizon,
        "policy": {name: getattr(facts, name) for name in _FACTS},
        **{name: _plain(getattr(contract, name), root) for name, root in _SPACES},
    }


def _plain(spec: SpaceSpec, root: str) -> dict[str, dict[str, Any]]:
    return {
        key: {
            "space": space_lines(leaf.spec)[0],
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype or "text"),
        }
        for key, leaf in require_keys(spec, root).items()
    }


def horizon_of(found: Mapping[str, Any]) -> int:
    """Return the number of actions in a chunk; 0: the metadata does not say."""
    horizon = found.get(_HORIZON)
    return horizon if type(horizon) is int and horizon > 0 else 0  # True is an int


def facts_of(found: Mapping[str, Any]) -> PolicyFacts:
    """Return the description of the policy in a server's metadata; unknown facts are empty."""
    policy = found.get("policy")
    facts = {name: policy.get(name) for name in _FACTS} if isinstance(policy, dict) else {}
    spaces = {name: _lines(found.get(name)) for name, _ in _SPACES}
    return facts_in({**facts, **spaces, "horizon": horizon_of(found) or 1})


def _lines(space: object) -> list[str]:
    leaves = space.items() if isinstance(space, dict) else ()
    return [
        f"{key}: {leaf['space']}"
        for key, leaf in leaves
        if isinstance(leaf, dict) and "space" in leaf
    ]


def difference(found: Mapping[str, Any], contract: EnvContract) -> str:
    """Return why an environment does not fit a server's metadata; empty: nothing speaks against it.

    Only spaces in the form of ``metadata`` are compared, and of these the keys and the shapes.
    """
    for name, root in _SPACES:
        offered = found.get(name)
        if not isinstance(offered, dict) or not all(isinstance(v, dict) for v in offered.values()):
            continue
        own = require_keys(getattr(contract, name), root)
        if own.keys() != offered.keys():
            return f"its {name} has the keys {sorted(offered)}, the environment's {sorted(own)}"
        for key, leaf in own.items():
            shape = offered[key].get("shape")
            if isinstance(shape, list) and shape != list(leaf.shape):
                return f"{key} of its {name} has shape {shape}, the environment's {leaf.shape}"
    return ""
