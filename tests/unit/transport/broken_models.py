"""Rules that are broken on purpose, each as small as a mistake is; the explorer must find them.

Those that say "as it was" were real; some of them the explorer has found.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from rlmesh_ray.transport.exactly_once import EndpointSide, SessionProgress
from tests.unit.transport.client_model import ClientModel
from tests.unit.transport.endpoint_model import EndpointModel, Turn
from tests.unit.transport.explorer import Move
from tests.unit.transport.session_model import World
from tests.unit.transport.worker_model import (
    CALL,
    CRASHED,
    NUM_LANES,
    PASS_OVER,
    STEP,
    Doing,
    Order,
    Reply,
    WorkerModel,
)


class TwoAccounts(WorkerModel):
    """As it was: the endpoint judges what has begun, and the worker does what it is sent."""

    def _answer(self, order: Order) -> None:
        if order.number <= self.progress.begun:  # the endpoint's verdict
            self.replies += (Reply(order.kind, CRASHED),)
        else:
            self.doing = Doing(order.number, order.kind, is_direct=False)

    def take_step(self) -> None:
        self.has_seen_request = False
        self._begin(Doing(self.world.take_step(self.direct), STEP, is_direct=True))


class HangsUpAtStaleBells(ClientModel):
    """As it was: a client that read an answer before its eventfd was set closes the connection."""

    def wake_up(self) -> None:
        self.world.change_connection(self.direct, is_cut=True)
        self.see_cut()


class AnswersFirst(WorkerModel):
    """The worker notes that a request is done after it has answered."""

    def _execute(self, doing: Doing) -> None:
        super()._execute(doing)
        if doing.is_direct:
            super()._answer_direct(doing.number, is_done=True)

    def _answer_direct(self, number: int, *, is_done: bool) -> None:
        if not is_done:
            super()._answer_direct(number, is_done=False)


class ForgetsFailures(WorkerModel):
    """A step that fails counts as one that was not executed."""

    def raise_error(self) -> None:
        assert self.doing is not None
        doing = self.doing
        super().raise_error()
        if doing.is_direct:
            self.writable_progress().start(doing.number - 1)


class DoesItAgain(WorkerModel):
    """The worker executes its last request again when it is asked for that again."""

    def _answer(self, order: Order) -> None:
        if order.number == self.progress.begun:
            self._begin(Doing(order.number, order.kind, is_direct=False))
        else:
            super()._answer(order)


class ForgetsToConfirm(EndpointModel):
    """The endpoint passes requests on to a worker that is busy with an overdue one."""

    def judge_overdue(self, number: int) -> None:
        super().judge_overdue(number)
        self.side.reply_received()


class ForgetsRefusals(EndpointModel):
    """The endpoint does not make its worker skip a request that it refuses itself."""

    def _submit(self, order: Order) -> None:
        if order.kind != PASS_OVER:
            super()._submit(order)


class ForgetsWhatItTold(EndpointSide):
    """As it was: a skip that the worker has not read yet counts as not sent."""

    def take_skips(self) -> Sequence[int]:
        self._last_skipped = 0
        return super().take_skips()


class CallsAtOnce(EndpointSide):
    """A call overtakes the steps that were sent before it."""

    def has_reached(self, number: int) -> bool:
        return True


class RefusedCallsCount(EndpointSide):
    """As it was: where a call was refused, all that was sent before it counts as done."""

    def has_reached(self, number: int) -> bool:
        return max(self.skipped, default=0) >= number or super().has_reached(number)


class CallsBeforeTheAnswer(ClientModel):
    """A client calls while it does not know whether it will have to ask for its step again."""

    def _direct_moves(self) -> Iterator[Move]:
        yield from super()._direct_moves()
        if self.script[:1] == (CALL,):
            yield Move("client calls during a step", "client", "send")


class LooksAtTheBeginning(ClientModel):
    """As it was: a client takes a direct answer that has begun to come for one that is there."""

    def send(self) -> None:
        super().send()
        self.has_whole_answer = False


class TakesBlockBackAtOnce(EndpointModel):
    """As it was: the endpoint uses the worker's own block as soon as it has disconnected."""

    def cut(self) -> None:
        super().cut()
        if self.process:
            self.buffers = self.world.worker.own_block


class MissesLateReplies(EndpointModel):
    """The endpoint does not look at a reply that comes after its deadline."""

    def take(self) -> None:
        is_late, buffers = not self.side.is_at_rest, self.buffers
        super().take()
        if is_late:
            self.buffers = buffers


class WatchesNothing(EndpointModel):
    """The endpoint does not look whether the worker of a TCP connection is alive."""

    def _direct_opened(self, turn: Turn, reply: Reply) -> None:
        super()._direct_opened(turn, reply)
        self.is_watched = False


class TakesActionsEarly(World):
    """As it was: over TCP, actions come into the block whether their step is executed or not."""

    def take_step(self, direct: int) -> int:
        number = super().take_step(direct)
        if not self.connections[direct].is_shared:
            self.write_block(self.worker.own_block, action=self.name_of(number))
        return number


class ForgetsToStart(EndpointSide):
    """A new worker does not learn with which request the session continues there."""

    def start(self, number: int, progress: SessionProgress) -> None:
        super().start(number, SessionProgress.local(NUM_LANES))
        self.progress = progress


class BeginsAnywhere(EndpointSide):
    """As it was: a new worker begins with any number that its Reset has."""

    def may_start(self, number: int) -> bool:
        return True


class CountsWhatItRefused(EndpointSide):
    """As it was: a step that waits too long to be answered again has failed, and counts."""

    def skip(self, number: int, *, has_failed: bool = False) -> None:
        super().skip(number)


class CountsOverdueSteps(CountsWhatItRefused):
    """A step that has failed for the client is counted when it succeeds after all."""

    def disconnect_overdue(self, number: int) -> bool:
        is_overdue = super().disconnect_overdue(number)
        self._failed = 0
        return is_overdue


class SendsSkipsDuringRequests(EndpointSide):
    """As it was: a skip that is sent during a request makes the counts of that final."""

    def take_skips(self) -> Sequence[int]:
        is_idle, self.is_idle = self.is_idle, True
        skips = super().take_skips()
        self.is_idle = is_idle
        return skips


class KeepsTheDirectBuffers(WorkerModel):
    """As it was: a worker whose client has left goes on with the block that it shared with it."""

    def _move_to(self, buffers: int) -> None:
        if buffers != self.own_block:
            super()._move_to(buffers)


def with_parts(**parts: type[Any]) -> type[World]:
    """Return a class of worlds with these parts: ``client``, ``endpoint``, its ``side``, or
    ``worker``."""
    return type("BrokenWorld", (World,), {f"{name}_class": part for name, part in parts.items()})
