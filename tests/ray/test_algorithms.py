"""Every algorithm of RLlib's works through endpoints, and so does what is done with algorithms."""

import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import tune
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune import RunConfig, Tuner

from rlmesh_ray import EnvServer
from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.rllib import RLMeshEnvRunner, configure

pytestmark = [
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.timeout(600),  # Each starts several actors, which takes long on a busy machine.
]

LANES = 2
ENVS = {"SAC": "Pendulum-v1"}
MOST_ITERATIONS = 30


def small(name: str, num_env_runners: int = 0) -> AlgorithmConfig:
    """Return a config that learns at once, from little."""
    config: AlgorithmConfig = {
        "PPO": lambda: PPOConfig().training(minibatch_size=32, num_epochs=1),
        "APPO": APPOConfig,
        "IMPALA": IMPALAConfig,
        "DQN": lambda: DQNConfig().training(num_steps_sampled_before_learning_starts=32),
        "SAC": lambda: SACConfig().training(num_steps_sampled_before_learning_starts=32),
    }[name]()
    config.debugging(seed=3).reporting(
        min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=200
    )
    config.training(train_batch_size_per_learner=64)
    config.rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[16]))
    config.env_runners(
        num_env_runners=num_env_runners, num_cpus_per_env_runner=0.1, rollout_fragment_length=16
    )
    return config


@contextmanager
def built(config: AlgorithmConfig) -> Iterator[Algorithm]:
    algorithm = config.build_algo()
    try:
        yield algorithm
    finally:
        algorithm.stop()


@contextmanager
def served(name: str, **settings: Any) -> Iterator[str]:
    with EnvServer(ENVS.get(name, "CartPole-v1"), num_envs=LANES, **settings) as server:
        yield server.address


def weights(runner: Any) -> dict[str, Any]:
    return {name: np.array(part) for name, part in runner.module.get_state().items()}


def runner_weights(algorithm: Algorithm) -> list[dict[str, Any]]:
    """Return the weights of every runner that samples."""
    group = algorithm.env_runner_group
    is_local = group.num_remote_env_runners() == 0
    return list(group.foreach_env_runner(weights, local_env_runner=is_local))


def differ(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return any(not np.array_equal(first[name], second[name]) for name in first)


def train_until(algorithm: Algorithm, is_enough: Callable[[dict[str, Any]], bool]) -> Any:
    """Train until it is enough; what never comes fails the test."""
    for _ in range(MOST_ITERATIONS):
        result = algorithm.train()
        if is_enough(result):
            return result
    raise AssertionError(f"not in {MOST_ITERATIONS} iterations")


def assert_trains(name: str, config: AlgorithmConfig) -> None:
    with served(name) as address, built(configure(config, address)) as algorithm:
        first = runner_weights(algorithm)
        result = train_until(
            algorithm,
            lambda result: (
                all(map(differ, first, runner_weights(algorithm)))
                and "episode_return_mean" in result["env_runners"]
            ),
        )

    assert len(first) == max(config.num_env_runners, 1)
    assert result["env_runners"]["num_env_steps_sampled_lifetime"] >= 200
    assert math.isfinite(result["env_runners"]["episode_return_mean"])


@pytest.mark.parametrize(
    ("name", "num_env_runners"),
    [
        ("PPO", 0),
        *(
            pytest.param(name, num_env_runners, marks=pytest.mark.slow)
            for name, num_env_runners in [
                ("PPO", 2),
                ("IMPALA", 0),
                ("DQN", 0),
                ("SAC", 0),
            ]
        ),
        *(
            pytest.param(name, num_env_runners, marks=pytest.mark.nightly)
            for name, num_env_runners in [
                ("APPO", 0),
                ("APPO", 2),
                ("IMPALA", 2),
                ("DQN", 2),
                ("SAC", 2),
            ]
        ),
    ],
)
def test_every_algorithm_learns_from_what_its_runners_sample(
    name: str, num_env_runners: int
) -> None:
    assert_trains(name, small(name, num_env_runners))


@pytest.mark.slow
# So do DQN and SAC with "auto", which is what is tried here.
@pytest.mark.filterwarnings("ignore:.*1 step a lane:rlmesh_ray.errors.ConfigurationWarning")
@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
@pytest.mark.parametrize("rollout_fragment_length", ["auto", 8])
@pytest.mark.parametrize("name", ["PPO", "DQN", pytest.param("SAC", marks=pytest.mark.nightly)])
def test_batches_are_cut_as_one_likes(
    name: str, rollout_fragment_length: Any, batch_mode: str
) -> None:
    config = small(name).env_runners(
        rollout_fragment_length=rollout_fragment_length, batch_mode=batch_mode
    )
    if batch_mode == "complete_episodes":
        config.debugging(seed=None)  # RLlib would begin each sample with the same seeds again.

    assert_trains(name, config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PPO", "DQN", pytest.param("SAC", marks=pytest.mark.nightly)])
def test_algorithms_learn_without_exploring(name: str) -> None:
    assert_trains(name, small(name).env_runners(explore=False))


@pytest.mark.slow
def test_runners_pull_the_weights_of_appo() -> None:
    config = small("APPO", num_env_runners=1)
    assert config.use_env_runner_state_server, "RLlib's default"

    with served("APPO") as address, built(configure(config, address)) as algorithm:
        (first,) = runner_weights(algorithm)
        for version in (1, 3):
            result = train_until(
                algorithm,
                lambda result, version=version: (  # type: ignore[misc]
                    result["env_runners"].get("weights_seq_no", 0) >= version
                ),
            )
        (last,) = runner_weights(algorithm)
        (version,) = algorithm.env_runner_group.foreach_env_runner(
            lambda runner: runner._weights_seq_no, local_env_runner=False
        )

    assert version >= result["env_runners"]["weights_seq_no"] >= 3
    assert differ(first, last)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_env_runners"),
    [("PPO", 0), pytest.param("APPO", 1, marks=pytest.mark.nightly), ("DQN", 0)],
)
def test_an_algorithm_goes_on_from_its_checkpoint(
    name: str, num_env_runners: int, tmp_path: Path
) -> None:
    with served(name, token="open-sesame") as address:
        config = configure(small(name, num_env_runners), address, token="open-sesame")
        with built(config) as algorithm:
            beginning = runner_weights(algorithm)
            former = algorithm.train()
            algorithm.save_to_path(str(tmp_path))
            expected = runner_weights(algorithm)
        restored = Algorithm.from_checkpoint(str(tmp_path))
        try:
            actual = runner_weights(restored)
            result = restored.train()
        finally:
            restored.stop()

    assert all(map(differ, actual, beginning))
    if num_env_runners == 0:  # Remote runners of APPO may get newer ones while it is written.
        assert not any(map(differ, actual, expected))
    key = "num_env_steps_sampled_lifetime"
    assert result["env_runners"][key] > former["env_runners"][key]
    assert result["training_iteration"] == former["training_iteration"] + 1


@pytest.mark.nightly
@pytest.mark.parametrize("duration", ["auto", 5])
@pytest.mark.parametrize("name", ["PPO", "APPO"])
def test_evaluation_runs_beside_training(name: str, duration: Any) -> None:
    config = small(name, num_env_runners=1).evaluation(
        evaluation_interval=1,
        evaluation_num_env_runners=1,
        evaluation_parallel_to_training=True,
        evaluation_duration=duration,
        evaluation_duration_unit="episodes",
        evaluation_config={"seed": None},  # RLlib would replay the same episodes each time.
    )

    with served(name) as address, built(configure(config, address)) as algorithm:
        result = train_until(
            algorithm,
            lambda result: result["evaluation"].get("env_runners", {}).get("num_episodes", 0) > 0,
        )
        are_ours = algorithm.eval_env_runner_group.foreach_env_runner(
            lambda runner: isinstance(runner, RLMeshEnvRunner), local_env_runner=False
        )

    assert are_ours == [True]
    evaluated = result["evaluation"]["env_runners"]
    assert evaluated["num_episodes"] >= (1 if duration == "auto" else duration)
    assert evaluated["episode_return_mean"] > 0


@pytest.mark.slow
# Tune imports all of RLlib's algorithms to find one; gymnasium complains of DreamerV3's example.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_trials_of_tune_share_a_fleet_that_outlives_them(tmp_path: Path) -> None:
    with EnvFleet("CartPole-v1", num_envs=LANES, num_cpus=0.1, max_sessions=4) as fleet:
        before = [ray.get(actor.describe.remote())["pid"] for actor in fleet.actors]
        config = configure(small("PPO", num_env_runners=1), fleet)
        config.training(lr=tune.grid_search([1e-3, 1e-4]))
        results = Tuner(
            "PPO",
            param_space=config,
            run_config=RunConfig(
                storage_path=str(tmp_path), stop={"training_iteration": 2}, verbose=0
            ),
        ).fit()

        # All actors of a trial's placement group have ended with it.
        after = [ray.get(actor.describe.remote())["pid"] for actor in fleet.actors]

    assert after == before
    assert results.num_errors == 0
    assert len(results) == 2
    for result in results:
        assert result.metrics["training_iteration"] == 2
        assert result.metrics["env_runners"]["episode_return_mean"] > 0


@pytest.mark.nightly
def test_a_trial_may_start_endpoints_outside_of_its_placement_group(tmp_path: Path) -> None:
    # https://github.com/ray-project/ray/issues/15879: a trial of one CPU has no room for them.
    def trial(_: dict[str, Any]) -> None:
        with built(configure(small("PPO"), "CartPole-v1", num_envs=LANES)) as algorithm:
            result = algorithm.train()
        tune.report({"return": result["env_runners"]["episode_return_mean"]})

    results = Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        run_config=RunConfig(storage_path=str(tmp_path), verbose=0),
    ).fit()

    assert results.num_errors == 0
    assert results[0].metrics["return"] > 0


SECOND_DRIVER = """
    import logging, sys, ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from rlmesh_ray.rllib import RLMeshEnvRunner, configure
    from rlmesh_ray.rllib.training import train

    gcs_address, token, *addresses = sys.argv[1:]
    ray.init(gcs_address, namespace="elsewhere", logging_level=logging.ERROR, log_to_driver=False)
    def config(num_env_runners):
        config = PPOConfig().env_runners(num_env_runners=num_env_runners)
        config.training(train_batch_size_per_learner=64, minibatch_size=32, num_epochs=1)
        return config

    joined = configure(config(0), addresses, token=token)
    print(*(point.env_steps for point in train(joined, stop_iters=1)))
    own = configure(config(1), "CartPole-v1", num_endpoints=1)
    print(*(point.env_steps for point in train(own, stop_iters=1)))
"""


@pytest.mark.slow
def test_a_second_driver_joins_a_cluster_that_asks_for_its_token() -> None:
    with EnvFleet("CartPole-v1", num_envs=LANES, num_cpus=0.1) as fleet:
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SECOND_DRIVER)]
        arguments = [ray.get_runtime_context().gcs_address, fleet.tokens[0], *fleet.addresses]
        without = subprocess.run(
            [sys.executable, "-c", "import sys, ray; ray.init(sys.argv[1])", arguments[0]],
            capture_output=True,
            text=True,
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
            check=False,
        )
        done = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "RAY_AUTH_MODE": "token"},
            check=False,
        )

        # Its own endpoints have ended with it; those of this driver have not.
        sampler: Any = RLMeshEnvRunner(
            config=configure(small("PPO"), fleet), worker_index=0, num_workers=0
        )
        assert sampler.sample(num_timesteps=5)
        sampler.stop()

    assert without.returncode != 0, "the cluster asks for no token"
    assert done.returncode == 0, done.stderr
    assert [int(line) >= 64 for line in done.stdout.split()] == [True, True]
