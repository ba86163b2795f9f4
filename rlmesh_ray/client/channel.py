"""Connection options of clients: channels, credentials, and the translation of gRPC's errors."""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from rlmesh_ray.auth.client_tls import ClientTls, ClientTlsSource, resolve_client_tls
from rlmesh_ray.auth.token_file import TokenFile, TokenSource, bearer_value, client_token_of
from rlmesh_ray.dialects.registry import DialectSettings
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
from rlmesh_ray.protocol.capabilities import AUTHORIZATION_METADATA_KEY
from rlmesh_ray.protocol.handshake import edition_sha256
from rlmesh_ray.wire.rlmesh_v1.limits import DEFAULT_MESSAGE_BYTES

__all__ = ["ClientTls", "ConnectOptions", "Metadata", "handshake_errors_at", "translate_grpc_error"]

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

    def call(self, channel: grpc.Channel, path: str, data: bytes) -> bytes:
        """Make a unary call.

        Raises:
            EndpointError: It failed; the class says how.
        """
        method = channel.unary_unary(path)
        try:
            reply: bytes = method(
                data, timeout=self.timeout_s, metadata=self.metadata, wait_for_ready=False
            )
        except grpc.RpcError as error:
            raise translate_grpc_error(error, self.address) from error
        return reply


@contextlib.contextmanager
def handshake_errors_at(address: str) -> Iterator[None]:
    """Add ``address`` to errors about the answer to a handshake.

    Raises:
        HandshakeRefusedError: The peers do not match, or the answer is malformed.
    """
    try:
        yield
    except HandshakeRefusedError as error:
        raise HandshakeRefusedError(
            f"{address}: {error.reason}", error.supported_editions
        ) from error
    except CodecError as error:
        raise HandshakeRefusedError(
            f"{address}: the answer to the handshake is malformed ({error}); check the "
            "address, or install versions that match"
        ) from error


def translate_grpc_error(
    error: grpc.RpcError, address: str, *, is_open: bool = False
) -> EndpointError:
    """Return this package's error for one of gRPC's.

    Args:
        error: From gRPC.
        address: The address of the endpoint.
        is_open: Whether the session had been working before.
    """
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
        return EndpointUnreachableError(f"{_connection_failure(details)} ({details})", address)
    if any(words in details for words in _ENDED_HERE):
        return EndpointClosedError("this side has closed the connection", address)
    return EndpointLostError(_loss(code, details), address)


def _loss(code: grpc.StatusCode, details: str) -> str:
    """Return how a call has ended, without gRPC's own words about it."""
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


def _connection_failure(details: str) -> str:
    for words, meaning in _CONNECTION_FAILURES:
        if words in details:
            return meaning
    return "nothing answers there; check the address and that the server runs"


def _exhausted(details: str, address: str) -> EndpointError:
    """Return the error for a message that is too large, or an endpoint that is full."""
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
    """Return the command that serves ``text``, if it names an environment or a policy."""
    if re.fullmatch(r"[\w./:-]*-v\d+", text):
        return f"; an environment is served first: rlmesh-ray serve-env {text}"
    if os.path.exists(text) or text.endswith((".pt", ".pt2", "checkpoint")):
        return f"; a policy is served first: rlmesh-ray serve-model {text}"
    return ""
