"""When a session uses a direct road, and which."""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from rlmesh_ray.errors import ConfigurationError, EndpointLostError, RlmeshError
from rlmesh_ray.options import SHARED_MEMORY, TCP, checked_transport
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.transport import tcp
from rlmesh_ray.transport.direct_client import DirectClient, is_within_reach

_LOG = logging.getLogger(__name__)

_MOST_LOST = 3
"""So many roads of a session may be lost between two Resets; then it goes on with messages."""
_DIAL_PAUSE_S = 10.0
"""So long a session that has tried to connect in vain does not try again."""
_ASK_TIMEOUT_S = 5.0
_told: set[str] = set()
"""Addresses of endpoints that take no direct connection, of which the log has told."""


class RoadKeeper:
    """Opens a road for a session as soon as there can be one, and a few times after it was lost.

    Over shared memory it is there for the next step. TCP connections are opened by a thread, unless
    they are insisted on, so that no step waits for them.

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
        wanted = checked_transport(transport)
        self._session_id = session_id
        self._contract = contract
        self._timeout_ms = timeout_ms
        self._address = address
        self._ask = ask
        self._spin = spin
        self._name = offered.get(capabilities.SHARED_MEMORY, "") if SHARED_MEMORY in wanted else ""
        can_dial = TCP in wanted and tcp.IS_POSSIBLE
        self._port = _port(offered.get(capabilities.DIRECT_TCP, "")) if can_dial else 0
        self._host = parse_address(address).host
        self._is_required = len(wanted) == 1
        if self._is_required:
            _require(transport, self._name, self._port, address)
        self._is_wanted = bool(self._name or (self._port and self._host))
        self._road: DirectClient | None = None
        self._is_worth_a_try = self._was_reset = False
        self._num_lost = 0
        self._dial_again_s = 0.0
        self._obstacle = ""
        # What the thread that dials leaves here.
        self._dialed: DirectClient | None = None
        self._dialing: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether there is a road just now."""
        return self._road is not None and self._road.is_open

    @property
    def transport(self) -> str:
        """What steps travel by now: a value of ``RemoteEnv``'s option."""
        return self._road.transport if self._road is not None and self.is_open else "grpc"

    def lanes_were_reset(self) -> None:
        """Note that the session has a worker, and perhaps another one than before."""
        self._is_worth_a_try = self._is_wanted
        self._was_reset = True
        self._num_lost = 0

    def lanes_were_lost(self) -> None:
        """Note that the lanes want a reset: the endpoint says so, and gives no road meanwhile."""
        self._is_worth_a_try = self._was_reset = False

    def road(self) -> DirectClient | None:
        """Return a road to use now; None: there is none.

        Raises:
            EndpointLostError: There must be one, and the endpoint has not given it.
        """
        if self._road is not None and not self._road.is_open:
            self._road = None
            self._num_lost += 1
            self._is_worth_a_try = self._is_wanted and self._num_lost <= _MOST_LOST
        if self._road is None and self._dialed is not None:
            with self._lock:
                self._road, self._dialed = self._dialed, None
            self._is_worth_a_try = False
        if self._road is None and self._is_worth_a_try:
            self._is_worth_a_try = False
            self._road = self._open()
        if self._road is None and self._is_required and self._was_reset and self._is_wanted:
            why = self._obstacle or f"the way of steps was lost ({self._num_lost} times)"
            remedy = "leave transport out to use what there is"
            raise EndpointLostError(f"{why}; {remedy}", self._address)
        return self._road

    def _open(self) -> DirectClient | None:
        road = None
        if self._name:
            road = DirectClient.open_shared_memory(
                self._name,
                self._session_id,
                self._timeout_ms,
                self._contract,
                self._spin,
            )
            if road is None:
                self._obstacle = "the endpoint has given no shared memory, which it offers"
        if road is not None or not (self._port and self._host):
            return road
        if self._is_required:
            try:
                return self._dial()
            except (OSError, RlmeshError) as error:
                self._obstacle = _cannot_connect(self._host, self._port, error)
        elif time.monotonic() >= self._dial_again_s and not (
            self._dialing and self._dialing.is_alive()
        ):
            self._dialing = threading.Thread(
                target=self._dial_meanwhile, name="rlmesh-ray-dial", daemon=True
            )
            self._dialing.start()
        return None

    def _dial(self) -> DirectClient:
        return DirectClient.open_tcp(
            self._host,
            self._port,
            self._ask(_ASK_TIMEOUT_S),
            self._timeout_ms,
            self._contract,
            self._spin,
        )

    def _dial_meanwhile(self) -> None:
        try:
            road = self._dial()
        except (OSError, RlmeshError) as error:
            self._dial_again_s = time.monotonic() + _DIAL_PAUSE_S
            if self._is_wanted and self._address not in _told:
                _told.add(self._address)
                _LOG.warning(
                    "steps go to %s as gRPC messages, which are slower: %s",
                    self._address,
                    _cannot_connect(self._host, self._port, error),
                )
            return
        with self._lock:
            if self._is_wanted:
                self._dialed = road
                return
        road.close()

    def close(self) -> None:
        """End the road. Idempotent."""
        with self._lock:
            self._is_wanted = self._is_worth_a_try = False
            dialed, self._dialed = self._dialed, None
        for road in (self._road, dialed):
            if road is not None:
                road.close()


def _cannot_connect(host: str, port: int, error: Exception) -> str:
    return (
        f"no direct TCP connection to {host}, port {port}: {error}. Its operator can name a port "
        "that you reach at that host (--data-address, --data-advertise), or offer none "
        "(--transport)"
    )


def _port(text: str) -> int:
    """Return the port that a capability tells; 0: it tells none."""
    is_number = text.isdecimal() and text.isascii() and len(text) <= len("65535")
    return int(text) if is_number and int(text) < 2**16 else 0


def _require(transport: str, name: str, port: int, address: str) -> None:
    if transport == TCP:
        if not port:
            raise ConfigurationError(
                f"{address} takes no direct TCP connections: it was told not to, its spaces hold "
                "text, it uses TLS, or it listens at a unix socket; leave transport out to use "
                "what it has"
            )
        return
    if not name:
        raise ConfigurationError(
            f"{address} offers no shared memory: it was told not to, its spaces hold text, or it "
            "does not run on Linux; leave transport out to use what it has"
        )
    if not is_within_reach(name):
        raise ConfigurationError(
            f"{address} is in another container or on another machine, and shares no memory with "
            "this process; leave transport out to use what it has"
        )
