"""The loops of the clients, on streams that end in this process."""

import asyncio
import math
import random

import grpc
import pytest

from benchmarks.serving import open_loop_client
from benchmarks.serving.arrivals import poisson
from benchmarks.serving.closed_loop import ask_by_turns
from benchmarks.serving.frames import EchoedFrames, OurFrames
from benchmarks.serving.open_loop import Arrival, OpenRoute, schedule
from benchmarks.serving.streams import BadAnswerError, Stream, Tally
from benchmarks.serving.turns_client import Loop
from rlmesh_ray.protocol.messages import ModelErrorCode, ModelFailed
from rlmesh_ray.wire.rlmesh_v1 import model as wire

ERROR = wire.pack_response(ModelFailed("id", ModelErrorCode.INTERNAL, "it broke", True))


class Echo:
    """A call whose other end sends frames back, once it may.

    Args:
        holds: How many frames it waits for before it sends the first one back.
        limit: After how many answers the stream ends.
    """

    def __init__(self, *, holds: int = 1, limit: int = 10**9) -> None:
        self.frames: list[bytes] = []
        self.most_unanswered = 0
        self._holds = holds
        self._left = limit
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()

    async def write(self, frame: bytes) -> None:
        self.frames.append(frame)
        if len(self.frames) < self._holds:
            return
        for held in self.frames if len(self.frames) == self._holds else [frame]:
            self._queue.put_nowait(held)
        self.most_unanswered = max(self.most_unanswered, self._queue.qsize())

    async def read(self) -> object:
        self._left -= 1
        return await self._queue.get() if self._left >= 0 else grpc.aio.EOF

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    async def details(self) -> str:
        return "shutting down"


def test_the_closed_loop_keeps_one_request_of_each_route_in_flight() -> None:
    async def ask() -> tuple[Echo, Tally]:
        echo, tally = Echo(limit=10), Tally()
        with pytest.raises(BadAnswerError, match="UNAVAILABLE shutting down"):
            await ask_by_turns(Stream(echo, EchoedFrames(), ("a", "b")), 1, tally)
        return echo, tally

    echo, tally = asyncio.run(ask())

    assert len(tally.latencies_us) == 10
    assert echo.most_unanswered == 2
    requests = [EchoedFrames().request(route, 1, route) for route in ("a", "b")]
    assert echo.frames == requests * 6


def test_an_error_ends_the_measurement() -> None:
    class Failing(Echo):
        async def read(self) -> object:
            return ERROR

    with pytest.raises(BadAnswerError, match="answered with INTERNAL: it broke"):
        asyncio.run(ask_by_turns(Stream(Failing(), OurFrames(), ("a",)), 1, Tally()))


def open_route(sent: list[bytes], name: str = "a") -> OpenRoute:
    return OpenRoute(name, 1, EchoedFrames(), sent.append)


def test_an_answer_ends_the_wait_that_began_when_its_request_was_due() -> None:
    sent: list[bytes] = []
    route = open_route(sent)
    for due_s in (1.0, 2.0, 3.0):
        route.arrive(due_s)

    assert len(sent) == 3
    assert [route.answered(), route.answered()] == [1.0, 2.0]
    assert route.unanswered() == (3.0,)


def test_what_arrives_while_too_much_is_in_flight_is_asked_later_and_waits_from_then_on() -> None:
    sent: list[bytes] = []
    route = open_route(sent)
    for due_s in range(300):
        route.arrive(float(due_s))
    in_flight = len(sent)

    answered = [route.answered() for _ in range(300)]

    assert in_flight == len(set(sent)) == 256
    assert len(sent) == 300
    assert answered == [float(due_s) for due_s in range(300)]
    assert route.unanswered() == ()


def test_an_answer_without_a_request_is_refused() -> None:
    route = open_route([])

    with pytest.raises(BadAnswerError, match="answer without a request"):
        route.answered()


def test_arrivals_are_a_poisson_process_of_each_route() -> None:
    a, b = open_route([], "a"), open_route([], "b")

    arrivals = schedule([a, b], rate_per_s=1000.0, seconds=0.05, seed=0)

    assert [one.after_s for one in arrivals] == sorted(one.after_s for one in arrivals)
    for route, seed in ((a, "0/a"), (b, "0/b")):
        own = [one.after_s for one in arrivals if one.route is route]
        assert own == poisson(1000.0, 0.05, random.Random(seed))


def test_the_warm_up_is_forgotten() -> None:
    tally = Tally()
    tally.latencies_us.append(1)
    tally.lags_us.append(1)

    tally.begin()

    assert (tally.latencies_us, tally.lags_us) == ([], [])


def test_the_delay_of_the_client_itself_is_reported_and_counts_as_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 10.003
    monkeypatch.setattr(open_loop_client, "now_s", lambda: now_s)
    answers, sent = open_loop_client.Answers(), list[bytes]()
    route = open_route(sent)

    open_loop_client.ask([Arrival(1.0, route), Arrival(1.001, route)], 9.0, answers)

    assert answers.tally.lags_us == [3000, 2000]
    assert route.unanswered() == (10.0, pytest.approx(10.001))
    assert len(sent) == 2


REQUESTS = {b"route-000": b"ask route-000", b"route-001": b"ask route-001"}


def test_a_turn_keeps_one_request_of_each_route_in_flight_until_its_time_is_over() -> None:
    loop = Loop(REQUESTS, until_s=math.inf)
    assert list(loop.first()) == list(REQUESTS.values())

    following = loop.answered(b"to route-001")
    over = Loop(REQUESTS, until_s=0.0)
    list(over.first())
    last = [over.answered(b"to route-001"), over.answered(b"to route-000")]

    assert following == b"ask route-001"
    assert not loop.is_over
    assert last == [None, None]
    assert over.is_over
    assert over.answers == [b"to route-001", b"to route-000"]
    assert len(over.latencies_us) == 2


def test_an_answer_that_no_route_waits_for_ends_the_turn() -> None:
    loop = Loop(REQUESTS, until_s=0.0)
    list(loop.first())
    loop.answered(b"to route-001")

    for answer in (b"to route-001", b"an error without a route"):
        with pytest.raises(ValueError, match="no route waits for the answer"):
            loop.answered(answer)
    with pytest.raises(ValueError, match="the server ended the stream"):
        loop.answered(None)
