"""Which runner talks to which endpoints: decided on the driver, carried in the config."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from rlmesh_ray.actors.registry.session_assignment import Assignment
from rlmesh_ray.auth.client_tls import ClientTls, ClientTlsSource
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.auth.token_file import TokenFile, TokenSource
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.dialects.registry import DialectSettings
from rlmesh_ray.errors import ConfigurationError, ContractMismatchError
from rlmesh_ray.options import DEFAULT_RUNNER_STEP_TIMEOUT_S
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.rllib.config.session_layout import SessionLayout, max_sessions_per_endpoint
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract

PLAN_KEY = "rlmesh_ray"
"""Where the plan stands in ``config.env_config``."""


class AddressResolver(Protocol):
    """Knows where endpoints are now; one that has restarted may be elsewhere."""

    def __len__(self) -> int:
        """How many endpoints there are."""

    def address(self, index: int) -> str:
        """Return where endpoint ``index`` is.

        Raises:
            EndpointUnreachableError: It is not there now; it may come back.
        """


class EndpointResolver(AddressResolver, Protocol):
    """Says, too, where each session is to be opened, and which ones are to go elsewhere."""

    def assign(self, session: str, index: int, node_id: str) -> Assignment:
        """Return where a session is to be opened. May take a while.

        Args:
            session: Its name, which nobody else in the cluster uses.
            index: Of the endpoint that it is meant for; another one may be granted.
            node_id: Where its runner is, by Ray's id.

        Raises:
            EndpointUnreachableError: There is no endpoint for it now.
        """

    def rebalance(self, placed: Mapping[str, str]) -> Any | None:
        """Ask which sessions are to move; does not wait for the answer.

        Args:
            placed: The endpoint ids of the caller's sessions, by the sessions' names.

        Returns:
            An ObjectRef of the names of those that are to move; None: nothing ever moves.

        Raises:
            EndpointUnreachableError: There is nobody to ask just now.
        """

    def release(self, sessions: Collection[str]) -> None:
        """Give back the seats of sessions that are over. Neither waits nor raises."""


@dataclass(frozen=True, slots=True)
class FixedAddressResolver:
    """Endpoints that somebody else has started."""

    addresses: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.addresses)

    def address(self, index: int) -> str:
        """Return the address that was given."""
        return self.addresses[index]

    def assign(self, session: str, index: int, node_id: str) -> Assignment:
        """Return the seat at the address that was given."""
        return Assignment(self.addresses[index])

    def rebalance(self, placed: Mapping[str, str]) -> None:
        """Return None: nothing ever moves."""

    def release(self, sessions: Collection[str]) -> None:
        """Do nothing: nobody keeps account."""


@dataclass(frozen=True, slots=True)
class CombinedResolver:
    """The endpoints of several directories, one behind the other."""

    places: tuple[tuple[EndpointResolver, int], ...]
    """Of each endpoint: who knows it, and its index there."""

    @classmethod
    def of(cls, resolvers: Iterable[EndpointResolver]) -> Self:
        """Join ``resolvers`` in their order."""
        return cls(tuple((each, index) for each in resolvers for index in range(len(each))))

    def __len__(self) -> int:
        return len(self.places)

    def address(self, index: int) -> str:
        """Return where the directory that knows endpoint ``index`` says that it is."""
        resolver, own_index = self.places[index]
        return resolver.address(own_index)


_ACCESS_KINDS: dict[str, tuple[type, ...]] = {
    "token": (str, TokenFile),
    "tls": (ClientTls, RayTls),
    "edition_text": (str,),
    "dialect_settings": (DialectSettings,),
}


@dataclass(frozen=True, slots=True)
class Access:
    """What it takes to be let in by an endpoint, wherever it is just now.

    Raises:
        ConfigurationError: Something is not what it should be.
    """

    token: TokenSource | None = field(default=None, repr=False)  # Tune writes configs into its logs
    tls: ClientTlsSource | None = None
    edition_text: str | None = None
    dialect_settings: DialectSettings | None = None
    """Settings of the dialect that the endpoint's address names; None: the defaults."""

    def __post_init__(self) -> None:
        for name, kinds in _ACCESS_KINDS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                known = " or a ".join(kind.__name__ for kind in kinds)
                raise ConfigurationError(
                    f"{name} is a {type(value).__name__}; give a {known}, or None"
                )

    def connect_options(self, address: str) -> ConnectOptions:
        """Return how to reach the endpoint at ``address``."""
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

    resolver: EndpointResolver | CombinedResolver
    contract: EnvContract
    """What every endpoint promised on the driver, and must still promise to the runner."""
    training: SessionLayout
    evaluation: SessionLayout | None = None
    """None: as in training, should anything be evaluated after all."""
    lanes_asked: int | None = None
    """What ``num_envs_per_env_runner`` said before the plan was made; None: nothing."""
    access: tuple[Access, ...] = ()
    """One an endpoint; empty: all of them let everybody in."""
    step_timeout_s: float = DEFAULT_RUNNER_STEP_TIMEOUT_S
    lockstep: bool = False
    """Whether the sessions of a runner are stepped together."""
    fast_path: bool = True
    """Whether runners take the fast path where they can; False: RLlib's per-item path."""
    plan_id: str = ""
    """Begins the names of its sessions."""

    @property
    def lanes_per_runner(self) -> int:
        """What RLlib calls ``num_envs_per_env_runner``, of the runners that train."""
        return self.training.sessions_per_runner * self.contract.num_envs

    @property
    def max_sessions_per_endpoint(self) -> int:
        """How many sessions the busiest endpoint has when all runners have opened theirs."""
        return max_sessions_per_endpoint(self.training, self.evaluation)

    def endpoints_of(self, worker_index: int, *, in_evaluation: bool = False) -> tuple[int, ...]:
        """Return the endpoints of a runner: one entry a session.

        Args:
            worker_index: As RLlib counts, in either group: remote runners from 1, the local one
                is 0. Runners beyond the planned ones begin again at the first.
            in_evaluation: Whether it is an evaluation runner: ``config.in_evaluation``.
        """
        layout = self.evaluation if in_evaluation and self.evaluation else self.training
        return layout.endpoints_of(worker_index)

    def resolver_for(self, endpoint: int) -> tuple[EndpointResolver, int]:
        """Return who knows an endpoint, and its index there."""
        if isinstance(self.resolver, CombinedResolver):
            return self.resolver.places[endpoint]
        return self.resolver, endpoint

    def connect_options(self, endpoint: int, assignment: Assignment) -> ConnectOptions:
        """Return how to reach the endpoint where a session has its seat.

        Args:
            endpoint: For which the session is meant: what lets in there does so here, but for the
                token, if the seat has one of its own.
            assignment: Of the session.
        """
        access = self.access[endpoint] if self.access else Access()
        if assignment.token is not None:
            access = replace(access, token=assignment.token)
        return access.connect_options(assignment.address)


def require_next_step(contract: EnvContract, offered: Collection[str], address: str) -> None:
    """See to it that the lanes can be given the autoreset mode that RLlib assumes: NEXT_STEP.

    Args:
        contract: The endpoint's.
        offered: Its capabilities.
        address: For the message.

    Raises:
        ContractMismatchError: The first episode that ends would break the session.
    """
    is_uniform = contract.autoreset_mode is AutoresetMode.NEXT_STEP or contract.num_envs == 1
    if not is_uniform and capabilities.PARTIAL_RESET not in offered:
        raise ContractMismatchError(
            f"{address} serves {contract.id} with autoreset mode {contract.autoreset_mode.value} "
            f"over {contract.num_envs} lanes, which RLlib can use only if single lanes can be "
            f"reset, and the endpoint does not offer {capabilities.PARTIAL_RESET}; have it serve "
            f"{AutoresetMode.NEXT_STEP.value}, or 1 lane"
        )
