"""Our client on our own server through dm_env_rpc: what our own protocol gives, to the last bit."""

from collections.abc import Iterator
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import iterate

from rlmesh_ray import DmEnvRpcSettings, EnvServer, RemoteEnv, RemoteVectorEnv, evaluate
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.errors import AccessDeniedError, RemoteEnvError
from rlmesh_ray.testing.equality import assert_identical

STREAMS = DmEnvRpcSettings(num_envs=2)
ONE_WORLD = DmEnvRpcSettings(num_envs=2, one_world=True)
BATCHED = DmEnvRpcSettings(batched=True)
SINGLY = [
    pytest.param(STREAMS, id="streams", marks=pytest.mark.slow),
    pytest.param(ONE_WORLD, id="one world"),
]
WAYS = [*SINGLY, pytest.param(BATCHED, id="batched")]


def through_dm_env_rpc(server: EnvServer, settings: DmEnvRpcSettings) -> RemoteVectorEnv:
    address = f"dm_env_rpc://{server.address.removeprefix('rlmesh://')}"
    return RemoteVectorEnv(address, step_timeout_s=20.0, dm_env_rpc=settings)


@pytest.fixture(scope="module")
def cart_poles() -> Iterator[EnvServer]:
    def make() -> Any:
        return gymnasium.make("CartPole-v1", max_episode_steps=15)

    with EnvServer(make, num_envs=2, max_sessions=3) as server:
        yield server


@pytest.fixture(scope="module")
def both(request: Any, cart_poles: EnvServer) -> Iterator[tuple[RemoteVectorEnv, RemoteVectorEnv]]:
    plain = RemoteVectorEnv(cart_poles.address)
    other = through_dm_env_rpc(cart_poles, request.param)
    yield plain, other
    other.close()
    plain.close()


def assert_same(one: Any, other: Any) -> None:
    for part, expected in zip(one[:-1], other[:-1], strict=True):
        np.testing.assert_array_equal(part, expected)
        assert np.asarray(part).dtype == np.asarray(expected).dtype


@pytest.mark.parametrize("both", WAYS, indirect=True)
def test_it_gives_what_our_own_protocol_gives(
    both: tuple[RemoteVectorEnv, RemoteVectorEnv],
) -> None:
    plain, other = both
    actions = np.random.default_rng(0).integers(0, 2, (60, 2))
    assert other.single_observation_space == plain.single_observation_space
    assert other.single_action_space == plain.single_action_space
    assert other.metadata["autoreset_mode"] == plain.metadata["autoreset_mode"]

    assert_same(other.reset(seed=3), plain.reset(seed=3))
    cut = ended = 0
    for row in actions:
        result, expected = other.step(row), plain.step(row)
        assert_same(result, expected)
        ended += int(expected[2].sum())
        cut += int(expected[3].sum())
    assert ended
    assert cut


@pytest.mark.parametrize("both", WAYS, indirect=True)
def test_some_lanes_begin_anew_as_they_do_there(
    both: tuple[RemoteVectorEnv, RemoteVectorEnv],
) -> None:
    mask = {"reset_mask": np.array([False, True])}
    results = []
    for env in both:
        env.reset(seed=3)
        for _ in range(5):
            env.step(np.ones(2, int))
        partial, _ = env.reset(seed=[7, 8], options=mask)
        results.append((partial, *env.step(np.ones(2, int))))

    assert_same(*results)


@pytest.mark.parametrize("both", WAYS, indirect=True)
def test_evaluations_agree(both: tuple[RemoteVectorEnv, RemoteVectorEnv]) -> None:
    def wander(observation: Any) -> Any:
        return (observation[:, 0] > 0).astype(np.int64)

    plain, other = (evaluate(env, wander, episodes=10, seed=5) for env in both)

    assert [(e.episode_return, e.truncated) for e in plain.episodes] == [
        (e.episode_return, e.truncated) for e in other.episodes
    ]
    assert len({episode.length for episode in plain.episodes}) > 1


def test_evaluate_dials_with_settings(cart_poles: EnvServer) -> None:
    def wander(observation: Any) -> Any:
        return (observation[:, 0] > 0).astype(np.int64)

    address = f"dm_env_rpc://{cart_poles.address.removeprefix('rlmesh://')}"
    dialed = evaluate(ConnectOptions(address, dialect_settings=BATCHED), wander, episodes=5, seed=5)
    plain = evaluate(cart_poles.address, wander, episodes=5, seed=5)

    assert [e.episode_return for e in dialed.episodes] == [e.episode_return for e in plain.episodes]


class Collection(gymnasium.Env[Any, Any]):
    """Has a part of every kind, and shows its actions."""

    observation_space = spaces.Dict(
        {
            "z.half": spaces.Box(-4, 4, (2,), np.float16),
            "pair": spaces.Tuple([spaces.Discrete(5, start=-2), spaces.MultiBinary(3)]),
            "words": spaces.Text(12, charset="abc é"),
            "reward": spaces.Box(0, 9, (2, 2), np.int16),
        }
    )
    action_space = observation_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action["words"] == "c":
            raise ValueError("do not say that")
        return action, 0.25, False, False, {}


@pytest.fixture(scope="module")
def collections() -> Iterator[EnvServer]:
    with EnvServer(Collection, num_envs=2, max_sessions=3) as server:
        yield server


@pytest.fixture(scope="module", params=[STREAMS, BATCHED], ids=["streams", "batched"])
def collection(request: Any, collections: EnvServer) -> Iterator[RemoteVectorEnv]:
    env = through_dm_env_rpc(collections, request.param)
    env.action_space.seed(1)  # 20 would draw "c", which the environment refuses
    yield env
    env.close()


def test_exact_spaces_and_values_come_through(collection: RemoteVectorEnv) -> None:
    assert collection.single_observation_space == Collection.observation_space
    assert collection.single_action_space == Collection.action_space
    shown = iterate(collection.observation_space, collection.reset(seed=1)[0])
    for lane, seed in zip(shown, (1, 2), strict=True):
        assert_identical(lane, Collection().reset(seed=seed)[0])

    action = collection.action_space.sample()
    reported = collection.step(action)
    # What travels at a wider dtype arrives at its own.
    assert reported[0]["z.half"].dtype == np.float16
    np.testing.assert_array_equal(reported[0]["z.half"], action["z.half"])
    np.testing.assert_array_equal(reported[0]["reward"], action["reward"])
    assert reported[0]["words"] == action["words"]
    assert reported[1].tolist() == [0.25, 0.25]


def test_an_environment_that_raises_is_reported_and_can_be_reset(
    collection: RemoteVectorEnv,
) -> None:
    collection.reset(seed=1)
    action = {**collection.action_space.sample(), "words": ("a", "c")}
    with pytest.raises(RemoteEnvError, match="do not say that") as caught:
        collection.step(action)
    assert "in step" in caught.value.debug_info
    assert caught.value.is_recoverable
    collection.reset(seed=1)

    assert collection.step({**action, "words": ("a", "b")})[1].tolist() == [0.25, 0.25]


class Pair:
    """Two agents whose episodes end together; each earns what it does."""

    possible_agents = ("left", "right")
    observation_spaces: ClassVar[Any] = dict.fromkeys(possible_agents, spaces.Box(-9, 9, (2,)))
    action_spaces: ClassVar[Any] = dict.fromkeys(possible_agents, spaces.Discrete(3))

    def __init__(self) -> None:
        self.agents = list(self.possible_agents)
        self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._num_steps = 0
        return {agent: np.zeros(2, np.float32) for agent in self.agents}, {}

    def step(self, actions: Any) -> Any:
        self._num_steps += 1
        shown = {k: np.array([self._num_steps, act], np.float32) for k, act in actions.items()}
        rewards = {k: float(act) for k, act in actions.items()}
        is_over = dict.fromkeys((*self.agents, "__all__"), self._num_steps >= 3)
        return shown, rewards, is_over, dict.fromkeys(is_over, False), {}

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_several_agents_of_one_world_are_lanes() -> None:
    settings = DmEnvRpcSettings(
        num_envs=2,
        one_world=True,
        create={"min_agents": 2},
        join=[{"agent": "left"}, {"agent": "right"}],
        observations=("observation",),
        is_bare=True,
    )
    with EnvServer(Pair) as server:
        env = through_dm_env_rpc(server, settings)
        env.reset()
        results = [env.step(np.array([1, 2])) for _ in range(5)]
        env.close()

    assert [result[0][:, 0].tolist() for result in results] == [[k, k] for k in (1, 2, 3, 0, 1)]
    assert [result[1].tolist() for result in results] == [[1, 2]] * 3 + [[0, 0], [1, 2]]
    assert [result[2].tolist() for result in results] == [[k == 2] * 2 for k in range(5)]


@pytest.mark.slow
def test_a_session_that_is_closed_makes_room_for_the_next_one() -> None:
    with EnvServer("CartPole-v1", max_sessions=1) as server:
        for _ in range(3):
            env = through_dm_env_rpc(server, DmEnvRpcSettings())
            env.reset(seed=1)
            env.close()


def test_a_token_opens_the_door() -> None:
    with EnvServer("CartPole-v1", token="s3cret") as server:
        address = f"dm_env_rpc://{server.address.removeprefix('rlmesh://')}"
        with pytest.raises(AccessDeniedError):
            RemoteEnv(address, token="guess")
        env = RemoteEnv(address, token="s3cret")
        env.reset(seed=1)
        env.close()
