"""The clients of ``session_model``: an honest one, and one that lies.

``ClientSide`` is production's; the rest is modelled after ``EnvClient`` and ``DirectConnector``.
"""

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from rlmesh_ray.transport.direct_connection import _MAX_LOST
from rlmesh_ray.transport.exactly_once import ClientSide
from tests.unit.transport.endpoint_model import BUSY, CLOSE, INVALID, PUSHED, Account, Result
from tests.unit.transport.explorer import Move, shallow_copy
from tests.unit.transport.worker_model import (
    CALL,
    CRASHED,
    PARTIAL,
    RAISED,
    RENDER,
    RESET,
    STEP,
    TIMEOUT,
    Chain,
)

if TYPE_CHECKING:
    from tests.unit.transport.session_model import World

_INTERRUPTING = ("TIMEOUT", "CRASHED", "INTERNAL")


class ClientModel:
    """An honest client, which checks what it gets. It closes its session at the end.

    Args:
        world: Where it lives.
        script: What it does; after a failure it resets before it goes on.
    """

    is_honest = True

    def __init__(self, world: "World", script: tuple[str, ...]) -> None:
        self.world = world
        self.script = script
        self.side = ClientSide()
        self.awaited: tuple[tuple[int, str], ...] = ()
        """On the Join stream, in order; before them, one on the direct connection."""
        self.awaits_direct = False
        """Whether a step is in flight on the direct connection."""
        self.calling = 0
        self.has_whole_answer = False
        """Whether it has seen that the direct answer is here, and left it there."""
        self.is_over = False
        # What it has learned.
        self.chain: Chain = ()
        self.account: Account = ()
        self.broken_at = 0
        """Number of the request that has failed; 0: none since the last Reset."""
        self.unchecked: tuple[tuple[int, Chain | None], ...] = ()
        """Results of calls that were made before those of earlier steps were taken."""
        # DirectConnector.
        self.direct = 0
        self.dialed = 0
        self.has_lost_direct = self.is_worth_a_try = False
        self.num_lost = 0
        self.asking = self.num_asked = 0
        self.arrived: int | None = None
        """What came of asking, and has not been looked at yet; 0: no direct connection."""

    def fork(self, world: "World") -> "ClientModel":
        other = shallow_copy(self)
        other.world = world
        other.side = shallow_copy(self.side)
        return other

    @property
    def key(self) -> Hashable:
        mine = [value for name, value in vars(self).items() if name not in ("world", "side")]
        return (*mine, *vars(self.side).values())

    @property
    def hears(self) -> bool:
        """Whether it looks at answers."""
        return True

    # --- what can happen ------------------------------------------------------------------

    def moves(self) -> Iterator[Move]:
        world = self.world
        if self.is_over:
            return
        if world.is_join_lost:
            yield Move("client sees the end of the stream", "client", "see_the_end")
        if self.asking:
            yield from self._asking_moves()
            if world.is_shared:
                return  # over TCP a thread of its own asks
        if self.calling:
            if world.called is not None:
                yield Move("client takes the answer to its call", "client", "take_called")
        elif self.awaits_direct:
            yield from self._direct_moves()
        else:
            yield from self._stream_moves()

    def _stream_moves(self) -> Iterator[Move]:
        if self.awaited and self.world.responses:
            yield Move("client takes a response", "client", "take_response")
        if not self.awaited or (self.awaited[-1][1] == PUSHED and self.script):
            yield Move(f"client sends: {self.next_kind}", "client", "send")

    def _asking_moves(self) -> Iterator[Move]:
        if self.arrived is not None:
            yield Move(
                "client sees what came of asking for a direct connection",
                "client",
                "take_connection",
            )
        if self.world.faults.leaves:
            yield Move("client gives up the direct connection", "client", "leave")

    def _direct_moves(self) -> Iterator[Move]:
        direct = self.world.connections[self.direct]
        if direct.answers:
            # It may look before the bell is rung, and after.
            yield Move("client takes a direct answer", "client", "take_direct")
            if direct.answers[0].is_done and self.script[:1] == (CALL,):
                yield Move("client calls before it takes the answer", "client", "send")
        elif direct.is_cut:
            yield Move("client sees the end of the direct connection", "client", "see_cut")
        elif direct.is_rung:
            yield Move("client wakes up", "client", "wake_up")

    # --- EnvClient ------------------------------------------------------------------------

    @property
    def next_kind(self) -> str:
        if not self.script:
            return CLOSE
        wants_reset = self.broken_at and not self.world.is_stubborn and not self.awaited
        return RESET if wants_reset else self.script[0]

    def send(self) -> None:
        kind = self.next_kind
        world = self.world
        if kind == STEP and not self.awaited and not world.is_join_lost:
            self._find_direct()
            if self.asking and world.is_shared:
                return  # it waits for the direct connection
        if self.script and kind == self.script[0]:
            self.script = self.script[1:]
        number = self.side.next_number
        if kind == CALL:  # EnvClient.call
            self.side.sent()
            self.has_whole_answer = self.awaits_direct
            self.calling = number
            if not world.is_join_lost:
                world.call, world.call_after = number, number - 1
        elif kind == STEP and self.direct and not self.awaited and not world.is_join_lost:
            self.side.sent_direct()
            self.awaits_direct = True
            world.send_step(self.direct, number)
        else:
            self.side.sent()
            self._send_on_join(number, kind)

    def _send_on_join(self, number: int, kind: str) -> None:
        self.awaited += ((number, kind),)
        if not self.world.is_join_lost:
            self.world.requests += ((number, kind),)

    def take_direct(self) -> None:
        """``EnvClient._receive_direct``."""
        world, direct = self.world, self.world.connections[self.direct]
        answer, *rest = direct.answers
        self.has_whole_answer = False
        world.change_connection(self.direct, answers=tuple(rest))
        if not answer.is_done:
            self._ask_on_join()
            return
        world.require(self.side.direct_answered(answer.number), "an answer is the awaited one's")
        self.awaits_direct = False
        chain = world.blocks[direct.buffers].chain if direct.is_shared else answer.chain
        self._accept(Result(answer.number, chain), STEP)

    def wake_up(self) -> None:
        """``DirectConnection.receive``: the bell was for an answer that it had taken before."""
        self.world.change_connection(self.direct, is_rung=False)

    def see_cut(self) -> None:
        self._lose_direct()
        self._ask_on_join()

    def _ask_on_join(self) -> None:
        self.awaits_direct = False
        self._send_on_join(self.side.fall_back_to_join(), STEP)

    def take_response(self) -> None:
        response, *rest = self.world.responses
        self.world.responses = tuple(rest)
        (number, kind), *others = self.awaited
        self.awaited = tuple(others)
        self.world.require(response.number == number, "the answer is the awaited request's")
        self._accept(response, kind)

    def take_called(self) -> None:
        world, result = self.world, self.world.called
        assert result is not None
        world.called, number, self.calling = None, self.calling, 0
        world.require(result.number == number, "the answer is the call's")
        if result.code == CRASHED:
            self._note_failure(number)
        elif result.code == TIMEOUT:  # it is executed before anything else, or its worker is killed
            self._count_failure()
            self.unchecked += ((number, None),)
        elif result.code:
            world.require(result.code in (RAISED, BUSY), "an honest client's call is not refused")
        else:
            assert result.chain is not None
            self.unchecked += ((number, result.chain),)
            if not self.awaited and not self.awaits_direct:
                self._check_calls(number)

    def _check_calls(self, last: int, *, is_success: bool = True) -> None:
        """Check the results of calls up to number ``last``: what came before is known now.

        Whether a late call was executed is known after the next success.
        """
        while self.unchecked and self.unchecked[0][0] <= last:
            (number, chain), *rest = self.unchecked
            if chain is None and not is_success:
                return
            self.unchecked = tuple(rest)
            if self.broken_at:
                continue
            name = self.world.name_of(number)
            if chain is None:  # it has raised, or returned
                self.chain += (name,) if name in self.world.worker.chain else ()
                continue
            self.chain += (name,)
            self.world.require(name in self.world.executed, "an acknowledged call was executed")
            self.world.require(chain == self.chain, "a call comes after all that was sent before")

    def _accept(self, result: Result, kind: str) -> None:
        world, number = self.world, result.number
        self._check_calls(number, is_success=not result.code)
        name = world.name_of(number)
        world.require(result.code or name not in world.given_up, "no late answer arrives")
        if kind == CLOSE:
            world.require(result.account == self.account, "Close reports the steps that counted")
            self._end()
        elif result.code:
            self._take_failure(result, kind)
        elif kind == RENDER:
            is_right = result.chain in (None, self.chain) or self.broken_at
            world.require(is_right, "a picture shows all that was sent before, and nothing else")
        else:
            self._take_success(result, kind)

    def _take_failure(self, result: Result, kind: str) -> None:
        world = self.world
        world.require(not result.is_final, "an honest client keeps its session")
        if kind == RENDER and result.code in ("TIMEOUT", "INTERNAL"):
            world.require(not result.account, "a picture costs no episode")
        elif result.code in _INTERRUPTING:
            expected = "a failure reports the steps that counted"
            world.require(result.account == self.account, expected)
            self._note_failure(result.number)
            self.account = ()
        else:
            world.require(not result.account, "a refusal ends no episode")
            world.require(self.broken_at or kind == INVALID, "nothing else is refused")

    def _note_failure(self, number: int) -> None:
        if self.broken_at:
            return
        self.broken_at = number
        self._count_failure()

    def _count_failure(self) -> None:
        self.world.num_failed += 1
        is_due = self.world.num_failed <= self.world.num_faults
        self.world.require(is_due, "nothing fails without a fault")

    def _take_success(self, result: Result, kind: str) -> None:
        world, name = self.world, self.world.name_of(result.number)
        world.require(name in world.executed, "what is acknowledged was executed")
        if kind == RESET:
            self.broken_at, self.chain, self.account = 0, (), ((0, 0), (1, 0))
        elif kind == PARTIAL:
            self.account = (self.account[0], (1, 0))
        else:
            self.account = tuple((lane, count + 1) for lane, count in self.account)
        is_before = result.number < self.broken_at
        world.require(is_before or not self.broken_at, "after a failure nothing but a Reset works")
        self.chain += (name,)
        world.require(result.chain == self.chain, "no step is missing, added or of another run")
        if kind in (RESET, PARTIAL):  # DirectConnector.on_lanes_reset
            self.is_worth_a_try, self.num_lost = True, 0

    def see_the_end(self) -> None:
        self.world.called = None
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self.world.is_join_lost = True
        for direct in (self.direct, self.dialed, self.arrived):
            if direct:
                self.world.change_connection(direct, is_cut=True)
        self.direct = self.dialed = self.asking = 0
        self.arrived = None

    # --- DirectConnector -----------------------------------------------------------------------

    def _find_direct(self) -> None:
        """``DirectConnector.connection``, without what it tries after a pause."""
        if self.has_lost_direct:
            self.has_lost_direct = False
            self.num_lost += 1
            self.is_worth_a_try = self.num_lost <= _MAX_LOST
        if not self.direct and self.dialed:
            self.direct, self.dialed = self.dialed, 0
            self.is_worth_a_try = False
        if not self.direct and self.is_worth_a_try:
            self.is_worth_a_try = False
            if not self.asking:
                self.num_asked += 1
                self.asking = self.num_asked
                self.world.asks += (self.asking,)

    def direct_comes(self, client: int, direct: int) -> None:
        """The endpoint opens a direct connection, or refuses it (0)."""
        if client == self.asking:
            self.arrived = direct
        elif direct:  # the client has hung up
            self.world.change_connection(direct, is_cut=True)

    def take_connection(self) -> None:
        direct, self.arrived, self.asking = self.arrived, None, 0
        assert direct is not None
        if self.world.is_shared:
            self.direct = direct
        else:
            self.dialed = direct

    def leave(self) -> None:
        """It has waited for too long."""
        self.world.spend("leaves")
        if self.arrived:
            self.world.change_connection(self.arrived, is_cut=True)
        self.arrived, self.asking = None, 0

    def _lose_direct(self) -> None:
        self.direct, self.has_lost_direct = 0, True


_FAR_AHEAD = 5_000


class LyingClient(ClientModel):
    """A client that does its script honestly, and then asks for what it likes, until it hangs up.

    It waits for no answers, and looks at none.
    """

    is_honest = False

    @property
    def hears(self) -> bool:
        is_at_script = self.script or self.awaited or self.calling or self.awaits_direct
        return bool(is_at_script or self.asking)

    def moves(self) -> Iterator[Move]:
        if self.hears:
            yield from super().moves()
            return
        if self.is_over:
            return
        yield Move("liar hangs up", "client", "hang_up")
        if not self.world.faults.lies or self.world.is_join_lost:
            return
        last = self.side.next_number - 1
        for number in (last, last + 1, last + 2, last + _FAR_AHEAD):
            for kind in (STEP, RESET, INVALID):
                move = f"liar sends on the stream: {number}, {kind}"
                yield Move(move, "client", "lie", (number, kind))
            if self.direct and not self.world.connections[self.direct].is_cut:
                yield Move(f"liar sends directly: {number}", "client", "lie_directly", (number,))
            if not self.world.call:
                yield Move(f"liar calls: {number}", "client", "lie", (number, CALL))

    def lie(self, number: int, kind: str) -> None:
        self._note_lie(number)
        if kind == CALL:
            self.world.call, self.world.call_after = number, number - 1
        else:
            self.world.requests += ((number, kind),)

    def lie_directly(self, number: int) -> None:
        self._note_lie(number)
        self.world.send_step(self.direct, number)

    def _note_lie(self, number: int) -> None:
        self.world.spend("lies")
        if number == self.side.next_number:
            self.side.sent()

    def hang_up(self) -> None:
        self.world.lose_stream(is_fault=False)
        self._end()
