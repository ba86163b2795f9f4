"""Checks what goes into an environment and what comes out of it."""

from collections.abc import Sequence

import numpy as np

from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.spaces.batch import Column, leaves
from rlmesh_ray.spaces.conformance import Checker, ValidationMode, Violation
from rlmesh_ray.spaces.conformance_warnings import ConformanceWarning
from rlmesh_ray.spaces.multi_agent import filler_of_leaf
from rlmesh_ray.spaces.spec import SpaceSpec


class BatchValidator:
    """Checks the batches of one side of a session.

    Args:
        side: ``"action"`` or ``"observation"``.
        spec: Of one lane.
        num_lanes: Width of the session.
        validation: How range deviations are dealt with.
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
        """Return a warning for each kind and leaf that is out of its range.

        Args:
            columns: One a leaf, coerced.
            lanes: Whose the rows of ``columns`` are; empty: there is one for every lane.

        Raises:
            ConformanceError: As ``Checker.check`` does.
        """
        found = self._found(columns, lanes) if lanes else self._checker.check(columns)
        return [ConformanceWarning.of(self._side, deviation) for deviation in found]

    def _found(self, rows: Sequence[Column], lanes: Sequence[int]) -> list[Violation]:
        try:
            if not self._checker.check(rows):
                return []
        except ConformanceError:
            pass
        # Once more, at their lanes' places: what is found names its lane.
        return self._checker.check(self._in_place(rows, lanes))

    def _in_place(self, rows: Sequence[Column], lanes: Sequence[int]) -> list[Column]:
        """Return full columns that hold ``rows``, and else what conforms."""
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
    """Return copies of the rows of ``lanes``, in their order."""
    return [
        tuple(column[lane] for lane in lanes) if isinstance(column, tuple) else column[list(lanes)]
        for column in columns
    ]
