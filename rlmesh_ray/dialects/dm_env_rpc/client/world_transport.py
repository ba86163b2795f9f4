"""What goes to a session's streams, and what comes back, over all lanes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.dialects.dm_env_rpc.client.settings import Settings
from rlmesh_ray.spaces.leaves import Column


@dataclass(frozen=True, slots=True)
class VectorStep:
    """What a step has led to; one entry a lane everywhere."""

    observation: list[Column]
    """One a leaf, in memory of its own."""
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


class WorldTransport(Protocol):
    """Carries requests to lanes; answers come in the order of the requests."""

    def send_reset(self, lanes: Sequence[int], seeds: Sequence[int], settings: Settings) -> None:
        """Begin new sequences in ``lanes``, without waiting.

        Args:
            lanes: Indices, at least one.
            seeds: Empty, or one for each of ``lanes``.
            settings: For each of them, beside its seed.
        """

    def receive_reset(self, end_s: float) -> list[Column]:
        """Return all lanes' observations, after the oldest request, a reset.

        Args:
            end_s: When to stop waiting, in seconds of time.monotonic().

        Raises:
            RemoteEnvError: The server refused; another reset may follow.
            ContractMismatchError: The specs have changed.
            RemoteProtocolError: An answer breaks the protocol.
            EndpointError: A stream broke.
        """

    def send_step(self, actions: Sequence[Column]) -> None:
        """Apply one action a lane, without waiting."""

    def receive_step(self, end_s: float) -> VectorStep:
        """Return what the oldest request, a step, has led to; errors as of ``receive_reset``."""
