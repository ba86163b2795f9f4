"""The rollout plan: which endpoints each runner samples from; the registry may assign others."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rlmesh_ray.actors.registry.assignment_table import Assignment
from rlmesh_ray.auth.client_tls import ClientTls, ClientTlsSource
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.auth.token_file import TokenFile, TokenSource
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.dialects.registry import DialectSettings
from rlmesh_ray.errors import ConfigurationError, ContractMismatchError
from rlmesh_ray.options import DEFAULT_RESET_TIMEOUT_S, DEFAULT_RUNNER_STEP_TIMEOUT_S
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.rllib.config.session_endpoints import SessionLayout
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract

PLAN_KEY = "rlmesh_ray"
"""Key of the plan in ``config.env_config``."""


class EndpointResolver(Protocol):
    """Returns the current addresses of endpoints, assigns sessions to them, and moves sessions.

    A restart may change an address.
    """

    def __len__(self) -> int:
        """Return the number of endpoints."""

    def address(self, index: int) -> str:
        """Return the address of endpoint ``index``.

        Raises:
            EndpointUnreachableError: The endpoint is away; it may come back.
        """

    def assign(self, session: str, index: int, node_id: str) -> Assignment:
        """Return the endpoint at which to open a session. May take a while.

        Args:
            session: Name of the session, unique in the cluster.
            index: Index of its preferred endpoint; another one may be assigned.
            node_id: Ray's id of its runner's node.

        Raises:
            EndpointUnreachableError: There is no endpoint for it now.
        """

    def rebalance(self, placed: Mapping[str, str]) -> Any | None:
        """Ask which sessions have to move; does not wait for the answer.

        Args:
            placed: The endpoint ids of the caller's sessions, by the sessions' names.

        Returns:
            An ObjectRef of the names of those that have to move; None: sessions never move.

        Raises:
            EndpointUnreachableError: The registry is away.
        """

    def release(self, sessions: Collection[str]) -> None:
        """Release the assignments of sessions that have ended. Neither waits nor raises."""


@dataclass(frozen=True, slots=True)
class FixedAddressResolver:
    """Endpoints that are given by their addresses."""

    addresses: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.addresses)

    def address(self, index: int) -> str:
        return self.addresses[index]

    def assign(self, session: str, index: int, node_id: str) -> Assignment:
        return Assignment(self.addresses[index])

    def rebalance(self, placed: Mapping[str, str]) -> None:
        """Return None: sessions never move."""

    def release(self, sessions: Collection[str]) -> None:
        """Do nothing: assignments are not recorded."""


@dataclass(frozen=True, slots=True)
class CombinedResolver:
    """The endpoints of several resolvers, one after the other."""

    places: tuple[tuple[EndpointResolver, int], ...]
    """For each endpoint: its resolver, and its index there."""

    @classmethod
    def of(cls, resolvers: Iterable[EndpointResolver]) -> Self:
        return cls(tuple((each, index) for each in resolvers for index in range(len(each))))

    def __len__(self) -> int:
        return len(self.places)

    def address(self, index: int) -> str:
        resolver, own_index = self.places[index]
        return resolver.address(own_index)


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials and options for connecting to an endpoint, without its address.

    Raises:
        ConfigurationError: A value has the wrong type.
    """

    token: TokenSource | None = field(default=None, repr=False)  # Tune writes configs into its logs
    tls: ClientTlsSource | None = None
    edition_text: str | None = None
    dialect_settings: DialectSettings | None = None
    """Settings of the dialect that the endpoint's address names; None: the defaults."""

    def __post_init__(self) -> None:
        kinds: tuple[type, ...]
        for name, value, kinds in (
            ("token", self.token, (str, TokenFile)),
            ("tls", self.tls, (ClientTls, RayTls)),
            ("edition_text", self.edition_text, (str,)),
            ("dm_env_rpc", self.dialect_settings, (DialectSettings,)),
        ):
            if value is not None and not isinstance(value, kinds):
                known = " or a ".join(kind.__name__ for kind in kinds)
                raise ConfigurationError(
                    f"{name} is a {type(value).__name__}; give a {known}, or None"
                )

    def connect_options(self, address: str) -> ConnectOptions:
        return ConnectOptions(
            address,
            self.token,
            self.tls,
            edition_text=self.edition_text,
            dialect_settings=self.dialect_settings,
        )


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """How the runners of one algorithm use the endpoints."""

    resolver: CombinedResolver
    contract: EnvContract
    """The contract that every endpoint served on the driver, and must still serve to runners."""
    training: SessionLayout
    evaluation: SessionLayout | None = None
    """None: evaluation runners, if there are any, use the layout of training."""
    lanes_asked: int | None = None
    """``num_envs_per_env_runner`` before the plan was made; None: its default."""
    access: tuple[Access, ...] = ()
    """One for each endpoint; empty: they need no credentials."""
    step_timeout_s: float = DEFAULT_RUNNER_STEP_TIMEOUT_S
    reset_timeout_s: float = DEFAULT_RESET_TIMEOUT_S
    lockstep: bool = False
    """Whether the sessions of a runner are stepped together."""
    fast_path: bool = True
    """Whether runners take the fast path where they can; False: RLlib's per-item path."""
    inference: str = "auto"
    """How runners run the module: ``"torch"``, ``"compiled"`` or ``"auto"``."""
    plan_id: str = ""
    """Prefix of the names of its sessions."""

    @property
    def lanes_per_runner(self) -> int:
        return self.training.sessions_per_runner * self.contract.num_envs

    def endpoints_of(self, worker_index: int, *, in_evaluation: bool = False) -> tuple[int, ...]:
        """Return the endpoints of a runner: one entry for each session.

        Args:
            worker_index: RLlib's index in either group: remote runners from 1, the local one is 0.
                Runners beyond the planned ones begin again at the first.
            in_evaluation: Whether it is an evaluation runner: ``config.in_evaluation``.
        """
        layout = self.evaluation if in_evaluation and self.evaluation else self.training
        return layout.endpoints_of(worker_index)

    def connect_options(self, endpoint: int, assignment: Assignment) -> ConnectOptions:
        """Return the options to connect to the endpoint that a session is assigned to.

        Args:
            endpoint: Index of the preferred endpoint of the session, whose access is used, except
                for the token if the assignment has one.
            assignment: The assignment of the session.
        """
        access = self.access[endpoint] if self.access else Access()
        if assignment.token is not None:
            access = replace(access, token=assignment.token)
        return access.connect_options(assignment.address)


def plan_of(config: AlgorithmConfig) -> RolloutPlan:
    """Return the plan that ``configure`` has put into an AlgorithmConfig.

    Raises:
        ConfigurationError: There is none.
    """
    plan = config.env_config.get(PLAN_KEY)
    if not isinstance(plan, RolloutPlan):
        raise ConfigurationError(
            "this config names no endpoints: pass it through rlmesh_ray.rllib.configure"
        )
    return plan


def require_next_step(contract: EnvContract, offered: Collection[str], address: str) -> None:
    """Check that the lanes have the autoreset mode that RLlib assumes, or can emulate NEXT_STEP.

    Args:
        contract: The contract of the endpoint.
        offered: Its capabilities.
        address: Its address, for the message.

    Raises:
        ContractMismatchError: The first episode that ends would break the session.
    """
    is_uniform = contract.autoreset_mode is AutoresetMode.NEXT_STEP or contract.num_envs == 1
    if not is_uniform and capabilities.PARTIAL_RESET not in offered:
        raise ContractMismatchError(
            f"{address} serves {contract.id} with autoreset mode {contract.autoreset_mode.option} "
            f"over {contract.num_envs} lanes, which RLlib can use only if single lanes can be "
            f"reset, and the endpoint does not offer {capabilities.PARTIAL_RESET}; have it serve "
            f"{AutoresetMode.NEXT_STEP.option}, or 1 lane"
        )
