"""Runs a policy for all routes of all sessions: one thread, batches across routes."""

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rlmesh_ray.errors import ConformanceError, PolicyError, RlmeshError
from rlmesh_ray.models.batcher import Batcher, BatcherStatistics, Item
from rlmesh_ray.models.policy import Policy, RouteRows, Rows
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.batch import Column, leaves, unflatten
from rlmesh_ray.spaces.columns import concatenate, split
from rlmesh_ray.spaces.conformance import Policy as Validation
from rlmesh_ray.spaces.conformance import check, coerce_batch
from rlmesh_ray.spaces.contract import EnvContract

ResultT = TypeVar("ResultT")
# One job's actions, or why there are none.
_Result = list[Column] | BaseException


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    contract: EnvContract
    columns: list[Column]
    rows: RouteRows
    result: asyncio.Future[list[Column]]


class ModelHost:
    """The policy of one endpoint.

    All methods must be called from the serving loop.

    Args:
        policy: Called from one thread only.
        max_rows: Most rows in a batch that joins several requests.
    """

    def __init__(self, policy: Policy, max_rows: int) -> None:
        self._policy = policy
        self._batcher: Batcher[_Job] = Batcher(max_rows=max_rows)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlmesh-ray-policy")

    def statistics(self) -> BatcherStatistics:
        """Return what the batcher counted."""
        return self._batcher.statistics()

    async def configure(self, contract: EnvContract) -> None:
        """Ask whether the policy can act there.

        Raises:
            ContractMismatchError: It cannot.
        """
        await self._run(self._policy.check_contract, contract)

    async def predict(
        self,
        route_key: str,
        contract: EnvContract,
        columns: list[Column],
        slots: Sequence[PredictSlot],
    ) -> list[Column]:
        """Return the actions, one row a slot, with the rows of whoever else is waiting.

        Args:
            route_key: Names the route over all sessions.
            contract: The route's.
            columns: Observations, one row a slot.
            slots: At least one.

        Raises:
            PolicyError: The policy failed, or its actions do not fit the action space.
        """
        result: asyncio.Future[list[Column]] = asyncio.get_running_loop().create_future()
        job = _Job(contract, columns, RouteRows(route_key, slots), result)
        item = Item(_group(contract), route_key, len(slots), job)
        self._batcher.offer(item, time.monotonic())
        self._drive()
        try:
            return await result
        except asyncio.CancelledError:
            self._batcher.cancel(item)
            raise

    async def forget(self, route_key: str) -> None:
        """Free what the policy remembers about a route."""
        await self._run(self._policy.forget, route_key, None)

    def close(self) -> None:
        """End the thread, after what it is doing."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[..., None], *arguments: object) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, partial(_guarded, function, *arguments))

    def _drive(self) -> None:
        """Run whatever waits, if the thread is free."""
        batch = self._batcher.next_batch(time.monotonic())
        if not batch:
            return
        jobs = [item.payload for item in batch]
        work = partial(_guarded, self._predict, jobs)
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        running.add_done_callback(lambda done: self._finish(jobs, done))

    def _finish(self, jobs: list[_Job], done: asyncio.Future[list[_Result]]) -> None:
        self._batcher.done(time.monotonic())
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        results = [error] * len(jobs) if error is not None else done.result()
        for job, result in zip(jobs, results, strict=True):
            if job.result.done():
                continue  # its client is gone
            if isinstance(result, BaseException):
                job.result.set_exception(result)
            else:
                job.result.set_result(result)
        self._drive()

    def _predict(self, jobs: list[_Job]) -> list[_Result]:
        """Run one batch, in the policy's thread; return each job's actions."""
        contract = jobs[0].contract
        rows = Rows(
            unflatten(contract.observation_space, concatenate([job.columns for job in jobs])),
            [job.rows for job in jobs],
        )
        actions = self._policy.predict(contract, rows)
        try:
            columns = coerce_batch(contract.action_space, actions, rows.num_rows)
        except ConformanceError as error:
            raise _misfit(contract, error) from error
        parts = split(columns, [len(job.rows.slots) for job in jobs])
        if _nonsense(contract, columns) is None:
            return list(parts)
        # Those who share a batch with a client of whom the policy makes nonsense do not share it.
        return [_nonsense(contract, part) or part for part in parts]


def _guarded(function: Callable[..., ResultT], *arguments: object) -> ResultT:
    """Call what belongs to the policy, whatever it raises.

    SystemExit and KeyboardInterrupt would end the serving loop, and with it every endpoint of the
    process; a future cannot hold StopIteration.

    Raises:
        RlmeshError: As the policy raised it, or a PolicyError in place of anything else.
    """
    try:
        return function(*arguments)
    except RlmeshError:
        raise
    except BaseException as error:
        name = type(error).__name__
        raise PolicyError(f"the policy raised {name}: {error}") from error


def _nonsense(contract: EnvContract, columns: list[Column]) -> PolicyError | None:
    """Return the error of actions that are in no space: NaN, or outside a Discrete's domain."""
    try:
        check(leaves(contract.action_space), columns, Validation.OFF)
    except ConformanceError as error:
        return _misfit(contract, error)
    return None


def _misfit(contract: EnvContract, error: ConformanceError) -> PolicyError:
    return PolicyError(f"the policy's actions do not fit {contract.id}'s action space: {error}")


def _group(contract: EnvContract) -> Hashable:
    """What requests must share to run together."""
    return (contract.observation_space, contract.action_space)
