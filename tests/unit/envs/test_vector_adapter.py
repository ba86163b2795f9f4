import logging
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlmesh_ray.envs.vector_adapter import VectorEnvAdapter, autoreset_mode
from rlmesh_ray.envs.vector_host import rows_of
from rlmesh_ray.errors import ConfigurationError, ConformanceError, RlmeshError
from rlmesh_ray.spaces import contract
from rlmesh_ray.spaces.batch import unflatten
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.validation import coerce_batch
from rlmesh_ray.testing.envs import SPACES, EchoEnv
from rlmesh_ray.testing.equality import assert_identical

NUM_LANES = 3


def sync(
    mode: AutoresetMode, space: gymnasium.Space[Any] = SPACES["box"], max_length: int = 8
) -> SyncVectorEnv:
    make: Callable[[], EchoEnv] = lambda: EchoEnv(space, max_length=max_length)  # noqa: E731
    return SyncVectorEnv([make] * NUM_LANES, autoreset_mode=mode)


class CountingVector(SyncVectorEnv):
    """Remembers the arguments of its last reset."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.last_arguments = (seed, options)
        return super().reset(seed=seed, options=dict(options) if options else options)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_hosted_vector_gives_what_the_vector_gives(
    space: gymnasium.Space[Any], mode: AutoresetMode
) -> None:
    hosted, bare = VectorEnvAdapter(sync(mode, space)), sync(mode, space)
    spec = from_gymnasium(space)
    bare.action_space.seed(1)

    infos = hosted.reset_lanes(range(NUM_LANES), [4, 5, 6], None)
    hosted.flush()
    assert_identical((unflatten(spec, hosted.observations), infos), bare.reset(seed=4))
    for _ in range(20):
        actions = bare.action_space.sample()
        infos = hosted.step_columns(coerce_batch(spec, actions, NUM_LANES))
        hosted.flush()
        results = hosted.results
        assert_identical(
            (
                unflatten(spec, hosted.observations),
                results.rewards,
                results.terminated,
                results.truncated,
                infos,
            ),
            bare.step(actions),
        )


def test_a_partial_reset_uses_the_reset_mask() -> None:
    hosted, bare = VectorEnvAdapter(sync(AutoresetMode.DISABLED)), sync(AutoresetMode.DISABLED)
    mask = np.array([True, False, True])
    hosted.reset_lanes(range(NUM_LANES), [1, 2, 3], None)
    hosted.flush()
    bare.reset(seed=1)

    infos = hosted.reset_lanes([2, 0], [20, 10], {"level": 1})
    hosted.flush()

    expected: Any = bare.reset(
        seed=[10, None, 20],
        options={"level": 1, "reset_mask": mask},
    )
    assert_identical((hosted.observations[0], infos), expected)


@pytest.mark.parametrize(
    ("seeds", "argument"),
    [
        ([7, 8, 9], [7, 8, 9]),
        ([7, 7, 7], [7, 7, 7]),
        ([], None),
        ([None, None, None], None),
        ([1, None, 3], [1, None, 3]),
    ],
)
def test_a_vector_gets_the_list_of_seeds_that_the_client_sent(
    seeds: list[int | None], argument: Any
) -> None:
    vector = CountingVector([lambda: EchoEnv(SPACES["box"])] * NUM_LANES)
    hosted = VectorEnvAdapter(vector)

    hosted.reset_lanes(range(NUM_LANES), seeds, None)

    assert vector.last_arguments == (argument, None)


def test_a_vector_that_takes_one_seed_only_gets_the_first_of_consecutive_ones() -> None:
    hosted = VectorEnvAdapter(gymnasium.make_vec("CartPole-v1", 2, "vector_entry_point"))
    bare = gymnasium.make_vec("CartPole-v1", 2, "vector_entry_point")

    for first in (3, 5):
        hosted.reset_lanes(range(2), [first, first + 1], None)
        hosted.flush()

        assert_identical(hosted.observations[0], bare.reset(seed=first)[0])


def test_a_vector_that_takes_one_seed_only_refuses_others() -> None:
    hosted = VectorEnvAdapter(gymnasium.make_vec("CartPole-v1", 2, "vector_entry_point"))

    with pytest.raises(gymnasium.error.Error, match="must be a python integer"):
        hosted.reset_lanes(range(2), [5, 9], None)


class FailingVector(CountingVector):
    """Counts its resets, which fail after ``num_good`` of them."""

    num_good = 0
    num_resets = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.num_resets += 1
        if self.num_resets > self.num_good:
            raise ValueError("the simulator has no licence")
        return super().reset(seed=seed, options=options)


def test_a_reset_that_fails_with_a_list_of_seeds_is_not_repeated() -> None:
    vector = FailingVector([lambda: EchoEnv(SPACES["box"])] * NUM_LANES)
    hosted = VectorEnvAdapter(vector)

    with pytest.raises(ValueError, match="no licence"):
        hosted.reset_lanes(range(NUM_LANES), [7, 8, 9], None)

    assert vector.num_resets == 1


def test_a_vector_that_ignores_the_reset_mask_is_found_out() -> None:
    class Heedless(SyncVectorEnv):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return super().reset(seed=seed)

    hosted = VectorEnvAdapter(Heedless([lambda: EchoEnv(SPACES["box"])] * NUM_LANES))
    hosted.reset_lanes(range(NUM_LANES), [], None)
    hosted.flush()
    hosted.reset_lanes([1], [], None)

    with pytest.raises(RlmeshError, match="seems to ignore options"):
        hosted.flush()


class Pool(SyncVectorEnv):
    """Is what EnvPool's vectors are: seeded when made, and of other results for some lanes."""

    def __init__(self, space: gymnasium.Space[Any] = SPACES["box"]) -> None:
        super().__init__([lambda: EchoEnv(space)] * NUM_LANES)

    def reset(self, env_id: Any = None, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            warnings.warn("pass seed to envpool.make", stacklevel=2)
        lanes = np.flatnonzero(options["reset_mask"]) if options else np.arange(NUM_LANES)
        reset: Any = super().reset
        observation, _ = reset(seed=5, options=options)
        spec = from_gymnasium(self.single_observation_space)
        columns = coerce_batch(spec, observation, NUM_LANES)
        return unflatten(spec, rows_of(columns, lanes.tolist())), {"env_id": lanes}

    def render(self, env_ids: Any = None) -> Any:
        return np.stack([np.full((2, 2, 3), lane, np.uint8) for lane in env_ids or [0]])


@pytest.mark.parametrize("name", ["box", "nested", "text"])
def test_a_partial_reset_that_returns_rows_of_its_lanes_only_keeps_the_others(name: str) -> None:
    space = SPACES[name]
    hosted, bare = VectorEnvAdapter(Pool(space)), sync(AutoresetMode.NEXT_STEP, space)
    spec = from_gymnasium(space)
    bare.action_space.seed(1)
    actions = bare.action_space.sample()
    hosted.reset_lanes(range(NUM_LANES), [], None)
    bare.reset(seed=5)
    hosted.step_columns(coerce_batch(spec, actions, NUM_LANES))
    hosted.flush()
    bare.step(actions)

    infos = hosted.reset_lanes([2, 0], [], None)
    hosted.flush()

    expected: Any = bare.reset(seed=5, options={"reset_mask": np.array([True, False, True])})
    assert_identical(unflatten(spec, hosted.observations), expected[0])
    assert infos["env_id"].tolist() == [0, 2]


def test_a_vector_that_warns_of_ignored_seeds_does_so_once() -> None:
    hosted = VectorEnvAdapter(Pool())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for seeds in ([1, 2, 3], [4, 5, 6], [7, 7, 7]):
            hosted.reset_lanes(range(NUM_LANES), seeds, None)

    assert [str(warning.message) for warning in caught] == ["pass seed to envpool.make"]


def test_a_vector_that_draws_the_lanes_it_is_asked_for_is_asked_for_them() -> None:
    frames = VectorEnvAdapter(Pool()).render_lanes([2, 1])

    assert frames[:, 0, 0, 0].tolist() == [2, 1]


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_last_infos_of_ended_lanes_are_found(mode: AutoresetMode) -> None:
    hosted = VectorEnvAdapter(sync(mode, SPACES["discrete"], max_length=1))
    hosted.reset_lanes(range(NUM_LANES), [], None)

    hosted.step_columns([np.array([0, 1, 2])])

    assert sorted(hosted.final_infos) == [0, 1, 2]
    assert [hosted.final_infos[lane]["step"] for lane in range(NUM_LANES)] == [1, 1, 1]
    assert hosted.final_infos[1]["nested"]["name"] == "step 1"


def test_a_reset_forgets_the_last_infos() -> None:
    hosted = VectorEnvAdapter(sync(AutoresetMode.NEXT_STEP, max_length=1))
    hosted.reset_lanes(range(NUM_LANES), [], None)
    hosted.step_columns([np.zeros((NUM_LANES, 2, 3), np.float32)])

    hosted.reset_lanes(range(NUM_LANES), [], None)

    assert hosted.final_infos == {}


def test_observations_of_another_shape_are_refused() -> None:
    class Wrong(SyncVectorEnv):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.zeros((2, 2)), {}

    hosted = VectorEnvAdapter(Wrong([lambda: EchoEnv(SPACES["box"])] * NUM_LANES))
    hosted.reset_lanes(range(NUM_LANES), [], None)

    with pytest.raises(ConformanceError, match="shape"):
        hosted.flush()


def test_rewards_of_another_shape_are_refused() -> None:
    class Wrong(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            outcome: Any = super().step(actions)
            return (outcome[0], 1.0, *outcome[2:])

    hosted = VectorEnvAdapter(Wrong([lambda: EchoEnv(SPACES["discrete"])] * NUM_LANES))
    hosted.reset_lanes(range(NUM_LANES), [], None)

    with pytest.raises(ConfigurationError, match=r"rewards of shape \(\)"):
        hosted.step_columns([np.zeros(NUM_LANES, np.int64)])


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("as_text", [True, False])
def test_a_declared_autoreset_mode_is_kept(mode: AutoresetMode, as_text: bool) -> None:
    vector = sync(mode)
    vector.metadata = {"autoreset_mode": mode.value if as_text else mode}

    assert autoreset_mode(vector) is contract.AutoresetMode[mode.name]


def test_an_undeclared_autoreset_mode_is_next_step_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    vector = sync(AutoresetMode.NEXT_STEP)
    vector.metadata = {}

    with caplog.at_level(logging.WARNING):
        mode = autoreset_mode(vector)

    assert mode is contract.AutoresetMode.NEXT_STEP
    assert "does not declare" in caplog.text


def test_an_unknown_autoreset_mode_is_refused() -> None:
    vector = sync(AutoresetMode.NEXT_STEP)
    vector.metadata = {"autoreset_mode": "Sometimes"}

    with pytest.raises(ConfigurationError, match="Sometimes"):
        autoreset_mode(vector)


def test_closing_closes_the_vector() -> None:
    vector = sync(AutoresetMode.NEXT_STEP)

    VectorEnvAdapter(vector).close()

    assert vector.closed
