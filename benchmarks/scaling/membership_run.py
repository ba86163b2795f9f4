"""Endpoints lost and joined under a runner: ``python -m benchmarks.scaling.membership_run``.

It reads a line of JSON and writes a line for each time: when which endpoint gave a step, in seconds
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

from benchmarks.measured_process import only_for_the_parent
from benchmarks.scaling.nodes import ACTOR_CPUS, ray_nodes
from benchmarks.scaling.rate_run import start_runners
from rlmesh_ray.actors.env_fleet import EnvFleet
from rlmesh_ray.errors import EndpointLostError
from rlmesh_ray.rllib.config.configure import configure
from rlmesh_ray.rllib.runner.env_runner import RLMeshEnvRunner
from rlmesh_ray.rllib.runner.slot import Slot, SlotPhase, SlotResult

_PATIENCE_S = 100.0


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
    """Remembers when which session gave a step, and at which endpoint."""

    _where: dict[int, str] | None = None
    """What the endpoint is called that gave a session's latest step."""
    _since_s: dict[str, float]
    """When each of them gave the first step that was seen, in seconds since the epoch."""
    _steps: list[tuple[float, int]] | None = None
    _renewed: set[int] | None = None
    """Sessions that were opened since the stroke."""
    _back_s: dict[int, float]
    """When they gave their first step."""

    def _process(self, slot: Slot, result: SlotResult) -> None:
        was_stepping = slot.phase is SlotPhase.STEPPING
        super()._process(slot, result)
        if result.batch is None:
            return
        if not was_stepping:
            if self._renewed is not None:
                self._renewed.update(slot.sessions)
            return
        now_s = time.monotonic()
        for session in slot.sessions:
            if self._where is not None:
                self._where[session] = endpoint = self.sampling.assignments.endpoint_of(session)
                self._since_s.setdefault(endpoint, time.time())
            if self._steps is not None:
                self._steps.append((now_s, session))
            if self._renewed is not None and session in self._renewed:
                self._back_s.setdefault(session, now_s)

    def settle(self, num_endpoints: int, fragment: int) -> float:
        """Sample until all sessions give steps, at so many endpoints in all.

        Args:
            num_endpoints: How many.
            fragment: Vector steps of each session in a call of ``sample``.

        Returns:
            When the last of them gave its first step, in seconds since the epoch, which is the same
            in another process.

        Raises:
            EndpointLostError: They do not get there.
        """
        where: dict[int, str] = {}
        self._where, self._since_s = where, {}
        self._sample_until(
            lambda: (
                len(where) == len(self.sampling.assignments.endpoints)
                and len(set(where.values())) == num_endpoints
            ),
            fragment,
        )
        self._where = None
        return max(self._since_s[endpoint] for endpoint in where.values())

    def watch(
        self, stroke: Callable[[], object], endpoint: str, fragment: int, watch_s: float
    ) -> dict[str, Any]:
        """Sample, strike, and sample until what was lost has given steps again for a while.

        Args:
            stroke: Loses an endpoint; returns at once.
            endpoint: What it is called; see ``SessionAssignments.endpoint_of``.
            fragment: Vector steps of each session in a call of ``sample``.
            watch_s: How long is sampled before the stroke, and after the first of those steps.

        Returns:
            ``lost``: the sessions that were at the endpoint; ``back_s``: when all of them had given
            a step again, wherever; ``steps``: of every step when it came, and which session gave
            it. All in seconds since the stroke.

        Raises:
            EndpointLostError: They do not come back.
        """
        self.sample(num_timesteps=fragment * self.num_envs)
        steps: list[tuple[float, int]] = []
        self._steps, self._back_s = steps, {}
        self._sample_for(watch_s, fragment)
        lost = [
            session
            for session in range(len(self.sampling.assignments.endpoints))
            if self.sampling.assignments.endpoint_of(session) == endpoint
        ]
        self._renewed = set()
        struck_s = time.monotonic()
        stroke()
        self._sample_until(lambda: self._back_s.keys() >= set(lost), fragment)
        self._sample_for(watch_s, fragment)
        self._steps = self._renewed = None
        return {
            "lost": lost,
            "back_s": max(self._back_s[session] for session in lost) - struck_s,
            "steps": [(at_s - struck_s, session) for at_s, session in steps],
        }

    def _sample_for(self, seconds: float, fragment: int) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.sample(num_timesteps=fragment * self.num_envs)

    def _sample_until(self, is_there: Callable[[], bool], fragment: int) -> None:
        until_s = time.monotonic() + _PATIENCE_S
        while not is_there():
            if time.monotonic() > until_s:
                where = [
                    self.sampling.assignments.endpoint_of(each)
                    for each in range(len(self.sampling.assignments.endpoints))
                ]
                raise EndpointLostError(
                    f"after {_PATIENCE_S:.0f} s the sessions are not where they should be, but at "
                    f"{', '.join(where)}",
                    "",
                )
            self.sample(num_timesteps=fragment * self.num_envs)


def main() -> None:
    """Do the work that standard input describes."""
    task = _Task(**json.loads(sys.stdin.readline()))
    parent = only_for_the_parent()
    factory = pkgutil.resolve_name(task.env)

    def say(**fields: object) -> None:
        parent.write(json.dumps(fields) + "\n")
        parent.flush()

    load = os.getloadavg()[0]
    count, fragment = task.num_endpoints, task.fragment
    with (
        ray_nodes(task.num_nodes, task.ray_address),
        EnvFleet(
            factory,
            num_endpoints=count,
            env_kwargs=task.env_kwargs,
            num_cpus=ACTOR_CPUS,
            placement="spread",
        ) as fleet,
    ):
        config = configure(PPOConfig().env_runners(num_env_runners=1), fleet)
        (runner,) = start_runners(config, 1, WatchedRunner)
        ray.get(runner.ping.remote())
        say(load=load, nodes=sum(node["Alive"] for node in ray.nodes()))
        for _ in range(task.repetitions):
            ray.get(runner.settle.remote(count, fragment))
            stroke = partial(ray.kill, fleet.actors[0], no_restart=False)
            lost_id = fleet.resolver.endpoint_ids[0]
            say(lost=ray.get(runner.watch.remote(stroke, lost_id, fragment, task.watch_s)))
        for _ in range(task.repetitions):
            fleet.scale(count - 1)
            ray.get(runner.settle.remote(count - 1, fragment))
            settled = runner.settle.remote(count, fragment)
            begun_s = time.time()
            fleet.scale(count)
            started_s = time.time()
            say(
                joined={
                    "serves_s": started_s - begun_s,
                    "samples_s": ray.get(settled) - begun_s,
                }
            )
        ray.get(runner.stop.remote())
    say(ended=True)


if __name__ == "__main__":
    main()
