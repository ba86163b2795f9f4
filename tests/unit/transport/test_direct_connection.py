"""DirectConnection, with the test at the other end."""

import gc
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.transport import direct_sockets as frames
from rlmesh_ray.transport.direct_connection import DirectConnection
from rlmesh_ray.transport.direct_sockets import EventfdSocket
from rlmesh_ray.transport.step_buffers import StepBuffers, create_step_buffers

ACTION = [np.zeros(1, np.int64)]


@dataclass
class Ends:
    """A direct connection and the end of a worker."""

    direct: DirectConnection
    client: EventfdSocket
    """The direct connection's own."""
    worker: EventfdSocket
    client_eventfd: int

    def wake(self) -> None:
        """Wake the client and say nothing: late, for an answer that it has read already."""
        os.eventfd_write(self.client_eventfd, 1)


@pytest.fixture(name="ends")
def _ends() -> Iterator[Ends]:
    contract = EnvContract(
        id="",
        observation_space=from_gymnasium(Box(0, 1, (1,), np.float32)),
        action_space=from_gymnasium(Discrete(2)),
        num_envs=1,
        autoreset_mode=AutoresetMode.NEXT_STEP,
        render_mode="",
        metadata={},
    )
    descriptor = create_step_buffers(contract)
    buffers = StepBuffers(descriptor, contract)
    os.close(descriptor)
    ours, theirs = socket.socketpair()
    ours_eventfd, theirs_eventfd = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
    client = EventfdSocket(ours, ours_eventfd, theirs_eventfd)
    direct = DirectConnection(client, buffers, contract)
    worker = EventfdSocket(theirs, os.dup(theirs_eventfd), os.dup(ours_eventfd))
    yield Ends(direct, client, worker, ours_eventfd)
    direct.close()
    worker.close()


def test_a_bell_without_an_answer_is_not_taken_for_one(ends: Ends) -> None:
    ends.direct.send(1, ACTION, 1000)
    ends.wake()

    assert ends.direct.receive(0.05) is None
    assert not ends.direct.is_open


def after_each_look(monkeypatch: pytest.MonkeyPatch, *happens: Callable[[], object]) -> None:
    """Have one thing happen each time when the client has cleared its eventfd, before it reads."""
    read, rest = os.eventfd_read, iter(happens)

    def read_and_go_on(descriptor: int) -> int:
        try:
            return read(descriptor)
        finally:
            next(rest)()

    monkeypatch.setattr(os, "eventfd_read", read_and_go_on)


def test_an_answer_that_comes_after_a_late_bell_is_received(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends.direct.send(1, ACTION, 1000)
    ends.wake()
    answer = frames.ANSWER.pack(1, frames.DONE, 4, 0) + b"body"
    after_each_look(monkeypatch, lambda: ends.worker.send(answer), lambda: None)

    assert ends.direct.receive(60.0) == bytearray(b"body")
    assert ends.direct.is_open


def test_a_late_bell_does_not_end_the_wait_for_an_answer(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends.direct.send(1, ACTION, 1000)
    answer = frames.ANSWER.pack(1, frames.DONE, 0, 0)
    after_each_look(monkeypatch, ends.wake, ends.wake, lambda: ends.worker.send(answer))

    assert ends.direct.receive(60.0) == bytearray()
    assert ends.direct.is_open


def test_a_worker_that_stops_in_the_middle_of_an_answer_is_waited_for(ends: Ends) -> None:
    ends.direct.send(1, ACTION, 1000)
    ends.worker.send(frames.ANSWER.pack(1, frames.DONE, 8, 0) + b"half")

    assert ends.direct.receive(0.05) is None
    assert not ends.direct.is_open


def pictures_of(ends: Ends, height: int, width: int, pixels: bytes) -> Any:
    """Return what the client gets when the worker answers with these pictures."""
    size = frames.PICTURE_SIZE.size + len(pixels)
    header = frames.ANSWER.pack(1, frames.DONE, size, 0) + frames.PICTURE_SIZE.pack(height, width)
    ends.worker.send(header + pixels)
    return ends.direct.render(1, 1000, 60.0)


def test_pictures_arrive_as_they_were_sent(ends: Ends) -> None:
    noise = np.random.default_rng(0).integers(256, size=(2, 5, 3), dtype=np.uint8)

    assert_identical(pictures_of(ends, 2, 5, noise.tobytes()), (noise,))
    asked = ends.worker.connection.recv(frames.REQUEST.size)
    assert frames.REQUEST.unpack(asked) == (1, 1000, frames.RENDER)
    assert ends.direct.is_open


def test_pictures_of_a_wrong_size_end_the_connection(ends: Ends) -> None:
    assert pictures_of(ends, 2**16, 2**16, bytes(30)) is None
    assert not ends.direct.is_open


def test_a_worker_that_is_gone_leaves_the_answer_to_the_stream(ends: Ends) -> None:
    ends.direct.send(1, ACTION, 1000)
    ends.worker.close()

    assert ends.direct.receive(60.0) is None
    assert not ends.direct.is_open


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("is_closed", [False, True], ids=["dropped", "closed"])
def test_a_connection_that_is_closed_or_dropped_leaves_no_eventfd(is_closed: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        eventfds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2)]
        end = EventfdSocket(ours, *eventfds)
        if is_closed:
            for _ in range(2):
                end.close()
            assert not any(map(is_open, eventfds))
        del end
        gc.collect()

        assert not any(map(is_open, eventfds))
