"""DirectConnection: the client's end of a direct connection to the env worker.

``transport.direct_frames`` has its messages, and when a request falls back to the Join stream.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.options import SHARED_MEMORY
from rlmesh_ray.polling import AdaptivePoller, WakeupDescriptors
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.transport import direct_frames as frames
from rlmesh_ray.transport import shared_memory as wire
from rlmesh_ray.transport import tcp
from rlmesh_ray.transport.shared_memory import EventfdSocket
from rlmesh_ray.transport.step_buffers import StepArrays, StepBuffers, size_bytes
from rlmesh_ray.transport.tcp import Ticket
from rlmesh_ray.wire.rlmesh_v1 import values
from rlmesh_ray.wire.rlmesh_v1.limits import max_response_bytes

AnswerT = TypeVar("AnswerT")
Pictures = tuple[NDArray[np.uint8], ...]
"""One picture per lane, ``(height, width, 3)``."""

_NOTHING = memoryview(bytearray())
_HELLO_TIMEOUT_S = 3.0
_LONGEST_ATTACH_S = 600.0
_GET_SEALS = 1034  # F_GET_SEALS
_SHRINK_SEAL = 2  # F_SEAL_SHRINK
IS_SUPPORTED = sys.platform == "linux"
"""Whether the system has abstract unix sockets that pass descriptors, and sealed memory."""


class DirectConnection:
    """A direct connection to the worker of one session, for one request at a time.

    ``open_shared_memory`` and ``open_tcp`` make it.

    Args:
        worker: The connected socket; owned.
        buffers: The step buffers; with an ``EventfdSocket`` the worker maps the same memory.
        contract: The session's contract.
    """

    def __init__(
        self,
        worker: EventfdSocket | tcp.TcpSocket,
        buffers: StepBuffers,
        contract: EnvContract,
    ) -> None:
        self.worker_socket = worker
        """This end of the connection."""
        self._buffers = buffers
        self._contract = contract
        self.number = 0
        """Number of the last step that was sent."""
        is_shared = worker.transport == SHARED_MEMORY
        # Without shared memory the arrays are sent after the headers.
        self._actions, self._results = (_NOTHING, _NOTHING) if is_shared else buffers.sent_parts
        self._header = memoryview(bytearray(frames.ANSWER.size))
        self._incoming = frames.FrameReader(self._header, self._results)
        self._most_bytes = max_response_bytes(contract)
        self._receiving = threading.RLock()
        """Held while the descriptors are in use, which another thread may close."""
        self._poller = AdaptivePoller(1.5e-3)

    @property
    def transport(self) -> str:
        """Transport of the steps: ``"shared_memory"`` or ``"tcp"``."""
        return self.worker_socket.transport

    @classmethod
    def open_shared_memory(
        cls,
        name: str,
        session_id: str,
        timeout_ms: int,
        contract: EnvContract,
    ) -> Self | None:
        """Open a shared-memory connection for a session whose lanes have been reset.

        Args:
            name: The endpoint's value of the capability SHARED_MEMORY.
            session_id: The session id from the handshake.
            timeout_ms: Timeout of a step.
            contract: The session's contract.

        Returns:
            The connection; None where it cannot be opened.
        """
        where = wire.socket_address(name) if IS_SUPPORTED else None
        if where is None or len(session_id) != wire.SESSION_ID_BYTES or not session_id.isascii():
            return None
        descriptors: list[int] = []
        try:
            with socket.socket(socket.AF_UNIX) as broker:
                broker.settimeout(_HELLO_TIMEOUT_S)
                broker.connect(where)
                broker.sendall(wire.HELLO.pack(session_id.encode(), timeout_ms))
                answer, descriptors, _, _ = socket.recv_fds(broker, 1, wire.NUM_DESCRIPTORS)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            if answer != wire.ACCEPTED or not _are_safe(descriptors, contract):
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
        cls,
        host: str,
        port: int,
        ticket: Ticket,
        timeout_ms: int,
        contract: EnvContract,
    ) -> Self:
        """Open a TCP connection for a session whose lanes have been reset.

        Args:
            host: The endpoint's host.
            port: The endpoint's value of the capability DIRECT_TCP.
            ticket: A ticket from the endpoint.
            timeout_ms: Timeout of a step; 0: none.
            contract: The session's contract.

        Raises:
            OSError: The connection cannot be opened.
        """
        # The worker may first finish one step, and then has as long to accept the connection.
        attach_s = (
            min(2 * timeout_ms / 1000, _LONGEST_ATTACH_S) if timeout_ms else _LONGEST_ATTACH_S
        )
        worker = tcp.connect(host, port, ticket, attach_s)
        if timeout_ms:
            worker.limit_sending(timeout_ms / 1000)
        return cls(worker, StepBuffers(-1, contract), contract)

    @property
    def wakeup(self) -> WakeupDescriptors | None:
        """Descriptors to poll for the answer; None: the connection has ended."""
        return self.worker_socket.wakeup

    def send(self, number: int, action: Sequence[Column], timeout_ms: int) -> None:
        """Send a step; ``receive`` reports a connection error.

        Raises:
            CodecError: A column of ``action`` does not fit its leaf; nothing was sent.
        """
        self._write(action)
        self.number = number
        header = frames.REQUEST.pack(number, timeout_ms, self._actions.nbytes)
        try:
            with self._receiving:
                self.worker_socket.send(header, self._actions)
        except OSError:
            self.close()

    @property
    def action(self) -> list[Column]:
        return self._buffers.actions

    def receive(self, timeout_s: float) -> bytes | None:
        """Wait for the answer to the last request.

        Returns:
            A JoinResponse with the parts of the answer that are not in the step buffers, or empty
            bytes without any. None: send the same request, under its id, on the Join stream.
        """
        return self._answer(timeout_s, self._receive)

    def render(self, number: int, timeout_ms: int, timeout_s: float) -> Pictures | None:
        """Return pictures of all lanes, over shared memory; None: as for ``receive``."""
        self.number = number
        try:
            with self._receiving:
                self.worker_socket.send(frames.REQUEST.pack(number, timeout_ms, frames.RENDER))
        except OSError:
            self.close()
        return self._answer(timeout_s, self._receive_pictures)

    def _answer(self, timeout_s: float, receive: Callable[[int, float], AnswerT]) -> AnswerT | None:
        with self._receiving:
            if not self.is_open:
                return None
            end_s = time.monotonic() + timeout_s
            try:
                number, kind, size = self._receive_frame(end_s)
                if kind == frames.DONE and number == self.number:
                    return receive(size, end_s)
                if kind == frames.FALL_BACK and number == self.number:
                    return None
            except OSError:  # or TimeoutError
                pass  # the worker died, or the endpoint disconnected: the Join stream says why
            self.close()
            return None

    def observation(self) -> list[Column]:
        """Return copies of the observations of the last step."""
        return [
            column if isinstance(column, tuple) else np.array(column)
            for column in self._buffers.observations
        ]

    def results(self) -> StepArrays:
        """Return copies of the rewards and flags of the last step."""
        results = self._buffers.results
        return StepArrays(
            results.rewards.copy(), _flags(results.terminated), _flags(results.truncated)
        )

    @property
    def is_open(self) -> bool:
        return self.worker_socket.wakeup is not None

    def close(self) -> None:
        """Close the connection; a thread that waits for an answer gets none. Idempotent."""
        self.worker_socket.hang_up()
        with self._receiving:
            self.worker_socket.close()

    def _write(self, action: Sequence[Column]) -> None:
        targets = self._buffers.actions
        if len(action) != len(targets) or not all(map(_fits, action, targets)):
            # Raises CodecError, unless only the byte order differs.
            values.encode_batch(self._contract.action_space, action, self._contract.num_envs)
        for target, column in zip(targets, action, strict=True):
            target[...] = column  # type: ignore[index]  # spaces with text have no direct connection

    def _receive_frame(self, end_s: float) -> tuple[int, int, int]:
        """Receive an answer; return its number, its kind and the size of its message.

        Raises:
            TimeoutError: It has not arrived by ``end_s`` of the monotonic clock.
            OSError: Either end is closed, or the bytes are no answer.
        """
        self._incoming.num_received = 0
        while self._incoming.num_received < frames.ANSWER.size:
            self._receive_part(end_s)
        number, kind, size, num_bytes = frames.ANSWER.unpack(self._header)
        if kind == frames.DONE:
            if num_bytes != self._results.nbytes or size > self._most_bytes:
                raise ConnectionAbortedError("the answer has a wrong size")
            while not self._incoming.is_complete:
                self._receive_part(end_s)
        return number, kind, size

    def _receive_part(self, end_s: float) -> None:
        if not self._incoming.num_received:
            # Before reading: later data sets the eventfd again. It may still be set for an earlier
            # answer, which was read before the worker had written to the eventfd.
            self.worker_socket.clear()
        try:
            self._incoming.receive(self.worker_socket.connection)
        except BlockingIOError:
            self._wait_for_more(end_s)

    def _wait_for_more(self, end_s: float) -> None:
        wakeup = None if self._incoming.num_received else self.wakeup
        descriptor = self.worker_socket.connection.fileno() if wakeup is None else wakeup.eventfd
        peers = () if wakeup is None else (wakeup.peer,)
        left_s = max(0.0, end_s - time.monotonic())
        if not self._poller.wait_readable(descriptor, peers=peers, timeout_s=left_s):
            raise TimeoutError

    def _receive(self, size: int, end_s: float) -> bytes:
        """Return the next ``size`` bytes.

        Raises:
            TimeoutError: They have not arrived by ``end_s`` of the monotonic clock.
            OSError: Either end is closed.
        """
        if not size:  # as of most steps
            return b""
        data = bytearray(size)
        self._fill(memoryview(data), end_s)
        return bytes(data)

    def _receive_pictures(self, size: int, end_s: float) -> Pictures:
        """Return the pictures in the next ``size`` bytes; see ``_receive``."""
        height, width = frames.PICTURE_SIZE.unpack(self._receive(frames.PICTURE_SIZE.size, end_s))
        num_lanes = self._contract.num_envs
        if size != frames.PICTURE_SIZE.size + num_lanes * height * width * 3:
            raise ConnectionAbortedError("the pictures have a wrong size")
        pictures = tuple(np.empty((height, width, 3), np.uint8) for _ in range(num_lanes))
        for picture in pictures:
            self._fill(picture.reshape(-1).data, end_s)
        return pictures

    def _fill(self, place: memoryview, end_s: float) -> None:
        reader = frames.FrameReader(place)
        while not reader.is_complete:
            try:
                reader.receive(self.worker_socket.connection)
            except BlockingIOError:
                self._wait_for_more(end_s)


def is_reachable(name: str) -> bool:
    where = wire.socket_address(name) if IS_SUPPORTED else None
    if where is None:
        return False
    with socket.socket(socket.AF_UNIX) as broker:
        broker.settimeout(_HELLO_TIMEOUT_S)
        return broker.connect_ex(where) == 0


def _fits(column: Column, target: Column) -> bool:
    if isinstance(column, tuple) or isinstance(target, tuple):
        return False
    return column.dtype == target.dtype and column.shape == target.shape


def _flags(shared: NDArray[np.bool_]) -> NDArray[np.bool_]:
    # Nonzero means set, but a NumPy bool must be 0 or 1.
    return np.not_equal(shared.view(np.uint8), 0)


def _are_safe(descriptors: Sequence[int], contract: EnvContract) -> bool:
    """Return whether the descriptors are complete and their memory is large enough and sealed."""
    import fcntl  # not available on Windows

    if len(descriptors) != wire.NUM_DESCRIPTORS:
        return False
    memory = descriptors[0]
    is_large_enough = os.fstat(memory).st_size >= size_bytes(contract)
    return is_large_enough and bool(fcntl.fcntl(memory, _GET_SEALS) & _SHRINK_SEAL)
