"""Streams with a dm_env_rpc server, and the joins of a session's agents.

An answer has the kind of its request, and no id. If a server answered one request twice, every
later request would get the answer to the one before it; so an answer that has come before its
request was sent is an error.

A server that is starting refuses connections, closes streams or answers with errors; errors that
may pass are retried until the connect timeout. Requests are sent on all streams before the first
answer is awaited, since a server may answer no agent before all of them have joined.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.join_stream import JoinStream, open_call
from rlmesh_ray.dialects.dm_env_rpc.client import frames
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import CONTRACT, contract_from_text, unpack_tensor
from rlmesh_ray.errors import (
    AccessDeniedError,
    CapacityError,
    CodecError,
    ConfigurationError,
    EndpointError,
    EndpointLostError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    RemoteEnvError,
    RemoteProtocolError,
    RlmeshError,
    install_command,
)
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.spaces.contract import EnvContract

_LOG = logging.getLogger(__name__)

_PROCESS = "/dm_env_rpc.v1.Environment/Process"
_ASKING_TIMEOUT_S = 3.0
_LEAVE_TIMEOUT_S = 2.0
_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 1.0
# In gRPC's details where a server answers and another try would fail, too.
_PERMANENT = (
    "CERTIFICATE_VERIFY_FAILED",
    "Failed parsing HTTP/2",
    "Hostname Verification Check failed",
    "WRONG_VERSION_NUMBER",
)
# Refusals that another try would not change.
_FINAL_CODES = frozenset(
    {
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "UNAUTHENTICATED",
    }
)


class WorldStream:
    """A stream on a connection of its own: some servers identify clients by their connections.

    Args:
        connect_options: The server.
    """

    def __init__(self, connect_options: ConnectOptions) -> None:
        channel = connect_options.open()
        call = open_call(channel, _PROCESS, connect_options.metadata)
        self.stream = JoinStream(call, connect_options.address, channel)
        self._address = connect_options.address
        # Two counts, since two threads change them.
        self._num_sent = 0
        self._num_received = 0
        self._receiving = threading.Lock()
        self._arrived: deque[bytes] = deque()
        """Answers that have not been received; at most one more than requests."""
        self.surplus: RemoteProtocolError | None = None
        """The error about an answer that had come before its request was sent."""

    def send(self, frame: bytes) -> None:
        """Send a request without waiting.

        An answer that has come before its request is an error, which ``receive`` raises. The
        request is sent all the same: a session that ends has worlds to leave and to destroy.

        Raises:
            EndpointClosedError: The stream was closed.
        """
        self._check_for_surplus()
        # First: a thread that closes the session meanwhile counts the answer as an expected one.
        self._num_sent += 1
        self.stream.send(frame)

    def receive(self, kind: str, end_s: float) -> Any:
        """Wait for the answer to the oldest request.

        Args:
            kind: The request's.
            end_s: When to stop waiting, in seconds of time.monotonic().

        Raises:
            RemoteEnvError: The server refused; nothing has changed.
            RemoteProtocolError: The answer is of another kind, or an answer had come before its
                request was sent.
            EndpointError: The stream broke, or no answer came in time; the stream is closed.
        """
        if self.surplus is not None:
            raise self.surplus
        answer = frames.parse_answer(self._next_frame(end_s))
        found = answer.WhichOneof("payload")
        if found != kind:
            raise RemoteProtocolError(f"a request of the kind {kind} was answered with {found}")
        return answer

    def drain(self, kind: str, end_s: float) -> None:
        """Wait until the last request and all before it are answered, also with errors.

        Args:
            kind: The last request's.
            end_s: As for ``receive``.

        Raises:
            RemoteProtocolError: A frame is no answer.
            EndpointError: The stream broke, or not all answers came in time; it is closed.
        """
        is_answered = False
        # If the server answers twice, more answers may follow than there were requests.
        while self._num_received < self._num_sent or not is_answered:
            try:
                is_answered = frames.parse_answer(self._next_frame(end_s)).HasField(kind)
            except RemoteEnvError:
                is_answered = True
        self._check_for_surplus()

    def close(self) -> None:
        self.stream.close()

    def _explained(self, error: EndpointUnreachableError) -> EndpointUnreachableError:
        cause = error.__cause__
        if not isinstance(cause, grpc.Call) or cause.code() is not grpc.StatusCode.UNIMPLEMENTED:
            return error
        return EndpointUnreachableError(
            "something listens there, but does not speak dm_env_rpc; an endpoint of this package "
            f"does where it is installed with its extra: {install_command('dm-env-rpc')}; "
            "without it, leave out dm_env_rpc://",
            self._address,
        )

    def _next_frame(self, end_s: float) -> bytes:
        # One thread may end the session while another waits for an answer, and gRPC allows only one
        # reader at a time.
        if not self._receiving.acquire(timeout=max(0.0, end_s - time.monotonic())):
            raise EndpointTimeoutError("another thread still waits for an answer", self._address)
        try:
            if self._arrived:
                frame = self._arrived.popleft()
            else:
                frame = self.stream.receive(max(0.0, end_s - time.monotonic()))
            self._num_received += 1
        except EndpointUnreachableError as error:
            raise self._explained(error) from error.__cause__
        finally:
            self._receiving.release()
        return frame

    def _check_for_surplus(self) -> None:
        if self.surplus is not None or not self._receiving.acquire(blocking=False):
            return  # another thread waits for an answer, so that none is left over
        try:
            while self._num_here <= self._num_sent and self.stream.poll():
                self._arrived.append(self.stream.receive())
        except EndpointError:
            return  # ``receive`` raises it
        finally:
            self._receiving.release()
        if self._num_here > self._num_sent:
            kind = f" of the kind {frames.kind_name(self._arrived[-1])}" if self._arrived else ""
            self.surplus = RemoteProtocolError(
                f"{self._address} sent more answers than there were requests: an answer{kind} came "
                "before its request was sent; dm_env_rpc matches answers by their order alone, "
                "so open a new session, and have the server answer each request once"
            )

    @property
    def _num_here(self) -> int:
        return self._num_received + len(self._arrived)


def is_unreachable(error: EndpointError) -> bool:
    cause = error.__cause__
    return (
        isinstance(error, (EndpointUnreachableError, EndpointLostError))
        and isinstance(cause, grpc.Call)
        and cause.code() is grpc.StatusCode.UNAVAILABLE
        and not any(words in (cause.details() or "") for words in _PERMANENT)
    )


def _ask_for_contract(connect_options: ConnectOptions) -> EnvContract | None:
    """Ask once.

    Raises:
        EndpointError: The server cannot be reached, or wants another token.
    """
    stream = WorldStream(connect_options)
    end_s = time.monotonic() + min(connect_options.timeout_s, _ASKING_TIMEOUT_S)
    try:
        stream.send(frames.read_request(CONTRACT))
        text = unpack_tensor(frames.read_value(stream.receive("extension", end_s)), CONTRACT)
        return contract_from_text(str(text[()]))
    except (CodecError, RemoteEnvError, RemoteProtocolError, EndpointTimeoutError):
        return None
    except EndpointLostError as error:
        if is_unreachable(error):
            raise
        return None  # the request breaks it
    finally:
        stream.close()


@dataclass(slots=True)
class JoiningAgent:
    """One agent with its stream, before and after it has joined a world."""

    lane: int
    stream: WorldStream | None = None
    world: str | None = None
    """Name of the world that it has created."""
    specs: Any = None
    """The ``pb.ActionObservationSpecs`` in the answer to its join; None: it has not joined."""

    @property
    def open_stream(self) -> WorldStream:
        assert self.stream is not None, "an agent in the world"
        return self.stream

    def drop(self) -> None:
        if self.stream is not None:
            self.stream.close()
        self.stream, self.world, self.specs = None, None, None


_Requests = list[tuple[JoiningAgent, dict[str, Any]]]
"""Agents, and the payloads of their requests of one kind."""


class WorldJoiner:
    """All agents of a session: their joins and leaves.

    Args:
        connect_options: The server; its timeout is for all joins together.
        settings: Settings of the worlds and joins.
    """

    def __init__(self, connect_options: ConnectOptions, settings: DmEnvRpcSettings) -> None:
        self._connect_options = connect_options
        self._settings = settings
        self._end_s = time.monotonic() + connect_options.timeout_s
        self._delay_s = _FIRST_DELAY_S
        self.agents = [JoiningAgent(lane) for lane in range(settings.num_envs)]

    def fetch_contract(self) -> EnvContract | None:
        """Return the contract that a server of this package publishes; None: it is another server.

        The request has a stream of its own, since other servers must refuse it, and some break.

        Raises:
            ConfigurationError: A batched join is requested of another server, which has none.
            EndpointError: The server cannot be reached, or wants another token.
        """
        contract = None
        while self._settings.asks_contract:
            try:
                contract = _ask_for_contract(self._connect_options)
                break
            except EndpointError as error:
                if not is_unreachable(error):
                    raise
                self._wait_after(error)
        if contract is None and self._settings.batched:
            raise ConfigurationError(
                f"{self._connect_options.address} publishes no {CONTRACT}, as servers of this "
                "package do, and other servers have no batched joins; give num_envs=... instead "
                "of batched=True"
            )
        return contract

    def enter(self) -> None:
        """Create and join, until all agents have joined.

        Raises:
            EndpointError: The server cannot be reached, is full, wants another token, or was not
                ready in time.
            RemoteEnvError: It refuses the settings.
        """
        try:
            while (error := self._try()) is not None:
                self._wait_after(_as_own_error(error, self._connect_options.address))
        except BaseException:
            self.drop()
            raise

    def leave(self) -> None:
        """Leave the worlds, destroy those that were created, and close the streams.

        Errors are ignored, and it takes a few seconds at most.
        """
        end_s = time.monotonic() + _LEAVE_TIMEOUT_S
        joined: _Requests = [(agent, {}) for agent in self.agents if agent.specs is not None]
        _send_and_drain("leave_world", joined, end_s)
        created = [(agent, {"world_name": agent.world}) for agent in self.agents if agent.world]
        _send_and_drain("destroy_world", created, end_s)
        for agent in self.agents:
            if agent.stream is not None and agent.stream.surplus is not None:
                _LOG.warning(
                    "lane %d: %s; what this session observed may be wrong",
                    agent.lane,
                    agent.stream.surplus,
                )
        self.drop()

    def drop(self) -> None:
        """Close all streams at once; a thread that waits on one gets an error."""
        for agent in self.agents:
            if agent.stream is not None:
                agent.stream.close()

    def _wait_after(self, error: Exception) -> None:
        """Sleep until the next try, longer each time.

        Raises:
            Exception: ``error``, if there is no time left for another try.
        """
        if self._end_s - time.monotonic() <= self._delay_s:
            raise error
        time.sleep(self._delay_s)
        self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)

    def _try(self) -> RlmeshError | None:
        """Try once for all agents; return an error that may pass; None: all have joined."""
        for agent in self.agents:
            agent.stream = agent.stream or WorldStream(self._connect_options)
        settings, creators = self._settings, self.agents
        if settings.create is None:
            creators = []
        elif settings.one_world:
            creators = self.agents[:1]
        creating: _Requests = [
            (agent, {"settings": frames.as_tensors(settings.create_of(agent.lane) or {})})
            for agent in creators
            if agent.world is None
        ]
        error = self._ask("create_world", creating)
        if error is not None:
            return error
        joining: _Requests = []
        for agent in self.agents:
            creator = self.agents[0] if settings.one_world else agent
            payload = {
                "world_name": settings.world_name if not creators else creator.world or "",
                "settings": frames.as_tensors(settings.join_of(agent.lane)),
            }
            if agent.specs is None:
                joining.append((agent, payload))
        return self._ask("join_world", joining)

    def _ask(self, kind: str, requests: _Requests) -> RlmeshError | None:
        """Send ``requests`` and handle the answers; return an error that may pass, if any.

        Raises:
            RlmeshError: An error that another try would not change.
        """
        passing: RlmeshError | None = None
        for agent, payload in requests:
            agent.open_stream.send(frames.request(**{kind: payload}))
        for agent, _ in requests:
            if agent.stream is None:  # lost with the world that it was to share
                continue
            try:
                answer = agent.open_stream.receive(kind, self._end_s)
            except (EndpointError, RemoteEnvError) as error:
                if not _may_pass(error):
                    raise _as_own_error(error, self._connect_options.address) from error
                if isinstance(error, EndpointError):
                    self._drop(agent)
                passing = error
                continue
            if kind == "create_world":
                agent.world = answer.create_world.world_name
            else:
                agent.specs = answer.join_world.specs
        return passing

    def _drop(self, agent: JoiningAgent) -> None:
        is_shared = self._settings.one_world and agent.world is not None
        for each in self.agents if is_shared else [agent]:
            each.drop()


def _send_and_drain(kind: str, requests: _Requests, end_s: float) -> None:
    for agent, payload in requests:
        with contextlib.suppress(Exception):  # a broken stream is closed all the same
            agent.open_stream.send(frames.request(**{kind: payload}))
    for agent, _ in requests:
        with contextlib.suppress(Exception):
            agent.open_stream.drain(kind, end_s)


def _may_pass(error: EndpointError | RemoteEnvError) -> bool:
    if isinstance(error, RemoteEnvError):
        return error.code not in _FINAL_CODES
    # The server has closed the stream without an error.
    is_closed = isinstance(error, EndpointLostError) and error.__cause__ is None
    return is_closed or is_unreachable(error)


def _as_own_error(error: RlmeshError, address: str) -> RlmeshError:
    if not isinstance(error, RemoteEnvError):
        return error
    if error.code in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
        return AccessDeniedError(error.message, address)
    if error.code == "RESOURCE_EXHAUSTED":
        return CapacityError(error.message, address)
    return RemoteEnvError(
        error.code,
        f"{address} refuses to create or join a world: {error.message}",
        False,
        error.debug_info,
    )
