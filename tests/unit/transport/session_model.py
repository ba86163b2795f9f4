"""Client, endpoint and worker of one session after the other, and what can happen between them.

The three sides are those of ``rlmesh_ray.transport.exactly_once``, as production uses them, and so
are the session's order (``EnvSession``) and counts (``SessionProgress``). What
surrounds them, and what lies between them, is modelled in the four modules ``*_model``: the Join
stream and the calls beside it, the channel between endpoint and worker, direct connections with
eventfds and buffers, and faults.

The environment notes each execution, and the chain of what it has done since its last Reset
travels with each result. The client compares it with the results that it has got itself.

Where the explorer has found a fault, the model has the rule, and ``broken_models`` the fault, which
production may still have.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from rlmesh_ray.transport.exactly_once import EndpointSide
from tests.unit.transport.client_model import ClientModel, LyingClient
from tests.unit.transport.endpoint_model import EndpointModel, Result
from tests.unit.transport.explorer import Move, shallow_copy
from tests.unit.transport.worker_model import NUM_LANES, Chain, WorkerModel

SHARED_MEMORY, TCP = "shared memory", "tcp"


class Faults(NamedTuple):
    """How many of each kind may still happen."""

    cuts: int = 0
    """Of a direct connection. Over TCP, what is on its way may be lost."""
    kills: int = 0
    """Of the worker."""
    deadlines: int = 0
    """Deadlines that pass, of any wait."""
    lost_streams: int = 0
    raises: int = 0
    """Errors of the environment."""
    leaves: int = 0
    """Of the client, while it is at getting a direct connection."""
    drains: int = 0
    """Of the endpoint."""
    observers: int = 0
    """Who have a lane drawn between two steps."""
    lies: int = 0
    """Requests of the first session's client that break the rules."""

    def __str__(self) -> str:
        given = [f"{name}={count}" for name, count in self._asdict().items() if count]
        return ", ".join(given) or "no faults"


NO_FAULTS = Faults()


class StepBuffers(NamedTuple):
    """Shared memory for the arrays of a step."""

    action: int = 0
    chain: Chain = ()


class Answer(NamedTuple):
    """From the worker to the client, on a direct connection."""

    number: int
    is_done: bool
    """Else it is handed over."""
    chain: Chain
    """Over TCP."""


class Connection(NamedTuple):
    """A direct connection."""

    buffers: int = 0
    """Over shared memory."""
    is_cut: bool = False
    """On either side: nothing is sent any more, and what is there can still be read."""
    steps: tuple[int, ...] = ()
    answers: tuple[Answer, ...] = ()
    is_rung: bool = False
    num_unrung: int = 0

    @property
    def is_shared(self) -> bool:
        return self.buffers > 0


class World:
    """One session after the other, each with workers of its own.

    Args:
        scripts: What the clients of the sessions do.
        faults: What may go wrong.
        medium: What direct connections are of.
        is_stubborn: Whether clients go on with their scripts after failures. Else they reset first.
    """

    client_class: ClassVar[type[ClientModel]] = ClientModel
    liar_class: ClassVar[type[ClientModel]] = LyingClient
    endpoint_class: ClassVar[type[EndpointModel]] = EndpointModel
    side_class: ClassVar[type[EndpointSide]] = EndpointSide
    """What the endpoint decides by."""
    worker_class: ClassVar[type[WorkerModel]] = WorkerModel
    no_rewards: ClassVar[tuple[Any, Any, Any]] = (
        np.zeros(NUM_LANES),
        np.zeros(NUM_LANES, np.bool_),
        np.zeros(NUM_LANES, np.bool_),
    )

    def __init__(
        self,
        *scripts: Sequence[str],
        faults: Faults = NO_FAULTS,
        medium: str = SHARED_MEMORY,
        is_stubborn: bool = False,
    ) -> None:
        self.scripts = tuple(tuple(script) for script in scripts)
        self.faults = faults
        self.is_shared = medium == SHARED_MEMORY
        self.is_stubborn = is_stubborn
        self.session = -1
        self.blocks: tuple[StepBuffers, ...] = (StepBuffers(),)  # the first ones are none
        self.connections: tuple[Connection, ...] = (Connection(is_cut=True),)
        self.num_faults = self.num_failed = 0
        """That have happened, and that clients know of."""
        self.executed: Chain = ()
        self.given_up: Chain = ()
        """What the endpoint has judged to be overdue."""
        self.worker = self.worker_class(self)
        self.begin_session()

    def begin_session(self) -> None:
        """Have another client come."""
        self.session += 1
        self.requests: tuple[tuple[int, str], ...] = ()
        self.responses: tuple[Result, ...] = ()
        self.is_join_lost = False
        self.call = self.call_after = 0
        """Number of the call that has been sent and is not answered, and of the one before it."""
        self.called: Result | None = None
        self.asks: tuple[int, ...] = ()
        """For direct connections, on their way to the endpoint."""
        is_liar = self.session == 0 and self.faults.lies > 0
        make_client = self.liar_class if is_liar else self.client_class
        self.client = make_client(self, self.scripts[self.session])
        self.endpoint = self.endpoint_class(self)

    def fork(self) -> "World":
        """Return a copy that goes its own way."""
        other = shallow_copy(self)
        other.client = self.client.fork(other)
        other.endpoint = self.endpoint.fork(other)
        other.worker = self.worker.fork(other)
        return other

    def discard(self) -> None:
        """Let go of its parts."""
        for part in (self.client, self.endpoint, self.worker):
            vars(part).clear()

    @property
    def key(self) -> Hashable:
        """Equal for worlds that have the same future."""
        return (
            self.faults,
            self.session,
            self.num_failed,
            self.blocks,
            self.connections,
            self.executed,
            self.given_up,
            self.requests,
            self.responses,
            self.is_join_lost,
            self.call,
            self.call_after,
            self.called,
            self.asks,
            self.client.key,
            self.endpoint.key,
            self.worker.key,
        )

    @property
    def is_over(self) -> bool:
        """Whether all sessions have ended."""
        return self.session == len(self.scripts) - 1 and self.client.is_over

    def require(self, condition: object, promise: str) -> None:
        assert condition, promise

    # --- what can happen ------------------------------------------------------------------

    def moves(self) -> Iterator[Move]:
        """Yield what can happen now."""
        yield from self.client.moves()
        yield from self.endpoint.moves()
        yield from self.worker.moves()
        yield from self._fault_moves()
        is_last = self.session == len(self.scripts) - 1
        if self.client.is_over and self.endpoint.is_released and not is_last:
            yield Move("another client comes", "", "begin_session")

    def _fault_moves(self) -> Iterator[Move]:
        faults = self.faults
        direct = self.client.direct
        if faults.cuts and direct and not self.connections[direct].is_cut:
            yield Move("the direct connection is cut", "", "cut")
            if not self.is_shared and (
                self.connections[direct].steps or self.connections[direct].answers
            ):
                yield Move(
                    "the direct connection is cut, and what was on its way lost", "", "cut", (True,)
                )
        if faults.kills and self.worker.is_alive and not self.is_over:
            yield Move("the worker is killed", "", "kill")
        if faults.lost_streams and not self.is_join_lost and not self.client.is_over:
            yield Move("the stream is lost", "", "lose_stream")

    def spend(self, kind: str) -> None:
        self.num_faults += 1
        self.faults = self.faults._replace(**{kind: getattr(self.faults, kind) - 1})

    def cut(self, is_lossy: bool = False) -> None:
        self.spend("cuts")
        direct = self.client.direct
        self.change_connection(direct, is_cut=True)
        if is_lossy:
            kept = self.connections[direct].answers if self.client.has_whole_answer else ()
            self.change_connection(direct, steps=(), answers=kept)
            self.worker.has_seen_request = False

    def kill(self) -> None:
        self.spend("kills")
        self.worker.end()

    def lose_stream(self, *, is_fault: bool = True) -> None:
        if is_fault:
            self.spend("lost_streams")
        self.is_join_lost = True
        self.requests = self.responses = ()
        self.call, self.called = 0, None

    # --- what the three share -------------------------------------------------------------

    def name_of(self, number: int) -> int:
        """Return what identifies a request among those of all sessions."""
        return 10_000 * self.session + number

    def note_execution(self, number: int) -> None:
        name = self.name_of(number)
        self.require(name not in self.executed, "no request is executed twice")
        self.executed += (name,)

    def new_block(self) -> int:
        self.blocks += (StepBuffers(),)
        return len(self.blocks) - 1

    def write_block(
        self, buffers: int, *, action: int | None = None, chain: Chain | None = None
    ) -> None:
        former = self.blocks[buffers]
        now = StepBuffers(
            former.action if action is None else action, former.chain if chain is None else chain
        )
        self.blocks = (*self.blocks[:buffers], now, *self.blocks[buffers + 1 :])

    def new_direct(self) -> int:
        self.connections += (Connection(buffers=self.new_block() if self.is_shared else 0),)
        return len(self.connections) - 1

    def change_connection(self, direct: int, **changes: Any) -> None:
        now = self.connections[direct]._replace(**changes)
        self.connections = (*self.connections[:direct], now, *self.connections[direct + 1 :])

    def send_step(self, direct: int, number: int) -> None:
        """The client sends; over a connection that is cut, nothing."""
        there = self.connections[direct]
        if there.is_cut:
            return
        # Over TCP the action comes along, and the worker writes it when it executes the step.
        if there.is_shared:
            self.write_block(there.buffers, action=self.name_of(number))
        self.change_connection(direct, steps=(*there.steps, number))

    def take_step(self, direct: int) -> int:
        """The worker receives."""
        there = self.connections[direct]
        number, *rest = there.steps
        self.change_connection(direct, steps=tuple(rest))
        return number

    def put_answer(self, direct: int, number: int, chain: Chain, *, is_done: bool) -> None:
        """The worker sends; over shared memory a bell is rung afterwards."""
        there = self.connections[direct]
        answers = (*there.answers, Answer(number, is_done, chain))
        num_unrung = there.num_unrung + there.is_shared
        self.change_connection(direct, answers=answers, num_unrung=num_unrung)
