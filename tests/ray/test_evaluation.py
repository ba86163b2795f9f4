"""evaluate_on_ray(): the same episodes, from several processes, some of which die."""

import os
import signal
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import ray
from numpy.typing import NDArray

from rlmesh_ray import EnvServer, ModelServer, RemoteVectorEnv, evaluate
from rlmesh_ray.actors import EnvFleet, ModelFleet
from rlmesh_ray.actors.evaluation import evaluate_on_ray
from rlmesh_ray.errors import (
    CapacityError,
    ConfigurationError,
    EvaluationInterruptedError,
    RemoteModelError,
)
from rlmesh_ray.evaluation.result import EndpointRole, EpisodeResult, Loss
from tests.ray.switch_policy import switch_policy

pytestmark = pytest.mark.usefixtures("local_ray")

EPISODES = 12
FEW: dict[str, Any] = {"num_cpus": 0.1, "seed": 5}


def lean(observations: NDArray[Any]) -> NDArray[np.int64]:
    return (observations[:, 2] > 0).astype(np.int64)


@pytest.mark.slow
def test_the_result_is_what_one_process_gets_even_if_endpoints_die() -> None:
    with EnvFleet("CartPole-v1", num_endpoints=2, num_envs=2, num_cpus=0.1) as fleet:
        alone = evaluate(fleet, lean, episodes=EPISODES, seed=5)
        victim = ray.get(fleet.actors[0].describe.remote())["pid"]
        seen: list[EpisodeResult] = []
        losses: list[Loss] = []

        def meddle(episode: EpisodeResult) -> None:
            seen.append(episode)
            if len(seen) == 3:
                os.kill(victim, signal.SIGKILL)

        spread = evaluate_on_ray(
            fleet, lean, episodes=EPISODES, on_episode=meddle, on_loss=losses.append, **FEW
        )

    assert spread.episodes == alone.episodes
    assert sorted(seen, key=lambda episode: episode.index) == list(alone.episodes)
    assert sum(report.episodes for report in spread.endpoints) == EPISODES
    assert {report.role for report in spread.endpoints} == {EndpointRole.ENV}
    assert spread.interruptions == len([loss for loss in losses if loss.episodes])


class Modest(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Reports success, and no failure."""

    def step(self, action: Any) -> Any:
        observation, *rest, infos = super().step(action)
        return observation, *rest, {"is_success": True} if observation[0] > 0 else infos


def modest() -> gymnasium.Env[Any, Any]:
    return Modest(gymnasium.make("CartPole-v1"))


def test_a_worker_that_dies_costs_no_finished_episode(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # A file that the first worker to get there removes, dying with it.
    def deadly(path: Path) -> Any:
        num_calls = 0
        bounds = np.zeros(100_000)  # more than Ray keeps with an actor

        def act(observations: NDArray[Any]) -> NDArray[np.int64]:
            nonlocal num_calls
            num_calls += 1
            if num_calls > 60:
                try:
                    path.unlink()
                except FileNotFoundError:
                    pass
                else:
                    os._exit(1)
            return (observations[:, 2] > bounds[: len(observations)]).astype(np.int64)

        return act

    path = tmp_path / "one life"
    path.touch()
    seen: list[EpisodeResult] = []
    with EnvServer(modest, num_envs=2) as server:
        alone = evaluate(server.address, lean, episodes=EPISODES, seed=5)
        spread = evaluate_on_ray(
            server.address,
            deadly(path),
            episodes=EPISODES,
            num_workers=2,
            on_episode=seen.append,
            **FEW,
        )

    assert not path.exists()
    assert spread.episodes == alone.episodes
    assert sorted(seen, key=lambda episode: episode.index) == list(alone.episodes)
    # Once for each evaluation, by the driver: a worker sees only some of the episodes.
    warnings = [text for text in caplog.messages if "neither success nor failure" in text]
    assert len(warnings) == 2
    assert warnings[0] == warnings[1]


@pytest.mark.slow
def test_where_no_worker_is_left_the_finished_episodes_are_kept() -> None:
    with EnvServer("CartPole-v1", num_envs=2) as server:
        seen: list[EpisodeResult] = []

        def meddle(episode: EpisodeResult) -> None:
            seen.append(episode)
            if len(seen) == 3:
                server.stop(0.0)

        with pytest.raises(EvaluationInterruptedError) as caught:
            evaluate_on_ray(
                server.address,
                lean,
                episodes=10_000,
                on_episode=meddle,
                reconnect_timeout_s=0.1,
                **FEW,
            )

    assert server.address in str(caught.value)
    assert list(caught.value.episodes) == sorted(seen, key=lambda episode: episode.index)
    assert len(seen) >= 3


def test_a_policy_that_fails_is_reported_as_such() -> None:
    with (
        EnvServer("CartPole-v1") as env,
        ModelServer(lambda observations: observations / 0) as model,
        pytest.raises(RemoteModelError),
    ):
        evaluate_on_ray(env.address, model.address, episodes=2, **FEW)


@pytest.mark.slow
def test_replicas_that_are_away_are_waited_for_and_not_replaced_by_others() -> None:
    with (
        EnvServer("CartPole-v1", num_envs=2) as env,
        ModelFleet(switch_policy(), name="evaluated", num_replicas=2, num_cpus=0.1) as models,
    ):
        drained, left = models.addresses
        alone = evaluate(env.address, models, episodes=6, seed=5)
        models.drain(1.0, replica=0)
        losses: list[Loss] = []
        spread = evaluate_on_ray(
            env.address, models, episodes=6, on_loss=losses.append, num_workers=2, **FEW
        )
        os.kill(ray.get(models.actors[1].describe.remote())["pid"], signal.SIGKILL)
        again = evaluate(env.address, models, episodes=6, seed=5)

    assert spread.episodes == again.episodes == alone.episodes
    assert {report.address for report in spread.endpoints if report.episodes} == {env.address, left}
    assert {loss.address for loss in losses} <= {""}
    (acted,) = [
        report for report in again.endpoints if report.role is EndpointRole.MODEL if report.episodes
    ]
    assert acted.address not in (drained, left)


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no endpoint for the environment"):
        evaluate_on_ray([], lean, episodes=1)
    with pytest.raises(ConfigurationError, match="no endpoint for the model"):
        evaluate_on_ray("127.0.0.1:1", [], episodes=1, num_workers=2)
    with pytest.raises(ConfigurationError, match="at least 1"):
        evaluate_on_ray("127.0.0.1:1", lean, episodes=0)
    with pytest.raises(ConfigurationError, match="num_workers=0"):
        evaluate_on_ray("127.0.0.1:1", lean, episodes=1, num_workers=0)
    with EnvServer("CartPole-v1") as server:
        env = RemoteVectorEnv(server.address)
        with pytest.raises(ConfigurationError, match="give a fleet or addresses"):
            evaluate_on_ray(env, lean, episodes=1)
        env.close()


def test_workers_that_find_no_room_say_what_they_need() -> None:
    with pytest.raises(CapacityError, match="needs 1000 CPU"):
        evaluate_on_ray("127.0.0.1:1", lean, episodes=1, num_cpus=1000, start_timeout_s=1.0)


@pytest.mark.slow
def test_an_endpoint_that_was_never_there_costs_only_its_worker() -> None:
    with EnvServer("CartPole-v1", num_envs=2) as server:
        alone = evaluate(server.address, lean, episodes=4, seed=5)
        spread = evaluate_on_ray([server.address, "127.0.0.1:1"], lean, episodes=4, **FEW)

    assert spread.episodes == alone.episodes
