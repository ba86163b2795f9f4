"""Rewards that are not finite reach no learner: episodes of their session end before them."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import FlattenObservations
from ray.rllib.connectors.env_to_module.observation_preprocessor import (
    SingleAgentObservationPreprocessor,
)

from rlmesh_ray import EnvServer
from rlmesh_ray.errors import RemoteEnvError
from rlmesh_ray.rllib import configure
from rlmesh_ray.rllib.runner.session_recovery import INTERRUPTED_KEY
from tests.ray.lost_endpoints import assert_unbroken
from tests.ray.multi_agent_worlds import Climb, Precipice
from tests.ray.ramps import Bottomless, Collapsing, Ramp, Slippery, SlipperyChoice, slippery_ramps


def nothing(**_: Any) -> None: ...


def runner_of(server: EnvServer, config: PPOConfig) -> Any:
    config = configure(config.env_runners(num_env_runners=0), server.address)
    return config.env_runner_cls(config=config, worker_index=0, num_workers=0)


def hosted_vector(mode: AutoresetMode) -> EnvServer:
    return EnvServer(functools.partial(slippery_ramps, mode))


ENDPOINTS: dict[str, Callable[[], EnvServer]] = {
    "one lane": lambda: EnvServer(Slippery),
    "lanes that reset themselves": lambda: EnvServer(Slippery, num_envs=3),
    "lanes that do not": lambda: EnvServer(Slippery, num_envs=3, autoreset="disabled"),
    "a vector, next step": functools.partial(hosted_vector, AutoresetMode.NEXT_STEP),
    "a vector, same step": functools.partial(hosted_vector, AutoresetMode.SAME_STEP),
    "a vector, disabled": functools.partial(hosted_vector, AutoresetMode.DISABLED),
}


# Lanes as arrays learn from the vector's mode where a lane ended; single lanes do not need it.
@pytest.mark.parametrize(
    ("endpoint", "as_arrays"),
    [
        ("lanes that reset themselves", False),
        ("lanes that do not", True),
        ("a vector, same step", True),
        *(
            pytest.param(endpoint, as_arrays, marks=pytest.mark.nightly)
            for endpoint, as_arrays in [
                ("one lane", True),
                ("one lane", False),
                ("lanes that reset themselves", True),
                ("lanes that do not", False),
                ("a vector, next step", True),
                ("a vector, next step", False),
                ("a vector, same step", False),
                ("a vector, disabled", True),
                ("a vector, disabled", False),
            ]
        ),
    ],
)
def test_episodes_end_before_such_a_reward_with_the_cause(endpoint: str, as_arrays: bool) -> None:
    config = PPOConfig() if as_arrays else PPOConfig().callbacks(on_episode_step=nothing)
    with ENDPOINTS[endpoint]() as server:
        runner = runner_of(server, config)
        chunks = [chunk for _ in range(2) for chunk in runner.sample(num_timesteps=50)]
        metrics = runner.get_metrics()
        runner.stop()

    assert metrics["lanes_as_arrays"].peek() == as_arrays
    assert_unbroken(chunks)
    assert 100 <= sum(map(len, chunks)) == metrics["num_env_steps_sampled"].peek()
    assert all(np.isfinite(chunk.get_rewards()).all() for chunk in chunks)
    causes = [chunk.get_infos(-1).get(INTERRUPTED_KEY) for chunk in chunks if chunk.is_truncated]
    assert all("the environment gave -inf as a reward in lane" in str(cause) for cause in causes)
    assert "the environment gave -inf as a reward in lane" in runner.first_failure
    # Some were truncated before their first step.
    assert metrics["num_episodes_interrupted_lifetime"].peek() >= max(len(causes), 5)
    assert metrics["num_env_step_failures"].peek() > 1
    assert metrics["num_episodes"].peek() == sum(chunk.is_terminated for chunk in chunks)


class AddsThousand(SingleAgentObservationPreprocessor):
    """Adds a thousand to each observation, once more each time that it sees it."""

    def recompute_output_observation_space(self, observations: Any, _actions: Any) -> Any:
        return Box(0.0, np.inf, observations.shape, observations.dtype)

    def preprocess(self, observation: Any, episode: Any) -> Any:
        return observation + 1000


CONNECTORS: list[Any] = [
    (AddsThousand, Slippery, lambda observations: observations[:, 0] - 1000),
    (FlattenObservations, SlipperyChoice, lambda observations: observations.argmax(axis=1)),
]


@pytest.mark.parametrize(("connector", "env", "steps_of"), CONNECTORS)
def test_connectors_see_the_last_observation_of_such_an_episode_once(
    connector: Any, env: Any, steps_of: Any
) -> None:
    config = PPOConfig().env_runners(env_to_module_connector=lambda *_, **__: connector())
    with EnvServer(env, num_envs=3) as server:
        runner = runner_of(server, config)
        chunks = [chunk for _ in range(2) for chunk in runner.sample(num_timesteps=50)]
        runner.stop()

    assert sum(INTERRUPTED_KEY in chunk.get_infos(-1) for chunk in chunks) > 4
    for chunk in chunks:
        seen = steps_of(chunk.get_observations())
        np.testing.assert_array_equal(seen, seen[0] + np.arange(len(chunk) + 1))


def sample_often(runner: Any) -> None:
    for _ in range(100):
        runner.sample(num_timesteps=4)


OFTEN = (
    r"gave nan as a reward in lane \d of its session .*; this environment has failed 11 times "
    "since it last finished an episode"
)


@pytest.mark.parametrize(
    ("env", "as_arrays"),
    [(Bottomless, True), pytest.param(Collapsing, False, marks=pytest.mark.nightly)],
)
def test_an_environment_that_finishes_no_episode_for_it_ends_sampling_with_the_cause(
    env: type[Ramp], as_arrays: bool
) -> None:
    config = PPOConfig() if as_arrays else PPOConfig().callbacks(on_episode_step=nothing)
    with EnvServer(env, num_envs=2) as server:
        runner = runner_of(server, config)
        with pytest.raises(RemoteEnvError, match=OFTEN) as caught:
            sample_often(runner)
        given_up = runner.broken_environment
        with pytest.raises(RemoteEnvError, match=OFTEN):
            runner.sample(num_timesteps=1000)  # another call is another try
        runner.stop()

    assert given_up is caught.value
    assert "lanes 0 to 1: INTERNAL: the environment gave nan as a reward" in runner.first_failure


def test_several_agents_lose_the_step_together() -> None:
    config = PPOConfig().multi_agent(
        policies=set(Climb.possible_agents),
        policy_mapping_fn=lambda agent_id, *_args, **_kwargs: agent_id,
    )
    with EnvServer(Precipice) as server:
        runner = runner_of(server, config)
        episodes = runner.sample(num_timesteps=20)
        metrics = runner.get_metrics()
        runner.stop()

    assert [len(episode) for episode in episodes[:3]] == [2, 2, 2]
    for episode in episodes:
        first = episode.agent_episodes["first"]
        assert np.isfinite(first.get_rewards()).all()
        assert episode.is_truncated == first.is_truncated
    assert "inf as a reward" in episodes[0].agent_episodes["first"].get_infos(-1)[INTERRUPTED_KEY]
    assert metrics["num_episodes_interrupted_lifetime"].peek() >= 3
