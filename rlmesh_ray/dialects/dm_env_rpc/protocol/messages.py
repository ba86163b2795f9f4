"""Requests of a dm_env_rpc stream, and their error; payloads are opaque.

There is one response for each request, in order. ``Settings`` and actions are as decoded.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from rlmesh_ray.protocol.messages import message

DM_ENV_RPC = "dm_env_rpc.v1"
"""Name of the dialect."""

Settings = Mapping[str, object]


class Code(enum.IntEnum):
    """Why a request was refused: the codes of ``google.rpc.Code`` that are used."""

    INVALID_ARGUMENT = 3
    """An action, a setting or the request itself is wrong."""
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    """No such world, or no such property."""
    PERMISSION_DENIED = 7
    """The property cannot be read, or cannot be written."""
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    """The stream has not joined, has joined already, or another agent prevents it."""
    UNIMPLEMENTED = 12
    INTERNAL = 13
    """The environment failed."""


class SequenceState(enum.IntEnum):
    """State of an agent's sequence after a step; the wire's numbers."""

    RUNNING = 1
    TERMINATED = 2
    INTERRUPTED = 3


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """Answers a request that was refused or has failed; the stream goes on."""

    code: Code
    message: str
    debug_info: str = ""
    """The environment's traceback."""


@dataclass(frozen=True, slots=True)
class CreateWorld:
    """Make a world."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class JoinWorld:
    """Become an agent in a world."""

    world_name: str
    """Empty: a world of the endpoint's own."""
    settings: Settings


@message
class StepWorld:
    """Act, or begin a sequence."""

    actions: Mapping[int, object]
    """By uid; ignored by the first step of a sequence."""
    requested: tuple[int, ...]
    """Uids of the observations to return."""


@dataclass(frozen=True, slots=True)
class ResetAgent:
    """End the agent's own sequence."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class ResetWorld:
    """End the sequences of all agents of a world."""

    world_name: str
    settings: Settings


@dataclass(frozen=True, slots=True)
class LeaveWorld:
    """Cease to be an agent."""


@dataclass(frozen=True, slots=True)
class DestroyWorld:
    """End a world without agents."""

    world_name: str


@dataclass(frozen=True, slots=True)
class ReadProperties:
    """Ask for the values of properties."""

    keys: tuple[str, ...]
    is_core: bool
    """Whether it is a core message of the specification, and not the present extension."""


@dataclass(frozen=True, slots=True)
class WriteProperties:
    """Set properties."""

    values: Settings
    is_core: bool


@dataclass(frozen=True, slots=True)
class ListProperties:
    """Ask for the properties below some nodes."""

    keys: tuple[str, ...]
    """Listable nodes; empty text: the root."""
    is_core: bool


@dataclass(frozen=True, slots=True)
class MalformedWorldRequest:
    """A frame that is no request, or one of an unknown kind."""

    refusal: ErrorResponse


WorldRequest = (
    CreateWorld
    | JoinWorld
    | StepWorld
    | ResetAgent
    | ResetWorld
    | LeaveWorld
    | DestroyWorld
    | ReadProperties
    | WriteProperties
    | ListProperties
    | MalformedWorldRequest
)
