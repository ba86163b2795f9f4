"""The messages of env and model sessions, in the form that ``protocol`` works on.

Payloads are opaque: the sessions order messages and never decode observations, actions, contracts
or infos. ``wire`` converts between these messages and bytes. Docstrings name the message of edition
2026.06 (package ``rlmesh.env.v1`` or ``rlmesh.model.v1``) that each stands for.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self, TypeVar, dataclass_transform

ClassT = TypeVar("ClassT")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def message(cls: type[ClassT]) -> type[ClassT]:
    """Make a dataclass that type checkers treat as frozen.

    At run time it is not: creating a frozen instance takes three times as long, and a busy
    endpoint creates tens of thousands a second.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


Infos = Mapping[str, object]
"""Infos of gymnasium's vector environments: arrays by key, a mask under ``_key``."""
MAX_ID_CHARACTERS = 2**10
"""Longest id that a client may give an episode or a route, which keeps it while it runs."""


@message
class Request:
    """JoinRequest: a message from the client; use one of the subclasses."""

    request_id: str
    """Chosen by the client, echoed in the response."""


@message
class Response:
    """JoinResponse: a message to the client; use one of the subclasses."""

    request_id: str
    """The id of the request that it answers."""


@message
class MalformedRequest(Request):
    """A frame that is no JoinRequest; answered with an in-band error."""

    reason: str


# --- env streams -----------------------------------------------------------------------
#
# A ``timeout_ms`` of 0 is no deadline; empty ``env_indices`` are all lanes. Masks and flags are
# one byte for each lane, nonzero means set.


@message
class Configure(Request):
    """Configure of ``rlmesh-wire-v1`` (none in the edition): names the session's edition."""

    edition: str


@message
class Reset(Request):
    """ResetRequest: start new episodes, in all lanes or in those of ``env_indices``."""

    seeds: tuple[int, ...] = ()
    """Empty, or one seed for each lane that is reset."""
    options: Mapping[str, object] = field(default_factory=dict)
    timeout_ms: int = 0
    env_indices: tuple[int, ...] = ()
    episode_ids: tuple[str, ...] = ()
    """Ids of the new episodes, where the client mints them: empty, or one for each lane that is
    reset."""


@message
class Step(Request):
    """StepRequest: apply one action to each lane."""

    action: bytes
    """A batch of actions, encoded by the dialect."""
    timeout_ms: int = 0
    env_indices: tuple[int, ...] = ()
    """The lanes whose actions the batch holds; ``rlmesh.protocol.v1`` reserves the field."""
    episode_ids: tuple[str, ...] = ()
    """Ids for the episodes that autoresets begin with this step, where the client mints them:
    empty, or one for each lane that is stepped."""


@message
class Render(Request):
    """RenderRequest: return a frame of the lanes."""

    mask: bytes = b""
    timeout_ms: int = 0
    env_indices: tuple[int, ...] = ()


@message
class Close(Request):
    """CloseRequest of an EnvService: end the session; nothing may follow."""

    reason: str = ""


EnvRequest = Configure | Reset | Step | Render | Close


@message
class EpisodeRecord:
    """EpisodeMetadata: counts and cause of an episode whose tracking has ended."""

    episode_id: str
    env_index: int
    step_count: int
    cumulative_reward: float
    terminated: bool
    truncated: bool
    start_timestamp_ns: int
    end_timestamp_ns: int
    seed: int | None = None
    """None: the environment seeded itself."""
    final_info: Infos = field(default_factory=dict)


class _ErrorCode(enum.Enum):
    """A peer's code, of which another implementation may have more."""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        return cls["UNSPECIFIED"]


class EnvErrorCode(_ErrorCode):
    """EnvErrorCode: why an env request failed; the numbers are those of both generations."""

    UNSPECIFIED = 0
    TIMEOUT = 1
    INVALID_ACTION = 2
    NOT_READY = 3
    BUSY = 4
    UNSUPPORTED = 5
    """In ``rlmesh-wire-v1`` only."""
    INTERNAL = 10
    CRASHED = 11
    CANCELLED = 12
    CLOSED = 13


@message
class Configured(Response):
    """The response to Configure (``rlmesh-wire-v1`` only)."""


@message
class ResetDone(Response):
    """ResetResponse: the response to Reset."""

    observation: bytes
    """A batch over all lanes; in ``rlmesh-wire-v1`` over those that were reset."""
    infos: Infos
    episode_ids: tuple[str, ...]


@message
class StepDone(Response):
    """StepResponse: the response to Step."""

    observation: bytes
    rewards: Sequence[float]
    terminated: bytes
    truncated: bytes
    infos: Infos
    completed_episodes: tuple[EpisodeRecord, ...]
    episode_ids: tuple[str, ...]
    """One id for each lane; empty where no episode is tracked before the next Reset."""
    env_indices: tuple[int, ...] = ()
    """The request's: the other fields have one entry for each of them; empty: for all lanes."""


@message
class Rendered(Response):
    """RenderResponse: the response to Render."""

    png: bytes | None
    """None: the environment has no frame."""


@message
class Closed(Response):
    """CloseResponse of an EnvService: the response to Close; the stream ends after it."""

    final_episodes: tuple[EpisodeRecord, ...] = ()


@message
class EnvFailed(Response):
    """EnvError: the response to a request that could not be satisfied."""

    code: EnvErrorCode
    message: str
    is_recoverable: bool
    debug_info: str = ""
    interrupted_episodes: tuple[EpisodeRecord, ...] = ()


EnvResponse = Configured | ResetDone | StepDone | Rendered | Closed | EnvFailed


@message
class EnvTimings:
    """Durations of a request in an endpoint (``rlmesh-wire-v1`` only; none in the edition)."""

    endpoint_total_ns: int = 0
    decode_ns: int = 0
    user_ns: int = 0
    """Time in the environment's worker, with the transfers there and back."""
    encode_ns: int = 0
    queue_ns: int = 0
    """Time from the arrival of the request to its execution."""


# --- model streams ---------------------------------------------------------------------


class PredictSlot(NamedTuple):
    """PredictSlot: lane and episode of one row of a batch.

    A NamedTuple, since a busy endpoint creates a hundred thousand a second.
    """

    env_index: int
    episode_id: str
    step: int
    reset: bool
    """Whether this row is the first observation of its episode."""


@message
class PredictContext:
    """PredictContext: session, route and slots of a model request; mirrored in the response."""

    session_id: str
    route_id: str
    request_id: str
    slots: tuple[PredictSlot, ...] = ()


@message
class RouteRequest(Request):
    """A request that belongs to one route; use one of the subclasses."""

    context: PredictContext


@message
class ConfigureRoute(RouteRequest):
    """ConfigureRouteRequest: open a route for one environment contract."""

    contract: object
    """An ``EnvContract``, opaque here; None where the message has none."""
    horizon: int = 1
    """How many actions of each chunk the client wants; 1: the first one alone. A server whose
    policy chooses one action at a time ignores it."""


@message
class Predict(RouteRequest):
    """PredictRequest: return one action, or a chunk of them, for each slot."""

    observation: bytes
    """A batch with one row for each slot, encoded by the dialect."""
    mirror: bytes = field(default=b"", compare=False, repr=False)
    """The bytes of the context, as the dialect received them."""


@message
class CloseRoute(RouteRequest):
    """CloseRouteRequest: release a route."""

    reason: str = ""


@message
class CloseModel(Request):
    """CloseRequest of a ModelService: end the session after all outstanding responses."""

    reason: str = ""


ModelRequest = ConfigureRoute | Predict | CloseRoute | CloseModel


class ModelErrorCode(_ErrorCode):
    """ModelErrorCode: why a model request failed; with one code that the edition does not have."""

    UNSPECIFIED = 0
    INVALID_REQUEST = 1
    NOT_CONFIGURED = 2
    BUSY = 3
    UNSUPPORTED = 5
    """In ``rlmesh-wire-v1`` only."""
    INTERNAL = 10
    CANCELLED = 11
    CLOSED = 12


@message
class RouteConfigured(Response):
    """ConfigureRouteResponse: the response to ConfigureRoute."""

    horizon: int = 1
    """How many actions the policy chooses at once; in ``rlmesh-wire-v1`` only."""


@dataclass(slots=True, unsafe_hash=True)
class BatchRun:
    """Facts about the batch of a prediction, sent as its OperationTelemetry.

    An endpoint makes one when a batch begins, and adds the times to it.
    """

    policy_version: int
    """Version of the weights; 0 for those that the policy was loaded with."""
    num_rows: int
    """Rows of all requests in the batch."""
    forward_ns: int
    """Time that the policy took for all rows together."""
    component_id: str = ""
    """Names the server."""
    decode_ns: int = field(default=0, compare=False, repr=False)
    """Time that the server took for the observations of all rows together; clients have 0."""
    encode_ns: int = field(default=0, compare=False, repr=False)
    """Time that the server took for their actions; clients have 0."""


@message
class Predicted(Response):
    """PredictResponse: the response to Predict."""

    context: PredictContext
    action: bytes
    """A batch with one row for each slot."""
    run: BatchRun | None = None
    """None: the server sent no telemetry."""
    queue_ns: int = 0
    """Time from the request's arrival to the start of its batch; with ``run`` only."""
    mirror: bytes = field(default=b"", compare=False, repr=False)
    """``Predict.mirror``; if not empty it is sent in place of ``context``, which it equals."""
    later: tuple[bytes, ...] = ()
    """On a route with a horizon above 1: the batches for the steps after this one."""


@message
class RouteClosed(Response):
    """CloseRouteResponse: the response to CloseRoute."""


@message
class ModelClosed(Response):
    """CloseResponse of a ModelService: the response to CloseModel; the stream ends after it."""


@message
class ModelFailed(Response):
    """ModelError: the response to a request that could not be satisfied."""

    code: ModelErrorCode
    message: str
    is_recoverable: bool
    debug_info: str = ""


ModelResponse = RouteConfigured | Predicted | RouteClosed | ModelClosed | ModelFailed
