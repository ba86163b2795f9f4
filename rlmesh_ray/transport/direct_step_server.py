"""DirectStepServer: the worker's end of a direct connection.

It answers successful steps only, and over shared memory requests for pictures. For any other it
sends FALL_BACK: the client sends the request again on the Join stream, and the endpoint forwards it
with its number.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.protocol.episodes import EpisodeStart, EpisodeTracker
from rlmesh_ray.protocol.messages import EpisodeRecord, Infos, StepDone
from rlmesh_ray.spaces.validation import warnings_as_texts
from rlmesh_ray.transport import direct_frames as frames
from rlmesh_ray.transport.session_progress import SessionProgress
from rlmesh_ray.transport.shared_memory import EventfdSocket
from rlmesh_ray.transport.step_buffers import StepBuffers
from rlmesh_ray.transport.tcp import TcpSocket
from rlmesh_ray.wire.rlmesh_v1.env import pack_response

_LOG = logging.getLogger(__name__)

_NOTHING = memoryview(bytearray())
_SEND_TIMEOUT_S = 1.0
LARGEST = 2**63 - 1
"""Largest number or timeout: an int64 field of the progress."""


class StepInfos(Protocol):
    """The parts of a step's result that are not in the step buffers."""

    @property
    def infos(self) -> Infos:
        """Infos of all lanes."""

    @property
    def final_infos(self) -> Mapping[int, Infos]:
        """Last infos of each ended episode, by lane."""


Step = Callable[[int, int, Callable[[], None], Callable[[StepInfos], bytes]], bytes | None]
"""Executes the step with this number and timeout, if it is the next: calls the first callable
before it, and the second one, which makes the answer's body, after its success. Returns the body;
None: answer FALL_BACK."""
Draw = Callable[[int, int], Sequence[NDArray[np.uint8]]]
"""Executes the Render with this number and timeout, if it is the next. Returns one picture per
lane, ``(height, width, 3)``, all of one size; empty: answer FALL_BACK."""


class DirectStepServer:
    """Serves the steps of one session.

    Args:
        client: The connected socket; owned.
        progress: The session's progress.
        buffers: The step buffers that ``step`` reads and writes.
        step: Executes a step on the step buffers.
        draw: Draws all lanes.
        tag_arrays: Whether the client has the capability NDARRAY.
    """

    def __init__(
        self,
        client: EventfdSocket | TcpSocket,
        progress: SessionProgress,
        buffers: StepBuffers,
        step: Step,
        draw: Draw,
        *,
        tag_arrays: bool,
    ) -> None:
        self.client = client
        """The connected socket."""
        self._results = buffers.results
        # Without shared memory the arrays are sent after the headers.
        is_shared = isinstance(client, EventfdSocket)
        self._targets, self._answers = (_NOTHING, _NOTHING) if is_shared else buffers.sent_parts
        self._draw = draw if is_shared else None
        if is_shared:  # a stopped client must not hold the process of other sessions
            client.limit_sending(_SEND_TIMEOUT_S)
        # Not into the step buffers: the endpoint may have written another step's actions there.
        self._actions = memoryview(bytearray(self._targets.nbytes))
        self._header = memoryview(bytearray(frames.REQUEST_BYTES))
        self._request = frames.FrameReader(self._header, self._actions)
        self._step = step
        self._progress = progress
        self._tag_arrays = tag_arrays
        # The endpoint creates the ids.
        self._tracker = EpisodeTracker(len(buffers.results.rewards), str, progress)

    def set_episodes(self, episodes: Sequence[EpisodeStart | None]) -> None:
        """Set the latest episode of each lane."""
        self._tracker.set_episodes(episodes)

    def close(self) -> None:
        """Close the descriptors of this process only, as a forked process does. Idempotent."""
        self.client.close()

    def _end(self) -> None:
        # Closing alone would not hang up: the endpoint has the same connection open.
        self.client.hang_up()
        self.close()

    def serve(self) -> None:
        """Receive a request, or a part of one, and answer it; close a connection that has ended."""
        try:
            self.client.clear()
            try:
                self._request.receive(self.client.connection)
            except BlockingIOError:
                return  # nothing has arrived
            if not self._request.is_complete:
                return
            self._request.num_received = 0
            number, timeout_ms, num_bytes = frames.unpack_request(self._header)
            timeout_ms = min(timeout_ms, LARGEST)
            if num_bytes == frames.RENDER and self._draw is not None:
                self._send_pictures(number, self._draw(number, timeout_ms))
            elif num_bytes == self._actions.nbytes:
                self.client.send(*self._answer(number, timeout_ms))
            else:
                _LOG.warning(
                    "a direct connection is closed: step %d has %d bytes of actions, not %d",
                    number,
                    num_bytes,
                    self._actions.nbytes,
                )
                self._end()
        except ConnectionError:  # the client is gone, or the endpoint has disconnected
            self._end()
        except OSError as error:  # or BlockingIOError: the client does not take the answer
            _LOG.warning("a direct connection is closed: %s", error)
            self._end()

    def _send_pictures(self, number: int, pictures: Sequence[NDArray[np.uint8]]) -> None:
        if not pictures:
            self.client.send(frames.pack_answer(number, frames.FALL_BACK, 0, 0))
            return
        height, width, _ = pictures[0].shape
        size = frames.PICTURE_SIZE_BYTES + sum(picture.nbytes for picture in pictures)
        header = frames.pack_answer(number, frames.DONE, size, 0)
        self.client.send(header, frames.pack_picture_size(height, width))
        for picture in pictures:  # one after the other: together they would be copied once more
            self.client.connection.sendall(np.ascontiguousarray(picture).data)

    def _answer(self, number: int, timeout_ms: int) -> tuple[bytes | memoryview, ...]:
        body = self._step(number, timeout_ms, self._load, lambda reply: self._body(number, reply))
        if body is None:
            return (frames.pack_answer(number, frames.FALL_BACK, 0, 0),)
        header = frames.pack_answer(number, frames.DONE, len(body), self._answers.nbytes)
        return header, self._answers, body

    def _load(self) -> None:
        """Copy the received actions into the step buffers."""
        self._targets[:] = self._actions

    def _body(self, number: int, reply: StepInfos) -> bytes:
        """Return the JoinResponse with infos and records; empty without any."""
        completed: tuple[EpisodeRecord, ...] = ()
        # Most ended episodes were begun by an autoreset and are not tracked.
        if reply.final_infos and 1 in self._progress.before.is_tracked.tobytes():
            terminated, truncated = self._results.terminated, self._results.truncated
            completed = self._tracker.completed(
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
            warnings_as_texts(reply.infos),
            completed,
            self._tracker.episode_ids,
        )
        return pack_response(done, tag_arrays=self._tag_arrays)
