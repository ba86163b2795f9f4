"""Lanes of one model route: in ``rlmesh.protocol.v1`` those of the route's contract.

A dialect whose requests name no lanes has another ``RouteLanes``.
"""

from collections.abc import Sequence
from typing import Protocol

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.episodes import MAX_ID_CHARACTERS
from rlmesh_ray.protocol.messages import PredictSlot


class RouteLanes(Protocol):
    """The lanes of one route, which key the policy's state."""

    @property
    def num_reserved(self) -> int:
        """Number of lanes that the route has from the start; 0 where episodes get and free them."""

    def assign_lanes(self, slots: Sequence[PredictSlot]) -> Sequence[PredictSlot]:
        """Return the slots of a Predict with the lanes that key the policy's state.

        Raises:
            CodecError: The slots are ambiguous, out of range, or have too long ids.
            CapacityError: There are too many lanes already; nothing has changed.
        """

    def note_failed(self, slots: Sequence[PredictSlot]) -> None:
        """Note that a Predict with these rows has not been answered with actions."""

    def lanes_of(self, episode_ids: Sequence[str]) -> list[int]:
        """Return the lanes of the known episodes among ``episode_ids``, without duplicates."""

    def free(self, episode_ids: Sequence[str]) -> None:
        """Free the lanes of episodes, whose states the policy has dropped."""

    def clear(self) -> None:
        """Free all lanes, since the policy has dropped the states of the route."""


class ContractLanes:
    """The ``num_envs`` lanes of the route's contract; each slot names its lane.

    Args:
        num_envs: Number of lanes in the contract.

    Raises:
        CodecError: ``num_envs`` is below 1.
    """

    def __init__(self, num_envs: int) -> None:
        if num_envs < 1:
            raise CodecError(
                f"ConfigureRoute's contract has num_envs = {num_envs}; set it to the number of the "
                "environment's lanes, 1 or more"
            )
        self.num_reserved = num_envs

    def assign_lanes(self, slots: Sequence[PredictSlot]) -> Sequence[PredictSlot]:
        """Return ``slots`` unchanged after checking that they are distinct lanes of the route."""
        num_envs = self.num_reserved
        check_id_lengths([slot.episode_id for slot in slots])
        if len(slots) == 1 and 0 <= slots[0].env_index < num_envs:
            return slots
        if not slots:
            raise CodecError("Predict names no slots; give one for each row of the observation")
        lanes = {slot.env_index for slot in slots}
        if len(lanes) < len(slots):
            raise CodecError("Predict names an env_index twice; each slot needs its own")
        if min(lanes) < 0 or max(lanes) >= num_envs:
            raise CodecError(
                f"Predict names env_index {min(lanes)} to {max(lanes)}; the route's contract has "
                f"num_envs = {num_envs}"
            )
        return slots

    def note_failed(self, slots: Sequence[PredictSlot]) -> None:
        """Do nothing: the client marks where episodes begin."""

    def lanes_of(self, episode_ids: Sequence[str]) -> list[int]:
        """Return no lanes: they are not assigned by episode."""
        return []

    def free(self, episode_ids: Sequence[str]) -> None:
        """Do nothing: the contract's lanes are never freed."""

    def clear(self) -> None:
        """Do nothing: the contract's lanes are never freed."""


def check_id_lengths(episodes: Sequence[str]) -> None:
    """Refuse long episode ids: a policy keeps one for each lane."""
    if episodes and max(map(len, episodes)) > MAX_ID_CHARACTERS:
        raise CodecError(f"predict has an episode_id of more than {MAX_ID_CHARACTERS} characters")
