"""The endpoints of a config: those given to ``configure``, or those that it starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rlmesh_ray.actors.env_actor import SerializedEnv
from rlmesh_ray.actors.env_fleet import EnvFleet
from rlmesh_ray.actors.pool import EnvPool
from rlmesh_ray.actors.registry.endpoint_resolver import FleetResolver
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.client.env.env_session_client import probe_endpoint
from rlmesh_ray.errors import ConfigurationError, ContractMismatchError
from rlmesh_ray.options import declared, flag_name
from rlmesh_ray.protocol.address import looks_like_address
from rlmesh_ray.rllib.config.cluster_capacity import actor_groups
from rlmesh_ray.rllib.config.rollout_plan import (
    Access,
    CombinedResolver,
    EndpointResolver,
    FixedAddressResolver,
    require_next_step,
)
from rlmesh_ray.rllib.config.session_endpoints import (
    RunnerSpec,
    assign_sessions,
    max_sessions_per_endpoint,
    num_envs_for,
)
from rlmesh_ray.server.env.env_options import DEFAULT_MAX_SESSIONS, EnvOptions
from rlmesh_ray.server.env.env_server import EnvServer
from rlmesh_ray.spaces.contract import EnvContract, require_same_contract

Rollouts = str | EnvServer | EnvFleet | EnvPool
"""An address, a server, which stands for its address, a fleet or a pool."""
RolloutSource = Rollouts | Sequence[Rollouts] | Callable[[], Any]
"""A Gymnasium id, a factory, an address, a server, a fleet, a pool, or a list of the last four."""

# References that keep fleets alive as long as the driver: a config has the addresses of endpoints,
# not the fleet, which ends its endpoints when its last handle goes. So do pools and registrars.
KEPT_FLEETS: list[EnvFleet | EnvPool] = []


@dataclass(frozen=True, slots=True)
class EndpointSet:
    """The endpoints of a config, before they are contacted."""

    resolver: CombinedResolver
    access: tuple[Access, ...]
    """One for each endpoint."""
    num_evaluation: int
    """How many of them, the last ones, are for evaluation only."""
    max_sessions: int = DEFAULT_MAX_SESSIONS
    fleets: tuple[EnvFleet | EnvPool, ...] = ()

    @property
    def num_training(self) -> int:
        return len(self.resolver) - self.num_evaluation


def find_endpoints(
    config: AlgorithmConfig,
    env: RolloutSource,
    runner_spec: RunnerSpec,
    access: Access,
    *,
    num_endpoints: int | None,
    num_evaluation_endpoints: int | None,
    options: EnvOptions,
) -> EndpointSet:
    """Start endpoints, or use those that run already; see ``configure``.

    Args:
        config: The config for which the endpoints are.
        env: The ``env`` argument of ``configure``.
        runner_spec: The config's runners and their lanes.
        access: Access to endpoints that are given by their addresses, and to no others.
        num_endpoints: See ``configure``.
        num_evaluation_endpoints: See ``configure``.
        options: Of each endpoint that is started.

    Raises:
        ConfigurationError: An argument does not fit the kind of ``env``.
        ContractMismatchError: Endpoints cannot be started so that they are spread evenly.
    """
    if isinstance(env, EnvServer | EnvFleet | EnvPool) or (
        isinstance(env, str) and looks_like_address(env)
    ):
        env = [env]
    if isinstance(env, Sequence) and not isinstance(env, str):
        env = [each.address if isinstance(each, EnvServer) else each for each in env]
    if isinstance(env, str) or callable(env):
        _require_use(access, ())
        return _new_fleet(
            config, env, runner_spec, num_endpoints, num_evaluation_endpoints, options
        )
    if num_endpoints is not None or "num_envs" in options:
        raise ConfigurationError(
            "num_endpoints and num_envs are for a Gymnasium id or a factory; endpoints that run "
            "already have their own"
        )
    for name in options:
        kind, option = declared(EnvOptions)[name]
        places = f"EnvFleet({name}=...), EnvServer({name}=...)"
        if option.has_flag:
            places += f", serve-env {flag_name(name, kind, option)}"
        raise ConfigurationError(
            f"{name} is for a Gymnasium id or a factory, whose endpoints are started here; "
            f"endpoints that run already have their own: {places}"
        )
    num_evaluation = num_evaluation_endpoints or 0
    endpoints = _from_running(env, num_evaluation, access)
    if num_evaluation < 0 or endpoints.num_training < 1:
        raise ConfigurationError(
            f"num_evaluation_endpoints={num_evaluation} of {len(endpoints.resolver)} endpoint(s) "
            "must be 0 or more, and leave at least one for training"
        )
    return endpoints


def _new_fleet(
    config: AlgorithmConfig,
    env: str | Callable[[], Any],
    runner_spec: RunnerSpec,
    num_endpoints: int | None,
    num_evaluation: int | None,
    options: EnvOptions,
) -> EndpointSet:
    SerializedEnv.of(env, options)  # raises here, before Ray is started
    if num_endpoints is None:
        num_endpoints = runner_spec.num_runners
    if num_evaluation is None:
        is_parallel = config.evaluation_parallel_to_training
        num_evaluation = (runner_spec.num_evaluation_runners or 0) if is_parallel else 0
    _require_at_least("num_endpoints", num_endpoints, 1)
    _require_at_least("num_evaluation_endpoints", num_evaluation, 0)
    width = options.get("num_envs") or num_envs_for(runner_spec, num_endpoints)
    layouts = assign_sessions(
        runner_spec,
        width=width,
        num_endpoints=num_endpoints,
        num_evaluation_endpoints=num_evaluation,
    )
    max_sessions = options.get("max_sessions") or max(
        DEFAULT_MAX_SESSIONS, max_sessions_per_endpoint(*layouts)
    )
    total = num_endpoints + num_evaluation
    options = {**options, "num_envs": width, "max_sessions": max_sessions}
    fleet = EnvFleet(env, num_endpoints=total, num_cpus=endpoint_cpus(config, total), **options)
    return replace(_from_running([fleet], num_evaluation, Access()), max_sessions=max_sessions)


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigurationError(f"{name}={value} must be at least {least}")


def endpoint_cpus(config: AlgorithmConfig, num_endpoints: int) -> float:
    """Return what Ray shall set aside for an endpoint: a CPU, if the runners then find room.

    A laptop's two cores are spoken for by two runners already; endpoints that took anything of
    them would leave RLlib waiting for ever.
    """
    if not ray.is_initialized():
        ray.init()
    others = sum(group.count * group.each.get("CPU", 0.0) for group in actor_groups(config))
    left = float(ray.cluster_resources().get("CPU", 0.0)) - others
    return min(1.0, max(left / max(num_endpoints, 1), 0.0))


def _from_running(env: Sequence[Rollouts], num_evaluation: int, access: Access) -> EndpointSet:
    if not isinstance(env, Sequence) or len(env) == 0:
        raise ConfigurationError(
            f"env={env!r}: give a Gymnasium id, a factory, an EnvFleet, an EnvPool, an EnvServer, "
            "an address or a list of the last four; an environment that exists already is served "
            "by EnvServer"
        )
    settings = access.dialect_settings
    resolvers: list[EndpointResolver] = []
    accesses: list[Access] = []
    for index, each in enumerate(env):
        if isinstance(each, EnvFleet):
            resolvers.append(each.resolver)
            accesses += [Access(token, RayTls()) for token in each.tokens]
        elif isinstance(each, EnvPool):
            resolver = each.resolver
            resolvers.append(resolver)
            accesses += [Access(token, each.endpoint_tls) for token in resolver.tokens]
        elif isinstance(each, str) and looks_like_address(each):
            resolvers.append(FixedAddressResolver((each,)))
            is_theirs = settings is not None and each.startswith(settings.scheme)
            accesses.append(access if is_theirs else replace(access, dialect_settings=None))
        else:
            raise ConfigurationError(
                f"env[{index}]={each!r}: a list holds fleets, pools, servers and addresses "
                "(HOST:PORT); for a Gymnasium id or a factory start an EnvFleet, and give that"
            )
    _require_use(access, accesses)
    return EndpointSet(
        CombinedResolver.of(_reserve_evaluation_endpoints(resolvers, num_evaluation)),
        tuple(accesses),
        num_evaluation,
        fleets=tuple(each for each in env if isinstance(each, EnvFleet | EnvPool)),
    )


def _reserve_evaluation_endpoints(
    resolvers: Sequence[EndpointResolver], num_evaluation: int
) -> list[EndpointResolver]:
    """Have fleets that serve both keep training and evaluation apart when sessions move."""
    reserving: list[EndpointResolver] = []
    for each in reversed(resolvers):
        own = max(0, min(num_evaluation, len(each)))
        num_evaluation -= own
        if isinstance(each, FleetResolver) and 0 < own < len(each):
            each = replace(each, reserved=each.endpoint_ids[-own:])
        reserving.insert(0, each)
    return reserving


def _require_use(access: Access, accesses: Sequence[Access]) -> None:
    settings = access.dialect_settings
    if settings is not None and all(each.dialect_settings is None for each in accesses):
        raise ConfigurationError(
            "dm_env_rpc=... is for servers of that protocol, and no address given begins with "
            f"{settings.scheme}"
        )


def common_contract(endpoints: EndpointSet) -> EnvContract:
    """Return the contract of all endpoints, each of which is contacted.

    Raises:
        ContractMismatchError: Their contracts differ, or RLlib cannot use them.
        EndpointError: An endpoint cannot be reached.
    """
    first: EnvContract | None = None
    for index, access in enumerate(endpoints.access):
        address = endpoints.resolver.address(index)
        answer = probe_endpoint(access.connect_options(address))
        contract = answer.contract
        if not isinstance(contract, EnvContract):
            raise ContractMismatchError(f"{address} serves no environment")
        require_next_step(contract, answer.capabilities, address)
        first = first or contract
        require_same_contract(first, contract, address)
    assert first is not None, "there is at least one endpoint"
    return first
