"""DirectConnection and DirectConnector: the client's end of a direct connection to the env worker.

``transport.direct_sockets`` has its messages, and when a request falls back to the Join stream.
"""

import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ConfigurationError, EndpointLostError, RlmeshError
from rlmesh_ray.options import SHARED_MEMORY, TCP, allowed_transports
from rlmesh_ray.polling import AdaptivePoller
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.transport import direct_sockets as frames
from rlmesh_ray.transport import tcp
from rlmesh_ray.transport.direct_sockets import EventfdSocket, TcpSocket
from rlmesh_ray.transport.step_buffers import StepArrays, StepBuffers, size_bytes
from rlmesh_ray.transport.tcp import Ticket
from rlmesh_ray.wire.rlmesh_v1 import values
from rlmesh_ray.wire.rlmesh_v1.limits import max_response_bytes

_LOG = logging.getLogger(__name__)

Pictures = tuple[NDArray[np.uint8], ...]
"""One picture per lane, ``(height, width, 3)``."""

_NOTHING = memoryview(bytearray())
_HELLO_TIMEOUT_S = 3.0
_LONGEST_ATTACH_S = 600.0
_GET_SEALS = 1034  # F_GET_SEALS
_SHRINK_SEAL = 2  # F_SEAL_SHRINK
IS_SUPPORTED = sys.platform == "linux"
"""Whether the system has abstract unix sockets that pass descriptors, and sealed memory."""


_MAX_LOST, LOSSES_S = 3, 10.0
"""Lost connections that are replaced immediately within this time, or since a Reset."""
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


class DirectConnection:
    """A direct connection to the worker of one session, for one request at a time.

    With an ``EventfdSocket`` the worker maps the memory of ``buffers``, too.
    """

    def __init__(
        self,
        worker: EventfdSocket | TcpSocket,
        buffers: StepBuffers,
        contract: EnvContract,
    ) -> None:
        self.worker_socket = worker
        self.transport = worker.transport
        self._buffers = buffers
        self._contract = contract
        self.number = 0
        """Number of the last request that was sent."""
        is_shared = worker.transport == SHARED_MEMORY
        # Without shared memory the arrays are sent after the headers.
        self._actions, results = (_NOTHING, _NOTHING) if is_shared else buffers.sent_parts
        self._header = memoryview(bytearray(frames.ANSWER.size))
        self._frame = self._header, results
        self._most_bytes = max_response_bytes(contract)
        self._receiving = threading.RLock()
        """Held while the descriptors are in use, which another thread may close."""
        self._poller = AdaptivePoller(1.5e-3)

    @classmethod
    def open_shared_memory(
        cls, name: str, session_id: str, timeout_ms: int, contract: EnvContract
    ) -> Self | None:
        """Open a connection for a session whose lanes have been reset; None if that fails.

        ``name`` is the endpoint's value of the capability SHARED_MEMORY.
        """
        where = frames.socket_address(name) if IS_SUPPORTED else None
        if where is None or len(session_id) != frames.SESSION_ID_BYTES or not session_id.isascii():
            return None
        descriptors: list[int] = []
        try:
            with socket.socket(socket.AF_UNIX) as broker:
                broker.settimeout(_HELLO_TIMEOUT_S)
                broker.connect(where)
                broker.sendall(frames.HELLO.pack(session_id.encode(), timeout_ms))
                answer, descriptors, _, _ = socket.recv_fds(broker, 1, frames.NUM_DESCRIPTORS)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            if answer != frames.ACCEPTED or not _are_safe(descriptors, contract):
                return None
            buffers = StepBuffers(descriptors[0], contract)
            connection = socket.socket(fileno=descriptors.pop(1))
            worker = EventfdSocket(connection, descriptors.pop(), descriptors.pop())
        except (OSError, ValueError):
            return None  # another machine or container, or an endpoint that has just gone
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return cls(worker, buffers, contract)

    @classmethod
    def open_tcp(
        cls, host: str, port: int, ticket: Ticket, timeout_ms: int, contract: EnvContract
    ) -> Self:
        """Open a connection for a session whose lanes have been reset.

        Raises:
            OSError: It cannot be opened.
        """
        # The worker may first finish one step, and then has as long to accept the connection.
        attach_s = (
            min(2 * timeout_ms / 1000, _LONGEST_ATTACH_S) if timeout_ms else _LONGEST_ATTACH_S
        )
        worker = TcpSocket(tcp.connect(host, port, ticket, attach_s))
        if timeout_ms:
            worker.limit_sending(timeout_ms / 1000)
        return cls(worker, StepBuffers(-1, contract), contract)

    def send(self, number: int, action: Sequence[Column], timeout_ms: int) -> None:
        """Send a step; ``receive`` reports a connection error.

        Raises:
            CodecError: A column of ``action`` does not fit its leaf; nothing was sent.
        """
        targets = self._buffers.actions
        misfits = [
            column
            for column, target in zip(action, targets, strict=False)
            if isinstance(column, tuple)
            or isinstance(target, tuple)
            or column.dtype != target.dtype
            or column.shape != target.shape
        ]
        if misfits or len(action) != len(targets):
            # Raises CodecError, unless only the byte order differs.
            values.encode_batch(self._contract.action_space, action, self._contract.num_envs)
        for target, column in zip(targets, action, strict=True):
            target[...] = column  # type: ignore[index]  # spaces with text have no direct connection
        self._send(number, timeout_ms, self._actions.nbytes, self._actions)

    @property
    def action(self) -> list[Column]:
        return self._buffers.actions

    def render(self, number: int, timeout_ms: int, timeout_s: float) -> Pictures | None:
        """Return pictures of all lanes, over shared memory; None: as for ``receive``."""
        self._send(number, timeout_ms, frames.RENDER)
        message = self.receive(timeout_s)
        if message is None:
            return None
        start, num_lanes = frames.PICTURE_SIZE.size, self._contract.num_envs
        height, width = (
            frames.PICTURE_SIZE.unpack_from(message) if len(message) >= start else (0, 0)
        )
        if len(message) != start + num_lanes * height * width * 3:
            self.close()
            return None
        pixels = np.frombuffer(message, np.uint8, offset=start)
        return tuple(pixels.reshape(num_lanes, height, width, 3))

    def result(self) -> tuple[list[Column], StepArrays]:
        """Return copies of the observations of the last step, and of its rewards and flags."""
        observation = [
            column if isinstance(column, tuple) else np.array(column)
            for column in self._buffers.observations
        ]
        results = self._buffers.results
        # Nonzero means set, but a NumPy bool must be 0 or 1.
        terminated = np.not_equal(results.terminated.view(np.uint8), 0)
        truncated = np.not_equal(results.truncated.view(np.uint8), 0)
        return observation, StepArrays(results.rewards.copy(), terminated, truncated)

    @property
    def is_open(self) -> bool:
        return self.worker_socket.wakeup is not None

    def close(self) -> None:
        """Close the connection; a thread that waits for an answer gets none. Idempotent."""
        self.worker_socket.hang_up()
        with self._receiving:
            self.worker_socket.close()

    def _send(
        self, number: int, timeout_ms: int, size: int, actions: memoryview = _NOTHING
    ) -> None:
        self.number = number
        try:
            with self._receiving:
                self.worker_socket.send(frames.REQUEST.pack(number, timeout_ms, size), actions)
        except OSError:
            self.close()

    def receive(self, timeout_s: float) -> bytearray | None:
        """Wait for the answer to the last request.

        Returns:
            A JoinResponse with the parts of the answer that are not in the step buffers, which are
            filled; empty without any. None: send the same request, under its id, on the Join
            stream.
        """
        with self._receiving:
            if self.worker_socket.wakeup is None:
                return None
            end_s = time.monotonic() + timeout_s
            header_bytes = frames.ANSWER.size
            try:
                num_received = self._receive_parts(self._frame, 0, header_bytes, end_s)
                number, kind, size, num_bytes = frames.ANSWER.unpack(self._header)
                if number == self.number and kind == frames.FALL_BACK:
                    return None
                has_right_size = num_bytes == self._frame[1].nbytes and size <= self._most_bytes
                if number == self.number and kind == frames.DONE and has_right_size:
                    if num_received < header_bytes + num_bytes:
                        self._receive_parts(
                            self._frame, num_received, header_bytes + num_bytes, end_s
                        )
                    message = bytearray(size)
                    if size:  # few steps have a message
                        whole = self._header, memoryview(message)
                        self._receive_parts(whole, header_bytes, header_bytes + size, end_s)
                    return message
            except OSError:
                pass  # the worker died, or the endpoint disconnected: the Join stream says why
            self.close()
            return None

    def _receive_parts(
        self, places: Sequence[memoryview], num_received: int, num_wanted: int, end_s: float
    ) -> int:
        """Receive into ``places`` until ``num_wanted`` bytes have come; return how many have.

        Raises:
            OSError: Either end is closed, or ``end_s`` has passed, by the monotonic clock.
        """
        worker = self.worker_socket
        while num_received < num_wanted:
            try:
                num_received += worker.receive(places, num_received)
                continue
            except BlockingIOError:
                pass
            # For the rest of an answer the worker does not write to the eventfd again.
            wakeup = None if num_received else worker.wakeup
            descriptor = worker.connection.fileno() if wakeup is None else wakeup.eventfd
            peers = () if wakeup is None else (wakeup.peer,)
            left_s = max(0.0, end_s - time.monotonic())
            if not self._poller.wait_readable(descriptor, peers=peers, timeout_s=left_s):
                raise TimeoutError
        return num_received


def is_reachable(name: str) -> bool:
    where = frames.socket_address(name) if IS_SUPPORTED else None
    if where is None:
        return False
    with socket.socket(socket.AF_UNIX) as broker:
        broker.settimeout(_HELLO_TIMEOUT_S)
        return broker.connect_ex(where) == 0


def _are_safe(descriptors: Sequence[int], contract: EnvContract) -> bool:
    """Return whether the descriptors are complete and their memory is large enough and sealed."""
    import fcntl  # not available on Windows

    if len(descriptors) != frames.NUM_DESCRIPTORS:
        return False
    memory = descriptors[0]
    is_large_enough = os.fstat(memory).st_size >= size_bytes(contract)
    return is_large_enough and bool(fcntl.fcntl(memory, _GET_SEALS) & _SHRINK_SEAL)


class DirectConnector:
    """Opens a session's direct connection as soon as possible, and again after its loss.

    A shared-memory connection is ready for the next step. TCP connections are opened in a thread,
    so that no step waits, unless ``transport`` requires them. After a failed attempt, and after
    repeated losses, the next attempt follows after a pause.

    Args:
        offered: The endpoint's capabilities.
        session_id: The session id from the handshake.
        contract: The session's contract.
        timeout_ms: Timeout of a step; 0: none.
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
        self.is_closed = self._is_dialing = False
        """Closed: all further steps use the Join stream."""
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
            self.is_closed = True
            if wanted and session_id:
                self._log_once(logging.INFO, f"it offers no shared memory, and {_NO_TCP}", "offer")

    @property
    def _is_waiting(self) -> bool:
        """Whether the next attempt is due, or waits for the end of a pause."""
        has_none = self._direct is None and not (self.is_closed or self._is_dialing)
        return has_none and self._has_lanes

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
        if self._is_waiting and time.monotonic() >= self._due_s:
            self._try()
        if self._is_required and self._is_waiting:
            remedy = "leave transport out to use any transport"
            raise EndpointLostError(f"{self._why_none}; {remedy}", self._address)
        return self._direct

    def _lose(self) -> None:
        """Note the loss of the connection; it counts unless the lanes were lost with it."""
        now_s = time.monotonic()
        with self._lock:
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
                self._name, self._session_id, self._timeout_ms, self._contract
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
        for num_left in reversed(range(_ATTEMPTS if self._is_required else 1)):
            try:
                direct = DirectConnection.open_tcp(
                    self._host,
                    self._port,
                    self._request_ticket(_TICKET_TIMEOUT_S),
                    self._timeout_ms,
                    self._contract,
                )
            except Exception as error:  # noqa: BLE001  # after any error steps use the Join stream
                if isinstance(error, ConnectionAbortedError) and num_left:
                    time.sleep(_ATTEMPT_PAUSE_S)  # the endpoint was too slow
                    continue
                is_known = isinstance(error, (OSError, RlmeshError))
                why = str(error) if is_known else f"{type(error).__name__}: {error}"
                self._failed(f"no direct TCP connection to {self._host}, port {self._port}: {why}")
            else:
                self._opened(direct)
            return

    def _opened(self, direct: DirectConnection) -> None:
        with self._lock:
            if not self.is_closed:
                self._is_dialing, self._direct = False, direct
                self._why_none, self._num_failed = "", 0
                return
        direct.close()

    def _failed(self, why: str) -> None:
        with self._lock:
            if self.is_closed:
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
            self.is_closed = True
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
