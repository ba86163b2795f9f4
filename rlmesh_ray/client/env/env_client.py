"""EnvClient: one session with an EnvService, in batches of columns.

RemoteEnv, RemoteVectorEnv and the RLlib plug-in are made of this.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.client.channel import ConnectOptions, Metadata, ServiceHandshake, status_of
from rlmesh_ray.client.fork_guard import close_at_exit, forked
from rlmesh_ray.client.join_stream import JoinStream, called_after, open_call
from rlmesh_ray.errors import (
    AccessDeniedError,
    CodecError,
    EndpointError,
    EndpointLostError,
    HandshakeRefusedError,
    RemoteEnvError,
    RemoteProtocolError,
    RlmeshError,
)
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.options import DEFAULT_RESET_TIMEOUT_S, DEFAULT_STEP_TIMEOUT_S, SHARED_MEMORY
from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.client_session import (
    EnvClientSession,
    Limit,
    ResponseT,
    allowance_s,
    endpoint_timeout_ms,
    is_still_starting,
    name_limit,
)
from rlmesh_ray.protocol.env_session import NOT_STARTED
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.protocol.messages import (
    Close,
    Configure,
    Configured,
    EnvRequest,
    EpisodeRecord,
    Infos,
    Render,
    Rendered,
    Reset,
    ResetDone,
    Step,
    StepDone,
)
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.images import AS_THEY_ARE, ImageOptions, as_sizes
from rlmesh_ray.transport.direct_connection import DirectConnection, DirectConnector, Pictures
from rlmesh_ray.transport.exactly_once import ClientSide
from rlmesh_ray.transport.tcp import KEY_BYTES, TICKET_ID_BYTES, Ticket
from rlmesh_ray.wire import image_codec_v1, lane_calls_v1, transport_v1
from rlmesh_ray.wire.lane_calls_v1 import CallFailed, LaneCall
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from rlmesh_ray.wire.rlmesh_v1 import values
from rlmesh_ray.wire.rlmesh_v1.limits import (
    DEFAULT_MESSAGE_BYTES,
    max_request_bytes,
    max_response_bytes,
)
from rlmesh_ray.wire.rlmesh_v1.values import BatchCodec


class ResetResult(NamedTuple):
    """First observations, over all lanes."""

    observation: list[Column]
    infos: Infos
    episode_ids: tuple[str, ...]


class StepResult(NamedTuple):
    """The result of one vector step; every array has one entry per lane."""

    observation: list[Column]
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    infos: Infos
    completed_episodes: tuple[EpisodeRecord, ...]
    episode_ids: tuple[str, ...]


class EditionEnvClientDialect:
    """The dialect of ``rlmesh.protocol.v1``: makes requests, and reads their answers in order.

    Args:
        contract: Contract of the session.
        observations: Decodes observations; None: the edition's codec.
    """

    frames: ClassVar[Any] = wire
    """The wire module, which another dialect replaces."""
    edition = ""
    """Edition that the first request, Configure, names; empty: no Configure is sent."""

    def __init__(self, contract: EnvContract, observations: BatchCodec | None = None) -> None:
        self._observations = observations or values.codec(contract.observation_space)
        self._actions = values.codec(contract.action_space)
        self._width = contract.num_envs

    def reset(self, request: Reset) -> Reset:
        """Return the request as it is sent."""
        return request

    def step(self, request_id: str, action: Sequence[Column], timeout_ms: int) -> Step:
        """Return the request; raises CodecError for a column that is not what its leaf declares."""
        return Step(request_id, self._actions.encode(action, self._width), timeout_ms)

    def reset_result(self, done: ResetDone) -> ResetResult:
        """Return the result, over all lanes; raises CodecError for other lanes or observations."""
        columns = self._observations.decode(done.observation, self._width)
        return ResetResult(owned(columns), done.infos, done.episode_ids)

    def step_result(self, done: StepDone) -> StepResult:
        columns = self._observations.decode(done.observation, self._width)
        return StepResult(
            observation=owned(columns),
            rewards=np.asarray(done.rewards, np.float64),
            terminated=np.frombuffer(done.terminated, np.bool_).copy(),
            truncated=np.frombuffer(done.truncated, np.bool_).copy(),
            infos=done.infos,
            completed_episodes=done.completed_episodes,
            episode_ids=done.episode_ids,
        )


def owned(columns: Sequence[Column]) -> list[Column]:
    """Return copies: torch warns about read-only arrays, and callers keep and change them."""
    return [column if isinstance(column, tuple) else np.array(column) for column in columns]


HANDSHAKE = ServiceHandshake(
    "/rlmesh.env.v1.EnvService/Handshake",
    wire.HANDSHAKE,
    (
        capabilities.DIRECT_TCP,
        capabilities.NDARRAY,
        capabilities.NUMBERED_REQUESTS,
        capabilities.SAME_STEP,
        capabilities.SHARED_MEMORY,
        capabilities.SPACES_CORE,
    ),
    EditionEnvClientDialect,
    "client.env_dialect",
)
generations_of = HANDSHAKE.generations
shake_hands = HANDSHAKE.probe


_Agreed = tuple[HandshakeResponse, EnvContract, Metadata, EditionEnvClientDialect]
"""The answer to a handshake, the contract with the images in the size in which they come, the
metadata of the session's calls besides the token, and the dialect of the endpoint's generation."""


def connect(
    connect_options: ConnectOptions, images: ImageOptions = AS_THEY_ARE
) -> tuple[grpc.Channel, _Agreed]:
    """Shake hands; return a channel for one session, which the caller closes, and what is agreed.

    The channel accepts the largest message that is possible under the contract.

    Raises:
        ConfigurationError: ``images`` do not fit the environment or the endpoint.
        EndpointError: The endpoint cannot be reached, or wants another token.
        HandshakeRefusedError: It serves no generation or edition of this package, or its contract
            allows no session.
    """
    channel = connect_options.open()
    try:
        agreed = _agree(connect_options, channel, images)
        limit = max_response_bytes(agreed[1])
        if limit > DEFAULT_MESSAGE_BYTES:
            channel.close()
            channel = connect_options.open(limit)
            # Behind a gateway, another connection may lead to another endpoint.
            agreed = _agree(connect_options, channel, images)
    except BaseException:
        channel.close()
        raise
    return channel, agreed


def _agree(connect_options: ConnectOptions, channel: grpc.Channel, images: ImageOptions) -> _Agreed:
    variant, answer = HANDSHAKE.negotiate(connect_options, channel)
    contract = answer.contract
    if not isinstance(contract, EnvContract):
        raise HandshakeRefusedError(
            f"{connect_options.address}: the server accepts the handshake without an environment "
            "contract; it breaks the protocol, another version of it may not"
        )
    if contract.num_envs < 1:
        raise HandshakeRefusedError(
            f"{connect_options.address}: the server's contract has {contract.num_envs} lanes; it "
            "needs at least 1"
        )
    metadata: Metadata = ()
    dialect: EditionEnvClientDialect = variant.make_dialect(contract)
    if images.names:
        image_codec, resize = images
        space = contract.observation_space
        sizes = {} if resize is None else as_sizes(resize, space)
        sent = image_codec_v1.session_images(contract, image_codec, sizes)
        needed = {
            f"{image_codec=}": sent.format,
            f"{resize=}": capabilities.RESIZE if sizes else "",
        }
        for option, ability in needed.items():
            image_codec_v1.require_offer(
                option, ability, answer.capabilities, connect_options.address
            )
        metadata = image_codec_v1.session_metadata(space, image_codec, sizes)
        contract = replace(contract, observation_space=sent.space)
        # Only the edition's generation has the capability.
        dialect = EditionEnvClientDialect(contract, sent.values)
    session_id = answer.capabilities.get(capabilities.SESSION, "")
    if session_id:
        metadata += ((capabilities.SESSION_METADATA_KEY, session_id),)
    return answer, contract, metadata, dialect


def request_ticket(
    connect_options: ConnectOptions,
    channel: grpc.Channel,
    session: Metadata,
    timeout_ms: int,
    timeout_s: float,
) -> Ticket:
    """Return a ticket for a connection to the worker of a session.

    Raises:
        EndpointError: No answer came, or the endpoint refuses; the message says why.
        RemoteProtocolError: The answer is not a ticket.
    """
    request = transport_v1.pack_request(timeout_ms)
    try:
        reply = connect_options.call(
            channel, transport_v1.OPEN_TCP, request, timeout_s=timeout_s, session=session
        )
        return Ticket(*transport_v1.parse_response(reply, TICKET_ID_BYTES, KEY_BYTES))
    except CodecError as error:
        raise RemoteProtocolError(f"the answer is no ticket: {error}") from error
    except EndpointError as error:
        code, details = status_of(error)
        if code is None or code in _UNANSWERED:
            raise
        reason = f"the endpoint refuses direct connections ({code.name}: {details})"
        raise EndpointError(reason, connect_options.address) from error.__cause__


def reset_report(
    num_lanes: int, limit_s: float, clock: Callable[[], float] = time.monotonic
) -> Callable[[float], None]:
    """Return a function that logs how long resets have taken that began at a given time.

    Pauses between lines grow from 3 to 60 s, over all resets of a session: an environment may
    reset for some seconds with every step.
    """
    next_s, pause_s = 0.0, _SLOW_RESET_S

    def report(began_s: float) -> None:  # several times a second, in the thread of all deadlines
        nonlocal next_s, pause_s
        now_s = clock()
        if now_s >= next_s:
            next_s, pause_s = now_s + pause_s, min(2 * pause_s, _LONGEST_REPORT_PAUSE_S)
            _LOG.info(
                "resetting %d lane(s): %.0f s so far (reset_timeout_s is %g s)",
                num_lanes,
                now_s - began_s,
                limit_s,
            )

    return report


T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_SLOW_RESET_S = 3.0
"""After how long a wait for resets is logged."""
_LONGEST_REPORT_PAUSE_S = 60.0
_NOTHING = contextlib.nullcontext()
_UNANSWERED = (
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
)
"""Status codes of a call that the endpoint has not answered."""
_JOIN = "/rlmesh.env.v1.EnvService/Join"
_DIRECT_TIMEOUT_SHARE = 0.95
"""Part of a step's timeout to wait for the direct answer: the endpoint sets no deadline for a
worker that has not begun the step."""
_STREAM_PERIOD_S = 0.25
"""How often a client that steps over a direct connection checks whether its stream has ended."""
_CLOSE_TIMEOUT_S = 2.0
_CUT_OFF_TIMEOUT_S = 1.0
_MISFIT = "the answer does not fit the contract: {}"


class EnvClient:
    """An open session: ``num_envs`` lanes that no other session shares.

    An error that the endpoint calls recoverable leaves the session usable. Any other one ends it
    (edition 2026.06, "Timeouts and Errors"), as does an answer that breaks the protocol: later
    requests fail with EndpointLostError, and only ``close`` is left to do. An exception in the
    middle of a request, such as from Ctrl-C, ends it, too.

    The options are those of ``ClientOptions``. The endpoint gets slightly shorter timeouts, so that
    it can still answer when the environment hangs. A request that times out because the environment
    is still starting is sent again.

    Raises:
        ConfigurationError: The endpoint does not offer the ``transport`` that is required, or
            ``images`` do not fit it or its environment.
        EndpointError: The endpoint cannot be reached, wants another token, or is full.
        HandshakeRefusedError: It has no dialect or edition of this package.
    """

    _server_timeout_ms = staticmethod(endpoint_timeout_ms)

    def __init__(
        self,
        connect_options: ConnectOptions,
        *,
        step_timeout_s: float = DEFAULT_STEP_TIMEOUT_S,
        reset_timeout_s: float = DEFAULT_RESET_TIMEOUT_S,
        start_timeout_s: float = 120.0,
        transport: str = "auto",
        images: ImageOptions = AS_THEY_ARE,
    ) -> None:
        self._connect_options = connect_options
        self._pid = os.getpid()
        self.step_limit = Limit("step_timeout_s", step_timeout_s)
        self.reset_limit = Limit("reset_timeout_s", reset_timeout_s)
        self._start_timeout_s = start_timeout_s
        self._channel, agreed = connect(connect_options, images)
        self.answer, self.contract, self._own_metadata, self.dialect = agreed
        self.session_id = self.answer.capabilities.get(capabilities.SESSION, "")
        timeout_ms = self._server_timeout_ms(step_timeout_s)
        try:
            self.direct_connector = DirectConnector(
                self.answer.capabilities,
                self.session_id,
                self.contract,
                timeout_ms,
                connect_options.address,
                transport=transport,
                request_ticket=partial(
                    request_ticket, connect_options, self._channel, self._own_metadata, timeout_ms
                ),
            )
            call = open_call(self._channel, _JOIN, self.metadata)
        except BaseException:
            self._channel.close()
            raise
        # The request whose answer comes over a direct connection, and answers received early. A
        # thread waits here while another one receives.
        self._settling = threading.RLock()
        self._in_flight_direct: tuple[str, DirectConnection] | None = None
        self._limits: dict[str, Limit] = {}
        """Of steps without an answer that may contain resets."""
        self._has_ended = False
        """Whether a lane's episode ended in the last step, and no reset of all lanes came since."""
        self._report_resets = reset_report(self.contract.num_envs, reset_timeout_s)
        self._kept: dict[str, StepResult | RlmeshError] = {}
        self._episode_ids: tuple[str, ...] = ()
        self._next_stream_check_s = 0.0
        self.stream = JoinStream(call, connect_options.address, self._channel)
        self.session = EnvClientSession(
            self.contract.num_envs, self.answer.capabilities, connect_options.address
        )
        self.numbers = ClientSide()
        """Numbers of the requests, which are their ids."""
        self._pack = partial(
            self.dialect.frames.pack_request,
            tag_arrays=capabilities.NDARRAY in self.answer.capabilities,
            max_bytes=max_request_bytes(self.contract),
        )
        close_at_exit(self)
        self._configure()

    @property
    def address(self) -> str:
        return self._connect_options.address

    @property
    def metadata(self) -> Metadata:
        """The metadata of a call into the session; the token may have been replaced meanwhile."""
        return self._connect_options.metadata + self._own_metadata

    def reset(
        self,
        *,
        seeds: Sequence[int] = (),
        options: Mapping[str, object] | None = None,
        lanes: Sequence[int] = (),
    ) -> ResetResult:
        """Start new episodes, in all lanes or in ``lanes``.

        Args:
            seeds: Empty, or one for each lane that is reset.
            options: For the environment, with text as keys: numbers, text, bytes, arrays, and lists
                and dicts of these, up to 1 MiB. They arrive as they are, except that tuples become
                lists.
            lanes: Indices; empty for all. Only some of them can be reset where the endpoint offers
                it (``rlmesh_ray.partial_reset.v1``).

        Raises:
            CodecError: An option or a seed cannot travel; nothing was sent.
            ConfigurationError: It cannot reset single lanes; nothing was sent.
            RemoteEnvError: The endpoint answered with an error.
            RemoteProtocolError: The answer is malformed; that ends the session.
            EndpointError: The session broke.
        """
        return self._when_started(
            lambda: self.receive_reset(self.send_reset(seeds=seeds, options=options, lanes=lanes))
        )

    def send_reset(
        self,
        *,
        seeds: Sequence[int] = (),
        options: Mapping[str, object] | None = None,
        lanes: Sequence[int] = (),
    ) -> str:
        self._settle()
        timeout_ms = self._server_timeout_ms(self.reset_limit.seconds)
        chosen = self.session.lanes_to_reset(lanes)
        number = str(self.numbers.next_number)
        request = self.dialect.reset(Reset(number, tuple(seeds), options or {}, timeout_ms, chosen))
        self.session.require_open()
        self.send(request)
        self._has_ended = self._has_ended and bool(request.env_indices)
        return request.request_id

    def receive_reset(self, request_id: str) -> ResetResult:
        self._settle()
        done = self._receive(request_id, ResetDone, self.reset_limit)
        self.direct_connector.on_lanes_reset()
        try:
            result = self.dialect.reset_result(done)
        except CodecError as error:
            raise self.session.broken(_MISFIT.format(error), request_id) from error
        self._episode_ids = result.episode_ids
        return result

    def step(self, action: Sequence[Column]) -> StepResult:
        return self.receive_step(self.send_step(action))

    def send_step(self, action: Sequence[Column], *, is_last: bool = True) -> str:
        """Apply one action per lane without waiting; return the request's id.

        Args:
            action: Columns over all lanes, of the action space's dtypes.
            is_last: Whether its answer is received before the next request is sent. If not, it is
                sent on the stream: after a direct step, the next request would wait for its answer.
        """
        self._settle()
        self.session.require_open()
        has_unanswered = self.session.has_unanswered
        # Requests still on the stream come first; a direct step would overtake them.
        direct = self._direct_connection() if is_last and not has_unanswered else None
        number = self.numbers.next_number
        request_id, limit, mode = str(number), self.step_limit, self.contract.autoreset_mode
        # As far as this end knows.
        may_reset = mode is AutoresetMode.SAME_STEP or (
            mode is AutoresetMode.NEXT_STEP and (self._has_ended or has_unanswered)
        )
        if may_reset:
            limit = self._limits[request_id] = self.reset_limit
        timeout_ms = self._server_timeout_ms(limit.seconds)
        if direct is None:
            self.send(self.dialect.step(request_id, action, timeout_ms))
            return request_id
        try:
            direct.send(number, action, timeout_ms)
            self.numbers.sent_direct()
            self._in_flight_direct = request_id, direct
        except BaseException as error:
            self.session.fail_if_interrupted(error)
            raise
        return request_id

    def _direct_connection(self) -> DirectConnection | None:
        if self.direct_connector.is_closed:
            return None
        now_s = time.monotonic()
        if now_s >= self._next_stream_check_s:
            self._next_stream_check_s = now_s + _STREAM_PERIOD_S
            # A direct connection of a session that the endpoint has ended is of no use.
            if self.stream.has_ended():
                self.direct_connector.close()
        return self.direct_connector.connection()

    def receive_step(self, request_id: str) -> StepResult:
        """Wait for the result of the oldest request, a step; raises as ``reset`` does."""
        self._settle()
        kept = self._kept.pop(request_id, None)
        if kept is None:
            return self._receive_step(request_id, self._limits.pop(request_id, self.step_limit))
        if isinstance(kept, StepResult):
            return kept
        try:
            raise kept
        finally:
            del kept  # breaks a reference cycle, which would keep the shared memory

    def _receive_step(
        self, request_id: str, limit: Limit, left_s: float | None = None
    ) -> StepResult:
        try:
            done = self._receive(request_id, StepDone, limit, left_s)
        except RemoteEnvError:
            self.direct_connector.on_lanes_lost()
            raise
        try:
            result = self.dialect.step_result(done)
        except CodecError as error:
            raise self.session.broken(_MISFIT.format(error), request_id) from error
        self._episode_ids = result.episode_ids
        self._has_ended = 1 in result.terminated.tobytes() + result.truncated.tobytes()
        return result

    def _receive(
        self, request_id: str, kind: type[ResponseT], limit: Limit, left_s: float | None = None
    ) -> ResponseT:
        """Wait for the answer to the oldest request that was sent on the stream.

        Any error that ends the session closes the stream, too.

        Args:
            request_id: Id of the request.
            kind: Type of the answer.
            limit: What limits the request; a timeout names it. A long wait for resets is logged.
            left_s: What is left of that; None: all.
        """
        self.session.require_open()
        wait_s = (limit.seconds if left_s is None else left_s) + allowance_s(limit.seconds)
        try:
            with self._reporting_resets() if limit is self.reset_limit else _NOTHING:
                frame = self.stream.receive(wait_s)
            self.session.num_received += 1
            return self._read(frame, request_id, kind)
        except RlmeshError as error:
            name_limit(error, limit, left_s)
            if isinstance(error, EndpointError):
                self.session.fail(error)
            if self.session.has_failed:
                self.stream.close()
            raise
        except BaseException as error:
            self.session.fail_if_interrupted(error)
            raise

    def _read(self, frame: bytes, request_id: str, kind: type[ResponseT]) -> ResponseT:
        try:
            response = self.dialect.frames.parse_response(frame)
        except CodecError as error:
            raise self.session.broken(f"the answer does not decode: {error}", request_id) from error
        return self.session.accept(response, request_id, kind)

    def _reporting_resets(self) -> contextlib.AbstractContextManager[None]:
        return called_after(_SLOW_RESET_S, partial(self._report_resets, time.monotonic()))

    def _settle(self) -> None:
        """Receive and keep a pending direct answer: stream and connection have no common order.

        Every request and every answer begins here, so a fork is refused here, too.
        """
        if os.getpid() != self._pid:
            raise forked(self._pid, self.address)
        with self._settling:
            if self._in_flight_direct is None:
                return
            (request_id, direct), self._in_flight_direct = self._in_flight_direct, None
            try:
                self._kept[request_id] = self._receive_direct(request_id, direct)
            except RlmeshError as error:
                self._kept[request_id] = error
            except BaseException as error:
                self.session.fail_if_interrupted(error)
                raise

    def _receive_direct(self, request_id: str, direct: DirectConnection) -> StepResult:
        limit = self._limits.pop(request_id, self.step_limit)
        limit_s = limit.seconds
        end_s = time.monotonic() + limit_s
        with self._reporting_resets() if limit is self.reset_limit else _NOTHING:
            frame = direct.receive(_DIRECT_TIMEOUT_SHARE * limit_s)
        if frame is None:
            # The step keeps its deadline; only the endpoint knows whether it has begun.
            left_s = _left_s(end_s, limit_s)
            number = str(self.numbers.fall_back_to_join())
            request = self.dialect.step(number, direct.action, endpoint_timeout_ms(left_s))
            self.session.require_open()
            self.send(request, is_repeated=True)
            return self._receive_step(request_id, limit, left_s)
        self.numbers.direct_answered(int(request_id))
        completed: tuple[EpisodeRecord, ...] = ()
        infos: Infos = {}
        if frame:
            done = self._read(bytes(frame), request_id, StepDone)
            completed, infos = done.completed_episodes, done.infos
            self._episode_ids = done.episode_ids
        observation, results = direct.result()
        self._has_ended = 1 in results.terminated.tobytes() + results.truncated.tobytes()
        return StepResult(
            observation,
            results.rewards,
            results.terminated,
            results.truncated,
            infos,
            completed,
            self._episode_ids,
        )

    def wakeup(self) -> WakeupDescriptors | None:
        """Return the descriptors that signal the answer to a direct step; None: there is none."""
        return (
            None
            if self._in_flight_direct is None
            else self._in_flight_direct[1].worker_socket.wakeup
        )

    def render(self) -> Pictures | bytes | None:
        """Return a picture of each lane, or one PNG of all; None: the render mode gives none."""
        self._settle()
        self.session.require_open()
        # Pictures come over shared memory, from an endpoint that can send them there.
        if capabilities.DIRECT_RENDER in self.answer.capabilities:
            direct = None if self.session.has_unanswered else self._direct_connection()
            if direct is not None and direct.transport == SHARED_MEMORY:
                return self._render_directly(direct)
        return self._render_on_stream()

    def _render_directly(self, direct: DirectConnection) -> Pictures | bytes | None:
        numbers, limit_s = self.numbers, self.step_limit.seconds
        end_s = time.monotonic() + limit_s
        number, timeout_ms = numbers.next_number, self._server_timeout_ms(limit_s)
        try:
            numbers.sent_direct()
            pictures = direct.render(number, timeout_ms, _DIRECT_TIMEOUT_SHARE * limit_s)
        except BaseException as error:
            self.session.fail_if_interrupted(error)
            raise
        if pictures is not None:
            numbers.direct_answered(number)
            return pictures
        self.session.require_open()  # another thread may have closed it
        try:
            return self._render_on_stream(numbers.fall_back_to_join(), _left_s(end_s, limit_s))
        except RemoteEnvError:
            if not direct.is_open:  # the next step waits on the stream, or is answered there
                self.direct_connector.on_lanes_lost()
            raise

    def _render_on_stream(self, repeated: int = 0, left_s: float | None = None) -> bytes | None:
        """Return a PNG of all lanes; None: the render mode gives none.

        Args:
            repeated: Number of a request that was sent on a direct connection; 0: a new request.
            left_s: What is left of its time; None: all.
        """
        limit = self.step_limit
        request_id = str(repeated or self.numbers.next_number)
        timeout_ms = self._server_timeout_ms(limit.seconds if left_s is None else left_s)
        self.send(Render(request_id, timeout_ms=timeout_ms), is_repeated=repeated > 0)
        return self._receive(request_id, Rendered, limit, left_s).png

    def call(self, name: str, *arguments: object, lanes: Sequence[int] = ()) -> tuple[Any, ...]:
        """Call a method of the environment of each lane, or read an attribute that is not a method.

        It happens after all earlier requests and never during a step. Episodes continue. Changes
        last as long as the session has its environment: not beyond a crash (then a Reset creates a
        new one), nor into the next session.

        Args:
            name: One that the operator allows (``EnvServer(..., allow_calls=...)``), of the
                environment or of one of its wrappers.
            arguments: By position: numbers, text, bytes, arrays, and lists and dicts of these, up
                to 512 KiB. Tuples arrive as lists.
            lanes: Indices, each once; empty for all.

        Returns:
            What each lane returned, in the order of ``lanes``. Objects come back as text, as they
            do in infos.

        Raises:
            ConfigurationError: The endpoint does not allow it; nothing was sent.
            CodecError: An argument cannot be encoded; nothing was sent.
            LocalProtocolError: The first request of the session has not been answered yet.
            RemoteEnvError: The environment raised: its episodes continue, and lanes before the one
                that raised have been called. After a TIMEOUT they continue, too: the next request
                waits until the call has returned, or its worker is killed. Only CRASHED ends them:
                the next step is answered with an error, and a Reset starts over.
            EndpointError: The session broke.
        """
        self._settle()
        self.session.require_open()
        if not self.session.require_call(name):
            # It changes nothing, but its reply says that there is a session, or why there is none.
            self._render_on_stream()
        return self._when_started(lambda: self._call(name, arguments, tuple(lanes)))

    def _call(
        self, name: str, arguments: tuple[object, ...], lanes: tuple[int, ...]
    ) -> tuple[Any, ...]:
        numbers, limit = self.numbers, self.step_limit
        is_numbered = capabilities.NUMBERED_REQUESTS in self.answer.capabilities
        num_before = numbers.next_number - 1 if is_numbered else self.session.num_sent
        timeout_ms = self._server_timeout_ms(limit.seconds)
        data = lane_calls_v1.pack_call(LaneCall(name, arguments, lanes, num_before, timeout_ms))
        try:
            results = self._exchange(data, limit.seconds + allowance_s(limit.seconds))
        except AccessDeniedError:
            raise  # the call has not reached the session
        except (EndpointError, RemoteProtocolError) as error:
            self.session.fail(error)  # it may or may not have been executed
            raise
        except BaseException as error:
            self.session.fail_if_interrupted(error)
            raise
        numbers.sent()
        if isinstance(results, CallFailed):
            failed = RemoteEnvError(results.code.name, results.message, True, results.debug_info)
            name_limit(failed, limit)
            raise failed
        return results

    def _exchange(self, data: bytes, timeout_s: float) -> tuple[Any, ...] | CallFailed:
        try:
            reply = self._connect_options.call(
                self._channel,
                lane_calls_v1.CALL,
                data,
                timeout_s=timeout_s,
                session=self._own_metadata,
            )
            return lane_calls_v1.parse_response(reply)
        except CodecError as error:
            raise RemoteProtocolError(f"the answer to a call does not decode: {error}") from error
        except EndpointError as error:
            if status_of(error)[0] is grpc.StatusCode.NOT_FOUND:
                lost = EndpointLostError("the session is not open any more", self.address)
                raise lost from error.__cause__
            raise

    def _when_started(self, ask: Callable[[], T]) -> T:
        end_s = time.monotonic() + self._start_timeout_s
        while True:
            try:
                return ask()
            except RemoteEnvError as error:
                if not is_still_starting(error):
                    raise
                if time.monotonic() >= end_s:
                    error.message = (
                        f"{NOT_STARTED} {self._start_timeout_s:g} s; mend what is slow there, or "
                        "raise start_timeout_s"
                    )
                    raise

    def close(self) -> None:
        """End the session. Idempotent; a broken session gets no Close request."""
        is_first, has_failed = not self.session.is_closed, self.session.has_failed
        # First: a thread that waits for a direct answer must not go on with the stream.
        self.session.close()
        if not is_first or os.getpid() != self._pid:
            return
        self.direct_connector.close()
        if sys.is_finalizing():
            return  # gRPC's threads are gone; the endpoint notices the end of the process
        # In a thread of its own: Ctrl-C in the middle of a call can leave gRPC's lock held, and
        # the next thread that needs it would wait for ever.
        closing = threading.Thread(
            target=self._send_close_and_end, name="rlmesh-ray-close", daemon=True
        )
        try:
            closing.start()
        except RuntimeError:  # from Python 3.12 on no thread starts while the process ends
            if not has_failed:
                self._send_close_and_end()
        else:
            closing.join(_CLOSE_TIMEOUT_S + _CUT_OFF_TIMEOUT_S)

    def _send_close_and_end(self) -> None:
        with contextlib.suppress(Exception):  # a broken session is closed as well
            request = Close(str(self.numbers.next_number))
            self.stream.send(self._pack(request))
            end_s = time.monotonic() + _CLOSE_TIMEOUT_S
            is_answered = False
            while not is_answered:  # past the unread answers of earlier requests
                frame = self.stream.receive(max(0.0, end_s - time.monotonic()))
                response = self.dialect.frames.parse_response(frame)
                is_answered = response.request_id == request.request_id
        self.stream.close()

    def send(self, request: EnvRequest, *, is_repeated: bool = False) -> None:
        """Send a request on the stream, without waiting.

        ``is_repeated``: it was sent on a direct connection before, and keeps its number.
        """
        frame = self._pack(request)
        try:
            self.stream.send(frame)
            self.session.num_sent += 1
            if not is_repeated:
                self.numbers.sent()
        except BaseException as error:
            self.session.fail_if_interrupted(error)
            raise

    def _configure(self) -> None:
        if not self.dialect.edition:
            return
        request = Configure(str(self.numbers.next_number), self.dialect.edition)
        try:
            self.send(request)
            limit = Limit("", self._connect_options.timeout_s)
            self._receive(request.request_id, Configured, limit)
        except RemoteEnvError as error:
            self.close()
            raise HandshakeRefusedError(f"{self.address} takes no session: {error}") from error
        except BaseException:
            self.close()
            raise


def _left_s(end_s: float, limit_s: float) -> float:
    return max(end_s - time.monotonic(), (1 - _DIRECT_TIMEOUT_SHARE) * limit_s)
