"""configure() with sources that cannot work, and what it makes of those that can."""

import functools
import gc
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest
import ray
from ray import tune
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

import rlmesh_ray.rllib.config.cluster_capacity
import rlmesh_ray.rllib.runner.slot
from rlmesh_ray import EnvServer
from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.errors import (
    AccessDeniedError,
    ConfigurationError,
    ConfigurationWarning,
    ContractMismatchError,
    EndpointError,
)
from rlmesh_ray.rllib import RLMeshEnvRunner, configure, configure_rllink
from rlmesh_ray.rllib.config.endpoint_sources import endpoint_cpus
from rlmesh_ray.rllib.config.rollout_plan import PLAN_KEY, RolloutPlan
from rlmesh_ray.rllib.runner.slot import RetryPolicy
from rlmesh_ray.testing.envs import Fault, FaultyEnv
from tests.loopback.ports import free_address
from tests.ray.multi_agent_worlds import Crossing

pytestmark = pytest.mark.usefixtures("local_ray")


def ppo() -> PPOConfig:
    return PPOConfig().env_runners(num_env_runners=0)


def runner(config: Any) -> Any:
    return RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)


def plan_of(config: AlgorithmConfig) -> RolloutPlan:
    plan = config.env_config[PLAN_KEY]
    assert isinstance(plan, RolloutPlan)
    return plan


@pytest.fixture(scope="module")
def pairs() -> Iterator[EnvServer]:
    """An endpoint, 2 lanes wide."""
    with EnvServer("CartPole-v1", num_envs=2) as server:
        yield server


@pytest.fixture(scope="module")
def triples() -> Iterator[EnvServer]:
    """An endpoint, 3 lanes wide."""
    with EnvServer("CartPole-v1", num_envs=3) as server:
        yield server


@pytest.mark.parametrize("env", [None, [], 7])
def test_what_is_no_source_of_environments_is_refused(env: Any) -> None:
    with pytest.raises(ConfigurationError, match="give a Gymnasium id"):
        configure(ppo(), env)


@pytest.mark.parametrize(
    ("config", "env", "words"),
    [
        (PPOConfig, "h:1", r"PPOConfig is a class, not a config; give PPOConfig\(\)"),
        ({}, "h:1", r"\{\} is not an AlgorithmConfig of RLlib; give one, such as PPOConfig\(\)"),
        ("h:1", PPOConfig(), r"the arguments are swapped: write configure\(config, env\)"),
    ],
)
def test_what_is_no_config_is_refused_with_what_is(config: Any, env: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        configure(config, env)


@pytest.mark.parametrize("flag", [{"fast_path": None}, {"fast_path": "x"}, {"lockstep": 1}])
def test_a_switch_that_is_neither_true_nor_false_is_refused(flag: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be True or False"):
        configure(ppo(), "CartPole-v1", **flag)


def test_simulators_of_a_config_that_is_none_are_refused_likewise() -> None:
    space: Any = gymnasium.spaces.Discrete(2)
    config: Any = PPOConfig

    with pytest.raises(ConfigurationError, match=r"give PPOConfig\(\)"):
        configure_rllink(config, observation_space=space, action_space=space)


def test_an_instance_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="served by EnvServer"):
        configure(ppo(), gymnasium.make("CartPole-v1"))  # type: ignore[arg-type]


def test_what_a_bad_value_does_is_for_endpoints_that_are_started_here(pairs: EnvServer) -> None:
    with pytest.raises(ConfigurationError, match=r"EnvServer\(on_bad_value=\.\.\.\)"):
        configure(PPOConfig(), pairs.address, on_bad_value="truncate")
    with pytest.raises(ConfigurationError, match="'zero' is not one of error, truncate"):
        configure(PPOConfig(), "CartPole-v1", on_bad_value="zero")


def test_no_endpoints_are_not_taken_for_the_default() -> None:
    with pytest.raises(ConfigurationError, match="num_endpoints=0"):
        configure(ppo(), "CartPole-v1", num_endpoints=0)


@pytest.mark.parametrize("framework", ["tf2", "tf"])
def test_another_framework_than_torch_is_refused(framework: str) -> None:
    with pytest.raises(ConfigurationError, match="trains with torch only; leave framework"):
        configure(ppo().framework(framework), "127.0.0.1:1")


def test_a_config_of_the_old_api_stack_is_refused() -> None:
    config = ppo().api_stack(
        enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False
    )

    with pytest.raises(ConfigurationError, match="old API stack"):
        configure(config, "127.0.0.1:1")


def test_the_token_does_not_show_in_the_config() -> None:
    with EnvServer("CartPole-v1", token="open-sesame") as server:
        config = configure(ppo(), server.address, token="open-sesame")

    assert "open-sesame" not in repr(config.env_config)


def test_sampling_goes_on_after_an_outage_that_has_left_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        rlmesh_ray.rllib.runner.slot, "RetryPolicy", functools.partial(RetryPolicy, 0.0)
    )
    with EnvServer("CartPole-v1", address=free_address()) as server:
        sampler = runner(configure(ppo(), server.address))
        sampler.sample(num_timesteps=5)
        server.stop(0.0)
        with pytest.raises(EndpointError):
            sampler.sample(num_timesteps=5)

        with EnvServer("CartPole-v1", address=server.address):
            episodes = sampler.sample(num_timesteps=5)
            sampler.stop()

    assert sum(len(episode) for episode in episodes) >= 5


def test_a_wrong_token_is_not_tried_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    address = free_address()
    with EnvServer("CartPole-v1", token="old", address=address):
        config = configure(ppo(), address, token="old")
    with EnvServer("CartPole-v1", token="new", address=address):
        monkeypatch.setattr(rlmesh_ray.rllib.runner.slot, "_FIRST_DELAY_S", math.inf)
        monkeypatch.setattr(rlmesh_ray.rllib.runner.slot, "_LONGEST_DELAY_S", math.inf)
        with pytest.raises(AccessDeniedError):
            runner(config)


# The Ray of these tests has 16 logical CPUs.
@pytest.mark.parametrize(
    ("num_env_runners", "num_evaluation_runners", "num_endpoints", "num_cpus"),
    [(0, 0, 2, 1.0), (15, 0, 2, 0.5), (16, 0, 1, 0.0), (12, 3, 2, 0.5)],
)
def test_endpoints_leave_the_runners_room(
    num_env_runners: int, num_evaluation_runners: int, num_endpoints: int, num_cpus: float
) -> None:
    config = ppo().env_runners(num_env_runners=num_env_runners)
    config.evaluation(evaluation_num_env_runners=num_evaluation_runners)

    assert endpoint_cpus(config, num_endpoints) == pytest.approx(num_cpus)


@pytest.fixture(scope="module")
def full_fleet() -> Iterator[EnvFleet]:
    """An endpoint that has a CPU, as it is by default."""
    with EnvFleet("CartPole-v1") as fleet:
        yield fleet


def test_runners_that_never_find_room_beside_the_fleet_are_refused(full_fleet: EnvFleet) -> None:
    with pytest.raises(
        ConfigurationError, match=r"wait without end.* need 17 CPU, .* are 16"
    ) as reported:
        configure(ppo().env_runners(num_env_runners=16), full_fleet)

    assert "lower num_env_runners, num_cpus_per_env_runner, EnvFleet(" in str(reported.value)


def test_evaluation_runners_and_learners_count_as_well(full_fleet: EnvFleet) -> None:
    config = ppo().env_runners(num_env_runners=10).learners(num_learners=3)
    config.evaluation(evaluation_interval=1, evaluation_num_env_runners=3)

    with pytest.raises(ConfigurationError, match=r"3 Learner.* need 17 CPU"):
        configure(config, full_fleet)


def test_a_number_that_tune_has_yet_to_choose_is_not_counted(full_fleet: EnvFleet) -> None:
    config = ppo().learners(num_learners=tune.choice([1, 100]))

    assert configure(config, full_fleet) is config


def test_what_another_actor_holds_is_warned_of(
    full_fleet: EnvFleet, holder: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rlmesh_ray.rllib.config.cluster_capacity, "_SETTLE_S", 0.0)
    other = holder(10)

    with pytest.warns(ConfigurationWarning, match=r"15 CPU, and there are .* free") as caught:
        configure(ppo().env_runners(num_env_runners=15), full_fleet)

    ray.kill(other)
    assert [record.filename for record in caught] == [__file__]


NEWCOMER = """
import ray, sys
from ray.rllib.algorithms.ppo import PPOConfig
from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.rllib import configure

ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
with EnvFleet("CartPole-v1", num_endpoints=1, num_envs=4) as fleet:
    try:
        configure(PPOConfig(), fleet).build_algo()
    except ConfigurationError as error:
        print(error)
    configure(PPOConfig().env_runners(num_env_runners=1), fleet).build_algo().stop()
    print("built")
"""


@pytest.mark.slow
def test_a_first_script_on_two_cpus_does_not_hang() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEWCOMER], capture_output=True, text=True, timeout=100, check=True
    )

    refusal, built = done.stdout.splitlines()
    assert "need 3 CPU, and there are 2" in refusal
    assert "lower num_env_runners" in refusal
    assert built == "built"


def test_a_runner_opens_the_sessions_that_its_lanes_take(pairs: EnvServer) -> None:
    config = configure(ppo().env_runners(num_envs_per_env_runner=6), pairs.address)

    sampler = runner(config)

    assert config.num_envs_per_env_runner == sampler.num_envs == 6
    assert pairs.num_sessions == 3
    assert sum(map(len, sampler.sample(num_timesteps=12))) == 12
    sampler.stop()


def test_lanes_that_are_no_multiple_of_the_width_are_refused(pairs: EnvServer) -> None:
    with pytest.raises(ContractMismatchError, match=r"is 5, .* multiple of 2, .* to 4 or 6"):
        configure(ppo().env_runners(num_envs_per_env_runner=5), pairs.address)


def test_a_server_stands_for_its_address(pairs: EnvServer) -> None:
    alone, listed = (plan_of(configure(ppo(), each)) for each in (pairs, [pairs]))

    assert alone.resolver.address(0) == listed.resolver.address(0) == pairs.address


@pytest.mark.parametrize(("asked", "lanes"), [(1, 3), (6, 6)])
def test_a_config_can_be_given_other_endpoints(
    pairs: EnvServer, triples: EnvServer, asked: int, lanes: int
) -> None:
    config = configure(ppo().env_runners(num_envs_per_env_runner=asked), pairs.address)

    config = configure(config, triples.address)

    assert config.num_envs_per_env_runner == lanes
    assert plan_of(config).contract.num_envs == 3


def evaluator(config: AlgorithmConfig) -> Any:
    own = config.get_evaluation_config_object()
    return RLMeshEnvRunner(config=own, worker_index=0, num_workers=0)


def test_evaluation_runners_can_have_endpoints_and_lanes_of_their_own(pairs: EnvServer) -> None:
    config = ppo().evaluation(
        evaluation_interval=1, evaluation_config={"num_envs_per_env_runner": 4}
    )
    with EnvServer("CartPole-v1", num_envs=2) as other:
        configure(config, [pairs.address, other.address], num_evaluation_endpoints=1)

        evaluates, trains = evaluator(config), runner(config)

        assert (evaluates.num_envs, trains.num_envs) == (4, 2)
        assert other.num_sessions == 2
        evaluates.stop()
        trains.stop()


@pytest.mark.parametrize(
    ("settings", "asked", "is_repeated"),
    [
        ({}, {"num_episodes": 2}, True),
        ({"evaluation_config": {"seed": None}}, {"num_episodes": 2}, False),
        (
            {"evaluation_duration_unit": "timesteps"},
            {"num_timesteps": 20, "force_reset": True},
            False,
        ),
    ],
    ids=["as warned of", "without the seed", "by timesteps"],
)
def test_a_seed_repeats_the_episodes_of_an_evaluation_unless_it_is_remedied(
    pairs: EnvServer, settings: Any, asked: Any, is_repeated: bool
) -> None:
    config = ppo().debugging(seed=1).evaluation(evaluation_interval=1, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluates = evaluator(configure(config, pairs.address))

    starts = [
        sorted(tuple(episode.get_observations(0)) for episode in evaluates.sample(**asked)[:2])
        for _ in range(2)
    ]
    evaluates.stop()

    assert (starts[0] == starts[1]) == is_repeated
    assert any("replays" in str(record.message) for record in caught) == is_repeated


def test_evaluation_may_not_use_up_the_endpoints(pairs: EnvServer) -> None:
    with pytest.raises(ConfigurationError, match="at least one for training"):
        configure(
            ppo().evaluation(evaluation_interval=1), pairs.address, num_evaluation_endpoints=1
        )


@pytest.fixture(scope="module")
def self_started(local_ray: None) -> AlgorithmConfig:
    """A config that has started endpoints of its own, which nothing else holds."""
    config = ppo().env_runners(num_envs_per_env_runner=4)
    config.evaluation(
        evaluation_interval=1, evaluation_num_env_runners=1, evaluation_parallel_to_training=True
    )
    env = functools.partial(FaultyEnv, Fault.NAN, at_step=3)
    configure(config, env, num_endpoints=2, on_bad_value="truncate")
    gc.collect()
    return config


def test_new_endpoints_are_as_many_and_as_wide_as_the_config_needs(
    self_started: AlgorithmConfig,
) -> None:
    plan = plan_of(self_started)

    assert self_started.num_envs_per_env_runner == 4
    assert plan.contract.num_envs == 2
    assert plan.endpoints_of(0) == (0, 1)
    assert plan.endpoints_of(1, in_evaluation=True) == (2, 2)
    assert len(plan.resolver) == 3


def test_a_fleet_that_the_config_starts_lives_on_and_truncates_at_a_bad_value(
    self_started: AlgorithmConfig,
) -> None:
    sampler = runner(self_started)

    episodes = sampler.sample(num_episodes=2)

    assert [(len(one), one.is_truncated) for one in episodes] == [(3, True), (3, True)]
    assert "is NaN" in episodes[0].get_infos(-1)["rlmesh_ray.bad_value"]
    sampler.stop()


@pytest.mark.parametrize("setting", ["num_endpoints", "num_envs"])
def test_numbers_below_one_are_refused_by_name(setting: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{setting}=0 must be"):
        configure(
            ppo().env_runners(num_envs_per_env_runner=2),
            "CartPole-v1",
            **{setting: 0},  # type: ignore[arg-type]
        )


def test_a_setting_that_is_hardly_meant_so_is_warned_of_where_it_is_configured(
    pairs: EnvServer,
) -> None:
    config = ppo().debugging(seed=1).evaluation(evaluation_interval=1)

    with pytest.warns(ConfigurationWarning, match="replays the same episodes") as caught:
        configure(config, pairs.address)

    assert [record.filename for record in caught] == [__file__]


def test_a_deadline_that_rllib_would_not_wait_for_is_refused_before_anything_is_dialled() -> None:
    with pytest.raises(ConfigurationError, match="not below sample_timeout_s"):
        configure(ppo().env_runners(num_env_runners=1, sample_timeout_s=20), "127.0.0.1:1")


@pytest.mark.parametrize(("own", "name"), [({"env": "Pendulum-v1"}, "env"), (PPOConfig(), "env")])
def test_an_evaluation_elsewhere_is_refused(own: Any, name: str) -> None:
    config = ppo().evaluation(evaluation_interval=1, evaluation_config=own)

    with pytest.raises(ConfigurationError, match=f"evaluation_config sets {name}="):
        configure(config, "127.0.0.1:1")


class OwnRunner(RLMeshEnvRunner):
    """A user's."""


def test_a_runner_derived_from_ours_is_kept(pairs: EnvServer) -> None:
    config = configure(ppo().env_runners(env_runner_cls=OwnRunner), pairs.address)

    assert config.env_runner_cls is OwnRunner


class ForeignRunner(SingleAgentEnvRunner):
    """Makes environments of its own."""


def test_a_runner_that_cannot_use_endpoints_is_refused(pairs: EnvServer) -> None:
    with pytest.raises(ConfigurationError, match=r"derive it from .*RLMeshEnvRunner"):
        configure(ppo().env_runners(env_runner_cls=ForeignRunner), pairs.address)


def test_policies_for_agents_that_are_not_there_are_refused(pairs: EnvServer) -> None:
    config = ppo().multi_agent(policies={"left", "right"})

    with pytest.raises(ConfigurationError, match="has one agent"):
        configure(config, pairs.address)


def test_the_policies_of_several_agents_cannot_be_compiled() -> None:
    config = ppo().env_runners(num_env_runners=0)
    words = 'inference="compiled" is impossible: .*several agents.*; use "auto" or "torch"'

    with EnvServer(Crossing) as server, pytest.raises(ConfigurationError, match=words):
        configure(config, server.address, inference="compiled")


def test_an_existing_script_is_configured_without_a_word(pairs: EnvServer) -> None:
    config = PPOConfig().environment("CartPole-v1")
    config.env_runners(num_env_runners=2, num_envs_per_env_runner=8)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configure(config, f"rlmesh://{pairs.address}")

    assert plan_of(config).endpoints_of(2) == (0, 0, 0, 0)


@pytest.mark.slow
def test_evaluation_beside_training_has_endpoints_of_its_own_in_a_fleet() -> None:
    config = PPOConfig().env_runners(
        num_env_runners=2, num_envs_per_env_runner=4, num_cpus_per_env_runner=0.1
    )
    config.training(train_batch_size_per_learner=256, minibatch_size=128, num_epochs=1)
    config.evaluation(
        evaluation_interval=1, evaluation_num_env_runners=1, evaluation_parallel_to_training=True
    )
    fleet = EnvFleet("CartPole-v1", num_endpoints=3, num_envs=2, num_cpus=0.1)
    configure(config, fleet, num_evaluation_endpoints=1)

    algorithm = config.build_algo()
    result = algorithm.train()
    sessions = [ray.get(actor.describe.remote())["num_sessions"] for actor in fleet.actors]
    algorithm.stop()

    assert sessions == [2, 2, 2]
    assert result["evaluation"]["env_runners"]["num_episodes"] >= 10
