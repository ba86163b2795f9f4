"""A client with one route at each of several servers, which asks them in turns.

The differences to find are a tenth of a round trip. The speed of a shared machine changes by more
than that from one second to the next: so all servers run at once, and each gets a short turn, the
next one right after it.

It runs as a process of its own (``python -m benchmarks.serving.interleaved_client``), reads
``Turns`` from standard input, and writes what it has measured, or the first answer that was no
prediction.
"""

import asyncio
import selectors
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import grpc

from benchmarks.control import say
from benchmarks.record import by_turns
from benchmarks.serving.frames import DIALECTS, JOIN
from benchmarks.serving.interleaved import Taken, Turns
from benchmarks.serving.streams import BadAnswerError, Stream, now_s

_TURN_S = 0.05
_ROUTE = "route-0"


def main() -> None:
    """Do the work that standard input describes."""
    turns = Turns.from_line(sys.stdin.readline())
    try:
        # As the raw client does.
        with asyncio.Runner(
            loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())
        ) as runner:
            taken = runner.run(_measure(turns))
    except BadAnswerError as error:
        say(error=str(error))
    else:
        say(**asdict(taken))


async def _measure(turns: Turns) -> Taken:
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}") for port in turns.ports]
    dialect = DIALECTS[turns.dialect]
    try:
        streams = [
            Stream(channel.stream_stream(JOIN)(), dialect, (_ROUTE,)) for channel in channels
        ]
        for stream in streams:
            await stream.write(dialect.opening(_ROUTE, 1))
            stream.check_opened(await stream.read())
        await take_turns(streams, turns.warm_up_s)
        began_s, cpu_s = now_s(), time.process_time()
        latencies_us = await take_turns(streams, turns.seconds)
        cores = (time.process_time() - cpu_s) / (now_s() - began_s)
        return Taken(latencies_us, cores)
    finally:
        for channel in channels:
            await channel.close()


async def take_turns(streams: Sequence[Stream], seconds: float) -> list[list[int]]:
    """Ask each of ``streams`` for ``seconds``, in short turns.

    Returns:
        What the round trips of each took, in us.

    Raises:
        BadAnswerError: An answer was no prediction.
    """
    frame = streams[0].dialect.request(_ROUTE, 1, _ROUTE)
    latencies_us: list[list[int]] = [[] for _ in streams]
    for turn in range(max(1, round(seconds / _TURN_S))):
        for stream, own in by_turns(list(zip(streams, latencies_us, strict=True)), turn):
            sent_s = now_s()
            until_s = sent_s + _TURN_S
            while sent_s < until_s:
                await stream.write(frame)
                await stream.predicted()
                answered_s = now_s()
                own.append(round((answered_s - sent_s) * 1e6))
                sent_s = answered_s
    return latencies_us


if __name__ == "__main__":
    main()
