"""What goes to a session's streams, and what comes back, over all lanes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.dialects.dm_env_rpc.client.settings import Settings
from rlmesh_ray.errors import ContractMismatchError
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


def require_unchanged(joined: Any, now: Any, address: str, lane: int) -> None:
    """Compare the specs after a reset with those after the join.

    Args:
        joined: The ``pb.ActionObservationSpecs`` after the join.
        now: After the reset; empty where a server does not send them again, as it should.
        address: For the message.
        lane: Likewise.

    Raises:
        ContractMismatchError: They differ, in a tensor or in a uid.
    """
    if now == joined or not (now.actions or now.observations):
        return
    if _serialized(now) == _serialized(joined):  # bounds that are no numbers equal nothing
        return
    raise ContractMismatchError(
        f"{address} has changed what lane {lane} does or sees with its reset: "
        f"{_difference(joined, now)}; spaces are fixed while a session lasts, so reset with "
        "settings that leave them alone, or join with other ones in a new session"
    )


def _serialized(specs: Any) -> bytes:
    data: bytes = specs.SerializeToString(deterministic=True)
    return data


def _difference(joined: Any, now: Any) -> str:
    for domain in ("actions", "observations"):
        old, new = getattr(joined, domain), getattr(now, domain)
        for uid in sorted({*old, *new}):
            if uid not in new:
                return f"{old[uid].name!r} is gone from its {domain}"
            if uid not in old:
                return f"{new[uid].name!r} is new among its {domain}"
            if old[uid] != new[uid]:
                return f"{new[uid].name!r} is another one among its {domain}"
    return "its specs differ"
