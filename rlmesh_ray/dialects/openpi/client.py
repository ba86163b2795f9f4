"""A session with an openpi server: one connection for each lane of each route.

The protocol answers one request at a time on a connection, and has neither ids nor episodes. So a
lane has a connection of its own, which is opened anew with each episode: what a server keeps of a
connection, such as a recurrent state, is of one episode. The lanes of a batch are asked at the same
time.
"""

import asyncio
import contextlib
import functools
import itertools
import math
import os
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
)
from websockets.frames import CloseCode
from websockets.http11 import Response

from rlmesh_ray.auth.client_tls import resolve_client_tls
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.fork_guard import forked
from rlmesh_ray.client.model.model_dialect import (
    DialectModelSession,
    Encode,
    EncodedRequest,
    Make,
    ModelReply,
    PredictTelemetry,
    action_of,
)
from rlmesh_ray.dialects.openpi.wire import (
    FULL,
    OBSERVATION,
    SERVER_TIMING,
    decode_actions,
    difference,
    encode_observations,
    facts_of,
    horizon_of,
    pack,
    require_actions,
    require_keys,
    unpack,
)
from rlmesh_ray.errors import (
    AccessDeniedError,
    AddressError,
    CapacityError,
    CodecError,
    ConfigurationError,
    EndpointError,
    EndpointLostError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    RlmeshError,
)
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.protocol.client_session import ModelClientSession
from rlmesh_ray.protocol.handshake import HandshakeResponse
from rlmesh_ray.protocol.messages import ModelErrorCode, ModelFailed, PredictSlot
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.transport.tcp import enable_keepalive
from rlmesh_ray.wire import policy_v1
from rlmesh_ray.wire.rlmesh_v1.limits import DEFAULT_MESSAGE_BYTES

T = TypeVar("T")

_SCHEME = "openpi://"
_CLOSE_S = 1.0
_MOST_OPENING = 16
"""Lanes that connect at a time: servers limit handshakes that are not complete."""
_ANY_HORIZON = 2**16
"""Of servers whose metadata does not say it: clients get the chunks as they come."""
_DENIED = (401, 403)


@dataclass(frozen=True, slots=True)
class _RouteRequest(EncodedRequest):
    """A request of one route, which ``OpenpiSession.ask`` carries out."""

    carry_out: Callable[[float], ModelReply]
    """Takes the time by which it must be done, by ``time.monotonic``."""


@dataclass(slots=True)
class _Route:
    """The connections of one route, by lane."""

    lanes: dict[int, "_Lane"] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a batch is asked."""


class _Lane:
    """One connection. For the loop.

    Args:
        connection: Open.
        metadata: The server's first message.
    """

    def __init__(self, connection: ClientConnection, metadata: dict[str, Any]) -> None:
        self.metadata = metadata
        self.is_used = False
        """Whether it has been asked."""
        self.episode_id = ""
        """Of the first row."""
        self.connection = connection

    @classmethod
    async def open(cls, options: ConnectOptions) -> Self:
        """Connect, and receive the metadata.

        Raises:
            EndpointError: The server cannot be reached, refuses, or sends no metadata.
        """
        connection = await _connection(options)
        address = options.address
        try:
            async with asyncio.timeout(options.timeout_s):
                message = await connection.recv()
            found = message if isinstance(message, str) else unpack(message)
            if isinstance(found, dict):
                return cls(connection, found)
            reason = f"the server sends {str(found)!r:.200} in place of its metadata"
        except CodecError as error:
            reason = f"it is no openpi server: {error}"
        except TimeoutError:
            reason = "the server sends no metadata, as openpi servers do; check the address"
        except (ConnectionClosed, OSError) as error:
            reason = f"the server has closed the connection ({error})"
        except asyncio.CancelledError:
            connection.transport.abort()
            raise
        connection.transport.abort()
        raise EndpointUnreachableError(reason, address)

    async def ask(self, message: bytes) -> bytes | str:
        """Send an observation; return the server's next message: a text is its error.

        Raises:
            ConnectionClosed: The connection has failed.
        """
        self.is_used = True
        with contextlib.suppress(ConnectionClosed):  # the server's text may have come before
            await self.connection.send(message)
        return await self.connection.recv()


class OpenpiSession(DialectModelSession):
    """Sessions with an openpi server, as ``RemoteModel`` needs them; it is its own dialect.

    Args:
        options: The server, ``openpi://HOST:PORT``, with or without a path of its URL.

    Raises:
        ConfigurationError: An option has no meaning for an openpi server.
        EndpointError: The server cannot be reached, or refuses.
    """

    def __init__(self, options: ConnectOptions) -> None:
        if options.edition_text is not None or options.dialect_settings is not None:
            raise ConfigurationError(
                f"{options.address}: openpi has no editions and no settings; leave them out"
            )
        self._options = options
        self._pid = os.getpid()
        self._session = ModelClientSession(options.address)
        self._routes: dict[str, _Route] = {}
        first = _run(_Lane.open(options))
        self._spare: list[_Lane] = [first]
        # Else the loop would keep the connections of a session that is dropped without close().
        self._abort = weakref.finalize(self, _abort, os.getpid(), self._spare, self._routes)
        self._abort.atexit = False
        self._metadata: Mapping[str, Any] = first.metadata
        facts = policy_v1.pack(facts_of(first.metadata))
        self.answer = HandshakeResponse(
            True, "openpi", "openpi", "", (), {capabilities.POLICY: facts}
        )
        """What the metadata says, in place of a handshake."""

    def ask(self, make: Make, timeout_s: float) -> ModelReply:
        """Carry out the requests that ``make`` returns; return the last answer.

        Raises:
            RemoteModelError: The server has answered with an error, which ends the session.
            EndpointError: The session broke or is closed, or no answer came in time.
        """
        if os.getpid() != self._pid:
            raise forked(self._pid, self._options.address)
        self._session.require_open()
        until_s = time.monotonic() + timeout_s
        reply = ModelReply("")
        for request in make(map(str, itertools.count(1))):
            assert isinstance(request, _RouteRequest)
            try:
                reply = request.carry_out(until_s)
            except EndpointError as error:
                # Its answer may come later: the connection cannot be used again.
                self._abort()
                raise self._session.lose(error) from error
            except BaseException as error:
                if not isinstance(error, RlmeshError):
                    why = f"{type(error).__name__} came in the middle of a request"
                    self._session.lose(EndpointLostError(why, self._options.address))
                raise
            if reply.failure is not None:
                raise self._session.error_of(reply.failure)
        return reply

    def close(self) -> None:
        if os.getpid() == self._pid:
            self._session.close()
            _run(_closed(_lanes(self._spare, self._routes)))

    def configure(
        self, ids: Iterator[str], route_id: str, contract: EnvContract, horizon: int = 1
    ) -> EncodedRequest:
        return _RouteRequest(next(ids), b"", lambda _: self._configure(route_id, contract))

    def predict(
        self, ids: Iterator[str], route_id: str, rows: Sequence[PredictSlot], observation: bytes
    ) -> list[EncodedRequest]:
        request_id = next(ids)
        work = functools.partial(self._predict, request_id, route_id, rows, unpack(observation))
        return [_RouteRequest(request_id, observation, work)]

    def release(self, ids: Iterator[str], route_id: str) -> EncodedRequest:
        return _RouteRequest(next(ids), b"", lambda _: self._release(route_id))

    def encoder(self, contract: EnvContract) -> Encode:
        return lambda columns, num_rows: pack(
            encode_observations(contract.observation_space, columns, num_rows)
        )

    def actions(
        self, contract: EnvContract, reply: ModelReply, num_rows: int, horizon: int = 1
    ) -> list[Column]:
        """Return the actions of each row's chunk, one row after the other of each step."""
        space, messages = contract.action_space, unpack(action_of(reply))
        rows = [decode_actions(space, unpack(message)) for message in messages]
        if len({len(chunks[0]) for chunks in rows if chunks}) > 1:
            raise CodecError("the server answers the rows of one batch with different horizons")
        by_step = (
            np.stack([chunk[:horizon] for chunk in own], 1) for own in zip(*rows, strict=True)
        )
        return [np.concatenate(list(steps)) for steps in by_step]

    def _configure(self, route_id: str, contract: EnvContract) -> ModelReply:
        try:
            require_keys(contract.observation_space, OBSERVATION)
            require_actions(contract.action_space)
            problem = difference(self._metadata, contract)
        except ConfigurationError as error:
            problem = str(error)
        if problem:
            message = (
                f"the policy at {self._options.address} cannot act in {contract.id}: {problem}"
            )
            return ModelReply("", ModelFailed("", ModelErrorCode.INVALID_REQUEST, message, True))
        self._release(route_id)
        self._routes[route_id] = _Route()
        return ModelReply("", horizon=horizon_of(self._metadata) or _ANY_HORIZON)

    def _predict(
        self,
        request_id: str,
        route_id: str,
        rows: Sequence[PredictSlot],
        messages: Sequence[bytes],
        until_s: float,
    ) -> ModelReply:
        # A connection has one request at a time.
        if len({row.env_index for row in rows}) < len(rows):
            message = "the slots name an env_index twice; give each row one of its own"
            failed = ModelFailed(request_id, ModelErrorCode.INVALID_REQUEST, message, True)
            return ModelReply(request_id, failed)
        route = self._routes[route_id]
        with route.lock:
            answers = _run(self._answers(route, rows, messages, until_s))
        for answer in answers:
            if isinstance(answer, str):
                text = answer.strip()[-2000:]
                failed = ModelFailed(request_id, ModelErrorCode.INTERNAL, text, False)
                return ModelReply(request_id, failed)
        last = unpack(answers[-1]) if answers else None  # type: ignore[arg-type]
        return ModelReply(request_id, None, pack(answers), _telemetry(last))

    async def _answers(
        self,
        route: _Route,
        rows: Sequence[PredictSlot],
        messages: Sequence[bytes],
        until_s: float,
    ) -> list[bytes | str]:
        address = self._options.address
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                await self._open_lanes(route, rows)
                lanes = [route.lanes[row.env_index] for row in rows]
                asking = [lane.ask(message) for lane, message in zip(lanes, messages, strict=True)]
                return await asyncio.gather(*asking)
        except TimeoutError as error:
            raise EndpointTimeoutError("no answer in time", address) from error
        except (ConnectionClosed, OSError) as error:
            received = getattr(error, "rcvd", None)
            reason = ""
            if received is not None and received.code == CloseCode.MESSAGE_TOO_BIG:
                reason = (
                    ": the observation is larger than the limit of the server, of rlmesh-ray "
                    "max_message_bytes=… or --max-message-bytes"
                )
            raise EndpointLostError(f"the session broke ({error}){reason}", address) from error

    async def _open_lanes(self, route: _Route, rows: Sequence[PredictSlot]) -> None:
        begun = [row.env_index for row in rows if _begins_anew(route.lanes.get(row.env_index), row)]
        await _closed([route.lanes.pop(index) for index in begun])
        turns = asyncio.Semaphore(_MOST_OPENING)

        async def connect(row: PredictSlot) -> None:
            async with turns:
                lane = self._spare.pop() if self._spare else await _Lane.open(self._options)
            lane.episode_id = row.episode_id
            route.lanes[row.env_index] = lane

        missing = [connect(row) for row in rows if row.env_index not in route.lanes]
        for error in await asyncio.gather(*missing, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error

    def _release(self, route_id: str) -> ModelReply:
        route = self._routes.pop(route_id, None)
        if route is not None:
            with route.lock:
                _run(_closed(route.lanes.values()))
        return ModelReply("")


def _begins_anew(lane: _Lane | None, row: PredictSlot) -> bool:
    if lane is None or not lane.is_used:
        return False
    return row.reset or row.episode_id not in ("", lane.episode_id)


def _lanes(spare: Iterable[_Lane], routes: Mapping[str, _Route]) -> Iterator[_Lane]:
    """Yield all connections of a session: in the loop, which opens more of them meanwhile."""
    yield from spare
    for route in tuple(routes.values()):
        yield from route.lanes.values()


def _abort(pid: int, spare: Iterable[_Lane], routes: Mapping[str, _Route]) -> None:
    """Cut all connections of a session, without waiting; not in a fork of its process."""
    if os.getpid() == pid:
        _loop(pid).call_soon_threadsafe(_abort_all, _lanes(spare, routes))


def _abort_all(lanes: Iterable[_Lane]) -> None:
    for lane in lanes:
        lane.connection.transport.abort()


async def _closed(lanes: Iterable[_Lane]) -> None:
    await asyncio.gather(*(lane.connection.close() for lane in lanes), return_exceptions=True)


class _Connect(connect):
    """Connects to the server that was named alone: a redirect would take the token elsewhere."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


_STARTING = threading.Lock()


# In an event loop, not by the library's blocking client, which reads and writes in two threads:
# Python's ssl module does not allow that, and about one connection in fifty hung with TLS.
@functools.cache
def _loop(_pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rlmesh-ray-openpi", daemon=True).start()
    return loop


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` in the loop; return its result."""
    with _STARTING:  # the cache alone would let two threads start one each
        loop = _loop(os.getpid())
    return asyncio.run_coroutine_threadsafe(work, loop).result()


async def _connection(options: ConnectOptions) -> ClientConnection:
    address = options.address
    bare, _, path = address.removeprefix(_SCHEME).partition("/")
    where = parse_address(bare)
    if where.path:
        raise AddressError(f"{address}: openpi is served over TCP; give openpi://HOST:PORT")
    tls = resolve_client_tls(options.tls)
    context = None if tls is None else tls.context()
    scheme = "ws" if context is None else "wss"
    # gRPC's metadata has the token as ``Bearer TOKEN``.
    headers = {key: f"Api-Key {value.partition(' ')[2]}" for key, value in options.metadata}
    try:
        connection = await _Connect(
            f"{scheme}://{where}/{path}",
            ssl=context,
            compression=None,
            additional_headers=headers,
            proxy=None,
            open_timeout=options.timeout_s,
            close_timeout=_CLOSE_S,
            # A server may be busy for minutes at its first batch, and not answer pings then.
            ping_interval=None,
            max_size=DEFAULT_MESSAGE_BYTES,
        )
    except InvalidStatus as error:
        raise _refusal(error.response, address) from error
    except TimeoutError as error:
        raise EndpointTimeoutError("no answer to the opening handshake in time", address) from error
    except ssl.SSLError as error:
        raise EndpointUnreachableError(
            f"something answers there, but TLS with it fails ({error}); check the authority "
            "(--tls-ca) and the address, and whether the server uses TLS",
            address,
        ) from error
    except OSError as error:
        raise EndpointUnreachableError(
            f"nothing answers there; check the address and that the server runs ({error})", address
        ) from error
    except (InvalidHandshake, InvalidURI, EOFError) as error:
        raise EndpointUnreachableError(
            f"this is no openpi server ({error}); check the address and whether it uses TLS",
            address,
        ) from error
    with contextlib.suppress(OSError):
        enable_keepalive(connection.transport.get_extra_info("socket"))
    return connection


def _telemetry(message: object) -> PredictTelemetry | None:
    timing = message.get(SERVER_TIMING) if isinstance(message, dict) else None
    if not isinstance(timing, dict):
        return None

    def number(name: str) -> float | None:
        value = timing.get(name)
        return value if isinstance(value, int | float) and math.isfinite(value) else None

    infer_ms = number("infer_ms")
    if infer_ms is None:
        return None
    version, rows = number("policy_version"), number("batch_rows")
    return PredictTelemetry(
        policy_version=-1 if version is None else int(version),
        queue_s=(number("queue_ms") or 0.0) * 1e-3,
        forward_s=infer_ms * 1e-3,
        batch_rows=int(rows or 0),
        server="",
    )


MODEL_SESSION = OpenpiSession


def _refusal(response: Response, address: str) -> EndpointError:
    text = bytes(response.body or b"").decode("utf-8", "replace").strip()[:500]
    reason = f"{text or response.reason_phrase} (HTTP {response.status_code})"
    if response.status_code in _DENIED:
        remedy = "give the right token (token=…, --token-file)"
        return AccessDeniedError(f"{reason}; {remedy}", address)
    if text.startswith(FULL):
        return CapacityError(text.removeprefix(FULL).strip(), address)
    return EndpointUnreachableError(
        f"the server refuses the connection: {reason}; check the address", address
    )
