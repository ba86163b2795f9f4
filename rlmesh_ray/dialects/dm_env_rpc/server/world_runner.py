"""Runs one world: executes the work of its ``World``, and passes the answers to the agents."""

import asyncio
from typing import Any

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import Code, ErrorResponse, StepWorld
from rlmesh_ray.dialects.dm_env_rpc.protocol.sequences import (
    AgentStepReply,
    Reply,
    SequencePhase,
    Work,
)
from rlmesh_ray.dialects.dm_env_rpc.protocol.world import World
from rlmesh_ray.dialects.dm_env_rpc.server.action_defaults import SlotActions
from rlmesh_ray.dialects.dm_env_rpc.server.agent_slots import AgentSlot
from rlmesh_ray.dialects.dm_env_rpc.server.env_driver import EnvDriver
from rlmesh_ray.dialects.dm_env_rpc.server.settings import (
    CreateSettings,
    MissingActions,
    ResetOptions,
)
from rlmesh_ray.dialects.dm_env_rpc.server.work_executor import WorkExecutor
from rlmesh_ray.dialects.dm_env_rpc.wire.responses import pack_error
from rlmesh_ray.spaces.contract import EnvContract


class WorldRunner:
    """A world, its environment and the agents in it. For the serving loop.

    Args:
        name: Unique in its endpoint.
        host: Drives its environment; owned from now on.
        contract: The endpoint's.
        slots: One a lane, or one for each agent of each lane.
        settings: The creator's.

    Raises:
        CodecError: The settings have seeds for another number of lanes.
    """

    def __init__(
        self,
        name: str,
        host: EnvDriver,
        contract: EnvContract,
        slots: tuple[AgentSlot, ...],
        settings: CreateSettings,
    ) -> None:
        self.name = name
        self._host = host
        self._contract = contract
        self._slots = slots
        self._settings = settings
        self._batched: AgentSlot | None = None
        self._worker = WorkExecutor(host, contract, slots)
        self._worker.restart(settings.reset_options)
        self._own_actions: dict[int, SlotActions] = {}
        self._due: dict[int, asyncio.Future[Reply]] = {}
        # Answers to an agent that drives the world in its own task.
        self._unclaimed: dict[int, Reply] = {}
        self._is_driven = False
        self._driver: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()
        self._core = self._new_core(None)

    @property
    def is_empty(self) -> bool:
        """Whether it has no agent."""
        return not self._core.joined

    def free_slots(self) -> list[AgentSlot]:
        """Return the slots without an agent; none if one agent drives all lanes."""
        if self._batched is not None:
            return []
        return [slot for slot in self._slots if slot.number not in self._core.joined]

    def take(self, slot: AgentSlot) -> None:
        """Add an agent in a free slot, or in the batched slot of a world without agents."""
        if slot.is_batched:
            self._core, self._batched = self._new_core(slot), slot
        self._core.take(slot.number)
        missing = self._settings.missing_actions
        self._own_actions[slot.number] = SlotActions(self._contract, slot, missing)

    def leave(self, slot: AgentSlot) -> None:
        """Remove an agent."""
        self._core.leave(slot.number)
        del self._own_actions[slot.number]
        self._unclaimed.pop(slot.number, None)
        due = self._due.pop(slot.number, None)
        if due is not None:
            due.cancel()
        if self._driver is not None and self._core.is_work_unneeded:
            self._cancel_driver(self._driver)
        if slot is self._batched:
            self._core, self._batched = self._new_core(None), None
        self._wake()

    async def step(self, slot: AgentSlot, request: StepWorld) -> bytes:
        """Wait until the world is stepped, and return the response.

        Raises:
            CodecError: The request is malformed; it has no effect.
        """
        slot.tensors.check_requested(request.requested)
        own, number = self._own_actions[slot.number], slot.number
        is_acting = self._core.phase(number) is SequencePhase.RUNNING
        action = own.complete(request.actions) if is_acting else None
        self._core.step(number, action)
        reply = await self._reply(number)
        if not isinstance(reply, AgentStepReply):
            return pack_error(reply)
        if not reply.is_acted:
            own.begin()
        frame: Any = reply.frame
        return slot.tensors.pack_step(
            reply.state, request.requested, frame, is_acted=reply.is_acted
        )

    def reset(self, slot: AgentSlot, reset_options: ResetOptions) -> None:
        """End the sequence of one agent.

        Raises:
            CodecError: The options do not fit the lanes of the slot.
        """
        reset_options.check(self._contract.num_envs if slot.is_batched else 1)
        self._core.reset(slot.number)
        if reset_options:
            self._core.reset_options(slot.number, reset_options)
        self._wake()

    async def reset_world(
        self, caller: AgentSlot | None, reset_options: ResetOptions
    ) -> ErrorResponse | None:
        """End the sequences of all agents; return when answers have reported it to the others.

        Returns:
            An error if not all of them have stepped in time; the world is reset all the same.

        Raises:
            CodecError: The options have seeds for another number of lanes.
        """
        self._worker.restart(reset_options)
        # A batched join or its end replaces the core, and its waits.
        core = self._core
        core.restart(reset_options, is_autoreset_welcome=not self._worker.options)
        wait = core.reset_world(None if caller is None else caller.number)
        self._wake()
        timeout_s = self._settings.reset_world_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while core.is_pending(wait):
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            return ErrorResponse(
                Code.DEADLINE_EXCEEDED,
                f"the world is reset, but after {timeout_s:g} s there are agents that have not "
                "stepped, and so have not received the end of their sequences",
            )
        finally:
            core.forget_wait(wait)
        return None

    def set_next_reset(self, slot: AgentSlot, reset_options: ResetOptions) -> None:
        """Set the reset options of an agent's next sequence; the running one goes on."""
        self._core.reset_options(slot.number, reset_options)

    @property
    def missing_actions(self) -> MissingActions:
        """How actions are replaced that an agent does not send."""
        return self._settings.missing_actions

    def end(self) -> None:
        """Release the environment, once the world has no agent. Idempotent."""
        self._host.release()

    # --- work ----------------------------------------------------------------------------

    def _new_core(self, batched: AgentSlot | None) -> World:
        lanes = [0] if batched is not None else [slot.lane for slot in self._slots]
        quorum = 1 if batched is not None else self._settings.min_agents
        core = World(
            lanes,
            resets_itself=self._worker.resets_itself or batched is not None,
            quorum=min(quorum, len(lanes)),
        )
        core.restart(self._worker.reset_options, is_autoreset_welcome=not self._worker.options)
        self._worker.is_batched = batched is not None
        return core

    async def _reply(self, number: int) -> Reply:
        """Return the answer to the step that an agent has just requested."""
        if self._core.num_joined == 1 and not self._is_driven:
            reply = await self._drive_alone(number)
            if reply is not None:
                if self._core.num_joined > 1:
                    self._wake()
                return reply
        due: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._due[number] = due
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

    def _hand_out(self, number: int | None = None) -> Reply | None:
        """Pass new answers to their agents; return the one for the slot ``number``."""
        for slot, reply in self._core.replies():
            due = self._due.pop(slot, None)
            if due is None:
                self._unclaimed[slot] = reply
            elif not due.done():
                due.set_result(reply)
        self._progress.set()
        return None if number is None else self._unclaimed.pop(number, None)

    async def _drive_alone(self, number: int) -> Reply | None:
        """Do the work in the task of the only agent, which takes half as long.

        Returns:
            The agent's answer; None: it has to wait for another agent.
        """
        core = self._core
        reply: Reply | None = None
        self._is_driven = True
        try:
            while reply is None and core.num_joined == 1:
                work = core.next_work()
                if work is None:
                    return self._hand_out(number)
                core.complete(await self._worker.outcome(work))
                reply = self._hand_out(number)
        except asyncio.CancelledError:
            # Agents that have joined meanwhile still get their answers.
            self._host.abandon()
            core.abandon_work()
            raise
        finally:
            self._is_driven = False
        return reply

    def _cancel_driver(self, driver: "asyncio.Task[None]") -> None:
        """Cancel work that no agent waits for any more: it may never end."""
        driver.cancel()
        self._host.abandon()
        self._core.abandon_work()
        self._driver, self._is_driven = None, False

    async def _drive(self, first: Work) -> None:
        work: Work | None = first
        while work is not None:
            self._core.complete(await self._worker.outcome(work))
            work = self._core.next_work()
            self._hand_out()
        self._driver, self._is_driven = None, False
