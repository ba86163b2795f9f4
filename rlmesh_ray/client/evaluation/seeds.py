"""How many episodes, and the seeds that they start with."""

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import whole

# The wire has 64 bits for a seed, and gymnasium takes none below 0.
_LAST_SEED = 2**63 - 1


def check_seeds(episodes: int, seed: int | None) -> None:
    """Refuse what no evaluation can run.

    Args:
        episodes: How many.
        seed: Of the first one; episode i starts with ``seed + i``. None: there are no seeds.

    Raises:
        ConfigurationError: One is no whole number, there are no episodes, or a seed is below 0 or
            above 2**63 - 1.
    """
    count = whole("episodes", episodes)
    if count < 1:
        raise ConfigurationError(f"episodes={count} must be at least 1")
    if seed is None:
        return
    first = whole("seed", seed)
    most = _LAST_SEED - (count - 1)
    if not 0 <= first <= most:
        raise ConfigurationError(
            f"seed={first} cannot seed {count} episodes, which start with {first} to "
            f"{first + count - 1}; give one from 0 to {most}, or none"
        )
