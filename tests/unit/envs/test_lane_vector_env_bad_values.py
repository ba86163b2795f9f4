"""Episodes that end at a value which would be refused."""

import os
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import SyncVectorEnv

from rlmesh_ray.envs.commands import ResetCommand, StepCommand, StepReply
from rlmesh_ray.envs.env_source import build, make_source
from rlmesh_ray.envs.lane_vector_env import BAD_VALUE_KEY, TruncateOnBadValue
from rlmesh_ray.envs.vector_host import VectorHost
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.spaces.validation import WARNING_KEY, ValidationMode
from rlmesh_ray.spaces.vector_infos import lane_info
from rlmesh_ray.testing.envs import Fault, FaultyEnv
from rlmesh_ray.transport.step_buffers import StepBuffers, create_step_buffers


def truncating(
    fault: Fault, at_step: int = 2, validation: ValidationMode = ValidationMode.WARN
) -> TruncateOnBadValue:
    return TruncateOnBadValue(FaultyEnv(fault, at_step), validation, lane=5)


def test_an_episode_ends_truncated_with_its_last_good_observation() -> None:
    env = truncating(Fault.NAN)
    env.reset()
    env.step(np.int64(0))

    observation, reward, terminated, truncated, info = env.step(np.int64(0))

    assert observation.tolist() == [np.float32(0.01)]
    assert (reward, terminated, truncated) == (1.0, False, True)
    cause = "observation: is NaN (lane 5, element (0,)), at step 2: the episode was truncated"
    assert info[BAD_VALUE_KEY] == cause
    assert [warning.text for warning in env.take_found()] == [cause]
    assert env.take_found() == []


@pytest.mark.parametrize(
    ("fault", "text"), [(Fault.NAN_REWARD, "nan"), (Fault.INFINITE_REWARD, "-inf")]
)
def test_a_reward_that_is_not_finite_ends_the_episode_with_none(fault: Fault, text: str) -> None:
    env = truncating(fault)
    env.reset()
    env.step(np.int64(0))

    observation, reward, terminated, truncated, info = env.step(np.int64(0))

    assert observation.tolist() == [np.float32(0.01)]
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert info[BAD_VALUE_KEY].startswith(f"reward: {text} is not finite (lane 5), at step 2")


def test_what_is_bad_follows_the_validation_of_the_endpoint() -> None:
    for validation, is_truncated in (
        (ValidationMode.WARN, False),
        (ValidationMode.STRICT, True),
        (ValidationMode.OFF, False),
    ):
        env = truncating(Fault.OUT_OF_RANGE, validation=validation)
        env.reset()
        env.step(np.int64(0))
        assert env.step(np.int64(0))[3] is is_truncated


def test_the_last_good_observation_is_a_copy() -> None:
    class Reusing(FaultyEnv):
        shared = np.zeros(1, np.float32)

        def _outcome(self) -> Any:
            observation, infos = super()._outcome()
            self.shared[...] = observation
            return self.shared, infos

    env = TruncateOnBadValue(Reusing(Fault.NAN, 2), ValidationMode.WARN, 0)
    env.reset()
    env.step(np.int64(0))

    assert env.step(np.int64(0))[0].tolist() == [np.float32(0.01)]


def test_faults_that_are_no_values_are_passed_on() -> None:
    env = truncating(Fault.WRONG_SHAPE)
    env.reset()
    env.step(np.int64(0))
    assert env.step(np.int64(0))[0].shape == (2,)

    env = truncating(Fault.NAN, 0)  # there is no observation before it
    assert np.isnan(env.reset()[0]).all()


def test_lanes_begin_anew_by_themselves_and_the_session_is_warned_once() -> None:
    source = make_source(lambda: FaultyEnv(Fault.NAN, 2), 2)
    host = VectorHost(build(replace(source, truncates_on_bad_value=True)), ValidationMode.WARN, "")
    descriptor = create_step_buffers(host.contract)
    buffers = StepBuffers(descriptor, host.contract)
    os.close(descriptor)
    host.bind_buffers(buffers)
    host.reset(ResetCommand())
    seen: list[tuple[list[bool], list[int], int]] = []
    for _ in range(6):
        reply = host.step(StepCommand())
        assert isinstance(reply, StepReply)
        truncated = buffers.results.truncated.tolist()
        warned = [lane for lane in range(2) if WARNING_KEY in lane_info(reply.infos, lane)]
        num_new = host.warnings.num_found - sum(count for _, _, count in seen)
        seen.append((truncated, warned, num_new))

    both, none = [True, True], [False, False]
    quiet: Any = (none, [], 0)
    assert seen == [quiet, (both, [0], 2), quiet, quiet, (both, [], 2), quiet]


def test_a_vector_that_resets_its_own_lanes_is_refused() -> None:
    source = make_source(lambda: SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")]))

    with pytest.raises(ConfigurationError, match="give a factory of single environments"):
        build(replace(source, truncates_on_bad_value=True))


class TwoAgents:
    """Both act in every step; agent b's reward is infinite in the second."""

    possible_agents = ("a", "b")
    observation_spaces = {name: Box(0, 9, (1,), np.float32) for name in "ab"}  # noqa: RUF012
    action_spaces: dict[str, Any] = {name: Discrete(2) for name in "ab"}  # noqa: RUF012

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.count = 0
        return {name: np.zeros(1, np.float32) for name in "ab"}, {}

    def step(self, actions: Any) -> Any:
        self.count += 1
        observations = {name: np.full(1, self.count, np.float32) for name in "ab"}
        rewards = {"a": 1.0, "b": np.inf if self.count == 2 else 2.0}
        flags = {"a": False, "b": False, "__all__": False}
        return observations, rewards, flags, flags, {}

    def close(self) -> None: ...


def test_several_agents_are_truncated_together_and_no_reward_is_paid_twice() -> None:
    lanes = build(replace(make_source(TwoAgents), truncates_on_bad_value=True))
    (env,) = lanes.envs  # type: ignore[attr-defined]
    env.reset()
    action = {"a": np.int64(0), "b": np.int64(0)}
    assert env.step(action)[0]["rewards"].tolist() == [1.0, 2.0]

    observation, reward, _, truncated, info = env.step(action)

    assert observation["observations"]["a"].tolist() == [1.0]
    assert observation["rewards"].tolist() == [1.0, 0.0]
    assert (reward, truncated) == (0.0, True)
    assert "reward: inf is not finite" in info[BAD_VALUE_KEY]


def test_a_nan_reward_of_an_agent_is_the_lane_s_and_costs_no_session() -> None:
    class NanReward(TwoAgents):
        def step(self, actions: Any) -> Any:
            observations, rewards, *rest = super().step(actions)
            return observations, {**rewards, "a": np.nan, "b": np.inf}, *rest

    lanes = build(make_source(NanReward))
    (env,) = lanes.envs  # type: ignore[attr-defined]
    env.reset()

    observation, reward, *_ = env.step({"a": np.int64(0), "b": np.int64(0)})

    assert observation["rewards"].tolist() == [0.0, np.inf]
    assert np.isnan(reward)
