"""Registration of an endpoint with a pool, repeated whenever the connection breaks."""

import itertools
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Self

from rlmesh_ray.auth.client_tls import ClientTls
from rlmesh_ray.auth.token_file import registration_token
from rlmesh_ray.client.channel import ConnectOptions, translate_grpc_error
from rlmesh_ray.client.join_stream import called_after
from rlmesh_ray.errors import (
    AccessDeniedError,
    CodecError,
    ConfigurationError,
    EndpointError,
    EndpointLostError,
    EndpointTimeoutError,
    RlmeshError,
)
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.protocol.pool_membership import (
    RefusalKind,
    RegistrationAccepted,
    RegistrationRefused,
    RegistrationRequest,
    checked_name,
)
from rlmesh_ray.wire import registry_v1 as wire

_LOG = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 10.0
# The registrar checks the endpoint first, and other endpoints before it.
_ANSWER_S = 60.0
_CLOSE_TIMEOUT_S = 2.0
_REPORT_EVERY_S = 3.0
_MAX_ANSWER_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class RegistrarOptions:
    """How to reach the registrar of a pool, and the id to register."""

    address: str
    """Address of the registrar, ``HOST:PORT``."""
    pool: str
    endpoint_id: str
    """Keeps its meaning when the endpoint comes back at another address."""
    secret: str | None = field(default=None, repr=False)
    """The pool's secret. It is not sent: the token is derived from it."""
    tls: ClientTls | None = None

    def __post_init__(self) -> None:
        checked_name(self.pool, "pool")
        checked_name(self.endpoint_id, "endpoint_id")
        self.connect_options()
        if parse_address(self.address).port == 0:
            raise ConfigurationError(
                f"{self.address} is nowhere to dial; name the registrar's port"
            )

    def connect_options(self) -> ConnectOptions:
        token = None if self.secret is None else registration_token(self.secret)
        return ConnectOptions(self.address, token, self.tls)


class Registration:
    """Keeps an endpoint registered from ``start`` to ``close``, in a thread of its own.

    Clients that find the endpoint in the pool send ``endpoint_token(secret, pool, endpoint_id)``:
    serve it with that token. A connection that breaks is made again, after half a second at first
    and after ten at most, as often as it takes; each time is another incarnation. A
    refused registration is tried again, too, unless another endpoint has taken the id. Before the
    first success, it is not tried again after a refusal that would be repeated, or a wrong token.

    Args:
        pool: The pool, its registrar, and the endpoint's id.
        host: Host at which clients reach the endpoint; empty: the one that the registrar sees.
        port: Port at which clients reach the endpoint.
        version: Version of the endpoint's software; for people.
        on_registered: Called in the thread each time it has been registered.
        report: Returns the request with the endpoint's statistics; called every 3 s, in another
            thread. None: no statistics are sent.
    """

    def __init__(
        self,
        pool: RegistrarOptions,
        *,
        host: str,
        port: int,
        version: str = "",
        on_registered: Callable[[RegistrationAccepted], None] | None = None,
        report: Callable[[], bytes] | None = None,
    ) -> None:
        self._pool = pool
        self._pid = os.getpid()
        self._connect_options = pool.connect_options()
        self._request = RegistrationRequest(pool.pool, pool.endpoint_id, host, port, version)
        wire.pack_registration(self._request)  # raises here if it cannot be sent
        self._on_registered = on_registered
        self._report = report
        self._closing = threading.Event()
        self._attempt_over = threading.Event()
        self._failure: RlmeshError | None = None
        self._refusal: RefusalKind | None = None
        """Of the latest attempt; None: the registrar has not refused it."""
        self._delay_s = _FIRST_DELAY_S
        self._last_failure = ""
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(
            target=self._run, name="rlmesh-ray-registration", daemon=True
        )

    def start(self) -> Self:
        self._thread.start()
        return self

    def require_not_failed(self) -> None:
        """Raise the error after which it has given up, if it has."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Leave the pool, so that no more clients come. Idempotent; blocks.

        The connection to a registrar that does not answer is cut after 2 s.
        """
        self._closing.set()
        self._attempt_over.set()
        if self._thread.ident is None:
            return
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._call is not None and os.getpid() == self._pid:
            self._call.cancel()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            error = self._stay_registered()
            if self._closing.is_set():
                return
            if self._is_final(error):
                self._failure = error
                return
            text = str(error)
            # The same again and again would bury everything else.
            level = logging.INFO if text == self._last_failure else logging.WARNING
            self._last_failure = text
            _LOG.log(level, "not in pool %s: %s; trying again", self._pool.pool, text)
            # Not all endpoints at once, where a registrar has restarted.
            self._closing.wait(random.uniform(0.5, 1.0) * self._delay_s)
            self._delay_s = min(2.0 * self._delay_s, _LONGEST_DELAY_S)

    def _stay_registered(self) -> RlmeshError:
        # ``close`` sets its flag first, and then the event that it finds: one of them is seen.
        over = self._attempt_over = threading.Event()
        self._refusal = None
        if self._closing.is_set():
            over.set()
        try:
            with self._connect_options.open(_MAX_ANSWER_BYTES) as channel:
                return self._talk(channel, over)
        except RlmeshError as error:
            return error
        finally:
            over.set()

    def _talk(self, channel: grpc.Channel, over: threading.Event) -> RlmeshError:
        address = self._pool.address
        call = self._call = channel.stream_stream(wire.ATTEND)(
            self._requests(over), metadata=self._connect_options.metadata
        )
        is_registered = False
        late = threading.Event()

        def give_up() -> None:
            late.set()
            call.cancel()

        try:
            with called_after(_ANSWER_S, give_up):
                first = list(itertools.islice(call, 1))
            for data in itertools.chain(first, call):
                answer = wire.parse_registration_reply(data)
                if isinstance(answer, RegistrationRefused):
                    self._refusal, why = answer.kind, f"{address}: {answer.message}"
                    is_replaced = answer.kind is RefusalKind.REPLACED
                    return EndpointLostError(why) if is_replaced else ConfigurationError(why)
                is_registered = True
                self._note(answer)
        except grpc.RpcError as error:
            if late.is_set():
                return EndpointTimeoutError(f"no answer in {_ANSWER_S:g} s", address)
            if is_registered:
                return EndpointLostError("the connection to the registrar has broken", address)
            return _as_registrar(translate_grpc_error(error, address), self._connect_options)
        except CodecError as error:
            return EndpointLostError(f"the answer is malformed ({error})", address)
        finally:
            call.cancel()
        return EndpointLostError("the registrar has ended the connection", address)

    def _requests(self, over: threading.Event) -> Iterator[bytes]:
        """Yield the requests of one attempt; gRPC iterates in a thread of its own."""
        yield wire.pack_registration(self._request)
        while not over.wait(_REPORT_EVERY_S):
            try:
                report = self._report() if self._report is not None else None
            except Exception:  # noqa: BLE001  # an endpoint without statistics can still be used
                _LOG.exception("the statistics of the endpoint cannot be read; please report this")
                report = self._report = None
            if report is not None:
                yield report

    def _note(self, registered: RegistrationAccepted) -> None:
        self._request = replace(self._request, former_incarnation=registered.incarnation)
        self._delay_s, self._last_failure = _FIRST_DELAY_S, ""
        _LOG.info(
            "registered with pool %s as %s, at %s (incarnation %d)",
            self._pool.pool, self._pool.endpoint_id, registered.address, registered.incarnation,
        )  # fmt: skip
        try:
            if self._on_registered is not None:
                self._on_registered(registered)
        except Exception:  # noqa: BLE001  # the caller's code
            # Such as a closed output; the endpoint serves all the same.
            _LOG.exception("the callback for registrations has failed")

    def _is_final(self, error: RlmeshError) -> bool:
        if self._refusal is RefusalKind.REPLACED:  # another endpoint has taken the id
            return True
        if self._request.former_incarnation:  # it was registered before
            return False
        is_refused = self._refusal is RefusalKind.NOT_LIKE_THIS
        return is_refused or isinstance(error, AccessDeniedError)


def _as_registrar(error: EndpointError, connect_options: ConnectOptions) -> EndpointError:
    if not isinstance(error, AccessDeniedError):
        return error
    wanted = "a token, and none was given" if connect_options.token is None else "another token"
    return AccessDeniedError(
        f"the registrar requires {wanted}: give the pool's own secret (--pool-token-file)",
        error.address,
    )
