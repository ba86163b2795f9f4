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
from collections.abc import Callable
from types import FrameType
from typing import Any

from rlmesh_ray.envs import last_words, lifeline
from rlmesh_ray.envs.block import Block
from rlmesh_ray.envs.bounded import MAX_BYTES, encode_reply
from rlmesh_ray.envs.channel import Channel, encode
from rlmesh_ray.envs.commands import (
    CallCommand,
    ClearCommand,
    ClearReply,
    Outcome,
    RenderCommand,
    RenewCommand,
    RenewReply,
    ResetCommand,
    Start,
    Started,
    StartFailed,
    StepCommand,
    StopCommand,
)
from rlmesh_ray.envs.source import build
from rlmesh_ray.envs.start_errors import explain
from rlmesh_ray.envs.vector_host import VectorHost
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.outcomes import Failure, FailureKind
from rlmesh_ray.spaces.contract import EnvContract


class Worker:
    """The environment and what it needs to be created anew.

    Args:
        start: What to run.

    Raises:
        BaseException: Whatever the environment's code raises, too.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._host = self._new_host()
        self._is_cleared = False
        self._block: Block | None = None
        self._max_info_bytes = MAX_BYTES
        self._handlers: dict[type, Callable[[Any], Outcome]] = {
            ResetCommand: lambda command: self._host.reset(command),
            StepCommand: lambda command: self._host.step(command),
            RenderCommand: lambda _: self._host.render(),
            CallCommand: lambda command: self._host.call(command),
            ClearCommand: lambda _: self._clear(),
            RenewCommand: lambda _: self._renew(),
        }

    @property
    def contract(self) -> EnvContract:
        """What the environment is."""
        return self._host.contract

    def use(self, block: Block) -> None:
        """Keep the arrays in ``block`` from now on."""
        self._block = block
        columns = (column for column in block.observations if not isinstance(column, tuple))
        self._max_info_bytes = MAX_BYTES + 2 * sum(column.nbytes for column in columns)
        self._host.use(block)

    def answer(self, command: object) -> bytes:
        """Return the encoded reply to ``command``."""
        try:
            return encode_reply(self._handlers[type(command)](command), self._max_info_bytes)
        except BaseException as error:  # noqa: BLE001  # outermost frame above the user's code
            return encode_reply(failure(error))

    def close(self) -> None:
        """Close the environment, once."""
        if not self._is_cleared:
            self._is_cleared = True
            self._host.close()

    def _clear(self) -> Outcome:
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
        if host.contract != self._host.contract:
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
        vector = build(self._start.payload, self._start.num_envs)
        return VectorHost(vector, self._start.policy, self._start.description)


def failure(error: BaseException) -> Failure:
    """Return what the parent is told about something that the environment raised."""
    report = traceback.TracebackException.from_exception(error)
    text = " ".join(str(report).split())
    name = type(error).__name__
    message = f"{name}: {text}" if text else name
    return Failure(FailureKind.RAISED, message, "".join(report.format()))


def serve(channel: Channel) -> None:
    """Run the environment that the first message names; return after Stop."""
    start: Start = channel.receive()
    _adopt(start)
    try:
        worker = Worker(start)
        started = encode(Started(worker.contract))
    except BaseException as error:  # noqa: BLE001  # outermost frame above the user's code
        message = f"cannot create {start.description}: {explain(error)}"
        channel.send(encode(StartFailed(message, traceback.format_exc())))
        return
    channel.send(started)
    _, descriptors, _, _ = socket.recv_fds(channel.connection, 1, 1)
    worker.use(Block(descriptors[0], worker.contract))
    os.close(descriptors[0])
    while not isinstance(command := channel.receive(), StopCommand):
        channel.send(worker.answer(command))
    worker.close()


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
    channel = Channel(socket.socket(fileno=socket_descriptor))
    # Else a process that the environment forks would keep the road open after our death.
    os.register_at_fork(after_in_child=channel.connection.close)
    with contextlib.suppress(EOFError, ConnectionError):
        serve(channel)


if __name__ == "__main__":
    main()
