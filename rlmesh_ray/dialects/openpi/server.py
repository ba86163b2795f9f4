"""The port of a ModelServer for clients of openpi: WebSocket, and ``GET /healthz``.

Each connection is a session with one route of one lane.
"""

import asyncio
import contextlib
import functools
import http
import logging
import time
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from rlmesh_ray.auth.token_file import TokenRole, token_store
from rlmesh_ray.dialects.openpi import wire
from rlmesh_ray.dialects.openpi.wire import (
    FULL,
    OBSERVATION,
    message_bytes,
    metadata,
    pack,
    require_actions,
    require_keys,
)
from rlmesh_ray.errors import (
    AddressError,
    CapacityError,
    CodecError,
    ConfigurationError,
    ListenError,
    LocalProtocolError,
    RlmeshError,
)
from rlmesh_ray.models.policy import PolicyTraits
from rlmesh_ray.protocol.address import Address
from rlmesh_ray.protocol.messages import BatchRun, PredictSlot
from rlmesh_ray.protocol.model_session import ContractLanes
from rlmesh_ray.server.endpoint.bind_policy import (
    checked_address,
    is_wildcard,
    listen_arguments,
    resolve_server_tls,
    warn_without_token,
)
from rlmesh_ray.server.endpoint.endpoint import Endpoint
from rlmesh_ray.server.endpoint.endpoint_options import listening
from rlmesh_ray.server.endpoint.gate import (
    CONNECTION_SETUP_S,
    DRAINING,
    MAX_CALLS,
    require_descriptors,
)
from rlmesh_ray.server.endpoint.log import enter, short_name
from rlmesh_ray.server.model.batcher import Batcher
from rlmesh_ray.server.model.model_options import ModelServerOptions, checked_message_bytes
from rlmesh_ray.server.model.model_stream import ModelRoutes, failure_response
from rlmesh_ray.server.model.prediction_batch import Actions, PredictionRequest, Route
from rlmesh_ray.server.observe.counters import SessionLog
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import contract_of
from rlmesh_ray.transport.tcp import enable_keepalive
from rlmesh_ray.wire.rlmesh_v1.values import ContractCodecs

_LOG = logging.getLogger(__name__)
# The library logs each malformed request of a stranger with a traceback.
_LIBRARY_LOG = logging.getLogger(f"{__name__}.websockets")
_LIBRARY_LOG.setLevel(logging.CRITICAL + 1)

_HEALTH_PATH = "/healthz"
_SCHEMES = ("api-key", "bearer")
_CLOSE_S = 1.0
MAX_STRANGERS = 64
"""Connections at a time whose opening handshake is not done; another one replaces the oldest."""
_ROUTE = "openpi"
_SLOTS = (PredictSlot(0, "", 0, False),)
_SEND_S = 30.0
"""How long a client may take to receive an answer."""
_MAX_REASON_CHARACTERS = 30
_CLOSED = (
    CloseCode.NORMAL_CLOSURE,
    CloseCode.GOING_AWAY,
    CloseCode.NO_STATUS_RCVD,
    CloseCode.ABNORMAL_CLOSURE,
)
"""Codes of connections that a client has closed. openpi's own client sends none when it exits."""
_FAULT = "a fault of the server, which its log has, ended this session; connect again"


class _Gone(Exception):
    """The client has closed the connection, or the endpoint has."""


class OpenpiConnection:
    """Answers one client, in the task of its connection.

    Args:
        port: Has the policy.
        connection: Its opening handshake is done.
    """

    def __init__(self, port: "OpenpiPort", connection: ServerConnection) -> None:
        self.is_busy = False
        """Whether a request waits for its answer."""
        self.transport = connection.transport
        """The connection's transport."""
        self._port = port
        self._connection = connection
        self._num_predicted = 0
        self._is_refused = self._is_idle = self._has_failed = False
        host, number, *_ = connection.remote_address or ("an unknown host", 0)
        self._peer = f"{host}:{number}"

    async def serve(self) -> None:
        enter(self._port.endpoint.endpoint_id, short_name(""))
        host = self._port.host
        routes = ModelRoutes(
            host,
            lambda each: ContractLanes(each.num_envs),
            functools.partial(ContractCodecs.made_by, wire.codec),
            keeps_same=False,
        )
        host.sessions.note_opened()
        log = SessionLog(
            host.sessions, self._peer, "openpi", lambda: {"predictions": self._num_predicted}
        )
        gone = asyncio.ensure_future(self._connection.wait_closed())
        try:
            await routes.configure(_ROUTE, self._port.contract, host.horizon, 1)
            await self._send(pack(metadata(host.facts(), self._port.contract)))
            await self._answer_all(routes.by_id[_ROUTE], gone)
        except RlmeshError as error:
            failed = failure_response("", error)
            host.sessions.errors[failed.code.name] += 1
            _LOG.info("client %s is sent an error: %s", self._peer, failed.message)
            self._is_refused = True
            await self._refuse(failed.message)
        except (_Gone, ConnectionClosed, OSError, TimeoutError):
            self.transport.abort()
        except Exception:  # noqa: BLE001  # all other sessions go on
            _LOG.exception("a session of an openpi client has failed; please report this")
            self._has_failed = True
            await self._refuse(_FAULT)
        finally:
            gone.cancel()
            host.sessions.note_ended()
            log.end(
                is_closed=self._is_refused or self._has_left_between_requests,
                is_idle=self._is_idle,
                is_stopping=self._port.endpoint.drain.is_draining,
                has_failed=self._has_failed,
            )
            await routes.abandon()

    @property
    def _has_left_between_requests(self) -> bool:
        return not self.is_busy and self._connection.close_code in _CLOSED

    async def close(self) -> None:
        await self._connection.close(CloseCode.GOING_AWAY, "the endpoint stops")

    async def _answer_all(self, route: Route, gone: "asyncio.Future[None]") -> None:
        drain, total_ms = self._port.endpoint.drain, None
        while not drain.is_draining:
            message = await self._received()
            if message is None:
                return
            begun_s = time.perf_counter()
            self.is_busy = True
            with drain.request_in_progress():
                answer = await self._predict(route, message, gone, total_ms)
                await self._send(answer)
            self.is_busy = False
            self._num_predicted += 1
            total_ms = (time.perf_counter() - begun_s) * 1e3
        await self.close()

    async def _received(self) -> bytes | None:
        """Return the next message; None: the client was silent for too long."""
        try:
            async with asyncio.timeout(self._port.idle_timeout_s):
                message = await self._connection.recv()
        except TimeoutError:
            self._is_idle = True
            await self._connection.close(
                CloseCode.POLICY_VIOLATION, f"no request for {self._port.idle_timeout_s:g} s"
            )
            return None
        if isinstance(message, str):
            raise CodecError(
                "an observation is a binary message, a map in msgpack; this one is text"
            )
        return message

    async def _predict(
        self,
        route: Route,
        message: bytes,
        gone: "asyncio.Future[None]",
        previous_total_ms: float | None,
    ) -> bytes:
        """Return the result for an observation.

        Raises:
            RlmeshError: There is none.
        """
        answered: asyncio.Future[tuple[Actions | RlmeshError, BatchRun]]
        answered = asyncio.get_running_loop().create_future()

        def answer(_: PredictionRequest, result: Actions | RlmeshError, run: BatchRun) -> None:
            if not answered.done():
                answered.set_result((result, run))

        request = PredictionRequest(route, message, _SLOTS, answer)
        # Together with the requests of all other sessions that come at the same time.
        self._port.host.submit(lambda _data: self._take(request, answered), message)
        either: set[asyncio.Future[Any]] = {answered, gone}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise _Gone
        finally:
            if answered.cancel():
                self._port.host.cancel(request)
        result, run = answered.result()
        if isinstance(result, RlmeshError):
            raise result
        timing: dict[str, object] = {
            "infer_ms": run.forward_ns * 1e-6,
            "queue_ms": request.queue_ns * 1e-6,
            "batch_rows": run.num_rows,
            "policy_version": run.policy_version,
        }
        if previous_total_ms is not None:
            timing["prev_total_ms"] = previous_total_ms
        steps = result if isinstance(result, tuple) else (result,)
        return wire.codec(route.contract.action_space).result(steps, timing)

    def _take(self, request: PredictionRequest, answered: "asyncio.Future[Any]") -> None:
        if answered.done():
            return
        try:
            self._port.host.predict(request)
        except Exception as error:  # noqa: BLE001  # it must not raise: other sessions go on
            answered.set_exception(error)

    async def _refuse(self, reason: str) -> None:
        try:
            await self._send(reason)
            short = reason[:_MAX_REASON_CHARACTERS]
            await self._connection.close(CloseCode.INTERNAL_ERROR, short)
        except (ConnectionClosed, OSError, TimeoutError):
            self.transport.abort()

    async def _send(self, message: bytes | str) -> None:
        async with asyncio.timeout(_SEND_S):
            await self._connection.send(message)


class OpenpiPort:
    """Listens for openpi clients, whose observations join the batches of the policy.

    Args:
        host: Runs the policy.
        traits: Traits of the policy.
        endpoint: The endpoint that opens and closes the port.
        options: The server's options, all of them; ``openpi`` is where to listen.

    Raises:
        AddressError: The address is malformed, or needs a token.
        ConfigurationError: The spaces of the clients are not known, or have no form in openpi's
            messages; or a file cannot be used.
    """

    def __init__(
        self, host: Batcher, traits: PolicyTraits, endpoint: Endpoint, options: ModelServerOptions
    ) -> None:
        _, listen = listening("ModelServer", options["address"])
        address = listen.openpi
        assert address is not None, "the server opens the port where an address is given"
        self._wanted = checked_address(address, options["token"])
        if self._wanted.path:
            raise AddressError(f"{address}: openpi is served over TCP; give HOST:PORT")
        contract = _contract(traits, options["openpi_env"])
        require_keys(contract.observation_space, OBSERVATION)
        require_actions(contract.action_space)
        self._known = token_store(options["token"])
        files = resolve_server_tls(options["tls"])
        self._tls = None if files is None else files.context()
        wanted_bytes = checked_message_bytes(options["max_message_bytes"])
        self._max_message_bytes = wanted_bytes or message_bytes(contract.observation_space)
        self.endpoint = endpoint
        self.host = host
        self.contract = contract
        """Has the spaces of the clients, for one lane."""
        self.idle_timeout_s = listen.idle_timeout_s
        self._server: Server | None = None
        self._bound: Address | None = None
        self._open: dict[OpenpiConnection, asyncio.Task[None]] = {}
        self._strangers: dict[ServerConnection, None] = {}

    @property
    def address(self) -> str:
        """The address that clients dial, after ``ws://``.

        Raises:
            LocalProtocolError: It has not been opened.
        """
        if self._bound is None:
            raise LocalProtocolError("the server has no address before start()")
        return str(self._bound)

    async def open(self) -> None:
        """Listen.

        Raises:
            ContractMismatchError: The policy cannot act in the clients' spaces.
            ListenError: The address is in use or not this machine's.
        """
        await self.host.configure(self.contract)
        self.host.forget("")  # no rows: this has only asked the policy
        if self._known is None:
            warn_without_token(self._wanted)
        try:
            self._server = await serve(
                self._serve,
                process_request=self._respond,
                create_connection=functools.partial(  # type: ignore[arg-type]  # any factory
                    _Connection, self._strangers
                ),
                compression=None,
                max_size=self._max_message_bytes,
                max_queue=1,
                # Clients may be busy for long, and not answer pings then: TCP probes them.
                ping_interval=None,
                open_timeout=CONNECTION_SETUP_S,
                close_timeout=_CLOSE_S,
                logger=_LIBRARY_LOG,
                server_header=None,
                ssl=self._tls,
                ssl_handshake_timeout=CONNECTION_SETUP_S if self._tls else None,
                **listen_arguments(self._wanted),
            )
        except OSError as error:
            raise ListenError(
                f"cannot listen on {self._wanted} for openpi clients: {error}; choose another "
                "port, or 0 for a free one"
            ) from error
        port = self._server.sockets[0].getsockname()[1]
        host = "127.0.0.1" if is_wildcard(self._wanted) else self._wanted.host
        self._bound = Address(host, port)
        _LOG.info("serving openpi clients on %s", self._bound)

    async def close(self, grace_s: float | None) -> None:
        """Accept nothing new; close idle connections at once, others after their answer."""
        server = self._server
        if server is None:
            return
        server.close(close_connections=False)
        if grace_s is not None:
            idle = [asyncio.ensure_future(each.close()) for each in self._open if not each.is_busy]
            ending = {*idle, *self._open.values()}
            if ending:
                await asyncio.wait(ending, timeout=grace_s)
        for served in tuple(self._open):
            served.transport.abort()
        for stranger in tuple(self._strangers):
            stranger.transport.abort()

    async def _serve(self, connection: ServerConnection) -> None:
        served, task = OpenpiConnection(self, connection), asyncio.current_task()
        assert task is not None
        # Else the connection would stay open for ever if the client's machine died.
        with contextlib.suppress(OSError):  # the client has gone already
            enable_keepalive(connection.transport.get_extra_info("socket"))
        self._open[served] = task
        self.endpoint.sessions.note_begun()
        try:
            await served.serve()
        finally:
            self.endpoint.sessions.note_ended()
            del self._open[served]

    def _respond(self, connection: ServerConnection, request: Request) -> Response | None:
        """Return the HTTP response to a request; None: it opens a session."""
        if request.path.partition("?")[0] == _HEALTH_PATH:
            is_serving = self.endpoint.health().is_serving
            status = http.HTTPStatus.OK if is_serving else http.HTTPStatus.SERVICE_UNAVAILABLE
            return connection.respond(status, "OK\n" if is_serving else "not serving\n")
        refusal = self._refusal(request)
        if refusal is None:
            self._strangers.pop(connection, None)
            return None
        status, reason = refusal
        response = connection.respond(status, f"{reason}\n")
        if status is http.HTTPStatus.UNAUTHORIZED:
            response.headers["WWW-Authenticate"] = "Api-Key"
        return response

    def _refusal(self, request: Request) -> tuple[http.HTTPStatus, str] | None:
        if self._known is None:
            if "Origin" in request.headers:
                # Any page in a browser on this machine could connect.
                return http.HTTPStatus.FORBIDDEN, "web pages need a server with a token"
        else:
            role = self._role(request)
            if role is None:
                reason = "this endpoint requires a token: Authorization: Api-Key TOKEN"
                return http.HTTPStatus.UNAUTHORIZED, reason
            if role < TokenRole.CLIENT:
                return http.HTTPStatus.FORBIDDEN, f"the token has the role {role.label}"
        if self.endpoint.sessions.is_closed or self.endpoint.drain.is_draining:
            return http.HTTPStatus.SERVICE_UNAVAILABLE, DRAINING
        if len(self._open) >= MAX_CALLS:
            return http.HTTPStatus.SERVICE_UNAVAILABLE, f"{FULL} this endpoint has no place left"
        try:
            require_descriptors(0)
        except CapacityError as error:
            return http.HTTPStatus.SERVICE_UNAVAILABLE, f"{FULL} {error.message}"
        return None

    def _role(self, request: Request) -> TokenRole | None:
        values = request.headers.get_all("Authorization")
        if self._known is None or len(values) != 1:
            return None
        scheme, _, token = values[0].partition(" ")
        if scheme.lower() not in _SCHEMES:
            return None
        return self._known.role_of(token.strip().encode("utf-8", "surrogateescape"))


class _Connection(ServerConnection):
    """A connection that counts as a stranger's until its request has been accepted.

    Args:
        strangers: All such connections of the port, the oldest first.
    """

    def __init__(self, strangers: dict[ServerConnection, None], *args: Any, **kwargs: Any) -> None:
        self._strangers = strangers
        super().__init__(*args, **kwargs)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, in place of the oldest if there are too many."""
        super().connection_made(transport)
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.pop(self, None)
        super().connection_lost(exc)


def _contract(traits: PolicyTraits, env: object) -> EnvContract:
    """Return the contract of the clients' routes.

    Raises:
        ConfigurationError: Their spaces are not known.
    """
    if env is not None:
        given = contract_of(env)
        spaces = given.observation_space, given.action_space
    elif traits.observation_space is not None and traits.action_space is not None:
        spaces = traits.observation_space, traits.action_space
    else:
        raise ConfigurationError(
            "openpi's clients send no spaces, and this policy does not name its own: give an "
            "environment that has them (openpi_env=…, --openpi-env ENV), or serve a policy whose "
            "PolicyTraits have observation_space and action_space"
        )
    return EnvContract("openpi", *spaces, 1, AutoresetMode.DISABLED)


MODEL_PORT = OpenpiPort
