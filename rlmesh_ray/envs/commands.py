"""Commands of an endpoint to its env worker, and their replies, in order; two commands have none.

Arrays are not in these messages: the actions are in the step buffers before a command is sent, and
observations, rewards and flags when its reply arrives. Text columns have no fixed size and are
sent in the messages, in the order of the space's text leaves. The worker closes its environment
and ends when the endpoint has closed its side of the channel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlmesh_ray.protocol.env_session import EpisodeStart, Failure
from rlmesh_ray.protocol.messages import Infos
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.validation import ValidationMode

if TYPE_CHECKING:
    from rlmesh_ray.envs.env_source import EnvSource

TextColumns = tuple[tuple[str, ...], ...]
"""One entry for each text leaf, with one string for each lane."""


@dataclass(frozen=True, slots=True)
class ResetCommand:
    seeds: tuple[int | None, ...] = ()
    """One for each lane that is reset, or empty."""
    options: Mapping[str, object] | None = None
    lanes: tuple[int, ...] = ()
    """Empty, here and in the other commands: all."""


@dataclass(frozen=True)  # without slots, which are pickled more slowly
class StepCommand:
    """Apply the actions in the step buffers; the results of other lanes stay unchanged."""

    text_columns: TextColumns = ()
    """With one string for each stepped lane."""
    lanes: tuple[int, ...] = ()
    """In any order. Only where ``Started.steps_subsets``."""
    autoreset_lanes: tuple[int, ...] = ()
    """Lanes in which this step begins a tracked episode by autoreset."""


@dataclass(frozen=True, slots=True)
class RenderCommand:
    lanes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CallCommand:
    """Call an attribute of the environment of each lane, or read it if it is no method."""

    name: str
    arguments: tuple[object, ...] = ()
    lanes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SkipRequestCommand:
    """Skip a request that the endpoint has answered itself; has no reply."""

    number: int


@dataclass(frozen=True, slots=True)
class OpenDirectCommand:
    """Serve steps on a direct connection, too; it replaces a former one.

    A Failure of the kind BAD_REQUEST says which resource the process lacks; nothing is open then.
    Its descriptors were sent before it on their own socket. For TCP it is one, the connection. For
    shared memory they are four: the socket, new step buffers that replace the present ones, and the
    eventfds of the worker and of the client.
    """

    tag_arrays: bool
    """Whether the client has the capability NDARRAY."""
    num_descriptors: int


@dataclass(frozen=True, slots=True)
class SetEpisodesCommand:
    """Accept direct steps of these episodes, or refuse all; has no reply."""

    episodes: tuple[EpisodeStart | None, ...]
    """The latest episode of each lane; empty: refuse."""


@dataclass(frozen=True, slots=True)
class CloseDirectCommand:
    """Close the direct connection after the step in progress; use the worker's own step buffers."""


Command = (
    ResetCommand
    | StepCommand
    | RenderCommand
    | CallCommand
    | SkipRequestCommand
    | OpenDirectCommand
    | SetEpisodesCommand
    | CloseDirectCommand
)


@dataclass(frozen=True, slots=True)
class ResetReply:
    """Reply to ResetCommand; the observations of all lanes are in the step buffers."""

    infos: Infos
    text_columns: TextColumns = ()


@dataclass(frozen=True)  # as StepCommand
class StepReply:
    """Reply to StepCommand; observations, rewards and flags are in the step buffers."""

    infos: Infos
    """Of the stepped lanes only."""
    final_infos: Mapping[int, Infos] = field(default_factory=dict)
    """Last infos of each episode that ended on this step, by lane."""
    text_columns: TextColumns = ()


@dataclass(frozen=True, slots=True)
class RenderReply:
    png: bytes | None
    """None: the environment has no frame."""
    took_s: float = 0.0
    """Duration of the call."""


@dataclass(frozen=True, slots=True)
class CallReply:
    results: tuple[object, ...]
    """One for each called lane."""


@dataclass(frozen=True, slots=True)
class DirectReply:
    """Reply to OpenDirectCommand and CloseDirectCommand: which step buffers are used next."""

    is_open: bool
    """Those of the direct connection, if it has any; else the worker's own."""


Reply = ResetReply | StepReply | RenderReply | CallReply | DirectReply
Outcome = Reply | Failure


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a worker: the environment to create, and its import path."""

    source: "EnvSource"
    validation: ValidationMode
    sys_path: tuple[str, ...]
    """``sys.path`` of the parent, so that the worker can import the same modules."""
    pythonpath: str | None
    """PYTHONPATH of the parent, for the environment's subprocesses."""


@dataclass(frozen=True, slots=True)
class Started:
    """Reply to Start: the environment exists.

    The parent then sends three descriptors: of the step buffers, of the progress, and of the socket
    for the descriptors of direct connections.
    """

    contract: EnvContract
    steps_subsets: bool
    """Whether any of its lanes can be stepped alone: they are single environments without
    autoreset."""
    pid: int
    """Of the worker's own process."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Reply to Start: the arguments of ``EnvStartError``; the process ends."""

    message: str
    traceback_text: str
    is_wrong_usage: bool
