"""The worker's end of a road: steps that a client on this machine asks for directly.

Only what succeeds is answered here. A step that fails, or is not possible, is handed over: the
client asks for it again on its stream, and the endpoint passes that on with its number.
"""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rlmesh_ray.protocol.episodes import Episode, EpisodeLedger
from rlmesh_ray.protocol.messages import EpisodeRecord, Infos, StepDone
from rlmesh_ray.spaces.block import Results
from rlmesh_ray.spaces.warnings import as_texts
from rlmesh_ray.transport import shared_memory as frames
from rlmesh_ray.transport.eventfd_socket import EventfdSocket
from rlmesh_ray.transport.progress import Progress
from rlmesh_ray.waiting import Signal
from rlmesh_ray.wire.rlmesh_v1.env import pack_response

LARGEST = 2**63 - 1
"""Of a number or timeout: what a field of the progress holds."""


class Stepped(Protocol):
    """What a step has given, beside what lies in the block."""

    @property
    def infos(self) -> Infos:
        """Of all lanes."""

    @property
    def final_infos(self) -> Mapping[int, Infos]:
        """By lane whose episode has ended."""


Step = Callable[[int, int, Callable[[Stepped], bytes]], bytes | None]
"""Executes the step with this number and timeout if its turn has come, and returns what the
callable makes of its success, which belongs to the step. None: it is handed over."""


class SharedMemoryWorker:
    """Answers the steps of one session.

    Args:
        client: The other end; owned.
        progress: Of the session.
        results: Where ``step`` leaves rewards and flags.
        step: Applies the actions in the block.
        num_lanes: Width of the session.
        tag_arrays: Whether the client knows arrays in infos.
    """

    def __init__(
        self,
        client: EventfdSocket,
        progress: Progress,
        results: Results,
        step: Step,
        num_lanes: int,
        *,
        tag_arrays: bool,
    ) -> None:
        self._client = client
        self._results = results
        self._step = step
        self._tag_arrays = tag_arrays
        self._ledger = EpisodeLedger(num_lanes, str, progress)  # the endpoint mints the ids

    @property
    def signal(self) -> Signal | None:
        """What tells of a request; None: the road has ended."""
        return self._client.signal

    def follow(self, episodes: Sequence[Episode | None]) -> None:
        """Take notice of which episodes run: the latest of each lane."""
        self._ledger.follow(episodes)

    def close(self) -> None:
        """End the road. Idempotent."""
        self._client.close()

    def serve(self) -> None:
        """Take one request and answer it; at the end of the road, close it."""
        try:
            self._client.clear()
            request = self._client.connection.recv(frames.REQUEST_BYTES, socket.MSG_DONTWAIT)
            if len(request) < frames.REQUEST_BYTES:
                self.close()
                return
            number, timeout_ms = frames.unpack_request(request)
            self._client.send(self._answer(number, min(timeout_ms, LARGEST)))
        except BlockingIOError:
            return  # woken for nothing
        except OSError:  # the client is gone, or the endpoint has cut the road
            self.close()

    def _answer(self, number: int, timeout_ms: int) -> bytes:
        body = self._step(number, timeout_ms, lambda reply: self._body(number, reply))
        if body is None:
            return frames.pack_answer(number, frames.HANDED_OVER, 0)
        return frames.pack_answer(number, frames.DONE, len(body)) + body

    def _body(self, number: int, reply: Stepped) -> bytes:
        """Return what does not lie in the block; nothing, if that is all."""
        completed: tuple[EpisodeRecord, ...] = ()
        if reply.final_infos:
            terminated, truncated = self._results.terminated, self._results.truncated
            completed = self._ledger.completed(
                terminated.tobytes(), truncated.tobytes(), reply.final_infos, time.time_ns()
            )
        if not (reply.infos or completed):
            return b""
        done = StepDone(
            str(number),
            b"",
            (),
            b"",
            b"",
            as_texts(reply.infos),
            completed,
            self._ledger.episode_ids,
        )
        return pack_response(done, tag_arrays=self._tag_arrays)
