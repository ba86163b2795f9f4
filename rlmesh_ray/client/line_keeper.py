"""When a session uses a line, and when not."""

from rlmesh_ray.client.env_handshake import Connection
from rlmesh_ray.client.line import Line, is_within_reach
from rlmesh_ray.errors import ConfigurationError, EndpointLostError
from rlmesh_ray.protocol import capabilities


class LineKeeper:
    """Opens a line for a session as soon as there can be one, and again after it was lost.

    Args:
        connection: The session's.
        timeout_ms: What a step may take.
        address: The endpoint's, for error messages.
        wanted: See ``EnvClient``.

    Raises:
        ConfigurationError: It is wanted, and cannot be had.
    """

    def __init__(
        self, connection: Connection, timeout_ms: int, address: str, *, wanted: bool | None
    ) -> None:
        self._connection = connection
        self._timeout_ms = timeout_ms
        self._address = address
        self._name = connection.answer.capabilities.get(capabilities.SHARED_MEMORY, "")
        self._line: Line | None = None
        self._is_worth_a_try = False
        self._is_required = bool(wanted)
        if wanted:
            _require(self._name, address)
        self._is_wanted = wanted is not False and bool(self._name)

    @property
    def is_open(self) -> bool:
        """Whether there is a line just now."""
        return self._line is not None and self._line.is_open

    def lanes_were_reset(self) -> None:
        """Note that the session has a worker, and perhaps another one than before."""
        self._is_worth_a_try = self._is_wanted

    def line(self) -> Line | None:
        """Return a line to use now; None: there is none.

        Raises:
            EndpointLostError: There must be one, and the endpoint has not given it.
        """
        if self._line is not None and not self._line.is_open:
            self._line = None
        if self._line is None and self._is_worth_a_try:
            self._is_worth_a_try = False
            connection = self._connection
            self._line = Line.open(
                self._name,
                connection.session_id,
                self._timeout_ms,
                connection.contract,
                self._address,
            )
            if self._line is None and self._is_required:
                raise EndpointLostError(
                    "the endpoint has given no shared memory, which it offers; leave "
                    "shared_memory out to go on with messages",
                    self._address,
                )
        return self._line

    def close(self) -> None:
        """End the line. Idempotent."""
        self._is_wanted = self._is_worth_a_try = False
        if self._line is not None:
            self._line.close()


def _require(name: str, address: str) -> None:
    if not name:
        raise ConfigurationError(
            f"{address} offers no shared memory: it was told not to, its spaces hold text, or it "
            "does not run on Linux; leave shared_memory out to use messages"
        )
    if not is_within_reach(name):
        raise ConfigurationError(
            f"{address} is in another container or on another machine, and shares no memory with "
            "this process; leave shared_memory out to use messages"
        )
