"""Frames of steps that say nothing but that they are one."""

import socket

import pytest

from rlmesh_ray.envs.commands import (
    Command,
    Outcome,
    RenderCommand,
    RenderReply,
    ResetReply,
    StepCommand,
    StepReply,
)
from rlmesh_ray.envs.worker_channel import (
    WorkerChannel,
    command_frame,
    decode_command,
    decode_reply,
    encode_reply,
)

HEADER_BYTES = 8


@pytest.mark.parametrize(
    "command",
    [
        StepCommand(),
        StepCommand((("left", "right"),)),
        StepCommand((), (2, 0)),
        StepCommand((), (), (1,)),
        RenderCommand(),
    ],
)
@pytest.mark.parametrize("number", [0, 7, 2**63 - 1])
def test_a_command_comes_with_its_number(command: Command, number: int) -> None:
    frame = command_frame(command, number)

    assert decode_command(memoryview(frame)[HEADER_BYTES:]) == (number, command)


def test_a_bare_step_takes_few_bytes() -> None:
    assert len(command_frame(StepCommand(), 7)) == HEADER_BYTES + 9


def test_the_reply_to_a_bare_step_reads_as_what_it_is() -> None:
    frame = encode_reply(StepReply({}, {0: {}}))

    assert len(frame) == HEADER_BYTES + 1
    assert decode_reply(memoryview(frame)[HEADER_BYTES:]) == StepReply({})


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
    assert decode_reply(memoryview(encode_reply(reply))[HEADER_BYTES:]) == reply


def test_bare_messages_and_others_take_turns_in_one_go() -> None:
    env_under_test, expected_env = socket.socketpair()
    reader, writer = WorkerChannel(env_under_test, decode_command), WorkerChannel(expected_env)
    try:
        writer.send(
            command_frame(StepCommand(), 1)
            + command_frame(RenderCommand(), 2)
            + command_frame(StepCommand(), 3)
        )
        assert [reader.receive() for _ in range(3)] == [
            (1, StepCommand()),
            (2, RenderCommand()),
            (3, StepCommand()),
        ]
    finally:
        reader.close()
        writer.close()
