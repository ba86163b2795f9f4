"""When a session uses a direct road, and which."""

import enum
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

_LOG = logging.getLogger(__name__)

_MAX_LOST, _LOSSES_S = 3, 10.0
"""So many roads of a session are replaced at once within so long, or since a Reset."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""After a try in vain; each one after the next in vain is twice as long."""
_ASK_TIMEOUT_S = 5.0
_NO_MEMORY = (
    "its shared memory cannot be had from here (it is on another machine or in another container, "
    "or descriptors are short)"
)
_NO_TCP = (
    "it takes no direct TCP connections (it was told not to, its spaces hold text, it uses TLS, it "
    "listens at a unix socket, or a gateway stands before it)"
)
_AGAIN = " (it is tried again after a pause)"
_warned_addresses: set[tuple[str, str]] = set()
"""Addresses of endpoints to which steps go as messages, and kinds of reasons that were logged."""


class _State(enum.Enum):
    WAITING = enum.auto()
    """For lanes, and for the time to try."""
    DIALING = enum.auto()
    """A thread is at it."""
    OPEN = enum.auto()
    CLOSED = enum.auto()
    """For good."""


class DirectConnector:
    """Opens a road for a session as soon as there can be one, and again after it was lost.

    Over shared memory it is there for the next step. TCP connections are opened by a thread, unless
    they are insisted on, so that no step waits for them. After a try in vain, and where roads are
    lost again and again, it is tried again after a pause.

    Args:
        offered: The endpoint's capabilities.
        session_id: What the handshake told.
        contract: The session's.
        timeout_ms: What a step may take.
        address: The endpoint's.
        transport: See ``RemoteEnv``.
        ask: Asks the endpoint for a ticket, given how long that may take.
        spin: See ``RemoteEnv``.

    Raises:
        ConfigurationError: What is insisted on cannot be had.
    """

    def __init__(  # noqa: PLR0913  # what a road is opened with
        self,
        offered: Mapping[str, str],
        session_id: str,
        contract: EnvContract,
        timeout_ms: int,
        address: str,
        *,
        transport: str,
        ask: Callable[[float], tcp.Ticket],
        spin: bool | None,
    ) -> None:
        wanted = allowed_transports(transport)
        self._session_id = session_id
        self._contract = contract
        self._timeout_ms = timeout_ms
        self._address = address
        self._ask = ask
        self._spin = spin
        self._name = offered.get(capabilities.SHARED_MEMORY, "") if SHARED_MEMORY in wanted else ""
        self._host = parse_address(address).host
        can_dial = TCP in wanted and tcp.IS_SUPPORTED and self._host
        self._port = _port(offered.get(capabilities.DIRECT_TCP, "")) if can_dial else 0
        self._is_required = len(wanted) == 1
        if self._is_required:
            _require(transport, self._name, self._port, address)
        self._state = _State.WAITING
        self._has_lanes = False
        self._direct: DirectConnection | None = None
        self._due_s = 0.0
        self._why_none = ""
        self._num_failed = 0
        """Tries in vain since the last road."""
        self._lost_s: deque[float] = deque(maxlen=_MAX_LOST)
        # Of changes of the state, of which some are the dialing thread's, and some anybody's.
        self._lock = threading.Lock()
        if not (self._name or self._port):
            self._state = _State.CLOSED
            if wanted and session_id:
                self._tell(logging.INFO, f"it offers no shared memory, and {_NO_TCP}", "offer")

    @property
    def is_open(self) -> bool:
        """Whether there is a road just now."""
        return self._direct is not None and self._direct.is_open

    @property
    def transport(self) -> str:
        """What steps travel by now: a value of ``RemoteEnv``'s option."""
        return self._direct.transport if self._direct is not None and self.is_open else "grpc"

    def on_lanes_reset(self) -> None:
        """Note that the session has a worker, and perhaps another one than before."""
        if self._direct is not None and not self._direct.is_open:
            self._lose()
        self._has_lanes = True
        self._lost_s.clear()
        # Episodes may be short, and what was tried in vain is not tried with each of them.
        if self._is_required or not self._num_failed:
            self._due_s = 0.0

    def on_lanes_lost(self) -> None:
        """Note that the lanes want a reset: the endpoint says so, and gives no road meanwhile."""
        self._has_lanes = False

    def connection(self) -> DirectConnection | None:
        """Return a road to use now; None: there is none.

        Raises:
            EndpointLostError: There must be one, and the endpoint has not given it.
        """
        direct = self._direct
        if direct is not None:
            if direct.is_open:
                return direct
            self._lose()
        if self._state is _State.WAITING and self._has_lanes and time.monotonic() >= self._due_s:
            self._try()
        if self._is_required and self._state is _State.WAITING and self._has_lanes:
            remedy = "leave transport out to use what there is"
            raise EndpointLostError(f"{self._why_none}; {remedy}", self._address)
        return self._direct

    def _lose(self) -> None:
        """Note that the road has ended. Where the lanes were lost with it, that is no wonder."""
        now_s = time.monotonic()
        with self._lock:
            if self._state is not _State.OPEN:
                return
            self._state, self._direct, self._due_s = _State.WAITING, None, now_s
            if not self._has_lanes:
                return
            if len(self._lost_s) == _MAX_LOST:
                self._due_s = max(now_s, self._lost_s[0] + _LOSSES_S)
            self._lost_s.append(now_s)
        if self._due_s > now_s:
            self._why_none = (
                f"the direct connection was lost again and again ({_MAX_LOST + 1} times)"
            )
            self._tell(logging.WARNING, f"{self._why_none}{_AGAIN}", "lost")

    def _try(self) -> None:
        if self._name:
            direct = DirectConnection.open_shared_memory(
                self._name,
                self._session_id,
                self._timeout_ms,
                self._contract,
                self._spin,
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
                if self._state is not _State.WAITING:
                    return
                self._state = _State.DIALING
            try:
                threading.Thread(target=self._open_tcp, name="rlmesh-ray-dial", daemon=True).start()
            except RuntimeError as error:
                self._failed(f"no direct TCP connection: {error}")

    def _open_tcp(self) -> None:
        try:
            direct = DirectConnection.open_tcp(
                self._host,
                self._port,
                self._ask(_ASK_TIMEOUT_S),
                self._timeout_ms,
                self._contract,
                self._spin,
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, steps can go as messages
            is_known = isinstance(error, (OSError, RlmeshError))
            why = str(error) if is_known else f"{type(error).__name__}: {error}"
            self._failed(f"no direct TCP connection to {self._host}, port {self._port}: {why}")
        else:
            self._opened(direct)

    def _opened(self, direct: DirectConnection) -> None:
        with self._lock:
            if self._state is not _State.CLOSED:
                self._state, self._direct = _State.OPEN, direct
                self._why_none, self._num_failed = "", 0
                return
        direct.close()

    def _failed(self, why: str) -> None:
        with self._lock:
            if self._state is _State.CLOSED:
                return
            pause_s = min(_FIRST_PAUSE_S * 2.0**self._num_failed, _LONGEST_PAUSE_S)
            self._num_failed = min(self._num_failed + 1, 10)
            self._due_s = time.monotonic() + pause_s
            self._state, self._why_none = _State.WAITING, why
        self._tell(logging.WARNING, f"{why}{_AGAIN}", "failed")

    def _tell(self, level: int, why: str, kind: str) -> None:
        """Log why steps are messages: of each address and kind of reason, once."""
        if not self._is_required and (self._address, kind) not in _warned_addresses:
            _warned_addresses.add((self._address, kind))
            _LOG.log(
                level, "steps go to %s as gRPC messages, which are slower: %s", self._address, why
            )

    def close(self) -> None:
        """End the road. Idempotent."""
        with self._lock:
            self._state = _State.CLOSED
            direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()


def _port(text: str) -> int:
    """Return the port that a capability tells; 0: it tells none."""
    is_number = text.isdecimal() and text.isascii() and len(text) <= len("65535")
    return int(text) if is_number and int(text) < 2**16 else 0


def _require(transport: str, name: str, port: int, address: str) -> None:
    if transport == TCP:
        if not port:
            raise ConfigurationError(
                f"transport='tcp' at {address}: {_NO_TCP}; leave transport out to use what it has"
            )
        return
    if not name:
        raise ConfigurationError(
            f"{address} offers no shared memory: it was told not to, its spaces hold text, or it "
            "does not run on Linux; leave transport out to use what it has"
        )
    if not is_reachable(name):
        raise ConfigurationError(
            f"{address} is in another container or on another machine, and shares no memory with "
            "this process; leave transport out to use what it has"
        )
