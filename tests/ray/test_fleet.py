"""Endpoints on Ray: started, found, restarted, trained on."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import ray
from gymnasium.vector import AutoresetMode
from ray.rllib.algorithms.ppo import PPOConfig

import rlmesh_ray.actors.placement
from rlmesh_ray import RemoteModel, RemoteVectorEnv
from rlmesh_ray.actors import EnvFleet, EnvServiceActor, ModelServiceActor
from rlmesh_ray.actors.placement import is_unplaced
from rlmesh_ray.actors.registry.registry_actor import EndpointRegistry, shared_registry
from rlmesh_ray.errors import (
    AccessDeniedError,
    CapacityError,
    ConfigurationError,
    EndpointClosedError,
    EndpointUnreachableError,
)
from rlmesh_ray.rllib import RLMeshEnvRunner, configure
from rlmesh_ray.rllib.checkpoint_folder import TrainingProgress
from rlmesh_ray.rllib.training import train
from tests.loopback.eventually import eventually
from tests.loopback.released_join import shake_hands
from tests.ray.ramps import Ladder

pytestmark = pytest.mark.usefixtures("local_ray")


def small_ppo(num_env_runners: int = 0) -> PPOConfig:
    config = PPOConfig()
    config.training(train_batch_size_per_learner=256, minibatch_size=128, num_epochs=2)
    config.env_runners(num_env_runners=num_env_runners)
    return config


def test_a_fleet_serves_from_as_many_endpoints_as_asked_for_until_it_is_stopped() -> None:
    callable_names = ("set_rung",)
    fleet = EnvFleet(Ladder, num_endpoints=2, num_envs=3, num_cpus=0.1, allow_calls=callable_names)
    addresses = fleet.addresses
    for address, token in zip(addresses, fleet.tokens, strict=True):
        env = RemoteVectorEnv(address, token=token)
        assert env.call("set_rung", 4) == (0, 0, 0)
        observations, _ = env.reset(seed=0)
        assert observations.tolist() == [[4.0]] * 3
        with pytest.raises(ConfigurationError, match="only set_rung"):
            env.get_attr("rung")
        env.close()
    with pytest.raises(AccessDeniedError):
        RemoteVectorEnv(addresses[0])
    fleet.stop()
    fleet.stop()

    assert len(set(addresses)) == 2
    with pytest.raises(EndpointClosedError, match="start a new one"):
        fleet.scale(2)
    with pytest.raises(EndpointUnreachableError, match="not announced"):
        fleet.resolver.address(0)


def test_a_fleet_that_finds_no_room_says_what_it_needs() -> None:
    with pytest.raises(CapacityError, match="needs 1000 CPU"):
        EnvFleet("CartPole-v1", num_cpus=1000, start_timeout_s=0.2)


@pytest.mark.slow
def test_a_fleet_that_waits_for_room_says_what_it_needs_and_starts_when_there_is_some(
    holder: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rlmesh_ray.actors.placement, "_FIRST_NOTICE_S", 0.2)
    algorithm = holder(12)

    with ThreadPoolExecutor() as pool, caplog.at_level(logging.WARNING, "rlmesh_ray"):
        starting = pool.submit(EnvFleet, "CartPole-v1", num_cpus=6)
        try:
            assert eventually(lambda: "no node yet" in caplog.text)
        finally:
            ray.kill(algorithm)
        starting.result().stop()

    assert "1 of 1 endpoints have no node yet; each needs 6 CPU, and the cluster has" in caplog.text
    assert "of 16 CPU free: lower num_cpus or num_endpoints" in caplog.text


def test_an_actor_that_has_a_node_and_starts_slowly_is_not_taken_for_one_that_waits() -> None:
    class NeverMade:
        def __init__(self) -> None:
            threading.Event().wait()

    actor = ray.remote(num_cpus=0.123)(NeverMade).remote()

    assert is_unplaced({"CPU": 99.0})
    assert eventually(lambda: not is_unplaced({"CPU": 0.123}))
    ray.kill(actor)


def test_a_fleet_has_at_least_one_endpoint() -> None:
    with pytest.raises(ConfigurationError, match="1 or more"):
        EnvFleet("CartPole-v1", num_endpoints=0)


def is_back(fleet: EnvFleet, former_address: str) -> bool:
    try:
        return fleet.resolver.address(0) != former_address
    except EndpointUnreachableError:
        return False


@pytest.mark.slow
def test_training_goes_on_when_an_endpoint_is_killed() -> None:
    with EnvFleet("CartPole-v1", num_endpoints=2, num_envs=2, num_cpus=0.1) as fleet:
        before = fleet.addresses
        config = configure(small_ppo(), fleet)
        runner = RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)
        runner.sample(num_timesteps=50)
        victim = ray.get(fleet.actors[0].describe.remote())

        os.kill(victim["pid"], signal.SIGKILL)
        episodes = runner.sample(num_timesteps=50)  # which the other endpoint may give alone

        assert sum(len(episode) for episode in episodes) >= 50
        while not is_back(fleet, before[0]):
            runner.sample(num_timesteps=50)
        assert runner.get_metrics()["num_env_step_failures"].peek() >= 1
        assert fleet.addresses[1] == before[1]
        runner.stop()


def progress_on_a_fleet(
    num_env_runners: int, checkpoint: Path | None = None
) -> list[TrainingProgress]:
    config = small_ppo(num_env_runners)
    config.evaluation(evaluation_interval=1, evaluation_num_env_runners=1, evaluation_duration=2)
    with EnvFleet("CartPole-v1", num_endpoints=2, num_envs=2, num_cpus=0.1) as fleet:
        return list(train(configure(config, fleet), stop_iters=2, checkpoint_dir=checkpoint))


@pytest.fixture(scope="module")
def trained(
    local_ray: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[TrainingProgress], Path]:
    """How a training on a fleet went, and its checkpoint."""
    checkpoint = tmp_path_factory.mktemp("trained") / "checkpoint"
    return progress_on_a_fleet(1, checkpoint), checkpoint


def assert_trained(progress: list[TrainingProgress]) -> None:
    assert [point.iteration for point in progress] == [1, 2]
    assert progress[-1].env_steps >= 512
    assert progress[-1].return_mean > 5


@pytest.mark.slow
def test_ppo_trains_on_a_fleet_with_a_remote_runner(
    trained: tuple[list[TrainingProgress], Path],
) -> None:
    assert_trained(trained[0])


@pytest.mark.nightly
@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_ppo_trains_on_a_fleet_with_local_and_remote_runners(num_env_runners: int) -> None:
    assert_trained(progress_on_a_fleet(num_env_runners))


def test_an_env_service_actor_can_be_used_by_itself() -> None:
    actor_class: Any = EnvServiceActor
    actor = actor_class.options(num_cpus=0.1).remote(
        "CartPole-v1",
        num_envs=2,
        autoreset="disabled",
        dialects=["rlmesh.protocol.v1"],
    )
    address = ray.get(actor.address.remote())
    env = RemoteVectorEnv(address)
    env.reset()

    assert ray.get(actor.describe.remote())["num_sessions"] == 1
    assert env.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    assert not shake_hands(address).compatible
    env.close()
    assert_listens_on_loopback_until_stopped(actor)


def test_a_model_service_actor_has_the_same_methods() -> None:
    actor_class: Any = ModelServiceActor
    assert_listens_on_loopback_until_stopped(actor_class.options(num_cpus=0.1).remote(np.sign))


def assert_listens_on_loopback_until_stopped(actor: Any) -> None:
    """Assert what holds of each service actor that was started without an address or a token."""
    description = ray.get(actor.describe.remote())
    address = ray.get(actor.address.remote())

    assert address.startswith("127.0.0.1:")
    assert description["address"] == address
    assert description["pid"] != os.getpid()
    assert eventually(lambda: ray.get(actor.statistics.remote()).sessions.open == 0)
    assert ray.get(actor.health.remote()).is_serving
    assert ray.get(actor.drain.remote(20.0))  # busy cores take a while to tell
    ray.get(actor.stop.remote())
    ray.kill(actor)


@pytest.mark.slow
def test_a_model_service_actor_serves_what_was_trained(
    trained: tuple[list[TrainingProgress], Path],
) -> None:
    actor_class: Any = ModelServiceActor
    actor = actor_class.options(num_cpus=0.1).remote(
        str(trained[1]), dialects=["rlmesh.protocol.v1"]
    )

    with RemoteModel(ray.get(actor.address.remote())) as model:
        model.configure_route(gymnasium.make_vec("CartPole-v1", num_envs=4))
        actions = model.predict(np.zeros((4, 4), np.float32))

    assert actions.shape == (4,)
    ray.kill(actor)


def test_a_model_service_actor_names_a_wrong_checkpoint() -> None:
    actor_class: Any = ModelServiceActor
    actor = actor_class.options(num_cpus=0.1).remote("no/such/checkpoint")

    with pytest.raises(ConfigurationError, match="no/such/checkpoint"):
        ray.get(actor.address.remote())
    ray.kill(actor)


def test_the_registry_lives_where_only_the_cluster_s_own_end_reaches_it() -> None:
    before = ray.cluster_resources()["node:__internal_head__"]

    ray.get(shared_registry().lookup.remote("absent"))

    # A little of what only the head has is taken.
    assert ray.available_resources()["node:__internal_head__"] < before


def test_the_registry_keeps_the_newest_incarnation() -> None:
    registry = EndpointRegistry()

    assert registry.announce("a", "127.0.0.1:1") == 1
    assert registry.announce("a", "127.0.0.1:2") == 2
    record = registry.lookup("a")
    assert record is not None
    assert (record.address, record.incarnation) == ("127.0.0.1:2", 2)
    registry.withdraw("a")
    registry.withdraw("a")
    assert registry.lookup("a") is None
