"""Frames on their way to one stream's writer."""

import asyncio
from collections import deque


class Outbox:
    """A queue for one reader in the serving loop; leaner than ``asyncio.Queue``."""

    def __init__(self) -> None:
        self._frames: deque[bytes | None] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, frame: bytes | None) -> None:
        """Add a frame, or the end (None)."""
        self._frames.append(frame)
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def get(self) -> bytes | None:
        """Wait for the next frame; None: there are no more."""
        while not self._frames:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._frames.popleft()
