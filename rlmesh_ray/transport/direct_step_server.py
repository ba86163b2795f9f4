"""DirectStepServer: the worker's end of a direct connection.

It answers successful steps only, and over shared memory requests for pictures. For any other it
sends FALL_BACK: the client sends the request again on the Join stream, and the endpoint forwards it
with its number.
"""

import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.protocol.env_session import EpisodeStart, EpisodeTracker
from rlmesh_ray.protocol.messages import EpisodeRecord, Infos, StepDone
from rlmesh_ray.spaces.validation import warnings_as_texts
from rlmesh_ray.transport import direct_sockets as frames
from rlmesh_ray.transport.direct_sockets import EventfdSocket, TcpSocket
from rlmesh_ray.transport.exactly_once import SessionProgress
from rlmesh_ray.transport.step_buffers import StepBuffers
from rlmesh_ray.wire.rlmesh_v1.env import pack_response

_LOG = logging.getLogger(__name__)

_NOTHING = memoryview(bytearray())
_SEND_TIMEOUT_S = 1.0
_LONGEST_TIMEOUT_MS = 2**63 - 1  # an int64 field of the progress


class DirectStepServer:
    """Receives the requests of one session's client, and sends the worker's answers."""

    def __init__(
        self,
        client: EventfdSocket | TcpSocket,
        progress: SessionProgress,
        buffers: StepBuffers,
        *,
        tag_arrays: bool,
    ) -> None:
        self.client = client
        self._results = buffers.results
        # Without shared memory the arrays are sent after the headers.
        self._is_shared = isinstance(client, EventfdSocket)
        self._targets, self._answers = (
            (_NOTHING, _NOTHING) if self._is_shared else buffers.sent_parts
        )
        if self._is_shared:  # a stopped client must not hold the process of other sessions
            client.limit_sending(_SEND_TIMEOUT_S)
        # Not into the step buffers: the endpoint may have written another step's actions there.
        self._actions = memoryview(bytearray(self._targets.nbytes))
        self._header = memoryview(bytearray(frames.REQUEST.size))
        self._num_received = 0
        """Bytes of the present request."""
        self._progress = progress
        self._tag_arrays = tag_arrays
        # The endpoint creates the ids.
        self._tracker = EpisodeTracker(len(buffers.results.rewards), str, progress)

    def set_episodes(self, episodes: Sequence[EpisodeStart | None]) -> None:
        self._tracker.set_episodes(episodes)

    def close(self) -> None:
        """Close the descriptors of this process only, as a forked process does. Idempotent."""
        self.client.close()

    def _end(self, error: OSError | None = None) -> None:
        # Else the client is gone, or the endpoint has disconnected.
        if error is not None and not isinstance(error, ConnectionError):
            _LOG.warning("a direct connection is closed: %s", error)
        # Closing alone would not hang up: the endpoint has the same connection open.
        self.client.hang_up()
        self.close()

    def receive(self) -> tuple[int, int, bool] | None:
        """Receive a request, or a part of one; close a connection that has ended.

        Returns:
            Number, timeout in ms, and whether it is a Render instead of a Step; None: there is no
            whole request.
        """
        try:
            places = self._header, self._actions
            self._num_received += self.client.receive(places, self._num_received)
        except BlockingIOError:
            return None  # nothing has arrived
        except OSError as error:
            self._end(error)
            return None
        if self._num_received < frames.REQUEST.size + self._actions.nbytes:
            return None
        self._num_received = 0
        number, timeout_ms, num_bytes = frames.REQUEST.unpack(self._header)
        is_render = num_bytes == frames.RENDER and self._is_shared
        if not is_render and num_bytes != self._actions.nbytes:
            _LOG.warning(
                "a direct connection is closed: step %d has %d bytes of actions, not %d",
                number,
                num_bytes,
                self._actions.nbytes,
            )
            self._end()
            return None
        return number, min(timeout_ms, _LONGEST_TIMEOUT_MS), is_render

    def load(self) -> None:
        """Write the actions of the request into the step buffers, before its step."""
        self._targets[:] = self._actions

    def answer(
        self, number: int, message: bytes | None, pictures: Sequence[NDArray[np.uint8]] = ()
    ) -> None:
        """Answer with a message, and ``pictures`` of the size that it names; None: FALL_BACK."""
        try:
            if message is None:
                self.client.send(frames.ANSWER.pack(number, frames.FALL_BACK, 0, 0))
                return
            size = len(message) + sum([picture.nbytes for picture in pictures])
            header = frames.ANSWER.pack(number, frames.DONE, size, self._answers.nbytes)
            self.client.send(header, self._answers, message)
            for picture in pictures:  # one after the other: together they would be copied once more
                self.client.connection.sendall(np.ascontiguousarray(picture).data)
        except OSError as error:  # also BlockingIOError: the client does not take the answer
            self._end(error)

    def message(self, number: int, infos: Infos, final_infos: Mapping[int, Infos]) -> bytes:
        """Return the JoinResponse with infos and records of a step; empty without any."""
        completed: tuple[EpisodeRecord, ...] = ()
        # Most ended episodes were begun by an autoreset and are not tracked.
        if final_infos and 1 in self._progress.before.is_tracked.tobytes():
            terminated, truncated = self._results.terminated, self._results.truncated
            completed = self._tracker.completed(
                terminated.tobytes(), truncated.tobytes(), final_infos, time.time_ns()
            )
        if not (infos or completed):
            return b""
        infos = warnings_as_texts(infos)
        ids = self._tracker.episode_ids
        done = StepDone(str(number), b"", (), b"", b"", infos, completed, ids)
        return pack_response(done, tag_arrays=self._tag_arrays)
