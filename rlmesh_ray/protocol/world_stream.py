"""What a dm_env_rpc stream may ask for when: all of it in RULINGS."""

import enum
from collections.abc import Mapping

from rlmesh_ray.protocol.world_messages import (
    Code,
    CreateWorld,
    DestroyWorld,
    JoinWorld,
    LeaveWorld,
    ListProperties,
    ReadProperties,
    Refusal,
    ResetAgent,
    ResetWorld,
    StepWorld,
    UnreadableRequest,
    WorldRequest,
    WriteProperties,
)


class Ruling(enum.Enum):
    """What becomes of a request."""

    WORK = enum.auto()
    NOTHING = enum.auto()
    """It is answered as if it were done."""
    NOT_JOINED = enum.auto()
    """Refused."""
    JOINED_ALREADY = enum.auto()
    """Refused."""


_ALWAYS = {
    CreateWorld: Ruling.WORK,
    ResetWorld: Ruling.WORK,
    DestroyWorld: Ruling.WORK,
    ReadProperties: Ruling.WORK,
    WriteProperties: Ruling.WORK,
    ListProperties: Ruling.WORK,
    UnreadableRequest: Ruling.WORK,
}
# By whether the stream has joined a world.
RULINGS: Mapping[bool, Mapping[type[WorldRequest], Ruling]] = {
    False: {
        **_ALWAYS,
        JoinWorld: Ruling.WORK,
        StepWorld: Ruling.NOT_JOINED,
        ResetAgent: Ruling.NOT_JOINED,
        LeaveWorld: Ruling.NOTHING,
    },
    True: {
        **_ALWAYS,
        JoinWorld: Ruling.JOINED_ALREADY,
        StepWorld: Ruling.WORK,
        ResetAgent: Ruling.WORK,
        LeaveWorld: Ruling.WORK,
    },
}
_REFUSALS = {
    Ruling.NOT_JOINED: Refusal(
        Code.FAILED_PRECONDITION, "this stream has not joined a world; send JoinWorld first"
    ),
    Ruling.JOINED_ALREADY: Refusal(
        Code.FAILED_PRECONDITION,
        "this stream has joined a world already; send LeaveWorld first, or open another stream",
    ),
}
# The same by kind of request alone, since steps are asked about each time.
_OBJECTIONS: Mapping[bool, Mapping[type[WorldRequest], Refusal | None]] = {
    is_joined: {kind: _REFUSALS.get(ruling) for kind, ruling in rulings.items()}
    for is_joined, rulings in RULINGS.items()
}


def objection(request: WorldRequest, *, is_joined: bool) -> Refusal | None:
    """Return why ``request`` may not be made now, if it may not."""
    return _OBJECTIONS[is_joined][type(request)]
