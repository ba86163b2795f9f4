"""What a client may send in one session, and what the replies mean. Sans-I/O.

``client/env/env_client.py`` and ``client/model/remote_model.py`` move the bytes and wait.

* An error that the endpoint does not call recoverable ends the session (edition 2026.06, "Timeouts
  and Errors"), as does a reply that breaks the protocol, or an exception in the middle of a request
  (Ctrl-C): its reply would be taken for the next one's. Then only Close may be sent.
* What the endpoint does not offer (a reset of some lanes, a call) is refused before it is sent.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from rlmesh_ray.errors import (
    ConfigurationError,
    EndpointClosedError,
    EndpointLostError,
    EndpointTimeoutError,
    LocalProtocolError,
    RemoteEnvError,
    RemoteModelError,
    RemoteProtocolError,
    RlmeshError,
)
from rlmesh_ray.protocol import capabilities as names
from rlmesh_ray.protocol.env_session import NOT_STARTED
from rlmesh_ray.protocol.handshake import quoted
from rlmesh_ray.protocol.messages import (
    Configured,
    EnvFailed,
    EnvResponse,
    ModelFailed,
    Rendered,
    ResetDone,
    StepDone,
)

ResponseT = TypeVar("ResponseT", Configured, ResetDone, StepDone, Rendered)
RemoteErrorT = TypeVar("RemoteErrorT", RemoteEnvError, RemoteModelError)


def endpoint_timeout_ms(timeout_s: float) -> int:
    """Return the endpoint's share of a client's timeout: its error arrives before that is over."""
    return max(1, int(timeout_s * 900))


def allowance_s(timeout_s: float) -> float:
    """Return how much longer than its timeout a client waits before it gives a session up.

    The endpoint answers in time, and the tenth of a short timeout that is left for the way may not
    be enough on a busy machine.
    """
    return min(1.0, timeout_s)


class Limit(NamedTuple):
    """What limits a request."""

    option: str
    """Name of a client's option; empty: errors name its seconds only."""
    seconds: float


def name_limit(error: RlmeshError, limit: Limit, left_s: float | None = None) -> None:
    """Have a timeout name the seconds that the user has set, and the option to raise.

    In place: a session keeps the error, too, as the reason of its end. Errors that are not about
    ``limit``, of which ``left_s`` was left (None: all), do not change.
    """
    named = f"within {limit.seconds:g} s"
    if isinstance(error, EndpointTimeoutError):
        message = re.sub(rf"^{_NO_ANSWER}.*", f"no answer {named}", error.message)
    elif isinstance(error, RemoteEnvError):
        given = {endpoint_timeout_ms(each) for each in (limit.seconds, left_s) if each is not None}
        of_endpoint = rf"\b({'|'.join(map(str, given))}) ms\b"
        message = re.sub(of_endpoint, f"{limit.seconds:g} s", error.message)
    else:
        return
    if limit.option and named in message and not message.startswith(NOT_STARTED):
        message += f"; raise {limit.option} ({_OPTIONS_ELSEWHERE[limit.option]})"
    error.message = message


_OPTIONS_ELSEWHERE = {
    "reset_timeout_s": "--reset-timeout of train and evaluate",
    "step_timeout_s": "--step-timeout of evaluate",
}
"""What else sets an option of a client."""
_NO_ANSWER = "no answer within"


def timeout_error(timeout_s: float, address: str) -> EndpointTimeoutError:
    return EndpointTimeoutError(f"{_NO_ANSWER} {timeout_s:g} s", address)


class _ClientSession:
    """Whether a session with ``address`` may still be used."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_closed = False
        self._end: RlmeshError | None = None

    @property
    def has_failed(self) -> bool:
        return self._end is not None

    def require_open(self) -> None:
        """Raise EndpointClosedError after ``close``, EndpointLostError after an error."""
        if self.is_closed:
            raise self.closed()
        if self._end is not None:
            raise EndpointLostError(
                f"the session ended with an error ({self._end}); close it and open a new one",
                self.address,
            ) from self._end

    def close(self) -> None:
        self.is_closed = True

    def closed(self) -> EndpointClosedError:
        return EndpointClosedError("the session is closed", self.address)

    def fail(self, error: RlmeshError) -> None:
        """Refuse all further requests, because of ``error``; the first error counts."""
        self._end = self._end or error

    def replied(self, error: RemoteErrorT) -> RemoteErrorT:
        """Return an error of the endpoint; one that is not recoverable ends the session."""
        if not error.is_recoverable:
            self.fail(error)
        return error


class EnvClientSession(_ClientSession):
    """Requests and replies of a session with an EnvService; replies come in the requests' order."""

    def __init__(self, num_lanes: int, capabilities: Mapping[str, str], address: str) -> None:
        super().__init__(address)
        self._all_lanes = tuple(range(num_lanes))
        self.capabilities = capabilities
        self.num_sent = 0
        self.num_received = 0
        """Replies on the Join stream; after the first one the endpoint knows the session."""

    @property
    def has_unanswered(self) -> bool:
        return self.num_sent > self.num_received

    def lanes_to_reset(self, lanes: Sequence[int]) -> tuple[int, ...]:
        """Return the lanes that a Reset names, none for all; raises ConfigurationError."""
        if tuple(lanes) == self._all_lanes:
            return ()
        if lanes and names.PARTIAL_RESET not in self.capabilities:
            raise ConfigurationError(
                f"{self.address} resets all of its {len(self._all_lanes)} lanes or none (it does "
                f"not offer {names.PARTIAL_RESET}); reset them all, or have it serve 1 lane"
            )
        return tuple(lanes)

    def require_call(self, name: str) -> bool:
        """Make sure that a method or attribute of the environments may be called now.

        Returns whether the endpoint knows the session already. If not, a request must go first: the
        call must not arrive before the Join. Raises ConfigurationError where the endpoint's
        operator has not allowed it, LocalProtocolError before the answer to the first request.
        """
        remedy = (
            f"have its operator allow it: EnvServer(..., allow_calls=({name!r},)), "
            f"rlmesh-ray serve-env --allow-call {name}"
        )
        allowed = self.capabilities.get(names.LANE_CALLS)
        if allowed is None:
            raise ConfigurationError(
                f"{self.address} lets clients call nothing in its environments (it does not offer "
                f"{names.LANE_CALLS}); {remedy}"
            )
        if name not in allowed.split(","):
            raise ConfigurationError(
                f"{self.address} does not let clients call {name!r} in its environments, only "
                f"{allowed}; {remedy}"
            )
        if self.num_sent and not self.num_received:
            raise LocalProtocolError("receive the answer to the first request before a call")
        return bool(self.num_received)

    def accept(self, response: EnvResponse, request_id: str, kind: type[ResponseT]) -> ResponseT:
        """Return a reply, from Join or a direct connection, of the ``kind`` of its request.

        Raises RemoteEnvError for an error of the endpoint, RemoteProtocolError for a wrong reply.
        """
        if response.request_id != request_id:
            raise self.broken(
                f"the answer is for request {quoted(response.request_id)!r}", request_id
            )
        if isinstance(response, EnvFailed):
            raise self.replied(
                RemoteEnvError(
                    response.code.name,
                    response.message,
                    response.is_recoverable,
                    response.debug_info,
                    response.interrupted_episodes,
                )
            )
        if not isinstance(response, kind):
            name = type(response).__name__
            raise self.broken(f"{name} does not answer this request", request_id)
        return response

    def broken(self, reason: str, request_id: str) -> RemoteProtocolError:
        """Return the error of a reply that breaks the protocol, which ends the session."""
        error = RemoteProtocolError(reason, request_id)
        self.fail(error)
        return error

    def fail_if_interrupted(self, error: BaseException) -> None:
        """End the session if ``error`` is none of ours: it came in the middle of a request."""
        if not isinstance(error, RlmeshError):
            why = f"{type(error).__name__} came in the middle of a request"
            self.fail(EndpointLostError(why, self.address))


def is_still_starting(error: RemoteEnvError) -> bool:
    return error.code == "TIMEOUT" and error.message.startswith(NOT_STARTED)


class ModelClientSession(_ClientSession):
    """Requests and replies of one session with a ModelService; open until lost or closed."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._lost: RlmeshError | None = None

    def require_open(self, *, to_close: bool = False) -> None:
        """Make sure that a request may be sent; ``to_close``: the one that closes the session."""
        if self._lost is not None and (to_close or not self.is_closed):
            raise self._lost
        if not to_close:
            super().require_open()

    def lose(self, error: RlmeshError) -> RlmeshError:
        """Note that the stream has ended; return the error of the requests that wait for a reply.

        The server ends the stream sooner than the reply to Close arrives: then it is no loss.
        """
        error = self.closed() if self.is_closed else error
        self._lost = self._lost or error
        return error

    def error_of(self, failed: ModelFailed) -> RemoteModelError:
        return self.replied(
            RemoteModelError(
                failed.code.name, failed.message, failed.is_recoverable, failed.debug_info
            )
        )
