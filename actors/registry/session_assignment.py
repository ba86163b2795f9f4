"""Which session shall be at which endpoint. No I/O: time is passed in.

Claims are where sessions *shall* be; runners tell in their surveys where sessions *are*, and are
told which of them shall move.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlmesh_ray.actors.registry.lease_table import EndpointRecord

_FORGET_AFTER_S = 600.0
"""Claims that no survey has named for so long belong to runners that are gone."""
_LEEWAY = 8
"""How many seats fuller than others an endpoint may be for those that were dealt to it."""
_QUIET_S = 5.0
"""Nobody is moved to level the load while sessions still come: those that come level it."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where a session is to be opened."""

    address: str
    endpoint_id: str = ""
    """Empty: nobody knows its id."""
    incarnation: int = 0
    token: str | None = field(default=None, repr=False)
    """What this endpoint wants to see; None: what its users have been told."""


@dataclass(slots=True)
class _AssignedSession:
    endpoint_id: str
    node_id: str
    seen_s: float


class AssignmentTable:
    """The claims on the endpoints of one fleet.

    ``members`` are always the fleet's endpoints that may get sessions, in an order that lasts.
    ``reserved`` are the ids of endpoints for those sessions only that have been dealt one of them
    (those of evaluation); they and all others are levelled apart. Where one of the two parts
    has no endpoint left, its sessions go to the other.
    """

    def __init__(self) -> None:
        self._assigned: dict[str, _AssignedSession] = {}
        self._newcomer_s = -_QUIET_S
        self._next_sweep_s = 0.0

    @property
    def session_counts(self) -> Counter[str]:
        """How many sessions each endpoint shall have, by endpoint id."""
        return Counter(assigned.endpoint_id for assigned in self._assigned.values())

    def is_forgotten(self, now_s: float) -> bool:
        """Return whether all claims are of runners that are gone."""
        return all(
            assigned.seen_s < now_s - _FORGET_AFTER_S for assigned in self._assigned.values()
        )

    def assign(  # who, whereto, wherefrom, among whom, when
        self,
        session: str,
        wanted: str,
        node_id: str,
        members: Sequence[EndpointRecord],
        reserved: Collection[str],
        now_s: float,
    ) -> EndpointRecord | None:
        """Give a session a seat, the one that it has already if that is still there.

        Args:
            session: Which.
            wanted: The endpoint that was dealt to it; granted at first if it is there and not much
                fuller than others, and later if no other is emptier.
            node_id: Where the session's runner is: of endpoints that are as empty, one there.
            members: See the class.
            reserved: See the class.
            now_s: The time.

        Returns:
            Where; None: there is no endpoint.
        """
        self._sweep(now_s)
        former = self._assigned.get(session)
        if former is None:
            self._newcomer_s = now_s
        else:
            for record in members:
                if record.endpoint_id == former.endpoint_id:
                    former.seen_s = now_s
                    return record
            del self._assigned[session]
        choices = _part(members, reserved, wanted in reserved)
        if not choices:
            return None
        session_counts = self.session_counts
        record = _least_loaded(choices, session_counts, node_id)
        # Deals are level, but come in any order; a fleet may have grown since.
        most = session_counts[record.endpoint_id] + (_LEEWAY if former is None else 0)
        for each in choices:
            if each.endpoint_id == wanted and session_counts[wanted] <= most:
                record = each
        self._assigned[session] = _AssignedSession(record.endpoint_id, node_id, now_s)
        return record

    def rebalance(
        self,
        placed: Mapping[str, str],
        members: Sequence[EndpointRecord],
        reserved: Collection[str],
        now_s: float,
    ) -> tuple[str, ...]:
        """Tell which of a runner's sessions shall be closed, and opened where they then have seats.

        Nobody is moved when there is nowhere to go.

        Args:
            placed: Endpoint id of each of the runner's sessions.
            members: See the class.
            reserved: See the class.
            now_s: The time.

        Returns:
            Those whose endpoint has vanished or retires and, where an endpoint has two seats more
            than the emptiest, as few as level them; sorted.
        """
        self._sweep(now_s)
        for session, endpoint_id in placed.items():
            assigned = self._assigned.setdefault(session, _AssignedSession(endpoint_id, "", now_s))
            assigned.seen_s = now_s
        if not members:
            return ()
        sessions = sorted(placed)
        self._reassign_departed(members, reserved)
        if now_s >= self._newcomer_s + _QUIET_S:
            for is_reserved in (False, True):
                part = [each for each in members if (each.endpoint_id in reserved) == is_reserved]
                self._level_load(sessions, part)
        return tuple(each for each in sessions if self._assigned[each].endpoint_id != placed[each])

    def release(self, sessions: Iterable[str]) -> None:
        """Forget sessions that have ended."""
        for session in sessions:
            self._assigned.pop(session, None)

    def _reassign_departed(
        self, members: Sequence[EndpointRecord], reserved: Collection[str]
    ) -> None:
        """Give all sessions other seats whose endpoint takes none any more.

        Also those of other runners, who will be told when they ask: else their load would be
        forgotten where the load is levelled.
        """
        there = {record.endpoint_id for record in members}
        for _, assigned in sorted(self._assigned.items()):
            if assigned.endpoint_id not in there:
                choices = _part(members, reserved, assigned.endpoint_id in reserved)
                assigned.endpoint_id = _least_loaded(
                    choices, self.session_counts, assigned.node_id
                ).endpoint_id

    def _level_load(self, sessions: Sequence[str], members: Sequence[EndpointRecord]) -> None:
        """Give as few of ``sessions`` other seats as make no endpoint two seats fuller."""
        session_counts = self.session_counts
        nodes = {record.endpoint_id: record.node_id for record in members}
        left = {each for each in sessions if self._assigned[each].endpoint_id in nodes}
        while surplus := _surplus(session_counts, nodes):
            movable = [each for each in left if self._assigned[each].endpoint_id in surplus]
            if not movable:
                return
            # One that has its endpoint on another node anyhow; else the last one.
            session = max(
                movable,
                key=lambda each: (
                    session_counts[self._assigned[each].endpoint_id],
                    self._assigned[each].node_id != nodes[self._assigned[each].endpoint_id],
                    each,
                ),
            )
            left.remove(session)
            assigned = self._assigned[session]
            session_counts[assigned.endpoint_id] -= 1
            assigned.endpoint_id = _least_loaded(
                members, session_counts, assigned.node_id
            ).endpoint_id
            session_counts[assigned.endpoint_id] += 1

    def _sweep(self, now_s: float) -> None:
        """Forget claims of runners that are gone, now and then."""
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + _FORGET_AFTER_S / 10
        gone = [
            name
            for name, assigned in self._assigned.items()
            if assigned.seen_s < now_s - _FORGET_AFTER_S
        ]
        self.release(gone)


def _surplus(session_counts: Mapping[str, int], endpoint_ids: Collection[str]) -> set[str]:
    """Return the endpoints that have to give seats away until all of them are level.

    Those that ask do not have all sessions: who gives what another has too many of would get it
    back from there.
    """
    counts = {each: session_counts[each] for each in endpoint_ids}
    least = min(counts.values(), default=0)
    share, rest = divmod(sum(counts.values()), max(len(counts), 1))
    num_above = sum(count > share for count in counts.values())
    most = share + 1 if num_above <= rest else share
    return {each for each, count in counts.items() if count > most and count >= least + 2}


def _part(
    members: Sequence[EndpointRecord], reserved: Collection[str], is_reserved: bool
) -> Sequence[EndpointRecord]:
    """Return the endpoints of the part that a session belongs to, or all if it has none left."""
    part = [record for record in members if (record.endpoint_id in reserved) == is_reserved]
    return part or members


def _least_loaded(
    choices: Sequence[EndpointRecord], session_counts: Mapping[str, int], node_id: str
) -> EndpointRecord:
    # Of several, the first on the session's node, or else the first.
    return min(
        choices, key=lambda each: (session_counts[each.endpoint_id], each.node_id != node_id)
    )
