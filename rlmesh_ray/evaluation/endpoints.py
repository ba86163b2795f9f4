"""Endpoints of an evaluation: addresses, fleets and open sessions, and when to dial them again.

Times are seconds of any monotonic clock and come in as arguments.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.remote_model import RemoteModel
from rlmesh_ray.client.remote_vector_env import RemoteVectorEnv
from rlmesh_ray.errors import ConfigurationError, EndpointUnreachableError, RlmeshError
from rlmesh_ray.evaluation.result import EndpointRole

SessionT = TypeVar("SessionT", bound=RemoteVectorEnv | RemoteModel)

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0


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


class RemoteEndpoint(Generic[SessionT]):
    """One endpoint: its sessions, and whether it works.

    A lost endpoint is due again after 0.1 s, then 0.2 s, and so on, at most every 5 s.

    Args:
        role: Its role.
        source: The caller's open session, which the caller also closes; or returns the connection
            options, and is called for each session.
        connect: Opens a session.
        is_known: Whether it has worked before, so that it may return if it cannot be reached.
    """

    def __init__(
        self,
        role: EndpointRole,
        source: SessionT | Callable[[], ConnectOptions],
        connect: Callable[[ConnectOptions], SessionT],
        *,
        is_known: bool = False,
    ) -> None:
        self.role = role
        self.session: SessionT | None = None if callable(source) else source
        """The caller's session; None: a new one is opened each time."""
        self.address = ""
        """Its address at the last look-up."""
        if self.session is not None:
            self.address = str(getattr(self.session, "address", "an open session"))
        self._find: Any = source  # not called where it is a session
        self._connect = connect
        self.num_users = 0
        self.is_known = is_known
        """Whether it has ever worked."""
        self.is_gone = False
        """Whether it cannot be dialed again."""
        self.down_since_s: float | None = None
        self.retry_s = 0.0
        self.cause: Exception | None = None
        self._num_failures = 0  # in a row

    def open(self) -> SessionT:
        """Return a session.

        Raises:
            EndpointError: The endpoint cannot be reached.
            HandshakeRefusedError: It supports no generation or edition of this package.
        """
        if self.session is not None:
            return self.session
        connect_options: ConnectOptions = self._find()
        self.address = connect_options.address
        return self._connect(connect_options)

    def release(self, session: SessionT) -> None:
        """Give a session back: close it, unless it is the caller's. Never raises."""
        if self.session is None:
            with contextlib.suppress(RlmeshError):
                session.close()

    def is_due(self, now_s: float) -> bool:
        return not self.is_gone and self.retry_s <= now_s

    def reach(self) -> None:
        self.is_known = True
        self.down_since_s, self._num_failures, self.retry_s = None, 0, 0.0

    def lose(self, cause: Exception, now_s: float, *, is_final: bool) -> bool:
        """Record that it has failed.

        Several users of one endpoint report the same loss; it delays the next try only once.

        Args:
            cause: The error.
            now_s: The time.
            is_final: Whether the endpoint cannot be dialed again.

        Returns:
            Whether this is the first report of this loss.
        """
        is_first = self.down_since_s is None
        if is_first:
            self.down_since_s = now_s
        if is_first or now_s >= self.retry_s:
            delay_s = _FIRST_DELAY_S * 2 ** min(self._num_failures, 10)
            self.retry_s = now_s + min(_LONGEST_DELAY_S, delay_s)
            self._num_failures += 1
        self.cause = cause
        self.is_gone = self.is_gone or is_final
        return is_first


Endpoints = Sequence[RemoteEndpoint[Any]]
"""Those of one role, at least one."""


def next_endpoint(endpoints: Endpoints, now_s: float) -> RemoteEndpoint[Any] | None:
    """Return the endpoint to use next; None where none is due.

    Endpoints that work come before those that failed, then those with the fewest users.
    """
    due = [each for each in endpoints if each.is_due(now_s)]
    return min(due, key=lambda each: (each.down_since_s is not None, each.num_users), default=None)


def next_due_s(endpoints: Endpoints, now_s: float) -> float:
    """Return the earliest retry time; infinity where no endpoint waits for one."""
    waiting = (each.retry_s for each in endpoints if not each.is_gone and each.retry_s > now_s)
    return min(waiting, default=math.inf)


def have_failed(endpoints: Endpoints, now_s: float, patience_s: float) -> bool:
    """Return whether all endpoints are lost for longer than ``patience_s``.

    Where none has ever been reached, one try each is enough: the addresses are wrong, or no
    endpoint was started.
    """
    lost_s = [each.down_since_s for each in endpoints if not each.num_users]
    if len(lost_s) < len(endpoints) or None in lost_s:
        return False
    return not any(each.is_known for each in endpoints) or all(
        each.is_gone or (each.down_since_s is not None and now_s - each.down_since_s >= patience_s)
        for each in endpoints
    )


def as_endpoints(
    role: EndpointRole,
    given: Any,
    token: TokenSource | None,
    connect: Callable[[ConnectOptions], SessionT],
) -> list[RemoteEndpoint[SessionT]]:
    """Return all endpoints that the caller names.

    Args:
        role: Their role.
        given: An address, a ``ConnectOptions``, an open session, a list of those, or a fleet.
        token: Token for plain addresses.
        connect: Opens a session.

    Raises:
        ConfigurationError: ``given`` is none of those, an empty list, or has the same open
            environment twice.
        EndpointError: The fleet's addresses are not known now.
    """
    kind = _KINDS[role]
    if isinstance(given, (list, tuple)):
        found = [each for one in given for each in as_endpoints(role, one, token, connect)]
        if not found:
            raise ConfigurationError(f"no endpoint for the {NAMES[role]}; name at least one")
        opened = [id(each.session) for each in found if each.session is not None]
        if role is EndpointRole.ENV and len({*opened}) < len(opened):
            raise ConfigurationError(
                "the same open RemoteVectorEnv is named twice, and its lanes can run one episode "
                "each; open another one, or name the endpoint's address twice"
            )
        return found
    if isinstance(given, kind):
        return [RemoteEndpoint(role, given, connect)]
    if isinstance(given, (str, ConnectOptions)):
        options = ConnectOptions(given, token) if isinstance(given, str) else given
        return [RemoteEndpoint(role, lambda: options, connect)]
    if is_fleet(given):
        return _of_fleet(role, given, connect)
    raise ConfigurationError(
        f"{type(given).__name__} is no endpoint for the {NAMES[role]}; give an address, an "
        f"open {kind.__name__}, a list of those, or a fleet"
    )


def is_fleet(endpoints: object) -> TypeGuard[EndpointFleet]:
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


def _of_fleet(
    role: EndpointRole, fleet: EndpointFleet, connect: Callable[[ConnectOptions], SessionT]
) -> list[RemoteEndpoint[SessionT]]:
    resolver = resolver_of(fleet)

    def endpoint(index: int) -> RemoteEndpoint[SessionT]:
        token = token_at(fleet, index)

        # Ray hosts the endpoint: where Ray uses TLS, it does, too.
        def find() -> ConnectOptions:
            return ConnectOptions(resolver.address(index), token, RayTls())

        return RemoteEndpoint(role, find, connect, is_known=True)

    return [endpoint(index) for index in range(len(resolver))]


def _has_any(fleet: object, *names: str) -> bool:
    # Without evaluating properties: a fleet would look addresses up, and one may be missing.
    nothing = object()
    return any(inspect.getattr_static(fleet, name, nothing) is not nothing for name in names)


NAMES = {EndpointRole.ENV: "environment", EndpointRole.MODEL: "model"}
_KINDS: dict[EndpointRole, Any] = {
    EndpointRole.ENV: RemoteVectorEnv,
    EndpointRole.MODEL: RemoteModel,
}
