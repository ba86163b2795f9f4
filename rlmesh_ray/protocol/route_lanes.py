"""Lanes of one model route: in ``rlmesh.protocol.v1`` those of the route's contract.

A dialect whose requests name no lanes has another ``RouteLanes``.
"""

from collections.abc import Sequence
from typing import Protocol

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.episodes import MAX_ID_CHARACTERS
from rlmesh_ray.protocol.messages import PredictSlot


class RouteLanes(Protocol):
    """What a route's requests may be about."""

    @property
    def num_reserved(self) -> int:
        """How many lanes the route has from the start; 0: they come and go."""

    def assign_lanes(self, slots: Sequence[PredictSlot]) -> Sequence[PredictSlot]:
        """Return the rows of a Predict with the lanes that the policy knows them by.

        Raises:
            CodecError: They would make the policy's state ambiguous, or grow without bound.
            CapacityError: There are too many lanes already; nothing has changed.
        """

    def note_failed(self, slots: Sequence[PredictSlot]) -> None:
        """Note that a Predict with these rows has not been answered with actions."""

    def lanes_of(self, episode_ids: Sequence[str]) -> list[int]:
        """Return the lanes of those episodes that are known, each once."""

    def free(self, episode_ids: Sequence[str]) -> None:
        """Free the lanes of episodes, whose states the policy has dropped."""

    def clear(self) -> None:
        """Free all lanes, since the policy has dropped the states of the route."""


class ContractLanes:
    """As many lanes as the contract says; each row names its own.

    Args:
        num_envs: The contract's.

    Raises:
        CodecError: There is no lane.
    """

    def __init__(self, num_envs: int) -> None:
        if num_envs < 1:
            raise CodecError(
                f"ConfigureRoute's contract has num_envs = {num_envs}; set it to the number of the "
                "environment's lanes, 1 or more"
            )
        self.num_reserved = num_envs

    def assign_lanes(self, slots: Sequence[PredictSlot]) -> Sequence[PredictSlot]:
        """Return ``slots`` as they are, which are different lanes of the route."""
        num_envs = self.num_reserved
        check_id_lengths([slot.episode_id for slot in slots])
        if len(slots) == 1 and 0 <= slots[0].env_index < num_envs:
            return slots
        if not slots:
            raise CodecError("Predict names no slots; give one a row of the observation")
        lanes = {slot.env_index for slot in slots}
        if len(lanes) < len(slots):
            raise CodecError("Predict names an env_index twice; each slot needs one of its own")
        if min(lanes) < 0 or max(lanes) >= num_envs:
            raise CodecError(
                f"Predict names env_index {min(lanes)} to {max(lanes)}; the route's contract has "
                f"num_envs = {num_envs}"
            )
        return slots

    def note_failed(self, slots: Sequence[PredictSlot]) -> None:
        """Nothing to be noted: the client says where episodes begin."""

    def lanes_of(self, episode_ids: Sequence[str]) -> list[int]:
        """Return none: lanes are not known by their episodes."""
        return []

    def free(self, episode_ids: Sequence[str]) -> None:
        """Nothing to be freed: the lanes are the contract's."""

    def clear(self) -> None:
        """Nothing to be freed: the lanes are the contract's."""


def check_id_lengths(episodes: Sequence[str]) -> None:
    """Refuse ids that a policy would have to keep, one a lane, whatever their length."""
    if episodes and max(map(len, episodes)) > MAX_ID_CHARACTERS:
        raise CodecError(f"predict has an episode_id of more than {MAX_ID_CHARACTERS} characters")
