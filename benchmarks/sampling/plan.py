"""Plan of a measurement of sampling: its peers.

Standard library only: the command line needs it for its help.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Rival(enum.StrEnum):
    """What sampling through endpoints is compared with."""

    RLLIB = "rllib"
    """RLlib's own SingleAgentEnvRunner, with the environments in its process."""
    BARE = "bare"
    """The loop over gymnasium's SyncVectorEnv without a policy: the limit of one core."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The cases, the peers, the repetitions and the durations."""

    rivals: Sequence[Rival] = tuple(Rival)
    repetitions: int = 5
    warm_up_s: float = 1.0
    """Before each measurement; not counted."""
    seconds: float = 5.0
    """Of each measurement, at least."""
