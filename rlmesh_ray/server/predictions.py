"""The predictions that sessions ask of one policy: they wait, run together, and are answered.

Sessions ask and are answered in the serving loop. A batch runs in the policy's thread, or in the
loop while the policy is quick (see ``pace``).
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.models.batcher import Batcher, Item
from rlmesh_ray.models.policy import Policy, traits_of
from rlmesh_ray.models.torch_threads import limit_torch_threads
from rlmesh_ray.protocol.adapters import TimedRun
from rlmesh_ray.protocol.messages import BatchRun, PredictSlot
from rlmesh_ray.server.batch_form import BatchForm, Part
from rlmesh_ray.server.batch_run import BatchRunner
from rlmesh_ray.server.batch_values import BatchValues
from rlmesh_ray.server.counts import ModelCounts
from rlmesh_ray.server.gathering import Gathering
from rlmesh_ray.server.pace import Pace
from rlmesh_ray.server.policy_health import PolicyHealth
from rlmesh_ray.server.policy_thread import PolicyThread, Work
from rlmesh_ray.server.policy_weights import PolicyWeights
from rlmesh_ray.server.statistics import ModelStatistics

Answer = Callable[[bytes | RlmeshError, BatchRun, int], None]
"""Takes a request's actions (or why there are none), its batch, and the ns that it waited.

Must not raise: others wait for theirs."""


@dataclass(slots=True, eq=False)
class _Job(Part):
    """A request that waits or runs."""

    answer: Answer
    arrived_ns: int


@dataclass(slots=True)  # not frozen: that would take three times as long to make
class _Done:
    """A batch that has been run."""

    jobs: Sequence[_Job]
    results: Sequence[bytes | RlmeshError]
    run: BatchRun
    begun_ns: int
    ended_ns: int


Ticket = Item[_Job]
"""A prediction that waits or runs."""


class Predictions:
    """The predictions of one policy, across all sessions, in batches.

    Args:
        policy: Called from one thread at a time.
        weights: The policy's.
        health: Told when the policy has been stuck in the serving loop.
        max_rows: Most rows in a batch that joins several requests.
        torch_threads: How many threads torch uses for a batch in the serving loop.
        name: Names the server in what it tells about each prediction.
    """

    def __init__(
        self,
        policy: Policy,
        weights: PolicyWeights,
        health: PolicyHealth,
        max_rows: int,
        torch_threads: int,
        name: str,
    ) -> None:
        self._weights = weights
        self._health = health
        self._torch_threads = torch_threads
        self._name = name
        self.counts = ModelCounts()
        """What the batcher does not count."""
        self._runner = BatchRunner(policy)
        self._batcher: Batcher[_Job] = Batcher(max_rows=max_rows)
        # The serving loop adds, the policy's thread takes.
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pace = Pace(only_computes=traits_of(policy).only_computes)
        self.gathering = Gathering(self._pace, self._hand_over)
        """What sessions have sent goes through it, and whatever that asks for goes together."""
        self.thread = PolicyThread(self._next_batch)
        """The policy's: whatever else it is asked belongs there, too."""

    def statistics(self) -> ModelStatistics:
        """Return what has been counted. From any thread."""
        with self._lock:
            batcher = self._batcher.statistics()
        if self.thread.is_busy:  # what is run past the batcher, too
            batcher = replace(batcher, is_busy=True)
        return self.counts.statistics(
            batcher, routes=self.gathering.num_routes, policy_version=self._weights.version
        )

    def predict(
        self,
        route_key: str,
        form: BatchForm,
        observation: bytes,
        slots: Sequence[PredictSlot],
        values: BatchValues,
        answer: Answer,
    ) -> Ticket | None:
        """Have actions chosen, with the rows of whoever else waits. From the serving loop.

        Args:
            route_key: Names the route over all sessions.
            form: The route's.
            observation: A batch with one row a slot, from the wire.
            slots: At least one.
            values: Of the language that the observation is in, and the actions shall be.
            answer: Called in the serving loop, unless the ticket is cancelled before. Gets the
                actions, one row a slot, for the wire.

        Returns:
            What ``cancel`` takes; None: ``answer`` has been called.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            limit_torch_threads(self._torch_threads)  # for what it will run itself
        arrived_ns = time.monotonic_ns()
        job = _Job(form, observation, route_key, slots, values, answer, arrived_ns)
        self.gathering.note_asked()
        if self.gathering.is_alone and self._answer_at_once(job):
            return None
        ticket = Item(form.group, route_key, len(slots), job)
        with self._lock:
            self._batcher.offer(ticket, arrived_ns * 1e-9)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Take a prediction back if it has not begun to run."""
        with self._lock:
            self._batcher.cancel(ticket)

    def _hand_over(self) -> None:
        """Run what waits: here, if the policy is quick and free, else in its thread."""
        if not self._batcher.num_waiting:
            return
        ran: list[_Done] = []
        if not self._pace.is_quick or not self.thread.try_here(partial(self._run_here, ran)):
            self.thread.ring()
            return
        for done in ran:
            self._deliver(done)
        if self._batcher.num_waiting:  # more than a batch could hold
            self.gathering.gather_soon()

    def _run_here(self, ran: list[_Done]) -> None:
        """Run one batch in the serving loop."""
        with self._lock:
            tickets = self._batcher.next_batch(time.monotonic())
        if tickets:
            ran.append(self._run_batch([ticket.payload for ticket in tickets]))
            self._look_at(ran[0])

    def _answer_at_once(self, job: _Job) -> bool:
        """Run what no other request can join, if the policy is quick and free; tell whether it has.

        The way through the queue would take as long as the layers of a small network.
        """
        if not self._pace.is_quick or self._batcher.num_waiting:
            return False
        ran: list[_Done] = []
        if not self.thread.try_here(partial(self._run_alone, job, ran)):
            return False
        # What an answer leads to waits its turn: one in the other they would go too deep.
        self.gathering.is_alone = False
        for done in ran:
            self._deliver(done)
        return True

    def _run_alone(self, job: _Job, ran: list[_Done]) -> None:
        """Run a batch of one in the serving loop, which has not waited."""
        done = self._run([job])
        ran.append(done)
        with self._lock:
            self._batcher.passed_by(len(job.slots), (done.ended_ns - done.begun_ns) * 1e-9)
        self._look_at(done)

    def _look_at(self, done: _Done) -> None:
        """Tell if a batch has kept the serving loop for so long that nobody was served."""
        took_s = (done.ended_ns - done.begun_ns) * 1e-9
        if took_s > self._health.stuck_after_s:
            self._health.note_held(took_s)

    def _deliver(self, done: _Done) -> None:
        """Answer the requests of a batch."""
        for job, result in zip(done.jobs, done.results, strict=True):
            job.answer(result, done.run, done.begun_ns - job.arrived_ns)

    def _next_batch(self) -> Work | None:
        with self._lock:
            tickets = self._batcher.next_batch(time.monotonic())
        return partial(self._run_there, [ticket.payload for ticket in tickets]) if tickets else None

    def _run_there(self, jobs: Sequence[_Job]) -> None:
        """Run one batch in the policy's thread."""
        done = self._run_batch(jobs)
        assert self._loop is not None  # predict was called
        self._loop.call_soon_threadsafe(self._deliver, done)

    def _run_batch(self, jobs: Sequence[_Job]) -> _Done:
        """Run what the batcher has handed out."""
        done = self._run(jobs)
        with self._lock:
            self._batcher.done(done.ended_ns * 1e-9)
        return done

    def _run(self, jobs: Sequence[_Job]) -> _Done:
        begun_ns = time.monotonic_ns()
        for job in jobs:
            self.counts.note_waited(begun_ns - job.arrived_ns)
        results = self._runner.run(jobs)
        num_rows = sum([len(job.slots) for job in jobs])
        self.counts.note_batch(num_rows, self._runner.forward_ns)
        run = TimedRun(
            self._weights.version,
            num_rows,
            self._runner.forward_ns,
            self._name,
            self._runner.decode_ns,
            self._runner.encode_ns,
        )
        ended_ns = time.monotonic_ns()
        self._pace.note((ended_ns - begun_ns) * 1e-9)
        return _Done(jobs, results, run, begun_ns, ended_ns)
