"""Endpoints that can be lost and come back, and how to look at what comes of it."""

import os
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlmesh_ray import EnvServer
from rlmesh_ray.actors.registry.assignment_table import Assignment
from rlmesh_ray.errors import EndpointUnreachableError
from rlmesh_ray.rllib import configure
from rlmesh_ray.rllib.config.rollout_plan import PLAN_KEY, CombinedResolver
from tests.loopback.eventually import eventually


@dataclass
class Board:
    """A directory whose addresses change."""

    addresses: list[str | None]
    redirected: dict[int, int] = field(default_factory=dict)
    """Endpoints whose sessions go elsewhere, and where."""
    leaving: set[int] = field(default_factory=set)
    """Endpoints whose sessions are asked to move."""
    claimed: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)
    """What ``assign`` raises, one a call."""

    def __deepcopy__(self, _memo: object) -> "Board":
        return self  # RLlib copies configs

    def __len__(self) -> int:
        return len(self.addresses)

    def address(self, index: int) -> str:
        address = self.addresses[index]
        if address is None:
            raise EndpointUnreachableError(f"endpoint {index} is away", "")
        return address

    def assign(self, session: str, index: int, _node_id: str) -> Assignment:
        if self.faults:
            raise self.faults.pop()
        self.claimed.append(session)
        index = self.redirected.get(index, index)
        return Assignment(self.address(index), str(index))

    def rebalance(self, seated: Mapping[str, str]) -> Any:
        names = [name for name, endpoint_id in seated.items() if int(endpoint_id) in self.leaving]
        return ray.put(tuple(names))

    def release(self, sessions: Collection[str]) -> None:
        self.released += sessions


class IdleServers:
    """Endpoints of former tests for the next one: a new one and its worker take a second."""

    def __init__(self) -> None:
        self._idle: dict[Callable[[], Any], list[EnvServer]] = {}

    def take(self, env: Callable[[], Any]) -> EnvServer:
        """Return an endpoint without sessions."""
        idle = self._idle.get(env)
        return idle.pop() if idle else EnvServer(env, allow_calls=("set_rung",)).start()

    def give_back(self, env: Callable[[], Any], server: EnvServer) -> None:
        """Keep an endpoint for others, unless no other test has its environment."""
        if isinstance(env, type) and eventually(lambda: server.num_sessions == 0, 10.0):
            self._idle.setdefault(env, []).append(server)
        else:
            server.stop(0)

    def stop(self) -> None:
        for servers in self._idle.values():
            for server in servers:
                server.stop(0)


class Fleet:
    """Endpoints in this process that can be lost and come back."""

    def __init__(self, idle: IdleServers, *envs: Callable[[], Any]) -> None:
        self.envs = envs
        self._idle = idle
        self.servers: list[EnvServer | None] = [idle.take(env) for env in envs]
        self.board = Board([server.address for server in self.servers if server])

    def lose(self, index: int) -> None:
        server = self.servers[index]
        assert server is not None
        server.stop(0)
        self.servers[index] = None
        self.board.addresses[index] = None

    def bring_back(self, index: int) -> None:
        server = self._idle.take(self.envs[index])
        self.servers[index] = server
        self.board.addresses[index] = server.address

    def runner(
        self,
        config: PPOConfig | None = None,
        *,
        worker_index: int = 0,
        lockstep: bool = False,
        **settings: Any,
    ) -> Any:
        """Build the runner that ``configure`` chooses for the environment."""
        config = (config or PPOConfig()).env_runners(num_env_runners=0, **settings)
        addresses = [address for address in self.board.addresses if address]
        config = configure(config, addresses, lockstep=lockstep)
        plan = replace(config.env_config[PLAN_KEY], resolver=CombinedResolver.of([self.board]))
        config.env_config[PLAN_KEY] = plan
        return config.env_runner_cls(
            config=config, worker_index=worker_index, num_workers=worker_index
        )

    def stop(self) -> None:
        for env, server in zip(self.envs, self.servers, strict=True):
            if server is not None:
                self._idle.give_back(env, server)


def assert_unbroken(chunks: list[SingleAgentEpisode]) -> None:
    """Every transition of every episode is there once, in its order."""
    by_episode: dict[str, list[SingleAgentEpisode]] = {}
    for chunk in chunks:
        by_episode.setdefault(chunk.id_, []).append(chunk)
    for parts in by_episode.values():
        rewards = np.concatenate([part.get_rewards() for part in parts])
        np.testing.assert_array_equal(rewards, np.arange(1, len(rewards) + 1))
        for part in parts:
            observations = part.get_observations()[:, 0]
            np.testing.assert_array_equal(observations, observations[0] + np.arange(len(part) + 1))


class Background:
    """Calls a function in a thread."""

    def __init__(self, function: Callable[[], list[SingleAgentEpisode]]) -> None:
        self._results: list[list[SingleAgentEpisode]] = []
        self._thread = threading.Thread(target=lambda: self._results.append(function()))
        self._thread.start()

    def result(self) -> list[SingleAgentEpisode]:
        self._thread.join(60)
        (result,) = self._results
        return result


class Steps:
    """A pipe into which an environment writes a byte a step."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._file = os.open(path, os.O_RDWR)  # to read alone would wait for the writer

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            os.read(self._file, 1)
