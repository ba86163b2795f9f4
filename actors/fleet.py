"""EnvFleet: several EnvServiceActors that serve the same environment."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import ray

from rlmesh_ray.actors.calls import await_start
from rlmesh_ray.actors.env_service import EnvServiceActor
from rlmesh_ray.actors.registry import find_registry, shared_registry
from rlmesh_ray.envs.source import HostedEnv
from rlmesh_ray.errors import (
    CapacityError,
    ConfigurationError,
    EndpointUnreachableError,
    EnvStartError,
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
        env: A Gymnasium id or a factory. An environment that can only be imported where the
            endpoints run is named by an id, ``"module:Env-v0"``; nothing of it is imported here.
        num_endpoints: How many, at least 1.
        num_envs: Lanes of each session with each endpoint.
        env_kwargs: Passed to ``gymnasium.make``; only with an id.
        num_cpus: What Ray sets aside for each endpoint.
        max_sessions: See ``EnvServer``.
        validation: See ``EnvServer``.
        step_grace_s: See ``EnvServer``.
        allow_calls: See ``EnvServer``.
        actor_options: More options of each Ray actor: ``resources``, ``label_selector``,
            ``runtime_env``, ``scheduling_strategy``, ... Of an actor's ``runtime_env`` Ray takes
            ``pip``, ``uv``, ``conda``, ``env_vars`` and archives by URI, but no local folders; and
            what lies in the folder of the driver's script comes before all of them.
        start_timeout_s: How long to wait until all endpoints serve, their ``runtime_env`` being
            made first.

    Raises:
        ConfigurationError: ``num_endpoints`` is less than 1.
        EnvStartError: The environment could not be created, or the ``runtime_env`` not be made.
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
            _await_endpoints(starting, options, start_timeout_s)
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


def _await_endpoints(
    starting: Sequence[Any], options: Mapping[str, Any], start_timeout_s: float
) -> None:
    """Wait until endpoints serve, and tell why they do not by what their actors were to have."""
    try:
        await_start(starting, "endpoints", {"CPU": options["num_cpus"] or 0.0}, start_timeout_s)
    except CapacityError as error:
        further = _further_needs(options)
        if not further:
            raise
        raise CapacityError(f"{error}. By actor_options each needs, too: {further}") from error
    except ray.exceptions.RuntimeEnvSetupError as error:
        raise EnvStartError(
            f"the runtime_env of the endpoints cannot be made: {_last_line(error)}", str(error)
        ) from error
    except EndpointUnreachableError:
        _raise_failed_creation(starting)
        raise


def _further_needs(options: Mapping[str, Any]) -> str:
    """Say what actors need besides CPUs, and how much of it is free."""
    free = ray.available_resources()
    amounts = {"GPU": options.get("num_gpus"), **(options.get("resources") or {})}
    needs = [
        f"{amount:g} {name} (free: {free.get(name, 0.0):g})"
        for name, amount in amounts.items()
        if amount
    ]
    if options.get("label_selector"):
        needs.append(f"a node with labels {dict(options['label_selector'])}")
    if options.get("runtime_env"):
        needs.append("its runtime_env to be made, which may take longer than start_timeout_s")
    return ", ".join(needs)


def _raise_failed_creation(starting: Sequence[Any]) -> None:
    """Raise why an actor could not even be constructed, if that is what has happened.

    Its arguments are unpickled where it runs, before any code of this package.
    """
    for reference in ray.wait(list(starting), num_returns=len(starting), timeout=0)[0]:
        try:
            ray.get(reference)
        except ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                raise EnvStartError(
                    f"the environment cannot be brought to its endpoints: {_last_line(error)}; a "
                    "factory of a module that only the driver can import stays behind: name the "
                    'environment by an id, "module:Env-v0", or have runtime_env bring the module',
                    str(error),
                ) from error


def _last_line(error: Exception) -> str:
    # The texts of Ray's errors end with the traceback of the cause.
    return str(error).strip().splitlines()[-1]
