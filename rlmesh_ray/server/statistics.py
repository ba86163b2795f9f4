"""The statistics of an endpoint: plain records that survive pickling.

Counters begin at 0 when the endpoint is made, and only grow.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rlmesh_ray.histogram import Histogram
from rlmesh_ray.server.batch_queue import BatchQueueStatistics


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """The sessions of an endpoint."""

    open: int = 0
    """Now."""
    opened: int = 0
    refused: int = 0
    """Because the endpoint was full. Clients without a token, or with a failed handshake, do not
    count."""
    lost: int = 0
    """Ended without Close, while the endpoint would have gone on."""


@dataclass(frozen=True, slots=True)
class EnvStatistics:
    """The statistics of an environment endpoint."""

    version: str
    """Version of this package."""
    uptime_s: float
    """Since the endpoint was made."""
    sessions: SessionStatistics
    """A world of dm_env_rpc is a session; it is never lost."""
    steps: int
    """Vector steps that succeeded, over all transports."""
    lane_steps: int
    """Steps of single lanes; the one that resets a lane by itself is one of them."""
    resets: int
    """Resets that succeeded, of all lanes or of some."""
    episodes: int
    """Lanes that were seen to end; what is cut off by a Reset or by the end of a session is not."""
    errors: Mapping[str, int]
    """Requests that were answered with an error, by its code."""
    deviations: int
    """Values out of their range, and rewards that are not finite. Of those that were delivered all
    the same, one a vector step, side (action, observation, reward), leaf and kind, however many
    lanes had it. Of those that have truncated episodes (``on_bad_value="truncate"``), one an
    episode, so one a lane."""
    transports: Mapping[str, int]
    """Open sessions by their present transport: shared_memory, tcp or grpc."""
    worker_restarts: int
    """Worker processes that were replaced within a session, since they had ended or were killed."""
    step_s: Histogram
    """How long the worker took for each of ``steps``; over a Join stream, with the way to the
    worker and back."""


@dataclass(frozen=True, slots=True)
class ModelStatistics(BatchQueueStatistics):
    """The statistics of a policy endpoint; ``items`` are predictions."""

    version: str
    """Version of this package."""
    uptime_s: float
    """Since the endpoint was made."""
    sessions: SessionStatistics
    routes: int
    """Open routes."""
    policy_version: int
    """Version of the policy's present weights; 0: those that it was made with."""
    errors: Mapping[str, int]
    """Requests that were answered with an error, by its code."""
    batch_rows: Histogram
    """Rows of each batch that has run."""
    queue_s: Histogram
    """How long each prediction waited for its batch."""
    forward_s: Histogram
    """How long the policy took for each batch."""
    # Last, and with defaults: an endpoint of an older version says nothing of them.
    inference: str = ""
    """How the policy's module runs now: ``"compiled"`` or ``"torch"``; empty: the policy has no
    such choice, or the endpoint does not say."""
    torch_reason: str = ""
    """Why it runs in torch."""


Statistics = EnvStatistics | ModelStatistics


@dataclass(frozen=True, slots=True)
class StatisticsPair:
    """Two statistics of one endpoint, at two times: their difference gives the present rates."""

    now: Statistics
    before: Statistics | None = None
    """The earlier ones; None: there are none since the endpoint started."""
