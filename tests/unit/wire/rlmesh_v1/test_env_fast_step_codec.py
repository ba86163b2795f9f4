"""Frames of a step that are written and read by hand mean what the generated code says."""

import random
from array import array
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.messages import EnvResponse, EpisodeRecord, Step, StepDone
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.testing.strategies import damaged, plain_infos
from rlmesh_ray.wire._pb.rlmesh.env.v1 import interaction_pb2 as pb
from rlmesh_ray.wire.rlmesh_v1 import env
from rlmesh_ray.wire.rlmesh_v1.env import FastCodecMiss
from tests.frame_mutation import mutate_frame

TEXT = st.text(max_size=8) | st.just("x" * 300)
MASK = st.lists(st.sampled_from([0, 1]), max_size=3).map(bytes) | st.just(b"\1" * 200)
BYTES = st.binary(max_size=8) | st.sampled_from([bytes(120), bytes(130), bytes(20_000)])
REWARDS = st.lists(st.floats(), max_size=3) | st.just([0.5] * 20)
IDS = st.lists(TEXT, max_size=4).map(tuple)
RECORD = EpisodeRecord("e", 1, 2, 0.5, True, False, 5, 9, seed=-3, final_info={"a": 1})


def step_done(infos: st.SearchStrategy[Any], records: st.SearchStrategy[Any]) -> Any:
    rewards = REWARDS.map(lambda numbers: array("d", numbers))
    return st.builds(StepDone, TEXT, BYTES, rewards, MASK, MASK, infos, records, IDS)


STEPS = st.builds(Step, TEXT, BYTES, st.integers(0, 2**63 - 1))
PLAIN = step_done(st.just({}), st.just(()))
"""As most are: nothing but arrays and ids."""
FULL = step_done(plain_infos(), st.sampled_from([(), (RECORD,), (RECORD, RECORD)]))


def as_tuple(response: Any) -> Any:
    """Return what can be compared bit by bit: NaN is not equal to itself."""
    if not isinstance(response, StepDone):
        return response
    rewards = np.array(response.rewards)
    return (*(getattr(response, name) for name in NAMES if name != "rewards"), rewards)


NAMES = [field.name for field in fields(StepDone)]


def outcome(read: Callable[[bytes], EnvResponse], frame: bytes) -> Any:
    try:
        return as_tuple(read(frame))
    except CodecError as error:
        return str(error)


def check_read(frame: bytes) -> None:
    """Fail unless ``frame`` means the same by hand and by the generated code."""
    assert_identical(outcome(env.parse_response, frame), outcome(env.read_response, frame))


@given(STEPS)
def test_the_generated_code_reads_what_is_asked(request: Step) -> None:
    assert env.parse_request(env.pack_request(request)) == request


@given(PLAIN | FULL)
def test_the_generated_code_reads_what_is_answered(response: StepDone) -> None:
    frame = env.pack_response(response, tag_arrays=True)

    assert_identical(as_tuple(env.read_response(frame)), as_tuple(response))


@given(PLAIN)
def test_what_is_usual_is_read_by_hand(response: StepDone) -> None:
    frame = env.pack_response(response, tag_arrays=False)

    assert_identical(as_tuple(env.parse_step_done(frame)), as_tuple(response))
    assume(response.observation)  # the generated code leaves out what is empty
    frame = pb.JoinResponse.FromString(frame).SerializeToString()
    assert_identical(as_tuple(env.parse_step_done(frame)), as_tuple(response))


@given(st.data())
def test_a_damaged_answer_means_what_the_generated_code_says(data: st.DataObject) -> None:
    frame = env.pack_response(data.draw(PLAIN | FULL), tag_arrays=True)

    check_read(data.draw(damaged(frame)))


def test_another_valid_answer_means_what_the_generated_code_says() -> None:
    chance = random.Random(1)
    response = StepDone("12", bytes(16), [1.0, 2.0], b"\0\1", b"\0\0", {}, (), ("e", "f"))
    frame = env.pack_response(response, tag_arrays=False)

    for _ in range(1000):
        check_read(mutate_frame(pb.JoinResponse, frame, chance))


def usual(**fields: Any) -> pb.JoinResponse:
    message = pb.JoinResponse(request_id="7", **fields)
    message.step.observation.bytes.data = b"obs"
    message.step.rewards.extend([0.5, 1.5])
    message.step.terminated_mask = message.step.truncated_mask = b"\0\1"
    message.step.episode_ids.extend(["e", ""])
    return message


def test_every_integer_of_a_frame_may_be_longer_than_need_be() -> None:
    frame = usual().SerializeToString()

    for position, byte in enumerate(frame):
        check_read(frame[:position] + bytes([byte | 0x80, 0]) + frame[position + 1 :])


def test_every_byte_of_a_frame_counts() -> None:
    frame = usual().SerializeToString()

    for position in range(len(frame)):
        check_read(frame[:position])
        for byte in {0, 1, 0x0A, 0x12, 0x7F, 0x80, 0xFF, frame[position] ^ 1, frame[position] + 8}:
            check_read(frame[:position] + bytes([byte & 0xFF]) + frame[position + 1 :])


@pytest.mark.parametrize(
    "tail",
    [
        b"\x12\x02\x12\x00",  # the step goes on
        b"\x12\x09\x11" + bytes(8),  # a reward that is not packed
        b"\x12\x02\x40\x01",  # env_indices
        b"\x52\x00",  # another kind, which counts, being the last
        b"\xa2\x01\x00",  # telemetry
        b"\xaa\x01\x01\x38",  # another request_id
        b"\xaa\x01\x01\xff",  # which is no text
        b"\xf8\x01\x05",  # a field that is not known
        b"\x13\x14",  # a group
    ],
)
def test_what_is_not_usual_means_what_the_generated_code_says(tail: bytes) -> None:
    frame = usual().SerializeToString()

    with pytest.raises(FastCodecMiss):
        env.parse_step_done(frame + tail)
    check_read(frame + tail)


def test_ids_of_many_lanes_are_read_and_not_kept() -> None:
    ids = tuple(f"{lane:032}" for lane in range(3000))
    response = StepDone("1", b"", array("d"), b"", b"", {}, (), ids)

    for _ in range(2):
        back = env.parse_response(env.pack_response(response, tag_arrays=False))
        assert isinstance(back, StepDone)
        assert back.episode_ids == ids
