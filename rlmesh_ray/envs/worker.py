"""The env worker: hosts one environment and executes commands; a process has one or several.

``ChildProcess`` runs ``python -m rlmesh_ray.envs.worker_guard SOCKET PARENT_PID FAULT_LOG SPIN``,
which runs ``main`` here; the socket brings a channel for each worker. It imports neither gRPC nor
Ray.
"""

import contextlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.envs import fault_log
from rlmesh_ray.envs.commands import (
    CallCommand,
    CloseDirectCommand,
    CloseDirectReply,
    Command,
    OpenDirectCommand,
    OpenDirectRefused,
    OpenDirectReply,
    Outcome,
    RenderCommand,
    RenderReply,
    ResetCommand,
    ResetReply,
    SetEpisodesCommand,
    SkipRequestCommand,
    Start,
    Started,
    StartFailed,
    StepCommand,
    StepReply,
    StopCommand,
)
from rlmesh_ray.envs.compact_frames import compact_reply_frame, decode_command
from rlmesh_ray.envs.env_source import build, explain_start_error
from rlmesh_ray.envs.lane_vector_env import LaneVectorEnv
from rlmesh_ray.envs.reply_limits import MAX_BYTES, encode_reply, limit_reply
from rlmesh_ray.envs.vector_host import StepObserver, VectorHost, describe, encode_png
from rlmesh_ray.envs.worker_channel import WorkerChannel, encode
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.polling import AdaptivePoller, WakeupDescriptors, use_batch_scheduling
from rlmesh_ray.protocol.episodes import EpisodeStart
from rlmesh_ray.protocol.failure_effects import Failure, FailureKind
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.transport.anonymous_memory import map_progress
from rlmesh_ray.transport.direct_frames import PICTURE_SIZE_BYTES
from rlmesh_ray.transport.exactly_once import ExecutionDecision, WorkerSide
from rlmesh_ray.transport.session_progress import SessionProgress
from rlmesh_ray.transport.shared_memory import EventfdSocket
from rlmesh_ray.transport.step_buffers import StepBuffers
from rlmesh_ray.transport.tcp import TcpSocket

if TYPE_CHECKING:
    from rlmesh_ray.transport.direct_step_server import DirectStepServer


_Frames = list[NDArray[np.uint8]]
_STEP = StepCommand()
_REFUSED = Failure(FailureKind.BAD_REQUEST, "the endpoint has answered it")


class EnvWorker:
    """The environment of a worker, its session state, and its direct connection.

    Args:
        start: The environment to create.

    Raises:
        BaseException: Also any exception of the environment's code.
    """

    def __init__(self, start: Start) -> None:
        vector = build(
            start.payload,
            start.num_envs,
            autoresets=start.autoresets,
            truncates_at=start.validation if start.truncates else None,
            reset_threads=start.reset_threads,
        )
        if isinstance(vector, LaneVectorEnv):
            vector.note_resets = lambda *resets: self._progress.note_resets(*resets)
        self._observer: StepObserver | None = None
        if start.observer is not None:
            self._observer = pickle.loads(start.observer)(describe(vector, start.description))
        self._host = VectorHost(vector, start.validation, start.description, self._observer)
        # The worker's own, and the present ones, which a shared-memory connection replaces.
        self._own_buffers: StepBuffers | None = None
        self._buffers: StepBuffers | None = None
        self._direct: DirectStepServer | None = None
        self._descriptors: socket.socket | None = None
        self._max_info_bytes = MAX_BYTES
        self._progress = SessionProgress.local(self.contract.num_envs)
        self._requests = WorkerSide(self._progress)
        self._kept: Outcome | _Frames = _REFUSED
        """Reply to the last request."""
        self._handlers: dict[type, Callable[[Any], Outcome]] = {
            ResetCommand: self._reset,
            StepCommand: self._step,
            RenderCommand: self._render,
            CallCommand: lambda command: self._host.call(command),
            OpenDirectCommand: self._open_direct,
            CloseDirectCommand: lambda _: self._close_direct(),
        }

    @property
    def contract(self) -> EnvContract:
        """The environment's contract."""
        return self._host.contract

    @property
    def steps_subsets(self) -> bool:
        """See ``Started``."""
        return self._host.steps_subsets

    @property
    def direct(self) -> "DirectStepServer | None":
        """The direct connection, if one is open."""
        return None if self._direct is None or self._direct.wakeup is None else self._direct

    def attach_memory(
        self, buffers: StepBuffers, progress: SessionProgress, descriptors: socket.socket
    ) -> None:
        """Use the memory and the socket that the endpoint has created for this process.

        Args:
            buffers: Step buffers, unless a direct connection brings others.
            progress: Progress of the session.
            descriptors: Socket for the descriptors of direct connections.
        """
        self._progress = progress
        self._requests = WorkerSide(progress)
        self._descriptors = descriptors
        columns = (column for column in buffers.observations if not isinstance(column, tuple))
        self._max_info_bytes = MAX_BYTES + 2 * sum(column.nbytes for column in columns)
        self._own_buffers = buffers
        self._bind_buffers(buffers)

    def _open_direct(self, command: OpenDirectCommand) -> Outcome:
        # Late: it imports protobuf, which nothing else here needs.
        from rlmesh_ray.transport.direct_step_server import DirectStepServer

        assert self._descriptors is not None, "attach_memory was called"
        assert self._own_buffers is not None, "attach_memory was called"
        # The endpoint has disconnected the former one; its descriptors may be short.
        self.close_direct()
        self._requests.refuse_direct()
        try:
            descriptors = _received_descriptors(self._descriptors, command.num_descriptors)
            client, shared = _opened(descriptors, self.contract)
        except OSError as error:
            return OpenDirectRefused(str(error))
        buffers = shared or self._own_buffers
        self._switch_buffers(buffers)
        self._direct = DirectStepServer(
            client,
            self._progress,
            buffers,
            self._step_directly,
            self._draw_directly,
            tag_arrays=command.tag_arrays,
        )
        return OpenDirectReply()

    def set_episodes(self, episodes: Sequence[EpisodeStart | None]) -> None:
        """Accept direct steps of these episodes; refuse all of them where there are none."""
        if self._direct is not None and episodes:
            self._direct.set_episodes(episodes)
            self._requests.accept_direct()
        else:
            self._requests.refuse_direct()

    def skip_request(self, number: int) -> None:
        """Skip a request that the endpoint has answered itself."""
        self._requests.skip(number)
        self._kept = _REFUSED if self._progress.begun == number else self._kept

    def close_direct(self) -> None:
        """Close the direct connection, if there is one."""
        if self._direct is not None:
            self._direct.close()

    def answer(self, number: int, command: Command) -> bytes:
        """Return the encoded reply to ``command``.

        Args:
            number: Number of the request; 0 for a command of the endpoint itself.
            command: The command.
        """
        if not number:
            return self._encoded(self._execute(command))
        decision = self._requests.decide(number)
        if decision is ExecutionDecision.REFUSE:
            last = self._progress.begun
            message = f"request {number} is out of order: the last one was {last}"
            return encode_reply(Failure(FailureKind.OUT_OF_ORDER, message))
        if decision is ExecutionDecision.EXECUTE:
            self._progress.begin(number, 0)
            self._kept = self._execute(command)
            frame = self._encoded(self._kept)
            if isinstance(self._kept, Failure) and isinstance(command, (ResetCommand, StepCommand)):
                self._requests.refuse_direct()
            self._progress.end()
            return frame
        return self._encoded(self._kept)

    def _execute(self, command: Command) -> Outcome:
        """Execute ``command``; any exception becomes a Failure."""
        try:
            return self._handlers[type(command)](command)
        except BaseException as error:  # noqa: BLE001  # outermost frame above the user's code
            is_stepped = isinstance(command, (ResetCommand, StepCommand))
            return failure(error, self._host.failure_place if is_stepped else "")

    def _encoded(self, reply: Outcome | _Frames) -> bytes:
        try:
            if isinstance(reply, list):
                reply = RenderReply(encode_png(reply) if reply else None)
            return compact_reply_frame(reply) or encode_reply(reply, self._max_info_bytes)
        except BaseException as error:  # noqa: BLE001  # encoding runs code of the user's infos
            return encode_reply(failure(error))

    def close(self) -> None:
        """Close the environment and the observer."""
        if self._observer is not None:  # first: the environment may end the process, or hang
            self._observer.hand_over()
        try:
            self._host.close()
        finally:
            if self._observer is not None:
                self._observer.close()

    def _reset(self, command: ResetCommand) -> Outcome:
        num_lanes = self.contract.num_envs
        self._progress.note_resets(0, len(command.lanes) or num_lanes)
        reply = self._host.reset(command)
        if isinstance(reply, ResetReply):
            self._progress.count_reset(command.lanes)
        return reply

    def _render(self, command: RenderCommand) -> Outcome:
        began_s = time.perf_counter()
        reply = self._host.render(command)
        if isinstance(reply, RenderReply):
            return RenderReply(reply.png, time.perf_counter() - began_s)
        return reply

    def _step(self, command: StepCommand) -> Outcome:
        reply = self._host.step(command)
        if isinstance(reply, StepReply):
            assert self._buffers is not None, "attach_memory was called"
            results = self._buffers.results
            self._progress.count_step(
                results.rewards, results.terminated, results.truncated, command.lanes
            )
            if command.autoreset_lanes:
                self._progress.count_reset(command.autoreset_lanes)
            self._progress.count_vector_step(
                self._progress.elapsed_ns,
                len(command.lanes) or self.contract.num_envs,
                len(reply.final_infos),
                self._host.take_num_deviations(),
            )
        return reply

    def _step_directly(
        self,
        number: int,
        timeout_ms: int,
        load: Callable[[], None],
        pack: Callable[[StepReply], bytes],
    ) -> bytes | None:
        """Execute a step of the direct connection (``DirectStepServer``'s ``step``)."""
        if not self._requests.executes_direct(number):
            return None
        self._progress.begin(number, timeout_ms)
        load()
        self._kept = self._execute(_STEP)
        body = None
        if isinstance(self._kept, StepReply):
            try:
                plain = limit_reply(self._kept, self._max_info_bytes)
                assert isinstance(plain, StepReply), "limit_reply keeps the type"
                self._kept, body = plain, pack(plain)
            except BaseException as error:  # noqa: BLE001  # encoding runs code of the user's infos
                self._kept = failure(error)
        if body is None:
            self._requests.refuse_direct()
        self._progress.end()
        return body

    def _draw_directly(self, number: int, timeout_ms: int) -> _Frames:
        """Execute a Render of the direct connection (``DirectStepServer``'s ``draw``)."""
        # Late, as in _open_direct.
        from rlmesh_ray.wire.rlmesh_v1.limits import max_response_bytes

        if not self._requests.executes_direct(number):
            return []
        self._progress.begin(number, timeout_ms)
        frames: _Frames = []
        try:
            self._kept = frames = self._host.draw()
        except BaseException as error:  # noqa: BLE001  # outermost frame above the user's code
            self._kept = failure(error)
        self._progress.end()
        shapes = {frame.shape for frame in frames}
        are_alike = len(frames) == self.contract.num_envs and len(shapes) == 1
        if not (are_alike and frames[0].ndim == 3 and frames[0].shape[2] == 3):
            return []
        num_bytes = PICTURE_SIZE_BYTES + sum(frame.nbytes for frame in frames)
        return frames if num_bytes <= max_response_bytes(self.contract) else []

    def _close_direct(self) -> Outcome:
        self.close_direct()
        if self._own_buffers is not None:
            self._switch_buffers(self._own_buffers)
        return CloseDirectReply()

    def _bind_buffers(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        self._host.bind_buffers(buffers)

    def _switch_buffers(self, buffers: StepBuffers) -> None:
        """Use ``buffers`` from now on, with the present observations and results."""
        assert self._buffers is not None, "attach_memory was called"
        for new, old in zip(buffers.observations, self._buffers.observations, strict=True):
            if not isinstance(new, tuple):
                new[...] = old
        own, former = buffers.results, self._buffers.results
        own.rewards[:], own.terminated[:] = former.rewards, former.terminated
        own.truncated[:] = former.truncated
        self._bind_buffers(buffers)


def failure(error: BaseException, place: str = "") -> Failure:
    """Return the Failure for an exception of the environment.

    Args:
        error: The exception.
        place: Lane and step, as the end of a sentence.
    """
    report = traceback.TracebackException.from_exception(error)
    text = " ".join(str(report).split())
    name = type(error).__name__
    message = (f"{name}: {text}" if text else name) + (place and f",{place}")
    return Failure(FailureKind.RAISED, message, "".join(report.format()))


class _HostedWorker:
    """A worker with its channel; it begins with the channel's first message."""

    def __init__(self, channel: WorkerChannel) -> None:
        self.channel = channel
        self._worker: EnvWorker | None = None

    @property
    def wakeup(self) -> WakeupDescriptors | None:
        """Descriptors to poll for a direct step; None: no direct connection is open."""
        direct = None if self._worker is None else self._worker.direct
        return None if direct is None else direct.wakeup

    def serve_direct(self) -> None:
        """Serve the open direct connection."""
        assert self._worker is not None
        assert self._worker.direct is not None, "wakeup says so"
        self._worker.direct.serve()

    def handle_message(self) -> bool:
        """Handle the channel's next message; return whether it was the last.

        Raises:
            EOFError: The endpoint is gone.
            OSError: The endpoint is gone.
        """
        message = self.channel.receive()
        return not (self._start(message) if self._worker is None else self._handle(*message))

    def close_descriptors(self) -> None:
        """Close the descriptors, as a process does that the environment forks."""
        self.channel.connection.close()
        if self._worker is not None:
            self._worker.close_direct()

    def close(self) -> None:
        """Close all that remains; the endpoint is told first, since this may take seconds."""
        self.close_descriptors()
        if self._worker is not None:
            try:
                self._worker.close()
            except BaseException:  # noqa: BLE001  # user code, whose failure must not end the others
                traceback.print_exc()

    def _start(self, start: Start) -> bool:
        """Create the environment; return whether there is one."""
        _adopt(start)
        channel = self.channel
        try:
            worker = EnvWorker(start)
            started = encode(Started(worker.contract, worker.steps_subsets, os.getpid()))
        except BaseException as error:  # noqa: BLE001  # outermost frame above the user's code
            message = f"cannot create {start.description}: {explain_start_error(error)}"
            # Its subclasses are about what an environment turns out to have.
            is_wrong_usage = type(error) is ConfigurationError
            channel.send(encode(StartFailed(message, traceback.format_exc(), is_wrong_usage)))
            return False
        channel.send(started)
        buffers, memory, descriptor_socket = _received_descriptors(channel.connection, 3)
        worker.attach_memory(
            StepBuffers(buffers, worker.contract),
            map_progress(memory, worker.contract.num_envs),
            socket.socket(fileno=descriptor_socket),
        )
        os.close(buffers)
        os.close(memory)
        self._worker = worker
        return True

    def _handle(self, number: int, command: Command) -> bool:
        """Execute a command; return whether the worker goes on."""
        worker = self._worker
        assert worker is not None, "it has started"
        match command:
            case StopCommand():
                return False
            case SetEpisodesCommand():
                worker.set_episodes(command.episodes)
            case SkipRequestCommand():
                worker.skip_request(command.number)
            case _:
                self.channel.send(worker.answer(number, command))
        return True


class WorkerLoop:
    """Serves the commands and the direct connections of the process's workers.

    Args:
        control: Brings the descriptor of a channel for each worker; owned.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._hosted: list[_HostedWorker] = []
        # Between two steps a client computes, perhaps on this processor; an endpoint hardly does.
        self._direct_poller = AdaptivePoller(0.2e-3)
        self._channel_poller = AdaptivePoller(1.5e-3)
        os.register_at_fork(after_in_child=self._close_descriptors)

    def run(self) -> None:
        """Serve until the endpoint has closed ``control`` and no worker is left."""
        while self._control.fileno() >= 0 or self._hosted:
            ready = self._wait()
            if self._control.fileno() in ready:
                self._accept()
            for hosted in tuple(self._hosted):
                self._serve(hosted, ready)

    def _close_descriptors(self) -> None:
        self._control.close()
        for hosted in self._hosted:
            hosted.close_descriptors()

    def _wait(self) -> Sequence[int]:
        """Wait until a worker has something to do; return the descriptors that are ready."""
        descriptors = [self._control.fileno()] if self._control.fileno() >= 0 else []
        peers: list[int] = []
        for hosted in self._hosted:
            if hosted.channel.has_message:
                return ()
            descriptors.append(hosted.channel.connection.fileno())
            if (wakeup := hosted.wakeup) is not None:
                descriptors.append(wakeup.eventfd)
                peers.append(wakeup.peer)
        poller = self._direct_poller if peers else self._channel_poller
        return poller.wait_readable(*descriptors, peers=peers)

    def _accept(self) -> None:
        try:
            (descriptor,) = _received_descriptors(self._control, 1)
        except EOFError:
            self._control.close()
        except OSError as error:
            sys.stderr.write(f"{error}\n")  # the endpoint sees that the channel has ended
        else:
            channel = WorkerChannel(socket.socket(fileno=descriptor), decode_command)
            self._hosted.append(_HostedWorker(channel))

    def _serve(self, hosted: _HostedWorker, ready: Sequence[int]) -> None:
        channel = hosted.channel
        # The channel first: the client may send a step because of a command's effect.
        if channel.has_message or channel.connection.fileno() in ready:
            self._handle_message(hosted)
        elif (wakeup := hosted.wakeup) and (wakeup.eventfd in ready or wakeup.peer in ready):
            hosted.serve_direct()

    def _handle_message(self, hosted: _HostedWorker) -> None:
        try:
            is_over = hosted.handle_message()
        except (EOFError, OSError) as error:
            if not isinstance(error, (EOFError, ConnectionError)):
                sys.stderr.write(f"{error}\n")
            is_over = True
        if is_over:
            self._hosted.remove(hosted)
            hosted.close()


def _received_descriptors(connection: socket.socket, count: int) -> list[int]:
    """Return the descriptors that are attached to the next byte.

    Raises:
        EOFError: The endpoint is gone.
        OSError: This process may not open so many descriptors.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, 1, count)
    if len(descriptors) < count:  # the system has dropped the others
        for descriptor in descriptors:
            os.close(descriptor)
        if not data:
            raise EOFError("the endpoint is gone")
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OSError(
            f"the environment's process may open only {limit} files (RLIMIT_NOFILE), and has no "
            "room for another connection; raise that limit (ulimit -n), or let the environment "
            "hold fewer files"
        )
    for descriptor in descriptors:  # processes of the environment must not inherit them
        os.set_inheritable(descriptor, False)
    return list(descriptors)


def _opened(
    descriptors: Sequence[int], contract: EnvContract
) -> tuple[EventfdSocket | TcpSocket, StepBuffers | None]:
    """Return the worker's end of a direct connection, and its step buffers if they are shared.

    Args:
        descriptors: The descriptors of an OpenDirectCommand; owned, also where this fails.
        contract: The environment's contract.

    Raises:
        OSError: A system resource is exhausted.
    """
    direct, *memory = descriptors
    with contextlib.ExitStack() as owned:
        connection = owned.enter_context(socket.socket(fileno=direct))
        for descriptor in memory[1:]:
            owned.callback(os.close, descriptor)
        if memory:
            try:
                buffers = StepBuffers(memory[0], contract)
            finally:
                os.close(memory[0])
            client = EventfdSocket(connection, *memory[1:])
            owned.pop_all()
            return client, buffers
        tcp = TcpSocket(connection)
        owned.pop_all()
        return tcp, None


def _adopt(start: Start) -> None:
    sys.path[:] = start.sys_path
    if start.pythonpath is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = start.pythonpath


def _ignore(number: int, frame: FrameType | None) -> None:
    """Ignore Ctrl-C: the parent handles it and stops this process."""


def main() -> None:
    """Run the worker process."""
    socket_descriptor, _, fault_log_descriptor = map(int, sys.argv[1:])
    del sys.argv[1:]  # some simulators read the command line
    os.set_inheritable(socket_descriptor, False)
    # A handler rather than SIG_IGN, which processes of the environment would inherit.
    signal.signal(signal.SIGINT, _ignore)
    fault_log.enable(fault_log_descriptor)
    use_batch_scheduling()
    WorkerLoop(socket.socket(fileno=socket_descriptor)).run()
