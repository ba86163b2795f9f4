"""How many episodes, and the seeds that they start with."""

from rlmesh_ray.errors import ConfigurationError

# The wire has 64 bits for a seed, and gymnasium takes none below 0.
_LAST_SEED = 2**63 - 1


def check_seeds(episodes: int, seed: int | None) -> None:
    """Refuse what no evaluation can run.

    Args:
        episodes: How many.
        seed: Of the first one; episode i starts with ``seed + i``. None: there are no seeds.

    Raises:
        ConfigurationError: There are no episodes, or a seed is below 0 or above 2**63 - 1.
    """
    if episodes < 1:
        raise ConfigurationError(f"episodes={episodes} must be at least 1")
    most = _LAST_SEED - (episodes - 1)
    if seed is not None and not 0 <= seed <= most:
        raise ConfigurationError(
            f"seed={seed} cannot seed {episodes} episodes, which start with {seed} to "
            f"{seed + episodes - 1}; give one from 0 to {most}, or none"
        )
