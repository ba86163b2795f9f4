"""What ModelServer and whoever hosts one may be told: refused where it is said, not in use."""

import operator

from rlmesh_ray.errors import ConfigurationError

LAST_VERSION = 2**63 - 1
"""Of a policy's weights: what most languages can count to. Beyond 2**53 the answers to predictions
tell it rounded, as the wire has it in a double."""


def require_count(name: str, value: object) -> None:
    """Make sure that an option is a whole number, 1 or more.

    Raises:
        ConfigurationError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name}={value!r} must be a whole number, 1 or more")


def require_duration(name: str, value: object) -> None:
    """Make sure that an option is a number of seconds, more than 0; infinity is one.

    Raises:
        ConfigurationError: It is not.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value > 0:  # type: ignore[operator]  # a number; false for NaN
        raise ConfigurationError(f"{name}={value!r} must be a number of seconds, more than 0")


def checked_version(version: object) -> int:
    """Return the version of a policy's weights as a plain integer.

    Raises:
        ConfigurationError: It is no integer from 1 to 2**63 - 1.
    """
    try:
        whole = 0 if isinstance(version, bool) else operator.index(version)  # type: ignore[arg-type]
    except TypeError:
        whole = 0
    if not 1 <= whole <= LAST_VERSION:
        raise ConfigurationError(
            f"version={version!r} must be an integer from 1 to 2**63 - 1; leave it out to get the "
            "next one"
        )
    return whole


def version_after(latest: int) -> int:
    """Return the next version.

    Raises:
        ConfigurationError: ``latest`` is the last one that there can be.
    """
    if latest >= LAST_VERSION:
        raise ConfigurationError(
            f"no version is left after {latest}: start anew, and leave versions out or count from 1"
        )
    return latest + 1
