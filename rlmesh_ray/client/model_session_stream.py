"""The requests and answers of one session with a ModelService, from several threads."""

import contextlib
import itertools
import queue
import threading
import weakref

from rlmesh_ray.client.fork_guard import ForkGuard, close_at_exit
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.client.model_dialect import (
    EncodedRequest,
    Make,
    ModelClientDialect,
    ModelReply,
)
from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.protocol.client_session import ModelClientSession, timeout_error

_CLOSE_TIMEOUT_S = 2.0

# Ctrl-C cannot leave it locked, unlike a Future, which would then block the reader.
Answer = queue.SimpleQueue[ModelReply | RlmeshError]


class ModelSessionStream:
    """The requests and answers of one session. Safe to use from several threads.

    Args:
        stream: Join stream of the session.
        dialect: Dialect of the session.
        address: For error messages.
    """

    def __init__(self, stream: JoinStream, dialect: ModelClientDialect, address: str) -> None:
        self.stream = stream
        """The stream of the requests."""
        self._dialect = dialect
        self._address = address
        self._process = ForkGuard(address)
        self._awaited: dict[str, Answer] = {}
        self._request_ids = map(str, itertools.count(1))
        self._lock = threading.Lock()
        self._session = ModelClientSession(address)
        # The thread must not keep a dropped session alive, whose finalizer ends the thread.
        self._reader = threading.Thread(
            target=_read,
            args=(stream, weakref.ref(self)),
            name="rlmesh-ray-model-client",
            daemon=True,
        )
        weakref.finalize(self, stream.cancel).atexit = False
        self._reader.start()
        close_at_exit(self)

    @property
    def is_own(self) -> bool:
        """Whether this process has opened it; a fork cannot even close it."""
        return self._process.is_owner

    @property
    def num_unanswered(self) -> int:
        """How many requests wait for their answers."""
        return len(self._awaited)

    def ask(self, make: Make, timeout_s: float) -> ModelReply:
        """Send requests, each when the one before it was answered; return the last answer.

        Args:
            make: Called under the session's lock.
            timeout_s: How long to wait for each answer.

        Raises:
            RemoteModelError: The endpoint answered one with an error; an error that it does not
                call recoverable ends the session.
            EndpointError: The session broke or is closed, or no answer came in time.
        """
        return self._ask(make, timeout_s, is_last=False)

    def close(self) -> None:
        """End the session and its stream; threads that wait get an error. Idempotent."""
        if not self.is_own:
            return  # the lock may be held by a thread that a fork does not have
        with self._lock:
            is_first = not self._session.is_closed
            self._session.close()
        if is_first:
            with contextlib.suppress(RlmeshError):  # it is closed below in any case
                self._ask(lambda ids: [self._dialect.close(ids)], _CLOSE_TIMEOUT_S, is_last=True)
        self.fail(self._session.closed())
        self.stream.close()
        self._reader.join(_CLOSE_TIMEOUT_S)

    def _ask(self, make: Make, timeout_s: float, *, is_last: bool) -> ModelReply:
        self._process.require()
        with self._lock:
            self._session.require_open(to_close=is_last)
            first, *rest = make(self._request_ids)
            answer = self._send(first)
        reply = self._result(first, answer, timeout_s)
        for request in rest:
            with self._lock:
                self._session.require_open(to_close=is_last)
                answer = self._send(request)
            reply = self._result(request, answer, timeout_s)
        return reply

    def _send(self, request: EncodedRequest) -> Answer:
        answer: Answer = queue.SimpleQueue()
        self._awaited[request.request_id] = answer
        self.stream.send(request.frame)
        return answer

    def _result(self, request: EncodedRequest, answer: Answer, timeout_s: float) -> ModelReply:
        try:
            reply = answer.get(timeout=timeout_s)
        except queue.Empty:
            with self._lock:
                self._awaited.pop(request.request_id, None)
            raise timeout_error(timeout_s, self._address) from None
        if isinstance(reply, RlmeshError):
            raise reply
        if reply.failure is not None:
            raise self._session.error_of(reply.failure)
        return reply

    def take(self, frame: bytes) -> None:
        """Hand an answer to the thread that waits for it.

        Raises:
            RlmeshError: It is malformed.
        """
        reply = self._dialect.read(frame)
        with self._lock:
            answer = self._awaited.pop(reply.request_id, None)
        if answer is not None:
            answer.put(reply)

    def fail(self, error: RlmeshError) -> None:
        """Note that the stream has ended; threads that wait get an error."""
        with self._lock:
            error = self._session.lose(error)
            answers, self._awaited = list(self._awaited.values()), {}
        for answer in answers:
            answer.put(error)


def _read(stream: JoinStream, session: "weakref.ref[ModelSessionStream]") -> None:
    """Hand on the answers, until the stream or the session has ended."""
    try:
        for frame in stream.frames():
            if (own := session()) is None:
                return
            own.take(frame)
            del own
    except RlmeshError as error:
        if (own := session()) is not None:
            own.fail(error)
