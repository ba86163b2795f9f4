"""A Join stream of raw frames, for tests that send what no client of ours would."""

import queue
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc

ENV_JOIN = "/rlmesh.env.v1.EnvService/Join"
MODEL_JOIN = "/rlmesh.model.v1.ModelService/Join"
DEADLINE_S = 60.0
"""Of a whole stream, so that a server that does not answer fails the test."""


class RawJoin:
    """One stream; frames are sent without waiting for answers.

    Args:
        channel: To the endpoint.
        path: ``ENV_JOIN`` or ``MODEL_JOIN``.
        token: What to show, alone.
    """

    def __init__(self, channel: grpc.Channel, path: str, token: str | None = None) -> None:
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        frames = iter(self._outbox.get, None)
        shown = None if token is None else (("authorization", token),)
        self._call: Any = channel.stream_stream(path)(frames, timeout=DEADLINE_S, metadata=shown)

    def send(self, frames: Sequence[bytes]) -> None:
        """Send all ``frames``."""
        for frame in frames:
            self._outbox.put(frame)

    def receive(self) -> bytes | None:
        """Return the next answer; None: the server has ended the stream properly.

        Raises:
            grpc.RpcError: It ended with another status than OK.
        """
        answer: bytes | None = next(self._call, None)
        return answer

    def ask(self, frame: bytes) -> bytes:
        """Send ``frame`` and return its answer."""
        self.send([frame])
        answer = self.receive()
        assert answer is not None, "the server has ended the stream"
        return answer

    def close(self) -> None:
        """Leave, without Close."""
        self._outbox.put(None)
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
