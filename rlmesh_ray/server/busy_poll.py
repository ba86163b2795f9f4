"""Busy polling: the serving loop does not sleep while its only client is about to ask again.

A loop that sleeps is woken by a thread of gRPC's, which is woken by the system, and begins with
cold caches: together that takes longer than a small policy or a step of an environment. The only
client of an endpoint finds the loop awake if it has usually asked again quickly.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable

from rlmesh_ray.polling import AdaptiveSpin

_LONGEST_S = 0.001


def busy_polled(
    frames: AsyncIterator[bytes], is_alone: Callable[[], bool], spin: bool | None = None
) -> AsyncIterator[bytes]:
    """Return the messages in ``frames``; while the next one is due, the loop does not sleep.

    Args:
        frames: The messages of one stream.
        is_alone: Returns whether no other client would wait for the processor meanwhile.
        spin: False: the loop always sleeps; see ``polling.should_spin``.
    """
    return _BusyPolledFrames(frames, is_alone, spin)


class _BusyPolledFrames:
    """The polled messages. Not a generator: an abandoned one is closed in a task of its own."""

    def __init__(
        self, frames: AsyncIterator[bytes], is_alone: Callable[[], bool], spin: bool | None
    ) -> None:
        self._frames = aiter(frames)
        self._is_alone = is_alone
        self._loop = asyncio.get_running_loop()
        self._spin = AdaptiveSpin(_LONGEST_S, spin)
        self._until_s = 0.0
        self._is_awake = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self._is_alone():
            return await anext(self._frames)
        self._spin.begin()
        self._stay_awake()
        frame = await anext(self._frames)
        self._spin.learn()
        # Also for the answer, which wakes the loop when it has left.
        self._stay_awake()
        return frame

    def _stay_awake(self) -> None:
        """Do not sleep for about as long as it usually takes the client to ask again."""
        spin_s = self._spin.spin_s
        if spin_s and self._is_alone():
            self._until_s = time.perf_counter() + spin_s
            if not self._is_awake:
                self._is_awake = True
                self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Let the loop poll its sockets, and run again."""
        if time.perf_counter() < self._until_s:
            os.sched_yield()
            self._loop.call_soon(self._turn)
        else:
            self._is_awake = False
