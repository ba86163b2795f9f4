"""A closed-loop client that does as little as possible: frames made beforehand, on grpc.aio.

It runs as a process of its own (``python -m benchmarks.serving.closed_loop_client``), reads a
``Load`` from standard input, writes ``ready``, waits for a line, writes ``begun`` when the warm-up
is over, and at the end what it has measured, or the first answer that was no prediction.
"""

import asyncio
import selectors
import sys
import time
from dataclasses import asdict

import grpc

from benchmarks.control import say
from benchmarks.load import ClientResult, Load
from benchmarks.serving.closed_loop import ask_by_turns
from benchmarks.serving.frames import DIALECTS, JOIN
from benchmarks.serving.streams import BadAnswerError, Stream, Tally

_TIMEOUT_S = 30.0


def main() -> None:
    """Do the work that standard input describes."""
    load = Load.from_line(sys.stdin.readline())
    try:
        # select() wakes up within microseconds; epoll, the default, rounds to milliseconds.
        with asyncio.Runner(
            loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())
        ) as runner:
            result = runner.run(_measure(load))
    except BadAnswerError as error:
        say(error=str(error))
    else:
        say(**asdict(result))


async def _measure(load: Load) -> ClientResult:
    # Else gRPC puts all channels to one address on one connection.
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [
        grpc.aio.insecure_channel(f"127.0.0.1:{load.port}", options=options)
        for _ in range(load.connections)
    ]
    try:
        try:
            streams = await asyncio.wait_for(_open(load, channels), _TIMEOUT_S)
        except TimeoutError as error:
            raise BadAnswerError(f"no route was opened within {_TIMEOUT_S:.0f} s") from error
        say(ready=True)
        sys.stdin.readline()
        return await _work(load, streams)
    finally:
        for channel in channels:
            await channel.close()


async def _open(load: Load, channels: list[grpc.aio.Channel]) -> list[Stream]:
    shares = [load.routes] if load.is_one_stream else [(route,) for route in load.routes]
    dialect = DIALECTS[load.dialect]
    streams = []
    for index, routes in enumerate(shares):
        stream = Stream(channels[index % len(channels)].stream_stream(JOIN)(), dialect, routes)
        streams.append(stream)
    for stream in streams:
        for route in stream.routes:
            await stream.write(dialect.opening(route, load.rows))
            stream.check_opened(await stream.read())
    return streams


async def _work(load: Load, streams: list[Stream]) -> ClientResult:
    tally = Tally()
    workers = [asyncio.ensure_future(ask_by_turns(one, load.rows, tally)) for one in streams]
    over = asyncio.ensure_future(_watch(load, tally))
    try:
        await asyncio.wait([over, *workers], return_when=asyncio.FIRST_COMPLETED)
        for ended in workers:
            if ended.done():
                ended.result()  # only a failure ends one before the time is over
        return await over
    finally:
        for task in (over, *workers):
            task.cancel()
        await asyncio.gather(over, *workers, return_exceptions=True)


async def _watch(load: Load, tally: Tally) -> ClientResult:
    """Count what happens between the warm-up and the end."""
    await asyncio.sleep(load.warm_up_s)
    tally.begin()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    say(begun=True)
    await asyncio.sleep(load.seconds)
    ended_s = time.perf_counter()
    return ClientResult(
        answers=len(tally.latencies_us),
        seconds=ended_s - began_s,
        cpu_s=time.process_time() - cpu_s,
        latencies_us=tuple(tally.latencies_us),
    )


if __name__ == "__main__":
    main()
