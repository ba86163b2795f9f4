"""Frames of steps that say nothing but that they are one: no text, no infos. Nearly all are such.

What they are about lies in the block. A bare step is its number, and the answer to it is always
the same.
"""

import pickle
import struct
from typing import Any

from rlmesh_ray.envs.commands import Command, Outcome, StepCommand, StepReply
from rlmesh_ray.envs.worker_channel import encode, frame_of

_STEP = StepCommand()
_NUMBER = struct.Struct("!cQ")
_STEP_TAG = b"s"  # no pickle of today begins with it
_REPLY = StepReply({})
_REPLY_BODY = b"r"
_REPLY_FRAME = frame_of(_REPLY_BODY)

NumberedCommand = tuple[int, Command]
"""A command and the number of its request; 0: it has none."""


def command_frame(command: Command, number: int = 0) -> bytes:
    """Return the frame of ``command``, the request with this number."""
    is_bare = type(command) is StepCommand and not (
        command.text_columns or command.lanes or command.autoreset_lanes
    )
    return frame_of(_NUMBER.pack(_STEP_TAG, number)) if is_bare else encode((number, command))


def decode_command(body: memoryview) -> NumberedCommand:
    """Return the command in the body of a frame, which is shared: nobody may change it."""
    if len(body) == _NUMBER.size and body[:1] == _STEP_TAG:
        return _NUMBER.unpack(body)[1], _STEP
    command: NumberedCommand = pickle.loads(body)
    return command


def compact_reply_frame(reply: Outcome) -> bytes | None:
    """Return the frame of ``reply`` if it is the reply to a bare step."""
    if type(reply) is not StepReply or reply.text_columns or reply.infos:
        return None
    return None if any(reply.final_infos.values()) else _REPLY_FRAME


def decode_reply(body: memoryview) -> Any:
    """Return the reply in the body of a frame, which is shared: nobody may change it."""
    return _REPLY if body == _REPLY_BODY else pickle.loads(body)
