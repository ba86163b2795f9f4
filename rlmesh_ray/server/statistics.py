"""What an endpoint has done, as it tells whoever asks: plain records that survive pickling.

Counters begin at 0 when the endpoint is made, and only grow.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rlmesh_ray.histogram import Histogram
from rlmesh_ray.models.batcher import BatcherStatistics


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """The sessions of an endpoint."""

    open: int = 0
    """Now."""
    opened: int = 0
    refused: int = 0
    """For want of a place. What a token or a handshake keeps out never comes so far."""
    lost: int = 0
    """Ended without Close, while the endpoint would have gone on."""


@dataclass(frozen=True, slots=True)
class EnvStatistics:
    """What an environment endpoint has done."""

    version: str
    """Of this package."""
    uptime_s: float
    """Since the endpoint was made."""
    sessions: SessionStatistics
    """A world of dm_env_rpc is a session; it is never lost."""
    steps: int
    """Vector steps that succeeded, over whatever road they came."""
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
    """Open sessions by what their steps travel by now: shared_memory, tcp or grpc."""
    worker_restarts: int
    """Worker processes that were replaced within a session, since they had ended or were killed."""
    step_s: Histogram
    """How long the worker took for each of ``steps``. Over a stream with the way to it and back;
    through shared memory without."""


@dataclass(frozen=True, slots=True)
class ModelStatistics(BatcherStatistics):
    """What a policy endpoint has done; ``items`` are predictions."""

    version: str
    """Of this package."""
    uptime_s: float
    """Since the endpoint was made."""
    sessions: SessionStatistics
    routes: int
    """That are open now."""
    policy_version: int
    """Of the weights that act; 0: those that the policy came with."""
    errors: Mapping[str, int]
    """Requests that were answered with an error, by its code."""
    batch_rows: Histogram
    """Rows of each batch that has run."""
    queue_s: Histogram
    """How long each prediction waited for its batch."""
    forward_s: Histogram
    """How long the policy took for each batch."""


Statistics = EnvStatistics | ModelStatistics


@dataclass(frozen=True, slots=True)
class StatisticsPair:
    """Two looks at one endpoint: what has happened between them is what happens now."""

    now: Statistics
    before: Statistics | None = None
    """The look before; None: there was none since the endpoint started."""
