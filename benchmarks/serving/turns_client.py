"""Ordinary closed-loop clients of several servers, asked by turns: blocking grpcio, or grpc.aio.

``python -m benchmarks.serving.turns_client blocking|asyncio``; ``turns_client.mjs`` is the lone
client in JavaScript. Each is written as a first program of its library would be, with gRPC's
default settings. ``turns`` has the messages of the pipes.

A client knows no dialect: it sends frames that were made beforehand, and keeps the answers until
the end. So its own processor time is the same at every server.
"""

import asyncio
import base64
import json
import re
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Protocol

import grpc

from benchmarks.control import say

_JOIN = "/rlmesh.model.v1.ModelService/Join"
_ROUTE = re.compile(rb"route-\d{3}")


class Loop:
    """One turn of one stream: a request of each of its routes is in flight, until a moment.

    Args:
        requests: The frame of each route, by the name that its answers contain.
        until_s: When the last requests are sent, as of ``perf_counter``.
    """

    def __init__(self, requests: Mapping[bytes, bytes], until_s: float) -> None:
        self.latencies_us: list[int] = []
        self.answers: list[bytes] = []
        self._requests = requests
        self._until_s = until_s
        self._sent_s: dict[bytes, float] = {}

    def first(self) -> Iterator[bytes]:
        """Yield the frames to begin with."""
        for route, frame in self._requests.items():
            self._sent_s[route] = perf_counter()
            yield frame

    def answered(self, answer: bytes | None) -> bytes | None:
        """Note an answer; return the next frame to send, or None when the time is over.

        Raises:
            ValueError: The stream has ended, or no route waits for this answer.
        """
        now_s = perf_counter()
        answer = _not_ended(answer)
        route = next(iter(self._requests)) if len(self._requests) == 1 else _route(answer)
        if route not in self._sent_s:
            raise ValueError(f"no route waits for the answer {answer!r}")
        self.latencies_us.append(round((now_s - self._sent_s.pop(route)) * 1e6))
        self.answers.append(answer)
        if now_s >= self._until_s:
            return None
        self._sent_s[route] = now_s
        return self._requests[route]

    @property
    def is_over(self) -> bool:
        """Whether every request is answered."""
        return not self._sent_s


def _not_ended(answer: bytes | None) -> bytes:
    if answer is None:
        raise ValueError("the server ended the stream")
    return answer


def _route(answer: bytes) -> bytes:
    found = _ROUTE.search(answer)
    return found[0] if found else b""


class Client(Protocol):
    """Streams to one server."""

    def open(self, openings: Sequence[Sequence[bytes]]) -> list[bytes]:
        """Send the frames that open the routes of each stream; return the answers."""

    def take_turn(self, loops: Sequence[Loop]) -> None:
        """Run a loop on each stream."""

    def close(self) -> None:
        """Close the connection."""


class BlockingClient:
    """grpcio's blocking client: a thread for each stream, if there are several.

    Args:
        address: Of the server.
        num_streams: Over one connection.
    """

    def __init__(self, address: str, num_streams: int) -> None:
        self._channel = grpc.insecure_channel(address)
        self._streams = []
        for _ in range(num_streams):
            requests: SimpleQueue[bytes] = SimpleQueue()
            answers = self._channel.stream_stream(_JOIN)(iter(requests.get, None))
            self._streams.append((requests, answers))
        self._threads = ThreadPoolExecutor(num_streams)

    def open(self, openings: Sequence[Sequence[bytes]]) -> list[bytes]:
        """See ``Client``."""
        opened = []
        for (requests, answers), frames in zip(self._streams, openings, strict=True):
            for frame in frames:
                requests.put(frame)
                opened.append(_not_ended(next(answers, None)))
        return opened

    def take_turn(self, loops: Sequence[Loop]) -> None:
        """See ``Client``."""
        if len(loops) == 1:
            self._ask(self._streams[0], loops[0])
        else:
            list(self._threads.map(self._ask, self._streams, loops))

    def close(self) -> None:
        """See ``Client``."""
        self._channel.close()
        self._threads.shutdown()

    @staticmethod
    def _ask(stream: tuple["SimpleQueue[bytes]", Iterator[bytes]], loop: Loop) -> None:
        requests, answers = stream
        for frame in loop.first():
            requests.put(frame)
        while not loop.is_over:
            following = loop.answered(next(answers, None))
            if following is not None:
                requests.put(following)


class AsyncioClient:
    """grpc.aio on asyncio's own event loop: a task for each stream.

    Args:
        address: Of the server.
        num_streams: Over one connection.
        runner: Runs the event loop; shared by the clients of the process.
    """

    def __init__(self, address: str, num_streams: int, runner: asyncio.Runner) -> None:
        self._run = runner.run
        self._run(self._connect(address, num_streams))

    async def _connect(self, address: str, num_streams: int) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._calls = [self._channel.stream_stream(_JOIN)() for _ in range(num_streams)]
        self._answers = [aiter(call) for call in self._calls]

    def open(self, openings: Sequence[Sequence[bytes]]) -> list[bytes]:
        """See ``Client``."""
        return self._run(self._open(openings))

    async def _open(self, openings: Sequence[Sequence[bytes]]) -> list[bytes]:
        opened = []
        for call, answers, frames in zip(self._calls, self._answers, openings, strict=True):
            for frame in frames:
                await call.write(frame)
                opened.append(_not_ended(await anext(answers, None)))
        return opened

    def take_turn(self, loops: Sequence[Loop]) -> None:
        """See ``Client``."""
        streams = zip(self._calls, self._answers, loops, strict=True)
        self._run(self._ask_all(streams))

    def close(self) -> None:
        """See ``Client``."""
        self._run(self._channel.close())

    async def _ask_all(self, streams: Iterable[tuple[Any, AsyncIterator[bytes], Loop]]) -> None:
        await asyncio.gather(*(self._ask(*stream) for stream in streams))

    @staticmethod
    async def _ask(call: Any, answers: AsyncIterator[bytes], loop: Loop) -> None:
        for frame in loop.first():
            await call.write(frame)
        while not loop.is_over:
            following = loop.answered(await anext(answers, None))
            if following is not None:
                await call.write(following)


def _frames(encoded: Mapping[str, str]) -> dict[bytes, bytes]:
    return {route.encode(): base64.b64decode(frame) for route, frame in encoded.items()}


def _serve_turns(kind: str, runner: asyncio.Runner) -> None:
    task = json.loads(sys.stdin.readline())
    clients: list[Client] = []
    streams: list[list[dict[bytes, bytes]]] = []
    opened = []
    for server in task["servers"]:
        openings, requests = _frames(server["openings"]), _frames(server["requests"])
        routes = [list(requests)] if task["is_one_stream"] else [[route] for route in requests]
        streams.append([{route: requests[route] for route in own} for own in routes])
        if kind == "blocking":
            clients.append(BlockingClient(server["address"], len(routes)))
        else:
            clients.append(AsyncioClient(server["address"], len(routes), runner))
        opened.append(clients[-1].open([[openings[route] for route in own] for own in routes]))
    say(opened=[_encoded(answers) for answers in opened])
    answers: list[list[bytes]] = [[] for _ in clients]
    while turn := json.loads(sys.stdin.readline()):
        began_s = perf_counter()
        index = turn["server"]
        loops = [Loop(requests, began_s + turn["seconds"]) for requests in streams[index]]
        clients[index].take_turn(loops)
        took_s = perf_counter() - began_s
        say(seconds=took_s, latencies_us=[value for each in loops for value in each.latencies_us])
        answers[index] += [answer for each in loops for answer in each.answers]
    say(answers=[_encoded(own) for own in answers])
    for client in clients:
        client.close()


def _encoded(frames: Sequence[bytes]) -> list[str]:
    return [base64.b64encode(frame).decode() for frame in frames]


def main() -> None:
    """Do the work that standard input describes."""
    with asyncio.Runner() as runner:
        try:
            _serve_turns(sys.argv[1], runner)
        except grpc.RpcError as error:
            say(error=f"the server ended the stream: {error.code().name} {error.details()}")
        except ValueError as error:
            say(error=str(error))


if __name__ == "__main__":
    main()
