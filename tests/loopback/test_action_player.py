"""ActionPlayer, and evaluations that replay chunks, over real gRPC."""

import contextlib
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray import EnvServer, ModelServer, RemoteModel, evaluate
from rlmesh_ray.cli.main import main
from rlmesh_ray.errors import ConfigurationError, LocalProtocolError

HORIZON = 8
DEADLINE_S = 20.0


class Counting:
    """A policy that chooses the number that it sees, and counts on from there."""

    horizon = HORIZON

    def __init__(self) -> None:
        self.num_rows = 0

    def __call__(self, observations: Any) -> Any:
        self.num_rows += len(observations)
        return observations[:, None] + np.arange(HORIZON, dtype=np.float32)


class CountEnv(gymnasium.Env[Any, Any]):
    """Shows a number that goes up by one each step, from 1000 times its seed.

    Each action that is this number is worth 1. An episode has 1 to 20 steps.
    """

    observation_space = spaces.Box(0.0, 1e6, (), np.float32)
    action_space = spaces.Box(0.0, 1e6, (), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._number, self._num_left = 1000 * (seed or 0), 1 + 7 * (seed or 0) % 20
        return np.float32(self._number), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(action == self._number)
        self._number, self._num_left = self._number + 1, self._num_left - 1
        return np.float32(self._number), reward, self._num_left == 0, False, {}


def test_lanes_that_gymnasiums_wrapper_resets_get_chunks_of_their_episode() -> None:
    env: Any = gymnasium.wrappers.Autoreset(CountEnv())
    rewards = []
    with (
        ModelServer(Counting()) as server,
        RemoteModel(server.address) as model,
        model.actions(env, prefetch=0) as player,
    ):
        observation, _ = env.reset(seed=1)
        done = False
        for _ in range(20):
            is_reset = done
            observation, reward, done, _, _ = env.step(player.act(observation, done=done))
            rewards.append(reward == (0.0 if is_reset else 1.0))

    assert all(rewards)


def test_a_vector_gets_a_batch_and_its_lanes_end_when_they_like() -> None:
    envs: gymnasium.vector.VectorEnv[Any, Any, Any] = gymnasium.vector.SyncVectorEnv([CountEnv] * 3)
    with (
        ModelServer(Counting()) as server,
        RemoteModel(server.address) as model,
        model.actions(envs, execution_horizon=5, blend="mean") as player,
    ):
        observations, _ = envs.reset(seed=2)
        done = before = np.zeros(3, np.bool_)
        total, num_acted = 0.0, 0
        for _ in range(60):
            actions = player.act(observations, done=done)
            observations, rewards, terminated, truncated, _ = envs.step(actions)
            before, done = done, terminated | truncated
            total += rewards[~before].sum()  # an ended lane ignores its action
            num_acted += int((~before).sum())
    envs.close()

    assert total == num_acted
    assert player.statistics.num_actions == num_acted


def test_closing_the_player_closes_its_route_and_not_the_session() -> None:
    env = CountEnv()
    observation, _ = env.reset(seed=1)
    with ModelServer(Counting()) as server, RemoteModel(server.address) as model:
        player = model.actions(env, prefetch=HORIZON)
        for _ in range(3):
            player.act(observation)
        player.close()

        with pytest.raises(LocalProtocolError, match="not configured"):
            model.predict_chunk(observation[None])
        assert model.actions(env).act(observation) == 1000


def test_an_interrupted_loop_does_not_wait_for_the_policy() -> None:
    asked, released = threading.Event(), threading.Event()
    answered: list[int] = []

    def slow(observations: Any) -> Any:
        if answered:
            asked.set()
            released.wait(DEADLINE_S)
        answered.append(len(observations))
        return np.zeros((len(observations), HORIZON), np.float32)

    env = CountEnv()
    observation, _ = env.reset(seed=1)
    with ModelServer(slow, horizon=HORIZON) as server, RemoteModel(server.address) as model:
        with (
            contextlib.suppress(KeyboardInterrupt),
            model.actions(env, prefetch=HORIZON) as player,
        ):
            player.act(observation)
            player.act(observation)
            assert asked.wait(DEADLINE_S)
            raise KeyboardInterrupt
        num_answered = len(answered)
        with pytest.raises(LocalProtocolError, match="the player is closed"):
            player.act(observation)
        released.set()

    assert num_answered == 1


def test_a_policy_of_one_action_is_asked_for_each_step() -> None:
    env = CountEnv()
    observation, _ = env.reset(seed=1)
    asked = []

    def same(observations: Any) -> Any:
        asked.append(len(observations))
        return observations

    with ModelServer(same) as server, RemoteModel(server.address) as model:
        with model.actions(env) as player:
            actions = [player.act(observation + step) for step in range(4)]
        with pytest.raises(ConfigurationError, match="2 actions at once are more than"):
            model.actions(env, execution_horizon=2)

    assert actions == [1000, 1001, 1002, 1003]
    assert asked == [1] * 4


@pytest.mark.parametrize("width", [1, 3])
def test_an_evaluation_replays_as_many_actions_as_its_execution_horizon(width: int) -> None:
    policy = Counting()
    lengths = {seed: 1 + 7 * seed % 20 for seed in range(4, 10)}
    num_rows = []
    with EnvServer(CountEnv, num_envs=width) as env, ModelServer(policy) as model:
        for horizon in (1, 3, HORIZON):
            policy.num_rows = 0
            result = evaluate(
                env.address, model.address, episodes=6, seed=4, execution_horizon=horizon
            )
            num_rows.append(policy.num_rows)

            for episode in result.episodes:
                assert episode.episode_return == episode.length == lengths[episode.seed or 0]

        with pytest.raises(ConfigurationError, match=r"9 actions .* which is 8"):
            evaluate(env.address, model.address, episodes=1, execution_horizon=9)

    if width == 1:  # without lanes that have no episode
        assert num_rows == [
            sum(-(-length // each) for length in lengths.values()) for each in (1, 3, HORIZON)
        ]


def test_a_function_has_no_chunks_to_replay() -> None:
    with pytest.raises(ConfigurationError, match="are for served policies, and a function"):
        evaluate("absent:1", lambda x: x, episodes=1, execution_horizon=2)
    with pytest.raises(ConfigurationError, match="are for served policies, and a function"):
        evaluate("absent:1", Counting(), episodes=1)


def test_the_command_replays_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    policy = Counting()
    with EnvServer(CountEnv) as env, ModelServer(policy) as model:
        names = ["evaluate", "--env", env.address, "--model", model.address]
        code = main([*names, "--episodes", "1", "--seed", "7", "--execution-horizon", "4"])

        assert code == 0
        assert policy.num_rows == 3  # of 10 steps
        assert main([*names, "--episodes", "1", "--execution-horizon", "9"]) == 2
    assert "9 actions at once are more than" in capsys.readouterr().err
    assert main([*names, "--execution-horizon", "0"]) == 2
