"""Assignment of sessions to the endpoints of a fleet. No I/O: time is passed in.

An assignment is the endpoint where a session *should* be. Runners report where their sessions
*are*, by ``rebalance``, and get the names of those that have to move.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlmesh_ray.server.observe.endpoint_status import RunnerStatus

_FORGET_AFTER_S = 600.0
"""Assignments that no runner has reported for this long belong to runners that are gone."""
_LEEWAY = 8
"""How many sessions more than the emptiest an endpoint may have to get those planned for it."""
QUIET_S = 5.0
"""Time without new sessions before sessions move to balance the load: new ones balance it."""
_SESSION = re.compile(r".*/(train|eval)/(\d+)/\d+@(.*)")
"""Name of a runner's session; see ``rllib.runner.assignment_requests.session_names``."""


@dataclass(frozen=True, slots=True)
class EndpointRecord:
    """The registration of one incarnation of an endpoint."""

    endpoint_id: str
    incarnation: int
    """1 for the first start."""
    address: str
    fleet: str = ""
    node_id: str = ""
    """Node of the cluster; empty: outside of the cluster."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The endpoint at which a session opens."""

    address: str
    endpoint_id: str = ""
    """Empty: not known."""
    token: str | None = field(default=None, repr=False)
    """Token of the endpoint; None: the caller has it."""


@dataclass(slots=True)
class _AssignedSession:
    endpoint_id: str
    node_id: str
    seen_s: float


class AssignmentTable:
    """The assigned endpoint of each session of one fleet.

    ``members`` are always the fleet's endpoints that accept sessions, in a stable order.
    ``reserved`` are the ids of the endpoints that only sessions with a reserved wanted endpoint use
    (those of evaluation); the load of both parts is balanced separately. Where one part has no
    endpoint left, its sessions use the other.
    """

    def __init__(self) -> None:
        self._assigned: dict[str, _AssignedSession] = {}
        self._newcomer_s = -QUIET_S

    @property
    def session_counts(self) -> Counter[str]:
        return Counter(assigned.endpoint_id for assigned in self._assigned.values())

    def is_forgotten(self, now_s: float) -> bool:
        return all(
            assigned.seen_s < now_s - _FORGET_AFTER_S for assigned in self._assigned.values()
        )

    def runners(self, fleet: str, now_s: float) -> list[RunnerStatus]:
        gone_s = now_s - _FORGET_AFTER_S
        sessions: dict[tuple[str, int, str], list[_AssignedSession]] = {}
        for name, assigned in self._assigned.items():
            if assigned.seen_s >= gone_s and (found := _SESSION.fullmatch(name)):
                group, index, runner_id = found.groups()
                kind = "evaluation" if group == "eval" else "training"
                sessions.setdefault((kind, int(index), runner_id), []).append(assigned)
        return [
            RunnerStatus(
                fleet,
                f"{kind} runner {index}",
                runner_id,
                max(each.node_id for each in own),
                tuple(sorted({each.endpoint_id for each in own})),
                len(own),
                now_s - max(each.seen_s for each in own),
            )
            for (kind, index, runner_id), own in sorted(sessions.items())
        ]

    def assign(  # all times and members come in as arguments
        self,
        session: str,
        wanted: str,
        node_id: str,
        members: Sequence[EndpointRecord],
        reserved: Collection[str],
        now_s: float,
    ) -> EndpointRecord | None:
        """Assign a session to an endpoint: to its present one, if that still accepts sessions.

        A new session gets the planned endpoint, ``wanted``, unless that has many more sessions than
        others; a session that lost its endpoint, only if none has fewer. Of equally loaded
        endpoints those on its runner's node, ``node_id``, come first.
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
        # The plan balances the load, but sessions open in any order, and the fleet may have grown.
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
        """Return which of a runner's sessions have to close and open at their new endpoints.

        These are the sessions whose endpoint is gone or retires and, where an endpoint has two
        sessions more than the emptiest, as few as balance the load; sorted by name. ``placed`` has
        the endpoint id of each session. Without members no session moves.
        """
        self._sweep(now_s)
        for session, endpoint_id in placed.items():
            assigned = self._assigned.setdefault(session, _AssignedSession(endpoint_id, "", now_s))
            assigned.seen_s = now_s
        if not members:
            return ()
        sessions = sorted(placed)
        self._reassign_departed(members, reserved)
        if now_s >= self._newcomer_s + QUIET_S:
            for is_reserved in (False, True):
                part = [each for each in members if (each.endpoint_id in reserved) == is_reserved]
                self._level_load(sessions, part)
        return tuple(each for each in sessions if self._assigned[each].endpoint_id != placed[each])

    def release(self, sessions: Iterable[str]) -> None:
        for session in sessions:
            self._assigned.pop(session, None)

    def _reassign_departed(
        self, members: Sequence[EndpointRecord], reserved: Collection[str]
    ) -> None:
        accepting = {record.endpoint_id for record in members}
        # Also the sessions of other runners, which get the answer with their next call: otherwise
        # their load would be missing from the balance.
        for _, assigned in sorted(self._assigned.items()):
            if assigned.endpoint_id not in accepting:
                choices = _part(members, reserved, assigned.endpoint_id in reserved)
                assigned.endpoint_id = _least_loaded(
                    choices, self.session_counts, assigned.node_id
                ).endpoint_id

    def _level_load(self, sessions: Sequence[str], members: Sequence[EndpointRecord]) -> None:
        """Reassign as few of ``sessions`` as needed until no endpoint has two more than another."""
        counts = self.session_counts
        nodes = {record.endpoint_id: record.node_id for record in members}
        own = {each: self._assigned[each] for each in sessions}
        left = {name: each for name, each in own.items() if each.endpoint_id in nodes}
        while surplus := _surplus(counts, nodes):
            movable = [name for name, each in left.items() if each.endpoint_id in surplus]
            if not movable:
                return
            # Preferably one whose endpoint is on another node; else the last one.
            name = max(
                movable,
                key=lambda each: (
                    counts[left[each].endpoint_id],
                    left[each].node_id != nodes[left[each].endpoint_id],
                    each,
                ),
            )
            assigned = left.pop(name)
            counts[assigned.endpoint_id] -= 1
            assigned.endpoint_id = _least_loaded(members, counts, assigned.node_id).endpoint_id
            counts[assigned.endpoint_id] += 1

    def _sweep(self, now_s: float) -> None:
        gone_s = now_s - _FORGET_AFTER_S
        self.release([name for name, each in self._assigned.items() if each.seen_s < gone_s])


def _surplus(session_counts: Mapping[str, int], endpoint_ids: Collection[str]) -> set[str]:
    """Return the endpoints that have to give sessions away until the load is balanced.

    One runner has only some of the sessions: from another endpoint than these it would move a
    session that the next runner's balance moves back.
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
    part = [record for record in members if (record.endpoint_id in reserved) == is_reserved]
    return part or members


def _least_loaded(
    choices: Sequence[EndpointRecord], session_counts: Mapping[str, int], node_id: str
) -> EndpointRecord:
    # Of several, the first on the session's node, or else the first.
    return min(
        choices, key=lambda each: (session_counts[each.endpoint_id], each.node_id != node_id)
    )
