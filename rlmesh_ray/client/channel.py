"""Connection options of clients: channels, credentials, and the translation of gRPC's errors."""

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlmesh_ray import __version__
from rlmesh_ray.auth.client_tls import ClientTlsSource, resolve_client_tls
from rlmesh_ray.auth.token_file import TokenFile, TokenSource, bearer_value, client_token_of
from rlmesh_ray.dialects.registry import DialectSettings, load_generations, model_dialects
from rlmesh_ray.errors import (
    AccessDeniedError,
    AddressError,
    CapacityError,
    CodecError,
    ConfigurationError,
    EndpointClosedError,
    EndpointError,
    EndpointLostError,
    EndpointTimeoutError,
    EndpointUnreachableError,
    HandshakeRefusedError,
)
from rlmesh_ray.grpc_setup import channel_options, grpc, keep_in_forks, require_no_fork
from rlmesh_ray.options import require_seconds
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.protocol.capabilities import AUTHORIZATION_METADATA_KEY, PROTOCOL_V1
from rlmesh_ray.protocol.handshake import (
    HandshakeRequest,
    HandshakeResponse,
    check_handshake_response,
    edition_sha256,
    make_handshake_request,
)
from rlmesh_ray.wire.rlmesh_v1.handshake import HandshakeFrames
from rlmesh_ray.wire.rlmesh_v1.limits import DEFAULT_MESSAGE_BYTES

Metadata = tuple[tuple[str, str], ...]

_READ_BEFORE: set[TokenFile] = set()
"""Token files that this process has read: one that is missing now is perhaps being replaced."""


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """The address of an endpoint, and how to connect to it."""

    address: str
    """``HOST:PORT``, ``unix:PATH``, with or without ``rlmesh://`` or ``tcp://``,
    ``dm_env_rpc://HOST:PORT``, or ``openpi://HOST:PORT``."""
    token: TokenSource | None = field(default=None, repr=False)
    """The token to send; a file is read at each call."""
    tls: ClientTlsSource | None = None
    timeout_s: float = 10.0
    """For the connection and the handshake together. An endpoint of the released rlmesh has as long
    again to take the session."""
    edition_text: str | None = None
    """The text of the provisional edition that the endpoint implements, where it is not this
    package's: a name such as ``rlmesh-0.1.0b3``, or a sha256. Only for endpoints that refuse
    this package for its text, and whose differences you accept. Endpoints of the released rlmesh
    are known without it."""
    dialect_settings: DialectSettings | None = None
    """Settings of the dialect that the scheme of the address names; None: the defaults."""

    def __post_init__(self) -> None:
        if not isinstance(self.address, str):
            parse_address(self.address)  # says what an address is
        require_seconds("connect_timeout_s", self.timeout_s)
        if not isinstance(self.edition_text, str | None):
            raise ConfigurationError(
                f"edition_text={self.edition_text!r:.40} must be text, or None"
            )
        if not isinstance(self.dialect_settings, DialectSettings | None):
            raise ConfigurationError(
                f"dm_env_rpc={self.dialect_settings!r:.40} must be a DmEnvRpcSettings, or None"
            )
        _ = self.text_sha256  # one that is not known is refused before anything is dialed

    @property
    def text_sha256(self) -> str:
        """The checksum to present in place of the own one; empty for the own one.

        Raises:
            ConfigurationError: ``edition_text`` is neither a known name nor a sha256.
        """
        return "" if self.edition_text is None else edition_sha256(self.edition_text)

    def open(self, max_receive_bytes: int = DEFAULT_MESSAGE_BYTES) -> grpc.Channel:
        """Return a channel; it connects on the first call.

        Args:
            max_receive_bytes: Size of the largest message to accept.

        Raises:
            AddressError: The address is malformed.
            ConfigurationError: A file for TLS cannot be used, or this process was forked from one
                that had used gRPC.
        """
        try:
            address = parse_address(self.address)
        except AddressError as error:
            raise AddressError(f"{error}{_serving_hint(self.address)}") from None
        target = str(address)
        options = channel_options(max_receive_bytes)
        if address.path:
            # Some servers break off where a path stands in place of a host's name.
            options.append(("grpc.default_authority", "localhost"))
        tls = resolve_client_tls(self.tls)
        require_no_fork()
        if tls is not None:
            return keep_in_forks(grpc.secure_channel(target, tls.credentials(), options=options))
        return keep_in_forks(grpc.insecure_channel(target, options=options))

    @property
    def metadata(self) -> Metadata:
        """The metadata of every call.

        Raises:
            ConfigurationError: The token is no valid metadata, or its file was never there to read.
            EndpointUnreachableError: Its file cannot be used now.
        """
        if self.token is None:
            return ()
        try:
            token = client_token_of(self.token)
        except ConfigurationError as error:
            if isinstance(error.__cause__, FileNotFoundError) and self.token not in _READ_BEFORE:
                raise
            # It may be in the middle of a rotation: a later attempt may succeed.
            reason = f"there is no token to send: {error}"
            raise EndpointUnreachableError(reason, self.address) from error
        if isinstance(self.token, TokenFile):
            _READ_BEFORE.add(self.token)
        return ((AUTHORIZATION_METADATA_KEY, bearer_value(token)),)

    def call(
        self,
        channel: grpc.Channel,
        path: str,
        data: bytes,
        *,
        timeout_s: float | None = None,
        session: Metadata | None = None,
    ) -> bytes:
        """Make a unary call.

        Args:
            channel: A channel to the endpoint.
            path: Path of the RPC.
            data: The request.
            timeout_s: How long to wait; None: the timeout of the connection.
            session: The metadata that names an open session; None: the call concerns none.

        Raises:
            EndpointError: The call failed; the class says how.
        """
        try:
            reply: bytes = channel.unary_unary(path)(
                data,
                timeout=self.timeout_s if timeout_s is None else timeout_s,
                metadata=self.metadata + (session or ()),
            )
        except ValueError as error:  # gRPC's, for a channel that was closed meanwhile
            raise EndpointClosedError("the session is closed", self.address) from error
        except grpc.RpcError as error:
            raise translate_grpc_error(error, self.address, is_open=session is not None) from error
        return reply


def as_connect_options(address: str | ConnectOptions, **given: Any) -> ConnectOptions:
    """Return the options for ``address``; each ``given`` value but None replaces one of its own."""
    options = address if isinstance(address, ConnectOptions) else ConnectOptions(address)
    return replace(options, **{name: each for name, each in given.items() if each is not None})


def translate_grpc_error(
    error: grpc.RpcError, address: str, *, is_open: bool = False
) -> EndpointError:
    """Convert gRPC's error into one of this package; ``is_open``: the session worked before."""
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    details = (error.details() if isinstance(error, grpc.Call) else str(error)) or code.name
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return AccessDeniedError(details, address)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return _exhausted(details, address)
    if code is grpc.StatusCode.FAILED_PRECONDITION and _ONE_SESSION in details:
        return CapacityError(f"{details}; end that session, or serve another one", address)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return EndpointTimeoutError("no answer in time", address)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return EndpointUnreachableError(
            "something listens there, but not the service that was asked for; "
            "check the address, and whether it serves an environment or a model",
            address,
        )
    if code is grpc.StatusCode.UNAVAILABLE and not is_open:
        known = (meaning for words, meaning in _CONNECTION_FAILURES if words in details)
        failure = next(known, "nothing answers there; check the address and that the server runs")
        return EndpointUnreachableError(f"{failure} ({details})", address)
    if any(words in details for words in _ENDED_HERE):
        return EndpointClosedError("this side has closed the connection", address)
    return EndpointLostError(_loss(code, details), address)


def status_of(error: EndpointError) -> tuple[grpc.StatusCode | None, str]:
    """Return the gRPC status and the details of a failed call; None: gRPC gave no status."""
    cause = error.__cause__
    return (cause.code(), cause.details() or "") if isinstance(cause, grpc.Call) else (None, "")


def _loss(code: grpc.StatusCode, details: str) -> str:
    if code is grpc.StatusCode.CANCELLED:
        return "the endpoint, or a proxy before it, has ended the call"
    if unexpected := _UNEXPECTED.match(details):
        reason = ": ".join(filter(None, unexpected.groups()))
        return f"the endpoint has failed ({reason}); its log says more"
    return f"the session broke ({code.name}: {details})"


# gRPC's texts about a call that was ended on this side.
_ENDED_HERE = (
    "Locally cancelled by application!",
    "Channel closed!",
    "Channel deallocated!",
    "Cancelled upon garbage collection!",
)

# gRPC's text about an exception that a server's handler has raised.
_UNEXPECTED = re.compile(r"Unexpected <class '([\w.]+)'>(?:: (.+))?", re.DOTALL)

# From an endpoint of the released rlmesh, which has one session at a time.
_ONE_SESSION = "already has an active Join session"

# From gRPC's server in Python.
_CALL_LIMIT = "Concurrent RPC limit exceeded"

# gRPC's text about a connection that it could not use, and its meaning. All have one status; only
# the text distinguishes them.
_CONNECTION_FAILURES = (
    ("draining:", "the endpoint takes no new sessions and is about to stop; dial another one"),
    (
        "Failed parsing HTTP/2",
        "something answers there, but it does not use gRPC; check the address and the port",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "something answers there, but it does not use TLS; use no authority (without --tls-ca), "
        "or check the address",
    ),
    (
        "Hostname Verification Check failed",
        "the endpoint's certificate is for another host name; dial it by a name that the "
        "certificate has",
    ),
    (
        "certificate has expired",
        "the endpoint's certificate has expired, or this machine's clock is wrong; have the "
        "endpoint show a new one",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the endpoint's certificate was not signed by the authority that is trusted here; name "
        "the right one (--tls-ca)",
    ),
    (
        "Tls handshake failed",
        "something answers there, but TLS with it fails; check the authority (--tls-ca) and the "
        "address",
    ),
    (
        "Socket closed",
        "something accepts the connection there and closes it; if the endpoint uses TLS, name "
        "its authority (--tls-ca), and a certificate if it asks for one (--tls-cert, --tls-key), "
        "else check the address",
    ),
)


def _exhausted(details: str, address: str) -> EndpointError:
    if _CALL_LIMIT in details:
        reason = "the endpoint has as many calls as it takes at a time; dial another one, or wait"
        return CapacityError(reason, address)
    if "larger than max" not in details:
        return CapacityError(details, address)
    return EndpointError(
        f"a message is larger than the size limit of its receiver ({details}); send "
        "or serve fewer lanes at once, or smaller observations, or raise the limit of a policy's "
        "endpoint (max_message_bytes=…, --max-message-bytes)",
        address,
    )


def _serving_hint(text: str) -> str:
    if re.fullmatch(r"[\w./:-]*-v\d+", text):
        return f"; an environment is served first: rlmesh-ray serve-env {text}"
    if os.path.exists(text) or text.endswith((".pt", ".pt2", "checkpoint")):
        return f"; a policy is served first: rlmesh-ray serve-model {text}"
    return ""


CLIENT_NAME = "rlmesh-ray"
# Status codes of servers that cannot decode a message.
_UNDECODABLE = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNKNOWN,
)


@dataclass(frozen=True, slots=True)
class HandshakeVariant:
    """The handshake of a service in one generation, and the dialect of sessions after it."""

    generation: str
    frames: HandshakeFrames
    offer: HandshakeRequest
    accept: Callable[[HandshakeRequest, HandshakeResponse], HandshakeResponse]
    """Returns the answer with the edition's names for capabilities. Raises HandshakeRefusedError
    for an answer under which no session can be held."""
    make_dialect: Callable[..., Any]
    """Makes the dialect of a session."""


@dataclass(frozen=True, slots=True)
class ServiceHandshake:
    """The handshakes of one service, in all generations of this package."""

    path: str
    """gRPC path of the handshake."""
    frames: HandshakeFrames
    """The service's frames in the edition's generation."""
    able: Sequence[str]
    """Capabilities of this client in the edition's generation."""
    make_dialect: Callable[..., Any]
    """Makes the edition's dialect of a session."""
    module: str
    """The module of a generation's package that has its variant."""

    def variants(self, connect_options: ConnectOptions) -> tuple[HandshakeVariant, ...]:
        offer = make_handshake_request(
            CLIENT_NAME,
            __version__,
            dict.fromkeys(self.able, ""),
            text=connect_options.text_sha256,
        )
        edition = HandshakeVariant(
            PROTOCOL_V1, self.frames, offer, check_handshake_response, self.make_dialect
        )
        return edition, *load_generations(self.module).values()

    def negotiate(
        self, connect_options: ConnectOptions, channel: grpc.Channel
    ) -> tuple[HandshakeVariant, HandshakeResponse]:
        """Shake hands in the first generation that the endpoint serves; return that and its answer.

        Raises:
            ConfigurationError: An edition's text is named for an endpoint whose generation has
                none.
            EndpointError: The endpoint cannot be reached.
            HandshakeRefusedError: It refuses, or serves none of these generations.
        """
        end_s = time.monotonic() + connect_options.timeout_s
        first: EndpointError | HandshakeRefusedError | None = None
        for variant in self.variants(connect_options):
            left_s = max(0.001, end_s - time.monotonic())
            try:
                answer = _ask(
                    replace(connect_options, timeout_s=left_s), channel, self.path, variant
                )
            except (EndpointError, HandshakeRefusedError) as error:
                if _is_understood(variant, error):
                    raise
                first = first or error
                continue
            if connect_options.edition_text is not None and variant.generation != PROTOCOL_V1:
                raise ConfigurationError(
                    f"{connect_options.address} speaks {variant.generation}, which has no edition "
                    "text; leave out edition_text (--edition-text)"
                )
            return variant, answer
        assert first is not None, "there is at least one variant"
        raise first

    def probe(self, connect_options: ConnectOptions) -> HandshakeResponse:
        """Return the endpoint's answer, without opening a session; raises as ``negotiate``."""
        with connect_options.open() as channel:
            return self.negotiate(connect_options, channel)[1]

    def generations(self, connect_options: ConnectOptions) -> tuple[str, ...]:
        """Return the generations in which sessions can be held with an endpoint."""
        supported = []
        with connect_options.open() as channel:
            for variant in self.variants(connect_options):
                try:
                    _ask(connect_options, channel, self.path, variant)
                except HandshakeRefusedError:
                    continue
                except EndpointError as error:
                    if _is_understood(variant, error):
                        raise
                    continue
                supported.append(variant.generation)
        return tuple(supported)


def _ask(
    connect_options: ConnectOptions,
    channel: grpc.Channel,
    path: str,
    variant: HandshakeVariant,
) -> HandshakeResponse:
    reply = connect_options.call(channel, path, variant.frames.pack_request(variant.offer))
    address = connect_options.address
    try:
        answer = variant.frames.parse_response(reply)
        # An answer of another generation may decode as a refusal.
        has_name = answer.generation != "" and answer.generation.isprintable()
        if not (answer.compatible or has_name or answer.error_message):
            raise CodecError("it refuses without a generation and without a reason")
        return variant.accept(variant.offer, answer)
    except HandshakeRefusedError as error:
        raise HandshakeRefusedError(
            f"{address}: {error.reason}", error.supported_editions
        ) from error
    except CodecError as error:
        raise HandshakeRefusedError(
            f"{address}: the answer to the handshake is malformed ({error}); check the "
            "address, or install versions that match"
        ) from error


def _is_understood(variant: HandshakeVariant, error: EndpointError | HandshakeRefusedError) -> bool:
    """Return whether the endpoint has failed or refused for another reason than the generation."""
    if isinstance(error, EndpointError):
        return status_of(error)[0] not in _UNDECODABLE
    cause = error.__cause__
    others = [each for each in model_dialects() if each != variant.generation]
    is_of_other = any(generation in str(cause) for generation in others)
    return not isinstance(cause, CodecError) and not is_of_other
