"""What simulators report over ModelService beside their observations.

The edition's Predict carries observations alone. So a simulator's observation here is a Dict:
what the policy sees, the reward of the action before, and whether that has ended the episode.
"""

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from rlmesh_ray.dialects.rllink.runner.sample_validation import SampleSpaces
from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.errors import (
    CodecError,
    ConformanceError,
    ContractMismatchError,
    UnsupportedSpaceError,
)
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import to_gymnasium
from rlmesh_ray.spaces.spec import BoxSpec, DictSpec, DiscreteSpec, MultiBinarySpec, SpaceSpec

_OBSERVATION, _REWARD = "observation", "reward"
_ENDS = ("terminated", "truncated")
_PARTS = (_OBSERVATION, _REWARD, *_ENDS)
_MOST_LANES = 1024
"""Of a route: they are answered together."""


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """One entry a row."""

    obs: m.Array
    rewards: m.Array
    terminated: m.Array
    truncated: m.Array


class StepReportReader:
    """Checks what simulators are, and reads what they send.

    Args:
        spaces: Of the samples.
    """

    def __init__(self, spaces: SampleSpaces) -> None:
        self._spaces = spaces

    def check_contract(self, contract: EnvContract) -> None:
        """Say whether a simulator reports what is needed, and takes what is chosen.

        Raises:
            ContractMismatchError: It does not.
        """
        reason = self._misfit(contract.observation_space)
        if not reason and not _is_same(contract.action_space, self._spaces.action):
            reason = f"its actions must be {self._spaces.action}"
        if not reason and contract.num_envs > _MOST_LANES:
            reason = f"a route may have {_MOST_LANES} lanes; open several"
        if not reason and contract.autoreset_mode is AutoresetMode.SAME_STEP:
            reason = "with autoreset in the same step, episodes lack their last observations"
        if reason:
            raise ContractMismatchError(f"{contract.id} cannot be learnt from here: {reason}")

    def report(self, observations: Any, num_rows: int) -> StepReport:
        """Return what rows report.

        Args:
            observations: Of a contract that was checked.
            num_rows: How many.

        Raises:
            CodecError: There is a value that is not in its space.
        """
        rewards = np.array(observations[_REWARD], np.float64).reshape(num_rows)
        if not np.isfinite(rewards).all():
            raise CodecError("there is a reward that is not a finite number")
        try:
            # A copy, so that the steps that are kept do not hold the requests.
            obs = self._spaces.conformed_obs(np.array(observations[_OBSERVATION]), num_rows)
        except ConformanceError as error:
            raise CodecError(f"an observation does not fit its space: {error}") from error
        ends = [np.asarray(observations[name]).reshape(num_rows) != 0 for name in _ENDS]
        return StepReport(obs, rewards, *ends)

    def _misfit(self, space: SpaceSpec) -> str:
        """Return what is wrong with an observation space; empty if nothing is."""
        parts = dict(space.items) if isinstance(space, DictSpec) else {}
        if parts.keys() != set(_PARTS):
            return f"its observations must be a Dict of {', '.join(map(repr, _PARTS))}"
        observation, wanted = parts[_OBSERVATION], self._spaces.observation
        if not isinstance(observation, BoxSpec) or observation.shape != wanted.shape:
            return f"its {_OBSERVATION!r} must be a Box of shape {wanted.shape}"
        reward = parts[_REWARD]
        if not isinstance(reward, BoxSpec) or np.prod(reward.shape) != 1:
            return f"its {_REWARD!r} must be a Box of one number"
        wrong = [name for name in _ENDS if not _is_flag(parts[name])]
        return f"its {wrong[0]!r} must be a Discrete(2) or a MultiBinary(1)" if wrong else ""


def _is_flag(spec: SpaceSpec) -> bool:
    if isinstance(spec, MultiBinarySpec):
        return bool(np.prod(spec.shape) == 1)
    return isinstance(spec, DiscreteSpec) and (spec.n, spec.start) == (2, 0)


def _is_same(spec: SpaceSpec, space: gymnasium.Space[Any]) -> bool:
    try:
        return bool(to_gymnasium(spec) == space)
    except UnsupportedSpaceError:
        return False
