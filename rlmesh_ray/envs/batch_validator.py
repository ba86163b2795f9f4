"""BatchValidator: conformance checks of a session's actions or observations."""

from collections.abc import Sequence

import numpy as np

from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.spaces.batch import Column, leaves
from rlmesh_ray.spaces.multi_agent import filler_of_leaf
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.spaces.validation import Checker, ConformanceWarning, ValidationMode, Violation


class BatchValidator:
    """Checks the action batches, or the observation batches, of one session.

    Args:
        side: ``"action"`` or ``"observation"``.
        spec: Space of one lane.
        num_lanes: Width of the session.
        validation: Treatment of range violations.
    """

    def __init__(
        self, side: str, spec: SpaceSpec, num_lanes: int, validation: ValidationMode
    ) -> None:
        self._side = side
        self._leaves = leaves(spec)
        self._num_lanes = num_lanes
        self._checker = Checker(self._leaves, validation)

    def check(
        self, columns: Sequence[Column], lanes: Sequence[int] = ()
    ) -> list[ConformanceWarning]:
        """Return a warning for each kind and leaf of range violations.

        Args:
            columns: One coerced column for each leaf.
            lanes: The lanes of the rows in ``columns``; empty: all lanes.

        Raises:
            ConformanceError: As ``Checker.check``.
        """
        found = self._found(columns, lanes) if lanes else self._checker.check(columns)
        return [ConformanceWarning.of(self._side, violation) for violation in found]

    def _found(self, rows: Sequence[Column], lanes: Sequence[int]) -> list[Violation]:
        try:
            if not self._checker.check(rows):
                return []
        except ConformanceError:
            pass
        # Again with the rows at their lanes' places, so that messages name the lane.
        return self._checker.check(self._in_place(rows, lanes))

    def _in_place(self, rows: Sequence[Column], lanes: Sequence[int]) -> list[Column]:
        """Return columns over all lanes with ``rows``, and conforming fillers elsewhere."""
        columns: list[Column] = []
        for leaf, own in zip(self._leaves, rows, strict=True):
            filler = filler_of_leaf(leaf)
            if isinstance(own, tuple):
                by_lane = dict(zip(lanes, own, strict=True))
                columns.append(tuple(by_lane.get(n, filler) for n in range(self._num_lanes)))
            else:
                column = np.empty((self._num_lanes, *leaf.shape), leaf.dtype)
                column[...] = filler
                column[list(lanes)] = own
                columns.append(column)
        return columns


def rows_of(columns: Sequence[Column], lanes: Sequence[int]) -> list[Column]:
    return [
        tuple(column[lane] for lane in lanes) if isinstance(column, tuple) else column[list(lanes)]
        for column in columns
    ]
