"""Endpoints, trainings and recordings that are not there, for the page's figures and pictures."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from benchmarks.watching.cart_pole import DrawnCartPole
from rlmesh_ray import __version__
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.errors import EndpointUnreachableError
from rlmesh_ray.histogram import BATCH_BOUNDS_ROWS, DURATION_BOUNDS_NS, NS_PER_S, Histogram
from rlmesh_ray.recording.store import EpisodeSummary, RecordingInfo, Store
from rlmesh_ray.server.observe.endpoint_status import EndpointStatus, RunnerStatus
from rlmesh_ray.server.observe.statistics import (
    EnvStatistics,
    ModelStatistics,
    SessionStatistics,
    StatisticsPair,
)
from rlmesh_ray.spaces.gym_conversion import from_gymnasium

_BOUNDS_S = tuple(bound / NS_PER_S for bound in DURATION_BOUNDS_NS)
_MOST_STEPS = 5_000
_ROWS = tuple(map(float, BATCH_BOUNDS_ROWS))


def histogram(bounds: tuple[float, ...], value: float, count: int) -> Histogram:
    """Return a histogram of one value, which has come so often."""
    place = int(np.searchsorted(bounds, value))
    counts = tuple(count if place == index else 0 for index in range(len(bounds) + 1))
    return Histogram(bounds, counts, count * value)


def env_statistics(steps: int, uptime_s: float) -> EnvStatistics:
    """Return the statistics of an environment of four lanes, whose steps take 0.7 ms."""
    return EnvStatistics(
        version=__version__,
        uptime_s=uptime_s,
        sessions=SessionStatistics(open=1, opened=1),
        steps=steps,
        lane_steps=4 * steps,
        resets=1,
        episodes=steps // 50,
        errors={},
        deviations=0,
        transports={"shared_memory": 1},
        worker_restarts=0,
        step_s=histogram(_BOUNDS_S, 0.0007, steps),
    )


def model_statistics(batches: int, uptime_s: float) -> ModelStatistics:
    """Return the statistics of a policy whose batches of eight rows take 2 ms."""
    return ModelStatistics(
        items_waiting=0,
        rows_waiting=0,
        is_busy=False,
        batches=batches,
        items=4 * batches,
        rows=8 * batches,
        cancelled=0,
        waited_s=0.0,
        longest_wait_s=0.0,
        busy_s=0.002 * batches,
        version=__version__,
        uptime_s=uptime_s,
        sessions=SessionStatistics(open=4, opened=6),
        routes=4,
        policy_version=12,
        errors={},
        batch_rows=histogram(_ROWS, 8.0, batches),
        queue_s=histogram(_BOUNDS_S, 0.0004, 4 * batches),
        forward_s=histogram(_BOUNDS_S, 0.002, batches),
        inference="torch",
        torch_reason='inference="torch" says so',
    )


class ManyEndpoints:
    """A source of endpoints that are not there.

    Args:
        num_endpoints: How many; each tenth is a policy, the second one is stale, the third retires.
    """

    title = "many endpoints"

    def __init__(self, num_endpoints: int) -> None:
        self._num_endpoints = num_endpoints

    def endpoints(self) -> list[EndpointStatus]:
        """Return them, with statistics of two moments."""
        return [self._endpoint(number) for number in range(self._num_endpoints)]

    def runners(self) -> list[RunnerStatus]:
        """Return two runners of one training."""
        of_three = "hills/0", "hills/3", "hills/5"
        return [
            RunnerStatus("hills", "evaluation runner 1", "b", "10.0.0.5", of_three[:1], 1, 0.4),
            RunnerStatus("hills", "training runner 1", "a", "10.0.0.4", of_three[1:], 4, 1.8),
        ]

    def connect_options(self, endpoint: EndpointStatus) -> ConnectOptions:
        """Raise an error: there is nothing to connect to."""
        raise EndpointUnreachableError("nothing answers there", endpoint.address)

    @staticmethod
    def _endpoint(number: int) -> EndpointStatus:
        make = model_statistics if number % 10 == 9 else env_statistics
        return EndpointStatus(
            fleet="hills",
            endpoint_id=f"hills/{number}",
            node="",
            address=f"192.0.2.{number}:5555",
            restarts=number // 40,
            lease_left_s=-5.0 if number == 1 else 12.0,
            is_retiring=number == 2,
            num_assigned=1,
            sighting=StatisticsPair(make(90_000 + 7 * number, 60.0), make(86_000, 57.0)),
            problem="nothing answers there" if number == 1 else "",
        )


def write_progress(folder: Path, num_iterations: int) -> None:
    """Write the ``progress.csv`` of a training whose return grows; its first one has none."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["iteration,env_steps,return_mean,episodes,wall_s"]
    for number in range(1, num_iterations + 1):
        mean = "nan" if number == 1 else f"{20 + 430 * (1 - 0.97**number):.2f}"
        lines.append(f"{number},{number * 4000},{mean},{number * 30},{number * 6.5}")
    (folder / "progress.csv").write_text("\n".join(lines) + "\n")


def record(folder: Path, num_episodes: int) -> None:
    """Record real episodes of random actions, with videos, until so many are written."""
    from rlmesh_ray import EnvServer, RemoteEnv
    from rlmesh_ray.recording import RecordOptions, load

    options = RecordOptions(folder, video="render")
    with EnvServer(DrawnCartPole, env_kwargs={"scale": 0.5}, record=options) as server:
        env = RemoteEnv(server.address)
        env.reset(seed=1)
        for action in np.random.default_rng(1).integers(2, size=_MOST_STEPS):
            _, _, is_over, _, _ = env.step(int(action))
            if is_over:
                env.reset()
                if (folder / "index.jsonl").exists() and len(load(folder).episodes) >= num_episodes:
                    break
            time.sleep(0.01)  # the writer drops what it cannot keep up with
        env.close()


def balanced(observations: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return actions that push each cart below the tip of its pole."""
    return (observations[:, 2] + 0.3 * observations[:, 3] > 0).astype(np.int64)


def write_recording(folder: Path, num_episodes: int) -> None:
    """Write a recording that has an index, and no episode behind it."""
    space = from_gymnasium(spaces.Box(-1.0, 1.0, (1,), np.float32))
    Store(folder).create(RecordingInfo("CartPole-v1", space, space, 30.0))
    first = EpisodeSummary(
        id="",
        length=0,
        return_=0.0,
        seed=0,
        lane=0,
        endpoint="127.0.0.1:5555",
        policy_version=0,
        ended_at=0.0,
        terminated=True,
        truncated=False,
        video=None,
    )
    lines = [
        replace(
            first,
            id=f"{number:06}",
            length=10 + number % 490,
            return_=float(10 + number % 490),
            seed=number,
            lane=number % 8,
            policy_version=number // 100,
            ended_at=1.7e9 + number,
        ).to_json()
        for number in range(num_episodes)
    ]
    (folder / "index.jsonl").write_text("\n".join(lines) + "\n")
