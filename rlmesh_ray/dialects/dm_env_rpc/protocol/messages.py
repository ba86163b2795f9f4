"""Codes, states and refusals of a dm_env_rpc stream: one response for each request, in order."""

import enum

DM_ENV_RPC = "dm_env_rpc.v1"
"""Name of the dialect."""
MAX_SETTINGS_BYTES = 2**20
"""Limit of this package's servers for the settings of a request."""


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


class WorldError(Exception):
    """A request was refused or has failed; the stream remains usable.

    Args:
        code: Why.
        message: For the client.
        debug_info: The environment's traceback.
        is_lost: Whether the lanes of the world are lost; if not, they are as before.
    """

    def __init__(
        self, code: Code, message: str, debug_info: str = "", *, is_lost: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.debug_info = debug_info
        self.is_lost = is_lost
