"""ActionOrderCheck: whether the actions of a batch are in the order of its slots.

A response does not show it by itself. So two observations that get different actions in single
Predicts must get the same actions when they share a Predict.
"""

import numpy as np

from rlmesh_ray.compliance.checks import ClauseBroken, ClauseNotObservable
from rlmesh_ray.compliance.model_subject import ROUTE, RawModelSession, slot
from rlmesh_ray.compliance.observation_cases import rows, varied
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import EnvContract

_NUM_CANDIDATES = 16
# A stochastic policy must not be mistaken for a wrong order: with two equally likely actions that
# happens once in 20,000 checks.
_REPEATS = 6
# Above the rounding differences between batch sizes, below the difference of two actions.
_TOLERANCE = 1e-3
_UNSEEN = "so that the order of its actions cannot be seen"

Actions = list[Column]


class ActionOrderCheck:
    """Requests actions for observations, singly and together.

    Args:
        session: A session with a configured route.
        contract: Contract of the route, with at least two lanes.
    """

    def __init__(self, session: RawModelSession, contract: EnvContract) -> None:
        self._session = session
        self._columns = varied(contract.observation_space, _NUM_CANDIDATES, seed=0)

    def check(self) -> None:
        """Require that two actions are in the order of their slots.

        Raises:
            ClauseBroken: They are not.
            ClauseNotObservable: The policy gives all observations the same action, or one
                observation different ones.
        """
        row, first, second = self._two_that_differ()
        for _ in range(_REPEATS):
            again = self._ask((0, 0)), self._ask((row, 1))
            if not (_is_close(again[0], first) and _is_close(again[1], second)):
                raise ClauseNotObservable(f"the policy does not repeat its actions, {_UNSEEN}")
        together = [self._ask((0, 0), (row, 1)) for _ in range(_REPEATS)]
        matches = [
            _is_close(rows(actions, 0), first) and _is_close(rows(actions, 1), second)
            for actions in together
        ]
        if not any(matches):
            raise ClauseBroken(
                f"two observations get the actions {_shown(first)} and {_shown(second)} one after "
                f"the other, but {_shown(together[0])} in one Predict"
            )
        if not all(matches):
            raise ClauseNotObservable(f"the policy does not repeat its actions, {_UNSEEN}")

    def _two_that_differ(self) -> tuple[int, Actions, Actions]:
        """Return a row that gets another action than row 0, and both actions."""
        first = self._ask((0, 0))
        for row in range(1, _NUM_CANDIDATES):
            second = self._ask((row, 1))
            if not _is_close(first, second):
                return row, first, second
        raise ClauseNotObservable(
            f"the policy has one action for {_NUM_CANDIDATES} different observations, {_UNSEEN}"
        )

    def _ask(self, *rows_and_lanes: tuple[int, int]) -> Actions:
        """Return the actions for some rows, each the first of an episode in its lane."""
        slots = [slot(lane, 0, self._session.new_id()) for _, lane in rows_and_lanes]
        chosen = rows(self._columns, *(row for row, _ in rows_and_lanes))
        request = self._session.predict_request(ROUTE, slots=slots, columns=chosen)
        return self._session.actions(self._session.predict(request), len(slots))


def _is_close(one: Actions, other: Actions) -> bool:
    return all(_is_close_part(*parts) for parts in zip(one, other, strict=True))


def _is_close_part(one: Column, other: Column) -> bool:
    if isinstance(one, tuple) or isinstance(other, tuple):
        return one == other
    if one.dtype.kind in "iub":
        return np.array_equal(one, other)
    left, right = one.astype(np.float64), other.astype(np.float64)
    return np.allclose(left, right, rtol=_TOLERANCE, atol=_TOLERANCE)


def _shown(actions: Actions) -> str:
    parts = [list(part) if isinstance(part, tuple) else part.tolist() for part in actions]
    text = str(parts[0] if len(parts) == 1 else parts)
    return text if len(text) < 80 else text[:80] + "…"
