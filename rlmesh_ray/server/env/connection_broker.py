"""ConnectionBroker: the endpoint's listeners for direct connections, which lead clients to workers.

Shared memory: gRPC cannot pass descriptors, so the endpoint listens on a unix socket, too. It is in
the abstract namespace: it leaves no file, and only processes of this network namespace reach it. A
client that receives descriptors there is on this machine. It authenticates by its session id, which
it has from its handshake, and which cannot be guessed.

TCP: the endpoint listens on another port, at its option ``data_address``. A client authenticates by
a ticket (``tcp.Ticket``) that it has requested by gRPC.
"""

import asyncio
import contextlib
import errno
import hmac
import logging
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from rlmesh_ray.dialects.registry import client_dialect
from rlmesh_ray.envs.worker_process import DirectHandle
from rlmesh_ray.errors import AddressError, ConfigurationError, ListenError
from rlmesh_ray.options import TCP, allowed_transports
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.address import Address, parse_address
from rlmesh_ray.server.endpoint.bind_policy import check_exposure, is_wildcard
from rlmesh_ray.server.env.env_options import EnvServerOptions
from rlmesh_ray.server.env.lane_session import Sessions
from rlmesh_ray.transport import direct_sockets, tcp
from rlmesh_ray.transport.tcp import PROOF_BYTES, TicketIssuer

_LOG = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 5.0
_MAX_UNAUTHENTICATED = 16
"""Most unauthenticated connections; a client authenticates immediately."""
_BACKLOG = 64
_PAUSE_S = 1.0
_CREDENTIALS = struct.Struct("3i")
"""Linux's ucred of a peer: its process, user and group."""


Authenticate = Callable[[socket.socket, Callable[[], object]], Awaitable[None]]
"""Handles a new connection, which is closed afterwards; calls the second argument, in the same
task, once the peer is authenticated."""


class ConnectionBroker:
    """Opens direct connections for the clients of open sessions. For the serving loop.

    Args:
        has_shared_memory: Whether the endpoint offers the shared-memory transport.
        sockets: Bound sockets of the direct TCP transport, with the same port on several addresses;
            empty: it is not offered.
        port: Their advertised port, which differs where it is mapped.
        endpoint: Id and incarnation of the endpoint.
    """

    def __init__(
        self,
        *,
        has_shared_memory: bool,
        sockets: Sequence[socket.socket] = (),
        port: int = 0,
        endpoint: str = "",
    ) -> None:
        self._sockets = sockets
        self.sessions = Sessions()
        """The open sessions of the endpoint."""
        self.tickets = TicketIssuer(endpoint)
        self._listeners: list[AuthenticatingListener] = []
        self.offered_capabilities: dict[str, str] = {}
        if has_shared_memory:
            name = secrets.token_hex(direct_sockets.SOCKET_NAME_LENGTH // 2)
            self.offered_capabilities |= {
                capabilities.SHARED_MEMORY: name,
                capabilities.DIRECT_RENDER: "",
            }
        if sockets:
            self.offered_capabilities[capabilities.DIRECT_TCP] = str(port)

    async def start(self) -> None:
        if name := self.offered_capabilities.get(capabilities.SHARED_MEMORY):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(direct_sockets.SOCKET_PREFIX + name.encode())
            self._listeners.append(
                AuthenticatingListener(listener, self._accept_local, "shared memory")
            )
        for each in self._sockets:
            self._listeners.append(AuthenticatingListener(each, self._accept_tcp, "direct TCP"))
            _LOG.info(
                "listening for direct TCP connections on %s, port %d", *each.getsockname()[:2]
            )

    def close_listener(self) -> None:
        """Close the TCP sockets; instead of ``start``, or after it."""
        for each in self._sockets:
            each.close()

    async def stop(self) -> None:
        """Stop listening, and close all direct connections after their steps. Idempotent."""
        for listener in self._listeners:
            listener.stop()
        sessions = self.sessions.by_name.values()
        await asyncio.gather(*(session.close_direct() for session in sessions))

    async def _open_direct(
        self, session_id: str, timeout_ms: int, connection: socket.socket | None
    ) -> DirectHandle | None:
        session = self.sessions.by_id.get(session_id)
        return None if session is None else await session.open_direct(timeout_ms, connection)

    async def _accept_local(
        self, client: socket.socket, mark_authenticated: Callable[[], object]
    ) -> None:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            data = await read_exactly(client, direct_sockets.HELLO.size)
        mark_authenticated()
        session_id, timeout_ms = direct_sockets.HELLO.unpack(data)
        direct = await self._open_direct(session_id.decode("ascii", "replace"), timeout_ms, None)
        if direct is None:
            client.send(direct_sockets.REFUSED)
            return
        try:
            direct.send_descriptors(client, direct_sockets.ACCEPTED)
        except OSError:
            direct.disconnect()
            raise

    async def _accept_tcp(
        self, client: socket.socket, mark_authenticated: Callable[[], object]
    ) -> None:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            hello = await read_exactly(client, tcp.HELLO.size)
            protocol, ticket_id, client_nonce = tcp.HELLO.unpack(hello)
            issued = self.tickets.take(ticket_id)
            if protocol != tcp.PROTOCOL or issued is None:
                return
            mark_authenticated()
            nonce = secrets.token_bytes(tcp.NONCE_BYTES)
            client.send(nonce + issued.ticket.proof(b"endpoint", client_nonce, nonce))
            proof = await read_exactly(client, PROOF_BYTES)
        if not hmac.compare_digest(proof, issued.ticket.proof(b"client", client_nonce, nonce)):
            return
        client.setblocking(True)  # the worker's duplicate shares the flag
        connection = client.dup()
        direct = None
        try:
            direct = await self._open_direct(issued.session_id, issued.timeout_ms, connection)
            if direct is not None:
                direct.send(tcp.ACCEPTED)
        except OSError:
            if direct is not None:
                direct.disconnect()
            raise
        finally:
            if direct is None:
                connection.close()


class AuthenticatingListener:
    """Accepts connections, of which only a few may be unauthenticated. For the serving loop.

    Above the limit a new connection replaces the oldest unauthenticated one, but a connection of
    another local user never replaces one of the server's own user. It owns the bound ``listener``.
    """

    def __init__(self, listener: socket.socket, authenticate: Authenticate, purpose: str) -> None:
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._authenticate = authenticate
        self._purpose = purpose
        self._handshakes: set[asyncio.Task[None]] = set()
        # The unauthenticated ones, the oldest first; True: of another local user.
        self._unauthenticated: dict[asyncio.Task[None], bool] = {}
        self._serving = asyncio.ensure_future(self._serve(listener))
        self._serving.add_done_callback(lambda _: listener.close())

    def stop(self) -> None:
        """Stop listening; authenticated connections are still handled. Idempotent."""
        for task in (self._serving, *self._unauthenticated):
            task.cancel()

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, perhaps: sessions use the Join stream
                _LOG.warning("%s cannot be opened for clients: %s", self._purpose, error)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._admit(client)
            await asyncio.sleep(0)  # a flood of connections must not starve the loop

    def _admit(self, client: socket.socket) -> None:
        is_other_user = client.family == socket.AF_UNIX and peer_uid(client) not in (
            os.geteuid(),
            0,
        )
        if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
            other_users = (task for task, is_other in self._unauthenticated.items() if is_other)
            oldest = next(other_users, None)
            if oldest is None and not is_other_user:
                oldest = next(iter(self._unauthenticated))
            if oldest is None:
                client.close()
                return
            del self._unauthenticated[oldest]
            oldest.cancel()
        task = asyncio.ensure_future(self._run_handshake(client))
        self._handshakes.add(task)
        self._unauthenticated[task] = is_other_user

        def forget(_: object) -> None:  # a callback: the task may be cancelled before it starts
            self._handshakes.discard(task)
            self._unauthenticated.pop(task, None)
            client.close()

        task.add_done_callback(forget)

    async def _run_handshake(self, client: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        client.setblocking(False)
        # A peer that sends nothing, or hangs up, affects no other connection.
        with contextlib.suppress(OSError, TimeoutError):
            await self._authenticate(client, lambda: self._unauthenticated.pop(task, None))


def peer_uid(client: socket.socket) -> int:
    """Return the user id of the peer's process; -1 where the kernel does not report it."""
    try:
        ucred = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (OSError, AttributeError):
        return -1
    return int(_CREDENTIALS.unpack(ucred)[1])


async def read_exactly(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await asyncio.get_running_loop().sock_recv(client, size - len(data))
        if not more:
            raise ConnectionResetError("the client has hung up")
        data += more
    return data


# --- the address of direct TCP connections ------------------------------------------------

_LOOPBACK = (
    (socket.AF_INET, ("127.0.0.1",)),
    (socket.AF_INET6, ("::1",)),
)
_EVERY_INTERFACE = ((socket.AF_INET6, ("::",)), (socket.AF_INET, ("0.0.0.0",)))
_NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
_MOST_PORTS = 20
"""How many ports of the system's choice are tried until one is free at every address."""

_Place = tuple[socket.AddressFamily, tuple[Any, ...]]
"""Address family, and the address of ``socket.bind`` without its port, the second item."""


class DataAddress(NamedTuple):
    """Where an endpoint listens for direct TCP connections."""

    listen: Address
    advertised_port: int | None = None
    """The port that clients dial; None: the same."""


def checked_data_address(
    address: str, wanted: str | None, given: EnvServerOptions
) -> DataAddress | None:
    """Return where to listen for direct TCP connections; None: nowhere.

    Args:
        address: Where the endpoint listens.
        wanted: The value of ``data_address``.
        given: All options of the endpoint.

    Raises:
        AddressError: ``data_address`` is not ``HOST:PORT``, or needs a token.
        ConfigurationError: Such connections are not possible, or the advertised port is none.
    """
    place, transports = parse_address(address), allowed_transports(given["transport"])
    obstacle = _obstacle_to_tcp(place, transports, has_tls=given["tls"] is not None)
    if obstacle and wanted is not None:
        raise ConfigurationError(
            f"data_address (--data-address) is for steps over TCP, and {obstacle}; leave it out"
        )
    if obstacle and transports == {TCP}:
        raise ConfigurationError(f'transport="tcp" is not possible: {obstacle}; leave it out')
    if wanted is None:
        return None if obstacle else DataAddress(Address(place.host, 0))
    parsed, port = _parsed_data_address(wanted, place)
    check_exposure(parsed, given["token"], "data_address (--data-address) ")
    return DataAddress(parsed, port)


def _parsed_data_address(data_address: str, address: Address) -> tuple[Address, int | None]:
    """Return the address in ``data_address``, and the port after it that clients dial."""
    form = f"data_address={data_address!r} must be HOST:PORT or HOST:PORT/ADVERTISED"
    if client_dialect(data_address) is not None or data_address.startswith("unix:"):
        raise AddressError(form)
    listen, slash, advertised = data_address.partition("/")
    if slash and not (advertised.isdecimal() and 0 < int(advertised) < 2**16):
        raise AddressError(f"{form}, and ADVERTISED a port, 1 to 65535")
    parsed = parse_address(listen)
    is_same_host = _meet(parsed, address)
    if is_same_host and parsed.port and parsed.port == address.port:
        raise AddressError(f"data_address={data_address!r} must be another port than address")
    if not is_same_host:
        _LOG.warning(
            "clients that find the endpoint at %s will not find data_address %s (--data-address): "
            "they dial the port of the latter at the host of the former",
            address,
            parsed,
        )
    return parsed, int(advertised) if slash else None


def _obstacle_to_tcp(address: Address, transports: frozenset[str], *, has_tls: bool) -> str:
    if TCP not in transports:
        return "transport takes none"
    if has_tls:
        return "there is none with TLS"
    if address.path:
        return "there is none at a unix socket"
    return "" if tcp.IS_SUPPORTED else "this system cannot"


def bound_sockets(address: Address) -> tuple[socket.socket, ...]:
    """Return sockets that listen where gRPC would listen at ``address``, all at the same port.

    That is every address of a name; for ``0.0.0.0`` and ``[::]`` every interface, IPv4 and IPv6.

    Raises:
        ListenError: It is in use, or not this machine's.
    """
    try:
        num_left = 1 if address.port else _MOST_PORTS
        places = _places(address)
        while True:
            num_left -= 1
            try:
                return _bound(places, address.port, is_one_enough=is_wildcard(address))
            except OSError as error:
                # A port that is free at the first address may be taken at the second.
                if error.errno != errno.EADDRINUSE or not num_left:
                    raise
    except OSError as error:
        raise ListenError(
            f"cannot listen at {address} for direct TCP connections: {error}; name another "
            "data_address (--data-address)"
        ) from error


def _bound(
    places: Sequence[_Place], port: int, *, is_one_enough: bool
) -> tuple[socket.socket, ...]:
    bound: list[socket.socket] = []
    missing = OSError("it has no address")
    with contextlib.ExitStack() as failing:
        for family, (host, *scope) in places:
            is_dual = host == "::" and socket.has_dualstack_ipv6()
            try:
                listener = socket.create_server(
                    (host, port, *scope), family=family, dualstack_ipv6=is_dual
                )
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error  # a machine without IPv6, for instance
                continue
            bound.append(failing.enter_context(listener))
            if is_one_enough:
                break
            port = bound[0].getsockname()[1]
        if not bound:
            raise missing
        failing.pop_all()
    return tuple(bound)


def _places(address: Address) -> Sequence[_Place]:
    """Return where to listen for ``address``.

    Raises:
        OSError: Its host name is not known.
    """
    if is_wildcard(address):
        return _EVERY_INTERFACE
    if address.host == "localhost":  # as gRPC does, which ignores this machine's hosts file
        return _LOOPBACK
    found = socket.getaddrinfo(address.host, 0, type=socket.SOCK_STREAM)
    return [(family, (where[0], *where[2:])) for family, _, _, _, where in found]


def _meet(one: Address, other: Address) -> bool:
    """Return whether ``one`` and ``other`` share an IP address, as far as that is known."""
    if is_wildcard(one) or is_wildcard(other) or one.host == other.host:
        return True
    try:
        one_hosts, other_hosts = ({where[0] for _, where in _places(each)} for each in (one, other))
    except OSError:  # listening there will fail, and say why
        return True
    return bool(one_hosts & other_hosts)
