"""The messages of env and model sessions, as the core sees them.

Payloads are opaque here: the core orders messages and never looks inside observations,
actions, contracts or infos. ``wire`` makes these from bytes and bytes from these.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, dataclass_transform

ClassT = TypeVar("ClassT")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def message(cls: type[ClassT]) -> type[ClassT]:
    """Make a dataclass that nothing changes once it is made; the type checker sees to that.

    At run time it is not frozen: to make a frozen one takes three times as long, and a busy
    endpoint makes tens of thousands a second.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


Infos = Mapping[str, object]
"""Infos as gymnasium's vector environments give them: arrays by key, a mask by ``_key``."""


@message
class Request:
    """A message from the client; use one of the subclasses."""

    request_id: str
    """Chosen by the client, echoed in the answer."""


@message
class Response:
    """A message to the client; use one of the subclasses."""

    request_id: str


@message
class MalformedRequest(Request):
    """A frame that is no request: answered in band, like everything else."""

    reason: str


# --- env streams -----------------------------------------------------------------------


@message
class Configure(Request):
    """Name the edition of the session (``rlmesh-wire-v1`` only, before anything else)."""

    edition: str


@message
class Reset(Request):
    """Start new episodes: in all lanes, or in those of ``env_indices``."""

    seeds: tuple[int, ...] = ()
    """Empty, or one a lane (one an index, with ``env_indices``)."""
    options: Mapping[str, object] = field(default_factory=dict)
    timeout_ms: int = 0
    """0: no deadline."""
    env_indices: tuple[int, ...] = ()
    episode_ids: tuple[str, ...] = ()
    """Of the new episodes, where the client mints them: empty, or one a lane that is reset."""


@message
class Step(Request):
    """Apply one action a lane."""

    action: bytes
    """A batch of actions, encoded by the dialect."""
    timeout_ms: int = 0
    env_indices: tuple[int, ...] = ()
    """Only these lanes, whose actions the batch holds; reserved by ``rlmesh.protocol.v1``."""
    episode_ids: tuple[str, ...] = ()
    """Where the client mints them: empty, or of each lane that is stepped. It names the episode
    that an autoreset begins with this step."""


@message
class Render(Request):
    """Ask for a picture."""

    mask: bytes = b""
    timeout_ms: int = 0
    env_indices: tuple[int, ...] = ()
    """Only of these lanes; empty: of all."""


@message
class Close(Request):
    """End the session; nothing may follow."""

    reason: str = ""


EnvRequest = Configure | Reset | Step | Render | Close


@message
class EpisodeRecord:
    """What is known of an episode when its tracking ends."""

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


class EnvErrorCode(enum.Enum):
    """Why an env request failed; values are those of both generations' wires."""

    UNSPECIFIED = 0
    TIMEOUT = 1
    INVALID_ACTION = 2
    NOT_READY = 3
    BUSY = 4
    UNSUPPORTED = 5
    """Of ``rlmesh-wire-v1`` only."""
    INTERNAL = 10
    CRASHED = 11
    CANCELLED = 12
    CLOSED = 13


@message
class Configured(Response):
    """Answers Configure."""


@message
class ResetDone(Response):
    """Answers Reset."""

    observation: bytes
    """A batch over all lanes; in ``rlmesh-wire-v1`` over those that were reset."""
    infos: Infos
    episode_ids: tuple[str, ...]


@message
class StepDone(Response):
    """Answers Step."""

    observation: bytes
    rewards: Sequence[float]
    terminated: bytes
    """One byte a lane, nonzero means set."""
    truncated: bytes
    infos: Infos
    completed_episodes: tuple[EpisodeRecord, ...]
    episode_ids: tuple[str, ...]
    """Empty entries: no episode is tracked there until the next Reset."""
    env_indices: tuple[int, ...] = ()
    """The request's: what else is here has one entry for each of them; empty: for all lanes."""


@message
class Rendered(Response):
    """Answers Render."""

    png: bytes | None


@message
class Closed(Response):
    """Answers Close; the stream ends after it."""

    final_episodes: tuple[EpisodeRecord, ...] = ()


@message
class EnvFailed(Response):
    """Answers any request that could not be satisfied."""

    code: EnvErrorCode
    message: str
    is_recoverable: bool
    debug_info: str = ""
    interrupted_episodes: tuple[EpisodeRecord, ...] = ()


EnvResponse = Configured | ResetDone | StepDone | Rendered | Closed | EnvFailed


@message
class EnvTimings:
    """What an endpoint tells of a request beside its answer (``rlmesh-wire-v1`` only)."""

    endpoint_total_ns: int = 0
    decode_ns: int = 0
    user_ns: int = 0
    """In the environment's worker, and on the way there and back."""
    encode_ns: int = 0
    queue_ns: int = 0
    """From the request's arrival to the beginning of the work on it."""


# --- model streams ---------------------------------------------------------------------


class PredictSlot(NamedTuple):
    """Which lane and episode one row of a batch belongs to.

    A tuple, since a busy endpoint makes a hundred thousand a second.
    """

    env_index: int
    episode_id: str
    step: int
    reset: bool
    """Whether this row is the first observation of its episode."""


@message
class PredictContext:
    """Where a model request belongs; mirrored in the answer."""

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
    """Open a route for one environment contract."""

    contract: object
    """An ``EnvContract``, opaque here; None when the message had none."""


@message
class Predict(RouteRequest):
    """Ask for one action a slot."""

    observation: bytes
    """A batch with one row a slot, encoded by the dialect."""
    mirror: bytes = field(default=b"", compare=False, repr=False)
    """The context as it came, in the dialect's own form."""


@message
class CloseRoute(RouteRequest):
    """Release a route."""

    reason: str = ""


@message
class CloseModel(Request):
    """Ask for the end, after everything outstanding has been answered."""

    reason: str = ""


ModelRequest = ConfigureRoute | Predict | CloseRoute | CloseModel


class ModelErrorCode(enum.Enum):
    """Why a model request failed; values are those of the edition's wire, but for one."""

    UNSPECIFIED = 0
    INVALID_REQUEST = 1
    NOT_CONFIGURED = 2
    BUSY = 3
    UNSUPPORTED = 5
    """Of ``rlmesh-wire-v1`` only."""
    INTERNAL = 10
    CANCELLED = 11
    CLOSED = 12


@message
class RouteConfigured(Response):
    """Answers ConfigureRoute."""


@message
class BatchRun:
    """How a batch of predictions was made."""

    policy_version: int
    """Of the weights that acted; 0 for those that the policy was loaded with."""
    num_rows: int
    """Of all requests in it."""
    forward_ns: int
    """Time that the policy took for all rows together."""
    component_id: str = ""
    """Names the server."""


@message
class TimedBatchRun(BatchRun):
    """A batch of predictions, and what it took beside the policy."""

    decode_ns: int = field(default=0, compare=False)
    """For the observations of all rows together."""
    encode_ns: int = field(default=0, compare=False)
    """For their actions."""


@message
class Predicted(Response):
    """Answers Predict."""

    context: PredictContext
    """The request's own."""
    action: bytes
    """A batch with one row a slot."""
    run: BatchRun | None = None
    """None: the model does not tell."""
    queue_ns: int = 0
    """Time from the request's arrival to the beginning of its batch; with ``run`` only."""
    mirror: bytes = field(default=b"", compare=False, repr=False)
    """The request's own. If there is one it is sent in place of ``context``, which it equals."""


@message
class RouteClosed(Response):
    """Answers CloseRoute."""


@message
class ModelClosed(Response):
    """Answers CloseModel; the stream ends after it."""


@message
class ModelFailed(Response):
    """Answers any request that could not be satisfied."""

    code: ModelErrorCode
    message: str
    is_recoverable: bool
    debug_info: str = ""


ModelResponse = RouteConfigured | Predicted | RouteClosed | ModelClosed | ModelFailed
