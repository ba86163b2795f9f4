"""A Join stream of raw frames, and what is counted about all of them."""

import time
from typing import Any

import grpc

from benchmarks.serving.frames import Dialect
from rlmesh_ray.errors import CodecError, RemoteModelError

now_s = time.perf_counter


class BadAnswerError(Exception):
    """Something else than a prediction came back: there is nothing to measure."""


class Tally:
    """What the streams of one process count together."""

    def __init__(self) -> None:
        self.latencies_us: list[int] = []
        self.lags_us: list[int] = []

    def begin(self) -> None:
        """Forget the warm-up."""
        self.latencies_us.clear()
        self.lags_us.clear()


class Stream:
    """One call.

    Args:
        call: From ``channel.stream_stream(path)()``.
        dialect: What its answers are.
        routes: That live in it.
    """

    def __init__(self, call: Any, dialect: Dialect, routes: tuple[str, ...]) -> None:
        self._call = call
        self.dialect = dialect
        self.routes = routes

    async def write(self, frame: bytes) -> None:
        """Send ``frame``.

        Raises:
            BadAnswerError: The call is over.
        """
        try:
            await self._call.write(frame)
        except (grpc.RpcError, grpc.aio.UsageError) as error:
            raise BadAnswerError(f"the server ended the stream: {await self._status()}") from error

    async def read(self) -> bytes:
        """Return the next answer.

        Raises:
            BadAnswerError: The call is over.
        """
        try:
            answer = await self._call.read()
        except grpc.RpcError as error:
            raise BadAnswerError(f"the server ended the stream: {await self._status()}") from error
        if answer is grpc.aio.EOF:
            raise BadAnswerError(f"the server ended the stream: {await self._status()}")
        return bytes(answer)

    async def predicted(self) -> str:
        """Wait for the next answer; return the id of the request that it answers.

        Raises:
            BadAnswerError: It is no prediction.
        """
        answer = await self.read()
        try:
            return self.dialect.answered(answer)
        except (CodecError, RemoteModelError) as error:
            raise BadAnswerError(f"a Predict was answered with {error}") from error

    def check_opened(self, answer: bytes) -> None:
        """Make sure that a route is open.

        Raises:
            BadAnswerError: The server refused.
        """
        try:
            self.dialect.check_opened(answer)
        except (CodecError, RemoteModelError) as error:
            raise BadAnswerError(f"a route was refused: {error}") from error

    async def _status(self) -> str:
        code, details = await self._call.code(), await self._call.details()
        return f"{code.name} {details}".strip()
