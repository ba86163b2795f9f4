"""Explores what client, endpoint and worker of one session can do to each other, in any order.

The three sides are those of ``rlmesh_ray.transport.core``, as production uses them. What lies
between them is modelled here: the Join stream, the channel between endpoint and worker, a direct
road with bells, and faults. Each call of ``World.moves`` lists what can happen next; ``explore``
tries all of it, everywhere, and ``wander`` follows random paths that are longer.

The environment notes each execution, and the chain of executions since its last Reset travels
with each result. The client compares it with the results that it has got itself.
"""

import copy
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlmesh_ray.transport.core import ClientSide, Decision, EndpointSide, WorkerSide

RESET, STEP, PARTIAL = "reset", "step", "partial reset"
INVALID = "invalid step"
"""The endpoint refuses it, and the session goes on."""
Chain = tuple[int, ...]


class ViolatedError(AssertionError):
    """A promise that was broken, with the moves that led there."""


class Noted:
    """``Numbers`` in this process."""

    def __init__(self, number: int = 0) -> None:
        self.begun = self.done = number

    def begin(self, number: int, timeout_ms: int) -> None:
        self.begun = number

    def end(self) -> None:
        self.done = self.begun


@dataclass(frozen=True)
class Faults:
    """How many of each kind may still happen."""

    cuts: int = 0
    kills: int = 0
    deadlines: int = 0
    lost_streams: int = 0


@dataclass(frozen=True)
class Doing:
    """What a worker is at."""

    number: int
    kind: str
    is_direct: bool
    phase: int = 0
    """0: it has noted that it begins; 1: the environment has done it; 2: it has noted that, too."""


@dataclass(frozen=True)
class Order:
    """From the endpoint to its worker."""

    kind: str
    """A request's, ``"open"``, ``"close"`` or ``"pass over"``."""
    number: int = 0


@dataclass(frozen=True)
class Result:
    """What became of a request: the chain of numbers since the last Reset, or a failure."""

    number: int
    chain: Chain = ()
    failure: str = ""


HANDED_OVER = "handed over"


class World:
    """One session.

    Args:
        script: What the client does; after a failure it resets before it goes on.
        faults: What may go wrong.
    """

    def __init__(self, script: Sequence[str], faults: Faults) -> None:
        self.script = tuple(script)
        self.faults = faults
        self.client = ClientSide()
        self.own_chain: Chain = ()
        self.awaited = 0
        self.awaited_kind = ""
        self.must_reset = False
        self.client_road = False
        self.is_over = False
        # The Join stream.
        self.requests: tuple[tuple[int, str], ...] = ()
        self.responses: tuple[Result, ...] = ()
        self.is_join_lost = False
        # The endpoint.
        self.endpoint = EndpointSide()
        self.is_ready = False
        self.serving: tuple[int, str] | None = None
        self.is_asked = False
        self.is_closing = False
        self.given_up = 0
        # The worker, and the channel to it.
        self.is_alive = False
        self.numbers = Noted()
        self.worker = WorkerSide(self.numbers)
        self.orders: tuple[Order, ...] = ()
        self.replies: tuple[Result, ...] = ()
        self.doing: Doing | None = None
        self.kept: Result | None = None
        self.chain: Chain = ()
        self.executed: Chain = ()
        # The direct road.
        self.worker_road = False
        self.is_cut = True
        self.steps: tuple[int, ...] = ()
        self.answers: tuple[Result, ...] = ()
        self.bell = False
        self.unrung = 0

    def fork(self) -> "World":
        """Return a copy that goes its own way."""
        other = copy.copy(self)
        other.client = copy.copy(self.client)
        other.endpoint = copy.copy(self.endpoint)
        other.numbers = copy.copy(self.numbers)
        other.worker = copy.copy(self.worker)
        other.worker._numbers = other.numbers
        return other

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for worlds that have the same future."""
        parts: list[object] = []
        for name, value in vars(self).items():
            if name in ("client", "endpoint"):
                parts.extend(vars(value).values())
            elif name == "worker":
                parts.append(self.worker._is_direct_open)
            elif name == "numbers":
                parts += [self.numbers.begun, self.numbers.done]
            else:
                parts.append(value)
        return tuple(parts)

    def require(self, condition: object, promise: str) -> None:
        if not condition:
            raise ViolatedError(promise)

    # --- what can happen ------------------------------------------------------------------

    def moves(self) -> Iterator[tuple[str, str]]:
        """Yield what can happen now, in words, and the name of the method that does it."""
        yield from self._client_moves()
        yield from self._endpoint_moves()
        yield from self._worker_moves()
        yield from self._fault_moves()

    def _client_moves(self) -> Iterator[tuple[str, str]]:
        if self.is_over:
            return
        if self.is_join_lost:
            yield "client sees the end of the stream", "see_the_end"
        if not self.awaited and (self.script or self.must_reset):
            yield "client sends", "send"
        elif not self.awaited:
            yield "client is done", "finish"
        if self.client.on_direct:
            yield from self._direct_moves()
        elif self.awaited and self.responses:
            yield "client takes a response", "take_response"

    def _direct_moves(self) -> Iterator[tuple[str, str]]:
        if self.answers:
            # It may look before the bell is rung, and after.
            yield "client takes a direct answer", "take_direct"
        elif self.is_cut:
            yield "client sees the end of the road", "see_cut"
        elif self.bell:
            yield "client wakes up", "wake_up"

    def _endpoint_moves(self) -> Iterator[tuple[str, str]]:
        if self.is_join_lost:
            yield from () if self.is_closing else [("endpoint sees the stream's end", "release")]
            return
        if self.replies:
            yield "endpoint takes a reply", "take_reply"
        elif not self.is_alive and (self.is_asked or not self.endpoint.is_at_rest):
            yield "endpoint sees the worker's end", "see_death"
        if self.serving is None and self.requests:
            yield "endpoint takes a request", "take_request"
        elif self.serving is not None and not self.is_asked and self.endpoint.is_at_rest:
            yield "endpoint goes on", "go_on"

    def _worker_moves(self) -> Iterator[tuple[str, str]]:
        if not self.is_alive:
            return
        if self.unrung:
            yield "worker rings", "ring"
            return  # it does one thing after the other
        if self.doing is not None:
            yield "worker goes on", "work"
            return
        if self.orders:
            yield "worker takes an order", "take_order"
        if self.worker_road and self.steps:
            yield "worker takes a direct step", "take_step"

    def _fault_moves(self) -> Iterator[tuple[str, str]]:
        faults = self.faults
        if faults.cuts and not self.is_cut:
            yield "the road is cut", "cut"
        if faults.kills and self.is_alive:
            yield "the worker is killed", "kill"
        if faults.lost_streams and not self.is_join_lost:
            yield "the stream is lost", "lose_stream"
        if faults.deadlines and not self.is_join_lost:
            if self.is_asked and self.serving is not None:
                yield "a forwarded request is late", "miss_deadline"
            elif self.serving is not None and not self.endpoint.is_at_rest:
                yield "a request waits too long", "wait_too_long"
            elif not self.is_cut and self.numbers.begun > self.numbers.done:
                yield "a direct step is late", "miss_direct"

    def _spend(self, kind: str) -> None:
        left = getattr(self.faults, kind) - 1
        self.faults = Faults(**{**vars(self.faults), kind: left})

    # --- the client -----------------------------------------------------------------------

    def send(self) -> None:
        kind = RESET if self.must_reset else self.script[0]
        number = self.client.next_number
        self.awaited, self.awaited_kind = number, kind
        if kind == STEP and self.client_road and not self.is_join_lost:
            self.client.sent_direct()
            if not self.is_cut:
                self.steps += (number,)
        else:
            self.client.sent()
            self.requests += ((number, kind),)

    def take_direct(self) -> None:
        answer, *rest = self.answers
        self.answers = tuple(rest)
        if answer.failure:
            self.ask_on_join()
            return
        self.require(self.client.direct_answered(answer.number), "an answer is the awaited one's")
        self.accept(answer)

    def wake_up(self) -> None:
        self.bell = False  # for an answer that it had taken before

    def see_cut(self) -> None:
        self.client_road = False
        self.ask_on_join()

    def ask_on_join(self) -> None:
        number = self.client.ask_on_join()
        self.require(number == self.awaited, "the awaited request is asked for again")
        self.requests += ((number, self.awaited_kind),)

    def take_response(self) -> None:
        response, *rest = self.responses
        self.responses = tuple(rest)
        self.accept(response)

    def accept(self, result: Result) -> None:
        self.require(result.number == self.awaited, "the answer is the awaited request's")
        kind, self.awaited = self.awaited_kind, 0
        self.require(result.failure or result.number != self.given_up, "no late answer arrives")
        if result.failure == INVALID:
            self.script = self.script[1:]
            return
        if result.failure:
            self.must_reset, self.own_chain = True, ()
            return
        self.require(result.number in self.executed, "what is acknowledged was executed")
        begins = kind == RESET
        self.own_chain = ((*self.own_chain, result.number), (result.number,))[begins]
        self.require(result.chain == self.own_chain, "no step is missing, added or of another run")
        if begins:
            self.client_road = self.client_road or not self.is_cut
        if self.must_reset:
            self.must_reset = False
        else:
            self.script = self.script[1:]

    def see_the_end(self) -> None:
        self.is_over, self.client_road = True, False

    def finish(self) -> None:
        self.is_over = True

    # --- the endpoint ---------------------------------------------------------------------

    def take_request(self) -> None:
        self.serving, *rest = self.requests
        self.requests = tuple(rest)
        self.go_on()

    @property
    def served(self) -> tuple[int, str]:
        """The request that the endpoint is at."""
        self.require(self.serving, "the worker answers what it was asked")
        assert self.serving is not None
        return self.serving

    def go_on(self) -> None:
        number, kind = self.served
        if kind == INVALID or (kind != RESET and not self.is_ready):
            self.order(Order("pass over", number))
            self.respond(INVALID if self.is_ready else "not ready")
            return
        if self.endpoint.is_overdue(number):
            self.respond("timeout")
        elif self.endpoint.is_at_rest:
            self.forward(number, kind)

    def forward(self, number: int, kind: str) -> None:
        if not self.is_alive:
            if kind != RESET:
                self.respond("crashed")
                return
            self.numbers = Noted(number - 1)
            self.worker = WorkerSide(self.numbers)
            self.is_alive = True
            self.orders, self.replies = (), ()
            self.doing = self.kept = None
            self.chain = ()
            self.cut_road()
        self.order(Order(kind, number))
        self.is_asked = True

    def order(self, order: Order) -> None:
        if self.is_alive:
            self.orders += (order,)

    def respond(self, failure: str = "", chain: Chain = ()) -> None:
        number, kind = self.served
        self.serving = None
        if failure:
            self.is_ready = self.is_ready and failure == INVALID
        elif kind == RESET:
            self.is_ready = True
            self.open_road()
        self.responses += (Result(number, chain, failure),)

    def open_road(self) -> None:
        if self.is_cut and self.is_alive:
            self.is_cut, self.bell, self.unrung = False, False, 0
            self.steps, self.answers = (), ()
            self.worker_road = False
            self.order(Order("open"))

    def cut_road(self) -> None:
        """End the road at once; what lies unread on either side can still be read."""
        self.is_cut = True

    def take_reply(self) -> None:
        reply, *rest = self.replies
        self.replies = tuple(rest)
        if not self.endpoint.is_at_rest:
            self.endpoint.confirmed()  # what was done in vain reaches nobody
            return
        self.is_asked = False
        self.respond(reply.failure, reply.chain)

    def see_death(self) -> None:
        self.endpoint.confirmed()
        if self.is_asked:
            self.is_asked = False
            self.respond("crashed")

    def miss_deadline(self) -> None:
        self._spend("deadlines")
        self.endpoint.missed_deadline()
        self.is_asked = False
        self.cut_road()
        self.respond("timeout")

    def miss_direct(self) -> None:
        self._spend("deadlines")
        number = self.numbers.begun
        self.cut_road()
        if self.endpoint.cut_late(self.numbers, number):
            self.given_up = number
        self.order(Order("close"))

    def wait_too_long(self) -> None:
        self._spend("deadlines")
        self.order(Order("pass over", self.served[0]))
        self.respond("timeout")

    def release(self) -> None:
        self.is_closing = True
        self.cut_road()
        if self.doing is not None:
            self.end_worker()

    # --- the worker -----------------------------------------------------------------------

    def take_order(self) -> None:
        order, *rest = self.orders
        self.orders = tuple(rest)
        if order.kind == "pass over":
            self.worker.pass_over(order.number)
        elif order.kind == "open":
            self.worker_road = not self.is_cut
            self.worker.open_direct()
        elif order.kind == "close":
            self.worker_road = False
            self.worker.shut_direct()
            self.replies += (Result(0),)
        else:
            self.decide(order)

    def decide(self, order: Order) -> None:
        decision = self.worker.decide(order.number)
        if decision is Decision.EXECUTE:
            self.begin(Doing(order.number, order.kind, is_direct=False))
        elif decision is Decision.ANSWER_AGAIN:
            assert self.kept is not None, "the last request was answered by the worker"
            self.replies += (self.kept,)
        else:
            raise ViolatedError(f"request {order.number} comes out of order")

    def take_step(self) -> None:
        number, *rest = self.steps
        self.steps = tuple(rest)
        if self.worker.executes_direct(number):
            self.begin(Doing(number, STEP, is_direct=True))
        else:
            self.answer_direct(Result(number, (), HANDED_OVER))

    def begin(self, doing: Doing) -> None:
        self.require(doing.number not in self.executed, "no request is executed twice")
        self.worker.begin(doing.number)
        self.doing = doing

    def work(self) -> None:
        doing = self.doing
        assert doing is not None
        if doing.phase == 0:
            self.execute(doing)
        elif doing.phase == 1:
            self.worker.end()
        else:
            assert self.kept is not None
            self.doing = None
            if doing.is_direct:
                self.answer_direct(self.kept)
            else:
                self.replies += (self.kept,)
            return
        self.doing = Doing(doing.number, doing.kind, doing.is_direct, doing.phase + 1)

    def execute(self, doing: Doing) -> None:
        self.require(doing.number not in self.executed, "no request is executed twice")
        self.executed += (doing.number,)
        self.chain = (() if doing.kind == RESET else self.chain) + (doing.number,)
        self.kept = Result(doing.number, self.chain)

    def answer_direct(self, result: Result) -> None:
        if self.is_cut:
            self.worker_road = False  # no answer passes a cut
            return
        self.answers += (result,)
        self.unrung += 1

    def ring(self) -> None:
        self.unrung -= 1
        self.bell = True

    # --- faults ---------------------------------------------------------------------------

    def cut(self) -> None:
        self._spend("cuts")
        self.is_cut = True

    def kill(self) -> None:
        self._spend("kills")
        self.end_worker()

    def end_worker(self) -> None:
        self.is_alive = self.worker_road = False
        self.doing = None
        self.orders, self.unrung = (), 0
        self.is_cut = True

    def lose_stream(self) -> None:
        self._spend("lost_streams")
        self.is_join_lost = True
        self.requests = self.responses = ()


@dataclass
class Explored:
    """What an exploration has seen."""

    num_states: int = 0
    num_moves: int = 0
    longest_path: int = 0


def explore(world: World, most_states: int = 1_000_000) -> Explored:
    """Try every order of all moves.

    Raises:
        ViolatedError: A promise is broken; the message has the shortest way there.
    """
    seen = {world.key}
    waiting: deque[tuple[World, int, object]] = deque([(world, 0, None)])
    explored = Explored()
    while waiting:
        here, depth, way = waiting.popleft()
        explored.num_states += 1
        explored.longest_path = max(explored.longest_path, depth)
        assert explored.num_states < most_states, "the bound is too small for this world"
        is_stuck = True
        for name, make in here.moves():
            explored.num_moves += 1
            is_stuck = False
            other = here.fork()
            path = (name, way)
            try:
                getattr(other, make)()
            except AssertionError as error:
                raise ViolatedError(f"{error}:\n{_steps(path)}") from None
            key = other.key
            if key not in seen:
                seen.add(key)
                waiting.append((other, depth + 1, path))
        if is_stuck and not here.is_over:
            raise ViolatedError(f"nobody can do anything, and the client waits:\n{_steps(way)}")
    return explored


def wander(world: World, draw: random.Random, most_moves: int = 2_000) -> int:
    """Follow one random path to its end; return how many moves it had.

    Raises:
        ViolatedError: A promise is broken.
    """
    path: object = None
    for count in range(most_moves):
        moves = list(world.moves())
        if not moves:
            assert world.is_over, f"nobody can do anything, and the client waits:\n{_steps(path)}"
            return count
        name, make = draw.choice(moves)
        path = (name, path)
        try:
            getattr(world, make)()
        except AssertionError as error:
            raise ViolatedError(f"{error}:\n{_steps(path)}") from None
    raise ViolatedError("the session does not come to an end")


def _steps(path: object) -> str:
    names = []
    while isinstance(path, tuple):
        names.append(str(path[0]))
        path = path[1]
    return "\n".join(reversed(names))
