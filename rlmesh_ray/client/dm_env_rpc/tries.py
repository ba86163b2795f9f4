"""Trying again, for as long as there is time: for servers that are just starting."""

import time

from rlmesh_ray.errors import EndpointError, EndpointLostError, EndpointUnreachableError
from rlmesh_ray.rpc import grpc

_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 1.0
# What gRPC says where somebody is there whom no other try would change.
_HERE_TO_STAY = (
    "CERTIFICATE_VERIFY_FAILED",
    "Failed parsing HTTP/2",
    "Hostname Verification Check failed",
    "WRONG_VERSION_NUMBER",
)


class Tries:
    """The tries of one connection.

    Args:
        timeout_s: For all of them together.
    """

    def __init__(self, timeout_s: float) -> None:
        self.end_s = time.monotonic() + timeout_s
        """When the last one ends, in seconds of time.monotonic()."""
        self._delay_s = _FIRST_DELAY_S

    def wait(self, error: Exception) -> None:
        """Sleep until the next try.

        Args:
            error: What has become of the last one.

        Raises:
            Exception: It, if there is no time left for another.
        """
        if self.end_s - time.monotonic() <= self._delay_s:
            raise error
        time.sleep(self._delay_s)
        self._delay_s = min(2 * self._delay_s, _LONGEST_DELAY_S)


def is_away(error: EndpointError) -> bool:
    """Tell whether nobody answers, as with a server that is not up yet."""
    cause = error.__cause__
    return (
        isinstance(error, (EndpointUnreachableError, EndpointLostError))
        and isinstance(cause, grpc.Call)
        and cause.code() is grpc.StatusCode.UNAVAILABLE
        and not any(words in (cause.details() or "") for words in _HERE_TO_STAY)
    )


def has_hung_up(error: EndpointError) -> bool:
    """Tell whether the server has ended the stream in good order."""
    return isinstance(error, EndpointLostError) and error.__cause__ is None
