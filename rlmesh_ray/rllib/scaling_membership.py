"""Endpoints lost and joined under a runner: ``python -m rlmesh_ray.rllib.scaling_membership``.

It reads a line of JSON and says a line for each time: when which endpoint gave a step, in seconds
since the stroke. An endpoint is lost by killing its actor, which Ray restarts. One is joined under
an id that the runner knows, whose endpoint has been ended for good: which endpoints an algorithm
has is settled when it is configured.
"""

import json
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray.actors.env_service import EnvServiceActor
from rlmesh_ray.actors.fleet import EnvFleet
from rlmesh_ray.errors import EndpointLostError
from rlmesh_ray.rllib.configure import configure
from rlmesh_ray.rllib.env_runner import RLMeshEnvRunner
from rlmesh_ray.rllib.lane_group import GroupBatch
from rlmesh_ray.rllib.measured_process import only_for_the_parent
from rlmesh_ray.rllib.scaling_nodes import ACTOR_CPUS, ray_nodes
from rlmesh_ray.rllib.scaling_run import start_runners
from rlmesh_ray.rllib.slot_runner import Lanes

_PATIENCE_S = 100.0
_ACTOR_OPTIONS = {"scheduling_strategy": "SPREAD"}


@dataclass(frozen=True, slots=True)
class _Task:
    env: str
    """``module:factory``."""
    env_kwargs: Mapping[str, object]
    num_endpoints: int
    num_nodes: int | None
    ray_address: str | None
    fragment: int
    """Vector steps of each endpoint in a call of ``sample``."""
    repetitions: int
    watch_s: float
    """How long is watched before each stroke, and after the endpoint is back."""


class WatchedRunner(RLMeshEnvRunner):
    """Remembers when which endpoint gave a step."""

    _steps: list[tuple[float, int]] | None = None
    _back_s: float | None = None
    _awaited: int | None = None
    """The endpoint whose new session has not given a step yet."""
    _result: Any = None

    def _add_resets(self, lanes: Lanes, arrived: GroupBatch) -> None:
        super()._add_resets(lanes, arrived)
        self._awaited = _endpoint(lanes)

    def _add_steps(self, lanes: Lanes, arrived: GroupBatch) -> None:
        super()._add_steps(lanes, arrived)
        if self._steps is None:
            return
        now_s, endpoint = time.monotonic(), _endpoint(lanes)
        self._steps.append((now_s, endpoint))
        if self._awaited == endpoint and self._back_s is None:
            self._back_s = now_s

    def watch(
        self, stroke: Callable[[], object], fragment: int, watch_s: float
    ) -> tuple[float, list[tuple[float, int]]]:
        """Sample, strike, and sample until a new session has given steps for a while.

        Args:
            stroke: Returns at once; what it returns is kept until the next one.
            fragment: Vector steps of each endpoint in a call of ``sample``.
            watch_s: How long is sampled before the stroke, and after the first of these steps.

        Returns:
            When the new session gave its first step, and of every step when it came and which
            endpoint gave it; all in seconds since the stroke.

        Raises:
            EndpointLostError: There is no new session.
        """
        timesteps = fragment * self.num_envs
        self.sample(num_timesteps=timesteps)
        steps: list[tuple[float, int]] = []
        self._steps = steps
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + watch_s:
            self.sample(num_timesteps=timesteps)
        self._awaited = self._back_s = None
        struck_s = time.monotonic()
        self._result = stroke()
        while self._back_s is None or time.monotonic() < self._back_s + watch_s:
            if time.monotonic() > struck_s + _PATIENCE_S:
                raise EndpointLostError(f"no new session within {_PATIENCE_S:.0f} s", "")
            self.sample(num_timesteps=timesteps)
        self._steps = None
        return self._back_s - struck_s, [(at_s - struck_s, endpoint) for at_s, endpoint in steps]

    def end_joined(self) -> None:
        """End for good the endpoint that the last stroke has started."""
        ray.kill(self._result)


def main() -> None:
    """Do what standard input says."""
    task = _Task(**json.loads(sys.stdin.readline()))
    parent = only_for_the_parent()
    factory = pkgutil.resolve_name(task.env)

    def say(**fields: object) -> None:
        parent.write(json.dumps(fields) + "\n")
        parent.flush()

    load = os.getloadavg()[0]
    with (
        ray_nodes(task.num_nodes, task.ray_address),
        EnvFleet(
            factory,
            num_endpoints=task.num_endpoints,
            env_kwargs=task.env_kwargs,
            num_cpus=ACTOR_CPUS,
            actor_options=_ACTOR_OPTIONS,
        ) as fleet,
    ):
        config = configure(PPOConfig().env_runners(num_env_runners=1), fleet)
        (runner,) = start_runners(config, 1, WatchedRunner)
        ray.get(runner.ping.remote())
        say(load=load, nodes=sum(node["Alive"] for node in ray.nodes()))

        def watched(stroke: Callable[[], object]) -> dict[str, Any]:
            back_s, steps = ray.get(runner.watch.remote(stroke, task.fragment, task.watch_s))
            return {"back_s": back_s, "steps": steps}

        first, last = fleet.actors[0], fleet.actors[-1]
        for _ in range(task.repetitions):
            say(change="lose", endpoint=0, **watched(partial(ray.kill, first, no_restart=False)))
        ray.kill(last)
        start = partial(_start, factory, task, fleet.token, fleet.directory.endpoint_ids[-1])
        for _ in range(task.repetitions):
            say(change="join", endpoint=task.num_endpoints - 1, **watched(start))
            ray.get(runner.end_joined.remote())
        ray.get(runner.stop.remote())
    say(ended=True)


def _start(factory: Callable[..., Any], task: _Task, token: str, endpoint_id: str) -> Any:
    """Start one more endpoint, as a fleet does."""
    actor_class: Any = EnvServiceActor
    return actor_class.options(num_cpus=ACTOR_CPUS, **_ACTOR_OPTIONS).remote(
        factory, env_kwargs=task.env_kwargs, token=token, endpoint_id=endpoint_id
    )


def _endpoint(lanes: Lanes) -> int:
    return lanes.slot.lanes.start // len(lanes.slot.lanes)


if __name__ == "__main__":
    main()
