"""RLMeshMultiAgentEnvRunner and its vector against RLlib's own."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import FlattenObservations
from ray.rllib.env.multi_agent_env import MultiAgentEnv
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.vector.sync_vector_multi_agent_env import SyncVectorMultiAgentEnv
from ray.rllib.utils.error import MultiAgentEnvError

from rlmesh_ray import EnvServer
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.errors import (
    ConfigurationError,
    ConformanceError,
    ContractMismatchError,
    RlmeshError,
)
from rlmesh_ray.rllib import RLMeshMultiAgentEnvRunner, configure
from rlmesh_ray.rllib.runner import slot as slot_module
from rlmesh_ray.rllib.runner.autoreset_emulation import NextStepSession
from rlmesh_ray.rllib.runner.session_group import MultiAgentSessionGroup
from tests.ray.multi_agent_worlds import (
    NUMBERED,
    Climb,
    Crossing,
    Fragile,
    Hopeless,
    Impostor,
    NumberedCrossing,
    Turnover,
)

pytestmark = [
    pytest.mark.usefixtures("local_ray"),
    # RLlib registers its own runner's environment anew each time.
    pytest.mark.filterwarnings("ignore:.*Overriding environment rllib-multi-agent-env"),
]

AGENTS = Crossing.possible_agents


class LocalCrossing(Crossing, MultiAgentEnv):
    """The same for RLlib, which asks for its own base class."""


class LocalTurnover(Turnover, MultiAgentEnv):
    pass


class LocalNumberedCrossing(NumberedCrossing, MultiAgentEnv):
    possible_agents = tuple(NUMBERED)  # type: ignore[assignment]


def policy_of(agent_id: Any, *_args: Any, **_kwargs: Any) -> Any:
    return NUMBERED.get(agent_id, agent_id)


def flattened(*_args: Any, **_kwargs: Any) -> FlattenObservations:
    return FlattenObservations(multi_agent=True)


def ppo(num_envs: int, env: Any = LocalCrossing) -> PPOConfig:
    config = PPOConfig().debugging(seed=42)
    # RLlib's check would step the environment, whose random numbers would be others then.
    config.environment(env, disable_env_checking=True)
    config.env_runners(
        num_env_runners=0,
        num_envs_per_env_runner=num_envs,
        env_to_module_connector=flattened,
    )
    return config.multi_agent(policies=set(AGENTS), policy_mapping_fn=policy_of)


def build(kind: type[MultiAgentEnvRunner], config: AlgorithmConfig) -> Any:
    return kind(config=config, worker_index=0, num_workers=0)


@pytest.fixture(scope="module")
def one_lane() -> Iterator[str]:
    """The address of an endpoint of one crossing."""
    with EnvServer(Crossing) as server:
        yield server.address


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(opened: ExitStack, env: Any, num_envs: int, num_endpoints: int = 1) -> list[str]:
    servers = [EnvServer(env, num_envs=num_envs) for _ in range(num_endpoints)]
    return [opened.enter_context(server).address for server in servers]


@pytest.fixture
def runner(opened: ExitStack) -> Callable[..., RLMeshMultiAgentEnvRunner]:
    """Build a runner on new servers."""

    def make(
        env: Any = Crossing, *, num_envs: int = 1, num_endpoints: int = 1
    ) -> RLMeshMultiAgentEnvRunner:
        addresses = serve(opened, env, num_envs, num_endpoints)
        config = configure(ppo(1), addresses, lockstep=True)
        built: RLMeshMultiAgentEnvRunner = build(RLMeshMultiAgentEnvRunner, config)
        opened.callback(built.stop)
        return built

    return make


def lane_group(opened: ExitStack, addresses: list[str]) -> Any:
    clients = [EnvClient(ConnectOptions(address)) for address in addresses]
    group = MultiAgentSessionGroup(
        [NextStepSession(client) for client in clients], clients[0].contract
    )
    opened.callback(group.close)
    return group


def stepped(group: Any, actions: Any) -> tuple[Any, ...]:
    group.send(actions)
    batch = group.receive()
    return batch.observation, batch.rewards, batch.terminated, batch.truncated, batch.infos


def assert_equal(mine: Any, other: Any) -> None:
    if isinstance(other, Mapping):
        assert mine.keys() == other.keys()
        for key in other:
            assert_equal(mine[key], other[key])
    else:
        np.testing.assert_array_equal(mine, other)
        assert np.asarray(mine).dtype == np.asarray(other).dtype


def reported(flags: Mapping[str, bool], observation: Mapping[str, Any]) -> dict[str, bool]:
    """What a lane tells of ``flags``: no False of agents that are not there."""
    return {key: flag for key, flag in flags.items() if flag or key in {*observation, "__all__"}}


@pytest.mark.parametrize(
    ("num_envs", "num_endpoints"), [pytest.param(1, 1, marks=pytest.mark.nightly), (3, 1), (2, 2)]
)
def test_lanes_give_what_rllibs_own_vector_gives(
    opened: ExitStack, num_envs: int, num_endpoints: int
) -> None:
    total = num_envs * num_endpoints
    local = SyncVectorMultiAgentEnv([LocalCrossing] * total)
    remote = lane_group(opened, serve(opened, Crossing, num_envs, num_endpoints))
    action_spaces = {agent: deepcopy(Crossing.action_spaces[agent]) for agent in AGENTS}
    for number, space in enumerate(action_spaces.values()):
        space.seed(number)

    first = remote.reset([7 + lane for lane in range(total)])
    observations, infos = first.observation, first.infos
    expected = local.reset(seed=7)
    assert_equal(dict(enumerate(observations)), dict(enumerate(expected[0])))
    assert_equal(dict(enumerate(infos)), dict(enumerate(expected[1])))

    num_ended = 0
    has_ended = [False] * total
    ended: list[set[str]] = [set() for _ in range(total)]
    for _ in range(60):
        actions = [
            {agent: action_spaces[agent].sample() for agent in own if agent not in gone}
            for own, gone in zip(observations, ended, strict=True)
        ]
        observations, rewards, terminated, truncated, infos = stepped(remote, actions)
        theirs = local.step(actions)
        for lane in range(total):
            assert_equal(observations[lane], theirs[0][lane])
            assert_equal(infos[lane], theirs[4][lane])
            assert_equal(rewards[lane], theirs[1][lane])
            for mine, others in ((terminated, theirs[2]), (truncated, theirs[3])):
                expected_flags = others[lane]
                if not has_ended[lane]:
                    flags = dict.fromkeys(observations[lane], False) | expected_flags
                    expected_flags = reported(flags, observations[lane])
                assert mine[lane].items() >= expected_flags.items()
                assert not any(mine[lane][key] for key in mine[lane].keys() - expected_flags)
            ended[lane] = {
                key for key in AGENTS if terminated[lane].get(key) or truncated[lane].get(key)
            }
            has_ended[lane] = terminated[lane]["__all__"] or truncated[lane]["__all__"]
            num_ended += has_ended[lane]
    assert num_ended >= 5 * total
    local.close()


def parts(episode: MultiAgentEpisode) -> dict[str, Any]:
    return {
        "terminated": episode.is_terminated,
        "truncated": episode.is_truncated,
        "env_t": (episode.env_t_started, episode.env_t),
        "agents": {
            agent: {
                "module": own.module_id,
                "steps": list(episode.env_t_to_agent_t[agent].data),
                "observations": np.asarray(own.get_observations()),
                "actions": np.asarray(own.get_actions()),
                "rewards": np.asarray(own.get_rewards()),
                "infos": dict(enumerate(own.get_infos())),
                "ended": (own.is_terminated, own.is_truncated),
                **{key: np.asarray(value) for key, value in own.extra_model_outputs.items()},
            }
            for agent, own in episode.agent_episodes.items()
        },
    }


def assert_same_episodes(ours: list[MultiAgentEpisode], theirs: list[MultiAgentEpisode]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(parts(mine), parts(other))


@pytest.mark.parametrize(
    ("num_envs", "num_endpoints", "explore"),
    [pytest.param(1, 1, False, marks=pytest.mark.nightly), (2, 2, True)],
)
def test_episodes_equal_those_of_rllibs_own_runner(
    runner: Callable[..., RLMeshMultiAgentEnvRunner],
    num_envs: int,
    num_endpoints: int,
    explore: bool,
) -> None:
    theirs = build(MultiAgentEnvRunner, ppo(num_envs * num_endpoints))
    expected = [theirs.sample(num_timesteps=50, explore=explore) for _ in range(2)]
    theirs.stop()

    ours = runner(num_envs=num_envs, num_endpoints=num_endpoints)
    assert ours.num_envs == num_envs * num_endpoints
    actual = [ours.sample(num_timesteps=50, explore=explore) for _ in range(2)]

    for mine, other in zip(actual, expected, strict=True):
        assert_same_episodes(mine, other)
    chunks = [chunk for sample in actual for chunk in sample]
    ends = {(chunk.is_terminated, chunk.is_truncated) for chunk in chunks}
    assert ends >= {(True, False), (False, True)}
    # The tests' world does what it says: agents join, leave, and wait.
    assert any("car_1" in chunk.agent_ids for chunk in chunks)
    assert any(
        own.is_done and len(own) < len(chunk)
        for chunk in chunks
        for own in chunk.agent_episodes.values()
    )
    assert any("S" in chunk.env_t_to_agent_t["light"].data for chunk in chunks)


@pytest.fixture(scope="module")
def turnovers() -> Iterator[list[Any]]:
    """RLlib's runner and this package's, each with two lanes of the same world."""
    config = ppo(2, LocalTurnover).multi_agent(
        policies={"odd", "even"},
        policy_mapping_fn=lambda agent, *_args, **_kwargs: "odd" if agent % 2 else "even",
    )
    theirs = build(MultiAgentEnvRunner, config)
    with EnvServer(Turnover, num_envs=2) as server:
        ours = build(RLMeshMultiAgentEnvRunner, configure(config.copy(), server.address))
        yield [theirs, ours]
        ours.stop()


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    explore=st.booleans(),
    counted=st.sampled_from(["env_steps", "agent_steps"]),
)
def test_agents_that_come_and_go_by_any_schedule_give_the_episodes_of_rllibs_own_runner(
    turnovers: list[Any], seed: int, sizes: list[int], explore: bool, counted: str
) -> None:
    samples: list[Any] = []
    for runner in turnovers:
        runner.config.multi_agent(count_steps_by=counted)
        runner._seed, runner._needs_initial_reset = seed, True
        torch.manual_seed(seed)
        try:
            samples.append(
                [runner.sample(num_timesteps=size, explore=explore) for size in sizes]
                + [runner.sample(num_episodes=sizes[0], explore=explore)]
            )
        except MultiAgentEnvError as error:  # an agent was truncated without a last observation
            samples.append(str(error))

    expected, actual = samples
    if isinstance(expected, str):
        assert actual == expected
        return
    for mine, other in zip(actual, expected, strict=True):
        assert_same_episodes(mine, other)


def test_agents_are_named_as_in_their_environment_and_not_by_keys(
    runner: Callable[..., RLMeshMultiAgentEnvRunner],
) -> None:
    theirs = build(MultiAgentEnvRunner, ppo(2, LocalNumberedCrossing))
    expected = theirs.sample(num_timesteps=50, explore=True)
    theirs.stop()
    ours = runner(NumberedCrossing, num_envs=2)

    actual = ours.sample(num_timesteps=50, explore=True)

    assert_same_episodes(actual, expected)
    assert {agent for chunk in actual for agent in chunk.agent_ids} == {("light", 0), 1, 0}
    assert any("step" in info for chunk in actual for info in chunk.get_infos(agent_ids=0)[0])
    assert ours.get_metrics()["num_agent_steps_sampled"].keys() == {"('light', 0)", "1", "0"}


@pytest.mark.slow
def test_whole_episodes_equal_those_of_rllibs_own_runner(
    runner: Callable[..., RLMeshMultiAgentEnvRunner],
) -> None:
    theirs = build(MultiAgentEnvRunner, ppo(3))
    expected = theirs.sample(num_episodes=7, explore=False)
    theirs.stop()

    actual = runner(num_envs=3).sample(num_episodes=7, explore=False)

    assert_same_episodes(actual, expected)


def test_agents_act_at_random_as_rllib_lets_them(
    runner: Callable[..., RLMeshMultiAgentEnvRunner],
) -> None:
    ours = runner(num_envs=2)

    episodes = ours.sample(num_timesteps=40, random_actions=True)

    assert sum(len(episode) for episode in episodes) >= 40
    metrics = ours.get_metrics()
    assert metrics["num_agent_steps_sampled"].keys() == {"light", "car_0", "car_1"}
    assert metrics["num_env_steps_sampled"].peek() == sum(len(episode) for episode in episodes)


@pytest.mark.parametrize("key", ["num_agent_steps_sampled", "num_module_steps_sampled"])
def test_agents_and_modules_that_are_absent_have_no_steps_and_not_nan(
    key: str, runner: Callable[..., RLMeshMultiAgentEnvRunner]
) -> None:
    sampler = runner(Climb)

    counts = []
    for num_timesteps in (2, 1):  # ``second`` is seen every other time
        sampler.sample(num_timesteps=num_timesteps, random_actions=True)
        counts.append(sampler.get_metrics()[key])
    idle = sampler.get_metrics()

    assert [{name: int(number) for name, number in each.items()} for each in counts] == [
        {"first": 2, "second": 1},
        {"first": 1, "second": 0},
    ]
    assert int(idle["num_env_steps_sampled"]) == 0


class LoseActions(ConnectorV2):
    """A connector that is wrong."""

    def __call__(self, *, batch: dict[str, Any], **_kwargs: Any) -> dict[str, Any]:
        return {**batch, "actions_for_env": [{} for _ in batch["actions"]]}


def test_a_failing_environment_does_not_leave_sample(
    runner: Callable[..., RLMeshMultiAgentEnvRunner],
) -> None:
    sampler = runner(Fragile)

    samples = [sampler.sample(num_timesteps=10) for _ in range(3)]

    assert all(sum(map(len, episodes)) >= 10 for episodes in samples)
    assert sampler.get_metrics()["num_env_step_failures"].peek() >= 1


def test_an_environment_that_never_works_ends_sample_with_its_error(
    runner: Callable[..., RLMeshMultiAgentEnvRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_module, "_MAX_ENV_FAILURES", 1)

    with pytest.raises(RlmeshError, match="RuntimeError: never"):
        runner(Hopeless).sample(num_timesteps=20)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ({"car_0": 1}, "light: has no action in lane 0"),
        (
            {"car_0": 1, "light": 0, "tram": [0, 0]},
            "tram: has an action in lane 0; exactly",
        ),
        ({"car_0": 1, "light": 0, "bus": 0}, "bus: has an action in lane 0; exactly"),
        ({"car_0": 1.5, "light": 0}, "car_0: 1.5 cannot be held exactly by int64"),
    ],
)
def test_actions_that_are_not_those_of_the_agents_are_refused(
    opened: ExitStack, one_lane: str, actions: dict[str, Any], message: str
) -> None:
    group = lane_group(opened, [one_lane])
    group.reset([1])

    with pytest.raises(ConformanceError, match=message):
        group.send([actions])

    assert stepped(group, [{"car_0": 1, "light": 0}])[1] != [{}]


def test_actions_that_do_not_fit_are_not_tried_on_new_sessions(
    runner: Callable[..., RLMeshMultiAgentEnvRunner],
) -> None:
    sampler = runner()
    sampler.sample(num_timesteps=2)
    sampler._module_to_env.append(LoseActions())

    with pytest.raises(ConformanceError, match="has no action in lane 0"):
        sampler.sample(num_timesteps=2)

    assert sampler.get_metrics()["num_env_step_failures"].peek() == 0


def test_a_config_without_policies_is_refused_by_rllib(one_lane: str) -> None:
    config = PPOConfig().env_runners(num_env_runners=0)
    config = configure(config, one_lane)
    assert config.env_runner_cls is RLMeshMultiAgentEnvRunner

    with pytest.raises(ValueError, match="policy_mapping_fn"):
        build(RLMeshMultiAgentEnvRunner, config)


def test_a_config_without_endpoints_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="configure"):
        build(RLMeshMultiAgentEnvRunner, ppo(1))


def test_an_endpoint_that_claims_agents_without_their_spaces_is_refused(opened: ExitStack) -> None:
    with pytest.raises(ContractMismatchError, match=r"agents \['a', 'b'\]"):
        configure(ppo(1), serve(opened, Impostor, 1))
