"""ChunkPlayer, on a clock and with latencies of the test's own."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.client.model.chunk_player import ChunkPlayer, ChunkRequest
from rlmesh_ray.errors import ConfigurationError, ConformanceError


def first_of(candidates: Any) -> Any:
    return candidates[0]


@dataclass
class Sent:
    """A request, as the simulation has sent it."""

    request: ChunkRequest
    actions: Any
    arrives_s: float
    step_of_arrival: int | None = None
    """Step that came next then; None: it was of another episode."""


class Simulation:
    """A simulator that takes ``period_s`` for a step, and a policy with a latency for each request.

    It keeps a list of all requests, and finds the action of each step by going through that list.

    Args:
        player: The player.
        latency: Returns the latency of the next request.
        horizon: Number of actions in a chunk.
        played: How many of them are played.
        sends_each_step: Whether to send each observation, wanted or not.
    """

    period_s = 1.0

    def __init__(
        self,
        player: ChunkPlayer,
        latency: Callable[[], float],
        horizon: int,
        played: int,
        *,
        sends_each_step: bool = False,
    ) -> None:
        self.player = player
        self.now_s = 0.0
        self.waited: list[int] = []
        """Step of each wait."""
        self.sent: list[Sent] = []
        self._latency = latency
        self._horizon = horizon
        self._played = played
        self._sends_each_step = sends_each_step
        self._on_the_way: list[Sent] = []
        self._episode = self._step = 0

    def run_episode(self, num_steps: int) -> list[tuple[Any, list[Any]]]:
        """Return the action of each step, with all candidates for it, oldest first."""
        if self._step:
            self.player.begin_episode()
            self._episode += 1
        steps = []
        for self._step in range(num_steps):
            self._deliver()
            if self.player.wants_request() or self._sends_each_step:
                self._send()
                self._deliver()
            action = self.player.next_action(self.now_s)
            if action is None:
                self.waited.append(self._step)
            while action is None:
                self.now_s = min(each.arrives_s for each in self._on_the_way)
                self._deliver()
                if self.player.wants_request():
                    self._send()
                    self._deliver()
                action = self.player.next_action(self.now_s)
            steps.append((action, self.candidates()))
            self.now_s += self.period_s
        self._step = num_steps
        return steps

    def candidates(self) -> list[Any]:
        """Return the actions of all chunks that have one for this step, oldest first."""
        return [
            each.actions[self._step - each.request.step]
            for each in sorted(self.sent, key=lambda each: each.request.step)
            if each.request.episode == self._episode
            and each.arrives_s <= self.now_s
            and each.request.step <= self._step < each.request.step + self._played
        ]

    def _send(self) -> None:
        request = self.player.request_sent(self.now_s)
        assert (request.episode, request.step) == (self._episode, self._step)
        actions = len(self.sent) * 100.0 + np.arange(self._horizon)
        self.sent.append(Sent(request, actions, self.now_s + self._latency()))
        self._on_the_way.append(self.sent[-1])

    def _deliver(self) -> None:
        for each in sorted(self._on_the_way, key=lambda each: each.arrives_s):
            if each.arrives_s <= self.now_s:
                self._on_the_way.remove(each)
                if each.request.episode == self._episode:
                    each.step_of_arrival = self._step
                self.player.chunk_arrived(each.request, each.actions, each.arrives_s)


@given(
    seed=st.integers(0, 2**32),
    horizon=st.integers(1, 9),
    blend=st.sampled_from(["newest", "mean", first_of]),
    prefetch=st.sampled_from(["auto", 0, 1]),
    sends_each_step=st.booleans(),
)
def test_each_step_gets_the_action_that_the_list_of_all_requests_has_for_it(
    seed: int, horizon: int, blend: Any, prefetch: int | str, sends_each_step: bool
) -> None:
    draws = random.Random(seed)
    played = draws.randint(1, horizon)
    player = ChunkPlayer(horizon, execution_horizon=played, prefetch=prefetch, blend=blend)
    simulation = Simulation(
        player,
        lambda: draws.choice([0.0, 0.5, 1.5, 3.0, draws.uniform(0, 12)]),
        horizon,
        played,
        sends_each_step=sends_each_step,
    )
    choose: Any = {"newest": lambda all_: all_[-1], "mean": np.mean}.get(blend, first_of)

    steps = [step for _ in range(4) for step in simulation.run_episode(draws.randint(1, 30))]

    assert [action for action, _ in steps] == pytest.approx([choose(each) for _, each in steps])
    statistics = player.statistics
    assert statistics.num_actions == len(steps)
    assert statistics.num_starved == sum(step > 0 for step in simulation.waited)


@given(seed=st.integers(0, 2**32), horizon=st.integers(2, 12))
def test_no_step_waits_while_two_latencies_fit_into_the_chunk(seed: int, horizon: int) -> None:
    draws = random.Random(seed)
    longest = horizon // 2
    player = ChunkPlayer(horizon, prefetch=longest)
    simulation = Simulation(player, lambda: draws.uniform(0.0, longest), horizon, horizon)

    for _ in range(3):
        simulation.run_episode(40)

    assert set(simulation.waited) <= {0}
    assert player.statistics.num_starved == 0


@given(latency=st.floats(0.0, 6.0), num_steps=st.integers(20, 60))
def test_a_measured_latency_prefetches_early_enough(latency: float, num_steps: int) -> None:
    player = ChunkPlayer(12)
    simulation = Simulation(player, lambda: latency, 12, 12)

    simulation.run_episode(num_steps)

    assert set(simulation.waited) <= {0}
    assert player.statistics.num_starved == 0
    assert player.prefetch == min(6, np.ceil(latency) + 1)


def test_a_policy_that_is_slower_than_its_chunks_is_not_asked_ahead() -> None:
    player = ChunkPlayer(8)
    simulation = Simulation(player, lambda: 9.0, 8, 8)

    simulation.run_episode(80)

    # Each answer that was asked for when nothing was left brings eight actions.
    assert player.prefetch == 0
    assert len(simulation.sent) <= 80 / 8 + 2


def test_one_slow_answer_makes_no_later_step_wait() -> None:
    latencies = iter([500.0])
    player = ChunkPlayer(8)
    simulation = Simulation(player, lambda: next(latencies, 1.0), 8, 8)

    simulation.run_episode(60)

    assert simulation.waited == [0]


def test_without_prefetch_each_chunk_is_waited_for() -> None:
    player = ChunkPlayer(8, execution_horizon=4, prefetch=0)
    simulation = Simulation(player, lambda: 0.5, 8, 4)

    simulation.run_episode(10)

    assert simulation.waited == [0, 4, 8]
    assert player.statistics.num_starved == 2
    assert player.statistics.num_late == 0


def test_actions_of_past_steps_are_dropped() -> None:
    player = ChunkPlayer(4, prefetch=2)
    player.chunk_arrived(player.request_sent(0.0), np.arange(4), 0.0)
    played = [player.next_action(0.0), player.next_action(0.0)]
    request = player.request_sent(0.0)  # begins at step 2
    played += [player.next_action(0.0), player.next_action(0.0)]

    starved = player.next_action(0.0), player.next_action(0.0)
    player.chunk_arrived(request, np.arange(4) + 20, 0.0)

    assert played == [0, 1, 2, 3]
    assert starved == (None, None)
    assert player.next_action(0.0) == 22
    assert player.statistics.num_late == 2
    assert player.statistics.num_starved == 1


def test_actions_of_skipped_steps_are_left_out_also_those_of_an_answer_that_comes_later() -> None:
    player = ChunkPlayer(4)
    first = player.request_sent(0.0)
    player.skip(1)
    player.chunk_arrived(first, np.arange(4), 0.03)
    assert player.next_action(0.03) == 1
    player.skip(1)

    assert player.next_action(0.06) == 3
    assert (player.step, player.num_left, player.statistics.num_late) == (4, 0, 1)
    with pytest.raises(ConfigurationError, match="num_steps=-1 must be 0 or more"):
        player.skip(-1)


def test_an_answer_that_is_older_than_the_present_chunk_is_dropped() -> None:
    player = ChunkPlayer(4)
    player.chunk_arrived(player.request_sent(0.0), np.arange(4), 0.0)
    player.next_action(0.0)
    older = player.request_sent(0.0)
    player.next_action(0.0)
    newer = player.request_sent(0.0)

    player.chunk_arrived(newer, np.arange(4) + 20, 0.0)
    player.chunk_arrived(older, np.arange(4) + 10, 0.0)

    assert player.next_action(0.0) == 20
    assert player.statistics.num_late == 4


def test_an_answer_for_an_earlier_episode_is_dropped() -> None:
    player = ChunkPlayer(4)
    player.chunk_arrived(player.request_sent(0.0), np.arange(4), 0.0)
    player.next_action(0.0)
    earlier = player.request_sent(0.0)

    player.begin_episode()
    assert player.wants_request()
    request = player.request_sent(0.0)
    player.chunk_arrived(earlier, np.arange(4) + 10, 0.0)

    assert player.next_action(0.0) is None
    assert not player.wants_request()
    player.chunk_arrived(request, np.arange(4) + 20, 0.0)
    assert player.next_action(0.0) == 20
    assert player.statistics.num_stale == 4
    assert player.statistics.num_starved == 0  # the first step of an episode always waits


def test_a_chunk_is_asked_for_once_a_step_and_again_after_a_failure() -> None:
    player = ChunkPlayer(2, prefetch=2)

    request = player.request_sent(0.0)
    wanted = [player.wants_request()]
    player.request_failed(request)
    wanted.append(player.wants_request())
    player.chunk_arrived(player.request_sent(0.0), np.arange(2), 0.0)
    wanted.append(player.wants_request())
    player.next_action(0.0)
    wanted.append(player.wants_request())

    assert wanted == [False, True, False, True]


def test_actions_nest_as_the_action_space_does() -> None:
    player = ChunkPlayer(2, blend="mean", prefetch=2)
    grip = np.zeros((2, 1), np.float32)
    chunk: Any = {"arm": (np.arange(4, dtype=np.float32).reshape(2, 2),), "grip": grip}
    player.chunk_arrived(player.request_sent(0.0), chunk, 0.0)
    player.next_action(0.0)
    later = {"arm": (chunk["arm"][0] + 10,), "grip": grip + 1}
    player.chunk_arrived(player.request_sent(0.0), later, 0.0)

    action: Any = player.next_action(0.0)

    assert list(action) == ["arm", "grip"]
    np.testing.assert_array_equal(action["arm"][0], [6.0, 7.0])  # of [2, 3] and [10, 11]
    np.testing.assert_array_equal(action["grip"], [0.5])
    assert action["arm"][0].dtype == action["grip"].dtype == np.float32


def test_a_function_gets_the_candidates_oldest_first() -> None:
    seen: list[Any] = []

    def blend(candidates: Any) -> Any:
        seen.append(candidates)
        return candidates[-1] - candidates[0]

    player = ChunkPlayer(3, blend=blend, prefetch=3)
    for base in (0, 10, 20):
        player.chunk_arrived(player.request_sent(0.0), np.arange(3) + base, 0.0)
        if base < 20:
            player.next_action(0.0)

    assert player.next_action(0.0) == 20 - 2
    np.testing.assert_array_equal(seen[0], [1, 10])
    np.testing.assert_array_equal(seen[1], [2, 11, 20])


@pytest.mark.parametrize("result", [0.5, np.zeros(2, np.int64), np.array([1])])
def test_a_function_must_return_one_action(result: Any) -> None:
    player = ChunkPlayer(2, blend=lambda _: result, prefetch=2)
    player.chunk_arrived(player.request_sent(0.0), np.arange(2), 0.0)
    player.next_action(0.0)
    player.chunk_arrived(player.request_sent(0.0), np.arange(2), 0.0)

    with pytest.raises(ConfigurationError, match=r"^blend made .* it must return one action"):
        player.next_action(0.0)


def test_whole_numbers_have_no_mean() -> None:
    player = ChunkPlayer(2, blend="mean")

    with pytest.raises(ConfigurationError, match=r"'mean' is for floats, and the action is int64"):
        player.chunk_arrived(player.request_sent(0.0), np.arange(2), 0.0)


def test_the_first_chunk_has_the_horizon_of_the_others() -> None:
    player = ChunkPlayer()
    player.chunk_arrived(player.request_sent(0.0), np.arange(3), 0.0)

    with pytest.raises(ConformanceError, match=r"^chunk: has 4 actions, expected 3$"):
        player.chunk_arrived(player.request_sent(0.0), np.arange(4), 0.0)
    with pytest.raises(ConformanceError, match=r"^chunk: has 0 actions, expected 3$"):
        player.chunk_arrived(player.request_sent(0.0), np.int64(4), 0.0)
    with pytest.raises(ConformanceError, match=r"^chunk: is not an array"):
        player.chunk_arrived(player.request_sent(0.0), [[1], [2, 3], [4]], 0.0)


def test_an_execution_horizon_beyond_the_horizon_is_refused_once_it_is_known() -> None:
    player = ChunkPlayer(execution_horizon=4)

    with pytest.raises(ConfigurationError, match=r"=4 is more than the 3 that .*give 3 or less"):
        player.chunk_arrived(player.request_sent(0.0), np.arange(3), 0.0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"horizon": 0}, "horizon=0 must be a whole number, 1 or more"),
        ({"execution_horizon": 0}, "execution_horizon=0 must be a whole number, 1 or more"),
        ({"execution_horizon": 9}, "=9 is more than the 8 that the policy returns at once"),
        ({"prefetch": -1}, "prefetch=-1 must be 0 or more, or 'auto'"),
        ({"prefetch": np.array([1, 2])}, r"prefetch=array\(\[1, 2\]\) must be a whole number"),
        ({"blend": np.array([1, 2])}, r"blend=array\(\[1, 2\]\) is not 'newest', 'mean' or a"),
        ({"prefetch": "soon"}, "prefetch='soon' must be 0 or more, or 'auto'"),
        ({"blend": "median"}, "blend='median' is not 'newest', 'mean' or a function"),
    ],
)
def test_an_option_that_is_none_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        ChunkPlayer(**{"horizon": 8, **options})
