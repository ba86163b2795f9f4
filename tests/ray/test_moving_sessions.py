"""What a runner makes of sessions that are to go to another endpoint of their fleet."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlmesh_ray.rllib.runner.session_recovery import INTERRUPTED_KEY
from tests.loopback.eventually import eventually
from tests.ray.lost_endpoints import Fleet, assert_unbroken
from tests.ray.multi_agent_worlds import Climb
from tests.ray.ramps import Ladder, Stairs

pytestmark = pytest.mark.usefixtures("local_ray")


def num_sessions(fleet: Fleet) -> list[int]:
    return [server.num_sessions for server in fleet.servers if server]


def send(fleet: Fleet, index: int, to: int) -> None:
    """Have the sessions with one endpoint move to another one."""
    fleet.board.redirected[index] = to
    fleet.board.leaving.add(index)


def num_moved(runner: Any) -> float:
    metrics = runner.get_metrics()
    assert metrics["num_env_step_failures"].peek() == 0
    assert metrics["num_episodes_interrupted_lifetime"].peek() == 0
    return float(metrics["num_sessions_moved"].peek())


def sample_until(
    runner: Any, chunks: list[Any], condition: Callable[[], bool], num_timesteps: int = 8
) -> None:
    def is_enough() -> bool:
        if condition():
            return True
        chunks.extend(runner.sample(num_timesteps=num_timesteps))
        return False

    assert eventually(is_enough)


def num_episodes(chunks: list[Any]) -> int:
    return len({chunk.id_ for chunk in chunks})


@pytest.mark.parametrize("path", ["fast", "per item"])
def test_a_session_moves_without_a_transition_lost_doubled_or_stitched(
    fleets: Callable[..., Fleet], path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rlmesh_ray.rllib")
    fleet = fleets(Stairs, Stairs)
    runner = fleet.runner()
    if path == "per item":
        runner.config.callbacks_on_episode_step = lambda **_kwargs: None
    send(fleet, 0, to=1)

    first = runner.sample(num_timesteps=20)
    chunks = list(first)
    sample_until(runner, chunks, lambda: num_episodes(chunks) == 3)

    assert (runner.fast_path_disabled_reason is None) == (path == "fast")
    assert_unbroken(chunks)
    assert eventually(lambda: num_sessions(fleet) == [0, 2])
    (cut,) = (chunk for chunk in chunks if chunk.is_done)
    assert cut in first
    assert (cut.is_truncated, cut.is_terminated) == (True, False)
    assert "moved away from endpoint 0" in cut.get_infos(-1)[INTERRUPTED_KEY]
    assert "1 session(s) leave endpoint 0" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert num_moved(runner) == 1
    runner.stop()


def test_the_only_session_moves_between_two_samples(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(Stairs, Stairs)
    del fleet.board.addresses[1]
    runner = fleet.runner()
    assert fleet.servers[1] is not None
    fleet.board.addresses.append(fleet.servers[1].address)
    assert eventually(lambda: num_sessions(fleet) == [1, 0])
    send(fleet, 0, to=1)

    chunks = runner.sample(num_timesteps=10)
    assert eventually(lambda: num_sessions(fleet) == [0, 1])
    chunks += runner.sample(num_timesteps=10)

    assert [(len(chunk), chunk.is_truncated) for chunk in chunks] == [(10, True), (10, False)]
    assert_unbroken(chunks)
    assert num_moved(runner) == 1
    runner.stop()


def test_sessions_move_while_other_sessions_are_sampled(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(Stairs, Stairs, Stairs)
    runner = fleet.runner()
    chunks = runner.sample(num_timesteps=30)
    send(fleet, 1, to=0)
    send(fleet, 2, to=0)

    sample_until(runner, chunks, lambda: num_episodes(chunks) == 5)

    assert_unbroken(chunks)
    assert sum(chunk.is_truncated for chunk in chunks) == 2
    assert eventually(lambda: num_sessions(fleet) == [3, 0, 0])
    assert num_moved(runner) == 2
    runner.stop()


def test_in_lockstep_only_the_sessions_to_move_get_other_assignments(
    fleets: Callable[..., Fleet],
) -> None:
    fleet = fleets(Stairs, Stairs, Stairs)
    runner = fleet.runner(lockstep=True)
    claimed = list(fleet.board.claimed)
    send(fleet, 0, to=2)

    chunks = runner.sample(num_timesteps=30)
    assert eventually(lambda: num_sessions(fleet) == [0, 1, 2])
    chunks += runner.sample(num_timesteps=30)

    assert fleet.board.claimed == [*claimed, claimed[0]]
    assert_unbroken(chunks)
    assert [chunk.is_truncated for chunk in chunks] == [True] * 3 + [False] * 3
    assert num_moved(runner) == 1
    runner.stop()


def test_whole_episodes_are_whole_in_spite_of_a_move(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(*[lambda: Stairs(length=4)] * 2)
    runner = fleet.runner()
    send(fleet, 0, to=1)

    episodes = runner.sample(num_episodes=3)
    assert eventually(lambda: num_sessions(fleet) == [0, 2])
    episodes += [each for _ in range(3) for each in runner.sample(num_episodes=3)]

    assert [len(episode) for episode in episodes] == [4] * 12
    assert all(episode.is_terminated for episode in episodes)
    assert num_moved(runner) == 1
    runner.stop()


def test_an_assignment_that_cannot_be_used_at_once_is_tried_again(
    fleets: Callable[..., Fleet],
) -> None:
    fleet = fleets(Stairs, Stairs)
    runner = fleet.runner()
    fleet.board.addresses.append(None)
    send(fleet, 0, to=2)

    chunks = [chunk for _ in range(20) for chunk in runner.sample(num_timesteps=8)]
    assert eventually(lambda: num_sessions(fleet) == [0, 1])
    fleet.board.addresses[2] = fleet.board.addresses[1]
    sample_until(runner, chunks, lambda: num_episodes(chunks) == 3)

    assert_unbroken(chunks)
    assert num_moved(runner) == 1
    runner.stop()


def test_what_was_called_is_called_again_where_a_session_goes(
    fleets: Callable[..., Fleet],
) -> None:
    fleet = fleets(Ladder, Ladder)
    runner = fleet.runner()
    runner.env.unwrapped.call("set_rung", 3)
    send(fleet, 0, to=1)

    runner.sample(num_timesteps=8)
    runner.sample(num_episodes=0)  # begins anew everywhere
    chunks: list[SingleAgentEpisode] = []
    sample_until(runner, chunks, lambda: num_episodes(chunks) == 2)

    rungs = {value for chunk in chunks for value in chunk.get_observations()[:, 0].tolist()}
    assert rungs == {3}
    assert eventually(lambda: num_sessions(fleet) == [0, 2])
    runner.stop()


def test_a_runner_that_stops_releases_its_assignments(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(Stairs, Stairs)
    runner = fleet.runner()

    runner.stop()

    assert fleet.board.released == fleet.board.claimed
    assert len(set(fleet.board.claimed)) == 2


def test_runners_of_one_plan_have_sessions_of_their_own(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(Stairs)
    runners = [fleet.runner(), fleet.runner()]

    assert len(set(fleet.board.claimed)) == 2
    for runner in runners:
        runner.stop()


def test_a_session_of_several_agents_moves_likewise(fleets: Callable[..., Fleet]) -> None:
    fleet = fleets(Climb, Climb)
    config = PPOConfig().multi_agent(
        policies=set(Climb.possible_agents),
        policy_mapping_fn=lambda agent_id, *_args, **_kwargs: agent_id,
    )
    runner = fleet.runner(config)
    send(fleet, 0, to=1)

    chunks: list[MultiAgentEpisode] = runner.sample(num_timesteps=21)
    sample_until(runner, chunks, lambda: num_episodes(chunks) == 3)

    (cut,) = (chunk for chunk in chunks if chunk.is_done)
    assert (cut.is_truncated, cut.is_terminated) == (True, False)
    assert (
        "moved away from endpoint 0" in cut.agent_episodes["first"].get_infos(-1)[INTERRUPTED_KEY]
    )
    by_episode: dict[str, list[float]] = {}
    for chunk in chunks:
        seen = chunk.agent_episodes["first"].get_observations()[:, 0].tolist()
        former = by_episode.setdefault(chunk.id_, [])
        assert former[-1:] in ([], seen[:1])
        former += seen[1:] if former else seen
    assert eventually(lambda: num_sessions(fleet) == [0, 2])
    assert all(seen == list(range(len(seen))) for seen in by_episode.values())
    assert num_moved(runner) == 1
    runner.stop()
