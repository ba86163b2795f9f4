"""DirectStepServer, without a worker."""

import errno
import logging
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from rlmesh_ray.envs.commands import StepReply
from rlmesh_ray.polling import AdaptivePoller
from rlmesh_ray.protocol.env_session import EpisodeStart
from rlmesh_ray.protocol.messages import StepDone
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.validation import WARNING_KEY, ConformanceWarning, warnings_info
from rlmesh_ray.spaces.vector_infos import lane_entries
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.transport import direct_sockets as frames
from rlmesh_ray.transport.direct_sockets import EventfdSocket
from rlmesh_ray.transport.direct_step_server import DirectStepServer
from rlmesh_ray.transport.exactly_once import SessionProgress
from rlmesh_ray.transport.step_buffers import StepArrays, StepBuffers
from rlmesh_ray.wire.rlmesh_v1.env import parse_response

NUM_LANES = 2
CONTRACT = EnvContract(
    id="",
    observation_space=from_gymnasium(Box(0, 1, (1,), np.float32)),
    action_space=from_gymnasium(Discrete(2)),
    num_envs=NUM_LANES,
    autoreset_mode=AutoresetMode.NEXT_STEP,
    render_mode="",
    metadata={},
)
EPISODES = (EpisodeStart("a", 1, 0), EpisodeStart("b", None, 0))


@dataclass
class Rig:
    """Both ends of a direct connection, and what the environment does next."""

    client: socket.socket
    end: DirectStepServer
    progress: SessionProgress
    results: StepArrays
    client_eventfd: int
    endpoint: socket.socket
    """The worker's end, as the endpoint has it, too."""
    outcomes: list[StepReply] = field(default_factory=list)
    drawn: list[NDArray[np.uint8]] = field(default_factory=list)
    num_steps: int = 0
    is_open: bool = True

    def ask(self, number: int) -> tuple[int, int, bytes]:
        """Return number, kind and body of the answer."""
        self.client.sendall(frames.REQUEST.pack(number, 1000, 0))
        self.serve()
        answered, kind, size, _ = frames.ANSWER.unpack(self.client.recv(frames.ANSWER.size))
        return answered, kind, self.client.recv(size) if size else b""

    def serve(self) -> None:
        """Do what a worker does when it is woken."""
        request = self.end.receive()
        if request is None:
            return
        number, timeout_ms, is_render = request
        if not is_render:
            self.end.answer(number, self.step(number, timeout_ms))
        elif self.drawn:
            size = frames.PICTURE_SIZE.pack(*self.drawn[0].shape[:2])
            self.end.answer(number, size, self.drawn)
        else:
            self.end.answer(number, None)

    def step(self, number: int, timeout_ms: int) -> bytes | None:
        """Do what a worker does for a step whose turn has come."""
        if not self.is_open:
            return None
        self.num_steps += 1
        self.progress.begin(number, timeout_ms)
        self.end.load()
        self.progress.count_step(
            self.results.rewards, self.results.terminated, self.results.truncated
        )
        reply = self.outcomes.pop(0) if self.outcomes else StepReply({})
        body = self.end.message(number, reply.infos, reply.final_infos)
        self.progress.end()
        return body


@pytest.fixture(name="rig")
def _rig() -> Iterator[Rig]:
    progress = SessionProgress.local(NUM_LANES)
    progress.count_reset(())
    client, worker = socket.socketpair()
    eventfds = (os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK))
    client.settimeout(10.0)
    buffers = StepBuffers(-1, CONTRACT)
    results = buffers.results
    results.rewards[:] = 1.0
    end = DirectStepServer(EventfdSocket(worker, *eventfds), progress, buffers, tag_arrays=True)
    end.set_episodes(EPISODES)
    rig = Rig(client, end, progress, results, eventfds[1], worker.dup())
    yield rig
    client.close()
    rig.endpoint.close()
    end.close()


def test_a_step_without_infos_is_answered_with_a_header(rig: Rig) -> None:

    assert rig.ask(1) == (1, frames.DONE, b"")
    assert list(rig.progress.now.step_counts) == [1, 1]
    assert list(rig.progress.now.cumulative_rewards) == [1.0, 1.0]


def test_infos_and_ended_episodes_come_as_the_edition_s_frame(rig: Rig) -> None:
    rig.results.terminated[0] = True
    rig.outcomes = [StepReply({"speed": np.ones(2)}, {0: {"last": 1}})]

    _, kind, body = rig.ask(3)

    done = parse_response(body)
    assert isinstance(done, StepDone)
    assert kind == frames.DONE
    assert done.request_id == "3"
    np.testing.assert_array_equal(done.infos["speed"], np.ones(2))
    (record,) = done.completed_episodes
    assert (record.episode_id, record.final_info) == ("a", {"last": 1})
    assert done.episode_ids == ("", "b")


def test_warnings_come_in_the_edition_s_words(rig: Rig) -> None:
    warning = ConformanceWarning("action", "range", "", "3.0 is above 1.0", 1)
    rig.outcomes = [StepReply(warnings_info([warning], 2))]

    done = parse_response(rig.ask(1)[2])

    assert isinstance(done, StepDone)
    assert_identical(done.infos, lane_entries(WARNING_KEY, {1: ["action: 3.0 is above 1.0"]}, 2))


def test_an_answer_larger_than_the_kernel_s_buffer_is_rung_for_before_it_has_left(
    rig: Rig,
) -> None:
    rig.outcomes = [StepReply({"text": "x" * 4_000_000})]
    rig.client.sendall(frames.REQUEST.pack(1, 0, 0))
    serving = threading.Thread(target=rig.serve)
    serving.start()

    AdaptivePoller(0.0).wait_readable(rig.client_eventfd)
    _, kind, size, _ = frames.ANSWER.unpack(rig.client.recv(frames.ANSWER.size))
    with rig.client.makefile("rb") as reader:
        body = reader.read(size)

    serving.join()
    assert kind == frames.DONE
    done = parse_response(body)
    assert isinstance(done, StepDone)
    assert len(str(done.infos["text"])) == 4_000_000


def test_pictures_are_sent_as_their_pixels(rig: Rig) -> None:
    noise = np.random.default_rng(0).integers(256, size=(NUM_LANES, 2, 5, 3), dtype=np.uint8)
    rig.drawn = [noise[0], noise[1].transpose(1, 0, 2).copy().transpose(1, 0, 2)]
    rig.client.sendall(frames.REQUEST.pack(1, 1000, frames.RENDER))

    rig.serve()

    answered, kind, size, num_bytes = frames.ANSWER.unpack(rig.client.recv(frames.ANSWER.size))
    assert (answered, kind, num_bytes) == (1, frames.DONE, 0)
    body = rig.client.recv(size)
    assert frames.PICTURE_SIZE.unpack(body[: frames.PICTURE_SIZE.size]) == (2, 5)
    assert body[frames.PICTURE_SIZE.size :] == noise.tobytes()


def test_a_client_that_takes_no_pictures_does_not_block_the_worker(rig: Rig) -> None:
    rig.drawn = [np.zeros((2000, 2000, 3), np.uint8)] * NUM_LANES  # more than a socket holds
    rig.client.sendall(frames.REQUEST.pack(1, 1000, frames.RENDER))

    rig.serve()

    assert rig.end.client.wakeup is None


def test_lanes_without_such_pictures_are_handed_over(rig: Rig) -> None:
    rig.client.sendall(frames.REQUEST.pack(7, 1000, frames.RENDER))

    rig.serve()

    answer = frames.ANSWER.unpack(rig.client.recv(frames.ANSWER.size))
    assert answer == (7, frames.FALL_BACK, 0, 0)


@pytest.mark.parametrize("said", [b"", b"half a request"[:7]])
def test_a_client_that_hangs_up_ends_the_connection(rig: Rig, said: bytes) -> None:
    rig.client.sendall(said)
    rig.client.shutdown(socket.SHUT_WR)

    rig.serve()
    rig.serve()

    assert rig.end.client.wakeup is None
    assert rig.num_steps == 0


def test_a_client_that_wakes_the_worker_without_data_does_not_block_it(rig: Rig) -> None:
    assert rig.end.client.wakeup is not None
    os.eventfd_write(rig.end.client.wakeup.eventfd, 1)

    rig.serve()

    assert rig.ask(1)[1] == frames.DONE


def test_a_timeout_beyond_every_clock_is_one_for_ever(rig: Rig) -> None:
    rig.client.sendall(frames.REQUEST.pack(1, 2**64 - 1, 0))
    rig.serve()

    assert (rig.progress.done, rig.progress.timeout_ms) == (1, 2**63 - 1)


def test_a_step_whose_turn_has_not_come_is_handed_over(rig: Rig) -> None:
    rig.is_open = False

    assert rig.ask(2**64 - 1) == (2**64 - 1, frames.FALL_BACK, b"")


@pytest.mark.parametrize("fault", ["a wrong size", "a failing socket"])
def test_a_client_hears_that_the_worker_has_ended_the_connection(
    rig: Rig, fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = 5 if fault == "a wrong size" else 0
    if not num_bytes:

        def fail(*_: object) -> int:
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

        monkeypatch.setattr(socket.socket, "send", fail)
    rig.client.sendall(frames.REQUEST.pack(1, 1000, num_bytes))

    rig.serve()

    assert rig.client.recv(1) == b""
    assert rig.end.client.wakeup is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert ("5 bytes of actions, not 0" if num_bytes else "No buffer space") in record.message


def test_a_fork_of_the_worker_leaves_the_connection_to_it(rig: Rig) -> None:
    rig.end.close()

    rig.endpoint.sendall(b"x")

    assert rig.client.recv(1) == b"x"
