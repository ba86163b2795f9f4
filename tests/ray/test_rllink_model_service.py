"""Simulators that only ask for actions, over ModelService: what RLlib gets is what they saw."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core import COMPONENT_RL_MODULE
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlmesh_ray.client.remote_model import RemoteModel, Slots
from rlmesh_ray.dialects.rllink.runner.episode_recorder import ChosenAction, EpisodeRecorder
from rlmesh_ray.dialects.rllink.runner.sample_queue import SampleQueue
from rlmesh_ray.errors import (
    AccessDeniedError,
    AddressError,
    ConfigurationError,
    EndpointError,
    RemoteModelError,
)
from rlmesh_ray.rllib import RLMeshRLlinkEnvRunner, configure_rllink
from rlmesh_ray.spaces.contract import AutoresetMode
from tests.loopback.client_internals import vanish
from tests.loopback.eventually import eventually
from tests.loopback.ports import free_address
from tests.ray.reporting_simulators import CART_POLE, Played, ReportingSimulator, contract, report
from tests.ray.rllink_simulators import Simulators, asking

STALE, ABANDONED = "num_stale_env_steps_dropped_lifetime", "num_episodes_abandoned_lifetime"
CLIENTS = "num_simulators_per_env_runner"
ZEROS = np.zeros((1, 4))


def configured(
    config: AlgorithmConfig | None = None, fragment: int | str = 40, **options: Any
) -> AlgorithmConfig:
    config = config or PPOConfig()
    config.env_runners(num_env_runners=0, rollout_fragment_length=fragment)
    config.rl_module(model_config={"fcnet_hiddens": [16]})
    return configure_rllink(
        config,
        **{
            "observation_space": CART_POLE.observation_space,
            "action_space": CART_POLE.action_space,
            "address": "127.0.0.1:0",
            "service_address": "127.0.0.1:0",
            **options,
        },
    )


Listen = Callable[..., RLMeshRLlinkEnvRunner]
Simulate = Callable[..., ReportingSimulator]


@pytest.fixture
def world() -> Iterator[tuple[Listen, Simulate]]:
    runners: list[RLMeshRLlinkEnvRunner] = []
    simulators: list[ReportingSimulator] = []

    def listen(config: AlgorithmConfig) -> RLMeshRLlinkEnvRunner:
        runners.append(RLMeshRLlinkEnvRunner(config=config, worker_index=0))
        return runners[-1]

    def simulate(*args: Any, **options: Any) -> ReportingSimulator:
        simulators.append(ReportingSimulator(*args, **options))
        return simulators[-1]

    yield listen, simulate
    # Runners hang up first: simulators wait for them.
    for runner in runners:
        runner.stop()
    for simulator in simulators:
        simulator.join()


@pytest.fixture
def listen(world: tuple[Listen, Simulate]) -> Listen:
    return world[0]


@pytest.fixture
def simulate(world: tuple[Listen, Simulate]) -> Simulate:
    return world[1]


def change(runner: RLMeshRLlinkEnvRunner, seq_no: int) -> None:
    weights = {name: values * 1.5 for name, values in runner.module.get_state().items()}
    runner.set_state({COMPONENT_RL_MODULE: weights, "weights_seq_no": seq_no})


def publish(runner: RLMeshRLlinkEnvRunner) -> None:
    """Have simulators act with the module's weights before the first sample."""
    runner.set_state({COMPONENT_RL_MODULE: runner.module.get_state(), "weights_seq_no": 0})


def counts(runner: RLMeshRLlinkEnvRunner) -> dict[str, Any]:
    metrics = runner.get_metrics()
    return {name: metrics[name].peek() for name in (STALE, ABANDONED, CLIENTS)}


def require_of_present_weights(
    runner: RLMeshRLlinkEnvRunner, episodes: list[SingleAgentEpisode]
) -> None:
    for each in episodes:
        obs = torch.as_tensor(each.get_observations(slice(0, len(each))))
        logits = runner.module.forward_exploration({"obs": obs})["action_dist_inputs"].detach()
        kind = runner.module.get_exploration_action_dist_cls()
        logp = kind.from_logits(logits).logp(torch.as_tensor(each.get_actions()))
        assert np.allclose(each.get_extra_model_outputs("action_dist_inputs"), logits, atol=1e-5)
        assert np.allclose(each.get_extra_model_outputs("action_logp"), logp, atol=1e-5)


def require_what_was_seen(chunks: list[SingleAgentEpisode], played: list[Played]) -> None:
    """Hold the parts of each episode, in their order, against the simulators'."""
    parts: dict[str, list[SingleAgentEpisode]] = {}
    for chunk in chunks:
        parts.setdefault(chunk.id_, []).append(chunk)
    begun = {each.obs[0].tobytes(): each for each in played}
    for group in parts.values():
        obs = [each.get_observations(slice(0, len(each))) for each in group]
        seen = begun.pop(obs[0][0].tobytes())
        num = sum(map(len, group))
        last = group[-1].get_observations(-1)
        assert np.array_equal(np.concatenate([*obs, last[None]]), seen.obs[: num + 1])
        actions = np.concatenate([each.get_actions() for each in group])
        assert np.array_equal(actions, seen.actions[:num])
        assert np.array_equal(
            np.concatenate([each.get_rewards() for each in group]), seen.rewards[:num]
        )
        starts = accumulate(map(len, group[:-1]), initial=0)
        assert [each.t_started for each in group] == list(starts)
        assert not any(each.is_done for each in group[:-1])
        if group[-1].is_done:
            assert num == len(seen.actions)
            assert group[-1].is_terminated == seen.is_terminated
            assert group[-1].is_truncated == seen.is_truncated


@pytest.mark.parametrize("names_episodes", [True, False], ids=["named", "nameless"])
@pytest.mark.parametrize("num_lanes", [1, 6])
def test_batches_are_what_simulators_saw_and_of_the_present_weights(
    num_lanes: int, names_episodes: bool, listen: Listen, simulate: Simulate
) -> None:
    runner = listen(configured(fragment=40, num_simulators=3))
    simulator = simulate(
        runner.service_address, num_lanes, cuts_at=5, names_episodes=names_episodes
    )
    chunks: list[SingleAgentEpisode] = []

    for number in range(1, 4):
        chunks += (sampled := runner.sample())

        # A request's rows are answered together: so there may be some more.
        assert 120 <= sum(map(len, sampled)) < 120 + num_lanes
        require_of_present_weights(runner, sampled)
        change(runner, number)

    require_what_was_seen(chunks, simulator.played)
    done = [each for each in chunks if each.is_done]
    assert any(each.is_terminated for each in done)
    assert {each.is_truncated for each in done} == {True, False}
    assert counts(runner) == {STALE: 0, ABANDONED: 0, CLIENTS: 1}
    assert sorted(set(simulator.versions)) == [0, 1, 2]
    assert simulator.failure is None


def test_all_kinds_of_simulators_fill_one_batch(listen: Listen, simulate: Simulate) -> None:
    runner = listen(configured(fragment=30, num_simulators=4))
    for num_lanes in (1, 3):
        simulate(runner.service_address, num_lanes)
    others = Simulators()
    try:
        others.start(runner.address)
        others.start(runner.address, asking)

        for number in range(1, 3):
            sampled = runner.sample()
            assert sum(map(len, sampled)) >= 120
            require_of_present_weights(runner, sampled)
            change(runner, number)

        # Lanes that are answered together may be more than were needed beside the others'.
        assert counts(runner)[CLIENTS] == 4
    finally:
        runner.stop()
        others.stop()


def test_lanes_that_ask_together_do_not_wait_for_each_other(
    listen: Listen, simulate: Simulate
) -> None:
    # Four of six are enough: a request whose other two had to wait would never be answered.
    runner = listen(configured(fragment=4, wait_s=4.0))
    simulate(runner.service_address, 6)

    assert sum(map(len, runner.sample())) == 6


def test_a_request_without_a_sampling_runner_waits_and_delays_no_other(listen: Listen) -> None:
    runner = listen(configured(fragment=1))
    address = runner.service_address
    answered = threading.Event()
    with RemoteModel(address) as waiting, RemoteModel(address) as other:
        waiting.configure_route(contract())

        def ask() -> None:
            waiting.predict(report(ZEROS))
            answered.set()
            waiting.predict(report(ZEROS, 1.0, terminated=True))

        thread = threading.Thread(target=ask)
        thread.start()
        # The same thread, and the same batches, would be busy with who waits.
        other.configure_route(contract())
        other.configure_route(contract(), route_id="second")
        other.close_route("second")
        runner.assert_healthy()
        assert not answered.is_set()

        (episode,) = runner.sample()
        thread.join(20)

    assert answered.is_set()
    assert len(episode) == 1
    assert episode.is_terminated


def test_what_a_client_has_done_before_it_vanishes_is_kept(
    listen: Listen, simulate: Simulate
) -> None:
    runner = listen(configured(DQNConfig(), fragment=2))
    num_abandoned = 0

    def has_gone() -> bool:
        nonlocal num_abandoned
        found = counts(runner)
        num_abandoned += found[ABANDONED]
        return bool(found[CLIENTS] == 0)

    publish(runner)
    gone = RemoteModel(runner.service_address)
    gone.configure_route(contract(2))
    for step in range(2):
        gone.predict(report(np.full((2, 4), step), step))
    vanish(gone)
    assert eventually(has_gone)
    gone.close()

    chunks = runner.sample()

    assert [each.get_observations()[:, 0].tolist() for each in chunks] == [[0, 1]] * 2
    assert [each.get_rewards().tolist() for each in chunks] == [[1]] * 2
    assert not any(each.is_done for each in chunks)
    assert num_abandoned == 2
    assert counts(runner)[STALE] == 0
    left = simulate(runner.service_address)
    require_what_was_seen(runner.sample(), left.played)


def test_a_route_that_closes_while_it_waits_leaves_nothing_behind(listen: Listen) -> None:
    runner = listen(configured(fragment=1))
    model = RemoteModel(runner.service_address, predict_timeout_s=2.0)
    model.configure_route(contract())
    with pytest.raises(EndpointError, match="no answer"):
        model.predict(report(ZEROS))
    vanish(model)
    assert eventually(lambda: counts(runner)[CLIENTS] == 0)
    model.close()

    with RemoteModel(runner.service_address) as other:
        other.configure_route(contract())
        thread = threading.Thread(target=play_one_step, args=[other])
        thread.start()
        (episode,) = runner.sample()
        thread.join(20)

    assert len(episode) == 1
    assert counts(runner)[STALE] == 0


def play_one_step(model: RemoteModel) -> None:
    model.predict(report(ZEROS))
    model.predict(report(ZEROS, 1.0, terminated=True))


def test_an_episode_that_begins_cuts_the_one_before_short(listen: Listen) -> None:
    runner = listen(configured(DQNConfig(), fragment=3))
    publish(runner)
    with RemoteModel(runner.service_address) as model:
        model.configure_route(contract())
        for number, (episode, reset) in enumerate(
            [("a", True), ("a", False), ("a", True), ("a", False), ("b", False), ("", False)]
        ):
            slots = Slots([0], [episode], [0], [reset])
            model.predict(report(ZEROS + number, reward=number), slots=slots)
        chunks = runner.sample()
        assert counts(runner)[ABANDONED] == 2

    assert [each.get_observations()[:, 0].tolist() for each in chunks] == [[0, 1], [2, 3], [4, 5]]
    assert [each.get_rewards().tolist() for each in chunks] == [[1], [3], [5]]
    assert not any(each.is_done for each in chunks)


def test_an_action_for_an_episode_that_has_gone_meanwhile_is_nobodys() -> None:
    intake = SampleQueue(max_lag=0, max_bytes=2**20)
    with intake.lock:
        recorder = EpisodeRecorder(intake, "gone")
        recorder.see(ZEROS[0])
        recorder.abandon()

        recorder.decide(ChosenAction(ZEROS[0], np.zeros(()), {}, 0))

        assert not recorder.is_acting
        assert intake.inflight.num_expected(lambda _: True) == 0


def test_what_does_not_fit_is_refused_and_changes_nothing(listen: Listen) -> None:
    runner = listen(configured(DQNConfig(), fragment=1))
    publish(runner)
    with RemoteModel(runner.service_address) as model:
        model.configure_route(contract())
        model.predict(report(ZEROS))
        for wrong in (report(ZEROS, np.inf), report(ZEROS + np.inf), report(ZEROS, 0.0, 2)):
            with pytest.raises(RemoteModelError, match="INVALID_REQUEST"):
                model.predict(wrong)
        model.predict(report(ZEROS, 7.0, truncated=True))
        (episode,) = runner.sample()

    assert episode.get_rewards().tolist() == [7.0]
    assert episode.is_truncated


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"truncated": None}, "Dict of 'observation', 'reward', 'terminated', 'truncated'"),
        ({"observation": gymnasium.spaces.Box(-1, 1, (3,))}, r"Box of shape \(4,\)"),
        ({"observation": gymnasium.spaces.Discrete(4)}, r"Box of shape \(4,\)"),
        ({"reward": gymnasium.spaces.Box(-1, 1, (2,))}, "one number"),
        ({"terminated": gymnasium.spaces.Discrete(3)}, "'terminated' must be a Discrete"),
        ({"truncated": gymnasium.spaces.MultiBinary(2)}, "'truncated' must be a Discrete"),
        ({"actions": gymnasium.spaces.Discrete(3)}, r"actions must be Discrete\(2\)"),
        ({"num_lanes": 1025}, "1024 lanes"),
        ({"mode": AutoresetMode.SAME_STEP}, "episodes lack their last observations"),
    ],
)
def test_a_client_that_cannot_be_learnt_from_gets_the_reason(
    changed: dict[str, Any], why: str, service: str
) -> None:
    with RemoteModel(service) as model, pytest.raises(RemoteModelError, match=why):
        model.configure_route(contract(**changed))


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    runner = RLMeshRLlinkEnvRunner(config=configured(), worker_index=0)
    yield runner.service_address
    runner.stop()


def test_continuous_actions_are_answered_within_their_bounds(listen: Listen) -> None:
    space = gymnasium.spaces.Box(3.0, 5.0, (2,))
    runner = listen(configured(fragment=30, action_space=space))
    answers: list[Any] = []
    with RemoteModel(runner.service_address) as model:
        model.configure_route(contract(actions=space))

        def play() -> None:
            with contextlib.suppress(EndpointError, RemoteModelError):
                answers.extend(model.predict(report(ZEROS))[0] for _ in range(30))
                answers.append(model.predict(report(ZEROS, truncated=True))[0])

        thread = threading.Thread(target=play)
        thread.start()
        (episode,) = runner.sample()
        thread.join(20)

    assert len(answers) == 31
    assert all(space.contains(answer) for answer in answers)
    assert (episode.get_actions() < 3.0).any()  # kept as drawn, about 0


def test_a_failing_module_is_reported_and_the_episode_begins_anew(
    listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("no such luck")

    runner = listen(configured(DQNConfig(), fragment=2))
    publish(runner)
    with RemoteModel(runner.service_address) as model:
        model.configure_route(contract())
        model.predict(report(ZEROS))
        with monkeypatch.context() as broken:
            broken.setattr(TorchRLModule, "forward_exploration", fail)
            with pytest.raises(RemoteModelError, match="ValueError: no such luck"):
                model.predict(report(ZEROS + 1, 1.0))
        model.predict(report(ZEROS + 2, 2.0))
        model.predict(report(ZEROS + 3, 3.0, terminated=True))
        chunks = runner.sample()

    # It is not known what has led from 1 to 2.
    assert [each.get_observations()[:, 0].tolist() for each in chunks] == [[0, 1], [2, 3]]
    assert [each.get_rewards().tolist() for each in chunks] == [[1], [3]]


def test_strangers_are_turned_away(listen: Listen, simulate: Simulate) -> None:
    runner = listen(configured(token="s3cret"))

    with pytest.raises(AccessDeniedError):
        RemoteModel(runner.service_address)

    simulate(runner.service_address, token="s3cret")
    assert sum(map(len, runner.sample())) == 40


def test_a_runner_that_stops_hangs_up(listen: Listen, simulate: Simulate) -> None:
    runner = listen(configured(fragment=5))
    simulator = simulate(runner.service_address)
    runner.sample()
    runner.assert_healthy()

    runner.stop()
    simulator.join()

    assert isinstance(simulator.failure, EndpointError)
    with pytest.raises(AssertionError):
        runner.assert_healthy()


def test_who_waits_in_vain_says_where_simulators_connect(
    listen: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    runner = listen(configured(wait_s=0.01))

    with caplog.at_level(logging.WARNING, "rlmesh_ray"):
        assert runner.sample() == []

    assert f"they connect to {runner.address} or {runner.service_address}" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_remote_runners_are_asked_and_learnt_from(simulate: Simulate) -> None:
    config = configured(fragment="auto", num_simulators=4)
    config.env_runners(num_env_runners=2)
    config.training(train_batch_size_per_learner=256, minibatch_size=64, num_epochs=1)
    algorithm = config.build_algo()
    try:
        group = algorithm.env_runner_group
        assert group is not None
        for address in filter(None, group.foreach_env_runner(lambda each: each.service_address)):
            simulate(address, 4)

        results = [algorithm.train()["env_runners"] for _ in range(3)]
    finally:
        algorithm.stop()

    assert all(256 <= result["num_env_steps_sampled"] < 256 + 2 * 4 for result in results)
    assert results[-1]["num_stale_env_steps_dropped_lifetime"] == 0
    assert results[-1]["weights_seq_no"] == 2


def test_each_runner_has_a_port_of_its_own() -> None:
    plan = configured(service_address="127.0.0.1:5700").env_config["rlmesh_ray_rllink"]

    def address(index: int, *, in_evaluation: bool = False) -> str:
        return str(plan.service_address_of(index, num_training=2, in_evaluation=in_evaluation))

    assert [address(index)[-4:] for index in range(3)] == ["5700", "5701", "5702"]
    assert address(0, in_evaluation=True) == "127.0.0.1:5703"


def test_where_it_cannot_listen_is_said_on_the_driver() -> None:
    with pytest.raises(AddressError, match="give a token"):
        configured(service_address="0.0.0.0:5700")
    with pytest.raises(ConfigurationError, match="HOST:PORT"):
        configured(service_address="unix:/tmp/x")


def test_a_port_that_is_taken_is_reported_and_the_other_is_closed(listen: Listen) -> None:
    taken = listen(configured()).service_address
    other = free_address()

    with pytest.raises(AddressError):
        listen(configured(address=other, service_address=taken))

    assert listen(configured(address=other)).address == other
