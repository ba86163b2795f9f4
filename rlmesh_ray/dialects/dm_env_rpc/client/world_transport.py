"""Transport of a session's requests and answers over all lanes; check for changed specs."""

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
    """Result of a step; every column has one entry a lane."""

    observation: list[Column]
    """One column a leaf; they share no memory with others."""
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


class WorldTransport(Protocol):
    """Sends requests for lanes; answers are received in the order of the requests."""

    def send_reset(self, lanes: Sequence[int], seeds: Sequence[int], settings: Settings) -> None:
        """Begin new sequences in ``lanes``, without waiting.

        Args:
            lanes: Indices, at least one.
            seeds: Empty, or one for each of ``lanes``.
            settings: Settings of each reset, besides the seed.
        """

    def receive_reset(self, end_s: float) -> list[Column]:
        """Return all lanes' observations after the oldest request, a reset.

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
        """Return the result of the oldest request, a step; raises as ``receive_reset``."""


def require_unchanged(joined: Any, now: Any, address: str, lane: int) -> None:
    """Compare the specs after a reset with those after the join.

    Args:
        joined: The ``pb.ActionObservationSpecs`` after the join.
        now: Those after the reset; empty: the server does not repeat them.
        address: The server's, for the message.
        lane: The agent's, for the message.

    Raises:
        ContractMismatchError: They differ, in a tensor or in a uid.
    """
    if now == joined or not (now.actions or now.observations):
        return
    if _serialized(now) == _serialized(joined):  # NaN in bounds does not equal itself
        return
    raise ContractMismatchError(
        f"{address} has changed the actions or observations of lane {lane} with its reset: "
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
