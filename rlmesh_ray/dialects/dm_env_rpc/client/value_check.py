"""Checks of a dm_env_rpc server's values, as an endpoint of this package checks its environment.

The protocol leaves it to both ends to respect the bounds of the specs, and does not mention NaN.
"""

import logging

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ConformanceError, RemoteEnvError
from rlmesh_ray.spaces.leaves import Column, leaves
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.spaces.validation import (
    Checker,
    ConformanceWarning,
    ValidationMode,
    WarningCounter,
    check_rewards,
    warnings_as_texts,
    warnings_info,
)

_LOG = logging.getLogger(__name__)


class ValueCheck:
    """Checks the observations and rewards of one session.

    Args:
        observation_space: A lane's.
        num_lanes: Width of the session.
        policy: What happens to an observation out of its range, and to a reward that is not
            finite. NaN in an observation is refused with every policy.
        address: The server's, for messages.
    """

    def __init__(
        self, observation_space: SpaceSpec, num_lanes: int, policy: ValidationMode, address: str
    ) -> None:
        self._checker = Checker(leaves(observation_space), policy)
        self._num_lanes = num_lanes
        self._policy = policy
        self._address = address
        self._warnings = WarningCounter()

    @property
    def num_deviations(self) -> int:
        """Number of delivered values out of range, rewards included: one a leaf and step."""
        return self._warnings.num_found

    def check(
        self, observation: list[Column], rewards: NDArray[np.float64] | None = None
    ) -> dict[str, object]:
        """Return infos with a warning for each kind and leaf that has had none in this session.

        Args:
            observation: One column a leaf, over all lanes.
            rewards: ``(num_lanes,) float64``; None: it was a reset.

        Raises:
            RemoteEnvError: A value is refused; that ends the session, as at our own endpoints.
        """
        try:
            side = "observation"
            found = [ConformanceWarning.of(side, one) for one in self._checker.check(observation)]
            if rewards is not None:
                side = "reward"
                bad = check_rewards(rewards, self._policy)
                found += [ConformanceWarning.of(side, one) for one in bad]
        except ConformanceError as error:
            raise self._refusal(side, error) from error
        return self._untold(found) if found else {}

    def summarize(self) -> None:
        """Log how many values were out of range, if there were more than the warnings name."""
        if self.num_deviations > self._warnings.num_reported:
            _LOG.warning(
                "%s: %d values out of range in this session", self._address, self.num_deviations
            )

    def _untold(self, found: list[ConformanceWarning]) -> dict[str, object]:
        untold = self._warnings.unreported(found)
        for warning in untold:
            _LOG.warning(
                "%s sent a value out of range, which is delivered: %s; "
                "DmEnvRpcSettings(validation='strict') refuses it",
                self._address,
                warning.text,
            )
        return dict(warnings_as_texts(warnings_info(untold, self._num_lanes))) if untold else {}

    def _refusal(self, side: str, error: ConformanceError) -> RemoteEnvError:
        remedy = "fix the server"
        if error.kind == "range":
            remedy += ", or have it delivered: DmEnvRpcSettings(validation='warn')"
        elif error.path:
            remedy += ", or leave it out: DmEnvRpcSettings(observations=...)"
        found = error.about(side)
        return RemoteEnvError("INTERNAL", f"{self._address} sent {found}; {remedy}", False)
