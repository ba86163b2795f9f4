"""The worker's end of a line: steps that a client on this machine asks for directly.

Only what succeeds is answered here. A step that fails, or is not possible, is handed over: the
client asks for it again on its stream, and the endpoint passes that on with its number. The worker
executes each number once, whichever way it comes first.
"""

import socket
import time
from collections.abc import Callable, Sequence

from rlmesh_ray.envs.commands import StepReply
from rlmesh_ray.envs.line_control import LineControl
from rlmesh_ray.protocol.episodes import Episode, EpisodeLedger
from rlmesh_ray.protocol.messages import EpisodeRecord, StepDone
from rlmesh_ray.protocol.outcomes import Failure, FailureKind
from rlmesh_ray.spaces.block import Results
from rlmesh_ray.spaces.warnings import as_texts
from rlmesh_ray.waiting import BelledSocket, Signal
from rlmesh_ray.wire import line_v1 as frames
from rlmesh_ray.wire.rlmesh_v1.env import pack_response

_LARGEST = 2**63 - 1  # what a field of the control holds


class LineEnd:
    """Answers the steps of one session.

    Args:
        client: The other end; owned.
        control: Shared with the endpoint.
        results: Where ``step`` leaves rewards and flags.
        step: Applies the actions in the block; its infos are plain.
        num_lanes: Width of the session.
        tag_arrays: Whether the client knows arrays in infos.
    """

    def __init__(
        self,
        client: BelledSocket,
        control: LineControl,
        results: Results,
        step: Callable[[], StepReply | Failure],
        num_lanes: int,
        *,
        tag_arrays: bool,
    ) -> None:
        self._client = client
        self._control = control
        self._results = results
        self._step = step
        self._tag_arrays = tag_arrays
        self._ledger = EpisodeLedger(num_lanes, str)  # the endpoint mints the ids
        self._is_open = False
        self._failure: Failure | None = None

    @property
    def signal(self) -> Signal | None:
        """What tells of a request; None: the line has ended."""
        return self._client.signal

    def open(self, episodes: Sequence[Episode]) -> None:
        """Execute steps from now on, of these episodes."""
        self._ledger.join(self._control.tally, episodes)
        self._is_open = True

    def shut(self) -> None:
        """Hand over whatever is asked for until ``open``."""
        self._is_open = False

    def close(self) -> None:
        """End the line. Idempotent."""
        self._client.close()

    def claim(self, number: int) -> Failure | None:
        """Leave request ``number`` to the endpoint, which has got it on the stream.

        Also after the end of the line: what lies unread there is not executed any more.

        Returns:
            What became of it, if it has been executed over the line, and its answer got lost.
        """
        if number <= self._control.begun:
            lost = Failure(FailureKind.TIMEOUT, "the step was done, but its answer got lost")
            return self._failure or lost
        if number <= _LARGEST:
            self._control.begin(number, 0)
            self._control.end()
        return None

    def serve(self) -> None:
        """Take one request and answer it; at the end of the line, close it."""
        try:
            self._client.hush()
            request = self._client.connection.recv(frames.REQUEST_BYTES, socket.MSG_DONTWAIT)
            if len(request) < frames.REQUEST_BYTES:
                self.close()
                return
            number, timeout_ms = frames.unpack_request(request)
            answer = self._answer(number, timeout_ms) if self._is_open else None
            if answer is None:
                answer = frames.pack_answer(number, frames.HANDED_OVER, 0)
            self._client.send(answer)
        except BlockingIOError:
            return  # rung for nothing
        except OSError:  # the client is gone, or the endpoint has cut the line
            self.close()

    def _answer(self, number: int, timeout_ms: int) -> bytes | None:
        """Execute a step; return its answer, or None where there is none to give here."""
        if not self._control.begun < number <= _LARGEST:
            return None
        self._control.begin(number, min(timeout_ms, _LARGEST))
        self._failure = None
        try:
            outcome = self._step()
            if isinstance(outcome, Failure):
                self._failure, self._is_open = outcome, False
                return None
            self._control.count(len(outcome.final_infos), outcome.num_deviations)
            body = self._body(number, outcome)
        finally:
            self._control.end()
        return frames.pack_answer(number, frames.DONE, len(body)) + body

    def _body(self, number: int, reply: StepReply) -> bytes:
        """Return what does not lie in the block; nothing, if that is all."""
        completed: tuple[EpisodeRecord, ...] = ()
        if self._ledger.is_tracking:
            rewards, terminated, truncated = (
                self._results.rewards.tolist(),
                self._results.terminated.tobytes(),
                self._results.truncated.tobytes(),
            )
            completed = self._ledger.step(
                rewards, terminated, truncated, reply.final_infos, time.time_ns()
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
