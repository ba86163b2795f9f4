"""Where an evaluation's sessions come from: addresses, fleets, and what is open already."""

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
    """What the sessions with both kinds of endpoints have in common."""

    def close(self) -> None:
        """End the session."""


SessionT = TypeVar("SessionT", bound=ClosableSession)


class EndpointFleet(Protocol):
    """Endpoints that may move, such as an ``EnvFleet``.

    It has ``tokens``, too, one an endpoint, or one ``token`` for all of them; and a ``resolver``,
    unless each of its endpoints keeps its place in ``addresses`` while another one is away.
    """

    @property
    def addresses(self) -> Sequence[str]:
        """Where they are now."""


class EndpointDirectory(Protocol):
    """Tells of each endpoint of a fleet where it is, whatever becomes of the others."""

    def __len__(self) -> int: ...

    def address(self, index: int, /) -> str:
        """Return where an endpoint is now; raises EndpointUnreachableError while it is away."""


class EndpointPlace(Protocol):
    """One endpoint."""

    @property
    def address(self) -> str:
        """Where it was when it was looked up last."""

    @property
    def is_final(self) -> bool:
        """Whether a session that broke is the last one."""

    @property
    def is_known(self) -> bool:
        """Whether it has been there, so that it may come back if it cannot be reached."""


class SessionSource(EndpointPlace, Protocol[SessionT]):
    """One endpoint, and how to have a session with it."""

    def open(self) -> SessionT:
        """Return a session."""

    def release(self, session: SessionT) -> None:
        """Take a session back. Never raises."""


class NewSessionSource(Generic[SessionT]):
    """An endpoint that is dialed anew for each session.

    Args:
        find: Says where it is; asked each time.
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
        """Dial.

        Raises:
            EndpointError: It cannot be reached.
            HandshakeRefusedError: It speaks no generation or edition of this package.
        """
        connect_options = self._find()
        self.address = connect_options.address
        return self._connect(connect_options)

    def release(self, session: SessionT) -> None:
        """Close it."""
        with contextlib.suppress(RlmeshError):
            session.close()


class OpenSessionSource(Generic[SessionT]):
    """A session that somebody else has opened, and will close."""

    is_final = True
    is_known = False

    def __init__(self, session: SessionT) -> None:
        self._session = session

    @property
    def address(self) -> str:
        """Where it is connected to."""
        return str(getattr(self._session, "address", "an open session"))

    def open(self) -> SessionT:
        """Return it."""
        return self._session

    def release(self, session: SessionT) -> None:
        """Leave it open."""


def session_sources(
    endpoints: object,
    token: TokenSource | None,
    kind: type[SessionT],
    connect: Callable[[ConnectOptions], SessionT],
) -> list[SessionSource[SessionT]]:
    """Return the endpoints that a caller has named.

    Args:
        endpoints: An address, a ``ConnectOptions``, an open session, a list of those, or a fleet.
        token: For plain addresses.
        kind: Of the sessions.
        connect: Opens one.

    Raises:
        ConfigurationError: It is none of those, an empty list, or the same open environment twice.
        EndpointError: The fleet cannot tell its addresses.
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
        return _fleet_sites(endpoints, connect)
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
    """Return whether these are endpoints that may move."""
    return _has_any(endpoints, "addresses", "resolver") and _has_any(endpoints, "tokens", "token")


def resolver_of(fleet: Any) -> EndpointDirectory:
    """Return what tells where a fleet's endpoints are, those that it has now.

    Raises:
        ConfigurationError: It has none.
        EndpointError: It cannot tell.
    """
    resolver: EndpointDirectory = fleet.resolver if _has_any(fleet, "resolver") else _Listed(fleet)
    if not len(resolver):
        raise ConfigurationError("the fleet has no endpoints")
    return resolver


def token_at(fleet: Any, place: int) -> TokenSource | None:
    """Return what the endpoint at this place of a fleet's list wants to see."""
    token: TokenSource | None = fleet.tokens[place] if hasattr(fleet, "tokens") else fleet.token
    return token


class _Listed:
    """The directory of a fleet that has a list only."""

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


def _fleet_sites(
    fleet: EndpointFleet, connect: Callable[[ConnectOptions], SessionT]
) -> list[SessionSource[SessionT]]:
    resolver = resolver_of(fleet)

    def source(place: int) -> SessionSource[SessionT]:
        token = token_at(fleet, place)
        # Ray hosts it: where Ray uses TLS, so does the endpoint.
        return NewSessionSource(
            lambda: ConnectOptions(resolver.address(place), token, RayTls()), connect, is_known=True
        )

    return [source(place) for place in range(len(resolver))]


def _has_any(fleet: object, *names: str) -> bool:
    # Not by asking for them: a fleet looks them up each time, and one endpoint may be away.
    nothing = object()
    return any(inspect.getattr_static(fleet, name, nothing) is not nothing for name in names)


_NAMES: dict[type, str] = {RemoteVectorEnv: "environment", RemoteModel: "model"}
