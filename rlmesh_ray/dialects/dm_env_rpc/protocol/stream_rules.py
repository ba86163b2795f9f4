"""What a dm_env_rpc stream may ask for when: all of it in RULINGS."""

import enum
from collections.abc import Mapping

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import (
    Code,
    CreateWorld,
    DestroyWorld,
    ErrorResponse,
    JoinWorld,
    LeaveWorld,
    ListProperties,
    MalformedWorldRequest,
    ReadProperties,
    ResetAgent,
    ResetWorld,
    StepWorld,
    WorldRequest,
    WriteProperties,
)


class Permission(enum.Enum):
    """What becomes of a request."""

    WORK = enum.auto()
    NOTHING = enum.auto()
    """It is answered as if it were done."""
    NOT_JOINED = enum.auto()
    """Refused."""
    JOINED_ALREADY = enum.auto()
    """Refused."""


_ALWAYS = {
    CreateWorld: Permission.WORK,
    ResetWorld: Permission.WORK,
    DestroyWorld: Permission.WORK,
    ReadProperties: Permission.WORK,
    WriteProperties: Permission.WORK,
    ListProperties: Permission.WORK,
    MalformedWorldRequest: Permission.WORK,
}
# By whether the stream has joined a world.
PERMISSIONS: Mapping[bool, Mapping[type[WorldRequest], Permission]] = {
    False: {
        **_ALWAYS,
        JoinWorld: Permission.WORK,
        StepWorld: Permission.NOT_JOINED,
        ResetAgent: Permission.NOT_JOINED,
        LeaveWorld: Permission.NOTHING,
    },
    True: {
        **_ALWAYS,
        JoinWorld: Permission.JOINED_ALREADY,
        StepWorld: Permission.WORK,
        ResetAgent: Permission.WORK,
        LeaveWorld: Permission.WORK,
    },
}
_REFUSALS = {
    Permission.NOT_JOINED: ErrorResponse(
        Code.FAILED_PRECONDITION, "this stream has not joined a world; send JoinWorld first"
    ),
    Permission.JOINED_ALREADY: ErrorResponse(
        Code.FAILED_PRECONDITION,
        "this stream has joined a world already; send LeaveWorld first, or open another stream",
    ),
}
# The same by kind of request alone, since steps are asked about each time.
_OBJECTIONS: Mapping[bool, Mapping[type[WorldRequest], ErrorResponse | None]] = {
    is_joined: {kind: _REFUSALS.get(ruling) for kind, ruling in rulings.items()}
    for is_joined, rulings in PERMISSIONS.items()
}


def permission_error(request: WorldRequest, *, is_joined: bool) -> ErrorResponse | None:
    """Return why ``request`` may not be made now, if it may not."""
    return _OBJECTIONS[is_joined][type(request)]
