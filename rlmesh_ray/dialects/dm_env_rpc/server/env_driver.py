"""Resets and steps of one world's environment, in its worker process, as columns."""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import Code, WorldError
from rlmesh_ray.dialects.dm_env_rpc.wire.agent_tensors import LaneFrame
from rlmesh_ray.envs.commands import ResetCommand, ResetReply, StepCommand, StepReply, TextColumns
from rlmesh_ray.envs.worker_process import WorkerProcess
from rlmesh_ray.protocol.failure_effects import Failure, FailureKind
from rlmesh_ray.server.event_loop import in_thread
from rlmesh_ray.server.request_deadline import Deadline
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.server.worker_supervisor import WorkerSupervisor, as_failure
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.leaves import Column

# The worker has refused the action before the environment saw it.
_HARMLESS = {FailureKind.BAD_ACTION, FailureKind.BAD_REQUEST}
_CODES = {
    FailureKind.TIMEOUT: Code.DEADLINE_EXCEEDED,
    FailureKind.BAD_ACTION: Code.INVALID_ARGUMENT,
    FailureKind.BAD_REQUEST: Code.INVALID_ARGUMENT,
}


class EnvDriver:
    """Resets and steps the lanes of a world.

    Args:
        pool: Starts the worker; a session is reserved there for the world.
        contract: The endpoint's.
        grace_s: How long a reset or step may go on after its deadline before its worker is killed.
        timeout_ms: Deadline of a reset or step; 0: there is none.
    """

    def __init__(
        self, pool: WorkerPool, contract: EnvContract, grace_s: float, timeout_ms: int
    ) -> None:
        self._worker = WorkerSupervisor(pool, grace_s, contract.num_envs)
        self._timeout_ms = timeout_ms
        self._num_lanes = contract.num_envs
        zeros = np.zeros(contract.num_envs)
        self._nothing = (zeros, zeros.astype(bool), zeros.astype(bool))
        # The kill of a worker that was abandoned, in progress.
        self._ending: asyncio.Future[None] | None = None
        self._is_released = False

    @property
    def num_steps(self) -> int:
        """Vector steps so far."""
        return self._worker.counts.num_steps

    async def reset_lanes(
        self, lanes: tuple[int, ...], seeds: tuple[int, ...], options: Mapping[str, object]
    ) -> LaneFrame:
        """Begin episodes; the first time, and after a failure, in all lanes.

        Args:
            lanes: Indices; empty: all.
            seeds: One for each of these lanes, or empty.
            options: As ``gymnasium.Env.reset`` takes them.

        Raises:
            WorldError: The environment has failed.
        """
        deadline = Deadline.after(self._timeout_ms)
        if self._ending is not None:
            await asyncio.shield(self._ending)
            self._ending = None
        former = self._worker.process
        obstacle = await self._worker.make_ready(deadline, _nothing)
        if obstacle is not None:
            raise self._failed(obstacle)
        is_another = former is not None and self._worker.process is not former
        if is_another and 0 < len(lanes) < self._num_lanes:
            # The other lanes ended with the former process, which had not been noticed.
            raise self._failed(Failure(FailureKind.CRASHED, "the environment's process has ended"))
        command = ResetCommand(seeds=seeds, options=dict(options) or None, lanes=lanes)
        reply = await self._worker.request(command, deadline)
        if not isinstance(reply, ResetReply):
            raise self._failed(as_failure(reply))
        return LaneFrame(_shown(self._worker.require(), reply.text_columns), *self._nothing)

    async def step_lanes(self, actions: Sequence[Column]) -> LaneFrame:
        """Step all lanes.

        Args:
            actions: One column a leaf.

        Raises:
            WorldError: The environment has failed, or refuses an action.
        """
        process = self._worker.require()
        texts = []
        for target, column in zip(process.action_columns, actions, strict=True):
            if isinstance(target, tuple):
                texts.append(tuple(column))
            else:
                target[...] = column
        deadline = Deadline.after(self._timeout_ms)
        reply = await self._worker.request(StepCommand(tuple(texts)), deadline)
        if not isinstance(reply, StepReply):
            raise self._failed(as_failure(reply))
        results = process.results
        return LaneFrame(
            _shown(process, reply.text_columns),
            results.rewards.copy(),
            results.terminated.copy(),
            results.truncated.copy(),
        )

    def abandon(self) -> None:
        """Kill the worker whose call was just cancelled; the next reset gets another one."""
        if self._worker.process is not None and not self._worker.endpoint.is_idle:
            # Not in this turn of the loop: the cancelled task still watches the worker's socket.
            self._ending = asyncio.ensure_future(_kill(self._worker.process))

    def release(self) -> None:
        """Give the worker back; one that is still busy is killed. Idempotent."""
        if not self._is_released:
            self._is_released = True
            self._worker.release(is_idle=True)

    def _failed(self, failure: Failure) -> WorldError:
        code = _CODES.get(failure.kind, Code.INTERNAL)
        self._worker.note_error(code.name)
        is_lost = failure.kind not in _HARMLESS
        remedy = "; the next steps begin a new sequence" if is_lost else ""
        message = f"{failure.message}{remedy}"
        return WorldError(code, message, failure.debug_info, is_lost=is_lost)


async def _kill(process: WorkerProcess) -> None:
    await in_thread(process.kill)


def _nothing() -> None:
    """Do nothing: a world has no direct connection to close."""


def _shown(process: WorkerProcess, text_columns: TextColumns) -> list[Column]:
    """Return copies of the observations, since the next command overwrites the buffers."""
    texts = iter(text_columns)
    return [
        next(texts) if isinstance(column, tuple) else column.copy()
        for column in process.observation_columns
    ]
