"""A policy for Pendulum that chooses several actions at once, for both virtual environments."""

from typing import Any

import numpy as np

HORIZON = 5
_FADING = np.array([1.0, 0.75, 0.5, 0.25, -0.125], np.float32)


def torques(observations: Any) -> Any:
    """Return the next five torques for each row: ``(rows, 3) -> (rows, 5, 1)``, float32.

    Only sums and products, which are the same to the last bit in all versions of NumPy.
    """
    rows = np.asarray(observations, np.float32)
    now = rows[:, 1] * np.float32(-2) + rows[:, 2] * np.float32(0.125) + rows[:, 0]
    return (now[:, np.newaxis] * _FADING)[..., np.newaxis]
