"""Validation of ModelServer's options, before they are used."""

import operator

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.policy import Policy, traits_of
from rlmesh_ray.options import as_int
from rlmesh_ray.wire.rlmesh_v1.limits import MAX_MESSAGE_BYTES, max_predict_bytes

DEFAULT_MODEL_MESSAGE_BYTES = 2**25
"""Largest message to a policy whose observation space is not known."""
DEFAULT_STUCK_AFTER_S = 5.0
"""After how many seconds at one batch, or one call, a policy counts as stuck."""
_LEAST_MESSAGE_BYTES = 2**16
"""Enough for a handshake and a contract."""

LAST_VERSION = 2**63 - 1
"""Highest version of a policy's weights, the largest integer of most languages. Beyond 2**53 the
answers to predictions have it rounded, since it is a double on the wire."""


def checked_version(version: object) -> int:
    """Return the version of a policy's weights as a plain integer.

    Raises:
        ConfigurationError: It is no integer from 1 to 2**63 - 1.
    """
    try:
        as_int = 0 if isinstance(version, bool) else operator.index(version)  # type: ignore[arg-type]
    except TypeError:
        as_int = 0
    if not 1 <= as_int <= LAST_VERSION:
        raise ConfigurationError(
            f"version={version!r} must be an integer from 1 to 2**63 - 1; leave it out to get the "
            "next one"
        )
    return as_int


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


def checked_message_bytes(max_message_bytes: int | None) -> int | None:
    """Return the size of the largest message to accept as a plain integer; None: the default.

    Raises:
        ConfigurationError: It is no integer from 65,536 to 2**31 - 1.
    """
    if max_message_bytes is None:
        return None
    size = as_int("max_message_bytes", max_message_bytes)
    if not _LEAST_MESSAGE_BYTES <= size <= MAX_MESSAGE_BYTES:
        raise ConfigurationError(
            f"max_message_bytes={size} must be from {_LEAST_MESSAGE_BYTES}, which handshakes and "
            f"contracts need, to {MAX_MESSAGE_BYTES}, which is the most that a message can have"
        )
    return size


def message_limit(policy: Policy, max_batch_rows: int, max_message_bytes: int | None) -> int:
    """Return the size of the largest message that an endpoint of ``policy`` accepts.

    Args:
        policy: Its observation space, if known, determines the limit.
        max_batch_rows: See ``ModelServer``.
        max_message_bytes: The operator's option, checked; None: the default.
    """
    if max_message_bytes is not None:
        return max_message_bytes
    observation_space = traits_of(policy).observation_space
    if observation_space is None:
        return DEFAULT_MODEL_MESSAGE_BYTES
    return max_predict_bytes(observation_space, max_batch_rows)
