"""Episodes made of arrays at the end, against RLlib's own, which grow step by step."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer

from rlmesh_ray.rllib.runner.autoreset_emulation import NoInfos, SessionBatch
from rlmesh_ray.rllib.runner.episode_buffer import EpisodeBuffer, EpisodeFactory
from rlmesh_ray.testing.equality import assert_identical

OBSERVATIONS = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
ACTIONS: gymnasium.Space[Any] = gymnasium.spaces.Discrete(9)


class StepByStep:
    """What RLlib's runner does with the lanes' episodes."""

    def __init__(self, observation: Any, infos: Any, lookback: int) -> None:
        self.lookback = lookback
        self.lanes = [self.new() for _ in infos]
        self.ended: list[SingleAgentEpisode] = []
        for lane, episode in enumerate(self.lanes):
            episode.add_env_reset(observation[lane], infos[lane])

    def new(self) -> SingleAgentEpisode:
        return SingleAgentEpisode(observation_space=OBSERVATIONS, action_space=ACTIONS)

    def add(
        self,
        observation: Any,
        rewards: Any,
        terminated: Any,
        truncated: Any,
        infos: Any,
        columns: Any,
    ) -> None:
        for lane, episode in enumerate(self.lanes):
            if not episode.is_reset:
                episode.add_env_reset(observation[lane], infos[lane])
                continue
            episode.add_env_step(
                observation[lane],
                columns["actions"][lane],
                rewards[lane],
                infos[lane],
                terminated=bool(terminated[lane]),
                truncated=bool(truncated[lane]),
                extra_model_outputs={"logp": columns["logp"][lane]},
            )
            if episode.is_done:
                self.ended.append(episode.to_numpy())
                self.lanes[lane] = self.new()

    def cut(self) -> tuple[list[SingleAgentEpisode], list[SingleAgentEpisode]]:
        ended, self.ended = self.ended, []
        chunks = []
        for lane, episode in enumerate(self.lanes):
            if len(episode):
                self.lanes[lane] = episode.cut(self.lookback)
                chunks.append(episode.to_numpy())
        return ended, chunks


def parts(episode: SingleAgentEpisode) -> list[Any]:
    buffers = [
        episode.observations,
        episode.actions,
        episode.rewards,
        *episode.extra_model_outputs.values(),
    ]
    return [
        (episode.t_started, episode.t, episode.is_terminated, episode.is_truncated),
        (list(episode.infos.data), episode.infos.lookback),
        *[(buffer.data.dtype, buffer.data.tolist(), buffer.lookback) for buffer in buffers],
        [(buffer.finalized, buffer.space) for buffer in buffers],
        episode.observation_space,
        episode.action_space,
    ]


def add(record: EpisodeBuffer, *, columns: Any, **batch: Any) -> None:
    record.add(SessionBatch(**batch), columns)


def step_of(random: np.random.Generator, num_lanes: int) -> dict[str, Any]:
    return {
        "observation": random.normal(size=(num_lanes, 2)).astype(np.float32),
        "rewards": random.normal(size=num_lanes),
        "terminated": random.random(num_lanes) < 0.2,
        "truncated": random.random(num_lanes) < 0.1,
        "infos": [{"number": int(random.integers(99))} for _ in range(num_lanes)],
        "columns": {
            "actions": random.integers(9, size=num_lanes),
            "logp": random.normal(size=num_lanes).astype(np.float32),
        },
    }


def everything_in(episode: SingleAgentEpisode) -> dict[str, Any]:
    """Return all slots, buffers taken apart."""

    def opened(value: Any) -> Any:
        if isinstance(value, InfiniteLookbackBuffer):
            return dict(vars(value))
        if isinstance(value, dict):
            return {key: opened(part) for key, part in value.items()}
        return value

    return {name: opened(getattr(episode, name)) for name in SingleAgentEpisode.__slots__}


@pytest.mark.parametrize("lookback", [0, 2])
def test_a_made_episode_differs_in_nothing_from_a_constructed_one(lookback: int) -> None:
    length = 5 + lookback
    reported: dict[str, Any] = {
        "observations": np.ones((length + 1, 2), np.float32),
        "infos": [{"step": step} for step in range(length + 1)],
        "actions": np.arange(length),
        "rewards": np.ones(length),
    }
    extras = {"logp": np.zeros(length, np.float32)}
    expected = SingleAgentEpisode(
        "abc",
        **{name: list(value) for name, value in reported.items()},
        extra_model_outputs={name: list(value) for name, value in extras.items()},
        observation_space=OBSERVATIONS,
        action_space=ACTIONS,
        t_started=lookback,
        len_lookback_buffer=lookback,
    ).to_numpy()
    maker = EpisodeFactory(OBSERVATIONS, ACTIONS)

    made = maker.make("abc", **reported, extras=extras, lookback=lookback, t_started=lookback)

    made.validate()
    assert_identical(everything_in(made), everything_in(expected), "episode")


def test_made_episodes_share_nothing() -> None:
    maker = EpisodeFactory(OBSERVATIONS, ACTIONS)

    def make() -> SingleAgentEpisode:
        return maker.make(
            "abc",
            observations=np.ones((2, 2), np.float32),
            infos=[{}, {}],
            actions=np.arange(1),
            rewards=np.ones(1),
            extras={},
            lookback=0,
            t_started=0,
        )

    first, second = make(), make()
    first.custom_data["mine"] = 1
    first.extra_model_outputs["mine"] = 1
    first.observations.lookback = 1
    first.observation_space = None

    assert_identical(everything_in(second), everything_in(make()), "episode")


@given(
    seed=st.integers(0, 2**32),
    num_lanes=st.integers(1, 4),
    lookback=st.integers(0, 3),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    num_made=st.integers(0, 3),
)
def test_the_episodes_are_those_that_rllib_would_have_made(
    seed: int, num_lanes: int, lookback: int, lengths: list[int], num_made: int
) -> None:
    random = np.random.default_rng(seed)
    first = random.normal(size=(num_lanes, 2)).astype(np.float32)
    infos = [{"lane": lane} for lane in range(num_lanes)]
    record = EpisodeBuffer(
        first, infos, lookback=lookback, observation_space=OBSERVATIONS, action_space=ACTIONS
    )
    expected = StepByStep(first, infos, lookback)

    ids: dict[str, str] = {}
    for length in lengths:
        for _ in range(length):
            step = step_of(random, num_lanes)
            add(record, **step)
            expected.add(**step)
            for _ in range(num_made):
                record.make_one()
        ended, chunks = record.cut()
        theirs = expected.cut()
        for mine, others in (
            ([episode for _, episode in ended], theirs[0]),
            (chunks, theirs[1]),
        ):
            assert [parts(episode) for episode in mine] == [parts(episode) for episode in others]
            for episode, other in zip(mine, others, strict=True):
                # Chunks of one episode have one id, and no other episode has it.
                assert ids.setdefault(other.id_, episode.id_) == episode.id_
    assert len(set(ids.values())) == len(ids)


def test_what_has_ended_is_made_one_by_one_while_there_is_time() -> None:
    zeros, no_lane = np.zeros((2, 2), np.float32), np.zeros(2, np.bool_)
    record = EpisodeBuffer(
        zeros, [{}, {}], lookback=1, observation_space=OBSERVATIONS, action_space=ACTIONS
    )
    columns = {"actions": np.zeros(2, np.int32)}
    for terminated in (~no_lane, no_lane):
        record.add(SessionBatch(zeros, np.zeros(2), terminated, no_lane, [{}, {}]), columns)

    made = [record.make_one() for _ in range(3)]

    assert made == [True, True, False]
    ended, chunks = record.cut()
    assert [len(episode) for _, episode in ended] == [1, 1]
    assert not chunks


def test_episodes_keep_what_they_hold_when_the_record_goes_on() -> None:
    random = np.random.default_rng(0)
    first = np.zeros((2, 2), np.float32)
    record = EpisodeBuffer(
        first, [{}, {}], lookback=1, observation_space=OBSERVATIONS, action_space=ACTIONS
    )
    step = step_of(random, 2)
    add(record, **step)
    _, chunks = record.cut()
    before = [parts(chunk) for chunk in chunks]

    first[...] = 7.0
    step["observation"][...] = 7.0
    for _ in range(100):
        add(record, **step_of(random, 2))
    record.cut()

    assert [parts(chunk) for chunk in chunks] == before


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("lookback", [0, 2])
def test_lists_can_go_on_where_arrays_have_ended(lookback: int, is_cut: bool) -> None:
    random = np.random.default_rng(1)
    first = random.normal(size=(3, 2)).astype(np.float32)
    infos: list[dict[str, Any]] = [{}, {}, {}]
    record = EpisodeBuffer(
        first, infos, lookback=lookback, observation_space=OBSERVATIONS, action_space=ACTIONS
    )
    expected = StepByStep(first, infos, lookback)
    for _ in range(5):
        step = {**step_of(random, 3), "terminated": np.zeros(3, bool)}
        step["truncated"] = np.zeros(3, bool)
        add(record, **step)
        expected.add(**step)
    if is_cut:
        record.cut()
        expected.cut()

    ended, continued = record.hand_over()
    assert not ended
    last = step_of(random, 3)
    for lane, (mine, other) in enumerate(zip(continued, expected.lanes, strict=True)):
        assert mine.t == other.t == 5
        assert len(mine) == len(other)
        for episode in (mine, other):
            episode.add_env_step(
                last["observation"][lane],
                last["columns"]["actions"][lane],
                last["rewards"][lane],
                extra_model_outputs={"logp": last["columns"]["logp"][lane]},
            )
        assert parts(mine.to_numpy()) == parts(other.to_numpy())


def test_steps_without_infos_have_a_separate_dict_each() -> None:
    zeros, no_lane = np.zeros(2), np.zeros(2, np.bool_)
    record = EpisodeBuffer(
        np.zeros((2, 2), np.float32),
        NoInfos(2),
        lookback=1,
        observation_space=OBSERVATIONS,
        action_space=ACTIONS,
    )
    for infos in (NoInfos(2), [{"x": 1}, {}], NoInfos(2)):
        columns = {"actions": np.zeros(2, np.int64)}
        observation = np.zeros((2, 2), np.float32)
        record.add(SessionBatch(observation, zeros, no_lane, no_lane, infos), columns)

    _, (first, second) = record.cut()

    assert first.get_infos() == [{}, {}, {"x": 1}, {}]
    assert second.get_infos() == [{}] * 4
    every = [*first.get_infos(), *second.get_infos()]
    assert len({id(infos) for infos in every}) == len(every)
