"""Sources of an evaluation's sessions: addresses, fleets, and open sessions."""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.remote_model import RemoteModel
from rlmesh_ray.client.remote_vector_env import RemoteVectorEnv
from rlmesh_ray.errors import ConfigurationError, EndpointUnreachableError, RlmeshError


class ClosableSession(Protocol):
    """The method that sessions of both roles share."""

    def close(self) -> None:
        """End the session."""


SessionT = TypeVar("SessionT", bound=ClosableSession)


class EndpointFleet(Protocol):
    """Endpoints that may move, such as an ``EnvFleet``.

    It also has ``tokens``, one for each endpoint, or one ``token`` for all of them; and a
    ``resolver``, unless each endpoint keeps its index in ``addresses`` while another one is away.
    """

    @property
    def addresses(self) -> Sequence[str]:
        """The present addresses."""


class EndpointDirectory(Protocol):
    """The present address of each endpoint of a fleet, by index."""

    def __len__(self) -> int: ...

    def address(self, index: int, /) -> str:
        """Return an endpoint's address; raises EndpointUnreachableError while it has none."""


class EndpointPlace(Protocol):
    """One endpoint of an evaluation."""

    @property
    def address(self) -> str:
        """Its address at the last look-up."""

    @property
    def is_final(self) -> bool:
        """Whether it cannot be dialed again after its session broke."""

    @property
    def is_known(self) -> bool:
        """Whether it has worked before, so that it may return if it cannot be reached."""


class SessionSource(EndpointPlace, Protocol[SessionT]):
    """One endpoint, and its sessions."""

    def open(self) -> SessionT:
        """Return a session."""

    def release(self, session: SessionT) -> None:
        """Give a session back. Never raises."""


class NewSessionSource(Generic[SessionT]):
    """An endpoint that is dialed for each session.

    Args:
        find: Returns the connection options of the endpoint; called for each session.
        connect: Opens a session.
        is_known: See ``EndpointPlace``.
    """

    is_final = False

    def __init__(
        self,
        find: Callable[[], ConnectOptions],
        connect: Callable[[ConnectOptions], SessionT],
        *,
        is_known: bool = False,
    ) -> None:
        self._find = find
        self._connect = connect
        self.is_known = is_known
        self.address = ""

    def open(self) -> SessionT:
        """Open a session.

        Raises:
            EndpointError: The endpoint cannot be reached.
            HandshakeRefusedError: It supports no generation or edition of this package.
        """
        connect_options = self._find()
        self.address = connect_options.address
        return self._connect(connect_options)

    def release(self, session: SessionT) -> None:
        """Close the session."""
        with contextlib.suppress(RlmeshError):
            session.close()


class OpenSessionSource(Generic[SessionT]):
    """An open session of the caller, who also closes it."""

    is_final = True
    is_known = False

    def __init__(self, session: SessionT) -> None:
        self._session = session

    @property
    def address(self) -> str:
        """Address of the session's endpoint."""
        return str(getattr(self._session, "address", "an open session"))

    def open(self) -> SessionT:
        """Return the open session."""
        return self._session

    def release(self, session: SessionT) -> None:
        """Leave the session open."""


def session_sources(
    endpoints: object,
    token: TokenSource | None,
    kind: type[SessionT],
    connect: Callable[[ConnectOptions], SessionT],
) -> list[SessionSource[SessionT]]:
    """Return one source for each endpoint of an argument of ``evaluate``.

    Args:
        endpoints: An address, a ``ConnectOptions``, an open session, a list of those, or a fleet.
        token: Token for plain addresses.
        kind: Class of the sessions.
        connect: Opens a session.

    Raises:
        ConfigurationError: ``endpoints`` is none of those, an empty list, or has the same open
            environment twice.
        EndpointError: The fleet's addresses are not known now.
    """
    if isinstance(endpoints, (list, tuple)):
        sources = [
            source for one in endpoints for source in session_sources(one, token, kind, connect)
        ]
        if not sources:
            raise ConfigurationError(f"no endpoint for the {_NAMES[kind]}; name at least one")
        _require_distinct(sources)
        return sources
    if isinstance(endpoints, kind):
        return [OpenSessionSource(endpoints)]
    if isinstance(endpoints, (str, ConnectOptions)):
        connect_options = (
            ConnectOptions(endpoints, token) if isinstance(endpoints, str) else endpoints
        )
        return [NewSessionSource(lambda: connect_options, connect)]
    if is_fleet(endpoints):
        return _fleet_sources(endpoints, connect)
    raise ConfigurationError(
        f"{type(endpoints).__name__} is no endpoint for the {_NAMES[kind]}; give an address, an "
        f"open {kind.__name__}, a list of those, or a fleet"
    )


def _require_distinct(sources: Sequence[SessionSource[SessionT]]) -> None:
    opened = [source.open() for source in sources if isinstance(source, OpenSessionSource)]
    envs = [id(session) for session in opened if isinstance(session, RemoteVectorEnv)]
    if len(set(envs)) < len(envs):
        raise ConfigurationError(
            "the same open RemoteVectorEnv is named twice, and its lanes can run one episode each; "
            "open another one, or name the endpoint's address twice"
        )


def is_fleet(endpoints: object) -> TypeGuard[EndpointFleet]:
    """Return whether ``endpoints`` has the properties of a fleet."""
    return _has_any(endpoints, "addresses", "resolver") and _has_any(endpoints, "tokens", "token")


def resolver_of(fleet: Any) -> EndpointDirectory:
    """Return the resolver of a fleet's present endpoints.

    Raises:
        ConfigurationError: The fleet has no endpoints.
        EndpointError: The fleet's endpoints are not known now.
    """
    resolver: EndpointDirectory = fleet.resolver if _has_any(fleet, "resolver") else _Listed(fleet)
    if not len(resolver):
        raise ConfigurationError("the fleet has no endpoints")
    return resolver


def token_at(fleet: Any, index: int) -> TokenSource | None:
    """Return the token of a fleet's endpoint, by index."""
    token: TokenSource | None = fleet.tokens[index] if hasattr(fleet, "tokens") else fleet.token
    return token


class _Listed:
    """Resolver of a fleet that has only ``addresses``."""

    def __init__(self, fleet: EndpointFleet) -> None:
        self._fleet = fleet
        self._count = len(fleet.addresses)

    def __len__(self) -> int:
        return self._count

    def address(self, index: int) -> str:
        addresses = self._fleet.addresses
        if index >= len(addresses):
            raise EndpointUnreachableError(f"endpoint {index} has left its fleet")
        return addresses[index]


def _fleet_sources(
    fleet: EndpointFleet, connect: Callable[[ConnectOptions], SessionT]
) -> list[SessionSource[SessionT]]:
    resolver = resolver_of(fleet)

    def source(index: int) -> SessionSource[SessionT]:
        token = token_at(fleet, index)
        # Ray hosts the endpoint: where Ray uses TLS, it does, too.
        return NewSessionSource(
            lambda: ConnectOptions(resolver.address(index), token, RayTls()), connect, is_known=True
        )

    return [source(index) for index in range(len(resolver))]


def _has_any(fleet: object, *names: str) -> bool:
    # Without evaluating properties: a fleet would look addresses up, and one may be missing.
    nothing = object()
    return any(inspect.getattr_static(fleet, name, nothing) is not nothing for name in names)


_NAMES: dict[type, str] = {RemoteVectorEnv: "environment", RemoteModel: "model"}
