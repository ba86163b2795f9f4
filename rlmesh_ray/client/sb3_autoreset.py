"""Steps with resets of ended lanes, for trainers without autoreset modes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from rlmesh_ray.client.multi_agent_errors import agents_notice
from rlmesh_ray.client.remote_vector_env import RemoteVectorEnv
from rlmesh_ray.errors import ConfigurationError, RemoteProtocolError
from rlmesh_ray.spaces.batch import flatten, leaves, unflatten
from rlmesh_ray.spaces.coercion import coerce
from rlmesh_ray.spaces.vector_infos import lane_info


@dataclass(frozen=True, slots=True)
class SameStepResult:
    """A step of all lanes, and the resets of those whose episode it has ended."""

    observations: Any
    """Batched; of lanes that have ended the first one of the next episode."""
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    infos: list[dict[str, Any]]
    """The infos of the step, by lane."""
    final_observations: dict[int, Any]
    """The last observations of lanes that have ended."""
    reset_infos: dict[int, dict[str, Any]]
    """The infos of the resets of lanes that have ended."""


def require_same_step(env: RemoteVectorEnv) -> None:
    """Make sure that ``same_step`` can reset the lanes of ``env`` one by one, where it must.

    Raises:
        ConfigurationError: It cannot, or a lane holds several agents.
    """
    if agents := agents_notice(env.contract):
        raise ConfigurationError(f"{env.address} cannot be used like this: {agents}")
    if env.autoreset_mode is not AutoresetMode.SAME_STEP and not env.resets_single_lanes:
        raise ConfigurationError(
            f"{env.address} resets all of its {env.num_envs} lanes or none, but each must be "
            "reset when its own episode ends; serve the environment with rlmesh-ray serve-env "
            "--autoreset disabled, or have the endpoint serve 1 lane"
        )


def same_step(env: RemoteVectorEnv) -> SameStepResult:
    """Wait for the step that ``env.step_async`` sent, and reset the lanes that it has ended.

    The result does not depend on the autoreset mode of the endpoint: lanes that would reset
    themselves on the next step are reset before it.

    Raises:
        RemoteProtocolError: The endpoint's mode is SAME_STEP, and it does not send the last
            observation of an episode.
        RlmeshError: As ``RemoteVectorEnv.step_wait`` and ``reset`` do.
    """
    observations, rewards, terminated, truncated, shared = env.step_wait()
    infos = [lane_info(shared, lane) for lane in range(env.num_envs)]
    has_ended = terminated | truncated
    ended = np.flatnonzero(has_ended).tolist()
    last: dict[int, Any] = {}
    firsts: dict[int, dict[str, Any]] = {}
    if ended and env.autoreset_mode is AutoresetMode.SAME_STEP:
        firsts = {lane: infos[lane] for lane in ended}
        last = {lane: _last_observation(env, firsts[lane], lane) for lane in ended}
        for lane in ended:
            infos[lane] = dict(firsts[lane].pop("final_info", {}))
    elif ended:
        last = _rows(env, observations, ended)
        observations, shared = env.reset(options={"reset_mask": has_ended})
        firsts = {lane: lane_info(shared, lane) for lane in ended}
    return SameStepResult(observations, rewards, terminated, truncated, infos, last, firsts)


def _rows(env: RemoteVectorEnv, observations: Any, lanes: Sequence[int]) -> dict[int, Any]:
    """Return the observations of ``lanes`` out of batched ones."""
    spec = env.contract.observation_space
    columns = flatten(spec, observations)
    return {lane: unflatten(spec, [column[lane] for column in columns]) for lane in lanes}


def _last_observation(env: RemoteVectorEnv, info: dict[str, Any], lane: int) -> Any:
    """Take the last observation of an episode out of the info that came with it."""
    if "final_obs" not in info:
        raise RemoteProtocolError(
            f"{env.address}: lane {lane} ended under autoreset mode SAME_STEP, but its infos hold "
            "no final_obs; host the environment with another autoreset mode"
        )
    spec = env.contract.observation_space
    parts = flatten(spec, info.pop("final_obs"))
    own = zip(leaves(spec), parts, strict=True)
    return unflatten(spec, [coerce(leaf, part, None) for leaf, part in own])
