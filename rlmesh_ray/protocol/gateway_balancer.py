"""Load balancing of a gateway: the endpoint of each client connection. Sans-I/O.

Rule 1: all calls of a connection go to one endpoint, since a Join must follow its Handshake there.
Rule 2: a call that has begun is never moved to another endpoint or sent twice.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

AVOIDED_S = 5.0
"""Time during which new connections avoid a failed endpoint, if there is another."""
KEPT_S = 600.0
"""Time during which a connection without calls keeps its endpoint."""

# A connection between its Handshake and its Join has no call, but counts as load.
_COUNTED_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint behind the gateway."""

    endpoint_id: str
    incarnation: int
    address: str
    """``HOST:PORT``."""
    token: str | None = field(default=None, repr=False)
    """Token for the endpoint; None where it requires none."""


@dataclass(slots=True, eq=False)
class ConnectionState:
    """Endpoint, last use and open calls of a client connection."""

    target: Target
    used_s: float
    num_calls: int = 0
    channel: Any = None
    """The caller's channel to ``target``; None: it has opened none, or closed it."""

    def idle_s(self, now_s: float) -> float:
        """Return the time since the last call; 0.0 during one."""
        return 0.0 if self.num_calls else now_s - self.used_s


class GatewayBalancer:
    """Assigns connections, by name, to endpoints. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.targets: tuple[Target, ...] = ()
        self.connections: dict[str, ConnectionState] = {}
        """Those that have an endpoint."""
        # Those that may count as load: of many, where each call has its own connection, a few.
        self._counting: set[ConnectionState] = set()
        self._failed_s: dict[Target, float] = {}

    def renew(self, targets: Sequence[Target]) -> None:
        """Replace the list of endpoints. Open calls on other endpoints continue."""
        self.targets = tuple(targets)
        self._failed_s = {
            target: at_s for target, at_s in self._failed_s.items() if target in targets
        }

    def target_of(self, connection: str, now_s: float, *, is_bound: bool = False) -> Target | None:
        """Return the endpoint for the next call of a connection; None: call ``choose``.

        While another call is open, and for one that is bound to a session, it is the same endpoint
        as before, even one that is failed or not listed.
        """
        state = self.connections.get(connection)
        if state is None:
            return None
        is_good = state.target in self.targets and not self.is_avoided(state.target, now_s)
        if not (is_bound or state.num_calls or is_good):
            return None
        return self._touched(connection, state.target, now_s).target

    def choose(
        self, connection: str, now_s: float, without: Collection[Target] = ()
    ) -> Target | None:
        """Assign a connection to the endpoint with the fewest others, and return it.

        Return None where there is none, except those in ``without``, which have just failed.
        """
        candidates = [target for target in self.targets if target not in without]
        if not candidates:
            return None
        self._counting = {each for each in self._counting if each.idle_s(now_s) < _COUNTED_S}
        own = self.connections.get(connection)
        loads = Counter(state.target for state in self._counting if state is not own)
        # Of equal ones the first: the caller decides the order.
        target = min(candidates, key=lambda each: (self.is_avoided(each, now_s), loads[each]))
        return self._touched(connection, target, now_s).target

    def begin(self, connection: str, target: Target, now_s: float) -> ConnectionState:
        """Count a call of a connection to ``target``; return the state to pass to ``end``."""
        state = self._touched(connection, target, now_s)
        state.num_calls += 1
        return state

    def end(self, state: ConnectionState, now_s: float) -> None:
        """Count the end of a call; its connection may have another endpoint by now."""
        state.num_calls -= 1
        state.used_s = now_s

    def fail(self, target: Target, now_s: float) -> None:
        if target in self.targets:
            self._failed_s[target] = now_s

    def is_avoided(self, target: Target, now_s: float) -> bool:
        return now_s - self._failed_s.get(target, -math.inf) < AVOIDED_S

    def leave(self, connection: str, target: Target) -> None:
        """Release a connection from ``target``, which is gone: its next call chooses anew."""
        state = self.connections.get(connection)
        if state is not None and state.target == target:
            del self.connections[connection]

    def forget_idle(self, now_s: float) -> None:
        self.connections = {
            name: each for name, each in self.connections.items() if each.idle_s(now_s) < KEPT_S
        }

    def _touched(self, connection: str, target: Target, now_s: float) -> ConnectionState:
        state = self.connections.get(connection)
        if state is None or state.target != target:
            state = self.connections[connection] = ConnectionState(target, now_s)
        state.used_s = now_s
        self._counting.add(state)
        return state
