"""The episode loop with a vector environment in memory that fails on demand."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rlmesh_ray.client.model.remote_model import Slots
from rlmesh_ray.errors import EndpointLostError, LocalProtocolError
from rlmesh_ray.evaluation.coordinator import Attempt, Coordinator, News, RemoteEndpoint
from rlmesh_ray.evaluation.result import EndpointRole, EpisodeResult
from rlmesh_ray.evaluation.run import LaneLoop
from rlmesh_ray.spaces.contract import AutoresetMode


def length_of(seed: int) -> int:
    return 1 + 7 * seed % 5


def expected(index: int, first_seed: int) -> EpisodeResult:
    """The expected episode: the reward of a step depends on its seed and the action."""
    seed = first_seed + index
    length = length_of(seed)
    return EpisodeResult(
        index=index,
        seed=seed,
        episode_return=float(sum(seed + step for step in range(length))),
        length=length,
        terminated=seed % 2 == 0,
        truncated=seed % 2 == 1,
        success=seed % 3 == 0,
    )


class MemoryEnv:
    """Lanes that know their seed. An ended lane must be reset before the next step.

    Args:
        num_envs: Width.
        breaks_at: The step that raises EndpointLostError; 0: the first reset does.
    """

    address = "memory"
    contract = SimpleNamespace(autoreset_mode=AutoresetMode.DISABLED)
    resets_single_lanes = True

    def __init__(self, num_envs: int, breaks_at: int | None = None) -> None:
        self.num_envs = num_envs
        self._breaks_at = breaks_at
        self._num_steps = 0
        self._seeds = np.zeros(num_envs, np.int64)
        self._steps = np.zeros(num_envs, np.int64)
        self._ended = np.ones(num_envs, np.bool_)

    def reset(
        self, *, seed: Sequence[int] | None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._break_if_due()
        assert seed is not None
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        self._seeds[mask] = np.array(seed)[mask]
        self._steps[mask] = 0
        self._ended[mask] = False
        return self._steps.copy(), {}

    def step(self, actions: NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._num_steps += 1
        self._break_if_due()
        if self._ended.any():
            raise LocalProtocolError("an ended lane was stepped")
        rewards = (self._seeds + actions).astype(np.float64)
        self._steps += 1
        self._ended = self._steps >= [length_of(seed) for seed in self._seeds.tolist()]
        terminated = self._ended & (self._seeds % 2 == 0)
        infos = {"is_success": self._seeds % 3 == 0, "_is_success": self._ended}
        return self._steps.copy(), rewards, terminated, self._ended & ~terminated, infos

    def _break_if_due(self) -> None:
        if self._breaks_at is not None and self._num_steps >= self._breaks_at:
            raise EndpointLostError("broken on demand", self.address)


class Episodes(Coordinator):
    """Episodes without endpoints, and the session that runs them next."""

    def __init__(self, num_episodes: int) -> None:
        self.session = Attempt({}, has_begun=True)
        self.finished: list[EpisodeResult] = []
        super().__init__(range(num_episodes), [], [], 0.0, 0, self._note)

    def _note(self, news: News) -> None:
        if isinstance(news, EpisodeResult):
            self.finished.append(news)

    def lose_session(self) -> None:
        source: Any = lambda: None  # noqa: E731
        self.session.has_begun = False
        self.session.endpoints = {
            EndpointRole.ENV: RemoteEndpoint(EndpointRole.ENV, source, source)
        }
        self.lose(self.session, EndpointRole.ENV, EndpointLostError("lost", "memory"))
        self.session = Attempt({}, has_begun=True)


class CountingPolicy:
    """A policy that returns the step, and checks the slots of every lane."""

    address = ""

    def __init__(self) -> None:
        self.seen: list[Slots] = []

    def act(self, observation: Any, slots: Callable[[], Slots]) -> Any:
        own = slots()
        assert list(own.steps) == observation.tolist()
        assert list(own.resets) == [step == 0 for step in own.steps]
        assert len(set(own.episode_ids)) == len(own.episode_ids)
        self.seen.append(own)
        return observation


def drive(env: MemoryEnv, episodes: Episodes, seed: int | None) -> None:
    loop: Any = LaneLoop
    loop(env, CountingPolicy(), episodes, episodes.session, seed).run()


@given(
    num_episodes=st.integers(1, 12),
    first_seed=st.integers(0, 50),
    sessions=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20)), max_size=6),
    last_width=st.integers(1, 5),
)
def test_every_episode_ends_once_with_its_own_seed_after_any_failure(
    num_episodes: int, first_seed: int, sessions: list[tuple[int, int]], last_width: int
) -> None:
    episodes = Episodes(num_episodes)

    for width, breaks_at in sessions:
        try:
            drive(MemoryEnv(width, breaks_at), episodes, first_seed)
        except EndpointLostError:
            episodes.lose_session()
    drive(MemoryEnv(last_width), episodes, first_seed)

    assert list(episodes.result().episodes) == [
        expected(index, first_seed) for index in range(num_episodes)
    ]
    assert len(episodes.finished) == num_episodes


def test_a_lane_without_an_episode_takes_one_that_was_lost_elsewhere() -> None:
    class LosingDesk(Episodes):
        def begin(self, attempt: Attempt) -> None:
            self.session = elsewhere
            self.lose_session()

    # Episode 1 lasts 3 steps and episode 0 one: the idle lane does not wait for the other.
    episodes = LosingDesk(2)
    elsewhere = Attempt({})
    episodes.take(elsewhere, [0])
    drive(MemoryEnv(2), episodes, 0)

    assert [episode.index for episode in episodes.finished] == [0, 1]
    assert episodes.finished[0] == expected(0, 0)


def test_idle_lanes_run_no_episode() -> None:
    policy = CountingPolicy()
    episodes = Episodes(1)

    loop: Any = LaneLoop
    loop(MemoryEnv(2), policy, episodes, episodes.session, 1).run()

    ids = {name for slots in policy.seen for name in slots.episode_ids}
    assert {name.partition("-")[0] for name in ids} == {"episode", "idle"}
    assert len([name for name in ids if name.startswith("episode-")]) == 1


def test_a_stopped_source_ends_the_loop() -> None:
    episodes = Episodes(1)
    episodes.is_stopped = True

    drive(MemoryEnv(1), episodes, 4)

    assert not episodes.finished


def test_an_error_of_the_environment_is_raised() -> None:
    with pytest.raises(EndpointLostError):
        drive(MemoryEnv(1, 1), Episodes(1), 0)


class MemoryVector(MemoryEnv):
    """Lanes that start together only, and reset by themselves after an end (NEXT_STEP)."""

    contract = SimpleNamespace(autoreset_mode=AutoresetMode.NEXT_STEP)
    resets_single_lanes = False

    def reset(
        self, *, seed: Sequence[int] | None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        assert "reset_mask" not in (options or {}), "a lane was reset alone"
        return super().reset(seed=seed, options=options)

    def step(self, actions: NDArray[Any]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        begins = self._ended.copy()
        self._ended[:] = False
        self._steps[begins] = -1
        return super().step(actions)


@given(num_episodes=st.integers(1, 12), first_seed=st.integers(0, 50), width=st.integers(1, 5))
def test_lanes_that_start_together_run_every_episode_once(
    num_episodes: int, first_seed: int, width: int
) -> None:
    episodes = Episodes(num_episodes)

    loop: Any = LaneLoop
    echo = SimpleNamespace(act=lambda observation, _: observation, address="")
    loop(MemoryVector(width), echo, episodes, episodes.session, first_seed).run()

    assert list(episodes.result().episodes) == [
        expected(index, first_seed) for index in range(num_episodes)
    ]
    assert len(episodes.finished) == num_episodes
