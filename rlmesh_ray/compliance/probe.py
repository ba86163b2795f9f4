"""Specification of the probe: an environment that executes commands of the checks.

Some clauses can be checked with any environment; others need one that ends an episode, sleeps or
returns a wrong observation on command. A server that hosts the probe can be checked on all clauses.
This module specifies it, for implementers in any language; ``rlmesh_ray.testing.probe_env`` is the
implementation in Python.

- The contract's metadata has ``METADATA_KEY`` = 1. Any number of lanes, any autoreset mode.
- ``ACTION_SPACE``: ``command`` is a ``ProbeCommand``, the rest is echoed.
- ``OBSERVATION_SPACE``: ``steps`` counts the steps of the episode, ``noise`` depends on the
  seed and the step alone, ``echo`` is the last action without its command (at a reset
  ``REST``).
- The reward is ``box[0]`` of the action; 0 where that is infinite, since servers may warn of it.
- Infos have ``steps`` and ``command``, both integers.
- ``options["command"]`` makes a reset execute a command (FAIL, SLEEP and the observations).
- Render mode ``rgb_array``: any frame.
"""

import enum
from typing import Any

import numpy as np

from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    TextSpec,
    TupleSpec,
)

METADATA_KEY = "rlmesh_ray.probe"
SLEEP_S = 1.5
"""Duration of SLEEP; longer than any deadline that a check sets."""


class ProbeCommand(enum.IntEnum):
    """Command to a lane of the probe for one step."""

    GO_ON = 0
    TERMINATE = 1
    """The episode ends here: terminated."""
    TRUNCATE = 2
    """The episode ends here: truncated."""
    FAIL = 3
    """The environment raises an error; its text contains ``probe``."""
    SLEEP = 4
    """The environment computes or sleeps for ``SLEEP_S`` before it continues."""
    OBSERVE_NAN = 5
    """``noise`` is ``[NaN, 2]``: one element is NaN, the other merely out of its bounds."""
    OBSERVE_OUT_OF_RANGE = 6
    """``noise`` is ``[2, 0.5]``."""
    OBSERVE_WRONG_SHAPE = 7
    """``noise`` has three elements."""
    OBSERVE_MISSING_KEY = 8
    """The observation has no ``noise``."""
    OBSERVE_INTEGRAL_FLOAT = 9
    """``steps`` is a float with an integral value, to be coerced."""
    OBSERVE_FRACTION = 10
    """``steps`` is 0.5: no integer."""
    OBSERVE_DOUBLE = 11
    """``noise`` is ``[0.25, 0.1]`` at double precision, to be coerced."""
    OBSERVE_TOO_LARGE = 12
    """``steps`` is a float of value 2 ** 40: beyond its dtype."""


def _box(low: list[float], high: list[float], shape: tuple[int, ...], dtype: str) -> BoxSpec:
    little = np.dtype(dtype).newbyteorder("<")
    return BoxSpec(shape, dtype, np.array(low, little).tobytes(), np.array(high, little).tobytes())


_ECHOED = (
    ("box", _box([-1.0], [1.0], (2,), "float32")),
    ("ray", _box([0.0, -np.inf], [np.inf, 0.0], (2,), "float32")),
    ("bits", MultiBinarySpec(3)),
    ("choices", MultiDiscreteSpec((2, 3), (2,), "int64")),
    ("text", TextSpec(1, 4, "abc")),
    ("pair", TupleSpec((DiscreteSpec(2, 0, "int64"), DiscreteSpec(3, -1, "int64")))),
)

ACTION_SPACE = DictSpec((("command", DiscreteSpec(len(ProbeCommand), 0, "int64")), *_ECHOED))
OBSERVATION_SPACE = DictSpec(
    (
        ("steps", _box([0], [10_000], (1,), "int32")),
        ("noise", _box([0.0], [1.0], (2,), "float32")),
        ("echo", DictSpec(_ECHOED)),
    )
)

REST: dict[str, Any] = {
    "box": np.zeros(2, np.float32),
    "ray": np.zeros(2, np.float32),
    "bits": np.zeros(3, np.int8),
    "choices": np.zeros(2, np.int64),
    "text": "a",
    "pair": (0, 0),
}
"""Value of ``echo`` before the first step."""
