"""Validation of option values, and defaults that several rooms share.

Options are checked where the caller passes them, not where they are used.
"""

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from rlmesh_ray.errors import ConfigurationError

DEFAULT_STEP_TIMEOUT_S = 60.0
"""Longest wait of a client for one answer, except for a reset's."""
DEFAULT_RESET_TIMEOUT_S = 300.0
"""Longest wait of every client for a reset of its lanes, also for those that a step contains."""
DEFAULT_RUNNER_STEP_TIMEOUT_S = 30.0
"""Likewise of an EnvRunner: half of RLlib's ``sample_timeout_s``, so that a runner whose endpoint
hangs returns the steps of its other sessions before RLlib drops its sample."""
SHARED_MEMORY, TCP = "shared_memory", "tcp"
FORK_REMEDY = (
    "start processes by spawn (multiprocessing.get_context('spawn'), AsyncVectorEnv(..., "
    "context='spawn'), DataLoader(..., multiprocessing_context='spawn')), or fork before the "
    "first connection or server is opened"
)
"""The remedy for a process that was forked too late."""
KEEPALIVE_TIME_S, KEEPALIVE_TIMEOUT_S = 10, 5
"""How long a connection may be silent before its peer is probed, and how long the peer may take to
answer; of gRPC and of direct TCP connections."""
_LONGEST_S = 1e15
"""In milliseconds it still fits into an int64 field of the protocol."""
MAX_BATCH_DELAY_S = 60.0
"""Longest time for which a batch of a policy may wait for more requests, which all wait with it."""
_TRANSPORTS = {
    "auto": frozenset({SHARED_MEMORY, TCP}),
    SHARED_MEMORY: frozenset({SHARED_MEMORY}),
    TCP: frozenset({TCP}),
    "grpc": frozenset[str](),
}


def as_int(name: str, value: object) -> int:
    """Return a whole number (an int or a NumPy integer) as an int.

    Raises:
        ConfigurationError: ``value`` is no whole number.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigurationError(f"{name}={value!r} must be a whole number")
    return int(value)


def as_seed(value: object) -> int:
    """Return a seed as an int.

    Raises:
        ConfigurationError: ``value`` is no whole number, or below 0.
    """
    seed = as_int("seed", value)
    if seed < 0:
        raise ConfigurationError(f"seed={seed} must be 0 or more")
    return seed


def require_flag(name: str, value: object, *, allow_none: bool = False) -> None:
    """Require that an option is True or False.

    Raises:
        ConfigurationError: It is neither.
    """
    if not isinstance(value, bool) and not (allow_none and value is None):
        choices = "True, False or None" if allow_none else "True or False"
        raise ConfigurationError(f"{name}={value!r:.40} must be {choices}")


def as_names(name: str, values: object) -> tuple[str, ...]:
    """Return an option that takes several names, each once.

    Raises:
        ConfigurationError: It is a single text, or no collection of texts.
    """
    if isinstance(values, str):
        raise ConfigurationError(f"{name}={values!r} must be several names: ({values!r},)")
    if not isinstance(values, Iterable) or not all(isinstance(each, str) for each in values):
        raise ConfigurationError(f"{name}={values!r:.80} must be a list of names")
    return tuple(dict.fromkeys(values))


def allowed_transports(transport: object) -> frozenset[str]:
    """Return the transports that an option allows besides the Join stream.

    Args:
        transport: ``"auto"``, ``"shared_memory"``, ``"tcp"`` or ``"grpc"`` (none besides it).

    Raises:
        ConfigurationError: ``transport`` is none of these.
    """
    if not isinstance(transport, str) or transport not in _TRANSPORTS:
        raise ConfigurationError(
            f"transport={transport!r:.40} is not one of {', '.join(_TRANSPORTS)}"
        )
    return _TRANSPORTS[transport]


INFERENCES = ("auto", "torch", "compiled")
"""How a policy's module is run: in torch, or compiled for ONNX Runtime."""


FIRST, KEPT = CHUNK_REPLAYS = ("first", "kept")
"""What clients that take one action get of a policy that chooses several; see ``ModelServer``."""


def require_inference(value: object) -> None:
    """Require that an option is one of ``INFERENCES``.

    Raises:
        ConfigurationError: It is not.
    """
    if not isinstance(value, str) or value not in INFERENCES:
        raise ConfigurationError(f"inference={value!r:.40} is not one of {', '.join(INFERENCES)}")


def require_count(name: str, value: object) -> None:
    """Require that an option is a whole number, 1 or more.

    Raises:
        ConfigurationError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise ConfigurationError(f"{name}={value!r} must be a whole number, 1 or more")


def require_finite(name: str, value: object) -> None:
    """Require that an option is a number, neither NaN nor infinite.

    Raises:
        ConfigurationError: It is not.
    """
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not -math.inf < number < math.inf:
        raise ConfigurationError(f"{name}={value!r:.40} must be a finite number")


MAX_HORIZON = 1024
"""Most actions that a policy may choose at once; runtimes of the released rlmesh take no more."""


def as_horizon(value: object) -> int:
    """Return how many actions a policy chooses at once as an int.

    Raises:
        ConfigurationError: ``value`` is no whole number from 1 to ``MAX_HORIZON``.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, Integral)
        or not 1 <= int(value) <= MAX_HORIZON
    ):
        raise ConfigurationError(
            f"horizon={value!r:.40} must be a whole number of actions from 1 to {MAX_HORIZON}; "
            "leave it out for a policy that chooses one action at a time"
        )
    return int(value)


def as_reset_options(options: object) -> dict[str, Any]:
    """Return the ``options`` of a reset as a new dict, which is empty for None.

    Raises:
        ConfigurationError: ``options`` is no mapping.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ConfigurationError(f"options={options!r:.40} must be a mapping, or None")
    return dict(options)


def require_seconds(
    name: str,
    value: object,
    *,
    allow_zero: bool = False,
    allow_infinite: bool = False,
    most_s: float = _LONGEST_S,
) -> None:
    """Require that an option is a number of seconds, by default finite and above 0.

    Raises:
        ConfigurationError: It is not.
    """
    problem = seconds_problem(
        value, allow_zero=allow_zero, allow_infinite=allow_infinite, most_s=most_s
    )
    if problem:
        raise ConfigurationError(f"{name}={value!r} {problem}")


def seconds_problem(
    value: object,
    *,
    allow_zero: bool = False,
    allow_infinite: bool = False,
    most_s: float = _LONGEST_S,
) -> str:
    """Return why ``value`` is no valid number of seconds, to follow it; empty where it is one."""
    seconds = math.nan  # every comparison with NaN is False
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:  # an integer above every float
            seconds = math.inf
    is_enough = seconds >= 0 if allow_zero else seconds > 0
    if is_enough and (allow_infinite or seconds <= most_s):
        return ""
    if is_enough and seconds < math.inf:
        return f"must be at most {most_s:g} seconds"
    kind = "number of seconds" if allow_infinite else "finite number of seconds"
    return f"must be a {kind}{', 0 or more' if allow_zero else ' above 0'}"
