"""What a multi-agent runner makes of sessions that break."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from rlmesh_ray.rllib.runner.session_recovery import INTERRUPTED_KEY, LIFETIME_SUMS
from tests.ray.lost_endpoints import Fleet
from tests.ray.multi_agent_worlds import Climb

pytestmark = pytest.mark.usefixtures("local_ray")


def runner_of(fleet: Fleet, **settings: Any) -> Any:
    config = PPOConfig().multi_agent(
        policies=set(Climb.possible_agents),
        policy_mapping_fn=lambda agent_id, *_args, **_kwargs: agent_id,
    )
    return fleet.runner(config, **settings)


def observed(chunks: list[MultiAgentEpisode], agent: str) -> list[float]:
    """Return what one agent of one episode has seen, each step once."""
    seen: list[float] = []
    for chunk in chunks:
        if agent in chunk.agent_episodes:
            own = chunk.agent_episodes[agent].get_observations()[:, 0].tolist()
            assert not seen or own[0] == seen[-1]
            seen = seen[:-1] + own
    return seen


def test_metrics_of_failures_are_0_before_the_first_one(fleets: Callable[..., Fleet]) -> None:
    runner = runner_of(fleets(Climb))

    for _ in range(2):  # as in two iterations
        runner.sample(num_timesteps=4)
        metrics = runner.get_metrics()
        assert [metrics[name].peek() for name in LIFETIME_SUMS] == [0, 0, 0]
    runner.stop()


def test_a_loss_costs_no_agent_a_transition_that_has_arrived(
    fleets: Callable[..., Fleet],
) -> None:
    fleet = fleets(Climb, Climb)
    runner = runner_of(fleet)
    before = runner.sample(num_timesteps=20)
    fleet.lose(0)

    during = runner.sample(num_timesteps=21)  # the other one goes on
    fleet.bring_back(0)
    after: list[MultiAgentEpisode] = []
    while len({chunk.id_ for chunk in after if not chunk.is_done}) < 2:
        after += runner.sample(num_timesteps=4)

    by_episode: dict[str, list[MultiAgentEpisode]] = {}
    for chunk in before + during + after:
        by_episode.setdefault(chunk.id_, []).append(chunk)
    assert len(by_episode) == 3
    for chunks in by_episode.values():
        steps = sum(map(len, chunks))
        assert observed(chunks, "first") == list(range(steps + 1))
        seen = list(range(0, steps + 1, 2))
        # Of an agent without a step there is nothing to return.
        assert observed(chunks, "second") == (seen if len(seen) > 1 else [])
    assert runner.get_metrics()["num_episodes_interrupted_lifetime"].peek() == 1
    runner.stop()


def test_an_interrupted_episode_is_returned_as_truncated_for_all_its_agents(
    fleets: Callable[..., Fleet],
) -> None:
    fleet = fleets(Climb, Climb)
    runner = runner_of(fleet)
    runner.config.callbacks_on_episode_step = LoseAt(fleet, step=7)

    (cut,) = (chunk for chunk in runner.sample(num_timesteps=40) if chunk.is_done)

    assert cut.is_truncated
    assert not cut.is_terminated
    assert len(cut) == 7
    for agent, num_steps in (("first", 7), ("second", 3)):  # the fourth has not come back
        own = cut.agent_episodes[agent]
        assert (len(own), own.is_truncated, own.is_terminated) == (num_steps, True, False)
        assert "session" in own.get_infos(-1)[INTERRUPTED_KEY]
    np.testing.assert_array_equal(cut.agent_episodes["first"].get_rewards(), range(1, 8))
    metrics = runner.get_metrics()
    assert "num_episodes" not in metrics
    assert metrics["num_env_steps_sampled"].peek() == 40
    assert metrics["num_env_step_failures"].peek() == 1
    runner.stop()


class LoseAt:
    """Loses the endpoint of the episode that is the first to come to a step; a callback."""

    def __init__(self, fleet: Fleet, step: int) -> None:
        self.fleet, self.step = fleet, step
        self.is_done = False

    def __call__(self, *, episode: MultiAgentEpisode, env_index: int, **_kwargs: Any) -> None:
        if episode.env_t == self.step and not self.is_done:
            self.is_done = True
            self.fleet.lose(env_index)


def test_lanes_of_agents_that_had_no_turn_return_nothing(fleets: Callable[..., Fleet]) -> None:
    runner = runner_of(fleets(Climb, Climb))

    samples = [runner.sample(num_timesteps=1) for _ in range(4)]

    assert [list(map(len, chunks)) for chunks in samples] == [[1]] * 4
    runner.stop()


def test_agents_steps_are_counted_if_the_config_asks_for_it(fleets: Callable[..., Fleet]) -> None:
    runner = runner_of(fleets(Climb, Climb))
    runner.config.multi_agent(count_steps_by="agent_steps")

    chunks = runner.sample(num_timesteps=30)

    # Observations: one of the first agent a step, one of the second every other step.
    counted = sum(len(chunk) + len(chunk) // 2 for chunk in chunks)
    assert 30 <= counted < 30 + 2
    runner.stop()


def test_a_call_reaches_every_lane_of_agents_and_new_sessions_too(
    fleets: Callable[..., Fleet],
) -> None:
    fleet = fleets(Climb)
    runner = runner_of(fleet)
    runner.sample(num_timesteps=2)

    assert runner.env.unwrapped.call("set_rung", 3) == (0,)
    fleet.lose(0)
    fleet.bring_back(0)

    chunks = runner.sample(num_timesteps=6)
    infos = [chunk.agent_episodes["first"].get_infos() for chunk in chunks]
    assert {info["rung"] for own in infos for info in own if "rung" in info} == {3}
    assert {len(chunk) for chunk in chunks} == {6}
    runner.stop()
