"""The line between the client and the worker of one session, as the endpoint supervises it.

See ``wire.line_v1`` for what a line is.
"""

from rlmesh_ray.envs.commands import (
    AttachCommand,
    AttachReply,
    DetachCommand,
    TrackCommand,
)
from rlmesh_ray.envs.lent_line import LentLine
from rlmesh_ray.protocol.episodes import Episode
from rlmesh_ray.protocol.outcomes import Failure
from rlmesh_ray.server.line_watch import LineWatch
from rlmesh_ray.server.loop import in_thread
from rlmesh_ray.server.session_worker import Deadline, SessionWorker

_MOST_DIGITS = 20  # of a number that a line can have


class SessionLine:
    """Lends the worker's line, keeps its deadlines, and knows what it has begun.

    Args:
        worker: The session's.
    """

    def __init__(self, worker: SessionWorker) -> None:
        self._worker = worker
        # The latest; it may have been cut.
        self._line: LentLine | None = None
        self._watch: LineWatch | None = None
        self._overdue: Failure | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a step is in progress over the line."""
        return self._line is not None and self._line.control.is_busy

    @property
    def num_begun(self) -> int:
        """Number of the last request that has begun over the line; 0: none."""
        return self._line.control.begun if self._line is not None else 0

    @property
    def _is_there(self) -> bool:
        return self._line is not None and not self._line.is_cut

    async def lend(self, timeout_ms: int, *, tag_arrays: bool) -> LentLine | None:
        """Let the client ask the worker for steps directly; None: there is no idle worker.

        To be called between requests. Steps are executed over the line after ``track``.

        Args:
            timeout_ms: What the client's steps may take.
            tag_arrays: Whether it knows arrays in infos.
        """
        process = self._worker.process
        if process is None or self._worker.is_finishing:
            return None
        # As long as a step: a worker that is stopped meanwhile must not cost the episodes.
        deadline = Deadline.after(timeout_ms)
        reply = await self._worker.call(AttachCommand(tag_arrays), deadline)
        if not isinstance(reply, AttachReply):
            return None
        begun = self.num_begun
        self.cut()
        try:
            line = process.lend_line()
        except OSError as error:
            self._worker.warn("no shared memory for a session: %s", error)
            await in_thread(process.kill)
            return None
        line.control.begin(begun, 0)
        line.control.end()
        self._line, self._overdue = line, None
        self._worker.counts.follow(line.control, process.contract.num_envs)
        self._watch = LineWatch(line.control, timeout_ms, self._end_overdue)
        return line

    def track(self, episodes: tuple[Episode, ...]) -> None:
        """Have steps of ``episodes`` executed over the line; none: hand them all over."""
        if self._is_there:
            self._worker.require().submit(TrackCommand(episodes))

    async def end(self) -> None:
        """Have the next requests come over the stream, after the step that is in progress."""
        if self._is_there and not self._worker.is_finishing:
            await self._worker.call(DetachCommand(), Deadline.after(0))
            self.cut()

    def cut(self) -> None:
        """End the line at once, if there is one."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None  # it knows us: memory would wait for the collector of such circles
        if self._line is not None and not self._line.is_cut:
            self._line.cut()
            self._worker.settle_line()
            self._worker.require().take_line_back()

    def number_of(self, request_id: str) -> int:
        """Return the number under which the line may have got a request; 0: it cannot have."""
        if self._line is None or not (request_id.isdecimal() and request_id.isascii()):
            return 0
        return int(request_id[:_MOST_DIGITS])

    def overdue(self, number: int) -> Failure | None:
        """Return the timeout failure of an overdue step; None: the step is not overdue."""
        is_late = self._line is not None and 0 < number <= self._line.control.begun
        return self._overdue if is_late else None

    def _end_overdue(self) -> bool:
        """Give up a step that has missed its deadline: its client hears of it on the stream."""
        assert self._line is not None, "only a line is watched"
        if not self._worker.is_idle:
            return False  # a request on the stream waits for the worker, with its own deadline
        timeout_ms = self._line.control.timeout_ms
        self._overdue = self._worker.timed_out("no result within", timeout_ms)
        self.cut()
        self._worker.call_in_vain(DetachCommand())
        return True
