"""The worker's end of a direct road: steps that a client asks for, past the endpoint.

Only what succeeds is answered here. A step that fails, or is not possible, is handed over: the
client asks for it again on its stream, and the endpoint passes that on with its number.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.protocol.episodes import EpisodeStart, EpisodeTracker
from rlmesh_ray.protocol.messages import EpisodeRecord, Infos, StepDone
from rlmesh_ray.spaces.conformance_warnings import warnings_as_texts
from rlmesh_ray.spaces.step_buffers import StepBuffers
from rlmesh_ray.transport import frames
from rlmesh_ray.transport.session_progress import SessionProgress
from rlmesh_ray.transport.shared_memory import EventfdSocket
from rlmesh_ray.transport.tcp import TcpSocket
from rlmesh_ray.wire.rlmesh_v1.env import pack_response

_LOG = logging.getLogger(__name__)

_NOTHING = memoryview(bytearray())
LARGEST = 2**63 - 1
"""Of a number or timeout: what a field of the progress holds."""


class StepInfos(Protocol):
    """What a step has given, beside what lies in the block."""

    @property
    def infos(self) -> Infos:
        """Of all lanes."""

    @property
    def final_infos(self) -> Mapping[int, Infos]:
        """By lane whose episode has ended."""


Step = Callable[[int, int, Callable[[], None], Callable[[StepInfos], bytes]], bytes | None]
"""Executes the step with this number and timeout if its turn has come: calls the first callable
before, and returns what the second one makes of its success, which belongs to the step. None: it is
handed over."""


class DirectStepServer:
    """Answers the steps of one session.

    Args:
        client: The other end; owned.
        progress: Of the session.
        buffers: Where ``step`` finds actions, and leaves what it gives.
        step: Applies the actions in the block.
        num_lanes: Width of the session.
        tag_arrays: Whether the client knows arrays in infos.
    """

    def __init__(
        self,
        client: EventfdSocket | TcpSocket,
        progress: SessionProgress,
        buffers: StepBuffers,
        step: Step,
        num_lanes: int,
        *,
        tag_arrays: bool,
    ) -> None:
        self._client = client
        self._results = buffers.results
        # What the client does not share travels with the frames.
        is_shared = isinstance(client, EventfdSocket)
        self._targets, self._answers = (_NOTHING, _NOTHING) if is_shared else buffers.sent_parts
        # The block may have the actions of a step that comes by the endpoint just now.
        self._actions = memoryview(bytearray(self._targets.nbytes))
        self._header = memoryview(bytearray(frames.REQUEST_BYTES))
        self._request = frames.FrameReader(self._header, self._actions)
        self._step = step
        self._progress = progress
        self._tag_arrays = tag_arrays
        self._tracker = EpisodeTracker(num_lanes, str, progress)  # the endpoint mints the ids

    @property
    def wakeup(self) -> WakeupDescriptors | None:
        """What tells of a request; None: the road has ended."""
        return self._client.wakeup

    def set_episodes(self, episodes: Sequence[EpisodeStart | None]) -> None:
        """Take notice of which episodes run: the latest of each lane."""
        self._tracker.set_episodes(episodes)

    def close(self) -> None:
        """Close this process's end, no other's: a fork of this process does, too. Idempotent."""
        self._client.close()

    def _end(self) -> None:
        # The endpoint has the connection, too: to close it here tells the client nothing.
        self._client.hang_up()
        self.close()

    def serve(self) -> None:
        """Receive a request, or a part of one, and answer it; at the end of the road, close it."""
        try:
            self._client.clear()
            self._request.receive(self._client.connection)
            if not self._request.is_complete:
                return
            self._request.num_received = 0
            number, timeout_ms, num_bytes = frames.unpack_request(self._header)
            if num_bytes != self._actions.nbytes:
                _LOG.warning(
                    "a direct connection is closed: step %d has %d bytes of actions, not %d",
                    number,
                    num_bytes,
                    self._actions.nbytes,
                )
                self._end()
                return
            self._client.send(*self._answer(number, min(timeout_ms, LARGEST)))
        except BlockingIOError:
            return  # woken for nothing
        except ConnectionError:  # the client is gone, or the endpoint has cut the road
            self._end()
        except OSError as error:
            _LOG.warning("a direct connection is closed: %s", error)
            self._end()

    def _answer(self, number: int, timeout_ms: int) -> tuple[bytes | memoryview, ...]:
        body = self._step(number, timeout_ms, self._load, lambda reply: self._body(number, reply))
        if body is None:
            return (frames.pack_answer(number, frames.FALL_BACK, 0, 0),)
        header = frames.pack_answer(number, frames.DONE, len(body), self._answers.nbytes)
        return header, self._answers, body

    def _load(self) -> None:
        """Have the actions that have come in the block."""
        self._targets[:] = self._actions

    def _body(self, number: int, reply: StepInfos) -> bytes:
        """Return what does not lie in the block; nothing, if that is all."""
        completed: tuple[EpisodeRecord, ...] = ()
        # Mostly the episodes that end are those that an autoreset has begun: nobody tracks them.
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
