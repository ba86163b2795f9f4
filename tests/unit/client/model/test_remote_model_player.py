"""ActionPlayer with a policy in memory, which answers when the test lets it."""

import random
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlmesh_ray.client.model.remote_model import ActionPlayer, Slots
from rlmesh_ray.errors import (
    ConfigurationError,
    ConformanceError,
    EndpointLostError,
    LocalProtocolError,
    UnsupportedSpaceError,
)
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from tests.loopback.eventually import eventually

HORIZON = 4
NUMBER = spaces.Box(-1e6, 1e6, (), np.float64)


class CountingModel:
    """A policy whose actions are its observation, counted on: those of the steps to come.

    Args:
        action_space: Of one lane; a Dict gets the same number under each key.
    """

    def __init__(self, action_space: spaces.Space[Any] = NUMBER) -> None:
        self.asked: list[Slots] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.closed: list[str] = []
        self._action_space = action_space

    def predict_chunk(self, observation: Any, *, route_id: str, slots: Slots) -> Any:
        self.asked.append(slots)
        assert self.gate.wait(60)
        if self.failure is not None:
            raise self.failure
        assert len(observation) == len(slots.rows())
        chunk = observation[:, None] + np.arange(HORIZON)
        if isinstance(self._action_space, spaces.Dict):
            return {key: chunk.copy() for key in self._action_space}
        return chunk

    def close_route(self, route_id: str) -> None:
        self.closed.append(route_id)


def contract(
    num_envs: int = 1,
    mode: AutoresetMode = AutoresetMode.DISABLED,
    action_space: spaces.Space[Any] = NUMBER,
) -> EnvContract:
    return EnvContract(
        "Count-v0", from_gymnasium(NUMBER), from_gymnasium(action_space), num_envs, mode
    )


def player_of(model: CountingModel, env: Any, **options: Any) -> ActionPlayer:
    remote: Any = model
    return ActionPlayer(remote, env, route_id="route", **options)


@pytest.mark.parametrize("prefetch", ["auto", 0, 2, HORIZON])
@pytest.mark.parametrize("mode", AutoresetMode)
def test_lanes_whose_episodes_end_at_different_steps_get_their_own_actions(
    mode: AutoresetMode, prefetch: int | str
) -> None:
    draws = random.Random(5)
    width = 3
    player = player_of(CountingModel(), contract(width, mode), prefetch=prefetch)
    episodes, steps = [0] * width, [0] * width
    ends, is_over = [draws.randint(1, 9) for _ in range(width)], [False] * width
    observation = np.zeros(width)

    for _ in range(200):
        numbers = [
            1e5 * lane + 100 * episode + step
            for lane, (episode, step) in enumerate(zip(episodes, steps, strict=True))
        ]
        observation[:] = numbers  # as an environment that has one buffer
        actions = player.act(observation, done=is_over)

        resets_next = mode is AutoresetMode.NEXT_STEP
        is_ignored = [over and resets_next for over in is_over]
        for lane in range(width):
            if not is_ignored[lane]:
                assert actions[lane] == numbers[lane]
                steps[lane] += 1
            elif resets_next:
                episodes[lane], steps[lane], ends[lane] = episodes[lane] + 1, 0, draws.randint(1, 9)
        is_over = [steps[lane] == ends[lane] and not is_ignored[lane] for lane in range(width)]
        for lane in np.flatnonzero(is_over).tolist():
            if not resets_next:
                episodes[lane], steps[lane], ends[lane] = episodes[lane] + 1, 0, draws.randint(1, 9)
    player.close()


def test_an_environment_gets_single_actions() -> None:
    model = CountingModel()
    player = player_of(model, contract(), execution_horizon=3, prefetch=0)

    actions = [player.act(np.array(float(step)), done=step == 0) for step in range(7)]

    assert actions == [0, 1, 2, 3, 4, 5, 6]
    assert [each.steps for each in model.asked] == [[0], [3], [6]]
    assert [each.resets for each in model.asked] == [[True], [False], [False]]
    assert len({each.episode_ids[0] for each in model.asked}) == 1
    player.close()
    assert model.closed == ["route"]
    with pytest.raises(LocalProtocolError, match="the player is closed"):
        player.act(np.array(7.0))


def test_a_robot_that_moves_on_gets_the_action_of_its_present_step() -> None:
    model = CountingModel()
    player = player_of(model, contract(), prefetch=0)

    assert player.act(10.0, skipped=7) == 10.0  # no step of this episode has passed
    assert player.act(13.0, skipped=2) == 13.0
    assert player.act(30.0, skipped=5) == 30.0
    assert [each.steps for each in model.asked] == [[0], [9]]


def test_gymnasiums_vectors_get_batches_and_reset_themselves_on_the_next_step() -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=2)

    class Balance(CountingModel):
        def predict_chunk(self, observation: Any, *, route_id: str, slots: Slots) -> Any:
            self.asked.append(slots)
            return np.repeat(observation[:, 2:3] > 0, HORIZON, axis=1).astype(np.int64)

    model = Balance()
    player = player_of(model, envs, prefetch=0)
    observation, _ = envs.reset(seed=1)
    done = np.zeros(2, np.bool_)
    num_ended = 0
    for _ in range(60):
        action = player.act(observation, done=done)
        assert envs.action_space.contains(action)
        observation, _, terminated, truncated, _ = envs.step(action)
        done = terminated | truncated
        num_ended += int(done.sum())
    envs.close()

    lanes = [
        lane
        for each in model.asked
        for lane, resets in zip(each.env_indices, each.resets, strict=True)
        if resets
    ]
    assert num_ended >= 2
    assert 2 + num_ended - 2 <= len(lanes) <= 2 + num_ended
    assert player.statistics.num_actions == 120 - num_ended + int(done.sum())


def test_an_action_nests_as_its_space_does() -> None:
    space = spaces.Dict({"arm": NUMBER, "grip": NUMBER})
    for width in (1, 2):
        player = player_of(CountingModel(space), contract(width, action_space=space))

        action = player.act(np.zeros(width) if width > 1 else np.array(0.0))

        assert list(action) == ["arm", "grip"]
        assert np.shape(action["arm"]) == ((width,) if width > 1 else ())


def test_the_next_chunk_comes_while_the_present_one_is_played() -> None:
    model = CountingModel()
    player = player_of(model, contract(), prefetch=2)
    observation = np.array(0.0)
    first = player.act(observation)
    model.gate.clear()

    during = []
    for step in (1, 2, 3):
        observation[...] = step
        during.append(player.act(observation))  # asks at step 2, and waits for no answer
    observation[...] = 4

    def answer_once_the_player_waits() -> None:
        eventually(lambda: player.statistics.num_starved == 1)
        model.gate.set()

    opener = threading.Thread(target=answer_once_the_player_waits)
    opener.start()
    last = player.act(observation)
    opener.join()

    assert [first, *during, last] == [0, 1, 2, 3, 4]
    assert [each.steps for each in model.asked] == [[0], [2]]
    assert player.statistics.num_starved == 1
    assert player.statistics.num_late == 2
    player.close()


def test_one_message_in_the_background_is_for_all_lanes() -> None:
    model = CountingModel()
    player = player_of(model, contract(2), prefetch=1)
    done = np.zeros(2, np.bool_)
    for step in range(6):
        done[1] = step == 2  # lane 1 begins anew
        player.act(np.array([step, step - 2 if step >= 2 else step], np.float64), done=done)
    player.close()

    assert [list(each.env_indices) for each in model.asked[:3]] == [[0, 1], [1], [0, 1]]
    assert [each.steps for each in model.asked[:3]] == [[0, 0], [0], [3, 1]]


def test_a_failure_in_the_background_is_raised_once_and_the_player_goes_on() -> None:
    model = CountingModel()
    player = player_of(model, contract(), prefetch=1)
    for step in range(HORIZON):
        if step == HORIZON - 1:
            model.failure = EndpointLostError("cut", "here:1")
        player.act(np.array(float(step)))

    with pytest.raises(EndpointLostError, match="cut"):
        player.act(np.array(4.0))
    model.failure = None

    assert player.act(np.array(4.0)) == 4
    assert [each.steps for each in model.asked] == [[0], [3], [4]]
    player.close()


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_lane_keeps_its_action_where_an_error_comes_of_another_lane(mode: AutoresetMode) -> None:
    model = CountingModel()
    player = player_of(model, contract(2, mode), prefetch=0)
    player.act(np.array([0.0, 100.0]))
    ends = np.array([1.0, 200.0]), [False, True]
    if mode is AutoresetMode.NEXT_STEP:
        assert player.act(np.array([1.0, 101.0]), done=[False, True])[0] == 1
        ends = np.array([2.0, 200.0]), [False, False]
    model.failure = EndpointLostError("cut", "here:1")
    with pytest.raises(EndpointLostError):
        player.act(ends[0], done=ends[1])
    model.failure = None

    np.testing.assert_array_equal(player.act(ends[0], done=ends[1]), ends[0])
    np.testing.assert_array_equal(player.act(ends[0] + 1), ends[0] + 1)


def test_actions_that_have_no_mean_or_no_chunks_are_refused_at_once() -> None:
    model = CountingModel()
    space = spaces.Dict({"arm": NUMBER, "mode": spaces.Discrete(3)})

    with pytest.raises(ConfigurationError, match="'mean' is for floats, and the action 'mode' is"):
        player_of(model, contract(action_space=space), blend="mean")
    with pytest.raises(UnsupportedSpaceError, match="the action is text"):
        player_of(model, contract(action_space=spaces.Text(5)))
    with pytest.raises(ConfigurationError, match="prefetch=-2 must be 0 or more"):
        player_of(model, contract(), prefetch=-2)
    with pytest.raises(ConfigurationError, match="execution_horizon=5 is more than the 4"):
        player_of(model, contract(), execution_horizon=5).act(np.array(0.0))
    with pytest.raises(
        ConformanceError, match=r"^done: must have one entry per lane, shape \(2,\): .*\(3,\)"
    ):
        player_of(model, contract(2)).act(np.zeros(2), done=[True, False, False])


@pytest.mark.parametrize("done", ["False", np.nan, 2, None, ["a", "b"], [True, 0.5], [[1], [2, 3]]])
def test_what_is_neither_true_nor_false_ends_no_episode(done: object) -> None:
    model = CountingModel()
    player = player_of(model, contract(2), prefetch=0)
    player.act(np.zeros(2))

    with pytest.raises(ConformanceError, match=r"^done: "):
        player.act(np.ones(2), done=done)

    np.testing.assert_array_equal(player.act(np.ones(2), done=np.array([0, 0])), [1, 1])
    assert len(model.asked) == 1


def test_lanes_and_skipped_steps_that_cannot_be_are_refused() -> None:
    player = player_of(CountingModel(), contract(2))

    for lane in (2, -1):
        with pytest.raises(ConfigurationError, match=f"lane={lane} must be from 0 to 1"):
            player.begin_episode(lane, "x")
    with pytest.raises(ConfigurationError, match="skipped=-1 must be 0 or more"):
        player.act(np.zeros(2), skipped=-1)
    with pytest.raises(ConfigurationError, match=r"skipped=0\.5 must be a whole number"):
        player.act(np.zeros(2), skipped=0.5)  # type: ignore[arg-type]
