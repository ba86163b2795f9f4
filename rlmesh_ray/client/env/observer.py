"""EndpointObserver: statistics of an endpoint, its sessions, and pictures of their lanes."""

import os
from collections.abc import Callable
from typing import Self, TypeVar

from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.client.channel import ConnectOptions, status_of
from rlmesh_ray.client.fork_guard import forked
from rlmesh_ray.errors import (
    CodecError,
    ConfigurationError,
    EndpointClosedError,
    EndpointError,
    EndpointLostError,
    RemoteProtocolError,
)
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.options import as_int, require_seconds
from rlmesh_ray.wire import observe_v1 as wire
from rlmesh_ray.wire.observe_v1 import EndpointStatistics, ObservedSession

__all__ = ["EndpointObserver", "EndpointStatistics", "ObservedSession"]

T = TypeVar("T")

_NONE_HERE = (
    "sessions cannot be observed there: its operator has turned that off (--no-observers), its "
    "version is too old, or it serves no environment"
)


class EndpointObserver:
    """Observes an endpoint: of an environment also its sessions; a picture delays its session.

    Behind a gateway it observes those of one endpoint, which the gateway chooses. Usable as a
    context manager; to be used in one thread at a time.

    Args:
        address: Where the endpoint listens.
        token: The token to send, of any role: a ``probe``'s is enough.
        tls: Files for TLS.
        timeout_s: How long to wait for an answer. A picture waits for a step that is in progress,
            and with steps over TCP until the client has read a large answer.

    Raises:
        AddressError: The address is malformed.
        ConfigurationError: ``timeout_s`` is not a time, or a file for TLS cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        token: TokenSource | None = None,
        tls: ClientTlsSource | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        require_seconds("timeout_s", timeout_s)
        self._connect_options = ConnectOptions(address, token, tls, timeout_s)
        self._pid = os.getpid()
        self._channel = self._connect_options.open()
        self._is_closed = False

    def sessions(self) -> tuple[ObservedSession, ...]:
        """Return the open sessions of this package's and rlmesh's protocols, the oldest first.

        Raises:
            CapacityError: The endpoint is asked too often.
            ConfigurationError: It does not allow observers.
            EndpointClosedError: This observer is closed.
            EndpointError: It does not answer, or refuses; the message says why.
        """
        return self._ask(wire.LIST, b"", wire.parse_sessions, "list of sessions")

    def render(self, session: str, lane: int = 0) -> bytes:
        """Return a picture of a lane between two of its steps, as PNG.

        The session's next step waits for it.

        Raises:
            CapacityError: The session is asked too often, or by another observer just now.
            CodecError: There is no such lane in any session.
            EndpointLostError: No such session is open.
            ConfigurationError: The endpoint does not allow observers, or an argument has a wrong
                type.
            EndpointClosedError: This observer is closed.
            EndpointError: There is no picture, or no answer; the message says why.
        """
        if not isinstance(session, str):
            raise ConfigurationError(
                f"session={session!r:.40} must be the name of a session, from sessions()"
            )
        data = wire.pack_render_request(session, as_int("lane", lane))
        return self._ask(wire.RENDER, data, wire.parse_png, "picture")

    def statistics(self) -> tuple[EndpointStatistics, ...]:
        """Return the statistics of the endpoint; of a pool's registrar, of all its endpoints.

        Policies' endpoints have them, too. At a registrar the token is ``registration_token`` of
        the pool's secret. It raises the same errors as ``sessions``.
        """
        return self._ask(wire.STATISTICS, b"", wire.parse_statistics, "statistics")

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if os.getpid() == self._pid:
            self._is_closed = True
            self._channel.close()

    def _ask(self, path: str, data: bytes, parse: Callable[[bytes], T], what: str) -> T:
        connect_options = self._connect_options
        if os.getpid() != self._pid:
            raise forked(self._pid, connect_options.address)
        if self._is_closed:
            raise EndpointClosedError(
                "this observer is closed; make another one", connect_options.address
            )
        try:
            return parse(connect_options.call(self._channel, path, data))
        except CodecError as error:
            raise RemoteProtocolError(f"the answer is no {what}: {error}") from error
        except EndpointError as error:
            raise _explained(error, connect_options.address) from error.__cause__

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _explained(error: EndpointError, address: str) -> EndpointError | ConfigurationError:
    code, details = status_of(error)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ConfigurationError(f"{address}: {_NONE_HERE}")
    if code is grpc.StatusCode.NOT_FOUND:
        return EndpointLostError(details, address)
    if code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
        return EndpointError(details, address)
    return error
