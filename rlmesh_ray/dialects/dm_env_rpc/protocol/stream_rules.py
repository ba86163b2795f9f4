"""Which requests a dm_env_rpc stream may make, before and after it has joined: PERMISSIONS."""

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
    """How a request is treated."""

    WORK = enum.auto()
    NOTHING = enum.auto()
    """It has no effect, and is answered as done."""
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
# Looked up for each step: so there is one table of errors.
_ERRORS: Mapping[bool, Mapping[type[WorldRequest], ErrorResponse | None]] = {
    is_joined: {kind: _REFUSALS.get(permission) for kind, permission in permissions.items()}
    for is_joined, permissions in PERMISSIONS.items()
}


def permission_error(request: WorldRequest, *, is_joined: bool) -> ErrorResponse | None:
    """Return the refusal of ``request``; None: it is permitted."""
    return _ERRORS[is_joined][type(request)]
