"""The worker's end of a line, without a worker."""

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rlmesh_ray.envs.commands import StepReply
from rlmesh_ray.envs.line import LineEnd
from rlmesh_ray.envs.line_control import LineControl
from rlmesh_ray.protocol.episodes import Episode
from rlmesh_ray.protocol.messages import StepDone
from rlmesh_ray.protocol.outcomes import Failure, FailureKind
from rlmesh_ray.spaces.block import Results
from rlmesh_ray.spaces.warnings import WARNING_KEY, ConformanceWarning
from rlmesh_ray.waiting import BelledSocket, Waiting
from rlmesh_ray.wire import line_v1 as frames
from rlmesh_ray.wire.rlmesh_v1.env import parse_response

NUM_LANES = 2
EPISODES = (Episode("a", 1, 0), Episode("b", None, 0))


@dataclass
class Rig:
    """Both ends of a line, and what the environment does next."""

    client: socket.socket
    end: LineEnd
    control: LineControl
    results: Results
    client_bell: int
    outcomes: list[StepReply | Failure] = field(default_factory=list)
    num_steps: int = 0

    def ask(self, number: int) -> tuple[int, int, bytes]:
        """Return number, kind and body of the answer."""
        self.client.sendall(frames.pack_request(number, 1000))
        self.end.serve()
        answered, kind, size = frames.unpack_answer(self.client.recv(frames.ANSWER_BYTES))
        return answered, kind, self.client.recv(size) if size else b""


@pytest.fixture(name="rig")
def _rig() -> Iterator[Rig]:
    descriptor = LineControl.create(NUM_LANES)
    control = LineControl(descriptor, NUM_LANES)
    os.close(descriptor)
    client, worker = socket.socketpair()
    bells = (os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK))
    client.settimeout(10.0)
    results = Results(np.ones(NUM_LANES), np.zeros(NUM_LANES, bool), np.zeros(NUM_LANES, bool))

    def step() -> StepReply | Failure:
        rig.num_steps += 1
        return rig.outcomes.pop(0) if rig.outcomes else StepReply({})

    end = LineEnd(BelledSocket(worker, *bells), control, results, step, NUM_LANES, tag_arrays=True)
    rig = Rig(client, end, control, results, bells[1])
    for lane in range(NUM_LANES):
        control.tally.is_tracked[lane] = 1
    yield rig
    client.close()
    end.close()


def test_a_step_with_nothing_to_tell_is_answered_with_sixteen_bytes(rig: Rig) -> None:
    rig.end.open(EPISODES)

    assert rig.ask(1) == (1, frames.DONE, b"")
    assert list(rig.control.tally.step_counts) == [1, 1]
    assert list(rig.control.tally.cumulative_rewards) == [1.0, 1.0]


def test_infos_and_ended_episodes_come_as_the_edition_s_frame(rig: Rig) -> None:
    rig.end.open(EPISODES)
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
    rig.end.open(EPISODES)
    warning = ConformanceWarning("action", "range", "", "3.0 is above 1.0")
    rig.outcomes = [StepReply({WARNING_KEY: [warning]})]

    done = parse_response(rig.ask(1)[2])

    assert isinstance(done, StepDone)
    assert done.infos == {WARNING_KEY: ["action: 3.0 is above 1.0"]}


def test_an_answer_larger_than_the_kernel_s_buffer_is_rung_for_before_it_has_left(
    rig: Rig,
) -> None:
    rig.end.open(EPISODES)
    rig.outcomes = [StepReply({"text": "x" * 4_000_000})]
    rig.client.sendall(frames.pack_request(1, 0))
    serving = threading.Thread(target=rig.end.serve)
    serving.start()

    Waiting(0.0).ready(rig.client_bell)
    _, kind, size = frames.unpack_answer(rig.client.recv(frames.ANSWER_BYTES))
    with rig.client.makefile("rb") as reader:
        body = reader.read(size)

    serving.join()
    assert kind == frames.DONE
    done = parse_response(body)
    assert isinstance(done, StepDone)
    assert len(str(done.infos["text"])) == 4_000_000


def test_nothing_is_executed_until_the_line_is_open(rig: Rig) -> None:
    assert rig.ask(1)[1] == frames.HANDED_OVER
    rig.end.open(EPISODES)
    rig.end.shut()
    assert rig.ask(2)[1] == frames.HANDED_OVER

    assert rig.num_steps == 0
    assert rig.control.begun == 0


def test_a_number_is_executed_once(rig: Rig) -> None:
    rig.end.open(EPISODES)
    rig.ask(5)

    for number in (5, 4, 0):
        assert rig.ask(number)[1] == frames.HANDED_OVER
    assert rig.num_steps == 1


def test_a_failed_step_is_handed_over_and_shuts_the_line(rig: Rig) -> None:
    rig.end.open(EPISODES)
    failure = Failure(FailureKind.RAISED, "worn out")
    rig.outcomes = [failure]

    assert rig.ask(1)[1] == frames.HANDED_OVER
    assert rig.end.claim(1) is failure
    assert rig.ask(2)[1] == frames.HANDED_OVER
    assert rig.num_steps == 1
    assert not rig.control.is_busy


def test_who_repeats_a_step_that_was_done_is_told_that_its_answer_got_lost(rig: Rig) -> None:
    rig.end.open(EPISODES)
    rig.outcomes = [Failure(FailureKind.RAISED, "worn out")]
    rig.ask(1)
    rig.end.open(EPISODES)
    rig.ask(2)

    for number in (1, 2):
        lost = rig.end.claim(number)
        assert lost is not None
        assert lost.kind is FailureKind.TIMEOUT


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_request_that_came_on_the_stream_first_is_not_executed_over_the_line(
    rig: Rig, *, is_closed: bool
) -> None:
    rig.end.open(EPISODES)
    rig.client.sendall(frames.pack_request(1, 1000))
    if is_closed:
        rig.client.close()

    assert rig.end.claim(1) is None
    rig.end.serve()

    assert rig.num_steps == 0
    assert not rig.control.is_busy


def test_requests_go_on_over_the_line_after_one_on_the_stream(rig: Rig) -> None:
    rig.end.open(EPISODES)
    rig.ask(1)

    assert rig.end.claim(2) is None
    assert rig.ask(3)[1] == frames.DONE
    assert rig.num_steps == 2


def test_a_number_that_no_line_counts_to_can_be_on_the_stream_only(rig: Rig) -> None:
    rig.end.open(EPISODES)

    assert rig.end.claim(2**64 - 1) is None
    assert rig.ask(1)[1] == frames.DONE


def test_a_request_in_progress_is_known_with_its_deadline(rig: Rig) -> None:
    rig.end.open(EPISODES)
    seen: list[Any] = []

    def look() -> StepReply:
        seen.append((rig.control.begun, rig.control.is_busy, rig.control.left_s))
        return StepReply({})

    rig.end._step = look
    rig.ask(9)

    ((begun, is_busy, left_s),) = seen
    assert (begun, is_busy) == (9, True)
    assert 0.0 < left_s <= 1.0
    assert not rig.control.is_busy


@pytest.mark.parametrize("said", [b"", b"half a request"[:7]])
def test_a_client_that_hangs_up_ends_the_line(rig: Rig, said: bytes) -> None:
    rig.client.sendall(said)
    rig.client.shutdown(socket.SHUT_WR)

    rig.end.serve()

    assert rig.end.signal is None
    assert rig.num_steps == 0


def test_who_rings_and_says_nothing_holds_nobody_up(rig: Rig) -> None:
    rig.end.open(EPISODES)
    assert rig.end.signal is not None
    os.eventfd_write(rig.end.signal.bell, 1)

    rig.end.serve()

    assert rig.ask(1)[1] == frames.DONE


def test_a_timeout_beyond_every_clock_is_one_for_ever(rig: Rig) -> None:
    rig.end.open(EPISODES)
    rig.client.sendall(frames.pack_request(2**63 - 1, 2**64 - 1))
    rig.end.serve()

    assert rig.control.begun == 2**63 - 1


def test_a_number_that_no_client_counts_to_is_handed_over(rig: Rig) -> None:
    rig.end.open(EPISODES)

    assert rig.ask(2**64 - 1)[1] == frames.HANDED_OVER
    assert rig.num_steps == 0
