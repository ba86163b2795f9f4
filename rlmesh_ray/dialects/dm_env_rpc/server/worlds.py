"""Worlds of an endpoint: each with its environment and its agents; their creation, joins and ends.

A world belongs to the stream that created it, and lasts until that stream has ended and its last
agent has left. So a matchmaker keeps its stream open until the agents have joined.
"""

import asyncio
import logging
import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlmesh_ray.dialects.dm_env_rpc.protocol import (
    DM_ENV_RPC,
    Code,
    Reply,
    ResetLanes,
    SequencePhase,
    SequenceState,
    StepLanes,
    Work,
    WorkDone,
    World,
    WorldError,
)
from rlmesh_ray.dialects.dm_env_rpc.server.settings import (
    CreateSettings,
    JoinSettings,
    MissingActions,
    ResetOptions,
)
from rlmesh_ray.dialects.dm_env_rpc.wire.agent_tensors import (
    AgentSlot,
    LaneFrame,
    agent_slots,
    all_lanes,
)
from rlmesh_ray.envs.commands import ResetCommand, ResetReply, StepCommand, StepReply, TextColumns
from rlmesh_ray.envs.worker_process import WorkerProcess
from rlmesh_ray.errors import CapacityError, CodecError
from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.server.endpoint.event_loop import in_thread
from rlmesh_ray.server.env.session_worker import Deadline, SessionWorker, as_failure
from rlmesh_ray.server.env.worker_pool import WorkerPool
from rlmesh_ray.server.observe.counters import SessionLog
from rlmesh_ray.spaces.batch import empty_columns
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.multi_agent import filler_of_leaf
from rlmesh_ray.spaces.spec import Column, leaves

_LOG = logging.getLogger(__name__)

# The worker has refused the action before the environment saw it.
_HARMLESS = {FailureKind.BAD_ACTION, FailureKind.BAD_REQUEST}
_CODES = {
    FailureKind.TIMEOUT: Code.DEADLINE_EXCEEDED,
    FailureKind.BAD_ACTION: Code.INVALID_ARGUMENT,
    FailureKind.BAD_REQUEST: Code.INVALID_ARGUMENT,
}


class WorldRunner:
    """A world, its environment and the agents in it. For the serving loop.

    Args:
        pool: Starts its worker; a session is reserved there for the world.
        contract: The endpoint's.
        slots: One a lane, or one for each agent of each lane.
        settings: The creator's; they fit the contract.
        owner: The stream that created it; None: the endpoint did.
    """

    def __init__(
        self,
        pool: WorkerPool,
        contract: EnvContract,
        slots: tuple[AgentSlot, ...],
        settings: CreateSettings,
        owner: object,
    ) -> None:
        self.name = uuid.uuid4().hex
        """Unique in its endpoint."""
        self.owner = owner
        """None: that stream has ended, or the endpoint has created the world."""
        self.is_open = owner is None
        """Whether an agent that names no world may join it: the endpoint has created it."""
        self._worker = worker = SessionWorker(pool, contract.num_envs)
        # The kill of a worker that was abandoned, in progress.
        self._ending: asyncio.Future[None] | None = None
        self._log = SessionLog(
            pool.counts.sessions,
            "a client",
            DM_ENV_RPC,
            lambda: {"steps": worker.counts.read().num_steps},
        )
        self._contract = contract
        self._slots = slots
        self._settings = settings
        self._batched: AgentSlot | None = None
        # With one lane, only a reset begins the next episode.
        self._resets_itself = contract.autoreset_mode is AutoresetMode.NEXT_STEP
        self._has_ended = False
        # Of every reset.
        self._options: Mapping[str, object] = settings.reset_options.options
        # Of the next step. A tuple of texts cannot be changed by row, a list can.
        self._columns: list[Any] = [
            list(column) if isinstance(column, tuple) else column
            for column in empty_columns(contract.action_space, contract.num_envs)
        ]
        # Once, for what no agent sends: the slots that do not act have defaults in each step.
        for leaf, column in zip(leaves(contract.action_space), self._columns, strict=True):
            column[:] = [filler_of_leaf(leaf)] * len(column)
        # Rewards and flags after a reset.
        zeros = np.zeros(contract.num_envs)
        self._nothing = (zeros, zeros.astype(bool), zeros.astype(bool))
        # By slot: the actions of the last step of its sequence.
        self._held: dict[int, Mapping[int, Any]] = {}
        self._due: dict[int, asyncio.Future[Reply]] = {}
        self._is_driven = False
        self._driver: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()
        self._core = self._new_core(settings.reset_options)

    @property
    def is_empty(self) -> bool:
        return not self._core.joined

    @property
    def missing_actions(self) -> MissingActions:
        return self._settings.missing_actions

    def free_slots(self) -> list[AgentSlot]:
        """Return the slots without an agent; none if one agent drives all lanes."""
        if self._batched is not None:
            return []
        return [slot for slot in self._slots if slot.number not in self._core.joined]

    def take(self, slot: AgentSlot) -> None:
        if slot.is_batched:
            self._batched = slot
            self._core = self._new_core(self._core.restart_options)
        self._core.take(slot.number)
        self._held[slot.number] = slot.fillers

    def leave(self, slot: AgentSlot) -> None:
        self._core.leave(slot.number)
        due = self._due.pop(slot.number, None)
        if due is not None:
            due.cancel()
        if self._driver is not None and self._core.is_work_unneeded:
            # No request waits for it any more, and it may never end.
            self._driver.cancel()
            self._abandon(self._core)
            self._driver, self._is_driven = None, False
        if slot is self._batched:
            self._batched = None
            self._core = self._new_core(self._core.restart_options)
        self._wake()

    async def step(self, slot: AgentSlot, request: Any) -> bytes:
        """Wait until the world is stepped, and return the response to a ``pb.StepRequest``.

        Raises:
            CodecError: The request is malformed; it has no effect.
            WorldError: The environment has failed, or refuses the action.
        """
        requested = tuple(request.requested_observations)
        slot.check_requested(requested)
        number = slot.number
        is_acting = self._core.phase(number) is SequencePhase.RUNNING
        action = self._completed(slot, request.actions) if is_acting else None
        self._core.step(number, action)
        reply = await self._reply(number)
        if isinstance(reply, WorldError):
            raise reply
        if not reply.is_acted:
            self._held[number] = slot.fillers
        frame: Any = reply.frame
        return slot.pack_step(reply.state, requested, frame, is_acted=reply.is_acted)

    def reset(self, slot: AgentSlot, reset_options: ResetOptions) -> None:
        """End the sequence of one agent.

        Raises:
            CodecError: The options do not fit the lanes of the slot.
        """
        reset_options.check(self._contract.num_envs if slot.is_batched else 1)
        self._core.reset(slot.number)
        if reset_options:
            self.set_next_reset(slot, reset_options)
        self._wake()

    async def reset_world(self, caller: AgentSlot | None, reset_options: ResetOptions) -> None:
        """End the sequences of all agents; return when answers have reported it to the others.

        Raises:
            CodecError: The options have seeds for another number of lanes.
            WorldError: Not all of them have stepped in time; the world is reset all the same.
        """
        reset_options.check(self._contract.num_envs)
        self._options = reset_options.options or self._options
        # A batched join or its end replaces the core, and its waits.
        core = self._core
        core.restart(reset_options, is_autoreset_welcome=not self._options)
        cut = core.reset_world(None if caller is None else caller.number)
        self._wake()
        timeout_s = self._settings.reset_world_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while core.is_any_cut(cut):
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            raise WorldError(
                Code.DEADLINE_EXCEEDED,
                f"the world is reset, but after {timeout_s:g} s there are agents that have not "
                "stepped, and so have not received the end of their sequences",
            ) from None

    def set_next_reset(self, slot: AgentSlot, reset_options: ResetOptions) -> None:
        """Set the reset options of an agent's next sequence; the running one goes on."""
        self._core.reset_options(slot.number, reset_options)

    def end(self) -> None:
        self._worker.release()  # one that is still busy is killed
        # A world ends by itself after its last agent: it is never counted as lost.
        self._log.end(is_closed=True, is_idle=False, is_stopping=False)

    def _new_core(self, reset_options: object) -> World:
        """Return the state machine of a world without agents: a batched join is one wide lane."""
        is_batched = self._batched is not None
        lanes = [0] if is_batched else [slot.lane for slot in self._slots]
        core = World(
            lanes,
            resets_itself=self._resets_itself or is_batched,
            quorum=1 if is_batched else min(self._settings.min_agents, len(lanes)),
        )
        core.restart(reset_options, is_autoreset_welcome=not self._options)
        return core

    # --- turns ---------------------------------------------------------------------------

    async def _reply(self, number: int) -> Reply:
        due: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._due[number] = due
        if len(self._core.joined) == 1 and not self._is_driven:
            await self._drive_alone(due)
        if not due.done() or len(self._core.joined) > 1:
            self._wake()
        return await due

    def _wake(self) -> None:
        """Start the next work in a task of its own: the task of an agent may be cancelled."""
        if not self._is_driven:
            work = self._core.next_work()
            if work is not None:
                self._is_driven = True
                self._driver = asyncio.ensure_future(self._drive(work))
        self._hand_out()

    def _hand_out(self) -> None:
        for slot, reply in self._core.replies():
            due = self._due.pop(slot)
            if not due.done():
                due.set_result(reply)
        self._progress.set()

    async def _drive_alone(self, due: "asyncio.Future[Reply]") -> None:
        """Do the work in the task of the only agent, which takes half as long.

        It ends with the agent's answer, or where it has to wait for another agent.
        """
        core = self._core
        self._is_driven = True
        try:
            while not due.done() and len(core.joined) == 1:
                work = core.next_work()
                if work is not None:
                    core.complete(await self._outcome(work))
                self._hand_out()
                if work is None:
                    return
        except asyncio.CancelledError:
            # Agents that have joined meanwhile still get their answers.
            self._abandon(core)
            raise
        finally:
            self._is_driven = False

    async def _drive(self, first: Work) -> None:
        work: Work | None = first
        while work is not None:
            core = self._core
            core.complete(await self._outcome(work))
            work = self._core.next_work()
            self._hand_out()
        self._driver, self._is_driven = None, False

    def _abandon(self, core: World) -> None:
        """Kill the worker whose call was just cancelled; the next reset gets another one."""
        if self._worker.process is not None and not self._worker.endpoint.is_idle:
            # Not in this turn of the loop: the cancelled task still watches the worker's socket.
            self._ending = asyncio.ensure_future(in_thread(self._worker.process.kill))
        core.abandon_work()

    # --- work ----------------------------------------------------------------------------

    async def _outcome(self, work: Work) -> WorkDone | WorldError:
        """Do ``work``; any error is returned."""
        try:
            if isinstance(work, ResetLanes):
                return WorkDone(await self._reset_lanes(work), {}, ())
            if self._batched is not None:
                return await self._step_batch(self._batched, work)
            return await self._step_lanes(work)
        except WorldError as error:
            return error
        except CapacityError as error:
            return WorldError(Code.RESOURCE_EXHAUSTED, error.message, is_lost=True)
        except Exception as error:  # noqa: BLE001  # outermost frame: agents wait for an answer
            _LOG.exception("a world has failed")
            return WorldError(Code.INTERNAL, f"the endpoint failed: {error!r}", is_lost=True)

    async def _step_lanes(self, work: StepLanes) -> WorkDone:
        for slot in self._slots:
            self._put(slot, work.actions.get(slot.number, slot.fillers))
        frame = await self._step_worker()
        states = {number: self._slots[number].state(frame) for number in work.actions}
        return WorkDone(frame, states, (frame.terminated | frame.truncated).tolist())

    async def _step_batch(self, slot: AgentSlot, work: StepLanes) -> WorkDone:
        if self._has_ended and not self._resets_itself:
            # As with lanes that reset themselves, this action is ignored.
            frame = await self._reset_lanes(ResetLanes((), None))
        else:
            self._put(slot, work.actions[slot.number])
            frame = await self._step_worker()
        self._has_ended = bool(frame.terminated.any() or frame.truncated.any())
        return WorkDone(frame, {0: SequenceState.RUNNING}, [False])

    def _completed(self, slot: AgentSlot, sent: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return the values of all actions of an agent, by leaf.

        Raises:
            CodecError: One is malformed, or is missing where it must not.
        """
        values = slot.read_actions(sent)
        fillers = slot.fillers
        if len(values) < len(fillers):
            if self.missing_actions is MissingActions.ERROR:
                names = [each.spec.name for each in slot.actions if each.position not in values]
                raise CodecError(f"the actions {names} are missing, which this world needs")
            is_held = self.missing_actions is MissingActions.HOLD
            values = {**(self._held[slot.number] if is_held else fillers), **values}
        self._held[slot.number] = values
        return values

    def _put(self, slot: AgentSlot, values: Any) -> None:
        for position, value in values.items():
            self._columns[position][slot.row] = value

    # --- the worker ----------------------------------------------------------------------

    async def _reset_lanes(self, work: ResetLanes) -> LaneFrame:
        """Begin episodes; the first time, and after a failure, in all lanes.

        Raises:
            WorldError: The environment has failed.
        """
        asked = work.reset_options
        if not isinstance(asked, ResetOptions):
            asked = ResetOptions()
        lanes = work.lanes if self._batched is None else asked.lanes
        seeds = asked.seed
        if isinstance(seeds, int):
            seeds = tuple(range(seeds, seeds + (len(lanes) or self._contract.num_envs)))
        self._has_ended = False
        deadline = Deadline(self._settings.timeout_ms)
        if self._ending is not None:
            await asyncio.shield(self._ending)
            self._ending = None
        former = self._worker.process
        # A world has no direct connection to close.
        obstacle = await self._worker.make_ready(deadline)
        if obstacle is not None:
            raise self._failed(obstacle)
        is_another = former is not None and self._worker.process is not former
        if is_another and 0 < len(lanes) < self._contract.num_envs:
            # The other lanes ended with the former process, which had not been noticed.
            raise self._failed(Failure(FailureKind.CRASHED, "the environment's process has ended"))
        options = {**self._options, **asked.options}
        command = ResetCommand(seeds=seeds or (), options=options or None, lanes=lanes)
        reply = await self._worker.request(command, deadline)
        if not isinstance(reply, ResetReply):
            raise self._failed(as_failure(reply))
        return LaneFrame(_shown(self._worker.require(), reply.text_columns), *self._nothing)

    async def _step_worker(self) -> LaneFrame:
        """Step all lanes.

        Raises:
            WorldError: The environment has failed, or refuses an action.
        """
        process = self._worker.require()
        texts = []
        for target, column in zip(process.buffers.actions, self._columns, strict=True):
            if isinstance(target, tuple):
                texts.append(tuple(column))
            else:
                target[...] = column
        deadline = Deadline(self._settings.timeout_ms)
        reply = await self._worker.request(StepCommand(tuple(texts)), deadline)
        if not isinstance(reply, StepReply):
            raise self._failed(as_failure(reply))
        results = process.buffers.results
        return LaneFrame(
            _shown(process, reply.text_columns),
            results.rewards.copy(),
            results.terminated.copy(),
            results.truncated.copy(),
        )

    def _failed(self, failure: Failure) -> WorldError:
        code = _CODES.get(failure.kind, Code.INTERNAL)
        self._worker.note_error(code.name)
        is_lost = failure.kind not in _HARMLESS
        remedy = "; the next steps begin a new sequence" if is_lost else ""
        message = f"{failure.message}{remedy}"
        return WorldError(code, message, failure.debug_info, is_lost=is_lost)


def _shown(process: WorkerProcess, text_columns: TextColumns) -> list[Column]:
    """Return copies of the observations, since the next command overwrites the buffers."""
    texts = iter(text_columns)
    return [
        next(texts) if isinstance(column, tuple) else column.copy()
        for column in process.buffers.observations
    ]


class WorldRegistry:
    """Creates, finds and ends worlds. For the serving loop.

    Args:
        pool: Started; starts the workers of worlds. A world counts as a session.
        contract: The endpoint's.
    """

    def __init__(self, pool: WorkerPool, contract: EnvContract) -> None:
        self._pool = pool
        self.contract = contract
        self._slots = agent_slots(contract)
        self._worlds: dict[str, WorldRunner] = {}
        self._is_shared = any(slot.agent for slot in self._slots)

    async def create(self, settings: CreateSettings, owner: object) -> WorldRunner:
        """Create a world.

        Args:
            settings: The creator's.
            owner: The creator's stream; None: the endpoint itself.

        Raises:
            CodecError: The settings do not fit the environment.
            WorldError: The endpoint is full, or its environment resets within the step.
        """
        if self.contract.autoreset_mode is AutoresetMode.SAME_STEP:
            raise WorldError(
                Code.UNIMPLEMENTED,
                "this environment resets its lanes within the step that ends an episode (autoreset "
                "mode SAME_STEP), which dm_env_rpc has no form for: serve it with NEXT_STEP or "
                "DISABLED",
            )
        settings.reset_options.check(self.contract.num_envs)
        try:
            await self._pool.reserve()
        except CapacityError as error:
            raise WorldError(Code.RESOURCE_EXHAUSTED, error.message) from error
        world = WorldRunner(self._pool, self.contract, self._slots, settings, owner)
        self._worlds[world.name] = world
        return world

    def find(self, name: str) -> WorldRunner:
        """Return the world with a name.

        Raises:
            WorldError: There is none.
        """
        world = self._worlds.get(name)
        if world is None:
            reason = f"there is no world {name[:80]!r}; CreateWorld names one"
            raise WorldError(Code.NOT_FOUND, reason)
        return world

    async def join(self, name: str, settings: JoinSettings) -> tuple[WorldRunner, AgentSlot]:
        """Add an agent to a world; return the world and its slot.

        Args:
            name: The world's; empty: one that the endpoint creates and several agents share.
            settings: The agent's.

        Raises:
            WorldError: There is no such world, or no free slot that the settings allow.
        """
        world = self.find(name) if name else await self._own_world(settings)
        try:
            slot = self._chosen(world, settings)
        except WorldError:
            if not name:
                self._reap(world.name)
            raise
        world.take(slot)
        return world, slot

    def leave(self, world: WorldRunner, slot: AgentSlot) -> None:
        if world.name in self._worlds:
            world.leave(slot)
            self._reap(world.name)

    def destroy(self, name: str) -> None:
        """End a world without agents.

        Raises:
            WorldError: There is no such world, or it has agents.
        """
        if not self.find(name).is_empty:
            raise WorldError(
                Code.FAILED_PRECONDITION,
                "an agent is still joined to this world; have all agents leave first",
            )
        self._worlds.pop(name).end()

    def release_worlds(self, owner: object) -> None:
        """End the worlds of a stream that has ended; those with agents end with the last agent."""
        for world in [world for world in self._worlds.values() if world.owner is owner]:
            world.owner = None
            self._reap(world.name)

    def _reap(self, name: str) -> None:
        world = self._worlds.get(name)
        if world is not None and world.owner is None and world.is_empty:
            self._worlds.pop(name).end()

    async def _own_world(self, settings: JoinSettings) -> WorldRunner:
        if self._is_shared and not settings.is_batched:
            for world in self._worlds.values():
                if world.is_open and self._free_slots(world, settings):
                    return world
        return await self.create(CreateSettings(), None)

    def _free_slots(self, world: WorldRunner, settings: JoinSettings) -> list[AgentSlot]:
        free = world.free_slots()
        return [slot for slot in self._suited(settings) if slot in free]

    def _suited(self, settings: JoinSettings) -> list[AgentSlot]:
        return [
            slot
            for slot in self._slots
            if settings.lane in (None, slot.lane) and settings.agent in (None, slot.agent)
        ]

    def _chosen(self, world: WorldRunner, settings: JoinSettings) -> AgentSlot:
        if settings.is_batched:
            return self._batched(world, settings)
        if not self._suited(settings):
            agents = list(dict.fromkeys(slot.agent for slot in self._slots if slot.agent))
            about = (
                f" and the agents {agents}" if agents else ", each with one agent without a name"
            )
            raise WorldError(
                Code.INVALID_ARGUMENT,
                f"there is no slot with lane {settings.lane} and agent {settings.agent!r}; this "
                f"environment has {self.contract.num_envs} lane(s){about}",
            )
        free = self._free_slots(world, settings)
        if not free:
            raise WorldError(
                Code.RESOURCE_EXHAUSTED,
                "this world has no free slot of that kind; create another, or wait until an agent "
                "leaves",
            )
        return free[0]

    def _batched(self, world: WorldRunner, settings: JoinSettings) -> AgentSlot:
        if settings.lane is not None or settings.agent is not None:
            reason = "a batched join drives all lanes; give neither 'lane' nor 'agent'"
            raise WorldError(Code.INVALID_ARGUMENT, reason)
        if self.contract.autoreset_mode is AutoresetMode.DISABLED and self.contract.num_envs > 1:
            raise WorldError(
                Code.UNIMPLEMENTED,
                "lanes that do not reset themselves cannot be driven by one batched join; serve "
                "the environment with autoreset mode NEXT_STEP, or join lane by lane",
            )
        if not world.is_empty:
            reason = "a batched join needs a world for itself; create another"
            raise WorldError(Code.FAILED_PRECONDITION, reason)
        return all_lanes(self.contract)
