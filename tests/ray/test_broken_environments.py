"""Environments that fail again and again end the training with what they raise."""

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray import EnvServer
from rlmesh_ray.errors import RemoteEnvError
from rlmesh_ray.rllib import configure
from rlmesh_ray.rllib.runner import slot as slot_module
from rlmesh_ray.rllib.runner.env_runner import RLMeshEnvRunner
from rlmesh_ray.rllib.runner.session_recovery import raise_for_broken_environment

OFTEN = r"ValueError: worn out, in lane \d, at step 5 of its episode; .* failed 11 times since"


class Worn(gymnasium.Env[Any, Any]):
    """Raises in its fifth step; each ``lasts``-th episode, counted by a file, ends before that."""

    observation_space = spaces.Box(0.0, 10.0, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, file: str = "", lasts: int = 0) -> None:
        self._file, self._lasts = file, lasts

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._steps, self._ends = 0, False
        if self._file:
            with open(self._file, "a+") as counts:
                counts.write(".")
                self._ends = counts.tell() % self._lasts == 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._steps == 5:
            raise ValueError("worn out")
        ends = self._ends and self._steps == 4
        return np.full(1, self._steps, np.float32), 1.0, ends, False, {}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_module, "_ENV_DELAY_S", 0.0)


def local_runner(server: EnvServer) -> Any:
    config = configure(PPOConfig().env_runners(num_env_runners=0), server.address)
    return RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)


def sample_often(runner: Any) -> None:
    for _ in range(100):
        runner.sample(num_timesteps=4)  # less than an error takes: calls succeed in between


@pytest.mark.usefixtures("impatient")
def test_a_runner_gives_up_an_environment_that_finishes_no_episode() -> None:
    with EnvServer(Worn, num_envs=2) as server:
        runner = local_runner(server)
        with pytest.raises(RemoteEnvError, match=OFTEN) as caught:
            sample_often(runner)
        given_up = runner.broken_environment
        runner.sample(num_timesteps=4)
        is_forgotten = runner.broken_environment is None
        runner.stop()

    assert 'raise ValueError("worn out")' in caught.value.debug_info
    assert given_up is caught.value
    assert is_forgotten, "the next call of sample is another try"


@pytest.mark.usefixtures("impatient")
def test_an_environment_that_finishes_an_episode_now_and_then_is_sampled_on(tmp_path: Any) -> None:
    counted = {"file": str(tmp_path / "episodes"), "lasts": 7}
    with EnvServer(Worn, env_kwargs=counted) as server:
        runner = local_runner(server)
        episodes = runner.sample(num_episodes=6)
        num_raised = server.statistics().errors["INTERNAL"]
        runner.stop()

    assert sum(episode.is_terminated for episode in episodes) >= 6
    assert num_raised > 11


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_training_ends_with_the_error_of_its_remote_runners() -> None:
    with EnvServer(Worn) as server:
        config = configure(PPOConfig().env_runners(num_env_runners=1), server.address)
        algorithm = config.training(train_batch_size=100, minibatch_size=50).build_algo()
        for _ in range(2):  # also where the user goes on
            with pytest.raises(RemoteEnvError, match=OFTEN):
                algorithm.train()
        algorithm.stop()


@pytest.mark.parametrize(("sampled", "gives_up"), [(0, True), (math.nan, True), (8, False)])
def test_an_iteration_without_steps_ends_the_training_also_after_iterations_with_steps(
    sampled: float, gives_up: bool
) -> None:
    error = RemoteEnvError("INTERNAL", "it failed 11 times", False)
    group = SimpleNamespace(foreach_env_runner=lambda *_, **__: [None, error])
    algorithm: Any = SimpleNamespace(env_runner_group=group)
    raised = pytest.raises(RemoteEnvError) if gives_up else contextlib.nullcontext()

    with raised:
        raise_for_broken_environment(
            algorithm=algorithm, result={"env_runners": {"num_env_steps_sampled": sampled}}
        )


def mine(**_: Any) -> None: ...


def test_users_callbacks_stay_and_ours_is_added_once() -> None:
    with EnvServer("CartPole-v1") as server:
        config = configure(PPOConfig().callbacks(on_train_result=mine), server.address)
        again = configure(config, server.address)

    assert again.callbacks_on_train_result == [mine, raise_for_broken_environment]
