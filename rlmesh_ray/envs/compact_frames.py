"""Compact frames for plain steps (all lanes, no text) and their replies without infos.

Nearly all steps are plain: their data are in the step buffers. The command is encoded as the
request's number, and the reply as a constant.
"""

import pickle
import struct
from typing import Any

from rlmesh_ray.envs.commands import Command, Outcome, StepCommand, StepReply
from rlmesh_ray.envs.worker_channel import encode, frame_of

_STEP = StepCommand()
_NUMBER = struct.Struct("!cQ")
_STEP_TAG = b"s"  # no pickle of protocol 2 and later begins with it
_REPLY = StepReply({})
_REPLY_BODY = b"r"
_REPLY_FRAME = frame_of(_REPLY_BODY)

NumberedCommand = tuple[int, Command]
"""A command and the number of its request; 0 for a command without a request."""


def command_frame(command: Command, number: int = 0) -> bytes:
    """Return the frame of ``command`` for the request with this number."""
    is_plain = type(command) is StepCommand and not (
        command.text_columns or command.lanes or command.autoreset_lanes
    )
    return frame_of(_NUMBER.pack(_STEP_TAG, number)) if is_plain else encode((number, command))


def decode_command(body: memoryview) -> NumberedCommand:
    """Return the command in the body of a frame; it may be a shared object, not to be changed."""
    if len(body) == _NUMBER.size and body[:1] == _STEP_TAG:
        return _NUMBER.unpack(body)[1], _STEP
    command: NumberedCommand = pickle.loads(body)
    return command


def compact_reply_frame(reply: Outcome) -> bytes | None:
    """Return the compact frame of ``reply``; None where it has none."""
    if type(reply) is not StepReply or reply.text_columns or reply.infos:
        return None
    return None if any(reply.final_infos.values()) else _REPLY_FRAME


def decode_reply(body: memoryview) -> Any:
    """Return the reply in the body of a frame; it may be a shared object, not to be changed."""
    return _REPLY if body == _REPLY_BODY else pickle.loads(body)
