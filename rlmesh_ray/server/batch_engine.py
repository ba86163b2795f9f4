"""The predictions that sessions ask of one policy: they wait, run together, and are answered.

Sessions ask and are answered in the serving loop. A batch runs in the policy's thread, or in the
loop while the policy is quick (see ``latency_gate``).
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.models.batcher import Batcher, QueuedPrediction
from rlmesh_ray.models.policy import Policy, traits_of
from rlmesh_ray.models.torch.threads import limit_torch_threads
from rlmesh_ray.protocol.messages import BatchRun, PredictSlot, TimedBatchRun
from rlmesh_ray.server.batch_codecs import BatchCodecs
from rlmesh_ray.server.batch_collector import BatchCollector
from rlmesh_ray.server.batch_runner import BatchRunner
from rlmesh_ray.server.batch_schema import BatchPart, BatchSchema
from rlmesh_ray.server.counters import ModelCounters
from rlmesh_ray.server.latency_gate import LatencyGate
from rlmesh_ray.server.policy_health import PolicyHealth
from rlmesh_ray.server.policy_thread import PolicyThread, Work
from rlmesh_ray.server.policy_weights import PolicyWeights
from rlmesh_ray.server.statistics import ModelStatistics

Answer = Callable[[bytes | RlmeshError, BatchRun, int], None]
"""Takes a request's actions (or why there are none), its batch, and the ns that it waited.

Must not raise: others wait for theirs."""


@dataclass(slots=True, eq=False)
class _PredictionJob(BatchPart):
    """A request that waits or runs."""

    answer: Answer
    arrived_ns: int


@dataclass(slots=True)  # not frozen: that would take three times as long to make
class _FinishedBatch:
    """A batch that has been run."""

    jobs: Sequence[_PredictionJob]
    results: Sequence[bytes | RlmeshError]
    run: BatchRun
    begun_ns: int
    ended_ns: int


Ticket = QueuedPrediction[_PredictionJob]
"""A prediction that waits or runs."""


class BatchEngine:
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
        self.counts = ModelCounters()
        """What the batcher does not count."""
        self._runner = BatchRunner(policy)
        self._batcher: Batcher[_PredictionJob] = Batcher(max_rows=max_rows)
        # The serving loop adds, the policy's thread takes.
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._latency_gate = LatencyGate(only_computes=traits_of(policy).only_computes)
        self.collector = BatchCollector(self._latency_gate, self._flush)
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
            batcher, routes=self.collector.num_routes, policy_version=self._weights.version
        )

    def predict(
        self,
        route_key: str,
        schema: BatchSchema,
        observation: bytes,
        slots: Sequence[PredictSlot],
        values: BatchCodecs,
        answer: Answer,
    ) -> Ticket | None:
        """Have actions chosen, with the rows of whoever else waits. From the serving loop.

        Args:
            route_key: Names the route over all sessions.
            schema: The route's.
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
        job = _PredictionJob(schema, observation, route_key, slots, values, answer, arrived_ns)
        self.collector.note_request()
        if self.collector.is_alone and self._answer_at_once(job):
            return None
        ticket = QueuedPrediction(schema.group, route_key, len(slots), job)
        with self._lock:
            self._batcher.offer(ticket, arrived_ns * 1e-9)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Take a prediction back if it has not begun to run."""
        with self._lock:
            self._batcher.cancel(ticket)

    def _flush(self) -> None:
        """Run what waits: here, if the policy is quick and free, else in its thread."""
        if not self._batcher.num_waiting:
            return
        ran: list[_FinishedBatch] = []
        if not self._latency_gate.is_fast or not self.thread.try_run_inline(
            partial(self._run_here, ran)
        ):
            self.thread.wake()
            return
        for done in ran:
            self._deliver(done)
        if self._batcher.num_waiting:  # more than a batch could hold
            self.collector.collect_soon()

    def _run_here(self, ran: list[_FinishedBatch]) -> None:
        """Run one batch in the serving loop."""
        with self._lock:
            tickets = self._batcher.next_batch(time.monotonic())
        if tickets:
            ran.append(self._run_batch([ticket.payload for ticket in tickets]))
            self._look_at(ran[0])

    def _answer_at_once(self, job: _PredictionJob) -> bool:
        """Run what no other request can join, if the policy is quick and free; tell whether it has.

        The way through the queue would take as long as the layers of a small network.
        """
        if not self._latency_gate.is_fast or self._batcher.num_waiting:
            return False
        ran: list[_FinishedBatch] = []
        if not self.thread.try_run_inline(partial(self._run_alone, job, ran)):
            return False
        # What an answer leads to waits its turn: one in the other they would go too deep.
        self.collector.is_alone = False
        for done in ran:
            self._deliver(done)
        return True

    def _run_alone(self, job: _PredictionJob, ran: list[_FinishedBatch]) -> None:
        """Run a batch of one in the serving loop, which has not waited."""
        done = self._run([job])
        ran.append(done)
        with self._lock:
            self._batcher.passed_by(len(job.slots), (done.ended_ns - done.begun_ns) * 1e-9)
        self._look_at(done)

    def _look_at(self, done: _FinishedBatch) -> None:
        """Tell if a batch has kept the serving loop for so long that nobody was served."""
        took_s = (done.ended_ns - done.begun_ns) * 1e-9
        if took_s > self._health.stuck_after_s:
            self._health.note_blocked(took_s)

    def _deliver(self, done: _FinishedBatch) -> None:
        """Answer the requests of a batch."""
        for job, result in zip(done.jobs, done.results, strict=True):
            job.answer(result, done.run, done.begun_ns - job.arrived_ns)

    def _next_batch(self) -> Work | None:
        with self._lock:
            tickets = self._batcher.next_batch(time.monotonic())
        return partial(self._run_there, [ticket.payload for ticket in tickets]) if tickets else None

    def _run_there(self, jobs: Sequence[_PredictionJob]) -> None:
        """Run one batch in the policy's thread."""
        done = self._run_batch(jobs)
        assert self._loop is not None  # predict was called
        self._loop.call_soon_threadsafe(self._deliver, done)

    def _run_batch(self, jobs: Sequence[_PredictionJob]) -> _FinishedBatch:
        """Run what the batcher has handed out."""
        done = self._run(jobs)
        with self._lock:
            self._batcher.done(done.ended_ns * 1e-9)
        return done

    def _run(self, jobs: Sequence[_PredictionJob]) -> _FinishedBatch:
        begun_ns = time.monotonic_ns()
        for job in jobs:
            self.counts.note_waited(begun_ns - job.arrived_ns)
        results = self._runner.run(jobs)
        num_rows = sum([len(job.slots) for job in jobs])
        self.counts.note_batch(num_rows, self._runner.forward_ns)
        run = TimedBatchRun(
            self._weights.version,
            num_rows,
            self._runner.forward_ns,
            self._name,
            self._runner.decode_ns,
            self._runner.encode_ns,
        )
        ended_ns = time.monotonic_ns()
        self._latency_gate.note((ended_ns - begun_ns) * 1e-9)
        return _FinishedBatch(jobs, results, run, begun_ns, ended_ns)
