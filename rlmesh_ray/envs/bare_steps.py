"""Steps that say nothing but that they are one: no text, no infos. Nearly all are such.

What they are about lies in the block. Their frames are always the same, so that nobody needs to
write or read them.
"""

from rlmesh_ray.envs.channel import encode
from rlmesh_ray.envs.commands import Command, Outcome, StepCommand, StepReply

_STEP = StepCommand()
_REPLY = StepReply({})
_STEP_FRAME, _REPLY_FRAME = encode(_STEP), encode(_REPLY)
MESSAGES: dict[bytes, StepCommand | StepReply] = {_STEP_FRAME: _STEP, _REPLY_FRAME: _REPLY}
"""By frame."""


def frame_of_command(command: Command) -> bytes:
    """Return the frame of ``command``."""
    is_bare = type(command) is StepCommand and not (
        command.text_columns or command.lanes or command.number
    )
    return _STEP_FRAME if is_bare else encode(command)


def frame_of_bare(reply: Outcome) -> bytes | None:
    """Return the frame of ``reply`` if it is the reply to a bare step."""
    if type(reply) is not StepReply or reply.text_columns or reply.infos or reply.num_deviations:
        return None
    return None if any(reply.final_infos.values()) else _REPLY_FRAME
