"""Remote environments are gymnasium's: its checker and its wrappers take them for their own."""

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers.vector import (
    DictInfoToList,
    NormalizeObservation,
    RecordEpisodeStatistics,
)

from rlmesh_ray import EnvServer, RemoteEnv, RemoteModel, RemoteVectorEnv
from rlmesh_ray.errors import (
    ConfigurationError,
    EndpointClosedError,
    LocalProtocolError,
    RlmeshError,
)
from rlmesh_ray.testing.equality import assert_identical

NUM_LANES = 3
NUM_STEPS = 60


def cartpoles() -> SyncVectorEnv:
    return SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * NUM_LANES)


@pytest.fixture
def remote() -> Iterator[RemoteVectorEnv]:
    with EnvServer("CartPole-v1", num_envs=NUM_LANES) as server:
        env = RemoteVectorEnv(server.address)
        yield env
        env.close()


# The checker's advice on how to choose bounds is for the environments' authors.
@pytest.mark.filterwarnings("ignore:.*(For Box action spaces|infinity):UserWarning")
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "Taxi-v3", "Blackjack-v1"])
def test_gymnasiums_checker_finds_nothing_wrong(env_id: str) -> None:
    with EnvServer(env_id) as server:
        env = RemoteEnv(server.address)

        check_env(env, skip_render_check=True)

        env.close()


@pytest.mark.parametrize("wrapper", [RecordEpisodeStatistics, NormalizeObservation, DictInfoToList])
def test_vector_wrappers_give_what_they_give_round_a_local_vector(
    remote: RemoteVectorEnv, wrapper: type[gymnasium.vector.VectorWrapper]
) -> None:
    ours: Any = wrapper(remote)
    theirs: Any = wrapper(cartpoles())
    theirs.action_space.seed(0)
    assert_identical(ours.reset(seed=5), theirs.reset(seed=5))

    for _ in range(NUM_STEPS):
        actions = theirs.action_space.sample()
        mine, local = ours.step(actions), theirs.step(actions)
        for infos in (mine[4], local[4]):
            if isinstance(infos, dict):  # the wrapper's clock
                infos.get("episode", {}).pop("t", None)
        assert_identical(mine, local)
    theirs.close()


def test_a_pending_step_is_waited_for_before_anything_else(remote: RemoteVectorEnv) -> None:
    remote.reset(seed=0)
    actions = np.ones(NUM_LANES, np.int64)
    remote.step_async(actions)

    for impatient in (lambda: remote.step_async(actions), remote.reset):
        with pytest.raises(LocalProtocolError, match="step_wait"):
            impatient()

    local = cartpoles()
    local.reset(seed=0)
    assert_identical(remote.step_wait()[0], local.step(actions)[0])
    assert_identical(remote.step(actions)[0], local.step(actions)[0])


def test_a_closed_session_says_so_although_a_step_is_pending(remote: RemoteVectorEnv) -> None:
    remote.reset()
    remote.step_async(np.ones(NUM_LANES, np.int64))
    remote.close()

    with pytest.raises(EndpointClosedError):
        remote.reset()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"seed": "a"}, "seed='a' must be a whole number"),
        ({"seed": [1, None, 2]}, "seed=None must be a whole number"),
        ({"seed": [1, 1.7, 2]}, "seed=1.7 must be a whole number"),
        ({"options": 5}, "options=5 must be a mapping"),
        ({"options": ["gravity"]}, "options=.* must be a mapping"),
    ],
)
def test_what_no_reset_takes_is_named(
    remote: RemoteVectorEnv, arguments: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        remote.reset(**arguments)


@pytest.mark.parametrize("kind", [RemoteEnv, RemoteVectorEnv, RemoteModel])
@pytest.mark.parametrize(
    ("address", "options", "message"),
    [
        (None, {}, "None is not an address"),
        (b"127.0.0.1:1", {}, "b'127.0.0.1:1' is not an address"),
        ("127.0.0.1:1", {"connect_timeout_s": -1}, "connect_timeout_s=-1 must be"),
        ("127.0.0.1:1", {"connect_timeout_s": "1"}, "connect_timeout_s='1' must be"),
        ("127.0.0.1:1", {"edition_text": 5}, "edition_text=5 must be text"),
    ],
)
def test_what_nobody_can_dial_is_named(
    kind: Any, address: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RlmeshError, match=message):
        kind(address, **options)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (RemoteEnv, "step_timeout_s"),
        (RemoteVectorEnv, "step_timeout_s"),
        (RemoteModel, "predict_timeout_s"),
    ],
)
@pytest.mark.parametrize("timeout_s", [0, float("nan"), "a", None])
def test_a_time_to_wait_that_is_none_is_named(kind: Any, name: str, timeout_s: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}="):
        kind("127.0.0.1:1", **{name: timeout_s})


def test_returned_arrays_belong_to_the_caller(remote: RemoteVectorEnv) -> None:
    first, _ = remote.reset(seed=0)
    kept = first.copy()

    second, *_ = remote.step(np.zeros(NUM_LANES, np.int64))
    second[:] = 0.0

    np.testing.assert_array_equal(first, kept)
