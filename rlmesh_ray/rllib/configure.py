"""configure(): switch an RLlib AlgorithmConfig over to endpoints."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ray
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rlmesh_ray.actors.fleet import EnvFleet
from rlmesh_ray.client.channel import ClientTls, Dial
from rlmesh_ray.client.env_client import shake_hands
from rlmesh_ray.errors import ConfigurationError, ContractMismatchError
from rlmesh_ray.protocol.address import looks_like_address
from rlmesh_ray.rllib.env_runner import RLMeshEnvRunner
from rlmesh_ray.rllib.plan import (
    PLAN_KEY,
    Directory,
    FixedAddresses,
    RolloutPlan,
    require_same_contract,
)
from rlmesh_ray.rllib.plan import sessions_per_runner as spread
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.gym import to_gymnasium

ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)

RolloutSource = str | Sequence[str] | EnvFleet | Callable[[], Any]
"""A Gymnasium id, a factory, a fleet, one address, or several."""

# Fleets live as long as the driver: a config holds where their endpoints are, not the fleet, which
# ends its endpoints when nobody holds it.
_FLEETS: list[EnvFleet] = []


def configure(  # noqa: PLR0913  # the public surface; every option stands alone
    config: ConfigT,
    env: RolloutSource,
    *,
    num_endpoints: int | None = None,
    num_envs: int | None = None,
    token: str | None = None,
    tls: ClientTls | None = None,
    step_timeout_s: float = 30.0,
    edition_text: str | None = None,
) -> ConfigT:
    """Let ``config`` sample from endpoints; everything else in it stays as it is.

    Call it after ``config.env_runners(num_env_runners=...)``. What the endpoints serve
    (width, spaces, autoreset mode) is asked for here, on the driver, and checked. Each
    EnvRunner opens one session on each of ``num_endpoints / num_env_runners`` endpoints (one at
    least; the local runner, with ``num_env_runners=0``, one on every endpoint), and
    ``num_envs_per_env_runner`` becomes the number of lanes that this gives. Evaluation runners
    open sessions of their own, in the same number.

    Args:
        config: Of the new API stack.
        env: A Gymnasium id or a factory (a fleet of endpoints is started on Ray and lives as
            long as this driver), an ``EnvFleet``, or the address of an endpoint that somebody
            else has started (``"rlmesh://HOST:PORT"``), or several.
        num_endpoints: For an id or factory: how many to start. Default: one a runner.
        num_envs: For an id or factory: lanes of each endpoint. Default: what
            ``num_envs_per_env_runner`` says.
        token: For addresses: what the endpoints want to see. It becomes part of the config, and
            so of the algorithm's checkpoints.
        tls: For addresses whose endpoints speak TLS.
        step_timeout_s: Longest wait for any answer of an endpoint; must be well below the
            config's ``sample_timeout_s``.
        edition_text: For addresses: the edition's text that the endpoints implement, where it is
            not this package's, such as ``"rlmesh-0.1.0b3"``; see ``Dial``.

    Returns:
        ``config``.

    Raises:
        ConfigurationError: An argument does not fit the kind of ``env``.
        ContractMismatchError: The endpoints differ from each other, or cannot be spread evenly.
        EndpointError: An endpoint cannot be reached.
    """
    if not config.enable_env_runner_and_connector_v2:
        raise ConfigurationError(
            "this config is of RLlib's old API stack; leave api_stack() at its defaults"
        )
    directory, token = _directory(config, env, num_endpoints, num_envs, token)
    contract = _common_contract(directory, token, tls, edition_text)
    num_runners = int(config.num_env_runners or 0)
    plan = RolloutPlan(
        directory=directory,
        contract=contract,
        sessions_per_runner=spread(len(directory), num_runners),
        token=token,
        tls=tls,
        step_timeout_s=step_timeout_s,
        edition_text=edition_text,
    )
    config.environment(
        # The endpoints are the environment: RLlib must not make one of its own.
        env=None,
        env_config={**config.env_config, PLAN_KEY: plan},
        observation_space=to_gymnasium(contract.observation_space),
        action_space=to_gymnasium(contract.action_space),
    )
    config.env = None
    config.env_runners(
        env_runner_cls=RLMeshEnvRunner, num_envs_per_env_runner=plan.lanes_per_runner
    )
    return config


def _directory(
    config: AlgorithmConfig,
    env: RolloutSource,
    num_endpoints: int | None,
    num_envs: int | None,
    token: str | None,
) -> tuple[Directory, str | None]:
    """Return where the endpoints are, and the token that they want."""
    if isinstance(env, str) and looks_like_address(env):
        env = [env]
    starts_fleet = isinstance(env, str) or callable(env)
    if not starts_fleet and (num_endpoints is not None or num_envs is not None):
        raise ConfigurationError(
            "num_endpoints and num_envs are for a Gymnasium id or a factory; endpoints that run "
            "already have their own"
        )
    if isinstance(env, str) or callable(env):
        num_runners = max(1, int(config.num_env_runners or 0))
        env = EnvFleet(
            env,
            num_endpoints=num_runners if num_endpoints is None else num_endpoints,
            num_envs=int(config.num_envs_per_env_runner) if num_envs is None else num_envs,
            num_cpus=endpoint_cpus(config, num_runners if num_endpoints is None else num_endpoints),
        )
    if isinstance(env, EnvFleet):
        _FLEETS.append(env)
        return env.directory, env.token
    return FixedAddresses(_addresses(env)), token


def endpoint_cpus(config: AlgorithmConfig, num_endpoints: int) -> float:
    """Return what Ray shall set aside for an endpoint: a CPU, if the runners then find room.

    A laptop's two cores are spoken for by two runners already; endpoints that took a CPU each
    would leave RLlib waiting for ever.
    """
    if not ray.is_initialized():
        ray.init()
    runners = int(config.num_env_runners or 0) * float(config.num_cpus_per_env_runner)
    learners = int(config.num_learners or 0) * 1.0
    total = float(ray.cluster_resources().get("CPU", 0.0))
    left = total - runners - learners
    return min(1.0, max(left / max(num_endpoints, 1), 0.01))


def _addresses(env: Sequence[str]) -> tuple[str, ...]:
    is_list = isinstance(env, Sequence) and len(env) > 0
    if not is_list or not all(isinstance(address, str) for address in env):
        raise ConfigurationError(
            f"env={env!r}: give a Gymnasium id, a factory, an EnvFleet, an address or a list of "
            "addresses; an environment that exists already is served by EnvServer"
        )
    return tuple(env)


def _common_contract(
    directory: Directory, token: str | None, tls: ClientTls | None, edition_text: str | None
) -> EnvContract:
    """Ask every endpoint what it serves; they must agree."""
    first: EnvContract | None = None
    for index in range(len(directory)):
        address = directory.address(index)
        contract = shake_hands(Dial(address, token, tls, edition_text=edition_text)).contract
        if not isinstance(contract, EnvContract):
            raise ContractMismatchError(f"{address} tells no environment contract")
        first = first or contract
        require_same_contract(first, contract, address)
    assert first is not None, "a directory has at least one endpoint"
    return first
