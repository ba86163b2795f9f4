"""Spaces and contracts as tables for users and as JSON for programs."""

import math

from rlmesh_ray.cli.local_ray import missing_packages
from rlmesh_ray.errors import install_command
from rlmesh_ray.protocol.capabilities import MULTI_AGENT
from rlmesh_ray.spaces.contract import EnvContract, space_lines
from rlmesh_ray.spaces.multi_agent import OBSERVATIONS, agents_from_metadata
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
    TupleSpec,
)


def space_json(spec: SpaceSpec) -> dict[str, object]:
    """Return ``spec`` as a JSON object; infinite bounds are None."""
    match spec:
        case DictSpec(items):
            return {"type": "Dict", "spaces": {key: space_json(part) for key, part in items}}
        case TupleSpec(items):
            return {"type": "Tuple", "spaces": [space_json(part) for part in items]}
        case BoxSpec(shape, dtype):
            low, high = (_bound(values.ravel().tolist()) for values in spec.bounds())
            return {"type": "Box", "shape": shape, "dtype": dtype, "low": low, "high": high}
        case DiscreteSpec(n, start, dtype):
            return {"type": "Discrete", "n": n, "start": start, "dtype": dtype}
        case MultiBinarySpec():
            return {"type": "MultiBinary", "shape": spec.shape}
        case MultiDiscreteSpec(nvec, shape, dtype):
            return {"type": "MultiDiscrete", "nvec": nvec, "shape": shape, "dtype": dtype}
        case TextSpec(shortest, longest, charset):
            lengths = {"min_length": shortest, "max_length": longest}
            return {"type": "Text", **lengths, "charset": charset}


def contract_json(contract: EnvContract) -> dict[str, object]:
    """Return a contract as a JSON object."""
    return {
        "env": contract.id,
        "num_envs": contract.num_envs,
        "autoreset_mode": contract.autoreset_mode.value,
        "render_mode": contract.render_mode or None,
        "observation_space": space_json(contract.observation_space),
        "action_space": space_json(contract.action_space),
        "metadata": dict(contract.metadata),
    }


def contract_facts(contract: EnvContract) -> dict[str, object]:
    """Return a contract as rows of a table.

    For several agents only the observations are shown, without the arrays of present agents.
    """
    agents = agents_from_metadata(contract.metadata.get(MULTI_AGENT))
    observation = contract.observation_space
    if agents and isinstance(observation, DictSpec):
        observation = dict(observation.items).get(OBSERVATIONS, observation)
    return {
        "environment": contract.id,
        **({"agents": ", ".join(map(repr, agents))} if agents else {}),
        "lanes a session": contract.num_envs,
        "autoreset": contract.autoreset_mode.option,
        "render mode": contract.render_mode or "none",
        "observation": "\n".join(space_lines(observation)),
        "action": "\n".join(space_lines(contract.action_space)),
    }


def next_commands(contract: EnvContract, address: str, options: str = "") -> list[str]:
    """Return commands for an endpoint, with ``options``; ``train`` only where it works."""
    can_train = _is_trainable(contract) and not missing_packages()
    commands = ["inspect", "train"] if can_train else ["inspect"]
    return [f"{command} {address}{options}" for command in commands]


def training_fact(contract: EnvContract, address: str, options: str = "") -> dict[str, str]:
    """Return the row about ``train``, with ``options``, where its packages are missing here."""
    missing = missing_packages() if _is_trainable(contract) else []
    if not missing:
        return {}
    elsewhere = f"from another environment: rlmesh-ray train {address}{options}"
    return {
        "to train": f"{elsewhere}\n(it needs {' and '.join(missing)}: {install_command('rllib')})"
    }


def _is_trainable(contract: EnvContract) -> bool:
    return not agents_from_metadata(contract.metadata.get(MULTI_AGENT))


def _bound(values: list[float]) -> object:
    """Return one number where all elements share it, else all of them."""
    finite = [value if math.isfinite(value) else None for value in values]
    return finite[0] if finite and len(set(finite)) == 1 else finite
