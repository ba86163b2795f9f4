"""EnvFleet: several EnvServiceActors that serve the same environment."""

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import ray

from rlmesh_ray.actors.calls import await_start
from rlmesh_ray.actors.env_service import EnvServiceActor
from rlmesh_ray.actors.registry import find_registry, shared_registry
from rlmesh_ray.envs.source import HostedEnv
from rlmesh_ray.errors import (
    ConfigurationError,
    EndpointUnreachableError,
)
from rlmesh_ray.server.env_server import DEFAULT_STEP_GRACE_S


@dataclass(frozen=True, slots=True)
class FleetDirectory:
    """Looks a fleet's endpoints up in the registry; travels to wherever a runner is."""

    endpoint_ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.endpoint_ids)

    def address(self, index: int) -> str:
        """Return where endpoint ``index`` is now.

        Raises:
            EndpointUnreachableError: It is not announced, or the registry is gone.
        """
        endpoint_id = self.endpoint_ids[index]
        try:
            record = ray.get(find_registry().lookup.remote(endpoint_id))
        except (ValueError, ray.exceptions.RayActorError) as error:
            raise EndpointUnreachableError(
                f"endpoint {endpoint_id}: the registry is gone, and the fleet with it; "
                "start a new one"
            ) from error
        if record is None:
            raise EndpointUnreachableError(f"endpoint {endpoint_id} is not announced")
        return str(record.address)


class EnvFleet:
    """Endpoints on Ray that serve the same environment, ready when this returns.

    The endpoints live as long as this object or until ``stop``; Ray restarts those that die.
    Make a fleet on the driver, not within a Tune trial, whose resources it would take. Usable
    as a context manager.

    Args:
        env: A Gymnasium id or a factory.
        num_endpoints: How many, at least 1.
        num_envs: Lanes of each session with each endpoint.
        env_kwargs: Passed to ``gymnasium.make``; only with an id.
        num_cpus: What Ray sets aside for each endpoint.
        max_sessions: See ``EnvServer``.
        validation: See ``EnvServer``.
        step_grace_s: See ``EnvServer``.
        allow_calls: See ``EnvServer``.
        actor_options: More options of each Ray actor: ``resources``, ``label_selector``,
            ``runtime_env``, ``scheduling_strategy``, ...
        start_timeout_s: How long to wait until all endpoints serve.

    Raises:
        ConfigurationError: ``num_endpoints`` is less than 1.
        EnvStartError: The environment could not be created.
        CapacityError: The cluster did not place all endpoints in time.
    """

    def __init__(  # noqa: PLR0913  # the public surface; every option stands alone
        self,
        env: HostedEnv,
        *,
        num_endpoints: int = 1,
        num_envs: int = 1,
        env_kwargs: Mapping[str, object] | None = None,
        num_cpus: float = 1.0,
        max_sessions: int | None = None,
        validation: str = "warn",
        step_grace_s: float = DEFAULT_STEP_GRACE_S,
        allow_calls: Collection[str] = (),
        actor_options: Mapping[str, Any] | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        if num_endpoints < 1:
            raise ConfigurationError(f"num_endpoints={num_endpoints} must be at least 1")
        self.token = secrets.token_urlsafe(32)
        fleet_id = secrets.token_hex(4)
        self._registry = shared_registry()
        self.directory = FleetDirectory(
            tuple(f"{fleet_id}-{index}" for index in range(num_endpoints))
        )
        # DEFAULT: not into the placement group of whoever happens to call this.
        options = {"num_cpus": num_cpus, "scheduling_strategy": "DEFAULT", **(actor_options or {})}
        actor_class: Any = EnvServiceActor
        self._actors = [
            actor_class.options(**options).remote(
                env,
                num_envs=num_envs,
                env_kwargs=env_kwargs,
                token=self.token,
                endpoint_id=endpoint_id,
                max_sessions=max_sessions,
                validation=validation,
                step_grace_s=step_grace_s,
                allow_calls=allow_calls,
            )
            for endpoint_id in self.directory.endpoint_ids
        ]
        try:
            starting = [actor.address.remote() for actor in self._actors]
            await_start(starting, "endpoints", {"CPU": num_cpus}, start_timeout_s)
        except BaseException:
            self.stop()
            raise

    @property
    def addresses(self) -> list[str]:
        """Where the endpoints are now."""
        return [self.directory.address(index) for index in range(len(self.directory))]

    @property
    def actors(self) -> list[Any]:
        """Handles of the EnvServiceActors, in the order of ``addresses``."""
        return list(self._actors)

    def stop(self) -> None:
        """End all endpoints. Idempotent."""
        actors, self._actors = self._actors, []
        for actor, endpoint_id in zip(actors, self.directory.endpoint_ids, strict=False):
            ray.kill(actor)
            self._registry.withdraw.remote(endpoint_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
