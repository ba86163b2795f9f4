"""Endpoints that can be lost and come back, in this process."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray import EnvServer
from rlmesh_ray.errors import EndpointUnreachableError
from rlmesh_ray.rllib import configure
from rlmesh_ray.rllib.plan import PLAN_KEY


@dataclass
class Board:
    """A directory whose addresses change."""

    addresses: list[str | None]

    def __deepcopy__(self, _memo: object) -> "Board":
        return self  # RLlib copies configs

    def __len__(self) -> int:
        return len(self.addresses)

    def address(self, index: int) -> str:
        address = self.addresses[index]
        if address is None:
            raise EndpointUnreachableError(f"endpoint {index} is away", "")
        return address


def serve(env: Callable[[], Any]) -> EnvServer:
    return EnvServer(env, allow_calls=("set_rung",)).start()


class Fleet:
    """Endpoints in this process that can be lost and come back."""

    def __init__(self, *envs: Callable[[], Any]) -> None:
        self.envs = envs
        self.servers: list[EnvServer | None] = [serve(env) for env in envs]
        self.board = Board([server.address for server in self.servers if server])

    def lose(self, index: int) -> None:
        server = self.servers[index]
        assert server is not None
        server.stop(0)
        self.servers[index] = None
        self.board.addresses[index] = None

    def bring_back(self, index: int) -> None:
        server = serve(self.envs[index])
        self.servers[index] = server
        self.board.addresses[index] = server.address

    def runner(
        self, config: PPOConfig | None = None, *, worker_index: int = 0, **settings: Any
    ) -> Any:
        """Build the runner that ``configure`` chooses for the environment."""
        config = (config or PPOConfig()).env_runners(num_env_runners=0, **settings)
        config = configure(config, [address for address in self.board.addresses if address])
        plan = replace(config.env_config[PLAN_KEY], directory=self.board)
        config.env_config[PLAN_KEY] = plan
        return config.env_runner_cls(
            config=config, worker_index=worker_index, num_workers=worker_index
        )

    def stop(self) -> None:
        for server in self.servers:
            if server is not None:
                server.stop(0)
