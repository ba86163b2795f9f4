"""What EnvServer's options may be."""

from rlmesh_ray.errors import ConfigurationError

DEFAULT_MAX_SESSIONS = 16
DEFAULT_STEP_GRACE_S = 5.0


def resets_itself(autoreset: str) -> bool:
    """Tell whether several lanes reset by themselves.

    Raises:
        ConfigurationError: ``autoreset`` is no mode that can be chosen.
    """
    choices = {"next_step": True, "disabled": False}
    if autoreset not in choices:
        raise ConfigurationError(f"autoreset={autoreset!r} is not one of {', '.join(choices)}")
    return choices[autoreset]


def truncates_on_bad_value(on_bad_value: str) -> bool:
    """Tell whether an episode ends at a value that would be refused.

    Raises:
        ConfigurationError: ``on_bad_value`` is nothing that can be chosen.
    """
    choices = {"error": False, "truncate": True}
    if on_bad_value not in choices:
        raise ConfigurationError(
            f"on_bad_value={on_bad_value!r} is not one of {', '.join(choices)}"
        )
    return choices[on_bad_value]


def checked_sessions(wanted: int | None, possible: int | None) -> int:
    """Return how many sessions to allow, given what was asked for and what the source can do.

    Raises:
        ConfigurationError: There can be none, or not so many.
    """
    if wanted is not None and wanted < 1:
        raise ConfigurationError(f"max_sessions={wanted} must be at least 1")
    if possible is None:
        return wanted or DEFAULT_MAX_SESSIONS
    if wanted is not None and wanted > possible:
        raise ConfigurationError(
            f"max_sessions={wanted}, but an instance can serve only {possible}; "
            "give a factory or a Gymnasium id instead"
        )
    return possible
