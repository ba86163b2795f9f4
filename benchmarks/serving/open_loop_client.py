"""A client whose requests arrive when they arrive, and that is late as little as possible itself.

It runs as a process of its own (``python -m benchmarks.serving.open_loop_client``) and talks as
``callback_call`` does. One thread asks, gRPC's own takes the answers; frames are made beforehand.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from queue import Empty, SimpleQueue

from benchmarks.control import say
from benchmarks.load import ClientResult, Load
from benchmarks.serving.callback_call import CallbackCall
from benchmarks.serving.frames import DIALECTS, JOIN
from benchmarks.serving.open_loop import Arrival, OpenRoute, schedule
from benchmarks.serving.streams import BadAnswerError, Tally, now_s
from rlmesh_ray.errors import CodecError, RemoteModelError
from rlmesh_ray.grpc_setup import grpc

_TIMEOUT_S = 30.0


def main() -> None:
    """Do the work that standard input describes."""
    load = Load.from_line(sys.stdin.readline())
    try:
        with contextlib.ExitStack() as stack:
            answers = Answers()
            routes = _open(load, answers, stack)
            say(ready=True)
            sys.stdin.readline()
            result = _work(load, routes, answers)
    except BadAnswerError as error:
        say(error=str(error))
    else:
        say(**asdict(result))


class Answers:
    """Answers to all routes: added by gRPC's thread, awaited in another one."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._opened: SimpleQueue[None] = SimpleQueue()
        self._failure = ""
        self._has_failed = threading.Event()

    def opened(self) -> None:
        """Tell that a route is open."""
        self._opened.put(None)

    def fail(self, why: str) -> None:
        """Tell that there is nothing to measure."""
        self._failure = self._failure or why
        self._has_failed.set()
        self._opened.put(None)

    def wait_for_routes(self, count: int) -> None:
        """Wait until so many routes are open.

        Raises:
            BadAnswerError: They will not be, or it takes too long.
        """
        for _ in range(count):
            try:
                self._opened.get(timeout=_TIMEOUT_S)
            except Empty:
                self.fail(f"no route was opened within {_TIMEOUT_S:.0f} s")
            self.wait_until(0.0)

    def wait_until(self, when_s: float) -> None:
        """Wait until a moment, see ``now_s``.

        Raises:
            BadAnswerError: Nothing can be measured any more.
        """
        if self._has_failed.wait(max(0.0, when_s - now_s())):
            raise BadAnswerError(self._failure)


class Conversation:
    """A route on a stream of its own.

    Args:
        channel: Over which.
        name: Of the route.
        load: The work of the client.
        answers: Gets the answers.
    """

    def __init__(self, channel: grpc.Channel, name: str, load: Load, answers: Answers) -> None:
        self._dialect = DIALECTS[load.dialect]
        self._answers = answers
        self._is_open = False
        self._is_closing = False
        self._call = CallbackCall(channel, JOIN, self._take, self._end)
        self.route = OpenRoute(name, load.rows, self._dialect, self._call.write)
        self._call.write(self._dialect.opening(name, load.rows))

    def close(self) -> None:
        """End the stream."""
        self._is_closing = True
        self._call.cancel()

    def _take(self, answer: bytes) -> None:
        answered_s = now_s()
        try:
            if self._is_open:
                self._dialect.answered(answer)
                latency_s = answered_s - self.route.answered()
                self._answers.tally.latencies_us.append(round(latency_s * 1e6))
            else:
                self._dialect.check_opened(answer)
                self._is_open = True
                self._answers.opened()
        except (CodecError, RemoteModelError, BadAnswerError) as error:
            asked = "a Predict was answered with" if self._is_open else "a route was refused:"
            self._answers.fail(f"{asked} {error}")

    def _end(self, status: str) -> None:
        if not self._is_closing:
            self._answers.fail(f"the server ended the stream: {status}")


def _open(load: Load, answers: Answers, stack: contextlib.ExitStack) -> Sequence[OpenRoute]:
    # Else gRPC puts all channels to one address on one connection.
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [
        stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{load.port}", options=options))
        for _ in range(load.connections)
    ]
    routes = []
    for index, name in enumerate(load.routes):
        talk = Conversation(channels[index % load.connections], name, load, answers)
        stack.callback(talk.close)
        routes.append(talk.route)
    answers.wait_for_routes(len(routes))
    return routes


def _work(load: Load, routes: Sequence[OpenRoute], answers: Answers) -> ClientResult:
    """Ask on time; return what happened after the warm-up."""
    tally = answers.tally
    seconds = load.warm_up_s + load.seconds
    rate_per_s = (load.arrivals_per_s or 0.0) / len(routes)
    arrivals = schedule(routes, rate_per_s=rate_per_s, seconds=seconds, seed=load.seed)
    first_s = now_s()
    ask((one for one in arrivals if one.after_s < load.warm_up_s), first_s, answers)
    answers.wait_until(first_s + load.warm_up_s)
    tally.begin()
    began_s, cpu_s = now_s(), time.process_time()
    say(begun=True)
    ask((one for one in arrivals if one.after_s >= load.warm_up_s), first_s, answers)
    answers.wait_until(first_s + seconds)
    ended_s = now_s()
    latencies_us = tuple(tally.latencies_us)
    # Requests without an answer have waited that long at least; their absence would flatter.
    waiting_s = [ended_s - due_s for route in routes for due_s in route.unanswered()]
    return ClientResult(
        answers=len(latencies_us),
        seconds=ended_s - began_s,
        cpu_s=time.process_time() - cpu_s,
        latencies_us=(*latencies_us, *(round(waited_s * 1e6) for waited_s in waiting_s)),
        lags_us=tuple(tally.lags_us),
    )


def ask(arrivals: Iterable[Arrival], first_s: float, answers: Answers) -> None:
    """Send each request when it is due, and note how late it was."""
    for arrival in arrivals:
        due_s = first_s + arrival.after_s
        answers.wait_until(due_s)
        answers.tally.lags_us.append(round((now_s() - due_s) * 1e6))
        arrival.route.arrive(due_s)


if __name__ == "__main__":
    main()
