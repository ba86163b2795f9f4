"""Messages of model sessions of generation ``rlmesh-wire-v1``.

An adapter is a route of the edition; its id is that of its environment. Rows have episodes and no
lanes. Payloads are opaque here, as in ``messages``.
"""

from typing import NamedTuple

from rlmesh_ray.protocol.messages import ModelFailed, Request, Response, message
from rlmesh_ray.protocol.model_session import EpisodesForgotten as EpisodesForgotten


@message
class AdapterContext:
    """Session and adapter of a request; mirrored in the answer."""

    session_id: str
    env_id: str
    """Names the adapter within its session."""
    request_id: str


class RowEpisode(NamedTuple):
    """The episode that one row of a batch belongs to."""

    episode_id: str
    seed: int | None = None


@message
class AdapterRequest(Request):
    """A request that belongs to one adapter; use one of the subclasses."""

    context: AdapterContext


@message
class ResolveAdapter(AdapterRequest):
    """Open an adapter for one kind of environment."""

    env_spec: object
    """An ``EnvContract`` of one lane, opaque here; None when the message had none."""
    edition: str = ""
    execution_horizon: int = 0
    """How many actions of a chunk the runtime would execute; 0 and 1: one."""
    delivers_history: bool = False
    """Whether the runtime would send former observations, if the model asked for them."""


@message
class AdapterPredict(AdapterRequest):
    """Ask for one action a row."""

    observation: bytes
    """A batch with one row an episode, encoded by the dialect."""
    episodes: tuple[RowEpisode, ...]
    step: int | None = None


@message
class GroupedPredict(Request):
    """Ask several adapters at once."""

    groups: tuple[AdapterPredict, ...]
    """Their ``request_id`` is that of their context."""


@message
class ResetAdapter(AdapterRequest):
    """Forget episodes, which have ended."""

    episode_ids: tuple[str, ...]


@message
class ReleaseAdapter(AdapterRequest):
    """Close an adapter."""

    reason: str = ""


@message
class CloseParticipant(Request):
    """Ask for the end, after everything outstanding has been answered."""

    reason: str = ""


AnyAdapterRequest = (
    ResolveAdapter
    | AdapterPredict
    | GroupedPredict
    | ResetAdapter
    | ReleaseAdapter
    | CloseParticipant
)


@message
class AdapterResolved(Response):
    """Answers ResolveAdapter."""

    native_chunk: int | None = None
    """How many actions the model gives at once; None: it does not say."""
    history_keys: tuple[str, ...] = ()
    """Keys of which the model requests former observations."""


@message
class AdapterPredicted(Response):
    """Answers AdapterPredict."""

    context: AdapterContext
    """The request's own."""
    actions: tuple[bytes, ...]
    """The batch for this step, and those of a chunk for the steps after it."""


@message
class GroupedPredicted(Response):
    """Answers GroupedPredict."""

    results: tuple[AdapterPredicted | ModelFailed, ...]
    """One a group, in the request's order."""


@message
class AdapterReleased(Response):
    """Answers ReleaseAdapter."""


@message
class ParticipantClosed(Response):
    """Answers CloseParticipant; the stream ends after it."""


AnyAdapterResponse = (
    AdapterResolved
    | AdapterPredicted
    | GroupedPredicted
    | EpisodesForgotten
    | AdapterReleased
    | ParticipantClosed
    | ModelFailed
)


@message
class ModelTimings:
    """Timings of a prediction; None: the endpoint sends no such number."""

    endpoint_total_ns: int | None = None
    decode_ns: int | None = None
    user_ns: int | None = None
    """In the policy."""
    encode_ns: int | None = None
    queue_ns: int | None = None
    """From the request's arrival to the beginning of its batch."""
    in_flight: int | None = None
    """Requests of the stream that have not been answered."""
    held_episodes: int | None = None
    """Episodes of which the model may keep a state."""
