"""The env worker of ``session_model``: ``envs.worker.EnvWorker`` with its ``DirectStepServer``.

``WorkerSide`` and ``SessionProgress`` are production's; what surrounds them is modelled after the
methods that the comments name.
"""

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from rlmesh_ray.transport.exactly_once import ExecutionDecision, SessionProgress, WorkerSide
from tests.unit.transport.explorer import Move, shallow_copy

if TYPE_CHECKING:
    from tests.unit.transport.session_model import World

NUM_LANES = 2
RESET, PARTIAL, STEP, RENDER, CALL = "reset", "partial reset", "step", "render", "call"
"""Requests. A partial reset is of lane 1."""
ATTACH, DETACH = "attach", "detach"
OBSERVE = "observe"
"""Commands that belong to no request, and have a reply."""
PASS_OVER, TRACK, UNTRACK = "skip", "track", "untrack"
"""Commands without a reply."""
RAISED, OUT_OF_ORDER, CRASHED, TIMEOUT = "raised", "out of order", "crashed", "timeout"
"""Failures."""
Chain = tuple[int, ...]
"""What the environment has done since its last Reset: the numbers of resets, steps and calls."""


class Order(NamedTuple):
    """From the endpoint to its worker."""

    kind: str
    number: int = 0
    direct: int = 0


class Reply(NamedTuple):
    """From the worker to its endpoint."""

    kind: str
    failure: str = ""
    chain: Chain = ()
    """Of a call or picture; what resets and steps give lies in the block."""


class Doing(NamedTuple):
    """A request in progress."""

    number: int
    kind: str
    is_direct: bool
    phase: int = 0
    """0: it has noted that it begins; 1: the environment has done it; 2: it has noted that, too."""


REFUSED = Reply("", "the endpoint has answered it")


def counted_bytes(progress: SessionProgress) -> Iterator[bytes]:
    """Yield what ``progress`` counts of episodes, after the last request and before it."""
    for number in (0, 1):
        counts = progress.counts_after(number)
        yield counts.is_tracked.tobytes()
        yield counts.step_counts.tobytes()
        yield counts.cumulative_rewards.tobytes()


class WorkerModel:
    """One process at a time.

    Args:
        world: Where it lives.
    """

    def __init__(self, world: "World") -> None:
        self.world = world
        self.is_alive = False
        self.process = 0
        """Which one it is."""
        self.progress = SessionProgress.local(NUM_LANES)
        self.side = WorkerSide(self.progress)
        self.buffers = self.own_block = 0
        self.direct = 0
        """Whose requests it takes; 0: it has none, or has closed its end."""
        self.orders: tuple[Order, ...] = ()
        self.replies: tuple[Reply, ...] = ()
        self.doing: Doing | None = None
        self.kept = REFUSED
        self.chain: Chain = ()
        self.has_seen_request = False

    def fork(self, world: "World") -> "WorkerModel":
        other = shallow_copy(self)
        other.world = world
        other.side = shallow_copy(self.side)
        return other

    @property
    def key(self) -> Hashable:
        own = self.progress
        return (
            self.is_alive,
            self.process,
            (own.begun, own.done, *counted_bytes(own)),
            self.side.is_direct_open,
            self.buffers,
            self.own_block,
            self.direct,
            self.orders,
            self.replies,
            self.doing,
            self.kept,
            self.chain,
            self.has_seen_request,
        )

    def start(self) -> None:
        """Be a new process, with a block of its own and a new environment."""
        self.is_alive = True
        self.process += 1
        self.progress = SessionProgress.local(NUM_LANES)
        self.side = WorkerSide(self.progress)
        self.buffers = self.own_block = self.world.new_block()
        self.direct = 0
        self.orders, self.replies, self.doing = (), (), None
        self.kept, self.chain, self.has_seen_request = REFUSED, (), False

    def end(self) -> None:
        """Be killed, or die."""
        self.is_alive = self.has_seen_request = False
        self.doing = None
        self.orders = ()
        self._close_direct()

    def writable_progress(self) -> SessionProgress:
        """Return its progress, which no other world shares."""
        mine = SessionProgress.local(NUM_LANES)
        mine.memory[:] = self.progress.memory
        if self.world.endpoint.progress is self.progress:
            self.world.endpoint.progress = mine
        self.progress = self.side.progress = mine
        return mine

    # --- what it does ---------------------------------------------------------------------

    def moves(self) -> Iterator[Move]:
        if not self.is_alive:
            return
        direct = self.world.connections[self.direct] if self.direct else None
        if direct is not None and direct.num_unrung:
            yield Move("worker rings", "worker", "ring")  # it does one thing after the other
        elif self.doing is not None:
            yield Move("worker goes on", "worker", "work")
            if self.doing.phase == 0 and self.world.faults.raises:
                yield Move("the environment raises", "worker", "raise_error")
        elif self.has_seen_request:
            yield Move("worker takes a direct step", "worker", "take_step")
        elif self.orders:  # WorkerLoop.run: the channel comes first
            yield Move(f"worker takes the order: {self.orders[0].kind}", "worker", "take_order")
        elif direct is not None and direct.steps:
            # Between here and the step itself an order may come.
            yield Move("worker sees a direct step", "worker", "see_request")

    def take_order(self) -> None:
        """``WorkerLoop._serve_channel``."""
        order, *rest = self.orders
        self.orders = tuple(rest)
        match order.kind:
            case "track":  # EnvWorker.answer: SetEpisodesCommand
                self.side.is_direct_open = bool(self.direct)
            case "untrack":
                self.side.is_direct_open = False
            case "skip":  # EnvWorker.answer: SkipRequestCommand
                self.writable_progress()
                self.side.skip(order.number)
                self.kept = REFUSED if self.progress.begun == order.number else self.kept
            case "attach":
                self._attach(order.direct)
            case "detach":
                self._detach()
            case "observe":
                self.replies += (Reply(OBSERVE),)
            case _:
                self._answer(order)

    def _detach(self) -> None:
        """``EnvWorker._close_direct``."""
        self._close_direct()
        self._move_to(self.own_block)
        self.replies += (Reply(DETACH),)

    def _attach(self, number: int) -> None:
        """``EnvWorker._open_direct``."""
        self._close_direct()
        self.side.is_direct_open = False
        self._move_to(self.world.connections[number].buffers or self.own_block)
        self.direct = number
        self.replies += (Reply(ATTACH),)

    def _move_to(self, buffers: int) -> None:
        """``EnvWorker._switch_buffers``: the results come along."""
        self.world.write_block(buffers, chain=self.world.blocks[self.buffers].chain)
        self.buffers = buffers

    def _close_direct(self) -> None:
        if self.direct:
            direct = self.world.connections[self.direct]
            if direct.is_shared:  # over TCP the endpoint holds the connection open
                self.world.change_connection(self.direct, is_cut=True)
            self.world.change_connection(self.direct, num_unrung=0)
        self.direct = 0

    def _answer(self, order: Order) -> None:
        """``EnvWorker.answer``."""
        decision = self.side.decide(order.number)
        if decision is ExecutionDecision.EXECUTE:
            self._begin(Doing(order.number, order.kind, is_direct=False))
        elif decision is ExecutionDecision.RESEND_ANSWER:
            self.replies += (self.kept,)
        else:
            self.replies += (Reply(order.kind, OUT_OF_ORDER),)

    def see_request(self) -> None:
        self.has_seen_request = True

    def take_step(self) -> None:
        """``EnvWorker.serve_direct`` and ``._step_directly``, up to the step itself."""
        self.has_seen_request = False
        number = self.world.take_step(self.direct)
        if self.side.executes_direct(number):
            if not self.world.connections[self.direct].is_shared:
                self.world.write_block(self.buffers, action=self.world.name_of(number))
            self._begin(Doing(number, STEP, is_direct=True))
        else:
            self._answer_direct(number, is_done=False)

    def _begin(self, doing: Doing) -> None:
        self.writable_progress()
        self.progress.begin(doing.number, 0)
        self.doing = doing

    def work(self) -> None:
        doing = self.doing
        assert doing is not None
        if doing.phase == 0:
            self._execute(doing)
        elif doing.phase == 1:
            self.writable_progress()
            self.progress.end()
        else:
            self.doing = None
            if doing.is_direct:
                self._answer_direct(doing.number, is_done=not self.kept.failure)
            else:
                self.replies += (self.kept,)
            return
        self.doing = doing._replace(phase=doing.phase + 1)

    def _execute(self, doing: Doing) -> None:
        """``EnvWorker._reset``, ``._step``, and what renders and calls."""
        world, number, kind = self.world, doing.number, doing.kind
        world.note_execution(number)
        name = world.name_of(number)
        if kind == STEP:
            action = world.blocks[self.buffers].action
            is_right = action == name or not world.client.is_honest
            world.require(is_right, "a step applies the action that was sent with it")
        if kind != RENDER:
            self.chain = (() if kind == RESET else self.chain) + (name,)
        self.kept = Reply(kind, "", self.chain if kind in (RENDER, CALL) else ())
        if kind in (RENDER, CALL):
            return
        world.write_block(self.buffers, chain=self.chain)
        progress = self.writable_progress()
        if kind == STEP:
            progress.count_step(*world.no_rewards)
        else:
            progress.count_reset(() if kind == RESET else (1,))

    def raise_error(self) -> None:
        self.world.spend("raises")
        doing = self.doing
        assert doing is not None
        self.world.note_execution(doing.number)
        self.kept = Reply(doing.kind, RAISED)
        if doing.kind in (RESET, PARTIAL, STEP):
            self.side.is_direct_open = False
        self.doing = doing._replace(phase=1)

    def _answer_direct(self, number: int, *, is_done: bool) -> None:
        """``DirectStepServer.answer``."""
        direct = self.world.connections[self.direct]
        if direct.is_cut:  # no answer passes a cut
            self._close_direct()
            return
        chain = self.world.blocks[self.buffers].chain if is_done and not direct.is_shared else ()
        self.world.put_answer(self.direct, number, chain, is_done=is_done)

    def ring(self) -> None:
        direct = self.world.connections[self.direct]
        self.world.change_connection(self.direct, num_unrung=direct.num_unrung - 1, is_rung=True)
