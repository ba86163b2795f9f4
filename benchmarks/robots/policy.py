"""A policy that takes as long for many rows as for one, as a large network on a GPU does."""

import time
from typing import Any

import numpy as np

PREDICTION_S = 0.02
HORIZON = 8


class SleepingPolicy:
    """Sleeps, and returns zeros: actions of ``benchmarks.serving.frames.contract``.

    Args:
        horizon: How many actions it chooses at once.
    """

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon

    def __call__(self, observations: Any) -> Any:
        """Return ``(rows, horizon)`` actions, or ``(rows,)`` with a horizon of 1."""
        time.sleep(PREDICTION_S)
        rows = len(observations)
        return np.zeros(rows if self.horizon == 1 else (rows, self.horizon), np.int64)
