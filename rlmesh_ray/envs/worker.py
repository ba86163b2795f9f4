"""The env worker: hosts one environment and executes commands; a process has one or several.

``WorkerProcess`` runs ``python -m rlmesh_ray.envs.worker_guard SOCKET PARENT_PID FAULT_LOG``, which
runs ``main`` here; the socket brings a channel for each worker. It imports neither gRPC nor Ray.
"""

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.envs import commands
from rlmesh_ray.envs.env_source import build, explain_start_error
from rlmesh_ray.envs.vector_host import StepObserver, VectorHost, describe, encode_png
from rlmesh_ray.envs.worker_channel import (
    MAX_BYTES,
    WorkerChannel,
    decode,
    decode_command,
    encode,
    encode_reply,
)
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.polling import AdaptivePoller, use_batch_scheduling
from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.transport.direct_sockets import PICTURE_SIZE, EventfdSocket, TcpSocket
from rlmesh_ray.transport.exactly_once import ExecutionDecision, SessionProgress, WorkerSide
from rlmesh_ray.transport.step_buffers import StepBuffers

if TYPE_CHECKING:
    from rlmesh_ray.transport.direct_step_server import DirectStepServer


_Frames = list[NDArray[np.uint8]]
_STEP = commands.StepCommand()
_REFUSED = Failure(FailureKind.BAD_REQUEST, "the endpoint has answered it")


class EnvWorker:
    """The environment of one session, its state, and its direct connection; all owned.

    The endpoint reads ``progress``. ``descriptors`` is a socket that brings those of direct
    connections.
    """

    def __init__(
        self,
        host: VectorHost,
        buffers: StepBuffers,
        progress: SessionProgress,
        descriptors: socket.socket,
    ) -> None:
        self._host = host
        self._num_lanes = host.contract.num_envs
        self._own_buffers = self._buffers = buffers
        host.bind_buffers(buffers)
        host.note_resets_by(progress.note_resets)
        self._progress = progress
        self._requests = WorkerSide(progress)
        self._descriptors = descriptors
        self._num_deviations = 0  # how many values out of range the progress has counted
        columns = (column for column in buffers.observations if not isinstance(column, tuple))
        self._max_info_bytes = MAX_BYTES + 2 * sum(column.nbytes for column in columns)
        self.direct: DirectStepServer | None = None
        """The latest direct connection; it may be closed."""
        self._kept: commands.Outcome | _Frames = _REFUSED  # the reply to the last request
        self._handlers: dict[type, Callable[[Any], commands.Outcome]] = {
            commands.ResetCommand: self._reset,
            commands.StepCommand: self._step,
            commands.RenderCommand: host.render,
            commands.CallCommand: host.call,
            commands.OpenDirectCommand: self._open_direct,
            commands.CloseDirectCommand: self._close_direct,
        }

    def serve_direct(self, ready: Sequence[int]) -> None:
        """Answer a request of the direct connection, if one of its descriptors is ``ready``."""
        direct = self.direct
        wakeup = None if direct is None else direct.client.wakeup
        if direct is None or wakeup is None:
            return
        if wakeup.eventfd not in ready and wakeup.peer not in ready:
            return
        request = direct.receive()
        if request is None:
            return
        number, timeout_ms, is_render = request
        message: bytes | None = None
        pictures: _Frames = []
        if self._requests.executes_direct(number):
            self._progress.begin(number, timeout_ms)
            if is_render:
                message, pictures = self._draw_directly()
            else:
                message = self._step_directly(direct, number)
            self._progress.end()
        direct.answer(number, message, pictures)

    def _open_direct(self, command: commands.OpenDirectCommand) -> commands.Outcome:
        # Late: it imports protobuf, which nothing else here needs.
        from rlmesh_ray.transport.direct_step_server import DirectStepServer

        # The endpoint has disconnected the former one; its descriptors may be short.
        self.close_direct()
        self._requests.is_direct_open = False
        try:
            descriptors = _received_descriptors(self._descriptors, command.num_descriptors)
            client, shared = _opened(descriptors, self._host.contract)
        except OSError as error:
            return Failure(FailureKind.BAD_REQUEST, str(error))
        buffers = shared or self._own_buffers
        self._switch_buffers(buffers)
        self.direct = DirectStepServer(
            client, self._progress, buffers, tag_arrays=command.tag_arrays
        )
        return commands.DirectReply(is_open=True)

    def close_direct(self) -> None:
        if self.direct is not None:
            self.direct.close()

    def answer(self, number: int, command: commands.Command) -> bytes | None:
        """Return the encoded reply to a command; None: it has none.

        ``number`` is that of its request; 0: it is a command of the endpoint itself.
        """
        if isinstance(command, commands.SetEpisodesCommand):
            self._requests.is_direct_open = self.direct is not None and bool(command.episodes)
            if self.direct is not None and command.episodes:
                self.direct.set_episodes(command.episodes)
            return None
        if isinstance(command, commands.SkipRequestCommand):
            self._requests.skip(command.number)
            if self._progress.begun == command.number:
                self._kept = _REFUSED
            return None
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
            if isinstance(self._kept, Failure) and isinstance(
                command, (commands.ResetCommand, commands.StepCommand)
            ):
                self._requests.is_direct_open = False
            self._progress.end()
            return frame
        return self._encoded(self._kept)

    def _execute(self, command: commands.Command) -> commands.Outcome:
        try:
            return self._handlers[type(command)](command)
        except BaseException as error:  # noqa: BLE001  # outermost frame above the user's code
            is_stepped = isinstance(command, (commands.ResetCommand, commands.StepCommand))
            return failure(error, self._host.failure_place if is_stepped else "")

    def _encoded(self, reply: commands.Outcome | _Frames) -> bytes:
        try:
            if isinstance(reply, list):
                reply = commands.RenderReply(encode_png(reply) if reply else None)
            return encode_reply(reply, self._max_info_bytes)
        except BaseException as error:  # noqa: BLE001  # encoding runs code of the user's infos
            return encode_reply(failure(error))

    def close(self) -> None:
        self.close_direct()
        try:
            self._host.close()
        except BaseException:  # noqa: BLE001  # an error of user code must not end other workers
            traceback.print_exc()

    def _reset(self, command: commands.ResetCommand) -> commands.Outcome:
        self._progress.note_resets(0, len(command.lanes) or self._num_lanes)
        reply = self._host.reset(command)
        if isinstance(reply, commands.ResetReply):
            self._progress.count_reset(command.lanes)
        return reply

    def _step(self, command: commands.StepCommand) -> commands.Outcome:
        host, progress = self._host, self._progress
        reply = host.step(command)
        if isinstance(reply, commands.StepReply):
            results = self._buffers.results
            progress.count_step(
                results.rewards, results.terminated, results.truncated, command.lanes
            )
            if command.autoreset_lanes:
                progress.count_reset(command.autoreset_lanes)
            num_found = host.warnings.num_found
            num_deviations, self._num_deviations = num_found - self._num_deviations, num_found
            progress.count_vector_step(
                progress.elapsed_ns,
                len(command.lanes) or self._num_lanes,
                len(reply.final_infos),
                num_deviations,
            )
        return reply

    def _step_directly(self, direct: "DirectStepServer", number: int) -> bytes | None:
        """Return the message that answers a step of the direct connection; None: FALL_BACK."""
        direct.load()
        self._kept = reply = self._execute(_STEP)
        if isinstance(reply, commands.StepReply):
            try:
                if reply.infos or any(reply.final_infos.values()):
                    # Its infos become what the endpoint gets of them: an object is its repr.
                    self._kept = reply = decode(encode_reply(reply, self._max_info_bytes))
                return direct.message(number, reply.infos, reply.final_infos)
            except BaseException as error:  # noqa: BLE001  # encoding runs code of the user's infos
                self._kept = failure(error)
        self._requests.is_direct_open = False
        return None

    def _draw_directly(self) -> tuple[bytes | None, _Frames]:
        """Return the size of the lanes' pictures, and these; no size for FALL_BACK."""
        # Late, as in _open_direct.
        from rlmesh_ray.wire.rlmesh_v1.limits import max_response_bytes

        frames: _Frames = []
        try:
            self._kept = frames = self._host.draw()
        except BaseException as error:  # noqa: BLE001  # outermost frame above the user's code
            self._kept = failure(error)
        are_alike = len(frames) == self._num_lanes and len({frame.shape for frame in frames}) == 1
        if not (are_alike and frames[0].ndim == 3 and frames[0].shape[2] == 3):
            return None, []
        num_bytes = PICTURE_SIZE.size + sum(frame.nbytes for frame in frames)
        if num_bytes > max_response_bytes(self._host.contract):
            return None, []
        return PICTURE_SIZE.pack(*frames[0].shape[:2]), frames

    def _close_direct(self, _: commands.CloseDirectCommand) -> commands.Outcome:
        self.close_direct()
        self._switch_buffers(self._own_buffers)
        return commands.DirectReply(is_open=False)

    def _switch_buffers(self, buffers: StepBuffers) -> None:
        # Lanes that a step leaves out keep their observations and results.
        buffers.sent_parts[1][:] = self._buffers.sent_parts[1]
        self._buffers = buffers
        self._host.bind_buffers(buffers)


def failure(error: BaseException, place: str = "") -> Failure:
    report = traceback.TracebackException.from_exception(error)
    text = " ".join(str(report).split())
    name = type(error).__name__
    message = (f"{name}: {text}" if text else name) + (place and f",{place}")
    return Failure(FailureKind.RAISED, message, "".join(report.format()))


def _started(channel: WorkerChannel, start: commands.Start) -> EnvWorker | None:
    source = start.source
    sys.path[:] = start.sys_path
    if start.pythonpath is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = start.pythonpath
    try:
        vector = build(source, start.validation)
        observer: StepObserver | None = None
        if source.observer is not None:
            observer = pickle.loads(source.observer)(describe(vector, source.description))
        host = VectorHost(vector, start.validation, source.description, observer)
        started = encode(commands.Started(host.contract, host.steps_subsets, os.getpid()))
    except BaseException as error:  # noqa: BLE001  # outermost frame above the user's code
        message = f"cannot create {source.description}: {explain_start_error(error)}"
        # Its subclasses are about what an environment turns out to have.
        is_wrong_usage = type(error) is ConfigurationError
        channel.send(encode(commands.StartFailed(message, traceback.format_exc(), is_wrong_usage)))
        return None
    channel.send(started)
    buffers, memory, descriptor_socket = _received_descriptors(channel.connection, 3)
    worker = EnvWorker(
        host,
        StepBuffers(buffers, host.contract),
        SessionProgress.mapped(memory, host.contract.num_envs),
        socket.socket(fileno=descriptor_socket),
    )
    os.close(buffers)
    os.close(memory)
    return worker


class WorkerLoop:
    """Serves the commands and the direct connections of the process's workers.

    ``control``, which is owned, brings the descriptor of a channel for each of them.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        # By their channels; None: the first message, ``Start``, has not come.
        self._workers: dict[WorkerChannel, EnvWorker | None] = {}
        # Between two steps a client computes, perhaps on this processor; an endpoint hardly does.
        self._direct_poller = AdaptivePoller(0.2e-3)
        self._channel_poller = AdaptivePoller(1.5e-3)
        os.register_at_fork(after_in_child=self._close_descriptors)

    def run(self) -> None:
        while self._control.fileno() >= 0 or self._workers:
            ready = self._wait()
            if self._control.fileno() in ready:
                self._accept()
            for channel, worker in tuple(self._workers.items()):
                # The channel first: the client may send a step because of a command's effect.
                if channel.has_message or channel.connection.fileno() in ready:
                    self._serve_channel(channel, worker)
                elif worker is not None:
                    worker.serve_direct(ready)

    def _close_descriptors(self) -> None:
        self._control.close()
        for channel, worker in self._workers.items():
            channel.connection.close()
            if worker is not None:
                worker.close_direct()

    def _wait(self) -> Sequence[int]:
        descriptors = [self._control.fileno()] if self._control.fileno() >= 0 else []
        peers: list[int] = []
        for channel, worker in self._workers.items():
            if channel.has_message:
                return ()
            descriptors.append(channel.connection.fileno())
            direct = None if worker is None else worker.direct
            wakeup = None if direct is None else direct.client.wakeup
            if wakeup is not None:
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
            self._workers[channel] = None

    def _serve_channel(self, channel: WorkerChannel, worker: EnvWorker | None) -> None:
        """Handle the channel's next message; end a worker that gets no further ones."""
        is_over = False
        try:
            message = channel.receive()
            if worker is None:
                self._workers[channel] = _started(channel, message)
                is_over = self._workers[channel] is None
            else:
                reply = worker.answer(*message)
                if reply is not None:
                    channel.send(reply)
        except (EOFError, OSError) as error:  # the endpoint sends nothing more, or is gone
            if not isinstance(error, (EOFError, ConnectionError)):
                sys.stderr.write(f"{error}\n")
            is_over = True
        if is_over:
            del self._workers[channel]
            if worker is not None:
                worker.close()
            # Not before: the endpoint waits for what an observer hands over.
            channel.connection.close()


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

    The descriptors of the OpenDirectCommand are owned, also where this raises OSError.
    """
    direct, *shared = descriptors
    buffers: StepBuffers | None = None
    client: EventfdSocket | TcpSocket
    with contextlib.ExitStack() as owned:
        connection = owned.enter_context(socket.socket(fileno=direct))
        if shared:
            memory, *eventfds = shared
            for descriptor in eventfds:
                owned.callback(os.close, descriptor)
            try:
                buffers = StepBuffers(memory, contract)
            finally:
                os.close(memory)
            client = EventfdSocket(connection, *eventfds)
        else:
            client = TcpSocket(connection)
        owned.pop_all()
    return client, buffers


def main() -> None:
    socket_descriptor, _, fault_log_descriptor = map(int, sys.argv[1:])
    del sys.argv[1:]  # some simulators read the command line
    os.set_inheritable(socket_descriptor, False)
    # Ctrl-C is the parent's, which stops this process. A handler rather than SIG_IGN, which
    # processes of the environment would inherit.
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    os.set_inheritable(fault_log_descriptor, False)
    faulthandler.enable(fault_log_descriptor)
    use_batch_scheduling()
    WorkerLoop(socket.socket(fileno=socket_descriptor)).run()
