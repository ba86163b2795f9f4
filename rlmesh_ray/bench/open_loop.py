"""Requests that arrive when they arrive: what those wait whom nobody asked whether it suits.

Latency counts from the moment a request was scheduled, not from when it could be sent. A server
that stalls delays all that arrive meanwhile, and each of them counts (no coordinated omission).
"""

import asyncio
import random
from collections import deque

from rlmesh_ray.bench.arrivals import poisson
from rlmesh_ray.bench.streams import Stream, Tally, now_s

_MAX_IN_FLIGHT = 256
"""Of one route; ids are told apart among these. An arrival beyond waits, and its clock runs."""


async def ask_on_time(
    stream: Stream, rows: int, tally: Tally, *, rate_per_s: float, seconds: float, seed: int
) -> None:
    """Send a Poisson process of requests of one route, for ``seconds``, then wait to be cancelled.

    Raises:
        BadAnswerError: An answer was no prediction.
    """
    (route,) = stream.routes
    frames = deque(
        stream.dialect.request(route, rows, f"{route}-{index}") for index in range(_MAX_IN_FLIGHT)
    )
    scheduled = tally.expect()
    free = asyncio.Semaphore(_MAX_IN_FLIGHT)
    schedule = poisson(rate_per_s, seconds, random.Random(f"{seed}/{route}"))

    async def send() -> None:
        began_s = now_s()
        for arrival_s in schedule:
            due_s = began_s + arrival_s
            wait_s = due_s - now_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tally.lags_us.append(round((now_s() - due_s) * 1e6))
            await free.acquire()
            scheduled.append(due_s)
            await stream.write(frames[0])
            frames.rotate(-1)

    async def receive() -> None:
        while True:
            await stream.predicted()
            # A route's answers come in the order of its requests.
            tally.latencies_us.append(round((now_s() - scheduled.popleft()) * 1e6))
            free.release()

    both = [asyncio.ensure_future(send()), asyncio.ensure_future(receive())]
    try:
        await asyncio.gather(*both)
    finally:
        for task in both:
            task.cancel()
