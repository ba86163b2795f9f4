"""evaluate(): environments and policies behind real endpoints."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlmesh_ray import EnvServer, ModelServer, RemoteModel, RemoteVectorEnv, evaluate
from rlmesh_ray.errors import ConfigurationError, RemoteModelError
from rlmesh_ray.evaluation.result import EpisodeResult


def lean(observations: NDArray[Any]) -> NDArray[np.int64]:
    """Push CartPole's cart under the pole, too late to keep it up for long."""
    return (observations[:, 2] > 0).astype(np.int64)


@pytest.fixture(scope="module")
def pole() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1") as server:
        yield server


@pytest.fixture(scope="module")
def poles() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1", num_envs=4) as server:
        yield server


def test_the_result_does_not_depend_on_the_width_or_the_side_of_the_policy(
    pole: EnvServer, poles: EnvServer
) -> None:
    results = []
    with ModelServer(lean) as model:
        for env in (pole, poles):
            results.append(evaluate(env.address, model.address, episodes=6, seed=3).episodes)
            results.append(evaluate(env.address, lean, episodes=6, seed=3).episodes)

    assert all(result == results[0] for result in results)
    assert [episode.seed for episode in results[0]] == [3, 4, 5, 6, 7, 8]
    assert len({episode.length for episode in results[0]}) > 1


def test_an_episode_is_what_it_is_in_process(pole: EnvServer) -> None:
    import gymnasium

    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=11)
    total, length, ended = 0.0, 0, False
    while not ended:
        observation, reward, terminated, truncated, _ = env.step(int(lean(observation[None])[0]))
        total, length, ended = total + float(reward), length + 1, terminated or truncated

    result = evaluate(pole.address, lean, episodes=1, seed=11)

    assert result.episodes == (EpisodeResult(0, 11, total, length, terminated),)
    assert result.return_mean == total
    assert math.isnan(result.return_stderr)


def test_an_open_environment_is_left_open(poles: EnvServer) -> None:
    env = RemoteVectorEnv(poles.address)
    seen: list[EpisodeResult] = []

    result = evaluate(env, lean, episodes=3, seed=0, on_episode=seen.append)

    assert sorted(seen, key=lambda episode: episode.index) == list(result.episodes)
    env.reset()
    env.close()


def test_an_open_environment_that_is_named_twice_is_refused(poles: EnvServer) -> None:
    env = RemoteVectorEnv(poles.address)

    with pytest.raises(ConfigurationError, match="named twice"):
        evaluate([env, poles.address, env], lean, episodes=3)

    env.close()


class Routes(RemoteModel):
    """Keeps the names of its routes."""

    names: list[str]

    def configure_route(self, env: Any, *, route_id: str = "default", **options: Any) -> str:
        self.names = [*getattr(self, "names", []), route_id]
        return super().configure_route(env, route_id=route_id, **options)


def test_evaluations_that_share_an_open_model_share_no_route(pole: EnvServer) -> None:
    with (
        ModelServer(lambda batch: np.zeros(len(batch), np.int64)) as server,
        Routes(server.address) as model,
    ):
        for _ in range(2):
            evaluate(pole.address, model, episodes=1, seed=1)

    assert len(set(model.names)) == 2


def test_what_cannot_be_called_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigurationError, match="on_episode=5 cannot be called"):
        evaluate("127.0.0.1:1", lean, episodes=1, on_episode=5)  # type: ignore[arg-type]


def test_at_least_one_episode_must_be_asked_for() -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        evaluate("127.0.0.1:1", lean, episodes=0)


def test_a_policy_that_fails_is_reported_as_such(pole: EnvServer) -> None:
    def broken(_observations: Any) -> Any:
        raise ValueError("no idea")

    with (
        ModelServer(broken) as model,
        pytest.raises(RemoteModelError, match="no idea"),
    ):
        evaluate(pole.address, model.address, episodes=1)
