"""The runner that listens, by itself: what RLlib asks of it, and what simulators get."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core import COMPONENT_ENV_TO_MODULE_CONNECTOR, COMPONENT_RL_MODULE

from rlmesh_ray.auth.client_tls import ClientTls
from rlmesh_ray.auth.server_tls import ServerTls
from rlmesh_ray.dialects.rllink.client import RAY, LocalAgent, RemoteAgent, RLlinkClient
from rlmesh_ray.errors import (
    AddressError,
    ConfigurationError,
    EndpointLostError,
    EndpointUnreachableError,
    LocalProtocolError,
    RemoteError,
)
from rlmesh_ray.rllib import RLMeshRLlinkEnvRunner, configure_rllink
from tests.loopback.certificates import Authority, needs_openssl
from tests.ray.rllink_simulators import Simulators, asking, local

BY_EITHER_WAY = pytest.mark.parametrize("way", [local, asking], ids=["local", "asking"])

Listen = Callable[..., RLMeshRLlinkEnvRunner]


def configured(
    config: AlgorithmConfig | None = None, env_id: str = "CartPole-v1", **options: Any
) -> AlgorithmConfig:
    env = gymnasium.make(env_id)
    config = config or PPOConfig()
    config.env_runners(num_env_runners=0, rollout_fragment_length=40)
    config.rl_module(model_config={"fcnet_hiddens": [16]})
    return configure_rllink(
        config,
        **{
            "observation_space": env.observation_space,
            "action_space": env.action_space,
            "address": "127.0.0.1:0",
            **options,
        },
    )


@pytest.fixture
def simulators() -> Iterator[Simulators]:
    made = Simulators()
    yield made
    made.stop()


@pytest.fixture
def listen(simulators: Simulators) -> Iterator[Listen]:
    # Runners hang up first: simulators wait for them.
    assert simulators
    runners: list[RLMeshRLlinkEnvRunner] = []

    def make(config: AlgorithmConfig, worker_index: int = 0) -> RLMeshRLlinkEnvRunner:
        runners.append(RLMeshRLlinkEnvRunner(config=config, worker_index=worker_index))
        return runners[-1]

    yield make
    for runner in runners:
        runner.stop()


def change(runner: RLMeshRLlinkEnvRunner, seq_no: int) -> None:
    weights = {name: values * 1.5 for name, values in runner.module.get_state().items()}
    runner.set_state({COMPONENT_RL_MODULE: weights, "weights_seq_no": seq_no})


@BY_EITHER_WAY
def test_a_batch_is_of_the_present_weights_alone(
    way: Any, listen: Listen, simulators: Simulators
) -> None:
    runner = listen(configured(num_simulators=2))
    for _ in range(2):
        simulators.start(runner.address, way)

    sampled = 0
    for number in range(1, 5):
        episodes = runner.sample()

        sizes = sum(map(len, episodes))
        sampled += sizes
        # Who comes late to the first sample finds that the other one has been let go on.
        assert sizes == 80 or (number == 1 and sizes == 120)
        obs = np.concatenate([each.get_observations(slice(0, len(each))) for each in episodes])
        inputs = runner.module.forward_exploration({"obs": torch.as_tensor(obs)})
        found = [each.get_extra_model_outputs("action_dist_inputs") for each in episodes]
        expected = inputs["action_dist_inputs"].detach().numpy()
        assert np.abs(np.concatenate(found) - expected).max() < 1e-5
        for each in episodes:
            each.validate()
            kind = runner.module.get_exploration_action_dist_cls()
            logits = torch.as_tensor(each.get_extra_model_outputs("action_dist_inputs"))
            logp = kind.from_logits(logits).logp(torch.as_tensor(each.get_actions()))
            assert np.allclose(each.get_extra_model_outputs("action_logp"), logp, atol=1e-5)
        change(runner, number)

    metrics = runner.get_metrics()
    assert metrics["num_env_steps_sampled"].peek() == sampled
    assert metrics["num_stale_env_steps_dropped_lifetime"].peek() in (0, 40)  # of who comes late
    assert metrics["num_simulators_per_env_runner"].peek() == 2
    assert not simulators.errors


@BY_EITHER_WAY
def test_continuous_actions_are_sent_within_their_bounds_and_kept_as_drawn(
    way: Any, listen: Listen, simulators: Simulators
) -> None:
    runner = listen(configured(env_id="Pendulum-v1"))
    simulators.start(runner.address, way, env="Pendulum-v1")  # looks at the bounds

    episodes = runner.sample(num_timesteps=80)

    actions = np.concatenate([episode.get_actions() for episode in episodes])
    assert actions.shape == (80, 1)
    assert np.abs(actions).max() > 1.0  # drawn about 0, and scaled to -2 and 2
    assert not simulators.errors


@BY_EITHER_WAY
def test_off_policy_no_client_waits_for_weights(
    way: Any, listen: Listen, simulators: Simulators
) -> None:
    runner = listen(configured(DQNConfig()))
    simulators.start(runner.address, way)

    episodes = runner.sample()
    change(runner, 1)
    episodes += runner.sample()

    assert sum(map(len, episodes)) == 80
    assert not episodes[0].extra_model_outputs
    chance = DQNConfig().epsilon[0][1]
    with RLlinkClient(runner.address) as client:
        assert client.get_state().extras == {"epsilon": chance}
        assert not client.get_config().force_on_policy


@pytest.mark.parametrize("is_truncated", [False, True])
def test_the_parts_of_an_episode_are_what_its_simulator_saw(
    is_truncated: bool, listen: Listen
) -> None:
    runner = listen(configured(DQNConfig()))
    runner.set_state({COMPONENT_RL_MODULE: runner.module.get_state(), "weights_seq_no": 0})
    with RLlinkClient(runner.address) as client:
        name = client.start_episode()
        actions = [client.get_action(name, np.full(4, n), float(n)).item() for n in range(3)]
        (first,) = runner.sample(num_timesteps=2)
        actions.append(client.get_action(name, np.full(4, 3.0), 3.0).item())
        client.end_episode(name, np.full(4, 4.0), 4.0, is_truncated=is_truncated)
        (second,) = runner.sample(num_timesteps=2)

    assert first.get_observations()[:, 0].tolist() == [0, 1, 2]
    assert second.get_observations()[:, 0].tolist() == [2, 3, 4]
    assert [*first.get_actions(), *second.get_actions()] == actions
    assert [*first.get_rewards(), *second.get_rewards()] == [1, 2, 3, 4]
    assert first.id_ == second.id_
    assert (first.t_started, second.t_started) == (0, 2)
    assert not first.is_done
    assert (second.is_terminated, second.is_truncated) == (not is_truncated, is_truncated)


def test_whole_episodes_can_be_asked_for(listen: Listen, simulators: Simulators) -> None:
    runner = listen(configured())
    simulators.start(runner.address)

    episodes = runner.sample(num_episodes=3, random_actions=True, force_reset=True)

    assert sum(each.is_done for each in episodes) >= 3
    metrics = runner.get_metrics()
    assert metrics["num_episodes"].peek() >= 3
    assert metrics["episode_return_mean"].peek() == pytest.approx(
        metrics["episode_len_mean"].peek()
    )


def test_no_request_waits_for_ever_where_no_simulator_is_connected(
    listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    runner = listen(configured(wait_s=0.2))
    begun_s = time.monotonic()

    with caplog.at_level(logging.WARNING, "rlmesh_ray"):
        assert runner.sample() == []

    assert 0.2 <= time.monotonic() - begun_s < 10
    assert f"no simulator is connected; they connect to {runner.address}" in caplog.text
    assert "0 of 40 steps" in caplog.text
    assert runner.get_metrics()["num_env_steps_sampled"].peek() == 0


def test_what_has_come_is_returned_when_simulators_are_too_slow(
    listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    runner = listen(configured(wait_s=3.0))
    with RLlinkClient(runner.address) as client:
        agent = RemoteAgent(client)
        agent_obs = np.zeros(4, np.float32)

        with caplog.at_level(logging.WARNING, "rlmesh_ray"):

            def play() -> None:
                agent.begin(agent_obs)
                agent.step(agent_obs, 1.0)
                agent.step(agent_obs, 1.0)

            thread = threading.Thread(target=play)
            thread.start()
            (episode,) = runner.sample()
            thread.join()

    assert len(episode) == 2
    assert "2 of 40 steps came in 3 s; simulators connected: 1" in caplog.text


def test_a_remote_runner_waits_half_as_long_as_rllib(listen: Listen) -> None:
    config = configured(wait_s=100.0)
    config.env_runners(num_env_runners=1, sample_timeout_s=0.4)
    runner = listen(config, worker_index=1)
    begun_s = time.monotonic()

    assert runner.sample() == []

    assert 0.2 <= time.monotonic() - begun_s < 10


def test_its_state_is_that_of_rllibs_runner(listen: Listen) -> None:
    runner = listen(configured())

    state = runner.get_state()

    assert {COMPONENT_RL_MODULE, COMPONENT_ENV_TO_MODULE_CONNECTOR, "weights_seq_no"} <= set(state)
    assert COMPONENT_RL_MODULE not in runner.get_state(not_components=COMPONENT_RL_MODULE)
    runner.set_state(state | {"num_env_steps_sampled_lifetime": 7})
    assert runner.get_state()["num_env_steps_sampled_lifetime"] == 7
    assert runner.ping() == "pong"


def test_old_weights_do_not_replace_newer_ones(listen: Listen) -> None:
    runner = listen(configured())
    change(runner, 5)
    with RLlinkClient(runner.address) as client:
        first = client.get_state()

        change(runner, 4)

        assert client.get_state().weights_seq_no == first.weights_seq_no == 5
        runner.set_state({COMPONENT_RL_MODULE: runner.module.get_state()})  # by force
        assert client.get_state().weights_seq_no == 6


def test_it_is_healthy_while_it_listens(listen: Listen) -> None:
    runner = listen(configured())
    runner.assert_healthy()

    runner.stop()
    runner.stop()

    with pytest.raises(AssertionError, match="any more"):
        runner.assert_healthy()
    with pytest.raises(EndpointUnreachableError):
        RLlinkClient(runner.address)


def test_a_local_runner_beside_remote_ones_does_not_listen(listen: Listen) -> None:
    config = configured()
    config.env_runners(num_env_runners=2)
    env = gymnasium.make("CartPole-v1")
    spaces = {
        "__env__": (env.observation_space, env.action_space),
        "__env_single__": (env.observation_space, env.action_space),
        "default_policy": (env.observation_space, env.action_space),
    }

    runner = RLMeshRLlinkEnvRunner(config=config, worker_index=0, spaces=spaces)

    assert runner.address == ""
    change(runner, 3)
    assert runner.get_state()["weights_seq_no"] == 3
    assert "num_simulators_per_env_runner" not in runner.get_metrics()
    runner.stop()


def test_each_runner_has_a_port_of_its_own(listen: Listen) -> None:
    config = configured(address="127.0.0.1:5555")
    plan = config.env_config["rlmesh_ray_rllink"]

    def port(index: int, *, in_evaluation: bool) -> int:
        return int(plan.port_of(index, num_training=2, in_evaluation=in_evaluation))

    training = [port(index, in_evaluation=False) for index in range(3)]
    evaluation = [port(index, in_evaluation=True) for index in range(2)]
    assert training + evaluation == [5555, 5556, 5557, 5558, 5559]


def test_what_does_not_fit_is_refused_and_the_others_go_on(
    listen: Listen, simulators: Simulators
) -> None:
    runner = listen(configured())
    simulators.start(runner.address)
    with RLlinkClient(runner.address) as client:
        agent = RemoteAgent(client)

        with pytest.raises(RemoteError, match=r"obs: has shape \(3,\), expected \(4,\)"):
            agent.begin(np.zeros(3))

    assert sum(map(len, runner.sample())) == 40


def test_a_token_is_asked_for_where_one_is_set(listen: Listen, simulators: Simulators) -> None:
    runner = listen(configured(token="s3cret"))

    with pytest.raises(RemoteError, match="wants a token"):
        RLlinkClient(runner.address)

    simulators.start(runner.address, token="s3cret")
    assert sum(map(len, runner.sample())) == 40


@needs_openssl
def test_simulators_may_have_to_speak_tls(
    listen: Listen, simulators: Simulators, tmp_path: Path
) -> None:
    ours = Authority(tmp_path, "ours")
    runner = listen(configured(tls=ServerTls(*ours.sign("runner"), ours.certificate)))

    with pytest.raises(EndpointLostError, match="TLS"):
        RLlinkClient(runner.address)

    simulators.start(runner.address, tls=ClientTls(ours.certificate, *ours.sign("simulator")))
    assert sum(map(len, runner.sample())) == 40


def test_agents_know_in_which_order_they_are_called(listen: Listen) -> None:
    runner = listen(configured(DQNConfig()))
    change(runner, 1)
    obs = np.zeros(4, np.float32)
    with RLlinkClient(runner.address) as first, RLlinkClient(runner.address) as second:
        for agent in (LocalAgent(first), RemoteAgent(second)):
            with pytest.raises(LocalProtocolError, match=r"begin\(\)"):
                agent.step(obs, 0.0)
            agent.begin(obs)
            with pytest.raises(LocalProtocolError, match=r"end\(\)"):
                agent.begin(obs)
            agent.end(obs, 1.0)
            agent.begin(obs)


def test_rays_dialect_gets_arrays_and_no_pickle_unless_it_is_wanted(listen: Listen) -> None:
    runner = listen(configured())
    change(runner, 1)

    with RLlinkClient(runner.address, encoding=RAY) as client:
        state = client.get_state()
        assert not client.get_config().pickled_config

    for name, values in runner.module.get_state().items():
        assert np.array_equal(state.weights[name], values)


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"address": "0.0.0.0:5555"}, AddressError, "give a token"),
        ({"address": "unix:/tmp/x"}, ConfigurationError, "TCP"),
        ({"observation_space": gymnasium.spaces.Text(3)}, ConfigurationError, "cannot come"),
        ({"num_simulators": 0}, ConfigurationError, "at least 1"),
        ({"env_steps_per_sample": 0}, ConfigurationError, "at least 1"),
        ({"max_weights_lag": 17}, ConfigurationError, "from 0 to 16"),
        ({"service_address": "127.0.0.1:0"}, TypeError, "any more: simulators ask for each action"),
    ],
)
def test_what_cannot_work_is_said_on_the_driver(
    options: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        configured(**options)


def test_runners_listen_without_a_token_if_no_token_is_set(
    listen: Listen, simulators: Simulators
) -> None:
    runner = listen(configured(address="0.0.0.0:0", token=False))
    _, _, port = runner.address.rpartition(":")
    simulators.start(f"127.0.0.1:{port}", asking)

    assert sum(len(episode) for episode in runner.sample()) >= 40


def test_connectors_of_the_users_are_refused() -> None:
    config = PPOConfig().env_runners(env_to_module_connector=lambda *_: [])

    with pytest.raises(ConfigurationError, match="runs where the policy acts"):
        configured(config)


def test_a_module_with_a_state_is_refused(listen: Listen) -> None:
    config = configured()
    config.rl_module(model_config={"use_lstm": True, "max_seq_len": 5})

    with pytest.raises(ConfigurationError, match="without a state"):
        listen(config)
