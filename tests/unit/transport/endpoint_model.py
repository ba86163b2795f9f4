"""The endpoint's side of one session in ``session_model``.

``EndpointSide`` and ``EnvSession`` are production's. The shells round them are modelled after
``SessionWorker`` and ``LaneSession``, method by method; what they do between two points where they
wait is one move.
"""

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from rlmesh_ray.protocol.env_session import (
    EnvOutcome,
    EnvSession,
    Failure,
    FailureKind,
    RenderOutcome,
    ResetOutcome,
    SessionState,
    StepOutcome,
)
from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    EpisodeRecord,
    Render,
    Reset,
    ResetDone,
    Step,
)
from rlmesh_ray.transport.exactly_once import SessionProgress
from tests.unit.transport.explorer import Move, shallow_copy
from tests.unit.transport.worker_model import (
    ATTACH,
    CALL,
    CRASHED,
    DETACH,
    NUM_LANES,
    OBSERVE,
    OUT_OF_ORDER,
    PARTIAL,
    PASS_OVER,
    RAISED,
    REFUSED,
    RENDER,
    RESET,
    STEP,
    TIMEOUT,
    TRACK,
    UNTRACK,
    Chain,
    Order,
    Reply,
    counted_bytes,
)

if TYPE_CHECKING:
    from tests.unit.transport.session_model import World

PUSHED = "step without waiting"
INVALID = "invalid step"
"""The endpoint refuses it, and the session goes on."""
CLOSE = "close"
OPEN_DIRECT, DRAIN = "open_direct", "drain"
BUSY = "BUSY"
Account = tuple[tuple[int, int], ...]
"""Lanes whose episodes were ended from outside, and how many steps each had."""

_FAILURES = {
    TIMEOUT: FailureKind.TIMEOUT,
    CRASHED: FailureKind.CRASHED,
    RAISED: FailureKind.RAISED,
    OUT_OF_ORDER: FailureKind.OUT_OF_ORDER,
    REFUSED.failure: FailureKind.BAD_REQUEST,
}
_NO_FLAGS = bytes(NUM_LANES)


class Result(NamedTuple):
    """The answer to a client on the Join stream, or to a call."""

    number: int
    chain: Chain | None = None
    """None: there is none in this answer."""
    code: str = ""
    """Of the error; empty: it has succeeded."""
    account: Account = ()
    is_final: bool = False


class Turn(NamedTuple):
    """What holds ``LaneSession``'s lock."""

    task: str
    """A request's kind, ``OPEN_DIRECT``, ``DRAIN`` or ``OBSERVE``."""
    number: int = 0
    """Of the request, or of who asks for a direct connection."""
    is_asked: bool = False
    """Whether the worker is; else this one waits for a worker that is at rest."""
    direct: int = 0


class EndpointModel:
    """One session.

    Args:
        world: Where it lives.
    """

    def __init__(self, world: "World") -> None:
        self.world = world
        progress = SessionProgress.local(NUM_LANES)
        self.side = world.side_class(progress)
        self.session = EnvSession(NUM_LANES, _same_id, self.side)
        self.turn: Turn | None = None
        self.at_once: tuple[str, int] | None = None
        """What the loop does next, before anything else of the endpoint: a method and a number."""
        # SessionWorker.
        self.process = self.started = 0
        # WorkerProcess.
        self.buffers = self.direct_block = 0
        # LaneSession.
        self.is_released = False
        # SessionWorker.
        self.direct = 0
        """The direct connection that it has opened; 0: none."""
        self.is_watched = False
        self.is_draining = False

    def fork(self, world: "World") -> "EndpointModel":
        other = shallow_copy(self)
        other.world = world
        other.side = shallow_copy(self.side)
        other.session = session = shallow_copy(self.session)
        session.begun_lanes = set(session.begun_lanes)
        session.tracker = tracker = shallow_copy(session.tracker)
        tracker.set_episodes(tracker.episodes)
        tracker.counters = other.side
        return other

    @property
    def key(self) -> Hashable:
        session = self.session
        return (
            *(value for name, value in vars(self.side).items() if name != "progress"),
            self._counted,
            session.state,
            frozenset(session.begun_lanes),
            tuple(one is not None for one in session.tracker.episodes),
            self.turn,
            self.at_once,
            self.process,
            self.started,
            self.buffers,
            self.direct_block,
            self.is_released,
            self.direct,
            self.is_watched,
            self.is_draining,
        )

    @property
    def _counted(self) -> Hashable:
        """What only this side still knows of a worker that was replaced."""
        own = self.progress
        if own is self.world.worker.progress:
            return None
        return own.done, *counted_bytes(own)

    @property
    def has_episodes(self) -> bool:
        return self.session.state is SessionState.READY

    @property
    def progress(self) -> SessionProgress:
        """``SessionWorker.progress``."""
        return self.side.progress

    @progress.setter
    def progress(self, progress: SessionProgress) -> None:
        self.side.progress = progress

    # --- what can happen ------------------------------------------------------------------

    def moves(self) -> Iterator[Move]:
        world, worker = self.world, self.world.worker
        if self.at_once is not None:
            yield Move(f"endpoint: {self.at_once[0]}", "endpoint", "go_on_at_once")
            return
        if self.is_released:
            return
        if world.is_join_lost:
            yield Move("endpoint sees the stream's end", "endpoint", "release")
        is_awaited = not self.side.is_at_rest or (self.turn is not None and self.turn.is_asked)
        if worker.replies:
            yield Move(f"endpoint takes a reply: {worker.replies[0].kind}", "endpoint", "take")
        elif not worker.is_alive and is_awaited:
            yield Move("endpoint sees the worker's end", "endpoint", "take")
        yield from self._turn_moves()
        if self.is_watched and not worker.is_alive:
            yield Move("the watch sees the worker's end", "endpoint", "cut")
        yield from self._deadline_moves()

    def _turn_moves(self) -> Iterator[Move]:
        world = self.world
        if self.turn is not None:
            if not self.turn.is_asked and self.side.is_at_rest:
                yield Move("endpoint goes on with the request", "endpoint", "go_on")
            return
        if world.requests:
            yield Move(f"endpoint takes a request: {world.requests[0]}", "endpoint", "take_request")
        if world.call and self.side.has_reached(world.call_after):
            yield Move("endpoint begins the call", "endpoint", "begin_call")
        if world.asks:
            yield Move("endpoint begins to open a direct connection", "endpoint", "open_direct")
        yield from self._aside_moves()

    def _aside_moves(self) -> Iterator[Move]:
        if self.is_draining:
            yield Move("endpoint closes the direct connection", "endpoint", "take_back")
        elif self.world.faults.drains:
            yield Move("endpoint stops", "endpoint", "drain")
        if self.world.faults.observers:
            yield Move("an observer comes", "endpoint", "observe")

    def _deadline_moves(self) -> Iterator[Move]:
        world, turn, progress = self.world, self.turn, self.progress
        if not world.faults.deadlines:
            return
        if world.call and (turn is None or turn.task != CALL):
            yield Move("a call waits too long for its turn", "endpoint", "refuse_call")
        if turn is not None and turn.is_asked:
            is_aside = turn.task in (OPEN_DIRECT, DRAIN, OBSERVE)
            if turn.task != OBSERVE or progress.is_busy:  # an observer has no deadline of its own
                name = "miss_aside" if is_aside else "miss_deadline"
                yield Move(f"the {turn.task} is late", "endpoint", name)
        elif turn is not None and not self.side.is_at_rest:
            yield Move(f"the {turn.task} waits too long", "endpoint", "wait_too_long")
        # SessionWorker._watch_direct.
        is_busy = progress.is_busy and world.worker.is_alive
        if self.is_watched and is_busy and self.side.is_idle:
            yield Move("a direct step is late", "endpoint", "miss_direct")

    def go_on_at_once(self) -> None:
        assert self.at_once is not None
        (method, number), self.at_once = self.at_once, None
        getattr(self, method)(number)

    # --- LaneSession ----------------------------------------------------------------------

    def take_request(self) -> None:
        """``LaneSession._answer``."""
        (number, kind), *rest = self.world.requests
        self.world.requests = tuple(rest)
        self.turn = Turn(kind, number)
        response = self.session.receive(_message(kind, number), 0)
        if response is None:
            self._run()
            return
        if isinstance(response, EnvFailed):
            self._skip(number)
        self._respond(response)

    def _run(self) -> None:
        """``LaneSession._run``, as far as the request waits for the worker."""
        assert self.turn is not None
        if self.side.is_overdue(self.turn.number):
            self._complete(TIMEOUT)
            return
        if self.side.is_at_rest:
            self.go_on()

    def go_on(self) -> None:
        """The worker is at rest: ``LaneSession._reset``, ``._step``, ``._render``, ``.call``."""
        world, worker, turn = self.world, self.world.worker, self.turn
        assert turn is not None
        number, kind = turn.number, turn.task
        is_dead = not worker.is_alive or self.process != worker.process
        if kind in (RESET, PARTIAL):
            is_another = is_dead
            if is_dead:  # SessionWorker.make_ready
                self.cut()
                self._take_worker()
            if is_another and self.has_episodes and kind == PARTIAL:
                self._complete(CRASHED)
                return
        elif kind == RENDER and is_dead:
            self._complete(Reply(RENDER))
            return
        elif kind == CALL:
            if not self.process:
                self._take_worker()
        elif kind in (STEP, PUSHED):
            kind = STEP
            world.write_block(self.buffers, action=world.name_of(number))
        self._request(Order(kind, number))

    def _take_worker(self) -> None:
        """``WorkerPool.take``."""
        self.world.worker.start()
        self.process = self.world.worker.process
        self.buffers = self.direct_block = self.world.worker.own_block

    def _complete(self, outcome: Reply | str) -> None:
        """The rest of ``LaneSession._run`` and of ``._answer``."""
        assert self.turn is not None
        number, kind = self.turn.number, self.turn.task
        failure = outcome if isinstance(outcome, str) else outcome.failure
        if self.side.last_forwarded != number:
            self._skip(number, has_failed=bool(failure))
        if not self.side.is_at_rest:
            self.cut()
        chain: Chain | None = None
        result: EnvOutcome
        if failure:
            result = Failure(_FAILURES[failure], "")
        else:
            assert isinstance(outcome, Reply)
            result, chain = self._success(kind, outcome)
        response = self.session.complete(result, 0)
        if not self.has_episodes:  # LaneSession._answer
            self._notify(UNTRACK)
        elif isinstance(response, ResetDone):
            self._notify(TRACK)
        self._respond(response, chain)

    def _success(self, kind: str, reply: Reply) -> tuple[EnvOutcome, Chain | None]:
        """Return what the worker's success is to the session; a wrong kind is none."""
        wanted = {PUSHED: STEP, PARTIAL: RESET}.get(kind, kind)
        if {PARTIAL: RESET}.get(reply.kind, reply.kind) != wanted:
            return Failure(FailureKind.CRASHED, "the worker answered with another kind"), None
        if kind == RENDER:
            return RenderOutcome(None), reply.chain or None
        chain = self.world.blocks[self.buffers].chain
        if wanted == RESET:
            return ResetOutcome(b"", {}), chain
        return StepOutcome(b"", [0.0] * NUM_LANES, _NO_FLAGS, _NO_FLAGS, {}), chain

    def _respond(self, response: EnvResponse, chain: Chain | None = None) -> None:
        world, turn = self.world, self.turn
        assert turn is not None
        self.turn = None
        result = Result(turn.number, chain)
        match response:
            case EnvFailed():
                result = Result(
                    turn.number,
                    code=response.code.name,
                    account=_account(response.interrupted_episodes),
                    is_final=not response.is_recoverable,
                )
            case Closed():
                result = Result(turn.number, account=_account(response.final_episodes))
                self.release()
        if not world.is_join_lost and world.client.hears:
            world.responses += (result,)

    def release(self) -> None:
        """``LaneSession.end``."""
        world, turn = self.world, self.turn
        self.is_released = True
        self.session.interrupt(0)
        self.cut()
        if turn is not None and turn.task == OPEN_DIRECT:  # LaneSession.open_direct, afterwards
            world.change_connection(turn.direct, is_cut=True)
        self.turn = None
        world.call, world.asks = 0, ()
        if self.process:  # WorkerPool._retire
            world.worker.end()
            world.worker.replies = ()

    # --- SessionWorker -----------------------------------------------------------------------

    def _request(self, order: Order) -> None:
        """``SessionWorker.request``, until its reply arrives."""
        worker, number = self.world.worker, order.number
        assert self.turn is not None
        if self.started != self.process:
            if not self.side.may_start(number):
                self._answered(self.turn, Reply(order.kind, OUT_OF_ORDER))
                return
            self.side.start(number, worker.writable_progress())
            self.started = self.process
        else:
            self._settle_numbers()
        self.side.forward(number)
        self._ask(order)

    def _ask(self, order: Order) -> None:
        """The first lines of ``SessionWorker.request`` and ``.call_after_step``."""
        assert self.turn is not None
        self.side.command_sent()
        self._submit(order)
        self.turn = self.turn._replace(is_asked=True)

    def _submit(self, order: Order) -> None:
        worker = self.world.worker
        if worker.is_alive and worker.process == self.process:
            worker.orders += (order,)

    def _skip(self, number: int, *, has_failed: bool = False) -> None:
        """``SessionWorker.skip``."""
        self.side.skip(number, has_failed=has_failed)
        self._settle_numbers()

    def _settle_numbers(self) -> None:
        """``SessionWorker.settle_numbers``."""
        if self.started == self.process > 0:
            for number in self.side.take_skips():
                self._submit(Order(PASS_OVER, number))

    def take(self) -> None:
        """``SessionWorker._reply``, ``.call_after_step`` or ``._finish``, when there is a reply."""
        worker, turn = self.world.worker, self.turn
        reply = Reply("", CRASHED)
        if worker.replies:
            reply, *rest = worker.replies
            worker.replies = tuple(rest)
        if reply.kind == ATTACH:  # WorkerProcess.receive
            self.buffers = self.direct_block
        elif reply.kind == DETACH:
            self.buffers = worker.own_block
        is_late = not self.side.is_at_rest
        self.side.reply_received()
        if is_late:
            return  # the client does not get this one
        self.world.require(turn is not None and turn.is_asked, "the worker answers what was asked")
        assert turn is not None
        if turn.task == OPEN_DIRECT:
            self._direct_opened(turn, reply)
        elif turn.task == DRAIN:  # SessionWorker.close_direct
            self.turn = None
            self.cut()
        elif turn.task == OBSERVE:
            self.turn = None
        else:
            self._answered(turn, reply)

    def _answered(self, turn: Turn, reply: Reply) -> None:
        """The last lines of ``SessionWorker.request``."""
        if reply.failure:
            self.side.failed(turn.number)
        if turn.task == CALL:
            self._called(reply)
        else:
            self._complete(reply)

    def miss_deadline(self) -> None:
        """``SessionWorker._late``, of a request."""
        self.world.spend("deadlines")
        self.side.missed_deadline()
        assert self.turn is not None
        self._answered(self.turn, Reply("", TIMEOUT))

    def wait_too_long(self) -> None:
        """``SessionWorker.make_idle`` and ``.make_ready``, when the time is over."""
        self.world.spend("deadlines")
        assert self.turn is not None
        if self.turn.task != CALL:
            self._complete(TIMEOUT)
            return
        self._skip(self.turn.number)
        self._end_call(BUSY)

    # --- calls ----------------------------------------------------------------------------

    def begin_call(self) -> None:
        """``LaneSession._call_in_turn`` and ``._call``."""
        self.turn = Turn(CALL, self.world.call)
        if self.side.is_at_rest:
            self.go_on()

    def refuse_call(self) -> None:
        """``LaneSession._call_in_turn``, when its turn has not come in time."""
        self.world.spend("deadlines")
        number, self.world.call = self.world.call, 0
        self._skip(number)
        self._answer_call(Result(number, code=BUSY))

    def _called(self, reply: Reply) -> None:
        """The last lines of ``LaneSession._call``."""
        failure = reply.failure or (reply.kind != CALL and CRASHED)
        if not failure:
            self._end_call("", reply.chain)
            return
        if failure in (TIMEOUT, CRASHED):
            self.cut()
        self._end_call(failure)

    def _end_call(self, failure: str, chain: Chain | None = None) -> None:
        assert self.turn is not None
        number, self.turn = self.turn.number, None
        self.world.call = 0
        self._answer_call(Result(number, chain, code=failure))

    def _answer_call(self, result: Result) -> None:
        if self.world.client.hears:
            self.world.called = result

    # --- direct connections ------------------------------------------------------------------

    def open_direct(self) -> None:
        """``LaneSession.open_direct``, ``SessionWorker.open_direct``, until the worker is asked."""
        world = self.world
        client, *rest = world.asks
        world.asks = tuple(rest)
        if not self.has_episodes or not self.side.is_at_rest:
            world.client.direct_comes(client, 0)
            return
        self.cut()
        if not world.worker.is_alive or world.worker.process != self.process:
            world.client.direct_comes(client, 0)
            return
        direct = world.new_direct()
        # WorkerProcess.open_direct_shared_memory, .open_direct_tcp
        self.direct_block = world.connections[direct].buffers or world.worker.own_block
        self.turn = Turn(OPEN_DIRECT, client, direct=direct)
        self._ask(Order(ATTACH, direct=direct))

    def _direct_opened(self, turn: Turn, reply: Reply) -> None:
        """The rest of both."""
        self.turn = None
        if reply.kind != ATTACH:
            self.world.change_connection(turn.direct, is_cut=True)
            self.world.client.direct_comes(turn.number, 0)
            return
        self.direct, self.is_watched = turn.direct, True
        self._notify(TRACK)
        self.world.client.direct_comes(turn.number, turn.direct)

    def _notify(self, kind: str) -> None:
        """``SessionWorker.set_episodes``."""
        if self.direct:
            self._submit(Order(kind))

    def drain(self) -> None:
        self.world.spend("drains")
        self.is_draining = True

    def take_back(self) -> None:
        """``SessionWorker.close_direct``."""
        self.is_draining = False
        if self.direct and self.side.is_at_rest:
            self.turn = Turn(DRAIN)
            self._ask(Order(DETACH))

    def observe(self) -> None:
        """``LaneSession.observe``."""
        self.world.spend("observers")
        if self.side.is_at_rest and self.has_episodes:
            self.turn = Turn(OBSERVE)
            self._ask(Order(OBSERVE))

    def miss_aside(self) -> None:
        """``SessionWorker.call_after_step``, when time is over."""
        self.world.spend("deadlines")
        self.side.missed_deadline()  # SessionWorker._late
        self.at_once = "cut_aside", self.progress.begun

    def cut_aside(self, number: int) -> None:
        self.cut()
        self.at_once = "judge_aside", number

    def judge_aside(self, number: int) -> None:
        turn, self.turn = self.turn, None
        assert turn is not None
        self._cut_late(number)
        if turn.task == OPEN_DIRECT:
            self.world.change_connection(turn.direct, is_cut=True)
            self.world.client.direct_comes(turn.number, 0)

    def _cut_late(self, number: int) -> None:
        if self.side.disconnect_overdue(number):
            self.world.given_up += (self.world.name_of(number),)

    def cut(self) -> None:
        """``SessionWorker.disconnect``: what lies unread on either side can still be read."""
        self.is_watched = False
        if self.direct:
            self.world.change_connection(self.direct, is_cut=True)
            self.direct = 0

    def miss_direct(self) -> None:
        """``SessionWorker._watch_direct``; its worker goes on between what it does."""
        self.world.spend("deadlines")
        self.at_once = "cut_overdue", self.progress.begun

    def cut_overdue(self, number: int) -> None:
        self.cut()
        self.at_once = "judge_overdue", number

    def judge_overdue(self, number: int) -> None:
        self._cut_late(number)
        self.side.command_sent()  # SessionWorker._watch_direct
        self._submit(Order(DETACH))


def _same_id() -> str:
    return "episode"


def _account(records: tuple[EpisodeRecord, ...]) -> Account:
    return tuple((record.env_index, record.step_count) for record in records)


def _message(kind: str, number: int) -> EnvRequest:
    name = str(number)
    match kind:
        case "reset":
            return Reset(name)
        case "partial reset":
            return Reset(name, env_indices=(1,))
        case "render":
            return Render(name)
        case "close":
            return Close(name)
        case "invalid step":
            return Step(name, b"", env_indices=(0,))
    return Step(name, b"")
