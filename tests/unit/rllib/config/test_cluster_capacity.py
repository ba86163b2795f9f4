"""Whether the actors of an algorithm fit into a cluster: arithmetic, without Ray."""

from typing import Any

import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.rllib.config.cluster_capacity import (
    ActorGroup,
    actor_groups,
    capacity_warnings,
    find_shortage,
    remedy_for,
)

LAPTOP = [{"CPU": 2.0}]


def runners(count: int, **needs: float) -> ActorGroup:
    return ActorGroup("EnvRunner(s)", count, needs or {"CPU": 1.0}, "num_env_runners")


def endpoints(count: int, cpus: float = 1.0) -> ActorGroup:
    return ActorGroup("endpoint(s)", count, {"CPU": cpus}, "EnvFleet(num_cpus=...)")


def test_two_runners_beside_an_endpoint_of_a_cpu_do_not_fit_on_two_cpus() -> None:
    shortage = find_shortage([runners(2), endpoints(1)], LAPTOP)

    assert shortage == (
        "2 EnvRunner(s) with 1 CPU each, 1 endpoint(s) with 1 CPU need 3 CPU, and there are 2"
    )


@pytest.mark.parametrize(
    "groups",
    [
        [runners(0), endpoints(2)],
        [runners(1), endpoints(2, 0.5)],
        [runners(2), endpoints(0)],
        [runners(3, CPU=0.1), endpoints(17, 0.1)],
        [],
    ],
)
def test_what_fits_is_left_alone(groups: list[ActorGroup]) -> None:
    assert find_shortage(groups, LAPTOP) is None


def test_an_actor_has_its_resources_on_one_node() -> None:
    assert find_shortage([runners(1, CPU=3.0)], [{"CPU": 4.0}, {"CPU": 2.0}]) is None
    shortage = find_shortage([runners(1, CPU=3.0)], [{"CPU": 2.0}, {"CPU": 2.0}])

    assert shortage is not None
    assert "none can be placed" in shortage


@pytest.mark.parametrize("name", ["GPU", "simulator"])
def test_other_resources_count_as_well(name: str) -> None:
    groups = [runners(2, **{"CPU": 1.0, name: 0.5})]

    assert find_shortage(groups, [{"CPU": 2.0, name: 1.0}]) is None
    shortage = find_shortage(groups, [{"CPU": 2.0, name: 0.5}])
    assert shortage is not None
    assert f"need 1 {name}, and there are 0.5" in shortage


def test_the_remedy_names_the_settings_and_how_many_cpus_would_do() -> None:
    remedy = remedy_for([runners(4), endpoints(1)], [{"CPU": 3.0}])

    assert remedy.startswith("lower num_env_runners, EnvFleet(num_cpus=...), or add nodes")
    assert remedy.endswith("ray.init(num_cpus=5)")


def test_more_cpus_are_not_named_where_another_resource_is_missing() -> None:
    assert "num_cpus=" not in remedy_for([runners(1, CPU=1.0, GPU=1.0)], LAPTOP)


@pytest.mark.parametrize(
    "config",
    [
        PPOConfig(),
        PPOConfig().env_runners(num_env_runners=0),
        PPOConfig().env_runners(num_env_runners=3, num_cpus_per_env_runner=0.5),
        PPOConfig().env_runners(
            num_gpus_per_env_runner=0.5, custom_resources_per_env_runner={"simulator": 2}
        ),
        PPOConfig().learners(num_learners=2, num_cpus_per_learner=3),
        PPOConfig().learners(num_learners=2, num_gpus_per_learner=1),
        PPOConfig().evaluation(
            evaluation_interval=1,
            evaluation_num_env_runners=2,
            evaluation_config={"num_cpus_per_env_runner": 2},
        ),
        APPOConfig().learners(num_learners=2, num_aggregator_actors_per_learner=2),
        APPOConfig().learners(num_learners=0, num_aggregator_actors_per_learner=1),
    ],
)
def test_the_actors_are_those_for_which_rllib_asks_tune(config: AlgorithmConfig) -> None:
    config.environment("CartPole-v1")
    bundles = config.algo_class.default_resource_request(config).bundles
    asked: dict[str, float] = {}
    for bundle in bundles[1:]:  # the first is for the driver's part
        for name, amount in bundle.items():
            asked[name] = asked.get(name, 0.0) + amount

    found: Any = {}
    for group in actor_groups(config):
        for name, amount in group.each.items():
            found[name] = found.get(name, 0.0) + group.count * amount

    assert {k: v for k, v in found.items() if v} == {k: v for k, v in asked.items() if v}


def test_what_is_missing_names_the_options_that_ask_for_it() -> None:
    config = (
        PPOConfig()
        .env_runners(num_env_runners=1, num_gpus_per_env_runner=1)
        .learners(num_learners=1, num_gpus_per_learner=1, custom_resources_per_learner={"tpu": 1})
    )
    named = {group.name: group.settings for group in actor_groups(config)}

    assert named["EnvRunner(s)"].endswith("num_cpus_per_env_runner, num_gpus_per_env_runner")
    assert named["Learner(s)"].endswith("num_gpus_per_learner, custom_resources_per_learner")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (PPOConfig().env_runners(num_env_runners=10), "10 EnvRunner(s) with 1 CPU each need 10"),
        (PPOConfig().learners(num_learners=1, num_gpus_per_learner=1), "need 1 GPU, and there"),
    ],
)
def test_before_ray_runs_actors_are_compared_with_this_machine(
    config: AlgorithmConfig, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda _: None)
    monkeypatch.setattr("ray._private.utils.get_num_cpus", lambda: 2)

    with pytest.raises(ConfigurationError, match="before configure") as refused:
        list(capacity_warnings(config))

    assert reason in str(refused.value)
    assert list(capacity_warnings(PPOConfig().env_runners(num_env_runners=1))) == []


def test_before_ray_runs_a_cluster_that_is_not_known_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")

    (warning,) = capacity_warnings(PPOConfig().env_runners(num_env_runners=10))

    assert "call ray.init() before configure" in warning
    assert list(capacity_warnings(PPOConfig().env_runners(num_env_runners=0))) == []
