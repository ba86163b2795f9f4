"""Seeds of an evaluation's episodes."""

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import as_int

_LAST_SEED = 2**63 - 1


def seed_of(index: int, first: int | None) -> int | None:
    """Return the seed of an episode; None: it has none."""
    return None if first is None else first + index


def checked_seed(episodes: int, seed: int | None) -> int | None:
    """Return the first seed as a plain integer, which JSON takes and which cannot overflow.

    Args:
        episodes: Number of episodes.
        seed: Seed of the first one; episode i starts with ``seed + i``. None: no seeds.

    Raises:
        ConfigurationError: One is no whole number, ``episodes`` is below 1, or a seed is below 0
            or above 2**63 - 1.
    """
    count = as_int("episodes", episodes)
    if count < 1:
        raise ConfigurationError(f"episodes={count} must be at least 1")
    if seed is None:
        return None
    first = as_int("seed", seed)
    most = _LAST_SEED - (count - 1)
    if not 0 <= first <= most:
        raise ConfigurationError(
            f"seed={first} cannot seed {count} episodes, which start with {first} to "
            f"{first + count - 1}; give one from 0 to {most}, or none"
        )
    return first
