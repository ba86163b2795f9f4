"""The client's end of a line, with nothing but the test at the other end."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from rlmesh_ray.client.line import Line
from rlmesh_ray.envs import memory
from rlmesh_ray.errors import EndpointTimeoutError
from rlmesh_ray.spaces.block import Block
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym import from_gymnasium
from rlmesh_ray.waiting import BelledSocket, Waiting
from rlmesh_ray.wire import line_v1 as frames

ACTION = [np.zeros(1, np.int64)]


@dataclass
class Ends:
    """A line and the end that a worker would hold."""

    line: Line
    worker: BelledSocket
    client_bell: int

    def ring(self) -> None:
        """Ring the client's bell and say nothing: late, for an answer that it has read already."""
        os.eventfd_write(self.client_bell, 1)


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
    descriptor = memory.create_block(contract)
    block = Block(descriptor, contract)
    os.close(descriptor)
    ours, theirs = socket.socketpair()
    ours_bell, theirs_bell = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
    line = Line(BelledSocket(ours, ours_bell, theirs_bell), block, contract, "endpoint:1")
    worker = BelledSocket(theirs, os.dup(theirs_bell), os.dup(ours_bell))
    yield Ends(line, worker, ours_bell)
    line.close()
    worker.close()


def test_a_bell_without_an_answer_is_not_taken_for_one(ends: Ends) -> None:
    ends.line.send(1, ACTION, 1000)
    ends.ring()

    with pytest.raises(EndpointTimeoutError, match=r"no answer within 0\.05 s"):
        ends.line.receive(0.05)


def answer_at_the_next_hush(ends: Ends, answer: bytes, *, before: bool) -> None:
    """Have the worker answer just before, or after, the client takes notice of its bell."""
    hush = ends.line._worker.hush

    def hush_and_answer() -> None:
        ends.line._worker.hush = hush  # type: ignore[method-assign]
        if before:
            ends.worker.send(answer)
        hush()
        if not before:
            ends.worker.send(answer)

    ends.line._worker.hush = hush_and_answer  # type: ignore[method-assign]


def test_an_answer_that_comes_after_a_late_bell_is_received(ends: Ends) -> None:
    ends.line.send(1, ACTION, 1000)
    ends.ring()
    answer_at_the_next_hush(ends, frames.pack_answer(1, frames.DONE, 4) + b"body", before=False)

    assert ends.line.receive(60.0) == b"body"
    assert ends.line.is_open


def test_a_late_bell_does_not_end_the_wait_for_an_answer(ends: Ends) -> None:
    ends.line.send(1, ACTION, 1000)
    ends.ring()

    assert not ends.line.wait(0.05)
    ends.worker.send(frames.pack_answer(1, frames.DONE, 0))
    assert ends.line.wait(60.0)
    assert ends.line.receive(60.0) == b""


def test_who_watches_the_bell_hears_of_an_answer_that_another_wait_has_found(ends: Ends) -> None:
    ends.line.send(1, ACTION, 1000)
    ends.ring()
    answer_at_the_next_hush(ends, frames.pack_answer(1, frames.DONE, 0), before=True)

    assert ends.line.wait(60.0)
    assert Waiting(0.0).ready(ends.client_bell, timeout_s=0.0) == [ends.client_bell]


def test_a_worker_that_stops_in_the_middle_of_an_answer_is_waited_for(ends: Ends) -> None:
    ends.line.send(1, ACTION, 1000)
    ends.worker.send(frames.pack_answer(1, frames.DONE, 8) + b"half")

    with pytest.raises(EndpointTimeoutError, match=r"no answer within 0\.05 s"):
        ends.line.receive(0.05)


def test_a_worker_that_is_gone_leaves_the_answer_to_the_stream(ends: Ends) -> None:
    ends.line.send(1, ACTION, 1000)
    ends.worker.close()

    assert ends.line.receive(60.0) is None
    assert not ends.line.is_open
