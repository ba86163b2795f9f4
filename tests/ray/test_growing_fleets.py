"""One training on a fleet that grows and shrinks meanwhile."""

import concurrent.futures
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import ray
from ray.rllib.algorithms.ppo import PPO, PPOConfig

from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.actors.ray_calls import get_outcomes
from rlmesh_ray.rllib import RLMeshEnvRunner, configure
from tests.loopback.eventually import eventually
from tests.ray.ramps import Stairs
from tests.ray.verified_samples import NUM_BROKEN, NUM_VERIFIED, Verifier

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("local_ray")]

_DEADLINE_S = 90.0


@pytest.fixture
def fleet() -> Iterator[EnvFleet]:
    with EnvFleet(partial(Stairs, length=50), num_cpus=0.1) as fleet:
        yield fleet


def ppo_on(fleet: EnvFleet) -> PPO:
    """Return a PPO whose runner has four sessions with the fleet."""
    config = PPOConfig().callbacks(Verifier)
    config.training(train_batch_size_per_learner=200, minibatch_size=100, num_epochs=1)
    config.env_runners(num_env_runners=1, num_envs_per_env_runner=4)
    config.fault_tolerance(restart_failed_env_runners=False, ignore_env_runner_failures=False)
    return configure(config, fleet).build_algo()


def num_sessions(fleet: EnvFleet) -> list[int]:
    """Return how many sessions each endpoint has; -1: it is away."""
    reported = get_outcomes([actor.describe.remote() for actor in fleet.actors])
    return [each["num_sessions"] if isinstance(each, dict) else -1 for each in reported]


def wait_for_sessions(
    fleet: EnvFleet, expected: list[int], running: concurrent.futures.Future[None]
) -> None:
    assert eventually(lambda: num_sessions(fleet) == expected or running.done(), _DEADLINE_S)
    assert not running.done(), running.result()


class Training:
    """Calls ``train`` again and again, and looks at what it returns."""

    def __init__(self, algo: PPO) -> None:
        self._algo = algo
        self._deadline_s = time.monotonic() + _DEADLINE_S
        self.metrics: dict[str, float] = {}

    def go_on(self) -> None:
        assert time.monotonic() < self._deadline_s
        result = self._algo.train()
        self.metrics = result["env_runners"]
        assert self.metrics[NUM_BROKEN] == 0
        assert self.metrics[NUM_VERIFIED] == result["num_env_steps_sampled_lifetime"]

    def go_on_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.go_on()


def assert_no_failures(training: Training) -> None:
    assert training.metrics["num_env_step_failures"] == 0
    assert training.metrics["num_episodes_interrupted_lifetime"] == 0


@pytest.mark.nightly
def test_sessions_follow_a_fleet_that_is_scaled_between_two_iterations(fleet: EnvFleet) -> None:
    algo = ppo_on(fleet)
    training = Training(algo)
    training.go_on()
    assert num_sessions(fleet) == [4]

    for number, expected in ((2, [2, 2]), (4, [1, 1, 1, 1]), (1, [4])):
        fleet.scale(number)
        while num_sessions(fleet) != expected:
            training.go_on()
    training.go_on()

    assert_no_failures(training)
    assert training.metrics["num_sessions_moved"] == 2 + 2 + 3
    algo.stop()


def test_sessions_follow_a_fleet_that_is_scaled_while_an_iteration_runs(fleet: EnvFleet) -> None:
    algo = ppo_on(fleet)
    training = Training(algo)

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        is_done = threading.Event()
        running = threads.submit(training.go_on_until, is_done.is_set)
        try:
            for number, expected in ((2, [2, 2]), (1, [4])):
                fleet.scale(number)
                wait_for_sessions(fleet, expected, running)
        finally:
            is_done.set()
        running.result()
    training.go_on()

    assert_no_failures(training)
    assert training.metrics["num_sessions_moved"] == 2 + 2
    algo.stop()


def test_a_killed_endpoint_gets_its_sessions_back_at_its_new_address(fleet: EnvFleet) -> None:
    fleet.scale(2)
    algo = ppo_on(fleet)
    training = Training(algo)
    training.go_on()
    assert num_sessions(fleet) == [2, 2]
    former = fleet.addresses

    os.kill(ray.get(fleet.actors[0].describe.remote())["pid"], signal.SIGKILL)
    training.go_on()  # finds out
    training.go_on_until(lambda: num_sessions(fleet) == [2, 2])

    assert fleet.addresses[0] != former[0]
    assert fleet.addresses[1] == former[1]
    assert training.metrics["num_env_step_failures"] == 2
    assert training.metrics["num_sessions_moved"] == 0
    algo.stop()


@pytest.mark.nightly
def test_endpoints_for_evaluation_stay_apart_when_a_fleet_grows(fleet: EnvFleet) -> None:
    fleet.scale(2)
    config = PPOConfig().evaluation(evaluation_interval=1)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=4)
    configure(config, fleet, num_evaluation_endpoints=1)
    trains = RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)
    evaluation = config.get_evaluation_config_object()
    evaluates = RLMeshEnvRunner(config=evaluation, worker_index=0, num_workers=0)
    assert num_sessions(fleet) == [4, 4]

    fleet.scale(3)
    deadline_s = time.monotonic() + _DEADLINE_S
    while num_sessions(fleet) != [2, 4, 2]:
        assert time.monotonic() < deadline_s
        trains.sample(num_timesteps=50)
        evaluates.sample(num_episodes=1)

    assert evaluates.get_metrics()["num_sessions_moved"].peek() == 0
    trains.stop()
    evaluates.stop()
