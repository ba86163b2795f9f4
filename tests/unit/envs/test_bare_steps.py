"""Frames of steps that say nothing but that they are one."""

import socket

import pytest

from rlmesh_ray.envs.bare_steps import MESSAGES, frame_of_bare, frame_of_command
from rlmesh_ray.envs.channel import Channel, decode, encode
from rlmesh_ray.envs.commands import Outcome, RenderReply, ResetReply, StepCommand, StepReply


def test_a_bare_step_reads_as_what_it_is_with_and_without_the_table() -> None:
    frame = frame_of_command(StepCommand())

    assert decode(frame) == MESSAGES[frame] == StepCommand()


def test_a_step_with_text_is_written_whole() -> None:
    command = StepCommand((("left", "right"),))

    assert decode(frame_of_command(command)) == command


def test_a_step_of_some_lanes_is_written_whole() -> None:
    command = StepCommand((), (2, 0))

    assert decode(frame_of_command(command)) == command


def test_a_step_that_the_line_may_have_got_as_well_is_written_with_its_number() -> None:
    command = StepCommand(number=7)

    assert decode(frame_of_command(command)) == command


def test_the_reply_to_a_bare_step_reads_as_what_it_is_with_and_without_the_table() -> None:
    frame = frame_of_bare(StepReply({}, {0: {}}))

    assert frame is not None
    assert decode(frame) == MESSAGES[frame] == StepReply({})


@pytest.mark.parametrize(
    "reply",
    [
        StepReply({"x": 1}),
        StepReply({}, {0: {"x": 1}}),
        StepReply({}, {}, (("text",),)),
        ResetReply({}),
        RenderReply(None),
    ],
)
def test_a_reply_that_says_more_is_not_bare(reply: Outcome) -> None:
    assert frame_of_bare(reply) is None


def test_messages_of_the_same_size_are_not_taken_for_usual_ones() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = Channel(ours, {b"x" * len(encode("abc")): "usual"}), Channel(theirs)
    try:
        writer.send(encode("abc"))
        assert reader.receive() == "abc"
    finally:
        reader.close()
        writer.close()


def test_usual_messages_and_others_take_turns_in_one_go() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = Channel(ours, MESSAGES), Channel(theirs)
    try:
        writer.send(encode(StepCommand()) + encode(RenderReply(None)) + encode(StepReply({})))
        assert [reader.receive() for _ in range(3)] == [
            StepCommand(),
            RenderReply(None),
            StepReply({}),
        ]
    finally:
        reader.close()
        writer.close()
