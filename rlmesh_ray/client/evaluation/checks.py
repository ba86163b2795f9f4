"""What the numbers that an evaluation is told must be: refused where they are said, not in use."""

import math
from numbers import Integral, Real

from rlmesh_ray.errors import ConfigurationError


def whole(name: str, value: object) -> int:
    """Return a whole number, one of numpy's too, as a plain integer.

    Raises:
        ConfigurationError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigurationError(f"{name}={value!r} must be a whole number")
    return int(value)


def require_seconds(name: str, value: object, *, may_be_zero: bool = False) -> None:
    """Make sure that an option is a finite number of seconds, above 0 or at least 0.

    Raises:
        ConfigurationError: It is not.
    """
    seconds = math.nan  # which no comparison lets pass
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:  # an integer above every float
            seconds = math.inf
    is_enough = seconds >= 0 if may_be_zero else seconds > 0
    if not (is_enough and seconds < math.inf):
        wanted = "a finite number of seconds" + (", 0 or more" if may_be_zero else " above 0")
        raise ConfigurationError(f"{name}={value!r} must be {wanted}")
