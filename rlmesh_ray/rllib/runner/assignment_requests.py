"""The sessions of one runner: where they are opened, and which of them have to move.

The resolvers of the endpoints decide both. A runner asks them for moves every two seconds at the
most, without waiting for the answer; resolvers of fixed addresses are not asked.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import ray

from rlmesh_ray.actors.ray_calls import get_outcomes
from rlmesh_ray.actors.registry.assignment_table import Assignment
from rlmesh_ray.client.env.env_session_client import open_env_session
from rlmesh_ray.errors import EndpointError
from rlmesh_ray.rllib.config.rollout_plan import (
    EndpointResolver,
    FixedAddressResolver,
    RolloutPlan,
    require_next_step,
)
from rlmesh_ray.rllib.runner.autoreset_emulation import NextStepSession
from rlmesh_ray.spaces.contract import require_same_contract

_ASK_EVERY_S = 2.0
_FORGET_AFTER_S = 30.0
"""How long to wait for an answer before asking again."""

PollAnswer = Callable[[Any], Collection[str] | None]
"""Returns the names of sessions that have to move; None: the answer has not arrived."""


def poll_answer(answer_ref: Any) -> Collection[str] | None:
    """Return the names of sessions that have to move, without waiting; None: no answer yet.

    Where the registry is gone, no session has to move.
    """
    ready, _ = ray.wait([answer_ref], timeout=0)
    if not ready:
        return None
    (answer,) = get_outcomes(ready)
    return () if isinstance(answer, Exception) else tuple(answer)


class SessionAssignments:
    """The assignments of a runner's sessions to endpoints, by the numbers of the sessions.

    ``open``, ``get`` and ``drop`` may be called from any thread, all else from the one that
    samples.

    Args:
        plan: The plan, which has the endpoints.
        endpoints: Index of the preferred endpoint of each session.
        names: Names of the sessions for the resolvers; unique in the cluster.
        node_id: Ray's id of the runner's node.
        clock: Returns seconds, monotonically.
        poll: Returns a resolver's answer if it has arrived.
    """

    def __init__(
        self,
        plan: RolloutPlan,
        endpoints: Sequence[int],
        names: Sequence[str],
        node_id: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        poll: PollAnswer = poll_answer,
    ) -> None:
        self.endpoints = tuple(endpoints)
        self._plan = plan
        self._names = tuple(names)
        self._numbers = {name: number for number, name in enumerate(names)}
        self._places = [plan.resolver.places[endpoint] for endpoint in endpoints]
        self._node_id = node_id
        self._clock = clock
        self._poll = poll
        self._lock = threading.Lock()
        self._assignments: dict[int, Assignment] = {}
        self._is_released = False
        self._rebalancing: list[EndpointResolver] = []
        for resolver, _ in self._places:
            is_fixed = isinstance(resolver, FixedAddressResolver)
            if not is_fixed and resolver not in self._rebalancing:
                self._rebalancing.append(resolver)
        self._pending: list[tuple[Any, dict[str, Assignment]]] = []
        """Requests without an answer, and the assignments at that time by the names of sessions;
        a session with another assignment has moved already."""
        self._asked_at_s: float | None = None

    def open(self, numbers: Sequence[int]) -> list[NextStepSession]:
        """Open the sessions with these numbers, at the endpoints that they are assigned to.

        If one cannot be opened, the assignments of all of them are dropped.

        Raises:
            ContractMismatchError: An endpoint is not what it was on the driver.
            EndpointError: An endpoint cannot be reached, or refuses.
        """
        plan = self._plan
        sessions: list[NextStepSession] = []
        try:
            for number in numbers:
                client = open_env_session(
                    plan.connect_options(self.endpoints[number], self.get(number)),
                    step_timeout_s=plan.step_timeout_s,
                    reset_timeout_s=plan.reset_timeout_s,
                )
                sessions.append(NextStepSession(client))
                require_same_contract(plan.contract, client.contract, client.address)
                require_next_step(client.contract, client.answer.capabilities, client.address)
        except BaseException:
            for session in sessions:
                session.close()
            self.drop(numbers)
            raise
        return sessions

    def get(self, number: int) -> Assignment:
        """Return the assignment of a session; request one if it has none. May take a while.

        Raises:
            EndpointUnreachableError: There is no endpoint for it now.
        """
        with self._lock:
            assignment = self._assignments.get(number)
        if assignment is not None:
            return assignment
        resolver, index = self._places[number]
        assignment = resolver.assign(self._names[number], index, self._node_id)
        with self._lock:
            self._assignments[number] = assignment
            is_released = self._is_released
        if is_released:  # by another thread, in the meantime
            resolver.release([self._names[number]])
        return assignment

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget the assignments of sessions; the next ``get`` requests new ones."""
        with self._lock:
            for number in numbers:
                self._assignments.pop(number, None)

    def request_rebalance(self) -> None:
        """Ask which sessions have to move, if it is time. Never waits."""
        if not self._rebalancing:
            return
        now_s = self._clock()
        if self._asked_at_s is not None:
            patience_s = _FORGET_AFTER_S if self._pending else _ASK_EVERY_S
            if now_s - self._asked_at_s < patience_s:
                return
        self._asked_at_s = now_s
        self._pending = []
        for resolver in self._rebalancing:
            with self._lock:
                asked = {
                    self._names[number]: assignment
                    for number, assignment in self._assignments.items()
                    if self._places[number][0] == resolver
                }
            with contextlib.suppress(EndpointError):  # the registry is away
                placed = {name: assignment.endpoint_id for name, assignment in asked.items()}
                answer_ref = resolver.rebalance(placed)
                if answer_ref is not None:
                    self._pending.append((answer_ref, asked))

    def sessions_to_move(self) -> frozenset[int]:
        moving: set[int] = set()
        unanswered = []
        for answer_ref, asked in self._pending:
            answer = self._poll(answer_ref)
            if answer is None:
                unanswered.append((answer_ref, asked))
                continue
            for name in asked.keys() & answer:
                number = self._numbers[name]
                if self._assignments.get(number) is asked[name]:
                    moving.add(number)
        self._pending = unanswered
        return frozenset(moving)

    def endpoint_of(self, number: int) -> str:
        """Return the id or address of the endpoint of a session; empty: it has no assignment."""
        assignment = self._assignments.get(number)
        return (assignment.endpoint_id or assignment.address) if assignment else ""

    def release(self) -> None:
        """Release all assignments. Neither waits nor raises."""
        with self._lock:
            self._is_released = True
            self._assignments.clear()
        for resolver in self._rebalancing:
            places = zip(self._names, self._places, strict=True)
            resolver.release([name for name, (place, _) in places if place == resolver])


def assignments_for(
    plan: RolloutPlan, worker_index: int | None, *, in_evaluation: bool
) -> SessionAssignments:
    """Return the assignments of the sessions of this process's runner; none is requested yet.

    Args:
        plan: The plan, which has the endpoints.
        worker_index: RLlib's index of the runner.
        in_evaluation: Whether it is an evaluation runner.
    """
    worker_index = worker_index or 0
    endpoints = plan.endpoints_of(worker_index, in_evaluation=in_evaluation)
    context = ray.get_runtime_context() if ray.is_initialized() else None
    # With Tune, runners of several trials share one plan. An actor that Ray restarts keeps its id.
    runner = (context and context.get_actor_id()) or secrets.token_hex(8)
    names = session_names(
        plan.plan_id, worker_index, len(endpoints), in_evaluation=in_evaluation, runner=runner
    )
    return SessionAssignments(plan, endpoints, names, context.get_node_id() if context else "")


def session_names(
    plan_id: str, worker_index: int, num_sessions: int, *, in_evaluation: bool, runner: str
) -> list[str]:
    """Return the names of a runner's sessions, from which the registry reads whose they are."""
    group = "eval" if in_evaluation else "train"
    return [f"{plan_id}/{group}/{worker_index}/{each}@{runner}" for each in range(num_sessions)]
