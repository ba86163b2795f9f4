"""EnvClient: one session with an EnvService, in batches of columns.

RemoteEnv, RemoteVectorEnv and the RLlib plug-in are made of this.
"""

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray

from rlmesh_ray import __version__
from rlmesh_ray.client.channel import Dial, handshake_with
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.client.lane_calls import call_lanes, require_allowed
from rlmesh_ray.errors import (
    CodecError,
    ConfigurationError,
    EndpointClosedError,
    EndpointLostError,
    HandshakeRefusedError,
    LocalProtocolError,
    RemoteEnvError,
    RemoteProtocolError,
    RlmeshError,
)
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import Answer, check_answer, make_offer
from rlmesh_ray.protocol.messages import (
    Close,
    EnvFailed,
    EnvRequest,
    EnvResponse,
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
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.lanes_v1 import LaneCall
from rlmesh_ray.wire.rlmesh_v1 import env as wire
from rlmesh_ray.wire.rlmesh_v1 import values
from rlmesh_ray.wire.rlmesh_v1.limits import DEFAULT_MESSAGE_BYTES, max_response_bytes

_HANDSHAKE = "/rlmesh.env.v1.EnvService/Handshake"
_JOIN = "/rlmesh.env.v1.EnvService/Join"
_CLOSE_TIMEOUT_S = 2.0
_CUT_OFF_TIMEOUT_S = 1.0

ResponseT = TypeVar("ResponseT", ResetDone, StepDone, Rendered)


@dataclass(frozen=True, slots=True)
class ResetResult:
    """First observations, over all lanes."""

    observation: list[Column]
    infos: Infos
    episode_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one vector step gave; every array has one entry a lane."""

    observation: list[Column]
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    infos: Infos
    completed_episodes: tuple[EpisodeRecord, ...]
    episode_ids: tuple[str, ...]


def shake_hands(dial: Dial) -> Answer:
    """Ask an endpoint what it is, without opening a session.

    Raises:
        EndpointError: It cannot be reached.
        HandshakeRefusedError: It does not speak this package's generation or edition.
    """
    channel = dial.open()
    try:
        return _handshake(dial, channel)
    finally:
        channel.close()


class EnvClient:
    """An open session: ``num_envs`` lanes that nobody else touches.

    An error that the endpoint calls recoverable leaves the session usable. Any other one ends it
    (edition 2026.06, "Timeouts and Errors"), as does an answer that breaks the protocol: what is
    asked afterwards fails here, with EndpointLostError, and only ``close`` is left to do.

    Args:
        dial: The endpoint.
        step_timeout_s: How long to wait for any answer; the endpoint is told to give up a
            little earlier, so that a hanging environment is answered in band.

    Raises:
        EndpointError: The endpoint cannot be reached, wants another token, or is full.
        HandshakeRefusedError: It does not speak this package's generation or edition.
    """

    def __init__(self, dial: Dial, *, step_timeout_s: float = 60.0) -> None:
        self._dial = dial
        self._timeout_s = step_timeout_s
        self._request_ids = map(str, itertools.count(1))
        self._num_sent = 0
        self._has_received = False
        self._is_closed = False
        self._end: RlmeshError | None = None
        self._channel = dial.open()
        try:
            self.answer = _handshake(dial, self._channel)
            self.contract = _contract(self.answer, dial.address)
        except BaseException:
            self._channel.close()
            raise
        if max_response_bytes(self.contract) > DEFAULT_MESSAGE_BYTES:
            self._channel.close()
            self._channel = dial.open(max_response_bytes(self.contract))
        session_id = self.answer.capabilities.get(capabilities.SESSION, "")
        own = ((capabilities.SESSION_METADATA_KEY, session_id),) if session_id else ()
        self._metadata = dial.metadata + own
        self._stream = JoinStream(self._channel, _JOIN, self._metadata, dial.address)

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
            EndpointError: The session broke.
        """
        return self.receive_reset(self.send_reset(seeds=seeds, options=options, lanes=lanes))

    def send_reset(
        self,
        *,
        seeds: Sequence[int] = (),
        options: Mapping[str, object] | None = None,
        lanes: Sequence[int] = (),
    ) -> str:
        """Start new episodes without waiting; return the request's id."""
        request = Reset(
            next(self._request_ids),
            tuple(seeds),
            options or {},
            self._server_timeout_ms,
            self._some(lanes),
        )
        self._send(request)
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
        done = self._receive(request_id, ResetDone)
        return ResetResult(self._observation(done.observation), done.infos, done.episode_ids)

    def step(self, action: Sequence[Column]) -> StepResult:
        """Apply one action a lane and wait for the result."""
        return self.receive_step(self.send_step(action))

    def send_step(self, action: Sequence[Column]) -> str:
        """Apply one action a lane without waiting; return the request's id.

        Args:
            action: Columns over all lanes, of the action space's dtypes.
        """
        data = values.encode_batch(self.contract.action_space, list(action), self.contract.num_envs)
        request = Step(next(self._request_ids), data, self._server_timeout_ms)
        self._send(request)
        return request.request_id

    def receive_step(self, request_id: str) -> StepResult:
        """Wait for the result of the oldest request that was sent, a step.

        Raises:
            RemoteEnvError: The endpoint answered with an error.
            EndpointError: The session broke.
        """
        done = self._receive(request_id, StepDone)
        return StepResult(
            observation=self._observation(done.observation),
            rewards=np.asarray(done.rewards, np.float64),
            terminated=np.frombuffer(done.terminated, np.bool_).copy(),
            truncated=np.frombuffer(done.truncated, np.bool_).copy(),
            infos=done.infos,
            completed_episodes=done.completed_episodes,
            episode_ids=done.episode_ids,
        )

    def render(self) -> bytes | None:
        """Return a PNG, or None where the render mode gives no picture."""
        request = Render(next(self._request_ids), timeout_ms=self._server_timeout_ms)
        self._send(request)
        return self._receive(request.request_id, Rendered).png

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
        self._require_open()
        require_allowed(self.answer, name, self.address)
        if not self._has_received:
            if self._num_sent:
                raise LocalProtocolError("receive the answer to the first request before a call")
            # The call must not come before the Join: this does nothing, but its answer tells that
            # there is a session, or why there is none.
            self.render()
        call = LaneCall(name, arguments, tuple(lanes), self._num_sent, self._server_timeout_ms)
        return call_lanes(self._channel, call, self._metadata, self.address, self._timeout_s)

    def close(self) -> None:
        """End the session. Idempotent; a broken session is closed without a word."""
        if self._is_closed:
            return
        self._is_closed = True
        if sys.is_finalizing():
            return  # gRPC's threads are gone, nothing would ever answer; the process's end is heard
        # In a thread of its own: Ctrl-C in the middle of a call can leave gRPC's lock held, and
        # whoever asks for it next waits for ever.
        goodbye = threading.Thread(target=self._say_goodbye, name="rlmesh-ray-close", daemon=True)
        goodbye.start()
        goodbye.join(_CLOSE_TIMEOUT_S + _CUT_OFF_TIMEOUT_S)

    def _say_goodbye(self) -> None:
        with contextlib.suppress(Exception):  # whatever broke the session, it is closed now
            self._finish(Close(next(self._request_ids)))
        self._stream.close()
        self._channel.close()

    def _finish(self, request: Close) -> None:
        """Send Close and wait for its answer, past those of requests that nobody waited for."""
        self._stream.send(wire.pack_request(request))
        end_s = time.monotonic() + _CLOSE_TIMEOUT_S
        is_answered = False
        while not is_answered:
            frame = self._stream.receive(max(0.0, end_s - time.monotonic()))
            is_answered = wire.parse_response(frame).request_id == request.request_id

    @property
    def _server_timeout_ms(self) -> int:
        return max(1, int(self._timeout_s * 900))

    def _require_open(self) -> None:
        if self._is_closed:
            raise EndpointClosedError("the session is closed", self.address)
        if self._end is not None:
            raise EndpointLostError(
                f"the session ended with an error ({self._end}); close it and open a new one",
                self.address,
            ) from self._end

    def _send(self, request: EnvRequest) -> None:
        self._require_open()
        self._stream.send(wire.pack_request(request))
        self._num_sent += 1

    def _receive(self, request_id: str, kind: type[ResponseT]) -> ResponseT:
        frame = self._stream.receive(self._timeout_s)
        self._has_received = True
        try:
            return self._response(frame, request_id, kind)
        except RemoteEnvError as error:
            if not error.is_recoverable:
                self._end = self._end or error
            raise
        except RemoteProtocolError as error:
            self._end = self._end or error
            raise

    def _response(self, frame: bytes, request_id: str, kind: type[ResponseT]) -> ResponseT:
        try:
            response: EnvResponse = wire.parse_response(frame)
        except CodecError as error:
            raise RemoteProtocolError(f"the answer does not decode: {error}", request_id) from error
        if response.request_id != request_id:
            raise RemoteProtocolError(
                f"the answer is for request {response.request_id!r}", request_id
            )
        if isinstance(response, EnvFailed):
            raise RemoteEnvError(
                response.code.name,
                response.message,
                response.is_recoverable,
                response.debug_info,
                response.interrupted_episodes,
            )
        if not isinstance(response, kind):
            name = type(response).__name__
            raise RemoteProtocolError(f"{name} does not answer this request", request_id)
        return response

    def _observation(self, data: bytes) -> list[Column]:
        columns = values.decode_batch(self.contract.observation_space, data, self.contract.num_envs)
        # Own, writable memory: torch warns about read-only arrays, and callers keep views.
        return [column if isinstance(column, tuple) else np.array(column) for column in columns]


def _handshake(dial: Dial, channel: grpc.Channel) -> Answer:
    offer = make_offer(
        "rlmesh-ray",
        __version__,
        {capabilities.NDARRAY: "", capabilities.SAME_STEP: "", capabilities.SPACES_CORE: ""},
        text=dial.text_sha256,
    )
    reply = dial.call(channel, _HANDSHAKE, wire.pack_offer(offer))
    with handshake_with(dial.address):
        answer: Answer = wire.parse_answer(reply)
        check_answer(offer, answer)
    return answer


def _contract(answer: Answer, address: str) -> EnvContract:
    """Return the contract of a compatible answer, if a session can be held under it."""
    contract = answer.contract
    if not isinstance(contract, EnvContract):
        raise HandshakeRefusedError(
            f"{address}: the server says that it is compatible, but tells no environment contract; "
            "it breaks the protocol, another version of it may not"
        )
    if contract.num_envs < 1:
        raise HandshakeRefusedError(
            f"{address}: the server tells of {contract.num_envs} lanes; it must serve at least 1"
        )
    return contract
