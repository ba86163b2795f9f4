"""What ModelServer and whoever hosts one may be told: refused where it is said, not in use."""

import operator

from rlmesh_ray.errors import ConfigurationError

LAST_VERSION = 2**63 - 1
"""Of a policy's weights: what most languages can count to. Beyond 2**53 the answers to predictions
tell it rounded, as the wire has it in a double."""


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
