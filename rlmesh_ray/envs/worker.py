"""The worker process: hosts one environment and answers commands until it is told to stop.

Started by ``WorkerProcess`` as ``python -m rlmesh_ray.envs.worker SOCKET PARENT_PID LAST_WORDS``;
the lifeline is its standard input. It imports neither gRPC nor Ray: those belong to the endpoint.
"""

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from rlmesh_ray.envs import last_words, lifeline
from rlmesh_ray.envs.bare_steps import MESSAGES, frame_of_bare
from rlmesh_ray.envs.bounded import MAX_BYTES, encode_reply
from rlmesh_ray.envs.channel import Channel, decode, encode
from rlmesh_ray.envs.commands import (
    AttachCommand,
    AttachReply,
    CallCommand,
    ClearCommand,
    ClearReply,
    Command,
    DetachCommand,
    DetachReply,
    Outcome,
    RenderCommand,
    RenewCommand,
    RenewReply,
    ResetCommand,
    Start,
    Started,
    StartFailed,
    StepCommand,
    StepReply,
    StopCommand,
    TrackCommand,
)
from rlmesh_ray.envs.line_control import LineControl
from rlmesh_ray.envs.source import build
from rlmesh_ray.envs.start_errors import explain
from rlmesh_ray.envs.vector_host import VectorHost
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.episodes import Episode
from rlmesh_ray.protocol.outcomes import Failure, FailureKind
from rlmesh_ray.spaces.block import Block
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.waiting import BelledSocket, Waiting, wake_politely

if TYPE_CHECKING:
    from rlmesh_ray.envs.line import LineEnd


class Worker:
    """The environment and what it needs to be created anew.

    Args:
        start: What to run.

    Raises:
        BaseException: Whatever the environment's code raises, too.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._logged: set[tuple[str, str, str]] = set()
        self._host = self._new_host()
        self._is_cleared = False
        # The worker's own, and the one in use: a line brings another.
        self._own_block: Block | None = None
        self._block: Block | None = None
        self._line: LineEnd | None = None
        self._max_info_bytes = MAX_BYTES
        self._handlers: dict[type, Callable[[Any], Outcome]] = {
            ResetCommand: lambda command: self._host.reset(command),
            StepCommand: self._step_once,
            RenderCommand: lambda command: self._host.render(command),
            CallCommand: lambda command: self._host.call(command),
            AttachCommand: lambda _: AttachReply(),
            DetachCommand: lambda _: self._detach(),
            ClearCommand: lambda _: self._clear(),
            RenewCommand: lambda _: self._renew(),
        }

    @property
    def contract(self) -> EnvContract:
        """What the environment is."""
        return self._host.contract

    @property
    def steps_subsets(self) -> bool:
        """See ``Started``."""
        return self._host.steps_subsets

    @property
    def line(self) -> "LineEnd | None":
        """Where steps may come from besides the endpoint."""
        return None if self._line is None or self._line.signal is None else self._line

    def own(self, block: Block) -> None:
        """Keep the arrays in ``block`` whenever there is no line."""
        columns = (column for column in block.observations if not isinstance(column, tuple))
        self._max_info_bytes = MAX_BYTES + 2 * sum(column.nbytes for column in columns)
        self._own_block = block
        self._use(block)

    def attach(
        self,
        command: AttachCommand,
        block: Block,
        control: LineControl,
        client: BelledSocket,
    ) -> None:
        """Take steps over a line, too, with the arrays in its block."""
        # Brings protobuf along, which nothing else here needs.
        from rlmesh_ray.envs.line import LineEnd

        self.drop_line()
        self._move_to(block)
        self._line = LineEnd(
            client,
            control,
            block.results,
            self._step,
            self.contract.num_envs,
            tag_arrays=command.tag_arrays,
        )

    def track(self, episodes: Sequence[Episode]) -> None:
        """Open the line for steps of ``episodes``, or shut it if there are none."""
        if self._line is not None:
            if episodes:
                self._line.open(episodes)
            else:
                self._line.shut()

    def drop_line(self) -> None:
        """End the line, if there is one; it still knows which requests it has executed."""
        if self._line is not None:
            self._line.close()

    def answer(self, command: Command) -> bytes:
        """Return the encoded reply to ``command``."""
        try:
            reply = self._handlers[type(command)](command)
            return frame_of_bare(reply) or encode_reply(reply, self._max_info_bytes)
        except BaseException as error:  # noqa: BLE001  # outermost frame above the user's code
            is_stepped = isinstance(command, (ResetCommand, StepCommand))
            return encode_reply(failure(error, self._host.place if is_stepped else ""))

    def close(self) -> None:
        """Close the environment, once."""
        if not self._is_cleared:
            self._is_cleared = True
            self._host.close()

    def _step(self) -> StepReply | Failure:
        """Step for the line; infos come out as the endpoint gets them."""
        try:
            reply = self._host.step(StepCommand())
            if isinstance(reply, StepReply) and frame_of_bare(reply):
                return reply
            frame = encode_reply(reply, self._max_info_bytes)
        except BaseException as error:  # noqa: BLE001  # outermost frame above the user's code
            frame = encode_reply(failure(error, self._host.place))
        plain: StepReply | Failure = decode(frame)
        return plain

    def _step_once(self, command: StepCommand) -> Outcome:
        """Step for the stream, unless the line has done it."""
        executed = None
        if command.number and self._line is not None:
            executed = self._line.claim(command.number)
        return executed or self._host.step(command)

    def _detach(self) -> Outcome:
        self.drop_line()
        if self._own_block is not None:
            self._move_to(self._own_block)
        return DetachReply()

    def _use(self, block: Block) -> None:
        self._block = block
        self._host.use(block)

    def _move_to(self, block: Block) -> None:
        """Use ``block`` from now on; lanes that are not reset next keep their observations."""
        assert self._block is not None, "a worker in use has a block"
        for new, old in zip(block.observations, self._block.observations, strict=True):
            if not isinstance(new, tuple):
                new[...] = old
        self._use(block)

    def _clear(self) -> Outcome:
        self._detach()
        self._line = None  # the next session counts its requests anew
        self.close()
        return ClearReply()

    def _renew(self) -> Outcome:
        if not self._start.is_renewable:
            return Failure(
                FailureKind.BAD_REQUEST,
                "an environment that was handed in as an instance cannot be created anew",
            )
        self.close()
        host = self._new_host()
        old = self._host
        if (host.contract, host.steps_subsets) != (old.contract, old.steps_subsets):
            raise ConfigurationError(
                f"{self._start.description} has other spaces than before; a factory must create "
                "the same environment every time"
            )
        self._host = host
        self._is_cleared = False
        if self._block is not None:
            host.use(self._block)
        return RenewReply()

    def _new_host(self) -> VectorHost:
        start = self._start
        vector = build(
            start.payload,
            start.num_envs,
            resets_itself=start.resets_itself,
            truncates_at=start.policy if start.truncates else None,
        )
        return VectorHost(vector, start.policy, start.description, self._logged)


def failure(error: BaseException, place: str = "") -> Failure:
    """Return what the parent is told about something that the environment raised.

    Args:
        error: It.
        place: In which lane and step, as the end of a sentence.
    """
    report = traceback.TracebackException.from_exception(error)
    text = " ".join(str(report).split())
    name = type(error).__name__
    message = (f"{name}: {text}" if text else name) + (place and f",{place}")
    return Failure(FailureKind.RAISED, message, "".join(report.format()))


def serve(channel: Channel) -> None:
    """Run the environment that the first message names; return after Stop."""
    start: Start = channel.receive()
    _adopt(start)
    try:
        worker = Worker(start)
        started = encode(Started(worker.contract, worker.steps_subsets))
    except BaseException as error:  # noqa: BLE001  # outermost frame above the user's code
        message = f"cannot create {start.description}: {explain(error)}"
        channel.send(encode(StartFailed(message, traceback.format_exc())))
        return
    channel.send(started)
    (descriptor,) = _descriptors(channel, 1)
    worker.own(Block(descriptor, worker.contract))
    os.close(descriptor)
    # Else a process that the environment forks would keep a line open after its end.
    os.register_at_fork(after_in_child=worker.drop_line)
    # A client at a line works between two steps, on this processor perhaps; an endpoint hardly.
    at_line, at_channel = Waiting(0.2e-3), Waiting(1.5e-3)
    while not isinstance(command := _next(channel, worker, at_line, at_channel), StopCommand):
        if isinstance(command, TrackCommand):
            worker.track(command.episodes)
            continue
        channel.send(worker.answer(command))
        if isinstance(command, AttachCommand):
            _attach(channel, worker, command)
    worker.close()


def _next(channel: Channel, worker: Worker, at_line: Waiting, at_channel: Waiting) -> Command:
    """Return the endpoint's next command; answer what comes over the line meanwhile."""
    own = channel.connection.fileno()
    while (line := worker.line) is not None and not channel.has_message:
        # What the endpoint said was said before: a client that is told of it goes on by the line.
        signal = line.signal
        assert signal is not None, "a line that has ended is no line"
        if own in at_line.ready(own, signal.bell, peers=(signal.peer,)):
            break
        line.serve()
    if worker.line is None and not channel.has_message:
        at_channel.ready(own)
    command: Command = channel.receive()
    return command


def _attach(channel: Channel, worker: Worker, command: AttachCommand) -> None:
    block, control, line, bell, client_bell = _descriptors(channel, 5)
    client = BelledSocket(socket.socket(fileno=line), bell, client_bell)
    try:
        worker.attach(
            command,
            Block(block, worker.contract),
            LineControl(control, worker.contract.num_envs),
            client,
        )
    finally:
        os.close(block)
        os.close(control)


def _descriptors(channel: Channel, count: int) -> list[int]:
    """Return the descriptors that come between two messages."""
    _, descriptors, _, _ = socket.recv_fds(channel.connection, 1, count)
    if len(descriptors) < count:
        raise EOFError("the endpoint is gone")
    return list(descriptors)


def _adopt(start: Start) -> None:
    sys.path[:] = start.sys_path
    if start.pythonpath is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = start.pythonpath


def _take_lifeline() -> int:
    """Move the lifeline away from standard input, where the environment might read."""
    descriptor = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return descriptor


def _ignore(number: int, frame: FrameType | None) -> None:
    """Leave Ctrl-C to the parent, which then closes this process."""


def main() -> None:
    """Run as the process's main function."""
    socket_descriptor, parent_pid, last_words_descriptor = map(int, sys.argv[1:])
    del sys.argv[1:]  # some simulators read the command line
    os.set_inheritable(socket_descriptor, False)
    # A handler rather than SIG_IGN: simulators that the environment starts would inherit that.
    signal.signal(signal.SIGINT, _ignore)
    last_words.record(last_words_descriptor)
    lifeline.hold(_take_lifeline(), parent_pid)
    wake_politely()
    channel = Channel(socket.socket(fileno=socket_descriptor), MESSAGES)
    # Else a process that the environment forks would keep the road open after our death.
    os.register_at_fork(after_in_child=channel.connection.close)
    with contextlib.suppress(EOFError, ConnectionError):
        serve(channel)


if __name__ == "__main__":
    main()
