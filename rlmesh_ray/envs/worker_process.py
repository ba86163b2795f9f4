"""The endpoint's handle on a worker process.

No thread, no event loop: a shell waits on ``fileno()`` in its own way. One command at a time;
another thread may call ``kill`` meanwhile.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Self

from rlmesh_ray.envs.block import Block, Results, create
from rlmesh_ray.envs.channel import Channel, encode
from rlmesh_ray.envs.commands import (
    Command,
    Outcome,
    Start,
    Started,
    StartFailed,
    StopCommand,
)
from rlmesh_ray.envs.source import EnvSource
from rlmesh_ray.errors import ConfigurationError, EnvStartError
from rlmesh_ray.protocol.outcomes import Failure, FailureKind
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.conformance import Policy
from rlmesh_ray.spaces.contract import EnvContract

_REAP_TIMEOUT_S = 1.0


class WorkerProcess:
    """A running worker; made by ``start``, ended by ``close`` or ``kill``."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        channel: Channel,
        contract: EnvContract,
        block: Block,
    ) -> None:
        self._process = process
        self._channel = channel
        self.contract = contract
        """What the environment is."""
        self.action_columns: list[Column] = block.actions
        """One a leaf: ``(num_envs, *leaf.shape)`` at its dtype, in shared memory; write here
        before a StepCommand. Empty strings stand for text, which travels in the command."""
        self.observation_columns: list[Column] = block.observations
        """Likewise, after a ResetReply or StepReply, until the next command."""
        self.results: Results = block.results
        """Rewards and flags, after a StepReply, until the next command."""

    @classmethod
    def start(cls, source: EnvSource, *, policy: Policy, timeout_s: float | None = None) -> Self:
        """Start a worker; blocks until its environment exists.

        Args:
            source: What it runs.
            policy: What it does with values that are out of their range.
            timeout_s: How long the environment may take; None: as long as it likes.

        Raises:
            EnvStartError: The environment could not be created.
            ConfigurationError: This platform cannot pass descriptors to a process.
        """
        if not hasattr(socket, "send_fds"):
            raise ConfigurationError(
                f"environments cannot be hosted on {sys.platform}, which cannot share memory by "
                "descriptor; use Linux, macOS or WSL"
            )
        process, channel = _spawn()
        try:
            contract = _handshake(process, channel, source, policy, timeout_s)
            return cls(process, channel, contract, _share_block(channel, contract))
        except BaseException:
            _release(process, channel, 0.0)
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs and can be talked to."""
        try:
            return bool(self._channel.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``receive`` would not block."""
        return self._channel.connection.fileno()

    def submit(self, command: Command) -> None:
        """Send ``command``; if the worker is gone, ``receive`` tells."""
        with contextlib.suppress(OSError):
            self._channel.send(encode(command))

    def poll(self, timeout_s: float) -> bool:
        """Return whether ``receive`` would not block, after at most ``timeout_s``."""
        return self.fileno() < 0 or _is_readable(self._channel, timeout_s)

    def receive(self) -> Outcome:
        """Return the reply to the last command; blocks.

        Returns:
            The reply, or a Failure; if the process has died, one of kind CRASHED.
        """
        try:
            reply: Outcome = self._channel.receive()
        except (EOFError, OSError):
            status = _release(self._process, self._channel, _REAP_TIMEOUT_S)
            return Failure(FailureKind.CRASHED, f"the environment's process {status}")
        return reply

    def kill(self) -> None:
        """End the process and whatever its environment has started, at once."""
        _release(self._process, self._channel, 0.0)

    def close(self, timeout_s: float) -> None:
        """Let the worker close its environment and end; kill it after ``timeout_s``."""
        self.submit(StopCommand())
        _release(self._process, self._channel, timeout_s)


def _spawn() -> "tuple[subprocess.Popen[bytes], Channel]":
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = [str(theirs.fileno()), str(os.getpid())]
        try:
            process = subprocess.Popen(
                # -u: what environments print shall appear when they print it. -P: the folder
                # we happen to be in is no place to import from, unless the parent does.
                [sys.executable, "-u", "-P", "-m", "rlmesh_ray.envs.worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(_search_path())},
            )
        except BaseException:
            ours.close()
            raise
    return process, Channel(ours)


def _search_path() -> tuple[str, ...]:
    return tuple(str(entry) for entry in sys.path)


def _handshake(
    process: "subprocess.Popen[bytes]",
    channel: Channel,
    source: EnvSource,
    policy: Policy,
    timeout_s: float | None,
) -> EnvContract:
    start = Start(
        payload=source.payload,
        num_envs=source.num_envs,
        is_renewable=source.is_renewable,
        description=source.description,
        policy=policy,
        sys_path=_search_path(),
        pythonpath=os.environ.get("PYTHONPATH"),
    )
    try:
        channel.send(encode(start))
        if timeout_s is not None and not _is_readable(channel, timeout_s):
            raise EnvStartError(
                f"cannot create {source.description}: not ready after {timeout_s:g} s; find out "
                "what it waits for, or allow it more time"
            )
        answer: Started | StartFailed = channel.receive()
    except (EOFError, OSError) as error:
        raise EnvStartError(
            f"cannot create {source.description}: its process "
            f"{_release(process, channel, _REAP_TIMEOUT_S)}; see its output on standard error"
        ) from error
    if isinstance(answer, StartFailed):
        raise EnvStartError(answer.message, answer.traceback_text)
    return answer.contract


def _share_block(channel: Channel, contract: EnvContract) -> Block:
    descriptor = create(contract)
    try:
        socket.send_fds(channel.connection, [b"\0"], [descriptor])
        return Block(descriptor, contract)
    except OSError as error:
        raise EnvStartError("the environment's process died as soon as it had started") from error
    finally:
        os.close(descriptor)


def _is_readable(channel: Channel, timeout_s: float) -> bool:
    # Not select: it fails for descriptors above 1023.
    waiting = select.poll()
    waiting.register(channel.connection, select.POLLIN)
    return bool(waiting.poll(timeout_s * 1000))


def _release(process: "subprocess.Popen[bytes]", channel: Channel, grace_s: float) -> str:
    """End the process and let go of everything; return how it ended.

    Only the first call does anything. The process is reaped here and nowhere else, so that its
    id, which names its group too, cannot belong to anybody else when the group is killed.
    """
    if channel.connection.fileno() >= 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        # The group: simulators that the environment has started end with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_TIMEOUT_S)
        if process.stdin is not None:
            process.stdin.close()
        channel.close()
    return _how_it_ended(process.returncode)


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "was killed, but the kernel still holds it"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
