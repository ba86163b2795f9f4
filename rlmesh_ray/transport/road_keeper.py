"""When a session uses a direct road, and when not."""

from collections.abc import Mapping

from rlmesh_ray.errors import ConfigurationError, EndpointLostError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.transport.shared_memory_client import SharedMemoryClient, is_within_reach

_MOST_LOST = 3
"""So many roads of a session may be lost between two Resets; then it goes on with messages."""


class RoadKeeper:
    """Opens a road for a session as soon as there can be one, and a few times after it was lost.

    Args:
        offered: The endpoint's capabilities.
        session_id: What the handshake told.
        contract: The session's.
        timeout_ms: What a step may take.
        address: The endpoint's, for error messages.
        wanted: See ``EnvClient``.

    Raises:
        ConfigurationError: It is wanted, and cannot be had.
    """

    def __init__(  # what a road is opened with
        self,
        offered: Mapping[str, str],
        session_id: str,
        contract: EnvContract,
        timeout_ms: int,
        address: str,
        *,
        wanted: bool | None,
    ) -> None:
        self._session_id = session_id
        self._contract = contract
        self._timeout_ms = timeout_ms
        self._address = address
        self._name = offered.get(capabilities.SHARED_MEMORY, "")
        self._road: SharedMemoryClient | None = None
        self._is_worth_a_try = False
        self._num_lost = 0
        self._is_required = bool(wanted)
        if wanted:
            _require(self._name, address)
        self._is_wanted = wanted is not False and bool(self._name)

    @property
    def is_open(self) -> bool:
        """Whether there is a road just now."""
        return self._road is not None and self._road.is_open

    def lanes_were_reset(self) -> None:
        """Note that the session has a worker, and perhaps another one than before."""
        self._is_worth_a_try = self._is_wanted
        self._num_lost = 0

    def road(self) -> SharedMemoryClient | None:
        """Return a road to use now; None: there is none.

        Raises:
            EndpointLostError: There must be one, and the endpoint has not given it.
        """
        if self._road is not None and not self._road.is_open:
            self._road = None
            self._num_lost += 1
            self._is_worth_a_try = self._is_wanted and self._num_lost <= _MOST_LOST
        if self._road is None and self._is_worth_a_try:
            self._is_worth_a_try = False
            self._road = SharedMemoryClient.open(
                self._name,
                self._session_id,
                self._timeout_ms,
                self._contract,
                self._address,
            )
            if self._road is None and self._is_required and not self._num_lost:
                raise EndpointLostError(
                    "the endpoint has given no shared memory, which it offers; leave "
                    "shared_memory out to go on with messages",
                    self._address,
                )
        return self._road

    def close(self) -> None:
        """End the road. Idempotent."""
        self._is_wanted = self._is_worth_a_try = False
        if self._road is not None:
            self._road.close()


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
