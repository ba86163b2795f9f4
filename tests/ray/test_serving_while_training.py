"""A policy is served while it is trained, and always the newest one."""

import copy
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from rlmesh_ray import ModelServer, RemoteModel, TokenFile
from rlmesh_ray.actors import ModelFleet, ModelServiceActor
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.loading import load_policy
from rlmesh_ray.models.policy import RouteRows, Rows
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.rllib import WeightPublisher, publish_weights
from rlmesh_ray.rllib.weights.publisher import final_state
from tests.loopback.eventually import eventually

pytestmark = pytest.mark.usefixtures("local_ray")

TIMEOUT_S = 60.0
OBSERVATIONS = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)


def on_cartpole(config: AlgorithmConfig) -> Any:
    """What is learnt must soon be seen in the actions, and so must the filter's statistics."""
    config.environment("CartPole-v1").debugging(seed=1)
    config.env_runners(
        num_env_runners=0, env_to_module_connector=lambda env, spaces, device: MeanStdFilter()
    )
    config.rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[16]))
    config.training(lr=0.02)
    return config


def ppo() -> PPOConfig:
    config: PPOConfig = on_cartpole(PPOConfig())
    config.training(train_batch_size_per_learner=256, minibatch_size=64, num_epochs=2)
    return config


def appo() -> APPOConfig:
    config: APPOConfig = on_cartpole(APPOConfig())
    config.training(train_batch_size_per_learner=50)
    config.env_runners(num_env_runners=1, rollout_fragment_length=25)
    config.reporting(min_time_s_per_iteration=0.2)
    return config


def dqn() -> DQNConfig:
    config: DQNConfig = on_cartpole(DQNConfig())
    config.training(num_steps_sampled_before_learning_starts=32, train_batch_size_per_learner=32)
    config.env_runners(rollout_fragment_length=32)
    config.reporting(min_sample_timesteps_per_iteration=256, min_time_s_per_iteration=0)
    return config


def checkpoint_of(algorithm: Algorithm, folder: Path) -> str:
    return str(algorithm.save_to_path(str(folder)))


def served_actions(address: str, token: str | TokenFile | None = None) -> Any:
    with RemoteModel(address, token=token) as model:
        model.configure_route(gymnasium.make_vec("CartPole-v1", num_envs=len(OBSERVATIONS)))
        return model.predict(OBSERVATIONS)


def actions_of(checkpoint: str, state: object = None) -> Any:
    """What the policy of a checkpoint does, with another state than the checkpoint's."""
    policy: Any = load_policy(checkpoint)
    if state is not None:
        policy.set_weights(state)
    slots = [PredictSlot(lane, "", 0, False) for lane in range(len(OBSERVATIONS))]
    return policy.predict(None, Rows(OBSERVATIONS, [RouteRows("route", slots)]))


def callback_of(algorithm: Algorithm) -> WeightPublisher:
    (callback,) = [each for each in algorithm.callbacks if isinstance(each, WeightPublisher)]
    return callback


class Client:
    """Predicts all the while, in a thread."""

    def __init__(self, address: str) -> None:
        self.versions: list[int] = []
        self.error: Exception | None = None
        self._ends = threading.Event()
        self._model = RemoteModel(address)
        self._model.configure_route(gymnasium.make_vec("CartPole-v1", num_envs=4))
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Client":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(TIMEOUT_S)
        self._model.close()

    def _run(self) -> None:
        try:
            while not self._ends.is_set():
                actions = self._model.predict(OBSERVATIONS[:4])
                assert actions.shape == (4,)
                telemetry = self._model.last_telemetry()
                assert telemetry is not None
                self.versions.append(telemetry.policy_version)
        except Exception as error:
            self.error = error
            raise


@pytest.mark.slow
def test_a_client_is_served_all_the_while_by_newer_and_newer_policies(tmp_path: Path) -> None:
    algorithm = ppo().build_algo()
    checkpoint = checkpoint_of(algorithm, tmp_path)
    with ModelServer(load_policy(checkpoint)) as server, Client(server.address) as client:
        publish_weights(algorithm, server)
        for iteration in range(1, 4):
            result = algorithm.train()
            assert callback_of(algorithm).wait(TIMEOUT_S)
            assert server.policy_version == iteration
            assert eventually(lambda: client.error or server.policy_version in client.versions)
            seen = len(client.versions)
        state = final_state(algorithm)
        algorithm.stop()
        served = served_actions(server.address)

    assert client.error is None
    assert len(client.versions) >= seen
    assert client.versions == sorted(client.versions)
    assert len(set(client.versions)) > 2
    reported = result["served_policy"]
    # The third is on its way when the iteration tells; on a busy machine it has arrived by then.
    assert reported["policy_version"] == reported["delivered"] in (2, 3)
    assert (reported["superseded"], reported["failed"]) == (0, 0)
    assert np.array_equal(served, actions_of(checkpoint, state))
    assert not np.array_equal(served, actions_of(checkpoint))
    without_filter = {**state, "env_to_module_connector": {}}
    assert not np.array_equal(served, actions_of(checkpoint, without_filter))


def test_the_last_weights_arrive_also_between_two_deliveries(tmp_path: Path) -> None:
    algorithm = ppo().build_algo()
    with ModelServer(load_policy(checkpoint_of(algorithm, tmp_path))) as server:
        publish_weights(algorithm, server, every_n_iterations=2)
        for _ in range(3):
            algorithm.train()
        callback_of(algorithm).wait(TIMEOUT_S)
        assert server.policy_version == 2
        state = final_state(algorithm)

        algorithm.stop()

        assert server.policy_version == 3
        assert np.array_equal(served_actions(server.address), actions_of(str(tmp_path), state))


@pytest.mark.slow
def test_versions_grow_also_after_a_restore(tmp_path: Path) -> None:
    algorithm = ppo().build_algo()
    with ModelServer(load_policy(checkpoint_of(algorithm, tmp_path))) as server:
        config = publish_weights(ppo(), server)
        server.set_weights(final_state(algorithm), version=40)
        algorithm.stop()
        restored = config.build_algo()
        restored.restore_from_path(str(tmp_path))

        restored.train()
        restored.train()
        restored.stop()

        assert server.policy_version == 42


class Gone:
    """A target that cannot be reached."""

    policy_version = 0

    def set_weights(self, weights: object, version: int | None = None) -> int:
        raise ConnectionError("there is no route to it")


def test_a_target_that_cannot_be_reached_does_not_end_the_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = Gone()
    algorithm = publish_weights(ppo(), target).build_algo()
    algorithm.train()
    callback_of(algorithm).wait(TIMEOUT_S)

    result = algorithm.train()
    algorithm.stop()

    assert result["served_policy"]["failed"] >= 1
    assert "ConnectionError: there is no route to it" in caplog.text


def test_what_cannot_be_given_weights_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="int: give a ModelFleet"):
        publish_weights(ppo(), 5)
    with pytest.raises(ConfigurationError, match="at least 1"):
        publish_weights(ppo(), "fleet", every_n_iterations=0)


def test_callbacks_of_the_user_stay() -> None:
    class Theirs(WeightPublisher):
        pass

    config = ppo().callbacks(Theirs)

    publish_weights(config, "fleet")

    assert Theirs in config.callbacks_class
    assert len(config.callbacks_class) == 2
    assert len(copy.deepcopy(config).callbacks_class) == 2


# --- on Ray ----------------------------------------------------------------------------


def train_for_versions(algorithm: Algorithm, fleet: ModelFleet, count: int) -> list[int]:
    """Train until the fleet has got ``count`` versions; return which it had when."""
    versions: list[int] = []
    # APPO's learners take their time before they let go of the first weights.
    while len(set(versions) - {0}) < count and len(versions) < 200:
        algorithm.train()
        assert callback_of(algorithm).wait(TIMEOUT_S)
        versions.append(fleet.policy_version)
    return versions


@pytest.mark.nightly
@pytest.mark.parametrize("num_learners", [0, 1])
def test_what_appo_has_learnt_last_is_served(tmp_path: Path, num_learners: int) -> None:
    algorithm = appo().learners(num_learners=num_learners).build_algo()
    assert algorithm._env_runner_state_server is not None
    checkpoint = checkpoint_of(algorithm, tmp_path)
    with ModelFleet(checkpoint, name="appo", num_cpus=0.1) as fleet:
        publish_weights(algorithm, fleet)
        versions = train_for_versions(algorithm, fleet, 3)
        state = final_state(algorithm)
        algorithm.stop()

        served = served_actions(fleet.addresses[0], fleet.token)

        assert versions == sorted(versions)
        assert len(set(versions)) >= 3
        assert fleet.policy_version > versions[-1]
    assert np.array_equal(served, actions_of(checkpoint, state))
    assert not np.array_equal(served, actions_of(checkpoint))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        ppo().learners(num_learners=1),
        pytest.param(ppo().env_runners(num_env_runners=1), marks=pytest.mark.nightly),
        ppo().env_runners(num_env_runners=1, create_local_env_runner=False),
        dqn(),
    ],
    ids=["remote learner", "remote runner", "no local runner", "DQN"],
)
def test_wherever_it_learns_and_samples_the_newest_is_served(
    tmp_path: Path, config: AlgorithmConfig
) -> None:
    algorithm = publish_weights(config, "wherever").build_algo()
    checkpoint = checkpoint_of(algorithm, tmp_path)
    with ModelFleet(checkpoint, name="wherever", num_cpus=0.1) as fleet:
        assert train_for_versions(algorithm, fleet, 3) == [1, 2, 3]
        state = final_state(algorithm)
        served = served_actions(fleet.addresses[0], fleet.token)
        algorithm.stop()

        assert fleet.policy_version == 3
    assert np.array_equal(served, actions_of(checkpoint, state))
    assert not np.array_equal(served, actions_of(checkpoint))


@pytest.mark.slow
def test_an_algorithm_with_an_actor_as_target_is_saved_and_restored(tmp_path: Path) -> None:
    first = ppo().build_algo()
    checkpoint = checkpoint_of(first, tmp_path / "first")
    first.stop()
    actor = ModelServiceActor.options(num_cpus=0.1).remote(checkpoint)
    algorithm = publish_weights(ppo(), actor).build_algo()
    algorithm.train()
    saved = checkpoint_of(algorithm, tmp_path / "second")
    algorithm.stop()

    restored = Algorithm.from_checkpoint(saved)
    result = restored.train()
    callback_of(restored).wait(TIMEOUT_S)
    state = final_state(restored)
    restored.stop()

    assert result["training_iteration"] == 2
    assert ray.get(actor.policy_version.remote()) == 2
    served = served_actions(ray.get(actor.address.remote()))
    assert np.array_equal(served, actions_of(saved, state))
