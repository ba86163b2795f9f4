"""Which endpoint a gateway takes a connection to; the gateway's memory, without I/O.

Rule 1: all calls of a connection go to one endpoint, since a Join must meet its Handshake.
Rule 2: no call is taken elsewhere once it has begun, and none is taken there twice.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

AVOIDED_S = 5.0
"""For how long new connections avoid an endpoint that has failed, if there are others."""
KEPT_S = 600.0
"""For how long a connection without calls keeps its endpoint."""

# Between its Handshake and its Join a connection has no call, and counts all the same.
_COUNTED_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint, as a gateway dials it."""

    endpoint_id: str
    incarnation: int
    address: str
    """``HOST:PORT``."""
    token: str | None = field(default=None, repr=False)
    """What this endpoint wants to be shown."""


@dataclass(slots=True, eq=False)
class ConnectionState:
    """The stay of a connection at an endpoint."""

    target: Target
    used_s: float
    num_calls: int = 0


class GatewayBalancer:
    """Remembers where each connection goes. Times are seconds of one clock that only advances."""

    def __init__(self) -> None:
        self._targets: tuple[Target, ...] = ()
        self._connections: dict[str, ConnectionState] = {}
        # Of these, those that may count; the others are many where each call has a connection.
        self._counting: dict[str, ConnectionState] = {}
        self._failed_s: dict[Target, float] = {}

    @property
    def targets(self) -> tuple[Target, ...]:
        """The endpoints that take new connections, as far as is known."""
        return self._targets

    def renew(self, targets: Sequence[Target]) -> None:
        """Note which endpoints there are. Calls that are open on others go on."""
        self._targets = tuple(targets)
        self._failed_s = {
            target: at_s for target, at_s in self._failed_s.items() if target in targets
        }

    def target_of(self, connection: str, now_s: float, *, is_bound: bool = False) -> Target | None:
        """Return where the next call of a known connection goes; None: that is to be chosen.

        Args:
            connection: Which one.
            now_s: The time.
            is_bound: Whether the call belongs to a session. Then, and while another call is open,
                it goes where the connection has been, whatever is known of that endpoint.
        """
        state = self._connections.get(connection)
        if state is None:
            return None
        is_good = state.target in self._targets and not self.is_avoided(state.target, now_s)
        if not (is_bound or state.num_calls or is_good):
            return None
        self._touch(connection, state, now_s)
        return state.target

    def choose(
        self, connection: str, now_s: float, without: Collection[Target] = ()
    ) -> Target | None:
        """Take a connection to the endpoint with the fewest of them; return it.

        Args:
            connection: Which one.
            now_s: The time.
            without: What has just been tried in vain.

        Returns:
            None: there is no other endpoint.
        """
        candidates = [target for target in self._targets if target not in without]
        if not candidates:
            return None
        loads = self._loads(connection, now_s)
        # The first of several equals: their order is the caller's.
        target = min(
            candidates, key=lambda each: (self.is_avoided(each, now_s), loads.get(each, 0))
        )
        state = self._connections[connection] = ConnectionState(target, now_s)
        self._touch(connection, state, now_s)
        return target

    def begin(self, connection: str, target: Target, now_s: float) -> ConnectionState:
        """A call of a connection goes to ``target``; return what ``end`` wants to know."""
        state = self._connections.get(connection)
        if state is None or state.target != target:
            state = self._connections[connection] = ConnectionState(target, now_s)
        state.num_calls += 1
        self._touch(connection, state, now_s)
        return state

    def end(self, state: ConnectionState, now_s: float) -> None:
        """A call has ended; its connection may be elsewhere by now."""
        state.num_calls -= 1
        state.used_s = now_s

    def fail(self, target: Target, now_s: float) -> None:
        """An endpoint does not serve, or says that it would not."""
        if target in self._targets:
            self._failed_s[target] = now_s

    def is_avoided(self, target: Target, now_s: float) -> bool:
        """Tell whether an endpoint has failed a moment ago."""
        return now_s - self._failed_s.get(target, -math.inf) < AVOIDED_S

    def leave(self, connection: str, target: Target) -> None:
        """``target`` is gone: the next call of a connection that went there is to go elsewhere."""
        state = self._connections.get(connection)
        if state is not None and state.target == target:
            del self._connections[connection]

    def forget_idle(self, now_s: float) -> None:
        """Forget the connections that have had no call for long."""
        self._connections = {
            name: state
            for name, state in self._connections.items()
            if state.num_calls or now_s - state.used_s < KEPT_S
        }

    def idle_for_s(self, connection: str, now_s: float) -> float:
        """Return how long a connection has had no call: 0.0 with one, infinity if unknown."""
        state = self._connections.get(connection)
        if state is None:
            return math.inf
        return 0.0 if state.num_calls else now_s - state.used_s

    def _loads(self, connection: str, now_s: float) -> dict[Target, int]:
        """Count the connections of each endpoint, but for one."""
        self._counting = {
            name: state
            for name, state in self._counting.items()
            if state is self._connections.get(name)
            and (state.num_calls or now_s - state.used_s < _COUNTED_S)
        }
        loads: dict[Target, int] = {}
        for name, state in self._counting.items():
            if name != connection:
                loads[state.target] = loads.get(state.target, 0) + 1
        return loads

    def _touch(self, connection: str, state: ConnectionState, now_s: float) -> None:
        state.used_s = now_s
        self._counting[connection] = state
