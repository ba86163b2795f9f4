"""Seeds of an evaluation's episodes."""

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import as_int

_LAST_SEED = 2**63 - 1


def seed_of(index: int, first: int | None) -> int | None:
    """Return the seed of an episode; None: it has none."""
    return None if first is None else first + index


def check_seeds(episodes: int, seed: int | None) -> None:
    """Refuse a number of episodes or a seed that no evaluation can use.

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
        return
    first = as_int("seed", seed)
    most = _LAST_SEED - (count - 1)
    if not 0 <= first <= most:
        raise ConfigurationError(
            f"seed={first} cannot seed {count} episodes, which start with {first} to "
            f"{first + count - 1}; give one from 0 to {most}, or none"
        )
