"""TruncateOnBadValue: the wrapper behind ``on_bad_value="truncate"``."""

import copy
import math
from typing import Any

import gymnasium
import numpy as np

from rlmesh_ray.envs.multi_agent import MultiAgentLane
from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.spaces.batch import leaves, stack
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.multi_agent import REWARDS
from rlmesh_ray.spaces.validation import Checker, ConformanceWarning, ValidationMode

BAD_VALUE_KEY = "rlmesh_ray.bad_value"
"""Key in the last info of an episode that was truncated at a bad value: the reason as text."""


class TruncateOnBadValue(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Truncates an episode at an observation that would be refused, or a reward that is not finite.

    That step returns the last good observation instead, the reward if it is finite and else 0.0,
    and the reason in its info. Two kinds of bad observations are returned unchanged: the first of
    an episode, since there is no former one, and one of a wrong shape or structure, which is a bug
    of the environment.

    Args:
        env: Environment of one lane; owned.
        validation: The endpoint's validation mode, which decides what is bad.
        lane: Lane index, for messages.

    Raises:
        UnsupportedSpaceError: A contract cannot express the observation space.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], validation: ValidationMode, lane: int) -> None:
        super().__init__(env)
        self._lane = lane
        self._step_count = 0
        self._spec = from_gymnasium(env.observation_space)
        self._checker = Checker(leaves(self._spec), validation)
        self._last_good: Any = None
        self._found: list[ConformanceWarning] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._step_count = 0
        self._found.clear()
        is_good = self._bad_observation(observation) is None
        self._last_good = copy.deepcopy(observation) if is_good else None
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step; truncate the episode at a bad value.

        Raises:
            TypeError: The reward is None, which is a bug of the environment.
        """
        observation, reward, is_terminated, is_truncated, info = self.env.step(action)
        self._step_count += 1
        if reward is None:
            raise TypeError("step() returned None as the reward; return a number")
        is_finite = math.isfinite(reward)
        found = self._bad_observation(observation)
        if found is None and not is_finite:
            agents = self.env.agents_without_reward if isinstance(self.env, MultiAgentLane) else ""
            place = f"lane 0, {agents}" if agents else "lane 0"
            found = self._warning("reward", "", f"{float(reward)} is not finite ({place})")
        if found is None:
            self._last_good = copy.deepcopy(observation)
        if found is None or self._last_good is None:
            return observation, reward, is_terminated, is_truncated, info
        self._found.append(found)
        info = {**(info or {}), BAD_VALUE_KEY: found.text}
        return self._ending(observation), reward if is_finite else 0.0, False, True, info

    def take_found(self) -> list[ConformanceWarning]:
        found, self._found = self._found, []
        return found

    def _bad_observation(self, observation: Any) -> ConformanceWarning | None:
        try:
            self._checker.check(stack(self._spec, [observation]))
        except ConformanceError as error:
            # Errors of shape and structure have no lane; those of values have one.
            is_bug = error.kind == "structure" and error.lane is None
            return None if is_bug else self._warning("observation", error.path, error.reason)
        return None

    def _warning(self, side: str, path: str, reason: str) -> ConformanceWarning:
        place = reason.replace("(lane 0", f"(lane {self._lane}")  # checked as a batch of one lane
        message = f"{place}, at step {self._step_count}: the episode was truncated"
        return ConformanceWarning(side, "truncated", path, message, self._lane)

    def _ending(self, observation: Any) -> Any:
        last = copy.deepcopy(self._last_good)
        if isinstance(self.env, MultiAgentLane):
            # The agents' rewards are part of the observation; those of this step count.
            rewards = observation[REWARDS]
            last[REWARDS] = np.where(np.isfinite(rewards), rewards, 0.0)
        return last
