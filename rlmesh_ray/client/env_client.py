"""EnvClient: one session with an EnvService, in batches of columns.

RemoteEnv, RemoteVectorEnv and the RLlib plug-in are made of this.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from rlmesh_ray.client.channel import Dial, Metadata
from rlmesh_ray.client.direct_tcp import ask_for_ticket
from rlmesh_ray.client.env_exchange import EnvExchange, endpoint_timeout_ms, naming_own_limit
from rlmesh_ray.client.env_handshake import connect, shake_hands
from rlmesh_ray.client.join_stream import JoinStream, naming_limit
from rlmesh_ray.client.lane_calls import call_lanes, require_allowed
from rlmesh_ray.client.results import ResetResult, StepResult
from rlmesh_ray.errors import (
    AccessDeniedError,
    CodecError,
    ConfigurationError,
    EndpointError,
    HandshakeRefusedError,
    LocalProtocolError,
    RemoteEnvError,
    RemoteProtocolError,
    RlmeshError,
)
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.messages import (
    Configure,
    Configured,
    EpisodeRecord,
    Infos,
    Render,
    Rendered,
    ResetDone,
    StepDone,
)
from rlmesh_ray.protocol.outcomes import NOT_STARTED
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.transport.direct_client import DirectClient
from rlmesh_ray.transport.road_keeper import RoadKeeper
from rlmesh_ray.waiting import Signal
from rlmesh_ray.wire.lanes_v1 import LaneCall

__all__ = ["EnvClient", "ResetResult", "StepResult", "shake_hands"]

T = TypeVar("T")

_JOIN = "/rlmesh.env.v1.EnvService/Join"
_PART_ON_ROAD = 0.95
"""Of the time for a step. A worker that does not come to it has no deadline of the endpoint's."""
_LONGEST_ALLOWANCE_S = 1.0
"""So long after a step's time is up the endpoint is heard, which had little of it left."""
_STREAM_PERIOD_S = 0.25
"""So often a client that steps on a direct road looks whether its stream has ended."""
_NO_SENSE = "the answer does not fit the contract: {}"


class EnvClient:
    """An open session: ``num_envs`` lanes that nobody else touches.

    An error that the endpoint calls recoverable leaves the session usable. Any other one ends it
    (edition 2026.06, "Timeouts and Errors"), as does an answer that breaks the protocol: what is
    asked afterwards fails here, with EndpointLostError, and only ``close`` is left to do. So it is
    after an exception in the middle of a request, as Ctrl-C raises it.

    Args:
        dial: The endpoint.
        step_timeout_s: How long to wait for any answer; the endpoint is told to give up a
            little earlier, so that a hanging environment is answered in band.
        start_timeout_s: How long the environment of the session may take to start, before the
            first reset or call, or the first reset after its worker died. Until then, requests
            that the endpoint answers with a timeout because of that are sent again.
        transport: See ``RemoteEnv``.
        spin: See ``RemoteEnv``.

    Raises:
        ConfigurationError: What ``transport`` insists on the endpoint does not offer.
        EndpointError: The endpoint cannot be reached, wants another token, or is full.
        HandshakeRefusedError: It speaks no generation or edition of this package.
    """

    def __init__(
        self,
        dial: Dial,
        *,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
        transport: str = "auto",
        spin: bool | None = None,
    ) -> None:
        self._dial = dial
        self._timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        connection = connect(dial)
        self.answer, self.contract = connection.answer, connection.contract
        self._tongue = connection.tongue
        self._channel, self._session_id = connection.channel, connection.session_id
        try:
            self._roads = RoadKeeper(
                self.answer.capabilities,
                self._session_id,
                self.contract,
                self._server_timeout_ms,
                dial.address,
                transport=transport,
                spin=spin,
                ask=partial(
                    ask_for_ticket,
                    dial,
                    connection.channel,
                    self._own_metadata,
                    self._server_timeout_ms,
                ),
            )
        except BaseException:
            self._channel.close()
            raise
        # The request whose answer comes over a road, and what has been fetched early. Whoever comes
        # while another thread fetches it waits.
        self._settling = threading.RLock()
        self._on_road: tuple[str, DirectClient] | None = None
        self._kept: dict[str, StepResult | RlmeshError] = {}
        self._episode_ids: tuple[str, ...] = ()
        self._look_at_stream_s = 0.0
        self._stream = JoinStream(self._channel, _JOIN, connection.metadata, dial.address)
        self._exchange = EnvExchange(self._stream, self._channel, self._tongue.frames, dial.address)
        self._configure()

    @property
    def address(self) -> str:
        """Where the endpoint is."""
        return self._dial.address

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
            options: Handed to the environment.
            lanes: Indices; empty for all. Only some of them can be reset where the endpoint offers
                it (``rlmesh_ray.partial_reset.v1``).

        Raises:
            ConfigurationError: It cannot reset single lanes; nothing was sent.
            RemoteEnvError: The endpoint answered with an error.
            RemoteProtocolError: The answer is none; that ends the session.
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
        """Start new episodes without waiting; return the request's id."""
        self._settle()
        request = self._tongue.reset(
            self._exchange.next_id,
            seeds=seeds,
            options=options or {},
            timeout_ms=self._server_timeout_ms,
            lanes=self._some(lanes),
        )
        self._exchange.send(request)
        return request.request_id

    def _some(self, lanes: Sequence[int]) -> tuple[int, ...]:
        """Return ``lanes`` as the wire has them: none where all are meant, as every peer knows."""
        if tuple(lanes) == tuple(range(self.contract.num_envs)):
            return ()
        if lanes and capabilities.PARTIAL_RESET not in self.answer.capabilities:
            raise ConfigurationError(
                f"{self.address} resets all of its {self.contract.num_envs} lanes or none (it does "
                f"not offer {capabilities.PARTIAL_RESET}); reset them all, or have it serve 1 lane"
            )
        return tuple(lanes)

    def receive_reset(self, request_id: str) -> ResetResult:
        """Wait for the result of the oldest request that was sent, a reset."""
        done = self._exchange.receive(request_id, ResetDone, self._timeout_s)
        self._roads.lanes_were_reset()
        try:
            result = self._tongue.reset_result(done)
        except CodecError as error:
            raise self._exchange.broken(_NO_SENSE.format(error), request_id) from error
        self._episode_ids = result.episode_ids
        return result

    def step(self, action: Sequence[Column]) -> StepResult:
        """Apply one action a lane and wait for the result."""
        return self.receive_step(self.send_step(action))

    def send_step(self, action: Sequence[Column], *, is_last: bool = True) -> str:
        """Apply one action a lane without waiting; return the request's id.

        Args:
            action: Columns over all lanes, of the action space's dtypes.
            is_last: Whether its answer is received before anything else is sent. If not, and this
                step travelled on a direct road, what is sent next would wait for it.
        """
        self._settle()
        self._exchange.require_open()
        # What is still on the stream comes first, and a road would overtake it.
        is_alone = is_last and self._exchange.num_sent == self._exchange.num_received
        road = self._direct_road() if is_alone else None
        request_id = self._exchange.next_id
        if road is None:
            self._send_on_stream(request_id, action)
        else:
            self._send_on_road(request_id, action, road)
        return request_id

    def _direct_road(self) -> DirectClient | None:
        """Return the direct road; None: there is none, or the session's stream has ended."""
        now_s = time.monotonic()
        if now_s >= self._look_at_stream_s:
            self._look_at_stream_s = now_s + _STREAM_PERIOD_S
            if self._stream.has_ended():
                self._roads.close()
        return self._roads.road()

    def _send_on_road(self, request_id: str, action: Sequence[Column], road: DirectClient) -> None:
        try:
            road.send(int(request_id), action, self._server_timeout_ms)
            self._exchange.numbers.sent_direct()
            self._on_road = request_id, road
        except BaseException as error:
            self._exchange.give_up_if_interrupted(error)
            raise

    def _send_on_stream(
        self, request_id: str, action: Sequence[Column], timeout_ms: int = 0
    ) -> None:
        timeout_ms = timeout_ms or self._server_timeout_ms
        self._exchange.send(self._tongue.step(request_id, action, timeout_ms))

    def receive_step(self, request_id: str) -> StepResult:
        """Wait for the result of the oldest request that was sent, a step.

        Raises:
            RemoteEnvError: The endpoint answered with an error.
            RemoteProtocolError: The answer is none; that ends the session.
            EndpointError: The session broke.
        """
        self._settle()
        if request_id in self._kept:
            return _told(self._kept.pop(request_id))
        return self._receive_step(request_id, self._timeout_s)

    def _receive_step(self, request_id: str, timeout_s: float) -> StepResult:
        """Wait for the result of a step that was sent on the stream."""
        try:
            done = self._exchange.receive(request_id, StepDone, timeout_s)
        except RemoteEnvError:
            self._roads.lanes_were_lost()
            raise
        try:
            result = self._tongue.step_result(done)
        except CodecError as error:
            raise self._exchange.broken(_NO_SENSE.format(error), request_id) from error
        self._episode_ids = result.episode_ids
        return result

    def _settle(self) -> None:
        """Wait for what the road owes, and keep it: requests on two roads have no order."""
        with self._settling:
            if self._on_road is None:
                return
            self._exchange.require_own()
            (request_id, road), self._on_road = self._on_road, None
            try:
                self._kept[request_id] = self._from_road(request_id, road)
            except RlmeshError as error:
                self._kept[request_id] = error
            except BaseException as error:
                self._exchange.give_up_if_interrupted(error)
                raise

    def _from_road(self, request_id: str, road: DirectClient) -> StepResult:
        end_s = time.monotonic() + self._timeout_s
        frame = road.receive(_PART_ON_ROAD * self._timeout_s)
        numbers = self._exchange.numbers
        if frame is None:
            # The step keeps its deadline; whether it has begun, the endpoint knows.
            left_s = max(end_s - time.monotonic(), (1 - _PART_ON_ROAD) * self._timeout_s)
            timeout_ms = endpoint_timeout_ms(left_s)
            self._send_on_stream(str(numbers.ask_on_join()), road.action, timeout_ms)
            patience_s = left_s + min(_LONGEST_ALLOWANCE_S, self._timeout_s)
            try:
                with naming_limit(self._timeout_s, self.address):
                    return self._receive_step(request_id, patience_s)
            except RemoteEnvError as error:
                error.message = naming_own_limit(error.message, timeout_ms, self._timeout_s)
                raise
        numbers.direct_answered(int(request_id))
        completed: tuple[EpisodeRecord, ...] = ()
        infos: Infos = {}
        if frame:
            done = self._exchange.read(frame, request_id, StepDone)
            completed, infos, self._episode_ids = (
                done.completed_episodes,
                done.infos,
                done.episode_ids,
            )
        results = road.results()
        return StepResult(
            road.observation(),
            results.rewards,
            results.terminated,
            results.truncated,
            infos,
            completed,
            self._episode_ids,
        )

    def signal(self) -> Signal | None:
        """Return what tells of the answer to a step on a direct road; None: there is none."""
        return None if self._on_road is None else self._on_road[1].signal

    def render(self) -> bytes | None:
        """Return a PNG, or None where the render mode gives no picture."""
        self._settle()
        request = Render(self._exchange.next_id, timeout_ms=self._server_timeout_ms)
        self._exchange.send(request)
        return self._exchange.receive(request.request_id, Rendered, self._timeout_s).png

    def call(self, name: str, *arguments: object, lanes: Sequence[int] = ()) -> tuple[Any, ...]:
        """Call a method of the environment of each lane, or read an attribute that is none.

        It happens after everything that was sent before and never during a step. Episodes go on.
        What it changes lasts as long as the session has its environment: not beyond a crash (then
        a Reset creates a new one), nor into the next session.

        Args:
            name: One that the operator allows (``EnvServer(..., allow_calls=...)``), of the
                environment or of one of its wrappers.
            arguments: By position: numbers, text, bytes, arrays, and lists and dicts of these, up
                to 512 KiB. Tuples arrive as lists.
            lanes: Which, each once; empty for all.

        Returns:
            What each lane returned, in the order of ``lanes``. Objects come back as text, as they
            do in infos.

        Raises:
            ConfigurationError: The endpoint does not allow it; nothing was sent.
            CodecError: An argument cannot travel; nothing was sent.
            LocalProtocolError: The first request of the session has not been answered yet.
            RemoteEnvError: The environment raised: its episodes go on, and lanes before the one
                that raised have been called. Only with the codes CRASHED and TIMEOUT they do not:
                the next step is answered with an error, and a Reset starts over.
            EndpointError: The session broke.
        """
        self._exchange.require_own()
        self._settle()
        self._exchange.require_open()
        require_allowed(self.answer, name, self.address)
        if not self._exchange.num_received:
            if self._exchange.num_sent:
                raise LocalProtocolError("receive the answer to the first request before a call")
            # The call must not come before the Join: this does nothing, but its answer tells that
            # there is a session, or why there is none.
            self.render()
        return self._when_started(lambda: self._call(name, arguments, tuple(lanes)))

    def _call(
        self, name: str, arguments: tuple[object, ...], lanes: tuple[int, ...]
    ) -> tuple[Any, ...]:
        exchange = self._exchange
        is_numbered = capabilities.NUMBERED_REQUESTS in self.answer.capabilities
        num_before = exchange.numbers.next_number - 1 if is_numbered else exchange.num_sent
        call = LaneCall(name, arguments, lanes, num_before, self._server_timeout_ms)
        try:
            results = call_lanes(self._channel, call, self._metadata, self.address, self._timeout_s)
        except (CodecError, AccessDeniedError):
            raise  # it has not come to the session
        except RemoteEnvError:
            exchange.numbers.sent()
            raise
        except (EndpointError, RemoteProtocolError) as error:
            exchange.give_up(error)  # whether it was executed nobody knows
            raise
        except BaseException as error:
            exchange.give_up_if_interrupted(error)
            raise
        exchange.numbers.sent()
        return results

    def _when_started(self, ask: Callable[[], T]) -> T:
        """Return what ``ask`` returns, again and again while the environment is still starting."""
        end_s = time.monotonic() + self._start_timeout_s
        while True:
            try:
                return ask()
            except RemoteEnvError as error:
                if error.code != "TIMEOUT" or not error.message.startswith(NOT_STARTED):
                    raise
                if time.monotonic() >= end_s:
                    raise _never_started(error, self._start_timeout_s) from error

    def close(self) -> None:
        """End the session. Idempotent; a broken session is closed without a word."""
        # A thread that waits at the road is not to go on with the stream.
        self._exchange.shut()
        if self._exchange.is_own:
            self._roads.close()
        self._exchange.close()

    @property
    def _metadata(self) -> Metadata:
        """What a call into the session carries; the token may have been replaced meanwhile."""
        return self._dial.metadata + self._own_metadata

    @property
    def _own_metadata(self) -> Metadata:
        return ((capabilities.SESSION_METADATA_KEY, self._session_id),) if self._session_id else ()

    @property
    def _server_timeout_ms(self) -> int:
        return endpoint_timeout_ms(self._timeout_s)

    def _configure(self) -> None:
        """Name the edition, where the generation wants that before anything else."""
        if not self._tongue.edition:
            return
        request = Configure(self._exchange.next_id, self._tongue.edition)
        try:
            self._exchange.send(request)
            self._exchange.receive(request.request_id, Configured, self._dial.timeout_s)
        except RemoteEnvError as error:
            self.close()
            raise HandshakeRefusedError(f"{self.address} takes no session: {error}") from error
        except BaseException:
            self.close()
            raise


def _never_started(error: RemoteEnvError, timeout_s: float) -> RemoteEnvError:
    """Return what is raised when the environment has had its time to start."""
    message = f"{NOT_STARTED} {timeout_s:g} s; mend what is slow there, or raise start_timeout_s"
    return RemoteEnvError(
        error.code,
        message,
        error.is_recoverable,
        error.debug_info,
        error.interrupted_episodes,
    )


def _told(kept: StepResult | RlmeshError) -> StepResult:
    if isinstance(kept, StepResult):
        return kept
    try:
        raise kept
    finally:
        del kept  # an error that knows itself keeps the road's memory until somebody collects it
