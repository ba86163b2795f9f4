"""The shell of one world: has the work of its ``World`` done, and hands out the answers."""

import asyncio
from typing import Any

from rlmesh_ray.protocol.world import World
from rlmesh_ray.protocol.world_messages import Code, Refusal, StepWorld
from rlmesh_ray.protocol.world_sequences import (
    Phase,
    Reply,
    Stepped,
    Work,
)
from rlmesh_ray.server.dm_env_rpc.lane_actions import SeatActions
from rlmesh_ray.server.dm_env_rpc.lanes_host import LanesHost
from rlmesh_ray.server.dm_env_rpc.seats import Seat
from rlmesh_ray.server.dm_env_rpc.settings import CreateSettings, MissingActions, Order
from rlmesh_ray.server.dm_env_rpc.world_worker import WorldWorker
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.dm_env_rpc_v1.responses import pack_refusal


class HostedWorld:
    """A world, its environment and the agents in it. For the serving loop.

    Args:
        name: Unique in its endpoint.
        host: Of its environment; owned from now on.
        contract: What the endpoint promised.
        seats: One a lane, or one for each agent of each lane.
        settings: What its creator wants.

    Raises:
        CodecError: The settings have seeds for another number of lanes.
    """

    def __init__(
        self,
        name: str,
        host: LanesHost,
        contract: EnvContract,
        seats: tuple[Seat, ...],
        settings: CreateSettings,
    ) -> None:
        self.name = name
        self._host = host
        self._contract = contract
        self._seats = seats
        self._settings = settings
        self._batched: Seat | None = None
        self._worker = WorldWorker(host, contract, seats)
        self._worker.start_over(settings.order)
        self._own_actions: dict[int, SeatActions] = {}
        self._due: dict[int, asyncio.Future[Reply]] = {}
        # For whoever drives alone, and so is not due.
        self._unclaimed: dict[int, Reply] = {}
        self._is_driven = False
        self._driver: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()
        self._core = self._new_core(None)

    @property
    def is_empty(self) -> bool:
        """Whether nobody is joined."""
        return not self._core.joined

    def free_seats(self) -> list[Seat]:
        """Return the seats that somebody could take; none besides a batched one."""
        if self._batched is not None:
            return []
        return [seat for seat in self._seats if seat.number not in self._core.joined]

    def take(self, seat: Seat) -> None:
        """Let somebody sit down in a free seat, or in the batched one of an empty world."""
        if seat.is_batched:
            self._core, self._batched = self._new_core(seat), seat
        self._core.take(seat.number)
        missing = self._settings.missing_actions
        self._own_actions[seat.number] = SeatActions(self._contract, seat, missing)

    def leave(self, seat: Seat) -> None:
        """Free a seat."""
        self._core.leave(seat.number)
        del self._own_actions[seat.number]
        self._unclaimed.pop(seat.number, None)
        due = self._due.pop(seat.number, None)
        if due is not None:
            due.cancel()
        if self._driver is not None and self._core.is_work_vain:
            self._cancel_driver(self._driver)
        if seat is self._batched:
            self._core, self._batched = self._new_core(None), None
        self._wake()

    async def step(self, seat: Seat, request: StepWorld) -> bytes:
        """Return the response to a step, when it is time for it.

        Raises:
            CodecError: The request is wrong; nothing has happened.
        """
        seat.tensors.check_requested(request.requested)
        own, number = self._own_actions[seat.number], seat.number
        is_acting = self._core.phase(number) is Phase.RUNNING
        action = own.complete(request.actions) if is_acting else None
        self._core.step(number, action)
        reply = await self._reply(number)
        if not isinstance(reply, Stepped):
            return pack_refusal(reply)
        if not reply.is_acted:
            own.begin()
        frame: Any = reply.frame
        return seat.tensors.pack_step(
            reply.state, request.requested, frame, is_acted=reply.is_acted
        )

    def reset(self, seat: Seat, order: Order) -> None:
        """End the sequence of one agent.

        Raises:
            CodecError: The order does not fit the lanes of the seat.
        """
        order.check(self._contract.num_envs if seat.is_batched else 1)
        self._core.reset(seat.number)
        if order:
            self._core.order(seat.number, order)
        self._wake()

    async def reset_world(self, caller: Seat | None, order: Order) -> Refusal | None:
        """End the sequences of all agents; return when all others have heard of it.

        Returns:
            What went wrong, if anything did. The world is reset all the same.

        Raises:
            CodecError: The order has seeds for another number of lanes.
        """
        self._worker.start_over(order)
        # A batched join and its end bring another core, with other waits.
        core = self._core
        core.start_over(order, is_autoreset_welcome=not self._worker.options)
        wait = core.reset_world(None if caller is None else caller.number)
        self._wake()
        timeout_s = self._settings.reset_world_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while core.is_waited_for(wait):
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            return Refusal(
                Code.DEADLINE_EXCEEDED,
                f"the world is reset, but after {timeout_s:g} s there are agents that have not "
                "stepped, and so not heard of it",
            )
        finally:
            core.forget_wait(wait)
        return None

    def order_next(self, seat: Seat, order: Order) -> None:
        """Have the next sequence of an agent begin in a certain way; the running one goes on."""
        self._core.order(seat.number, order)

    def missing_actions(self, seat: Seat) -> MissingActions:
        """Return what stands for actions that an agent does not send."""
        return self._own_actions[seat.number].missing

    def set_missing_actions(self, seat: Seat, missing: MissingActions) -> None:
        """Change that."""
        self._own_actions[seat.number].missing = missing

    def end(self) -> None:
        """Give the environment back; to be called when nobody is joined. Idempotent."""
        self._host.release()

    # --- work ----------------------------------------------------------------------------

    def _new_core(self, batched: Seat | None) -> World:
        lanes = [0] if batched is not None else [seat.lane for seat in self._seats]
        quorum = 1 if batched is not None else self._settings.min_agents
        core = World(
            lanes,
            resets_itself=self._worker.resets_itself or batched is not None,
            quorum=min(quorum, len(lanes)),
        )
        core.start_over(self._worker.order, is_autoreset_welcome=not self._worker.options)
        self._worker.is_batched = batched is not None
        return core

    async def _reply(self, number: int) -> Reply:
        """Return the answer to the step that a seat has just asked for."""
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
        """Begin what can be done now, in a task: who leaves takes nobody's answer along."""
        if not self._is_driven:
            work = self._core.next_work()
            if work is not None:
                self._is_driven = True
                self._driver = asyncio.ensure_future(self._drive(work))
        self._hand_out()

    def _hand_out(self, number: int | None = None) -> Reply | None:
        """Hand out what has come up; return what is for the seat ``number``."""
        for seat, reply in self._core.replies():
            due = self._due.pop(seat, None)
            if due is None:
                self._unclaimed[seat] = reply
            elif not due.done():
                due.set_result(reply)
        self._progress.set()
        return None if number is None else self._unclaimed.pop(number, None)

    async def _drive_alone(self, number: int) -> Reply | None:
        """Do the work in the caller's own task, which takes half as long, while it is alone.

        Returns:
            The caller's answer; None: it has to wait for somebody else.
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
            # Those who have joined meanwhile are owed theirs all the same.
            self._host.abandon()
            core.give_up()
            raise
        finally:
            self._is_driven = False
        return reply

    def _cancel_driver(self, driver: "asyncio.Task[None]") -> None:
        """Give up what is done for nobody any more: it may last for ever."""
        driver.cancel()
        self._host.abandon()
        self._core.give_up()
        self._driver, self._is_driven = None, False

    async def _drive(self, first: Work) -> None:
        work: Work | None = first
        while work is not None:
            self._core.complete(await self._worker.outcome(work))
            work = self._core.next_work()
            self._hand_out()
        self._driver, self._is_driven = None, False
