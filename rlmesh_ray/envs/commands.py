"""What an endpoint and its environment's worker process say to each other.

One reply a command, in order. Arrays do not travel in these: actions lie in the shared-memory
block before a command is sent, observations, rewards and flags when its reply arrives. Text
columns have no fixed size and travel here, in the order of the space's text leaves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlmesh_ray.protocol.episodes import EpisodeStart
from rlmesh_ray.protocol.messages import Infos
from rlmesh_ray.protocol.outcomes import Failure
from rlmesh_ray.spaces.conformance import ValidationMode
from rlmesh_ray.spaces.contract import EnvContract

TextColumns = tuple[tuple[str, ...], ...]
"""One entry a text leaf, each with one string a lane, unless something else is said."""


@dataclass(frozen=True, slots=True)
class ResetCommand:
    """Start new episodes."""

    seeds: tuple[int | None, ...] = ()
    """One for each lane that is reset, or empty."""
    options: Mapping[str, object] | None = None
    lanes: tuple[int, ...] = ()
    """Which lanes; empty: all."""


@dataclass(frozen=True, slots=True)
class StepCommand:
    """Apply the actions in the block, of all lanes or of some.

    What the block holds of the others, observations, rewards and flags, is left as it is.
    """

    text_columns: TextColumns = ()
    """One string for each lane that is stepped."""
    lanes: tuple[int, ...] = ()
    """Which lanes, in any order; empty: all. Only where ``Started.steps_subsets``."""
    autoreset_lanes: tuple[int, ...] = ()
    """Lanes in which an autoreset begins an episode with this step that counts as one."""

    def __reduce__(self) -> tuple[type["StepCommand"], tuple[object, ...]]:
        # Two messages a step: what dataclasses generate for slots takes three times as long.
        return StepCommand, (self.text_columns, self.lanes, self.autoreset_lanes)


@dataclass(frozen=True, slots=True)
class RenderCommand:
    """Ask for a picture."""

    lanes: tuple[int, ...] = ()
    """Which lanes; empty: all."""


@dataclass(frozen=True, slots=True)
class CallCommand:
    """Call an attribute of the environment of each lane, or read it if it is no method."""

    name: str
    """One that the operator allows."""
    arguments: tuple[object, ...] = ()
    lanes: tuple[int, ...] = ()
    """Which lanes; empty: all."""


@dataclass(frozen=True, slots=True)
class StartSessionCommand:
    """Take the requests of a session from now on; has no reply.

    The progress (``transport.session_progress``) says with which number they begin.
    """


@dataclass(frozen=True, slots=True)
class SkipRequestCommand:
    """Note that the endpoint has refused a request itself; has no reply."""

    number: int


@dataclass(frozen=True, slots=True)
class OpenDirectCommand:
    """Begin to answer steps over a direct road, too; one that is there already ends.

    Descriptors have come before it on a socket of their own. Over TCP it is one, the connection.
    Over shared memory they are four: the road itself, a new block's, to be used instead of the old
    one, and the eventfds of this end and of the client's.
    """

    tag_arrays: bool
    """Whether the client knows arrays in infos."""
    num_descriptors: int


@dataclass(frozen=True, slots=True)
class SetEpisodesCommand:
    """Open the road for steps of these episodes, or shut it; has no reply."""

    episodes: tuple[EpisodeStart | None, ...]
    """The latest of each lane; empty: shut it."""


@dataclass(frozen=True, slots=True)
class CloseDirectCommand:
    """End the road, after the step that is in progress; go back to the worker's own block."""


@dataclass(frozen=True, slots=True)
class CloseEnvCommand:
    """Close the environment and the road; only a RecreateEnvCommand may follow, or the end."""


@dataclass(frozen=True, slots=True)
class RecreateEnvCommand:
    """Create a fresh environment, for the next session; the old one is closed if it is not yet."""


@dataclass(frozen=True, slots=True)
class StopCommand:
    """Close the environment and end the process; has no reply."""


Command = (
    ResetCommand
    | StepCommand
    | RenderCommand
    | CallCommand
    | StartSessionCommand
    | SkipRequestCommand
    | OpenDirectCommand
    | SetEpisodesCommand
    | CloseDirectCommand
    | CloseEnvCommand
    | RecreateEnvCommand
    | StopCommand
)


@dataclass(frozen=True, slots=True)
class ResetReply:
    """Answers ResetCommand; the observations of all lanes are in the block."""

    infos: Infos
    text_columns: TextColumns = ()


@dataclass(frozen=True, slots=True)
class StepReply:
    """Answers StepCommand; observations, rewards and flags are in the block.

    All stand at the places of their lanes. Infos say nothing of lanes that were not stepped.
    """

    infos: Infos
    final_infos: Mapping[int, Infos] = field(default_factory=dict)
    """By lane: the last infos of each episode that ended on this step."""
    text_columns: TextColumns = ()

    def __reduce__(self) -> tuple[type["StepReply"], tuple[object, ...]]:
        return StepReply, (self.infos, self.final_infos, self.text_columns)


@dataclass(frozen=True, slots=True)
class RenderReply:
    """Answers RenderCommand."""

    png: bytes | None
    """None: the environment gives no frame."""
    took_s: float = 0.0
    """How long it took."""


@dataclass(frozen=True, slots=True)
class CallReply:
    """Answers CallCommand."""

    results: tuple[object, ...]
    """One for each lane that was called."""


@dataclass(frozen=True, slots=True)
class OpenDirectReply:
    """Answers OpenDirectCommand; from here on the new block is used."""


@dataclass(frozen=True, slots=True)
class OpenDirectRefused:
    """Answers OpenDirectCommand where the process lacks something; no connection is opened."""

    message: str
    """What it lacks."""


@dataclass(frozen=True, slots=True)
class CloseDirectReply:
    """Answers CloseDirectCommand; from here on the worker's own block is used."""


@dataclass(frozen=True, slots=True)
class CloseEnvReply:
    """Answers CloseEnvCommand; likewise."""


@dataclass(frozen=True, slots=True)
class RecreateEnvReply:
    """Answers RecreateEnvCommand."""


Reply = (
    ResetReply
    | StepReply
    | RenderReply
    | CallReply
    | OpenDirectReply
    | OpenDirectRefused
    | CloseDirectReply
    | CloseEnvReply
    | RecreateEnvReply
)
Outcome = Reply | Failure


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what to run, and in which surroundings."""

    payload: bytes
    """``EnvSource.payload``."""
    num_envs: int
    autoresets: bool
    """See ``EnvSource``."""
    can_recreate: bool
    description: str
    validation: ValidationMode
    truncates: bool
    """See ``EnvSource.truncates_on_bad_value``."""
    spin: bool | None
    """See ``EnvSource``."""
    sys_path: tuple[str, ...]
    """Of the parent, so that whatever it can import can be imported here."""
    pythonpath: str | None
    """The parent's own variable: what the environment's subprocesses shall inherit."""


@dataclass(frozen=True, slots=True)
class Started:
    """The environment exists.

    The parent answers with three descriptors: of the block, of the progress, and of the socket that
    further ones come over.
    """

    contract: EnvContract
    steps_subsets: bool
    """Whether it can step any of its lanes alone: they are single environments that do not reset
    themselves."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The environment could not be created; the process ends."""

    message: str
    traceback_text: str
