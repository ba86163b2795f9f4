"""Runs a policy for all routes of all sessions: one thread, batches across routes."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rlmesh_ray.errors import ConfigurationError, EndpointTimeoutError, RlmeshError
from rlmesh_ray.models.batcher import Batcher, BatcherStatistics, Item
from rlmesh_ray.models.policy import Policy, Updatable, traits_of
from rlmesh_ray.models.torch_threads import limit_torch_threads
from rlmesh_ray.protocol.messages import BatchRun, PredictSlot
from rlmesh_ray.server.batch_run import BatchRunner, Part, guarded
from rlmesh_ray.server.error_text import text_of
from rlmesh_ray.server.health import WATCH_PERIOD_S, Health
from rlmesh_ray.server.model_options import (
    checked_version,
    require_count,
    require_duration,
    version_after,
)
from rlmesh_ray.server.pace import Pace
from rlmesh_ray.server.policy_thread import PolicyThread, Work
from rlmesh_ray.spaces.contract import EnvContract

_LOG = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

DEFAULT_STUCK_AFTER_S = 5.0

# Long enough for every Watch to see it.
_TOLD_FOR_S = 2 * WATCH_PERIOD_S

Answer = Callable[[bytes | RlmeshError, BatchRun, int], None]
"""Takes a request's actions (or why there are none), its batch, and the ns that it waited.

Must not raise: others wait for theirs."""


@dataclass(slots=True, eq=False)
class _Job:
    part: Part
    answer: Answer
    arrived_ns: int


@dataclass(frozen=True, slots=True)
class _Done:
    """A batch that has been run."""

    jobs: Sequence[_Job]
    results: Sequence[bytes | RlmeshError]
    run: BatchRun
    begun_ns: int


Ticket = Item[_Job]
"""A prediction that waits or runs."""


class ModelHost:
    """The policy of one endpoint.

    Args:
        policy: Called from one thread at a time.
        max_rows: Most rows in a batch that joins several requests.
        stuck_after_s: After how many seconds at one batch, or one call, the policy counts as
            stuck.
        torch_threads: How many threads torch uses for a batch.
        name: Names the server in what it tells about each prediction.

    Raises:
        ConfigurationError: An option is out of its range.
    """

    def __init__(
        self,
        policy: Policy,
        max_rows: int,
        *,
        stuck_after_s: float = DEFAULT_STUCK_AFTER_S,
        torch_threads: int = 1,
        name: str = "",
    ) -> None:
        require_count("max_batch_rows", max_rows)
        require_count("torch_threads", torch_threads)
        require_duration("stuck_after_s", stuck_after_s)
        self._policy = policy
        self._runner = BatchRunner(policy)
        self._batcher: Batcher[_Job] = Batcher(max_rows=max_rows)
        # The serving loop adds, the policy's thread takes.
        self._lock = threading.Lock()
        self._stuck_after_s = stuck_after_s
        self._name = name
        self._version = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pace = Pace(only_computes=traits_of(policy).only_computes)
        self._inbox: list[tuple[Callable[[bytes], None], bytes]] = []
        self._num_routes = 0
        self._num_new = 0
        self._is_gathering = False
        self._is_closed = False
        self._held_for_s = 0.0
        self._told_until_s = 0.0
        self._called: set[Future[Any]] = set()
        self._thread = PolicyThread(self._next_batch)
        self._torch_threads = torch_threads
        self._call(limit_torch_threads, torch_threads)

    @property
    def policy_version(self) -> int:
        """Of the weights that act now; 0 for those that the policy came with."""
        return self._version

    def statistics(self) -> BatcherStatistics:
        """Return what the batcher counted. From any thread."""
        with self._lock:
            return self._batcher.statistics()

    def health(self) -> Health:
        """Tell whether the policy gets on with its work. From any thread.

        One that has held the serving loop cannot be asked for meanwhile by gRPC; so that is told
        for a moment afterwards.
        """
        busy_for_s = self._thread.busy_for_s
        if busy_for_s > self._stuck_after_s:
            return Health(False, f"the policy has not come back for {busy_for_s:.0f} s")
        if time.monotonic() < self._told_until_s:
            return Health(
                False, f"the policy has just held all sessions for {self._held_for_s:.0f} s"
            )
        return Health(is_serving=True)

    async def configure(self, contract: EnvContract) -> None:
        """Ask whether the policy can act there; what acts there counts as a route from now on.

        Raises:
            ContractMismatchError: It cannot.
        """
        await asyncio.wrap_future(self._call(self._policy.check_contract, contract))
        self._num_routes += 1

    async def reconfigure(self, route_key: str, contract: EnvContract) -> None:
        """Ask the same for a route that is there already, and forget what it was before.

        Raises:
            ContractMismatchError: It cannot; what it remembers stays.
            PolicyError: The policy could not forget.
        """
        await asyncio.wrap_future(self._call(self._renew, route_key, contract))

    async def forget(self, route_key: str) -> None:
        """Free what the policy remembers about a route, which ends with that.

        Raises:
            RlmeshError: The policy could not; the route is still there.
            asyncio.CancelledError: The caller was cancelled, and the route may still be there; or
                the host was closed.
        """
        await asyncio.wrap_future(self._call(self._policy.forget, route_key, None))
        self._num_routes -= 1

    async def abandon(self, route_key: str) -> None:
        """End a route whose client has gone, whatever the policy says; to be run to its end.

        Raises:
            asyncio.CancelledError: The host was closed.
        """
        try:
            await self.forget(route_key)
        except RlmeshError as error:  # nobody is there any more whom it would concern
            _LOG.warning("the policy failed: %s", text_of(error))
            self._num_routes -= 1

    def soon(self, take: Callable[[bytes], None], data: bytes) -> None:
        """Have ``take(data)`` called in the next round of the serving loop; from the loop.

        It must not raise: the others' would be lost. What has come at the same time is worked on
        in one go, whatever stream it came by: each piece of code that runs ten times on end is
        several times as fast as if all take turns.
        """
        self._inbox.append((take, data))
        if self._num_routes > 1 or self._is_gathering:
            self._gather_soon()
        else:  # nobody else can come
            self._is_gathering = True
            self._gather()

    def predict(
        self,
        route_key: str,
        contract: EnvContract,
        observation: bytes,
        slots: Sequence[PredictSlot],
        answer: Answer,
    ) -> Ticket:
        """Have actions chosen, with the rows of whoever else waits. From the serving loop.

        Args:
            route_key: Names the route over all sessions.
            contract: The route's.
            observation: A batch with one row a slot, from the wire.
            slots: At least one.
            answer: Called in the serving loop, unless the ticket is cancelled before. Gets the
                actions, one row a slot, for the wire.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            limit_torch_threads(self._torch_threads)  # for what it will run itself
        job = _Job(Part(contract, observation, route_key, slots), answer, time.monotonic_ns())
        group = (contract.observation_space, contract.action_space)
        ticket = Item(group, route_key, len(slots), job)
        with self._lock:
            self._batcher.offer(ticket, job.arrived_ns * 1e-9)
        self._num_new += 1
        self._gather_soon()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Take a prediction back if it has not begun to run."""
        with self._lock:
            self._batcher.cancel(ticket)

    def set_weights(self, weights: object, *, version: int | None, timeout_s: float | None) -> int:
        """Let the policy act with other weights from the next batch on. Blocks; see ModelServer."""
        wanted = None if version is None else checked_version(version)
        swapped = self._call(self._swap, weights, wanted)
        try:
            return swapped.result(timeout_s)
        except TimeoutError:
            if not swapped.cancel():  # it began just now
                return swapped.result()
            raise EndpointTimeoutError(
                f"the policy has not come back for {self._thread.busy_for_s:.0f} s: the weights "
                "have not been replaced"
            ) from None

    def close(self) -> None:
        """End the thread, after what it is doing; calls that wait are cancelled. Does not block."""
        self._is_closed = True
        self._thread.end()
        for done in tuple(self._called):
            done.cancel()

    def _call(self, function: Callable[..., ResultT], *arguments: object) -> Future[ResultT]:
        """Run ``function`` in the policy's thread."""
        done: Future[ResultT] = Future()
        self._called.add(done)
        done.add_done_callback(self._called.discard)

        def work() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(guarded(function, *arguments))
            except RlmeshError as error:
                done.set_exception(error)

        self._thread.call(work)
        if self._is_closed:
            done.cancel()
        return done

    def _swap(self, weights: object, version: int | None) -> int:
        if not isinstance(self._policy, Updatable):
            raise ConfigurationError(
                f"the weights of a {type(self._policy).__name__} cannot be replaced; serve a torch "
                "module, an RLlib checkpoint, or a policy with get_weights and set_weights"
            )
        newer = version_after(self._version) if version is None else version
        if newer <= self._version:
            raise ConfigurationError(
                f"version {newer} is not newer than version {self._version}, which acts already"
            )
        self._policy.set_weights(weights)
        self._version = newer
        return newer

    def _renew(self, route_key: str, contract: EnvContract) -> None:
        self._policy.check_contract(contract)
        self._policy.forget(route_key, None)

    def _gather_soon(self) -> None:
        if not self._is_gathering:
            self._is_gathering = True
            asyncio.get_running_loop().call_soon(self._gather)

    def _gather(self) -> None:
        """Take what has come, and run it when nothing more comes at once.

        What the loop has received already would otherwise run in batches of one, and a batch costs
        as much as ten rows of a small network. When every route has asked, nothing more can come.
        """
        inbox, self._inbox = self._inbox, []
        for take, data in inbox:
            take(data)
        if self._pace.is_quick and inbox and self._num_new < self._num_routes:
            asyncio.get_running_loop().call_soon(self._gather)
            return
        self._is_gathering = False
        self._hand_over()

    def _hand_over(self) -> None:
        """Run what waits: here, if the policy is quick and free, else in its thread."""
        self._num_new = 0
        ran: list[_Done] = []
        if not self._pace.is_quick or not self._thread.try_here(partial(self._run_here, ran)):
            self._thread.ring()
            return
        for done in ran:
            self._deliver(done)
        if self._batcher.num_waiting:  # more than a batch could hold
            self._gather_soon()

    def _run_here(self, ran: list[_Done]) -> None:
        """Run one batch in the serving loop."""
        with self._lock:
            tickets = self._batcher.next_batch(time.monotonic())
        if not tickets:
            return
        ran.append(self._run([ticket.payload for ticket in tickets]))
        ended_s = time.monotonic()
        took_s = ended_s - ran[0].begun_ns * 1e-9
        if took_s > self._stuck_after_s:
            self._held_for_s, self._told_until_s = took_s, ended_s + _TOLD_FOR_S

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
        done = self._run(jobs)
        assert self._loop is not None  # predict was called
        self._loop.call_soon_threadsafe(self._deliver, done)

    def _run(self, jobs: Sequence[_Job]) -> _Done:
        begun_ns = time.monotonic_ns()
        results = self._runner.run([job.part for job in jobs])
        num_rows = sum(len(job.part.slots) for job in jobs)
        run = BatchRun(self._version, num_rows, self._runner.forward_ns, self._name)
        ended_ns = time.monotonic_ns()
        with self._lock:
            self._batcher.done(ended_ns * 1e-9)
        self._pace.note((ended_ns - begun_ns) * 1e-9)
        return _Done(jobs, results, run, begun_ns)
