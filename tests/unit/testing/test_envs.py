from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest

from rlmesh_ray.testing.envs import SPACES, EchoEnv, Fault, FaultyEnv, action_digest
from rlmesh_ray.testing.equality import assert_identical


def trajectory(env: gymnasium.Env[Any, Any], seed: int, actions: list[Any]) -> list[Any]:
    return [env.reset(seed=seed), *(env.step(action) for action in actions)]


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_an_echo_env_repeats_itself_and_stays_in_its_space(
    space: gymnasium.Space[Any],
) -> None:
    space.seed(0)
    actions = [space.sample() for _ in range(5)]

    first = trajectory(EchoEnv(space), 3, actions)
    second = trajectory(cloudpickle.loads(cloudpickle.dumps(EchoEnv(space))), 3, actions)

    assert_identical(first, second)
    assert all(space.contains(step[0]) for step in first)


@pytest.mark.parametrize("change", ["seed", "action"])
def test_an_echo_env_depends_on(change: str) -> None:
    space = SPACES["box"]
    space.seed(1)
    action = space.sample()
    other = action + np.float32(1e-3) if change == "action" else action

    first = trajectory(EchoEnv(space), 3, [action])
    second = trajectory(EchoEnv(space), 4 if change == "seed" else 3, [other])

    with pytest.raises(AssertionError):
        assert_identical(second[1][0], first[1][0])


def test_an_echo_env_ends_its_episodes_in_both_ways() -> None:
    env = EchoEnv(SPACES["discrete"], max_length=1)
    endings = []

    for _ in range(2):
        env.reset(seed=0)
        endings.append(env.step(0)[2:4])

    assert endings == [(True, False), (False, True)]


def test_an_action_digest_sees_dtype_and_structure() -> None:
    actions = [np.zeros(2), np.zeros(2, np.int64), (0, 0), {"a": 0}, "", 0]

    assert len({action_digest(action) for action in actions}) == len(actions)


def test_a_faulty_env_works_until_its_step() -> None:
    env = FaultyEnv(Fault.RAISE, at_step=2)
    env.reset()
    env.step(np.int64(0))

    with pytest.raises(ValueError, match="broken"):
        env.step(np.int64(0))
