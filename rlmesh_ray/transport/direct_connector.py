"""DirectConnector: opens and reopens the direct connection of a client's session."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from rlmesh_ray.errors import ConfigurationError, EndpointLostError, RlmeshError
from rlmesh_ray.options import SHARED_MEMORY, TCP, allowed_transports
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.transport import tcp
from rlmesh_ray.transport.direct_connection import DirectConnection, is_reachable
from rlmesh_ray.transport.tcp import Ticket

_LOG = logging.getLogger(__name__)

_MAX_LOST, LOSSES_S = 3, 10.0
"""Lost connections that are replaced at once within this time, or since a Reset."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Pause after a failed attempt; each further failure doubles it."""
_TICKET_TIMEOUT_S = 5.0
_ATTEMPTS, _ATTEMPT_PAUSE_S = 3, 0.5
"""How often an endpoint is asked that is too slow, where no other transport may be used."""
_NO_MEMORY = (
    "its shared memory is not accessible from here (it is on another machine or in another "
    "container, or descriptors are short)"
)
_NO_TCP = (
    "it accepts no direct TCP connections (they are disabled, its spaces have text, it uses TLS, "
    "it listens on a unix socket, or it is behind a gateway)"
)
_AGAIN = " (it is tried again after a pause)"
_warned_addresses: set[tuple[str, str]] = set()
"""Addresses and kinds of reasons for which the log says that steps are gRPC messages."""


class DirectConnector:
    """Opens a session's direct connection as soon as possible, and again after its loss.

    A shared-memory connection is ready for the next step. TCP connections are opened in a thread,
    so that no step waits, unless ``transport`` requires them. After a failed attempt, and after
    repeated losses, the next attempt follows after a pause.

    Args:
        offered: The endpoint's capabilities.
        session_id: The session id from the handshake.
        contract: The session's contract.
        timeout_ms: Timeout of a step.
        address: The endpoint's address.
        transport: See ``RemoteEnv``.
        request_ticket: Requests a ticket from the endpoint, with a timeout in seconds.

    Raises:
        ConfigurationError: The required transport is not available.
    """

    def __init__(
        self,
        offered: Mapping[str, str],
        session_id: str,
        contract: EnvContract,
        timeout_ms: int,
        address: str,
        *,
        transport: str,
        request_ticket: Callable[[float], Ticket],
    ) -> None:
        wanted = allowed_transports(transport)
        self._session_id = session_id
        self._contract = contract
        self._timeout_ms = timeout_ms
        self._address = address
        self._request_ticket = request_ticket
        self._name = offered.get(capabilities.SHARED_MEMORY, "") if SHARED_MEMORY in wanted else ""
        self._host = parse_address(address).host
        can_dial = TCP in wanted and tcp.IS_SUPPORTED and self._host
        self._port = _port(offered.get(capabilities.DIRECT_TCP, "")) if can_dial else 0
        self._is_required = len(wanted) == 1
        if self._is_required:
            _require(transport, self._name, self._port, address)
        self._is_closed = self._is_dialing = False
        self._has_lanes = False
        self._direct: DirectConnection | None = None
        self._due_s = 0.0
        self._why_none = ""
        self._num_failed = 0
        """Failed attempts since the last connection."""
        self._lost_s: deque[float] = deque(maxlen=_MAX_LOST)
        # Guards the state, which the connecting thread and any caller change.
        self._lock = threading.Lock()
        if not (self._name or self._port):
            self._is_closed = True
            if wanted and session_id:
                self._log_once(logging.INFO, f"it offers no shared memory, and {_NO_TCP}", "offer")

    @property
    def _is_waiting(self) -> bool:
        """Whether the next attempt waits for a Reset or the end of a pause."""
        return not (self._is_closed or self._is_dialing) and self._direct is None

    @property
    def is_open(self) -> bool:
        return self._direct is not None and self._direct.is_open

    @property
    def transport(self) -> str:
        """Present transport of steps: ``"shared_memory"``, ``"tcp"`` or ``"grpc"``."""
        return self._direct.transport if self._direct is not None and self.is_open else "grpc"

    def on_lanes_reset(self) -> None:
        """Note a successful Reset: the session has a worker, perhaps a new one."""
        if self._direct is not None and not self._direct.is_open:
            self._lose()
        self._has_lanes = True
        self._lost_s.clear()
        # Not after failures: episodes may be short, and each would cost an attempt.
        if self._is_required or not self._num_failed:
            self._due_s = 0.0

    def on_lanes_lost(self) -> None:
        """Note that the lanes need a Reset, before which the endpoint opens no connection."""
        self._has_lanes = False

    def connection(self) -> DirectConnection | None:
        """Return the direct connection, which may be opened for it; None: use the Join stream.

        Raises:
            EndpointLostError: The transport is required, and the connection cannot be opened.
        """
        direct = self._direct
        if direct is not None:
            if direct.is_open:
                return direct
            self._lose()
        is_due = self._has_lanes and not self._is_closed and time.monotonic() >= self._due_s
        if is_due and self._is_waiting:
            self._try()
        if self._is_required and self._is_waiting and self._has_lanes:
            remedy = "leave transport out to use any transport"
            raise EndpointLostError(f"{self._why_none}; {remedy}", self._address)
        return self._direct

    def _lose(self) -> None:
        """Note the loss of the connection; it counts unless the lanes were lost with it."""
        now_s = time.monotonic()
        with self._lock:
            if self._direct is None:
                return
            self._direct, self._due_s = None, now_s
            if not self._has_lanes:
                return
            if len(self._lost_s) == _MAX_LOST:
                self._due_s = max(now_s, self._lost_s[0] + LOSSES_S)
            self._lost_s.append(now_s)
        if self._due_s > now_s:
            self._why_none = (
                f"the direct connection was lost again and again ({_MAX_LOST + 1} times)"
            )
            self._log_once(logging.WARNING, f"{self._why_none}{_AGAIN}", "lost")

    def _try(self) -> None:
        if self._name:
            direct = DirectConnection.open_shared_memory(
                self._name,
                self._session_id,
                self._timeout_ms,
                self._contract,
            )
            if direct is not None:
                self._opened(direct)
                return
        if not self._port:
            self._failed(_NO_MEMORY if self._is_required else f"{_NO_MEMORY}, and {_NO_TCP}")
        elif self._is_required:
            self._open_tcp()
        else:
            with self._lock:
                if not self._is_waiting:
                    return
                self._is_dialing = True  # in a thread
            try:
                threading.Thread(target=self._open_tcp, name="rlmesh-ray-dial", daemon=True).start()
            except RuntimeError as error:
                self._failed(f"no direct TCP connection: {error}")

    def _open_tcp(self) -> None:
        try:
            direct = self._dial(_ATTEMPTS if self._is_required else 1)
        except Exception as error:  # noqa: BLE001  # after any error steps use the Join stream
            is_known = isinstance(error, (OSError, RlmeshError))
            why = str(error) if is_known else f"{type(error).__name__}: {error}"
            self._failed(f"no direct TCP connection to {self._host}, port {self._port}: {why}")
        else:
            self._opened(direct)

    def _dial(self, num_attempts: int) -> DirectConnection:
        """Return a TCP connection; an endpoint that was too slow is asked again.

        Args:
            num_attempts: How often it is asked.

        Raises:
            OSError: It cannot be opened.
            RlmeshError: The endpoint issues no ticket.
        """
        try:
            return DirectConnection.open_tcp(
                self._host,
                self._port,
                self._request_ticket(_TICKET_TIMEOUT_S),
                self._timeout_ms,
                self._contract,
            )
        except ConnectionAbortedError:
            if num_attempts == 1:
                raise
            time.sleep(_ATTEMPT_PAUSE_S)
            return self._dial(num_attempts - 1)

    def _opened(self, direct: DirectConnection) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_dialing, self._direct = False, direct
                self._why_none, self._num_failed = "", 0
                return
        direct.close()

    def _failed(self, why: str) -> None:
        with self._lock:
            if self._is_closed:
                return
            pause_s = min(_FIRST_PAUSE_S * 2.0**self._num_failed, _LONGEST_PAUSE_S)
            self._num_failed = min(self._num_failed + 1, 10)
            self._due_s = time.monotonic() + pause_s
            self._is_dialing, self._why_none = False, why
        self._log_once(logging.WARNING, f"{why}{_AGAIN}", "failed")

    def _log_once(self, level: int, why: str, kind: str) -> None:
        """Log why steps use the Join stream, once for each address and kind of reason."""
        if not self._is_required and (self._address, kind) not in _warned_addresses:
            _warned_addresses.add((self._address, kind))
            _LOG.log(
                level, "steps go to %s as gRPC messages, which are slower: %s", self._address, why
            )

    def close(self) -> None:
        """Close the connection, and open no other. Idempotent."""
        with self._lock:
            self._is_closed = True
            direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()


def _port(text: str) -> int:
    """Return the port in a capability's value; 0 where it is none."""
    is_number = text.isdecimal() and text.isascii() and len(text) <= len("65535")
    return int(text) if is_number and int(text) < 2**16 else 0


def _require(transport: str, name: str, port: int, address: str) -> None:
    if transport == TCP:
        if not port:
            raise ConfigurationError(
                f"transport='tcp' at {address}: {_NO_TCP}; leave transport out to use another"
            )
        return
    if not name:
        raise ConfigurationError(
            f"{address} offers no shared memory: it is disabled, its spaces have text, or it "
            "does not run on Linux; leave transport out to use another"
        )
    if not is_reachable(name):
        raise ConfigurationError(
            f"{address} is in another container or on another machine, and shares no memory with "
            "this process; leave transport out to use another"
        )
