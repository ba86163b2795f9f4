"""Settings that are hardly meant so, and settings that cannot work, found in a config alone."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import VectorizeMode, spaces
from ray import tune
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.env_to_module import FlattenObservations, MeanStdFilter
from ray.rllib.connectors.module_to_env import NormalizeAndClipActions
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from rlmesh_ray import EnvServer
from rlmesh_ray.errors import ConfigurationError, ContractMismatchError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.rllib import RLMeshEnvRunner, configure
from rlmesh_ray.rllib.config.config_checks import (
    allow_resets,
    choose_runner,
    config_warnings,
    environment_warnings,
    require_deadlines,
    require_module,
    require_spaces,
)
from rlmesh_ray.rllib.config.hyperparameters import algorithm_config
from rlmesh_ray.rllib.config.rollout_plan import CombinedResolver, FixedAddressResolver, RolloutPlan
from rlmesh_ray.rllib.config.session_endpoints import SessionLayout
from rlmesh_ray.rllib.runner.env_runner import LANES_AS_ARRAYS
from rlmesh_ray.rllib.runner.fast_path import FAST_PATH_IS_OFF
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.multi_agent import lane_observation_space
from rlmesh_ray.spaces.spec import DictSpec

BOX = spaces.Box(-1.0, 1.0, (4,), np.float32)
TEXT = spaces.Text(5)
FROM_FIVE: spaces.Space[Any] = spaces.Discrete(3, start=5)


def contract(observation: spaces.Space[Any] = BOX, action: spaces.Space[Any] | None = None) -> Any:
    return EnvContract(
        "Toy-v0",
        from_gymnasium(observation),
        from_gymnasium(action or spaces.Discrete(2)),
        8,
        AutoresetMode.NEXT_STEP,
    )


def found(
    config: AlgorithmConfig,
    *,
    share: SessionLayout | None = None,
    step_timeout_s: float = 30,
    lockstep: bool = False,
) -> Any:
    plan = RolloutPlan(
        CombinedResolver.of([FixedAddressResolver(("127.0.0.1:1",))]),
        contract(),
        share or SessionLayout(1, 1, 1),
        step_timeout_s=step_timeout_s,
        lockstep=lockstep,
    )
    return list(config_warnings(config, plan))


def evaluated(config: AlgorithmConfig, **settings: Any) -> AlgorithmConfig:
    return config.evaluation(evaluation_interval=1, **settings)


@pytest.mark.parametrize("kind", [PPOConfig, IMPALAConfig, APPOConfig])
@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_rllibs_defaults_need_no_advice(
    kind: Callable[[], AlgorithmConfig], num_env_runners: int
) -> None:
    config = kind().env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=8)

    assert found(config) == []
    assert found(evaluated(config, evaluation_num_env_runners=1)) == []


@pytest.mark.parametrize("name", ["APPO", "DQN", "IMPALA", "PPO", "SAC"])
def test_presets_need_no_advice(name: str) -> None:
    assert found(algorithm_config(name).env_runners(num_envs_per_env_runner=8)) == []


@pytest.mark.parametrize("env", ["Pendulum-v1", "gymnasium:Pendulum-v1", "Toy-v1", "ALE/Toy-v0"])
def test_an_environment_that_the_endpoints_do_not_serve_is_named(env: str) -> None:
    (sentence,) = environment_warnings(PPOConfig().environment(env), contract())

    assert sentence.startswith(f"environment({env!r}) is not what the endpoints serve")
    assert "Toy-v0" in sentence


def test_an_endpoint_that_gives_its_environment_no_id_may_serve_any() -> None:
    unnamed = replace(contract(), id="UnknownEnv-v1")

    assert not list(environment_warnings(PPOConfig().environment("Toy-v0"), unnamed))


@pytest.mark.parametrize("env", [None, "Toy-v0", "toys:Toy-v0", "of Ray's own", gymnasium.Env])
def test_an_environment_that_may_be_the_endpoints_own_needs_no_advice(env: Any) -> None:
    assert not list(environment_warnings(PPOConfig().environment(env), contract()))


def test_a_seed_that_repeats_every_evaluation_is_named() -> None:
    config = evaluated(PPOConfig().debugging(seed=7))

    [sentence] = found(config)

    assert "debugging(seed=7)" in sentence
    assert "evaluation_config={'seed': None}" in sentence


@pytest.mark.parametrize(
    "remedy",
    [
        {"evaluation_config": {"seed": None}},
        {"evaluation_duration_unit": "timesteps"},
        {"evaluation_duration": "auto", "evaluation_parallel_to_training": True},
    ],
)
def test_a_seed_that_evaluation_does_not_repeat_is_left_alone(remedy: dict[str, Any]) -> None:
    assert found(evaluated(PPOConfig().debugging(seed=7), **remedy)) == []


def test_a_seed_without_evaluation_is_left_alone() -> None:
    assert found(PPOConfig().debugging(seed=7)) == []


def test_a_seed_that_sessions_at_their_own_pace_defeat_is_named() -> None:
    config, share = PPOConfig().debugging(seed=7), SessionLayout(2, 1, 2)

    [sentence] = found(config, share=share)

    assert "lockstep=True" in sentence
    assert found(config, share=share, lockstep=True) == []


def test_a_seed_that_repeats_the_training_is_named() -> None:
    config = PPOConfig().debugging(seed=7).env_runners(batch_mode="complete_episodes")

    [sentence] = found(config)

    assert "batch_mode='truncate_episodes'" in sentence


@pytest.mark.parametrize("kind", [DQNConfig, SACConfig])
def test_one_step_a_call_is_named_with_what_keeps_the_learning(
    kind: Callable[[], AlgorithmConfig],
) -> None:
    config = kind().env_runners(num_env_runners=1, num_envs_per_env_runner=4)

    [sentence] = found(config)

    intensity = config.train_batch_size_per_learner / (4 * 2)
    assert "rollout_fragment_length='auto'" in sentence
    assert f"training_intensity={intensity:g}" in sentence
    config.env_runners(rollout_fragment_length=8).training(training_intensity=intensity)
    assert found(config) == []


def test_the_advised_intensity_learns_as_often_as_before() -> None:
    from ray.rllib.algorithms.dqn.dqn import calculate_rr_weights

    config = DQNConfig().env_runners(num_env_runners=1, num_envs_per_env_runner=4)
    assert calculate_rr_weights(config) == [1, 1]

    config.env_runners(rollout_fragment_length=8).training(training_intensity=32 / (4 * 2))

    assert calculate_rr_weights(config) == [1, 8]


def test_a_batch_that_leaves_each_lane_one_step_is_named() -> None:
    config = PPOConfig().env_runners(num_env_runners=2, num_envs_per_env_runner=64)

    [sentence] = found(config.training(train_batch_size_per_learner=128, minibatch_size=64))

    assert "128 lanes share a train batch of 128 steps" in sentence


@pytest.mark.parametrize(
    "config",
    [
        PPOConfig().training(train_batch_size_per_learner=tune.choice([64, 128])),
        PPOConfig().training(train_batch_size_per_learner={"grid_search": [64, 128]}),
        PPOConfig().training(lr=tune.loguniform(1e-5, 1e-3)),
        DQNConfig().env_runners(rollout_fragment_length=8).training(n_step=tune.choice([1, 3])),
    ],
)
def test_what_tune_has_yet_to_choose_is_left_alone(config: AlgorithmConfig) -> None:
    assert found(config) == []


def test_a_fragment_of_one_step_is_named() -> None:
    [sentence] = found(PPOConfig().env_runners(rollout_fragment_length=1))

    assert "rollout_fragment_length=1 " in sentence


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (PPOConfig().env_runners(num_env_runners=1), "sample_timeout_s"),
        (
            evaluated(IMPALAConfig(), evaluation_num_env_runners=1, evaluation_sample_timeout_s=60),
            "evaluation_sample_timeout_s",
        ),
    ],
)
def test_a_deadline_must_lie_below_rllibs_own(config: AlgorithmConfig, setting: str) -> None:
    require_deadlines(config, 59.0, 30.0)
    assert found(config, step_timeout_s=30.0) == []

    [sentence] = found(config, step_timeout_s=31.0)
    assert f"less than half of {setting}=60" in sentence
    with pytest.raises(ConfigurationError, match=f"step_timeout_s=60 is not below {setting}=60"):
        require_deadlines(config, 60.0, 30.0)


@pytest.mark.parametrize(
    "config",
    [
        PPOConfig().env_runners(num_env_runners=0),
        IMPALAConfig().env_runners(num_env_runners=2),
        PPOConfig().env_runners(num_env_runners=2, sample_timeout_s=3600),
    ],
)
def test_a_deadline_may_be_long_where_rllib_waits_longer(config: AlgorithmConfig) -> None:
    require_deadlines(config, 600.0, 30.0)

    assert found(config, step_timeout_s=600.0) == []


def test_rllib_waits_for_two_resets_where_its_limits_are_the_defaults() -> None:
    config = evaluated(PPOConfig().env_runners(num_env_runners=1), evaluation_num_env_runners=1)
    own = PPOConfig().env_runners(num_env_runners=1, sample_timeout_s=90.0)
    local = PPOConfig().env_runners(num_env_runners=0)

    require_deadlines(config, 599.0, 300.0)
    for each in (config, own, local):
        allow_resets(each, 300.0)

    assert (config.sample_timeout_s, config.evaluation_sample_timeout_s) == (600.0, 600.0)
    assert (own.sample_timeout_s, local.sample_timeout_s) == (90.0, PPOConfig().sample_timeout_s)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, "3"])
def test_a_deadline_is_a_number_and_more_than_nothing(seconds: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"step_timeout_s.*finite number of seconds"):
        require_deadlines(PPOConfig(), seconds, 30.0)
    with pytest.raises(ConfigurationError, match=r"reset_timeout_s.*finite number of seconds"):
        require_deadlines(PPOConfig(), 30.0, seconds)


def test_more_sessions_than_an_endpoint_allows_are_named() -> None:
    assert found(PPOConfig(), share=SessionLayout(1, 4, 4)) == []

    [sentence] = found(PPOConfig(), share=SessionLayout(1, 17, 1))

    assert "17 sessions" in sentence
    assert "max_sessions" in sentence


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (PPOConfig().environment(env_config={"gravity": 3}), "env_config (gravity)"),
        (
            evaluated(PPOConfig(), evaluation_config={"env_config": {"wind": 1}}),
            "env_config (wind)",
        ),
        (PPOConfig().env_runners(gym_env_vectorize_mode="async"), "gym_env_vectorize_mode=async"),
        (
            PPOConfig().env_runners(gym_env_vectorize_mode=VectorizeMode.ASYNC),
            "gym_env_vectorize_mode=",
        ),
    ],
)
def test_a_setting_that_does_nothing_is_named(config: AlgorithmConfig, setting: str) -> None:
    [sentence] = found(config)

    assert setting in sentence


class OwnDefault(PPOConfig):
    """Has a default module of its own, of which only its author knows what it takes."""

    def get_default_rl_module_spec(self) -> Any:
        return super().get_default_rl_module_spec()


def image(size: int) -> spaces.Space[Any]:
    return spaces.Box(0, 255, (size, size, 3), np.uint8)


def check_module(config: AlgorithmConfig, *of: spaces.Space[Any]) -> None:
    require_module(config, contract(*of), choose_runner(config, contract(*of)))


@pytest.mark.parametrize(
    ("kind", "observation", "action", "reason"),
    [
        (PPOConfig, TEXT, spaces.Discrete(2), "No default encoder config"),
        (PPOConfig, spaces.Dict(a=BOX, b=BOX), spaces.Discrete(2), "FlattenObservations"),
        (PPOConfig, image(9), spaces.Discrete(2), r"Config\(conv_filters=.*train_from_images\.md"),
        (PPOConfig, image(84), spaces.Discrete(2), r"travel as bytes.*train_from_images\.md has"),
        (PPOConfig, spaces.Box(0, 9, (3,), np.int64), spaces.Discrete(2), "FlattenObservations"),
        (PPOConfig, BOX, spaces.MultiBinary(3), "Unsupported action space"),
        (PPOConfig, spaces.Dict(a=BOX, b=TEXT), spaces.Discrete(2), "no encoder for Text"),
        (PPOConfig, FROM_FIVE, spaces.Discrete(2), "begin at 0, as RLlib's Fla"),
        (PPOConfig, BOX, TEXT, "no actions of Text"),
        (PPOConfig, BOX, spaces.Discrete(3, start=1), "send 0 to 2 where the .* takes 1 to 3"),
        (PPOConfig, BOX, spaces.Tuple((BOX, spaces.Discrete(3, start=-1))), "from 0, not from -1"),
        (DQNConfig, BOX, BOX, "takes Discrete actions only"),
        (DQNConfig, BOX, spaces.MultiBinary(3), "takes Discrete actions only"),
        (SACConfig, BOX, spaces.MultiDiscrete([2, 3]), "SAC only supports"),
    ],
)
def test_spaces_that_rllibs_default_module_does_not_take_are_refused_with_the_reason(
    kind: Callable[[], AlgorithmConfig],
    observation: spaces.Space[Any],
    action: spaces.Space[Any],
    reason: str,
) -> None:
    with pytest.raises(ConfigurationError, match=reason) as caught:
        check_module(kind(), observation, action)

    assert "\n" not in str(caught.value)
    assert "Toy-v0" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "observation", "action"),
    [
        (PPOConfig, spaces.Box(0, 255, (84, 84, 3), np.float32), spaces.Discrete(2)),
        (OwnDefault, BOX, spaces.Discrete(3, start=1)),
        (PPOConfig, BOX, spaces.Dict(move=BOX, jump=spaces.Discrete(2))),
        (DQNConfig, BOX, spaces.Discrete(2)),
        (SACConfig, BOX, BOX),
        (IMPALAConfig, BOX, spaces.MultiDiscrete([2, 3])),
    ],
)
def test_spaces_that_rllibs_default_module_takes_are_not_refused(
    kind: Callable[[], AlgorithmConfig],
    observation: spaces.Space[Any],
    action: spaces.Space[Any],
) -> None:
    check_module(kind(), observation, action)


@pytest.mark.parametrize(
    "config",
    [
        PPOConfig().env_runners(
            env_to_module_connector=lambda env, spaces, device: FlattenObservations()
        ),
        PPOConfig().rl_module(rl_module_spec=RLModuleSpec(module_class=object)),
        PPOConfig().rl_module(
            model_config=DefaultModelConfig(fcnet_hiddens=tune.choice([[8], [16]]))
        ),
        AlgorithmConfig(),
    ],
    ids=["connectors", "module", "tuned", "algorithm"],
)
def test_what_the_users_own_parts_take_is_left_to_them(config: AlgorithmConfig) -> None:
    check_module(config, spaces.Dict(a=BOX, b=spaces.Discrete(3)))


def flattening(config: AlgorithmConfig, **settings: Any) -> AlgorithmConfig:
    return config.env_runners(
        env_to_module_connector=lambda env, spaces, device: FlattenObservations(**settings)
    )


class Local(gymnasium.Env[Any, Any]):
    """Gives any observations, and remembers the actions."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.observation_space, self.action_space = settings["observation"], settings["action"]
        self.observation_space.seed(1)
        self.seen: list[Any] = settings["seen"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.seen.append(int(action))
        return self.observation_space.sample(), 0.0, False, False, {}


def sampled_by_rllib(
    config: AlgorithmConfig, observation: spaces.Space[Any], action: spaces.Space[Any]
) -> set[int]:
    """Let RLlib's own runner sample in this process; return the actions that the env got."""
    seen: list[int] = []
    settings = {"observation": observation, "action": action, "seen": seen}
    config.environment(lambda _: Local(settings)).env_runners(num_env_runners=0)
    config.debugging(seed=1)  # of the module's weights, and of what it draws
    runner = SingleAgentEnvRunner(config=config, worker_index=0, num_workers=0)
    runner.sample(num_timesteps=60)
    runner.stop()
    return set(seen)


@pytest.mark.filterwarnings("ignore:.*Overriding environment:UserWarning")
def test_rllib_itself_acts_outside_a_space_that_begins_elsewhere() -> None:
    actions = sampled_by_rllib(PPOConfig(), BOX, FROM_FIVE)

    assert actions == {0, 1, 2}


def test_a_connector_for_observations_does_not_hide_actions_outside_their_space() -> None:
    with pytest.raises(ConfigurationError, match="send 0 to 2"):
        check_module(flattening(PPOConfig()), BOX, FROM_FIVE)

    config = flattening(PPOConfig()).env_runners(module_to_env_connector=lambda env, spaces: [])
    check_module(config, BOX, FROM_FIVE)


def check_modules(
    config: AlgorithmConfig,
    observation: spaces.Space[Any] = BOX,
    action: spaces.Space[Any] | None = None,
) -> None:
    """Check for two agents: one with the given settings, and one with none."""
    observations = from_gymnasium(spaces.Dict(odd=observation, even=BOX))
    assert isinstance(observations, DictSpec)
    of_two = EnvContract(
        "Two-v0",
        lane_observation_space(observations),
        from_gymnasium(spaces.Dict(odd=action or spaces.Discrete(2), even=spaces.Discrete(4))),
        8,
        AutoresetMode.NEXT_STEP,
        metadata={capabilities.MULTI_AGENT: {"agents": [key for key, _ in observations.items]}},
    )
    require_module(config, of_two, choose_runner(config, of_two))


def two_policies() -> AlgorithmConfig:
    return PPOConfig().multi_agent(
        policies={"p_odd", "p_even"}, policy_mapping_fn=lambda agent_id, *_, **__: f"p_{agent_id}"
    )


def test_agents_whose_spaces_rllibs_default_modules_take_are_not_refused() -> None:
    check_modules(two_policies())
    check_modules(PPOConfig(), TEXT)  # RLlib itself asks for the policies


@pytest.mark.parametrize(
    ("observation", "action", "words"),
    [
        (TEXT, None, r"\(policy 'p_odd'\), with observations Text.*no encoder for Text"),
        (spaces.Dict(a=BOX, b=TEXT), None, r"\(policy 'p_odd'\).*no encoder for Text"),
        (spaces.Dict(a=BOX), None, r"\(policy 'p_odd'\).*FlattenObservations"),
        (FROM_FIVE, None, r"\(policy 'p_odd'\).*begin at 0"),
        (BOX, TEXT, r"\(agent 'odd'\).*no actions of Text"),
        (BOX, FROM_FIVE, r"\(agent 'odd'\).*takes 5 to 7"),
    ],
)
def test_agents_whose_spaces_they_do_not_take_are_named(
    observation: spaces.Space[Any], action: spaces.Space[Any] | None, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        check_modules(two_policies(), observation, action)

    assert "\n" not in str(caught.value)
    assert "Two-v0" in str(caught.value)


def test_agents_that_share_a_policy_but_no_spaces_are_refused() -> None:
    config = PPOConfig().multi_agent(
        policies={"shared"}, policy_mapping_fn=lambda *_, **__: "shared"
    )

    with pytest.raises(ConfigurationError, match=r"map to the same ModuleID.*policy_mapping_fn"):
        check_modules(config)


def test_modules_of_the_users_own_are_left_to_him_with_several_agents_too() -> None:
    own = MultiRLModuleSpec(rl_module_specs={"p_odd": RLModuleSpec(module_class=object)})

    check_modules(two_policies().rl_module(rl_module_spec=own), TEXT, FROM_FIVE)


def test_the_check_does_not_disturb_what_the_user_has_seeded() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)

    check_module(PPOConfig())

    assert torch.equal(torch.rand(1), expected)


def test_a_space_that_the_user_has_set_must_be_the_endpoints() -> None:
    config = PPOConfig().environment(observation_space=spaces.Box(0.0, 1.0, (3,)))

    with pytest.raises(ContractMismatchError, match=r"environment\(observation_space="):
        require_spaces(config, choose_runner(config, contract()))

    config.environment(observation_space=BOX, action_space=spaces.Discrete(2))
    require_spaces(config, choose_runner(config, contract()))


# --- the fast path ----------------------------------------------------------------------------


class Silent(RLlibCallback):
    """Does not look at single episodes."""

    def on_sample_end(self, **_: Any) -> None:
        pass


class Watching(RLlibCallback):
    def on_episode_step(self, **_: Any) -> None:
        pass


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (PPOConfig(), None),
        (PPOConfig().callbacks([RLlibCallback, Silent]), None),
        (PPOConfig().callbacks(on_train_result=lambda **_: None), None),
        (PPOConfig().callbacks(Watching), "Watching has a callback on_episode_step"),
        (PPOConfig().callbacks([Silent, Watching]), "Watching has a callback on_episode_step"),
        (PPOConfig().callbacks(on_episode_end=lambda **_: None), "a callback on_episode_end"),
        (
            PPOConfig().env_runners(
                module_to_env_connector=lambda *_: NormalizeAndClipActions(
                    normalize_actions=True, clip_actions=False
                )
            ),
            "the module_to_env pipeline is not RLlib's default",
        ),
        (
            PPOConfig().env_runners(env_to_module_connector=lambda *_: MeanStdFilter()),
            "the env_to_module pipeline is not RLlib's default: it has MeanStdFilter",
        ),
        (PPOConfig().env_runners(episodes_to_numpy=False), "episodes_to_numpy is off"),
        (PPOConfig().rl_module(model_config=DefaultModelConfig(use_lstm=True)), "has a state"),
    ],
)
def test_what_looks_at_single_lanes_is_named(config: AlgorithmConfig, words: str | None) -> None:
    with EnvServer("CartPole-v1", num_envs=2) as server:
        configure(config.env_runners(num_env_runners=0), server.address)
        runner = RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)
        runner.sample(num_timesteps=2)
        runner.stop()

    assert (words or "None") in str(runner.fast_path_disabled_reason)


@pytest.fixture
def reported(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what has been logged about the fast path since the last call, all of it at INFO."""
    caplog.set_level(logging.INFO, logger="rlmesh_ray.rllib")

    def new() -> list[str]:
        records = [record for record in caplog.records if "fast path" in record.getMessage()]
        caplog.clear()
        assert {record.levelno for record in records} <= {logging.INFO}
        return [record.getMessage() for record in records]

    return new


@pytest.mark.usefixtures("local_ray")
def test_a_runner_logs_whether_it_takes_the_fast_path(
    reported: Callable[[], list[str]],
) -> None:
    with EnvServer("CartPole-v1", num_envs=2) as server:
        config = configure(PPOConfig().env_runners(num_env_runners=0), server.address)
        runner = RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)
        assert runner.fast_path_disabled_reason == "nothing has been sampled yet"

        runner.sample(num_timesteps=4)
        runner.sample(num_timesteps=4)

        assert reported() == ["worker 0: the fast path is on"]
        assert runner.fast_path_disabled_reason is None
        assert runner.get_metrics()[LANES_AS_ARRAYS].peek() == 1.0

        runner.sample(num_timesteps=4, random_actions=True, force_reset=True)

        why = "actions are drawn at random"
        assert reported() == [f"worker 0: the fast path is off: {why}"]
        assert runner.fast_path_disabled_reason == why
        assert runner.get_metrics()[LANES_AS_ARRAYS].peek() == 0.0
        runner.stop()


@pytest.mark.usefixtures("local_ray")
def test_a_runner_knows_what_was_set_after_configure(reported: Callable[[], list[str]]) -> None:
    with EnvServer("CartPole-v1", num_envs=2) as server:
        config = configure(PPOConfig().env_runners(num_env_runners=0), server.address)
        config.callbacks(Watching)
        runner = RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)
        runner.sample(num_timesteps=4)
        runner.stop()

    why = "Watching has a callback on_episode_step"
    assert reported() == [
        f"worker 0: the fast path is off: {why}",
    ]


@pytest.mark.usefixtures("local_ray")
def test_the_fast_path_can_be_turned_off(reported: Callable[[], list[str]]) -> None:
    with EnvServer("CartPole-v1", num_envs=2) as server:
        config = PPOConfig().env_runners(num_env_runners=0)
        configure(config, server.address, fast_path=False)
        runner = RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)
        runner.sample(num_timesteps=4)
        metrics = runner.get_metrics()
        runner.stop()

    assert runner.fast_path_disabled_reason == FAST_PATH_IS_OFF
    assert metrics[LANES_AS_ARRAYS].peek() == 0.0
    assert reported() == [
        f"worker 0: the fast path is off: {FAST_PATH_IS_OFF}",
    ]
