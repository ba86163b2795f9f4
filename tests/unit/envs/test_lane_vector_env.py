import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate

from rlmesh_ray.envs.lane_vector_env import LaneVectorEnv
from rlmesh_ray.errors import ConfigurationError, ConformanceError
from rlmesh_ray.spaces.batch import stack
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.validation import coerce_batch
from rlmesh_ray.spaces.vector_infos import lane_info
from rlmesh_ray.testing.envs import SPACES, EchoEnv, Fault, FaultyEnv
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.transport.step_buffers import StepArrays

NUM_LANES = 3


def pair(
    make: Callable[[], gymnasium.Env[Any, Any]], reset_threads: int = 1
) -> tuple[LaneVectorEnv, SyncVectorEnv]:
    lanes = [make() for _ in range(NUM_LANES)]
    env_under_test = LaneVectorEnv(lanes, reset_threads=reset_threads)
    return env_under_test, SyncVectorEnv([make] * NUM_LANES)


@pytest.mark.parametrize("reset_threads", [1, NUM_LANES])
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_lanes_equal_a_sync_vector_env(space: gymnasium.Space[Any], reset_threads: int) -> None:
    env_under_test, expected_env = pair(lambda: EchoEnv(space), reset_threads)
    expected_env.action_space.seed(1)

    assert_identical(env_under_test.reset(seed=7), expected_env.reset(seed=7))
    for _ in range(30):
        actions = expected_env.action_space.sample()
        assert_identical(env_under_test.step(actions), expected_env.step(actions))


def test_lanes_of_a_registered_environment_equal_a_sync_vector_env() -> None:
    env_under_test, expected_env = pair(lambda: gymnasium.make("CartPole-v1"))

    assert_identical(env_under_test.reset(seed=[5, 9, 1]), expected_env.reset(seed=[5, 9, 1]))
    for step in range(60):
        actions = np.array([step % 2, 0, 1])
        assert_identical(env_under_test.step(actions), expected_env.step(actions))


def test_a_masked_reset_equals_that_of_a_sync_vector_env() -> None:
    env_under_test, expected_env = pair(lambda: EchoEnv(SPACES["dict"]))
    mask = np.array([True, False, True])
    expected_env.action_space.seed(1)
    for env in (env_under_test, expected_env):
        env.reset(seed=0, options={"level": 1})

    for round_ in range(10):
        seed = [round_, None, None]
        options = {"level": round_}
        assert_identical(
            env_under_test.reset(seed=seed, options={**options, "reset_mask": mask}),
            expected_env.reset(seed=seed, options={**options, "reset_mask": mask}),
        )
        actions = expected_env.action_space.sample()
        assert_identical(env_under_test.step(actions), expected_env.step(actions))


def test_the_options_of_a_reset_are_left_alone() -> None:
    env_under_test, _ = pair(lambda: EchoEnv(SPACES["box"]))
    options = {"reset_mask": np.ones(NUM_LANES, bool)}

    env_under_test.reset(options=options)

    assert list(options) == ["reset_mask"]


def test_one_lane_equals_the_bare_environment_beyond_its_end() -> None:
    space = SPACES["box"]
    env_under_test, expected_env = LaneVectorEnv([EchoEnv(space)]), EchoEnv(space)
    space.seed(1)

    observation, _ = env_under_test.reset(seed=3)
    assert_identical(observation[0], expected_env.reset(seed=3)[0])
    for _ in range(20):
        action = space.sample()
        observation, rewards, terminated, truncated, _ = env_under_test.step(action[np.newaxis])
        expected = expected_env.step(action)
        assert_identical(observation[0], expected[0])
        assert (rewards[0], terminated[0], truncated[0]) == expected[1:4]


@pytest.mark.parametrize(
    ("width", "mode"), [(1, AutoresetMode.DISABLED), (2, AutoresetMode.NEXT_STEP)]
)
def test_the_autoreset_mode_follows_the_width(width: int, mode: AutoresetMode) -> None:
    env = EchoEnv(SPACES["box"])
    metadata = dict(env.metadata)

    lanes = LaneVectorEnv([env, *(EchoEnv(SPACES["box"]) for _ in range(width - 1))])

    assert lanes.metadata == {**metadata, "autoreset_mode": mode}
    assert env.metadata == metadata


def test_several_lanes_can_be_left_to_be_reset_one_by_one() -> None:
    lanes = LaneVectorEnv([EchoEnv(SPACES["box"]) for _ in range(2)], autoresets=False)

    assert lanes.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    assert lanes.steps_subsets


@pytest.mark.parametrize(("width", "steps_subsets"), [(1, True), (2, False)])
def test_only_lanes_that_do_not_reset_themselves_can_be_stepped_alone(
    width: int, steps_subsets: bool
) -> None:
    lanes = LaneVectorEnv([EchoEnv(SPACES["discrete"]) for _ in range(width)])

    assert lanes.steps_subsets == steps_subsets


def test_lanes_that_do_not_reset_themselves_equal_a_sync_vector_env_of_that_mode() -> None:
    make = partial(EchoEnv, SPACES["dict"], max_length=30)
    env_under_test = LaneVectorEnv([make() for _ in range(NUM_LANES)], autoresets=False)
    expected_env = SyncVectorEnv([make] * NUM_LANES, autoreset_mode=AutoresetMode.DISABLED)
    expected_env.action_space.seed(1)

    assert_identical(env_under_test.reset(seed=7), expected_env.reset(seed=7))
    for _ in range(60):
        actions = expected_env.action_space.sample()
        results: Any = expected_env.step(actions)
        assert_identical(env_under_test.step(actions), results)
        over = results[2] | results[3]
        if over.any():
            options = {"reset_mask": over}
            assert_identical(
                env_under_test.reset(options=options), expected_env.reset(options=options)
            )


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_lanes_stepped_alone_equal_bare_environments(space: gymnasium.Space[Any]) -> None:
    env_under_test = LaneVectorEnv([EchoEnv(space) for _ in range(NUM_LANES)], autoresets=False)
    bare = [EchoEnv(space) for _ in range(NUM_LANES)]
    spec = from_gymnasium(space)
    expected: list[Any] = [env.reset(seed=lane)[0] for lane, env in enumerate(bare)]
    env_under_test.reset_lanes((2, 0, 1), (2, 0, 1), None)
    env_under_test.flush()
    space.seed(3)

    for lanes in [(1,), (2, 0), (0,), (1, 2), (1,), (0, 2, 1), (1,)] * 4:
        before = [value.copy() for value in vars_of(env_under_test.results)]
        actions = [space.sample() for _ in lanes]
        infos = env_under_test.step_columns(stack(spec, actions), lanes)
        env_under_test.flush()

        others = [lane for lane in range(NUM_LANES) if lane not in lanes]
        for old, new in zip(before, vars_of(env_under_test.results), strict=True):
            assert_identical(new[others], old[others])
        ended = {}
        for lane, action in zip(lanes, actions, strict=True):
            expected[lane], reward, terminated, truncated, info = bare[lane].step(action)
            flags = (
                env_under_test.results.terminated[lane],
                env_under_test.results.truncated[lane],
            )
            assert (env_under_test.results.rewards[lane], *flags) == (reward, terminated, truncated)
            assert_identical(lane_info(infos, lane), info)
            if terminated or truncated:
                ended[lane] = info
        assert_identical(env_under_test.final_infos, ended)
        assert all(lane_info(infos, lane) == {} for lane in others)
        assert_identical(env_under_test.observations, stack(spec, expected))


def vars_of(results: StepArrays) -> list[Any]:
    return [results.rewards, results.terminated, results.truncated]


def test_the_last_info_of_an_ended_episode_is_kept_for_one_step() -> None:
    env_under_test, _ = pair(lambda: EchoEnv(SPACES["discrete"], max_length=1))
    env_under_test.reset(seed=0)

    env_under_test.step(np.zeros(NUM_LANES, np.int64))
    at_the_end = env_under_test.final_infos
    env_under_test.step(np.zeros(NUM_LANES, np.int64))

    assert {lane: info["step"] for lane, info in at_the_end.items()} == {0: 1, 1: 1, 2: 1}
    assert env_under_test.final_infos == {}


def test_observations_of_another_dtype_are_coerced() -> None:
    class Careless(EchoEnv):
        def _observation(self, digest: int) -> Any:
            return [0.1, 0.2]

    env_under_test = LaneVectorEnv([Careless(gymnasium.spaces.Box(0, 1, (2,), np.float32))])

    observation, _ = env_under_test.reset()

    assert_identical(observation, np.array([[0.1, 0.2]], np.float32))


def test_an_observation_of_another_shape_is_refused() -> None:
    env_under_test = LaneVectorEnv([FaultyEnv(Fault.WRONG_SHAPE, at_step=0)])

    with pytest.raises(ConformanceError, match=r"shape \(2,\)"):
        env_under_test.reset()


class ResultEnv(EchoEnv):
    """Gives this reward and these flags at every step, and one dict to all of its kind."""

    shared: ClassVar[dict[str, Any]] = {}

    def __init__(self, reward: Any, *, has_ended: Any = False) -> None:
        super().__init__(SPACES["box"])
        self._result = (reward, has_ended, has_ended)

    def step(self, action: Any) -> Any:
        ResultEnv.shared["count"] = ResultEnv.shared.get("count", 0) + 1
        return (super().step(action)[0], *self._result, ResultEnv.shared)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [(1, 1.0), (np.float32(0.5), 0.5), (np.array(2), 2.0), (True, 1.0), ("3", 3.0)],
)
def test_rewards_are_what_numpy_takes_for_a_number(reward: Any, expected: float) -> None:
    lanes = LaneVectorEnv([ResultEnv(reward), ResultEnv(0.0)])
    lanes.action_space.seed(1)
    lanes.reset(seed=0)

    rewards = lanes.step(lanes.action_space.sample())[1]

    assert_identical(rewards, np.array([expected, 0.0]))


@pytest.mark.parametrize("reward", ["much", np.zeros(2), [1.0, 2.0]])
def test_a_reward_that_is_no_number_is_an_error(reward: Any) -> None:
    lanes = LaneVectorEnv([ResultEnv(1.0), ResultEnv(reward)])
    lanes.action_space.seed(1)
    lanes.reset(seed=0)

    with pytest.raises(ValueError, match=r"much|array element with a sequence"):
        lanes.step(lanes.action_space.sample())


def test_flags_hold_for_one_step() -> None:
    lanes = LaneVectorEnv([ResultEnv(1.0, has_ended=np.True_), ResultEnv(1.0, has_ended=0)])
    lanes.action_space.seed(1)
    lanes.reset(seed=0)

    flags = [lanes.step(lanes.action_space.sample())[2:4] for _ in range(3)]

    for terminated, truncated in flags:
        assert_identical(terminated, truncated)
    assert [terminated.tolist() for terminated, _ in flags] == [
        [True, False],
        [False, False],
        [True, False],
    ]


def test_infos_are_taken_before_the_next_lane_can_change_them() -> None:
    ResultEnv.shared.clear()
    env_under_test, expected_env = pair(lambda: ResultEnv(1.0))
    for env in (env_under_test, expected_env):
        env.reset(seed=0)
    expected_env.action_space.seed(1)
    actions = expected_env.action_space.sample()

    expected = expected_env.step(actions)[4]
    ResultEnv.shared.clear()

    assert_identical(env_under_test.step(actions)[4], expected)
    assert expected["count"].tolist() == [1, 2, 3]


def test_lanes_with_different_spaces_are_refused() -> None:
    envs = [EchoEnv(SPACES["box"]), EchoEnv(SPACES["image"])]

    with pytest.raises(ConfigurationError, match="lane 1 has observation_space"):
        LaneVectorEnv(envs)


def test_one_environment_in_two_lanes_is_refused() -> None:
    env = EchoEnv(SPACES["box"])

    with pytest.raises(ConfigurationError, match="the same environment"):
        LaneVectorEnv([env, env])


def test_closing_closes_every_lane() -> None:
    closed = []

    class Closing(EchoEnv):
        def close(self) -> None:
            closed.append(self)

    lanes = LaneVectorEnv([Closing(SPACES["box"]) for _ in range(2)])

    lanes.close()

    assert closed == list(lanes.envs)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_columns_reach_the_lanes_as_gymnasium_would_pass_them(
    space: gymnasium.Space[Any],
) -> None:
    seen: list[Any] = []

    class Recorder(EchoEnv):
        def step(self, action: Any) -> Any:
            seen.append(action)
            return super().step(action)

    lanes = LaneVectorEnv([Recorder(space) for _ in range(2)])
    lanes.action_space.seed(1)
    actions = lanes.action_space.sample()
    lanes.reset(seed=0)

    lanes.step_columns(coerce_batch(from_gymnasium(space), actions, 2))

    expected = list(iterate(lanes.action_space, actions))
    assert_identical(seen, expected)
    assert [type(action) for action in seen] == [type(action) for action in expected]


class InfoEnv(EchoEnv):
    """Gives these infos at every reset."""

    def __init__(self, infos: dict[Any, Any]) -> None:
        super().__init__(next(iter(SPACES.values())))
        self._infos = infos

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, _ = super().reset(**kwargs)
        return observation, self._infos


def itself() -> dict[str, Any]:
    own: dict[str, Any] = {"n": 1}
    own["self"] = own
    return own


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (2**70, 2**70),
        (1, 2**70),
        (2**70, 1),
        (1, "text"),
        (1.5, {"a": 1}),
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), "text"),
    ],
)
def test_infos_that_gymnasium_cannot_join_stay_what_they_are(first: Any, second: Any) -> None:
    lanes = LaneVectorEnv([InfoEnv({"x": first, "y": 1}), InfoEnv({"x": second, "y": 2})])

    infos = lanes.reset()[1]

    assert infos["x"].dtype == object
    assert_identical(infos["x"][0], first)
    assert_identical(infos["x"][1], second)
    assert_identical(infos["_x"], np.array([True, True]))
    assert_identical(infos["y"], np.array([1, 2]))


def test_what_stands_beside_infos_that_cannot_be_joined_is_not_looked_at() -> None:
    lanes = LaneVectorEnv([InfoEnv({1: 1, "x": 1}), InfoEnv({1: 2, "x": "text"})])

    infos: dict[Any, Any] = lanes.reset()[1]

    assert infos["x"].tolist() == [1, "text"]
    assert infos[1].tolist() == [1, 2]


def test_infos_that_contain_themselves_cost_no_episode() -> None:
    own = itself()
    lanes = LaneVectorEnv([InfoEnv({}), InfoEnv({"x": own})])

    infos = lanes.reset()[1]

    assert infos["x"][0] is None
    assert infos["x"][1] is own
    assert_identical(infos["_x"], np.array([False, True]))


class Together(EchoEnv):
    """An environment whose reset returns only when those of all lanes have begun."""

    begun = threading.Barrier(NUM_LANES)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.begun.wait(60.0)
        return super().reset(**kwargs)


def test_with_threads_the_lanes_reset_at_the_same_time_also_within_a_step() -> None:
    noted: list[tuple[int, int]] = []
    lanes, _ = pair(lambda: Together(SPACES["box"], max_length=1), NUM_LANES)
    lanes.note_resets = lambda *resets: noted.append(resets)
    actions = np.zeros((NUM_LANES, 2, 3), np.float32)

    lanes.reset(seed=1)
    lanes.step(actions)  # ends all episodes
    lanes.step(actions)

    lanes.close()
    assert noted == [(done, NUM_LANES) for done in range(NUM_LANES + 1)] * 2


@pytest.mark.parametrize("reset_threads", [1, NUM_LANES])
def test_the_first_lane_that_raises_in_its_reset_is_named(reset_threads: int) -> None:
    envs = [FaultyEnv(Fault.RAISE, at_step=at_step) for at_step in (9, 0, 0)]
    lanes = LaneVectorEnv(envs, reset_threads=reset_threads)

    with pytest.raises(ValueError, match="is broken"):
        lanes.reset()

    assert lanes.lane_in_progress == 1


def test_the_resets_of_a_request_are_counted_one_by_one() -> None:
    noted: list[tuple[int, int]] = []
    lanes, _ = pair(lambda: EchoEnv(SPACES["box"]))
    lanes.note_resets = lambda *resets: noted.append(resets)

    lanes.reset(options={"reset_mask": np.array([True, False, True])})

    assert noted == [(0, 2), (1, 2), (2, 2)]
