"""What an option is, validation of its values, and defaults that several rooms share.

Options are checked where the caller passes them, not where they are used. What checks a value
raises a ConfigurationError that names the option.
"""

import enum
import functools
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypeVar, cast

from rlmesh_ray.errors import ConfigurationError

DEFAULT_STEP_TIMEOUT_S = 60.0
"""Longest wait of a client for one answer, except for a reset's."""
DEFAULT_RESET_TIMEOUT_S = 300.0
"""Longest wait of every client for a reset of its lanes, also for those that a step contains."""
DEFAULT_RUNNER_STEP_TIMEOUT_S = 30.0
"""Longest wait of an EnvRunner for one answer: half of RLlib's ``sample_timeout_s``. A runner whose
endpoint hangs then returns its other steps before RLlib drops its sample."""
SHARED_MEMORY, TCP = "shared_memory", "tcp"
FORK_REMEDY = (
    "start processes by spawn (multiprocessing.get_context('spawn'), AsyncVectorEnv(..., "
    "context='spawn'), DataLoader(..., multiprocessing_context='spawn')), or fork before the "
    "first connection or server is opened"
)
KEEPALIVE_TIME_S, KEEPALIVE_TIMEOUT_S = 10, 5
"""How long a connection may be silent before its peer is probed, and how long the peer may take to
answer; of gRPC and of direct TCP connections."""
_LONGEST_S = 1e15
"""In milliseconds it still fits into an int64 field of the protocol."""
MAX_BATCH_DELAY_S = 60.0
"""Longest time for which a batch of a policy may wait for more requests, which all wait with it."""
_ALLOWED_BY = {
    "auto": frozenset({SHARED_MEMORY, TCP}),
    SHARED_MEMORY: frozenset({SHARED_MEMORY}),
    TCP: frozenset({TCP}),
    "grpc": frozenset[str](),
}
TRANSPORTS = tuple(_ALLOWED_BY)


def as_int(name: str, value: object) -> int:
    """Return a whole number (an int or a NumPy integer) as an int."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigurationError(f"{name}={value!r} must be a whole number")
    return int(value)


def as_seed(value: object) -> int:
    seed = as_int("seed", value)
    if seed < 0:
        raise ConfigurationError(f"seed={seed} must be 0 or more")
    return seed


def require_flag(name: str, value: object, *, allow_none: bool = False) -> None:
    if not isinstance(value, bool) and not (allow_none and value is None):
        choices = "True, False or None" if allow_none else "True or False"
        raise ConfigurationError(f"{name}={value!r:.40} must be {choices}")


def as_names(name: str, values: object) -> tuple[str, ...]:
    """Return an option that takes several names, each once; a single text is refused."""
    if isinstance(values, str):
        raise ConfigurationError(f"{name}={values!r} must be several names: ({values!r},)")
    if not isinstance(values, Collection) or not all(isinstance(each, str) for each in values):
        raise ConfigurationError(f"{name}={values!r:.80} must be a list of names")
    return tuple(dict.fromkeys(values))


def allowed_transports(transport: object) -> frozenset[str]:
    """Return which of ``SHARED_MEMORY`` and ``TCP`` an option allows besides the Join stream."""
    if not isinstance(transport, str) or transport not in _ALLOWED_BY:
        raise ConfigurationError(
            f"transport={transport!r:.40} is not one of {', '.join(TRANSPORTS)}"
        )
    return _ALLOWED_BY[transport]


INFERENCES = ("auto", "torch", "compiled")
"""How a policy's module is run: in torch, or compiled for ONNX Runtime."""
FIRST, KEPT = CHUNK_REPLAYS = ("first", "kept")
"""What clients that take one action get of a policy that chooses several; see ``ModelServer``."""


def require_inference(value: object) -> None:
    if not isinstance(value, str) or value not in INFERENCES:
        raise ConfigurationError(f"inference={value!r:.40} is not one of {', '.join(INFERENCES)}")


def require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise ConfigurationError(f"{name}={value!r} must be a whole number, 1 or more")


def require_finite(name: str, value: object) -> None:
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not -math.inf < number < math.inf:
        raise ConfigurationError(f"{name}={value!r:.40} must be a finite number")


MAX_HORIZON = 1024
"""Most actions that a policy may choose at once; runtimes of the released rlmesh take no more."""


def as_horizon(value: object) -> int:
    """Return how many actions a policy chooses at once as an int."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else 0
    if not 1 <= number <= MAX_HORIZON:
        raise ConfigurationError(
            f"horizon={value!r:.40} must be a whole number of actions from 1 to {MAX_HORIZON}; "
            "leave it out for a policy that chooses one action at a time"
        )
    return number


def as_reset_options(options: object) -> dict[str, Any]:
    """Return the ``options`` of a reset as a new dict, which is empty for None."""
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
    """Require that an option is a number of seconds, by default finite and above 0."""
    seconds = math.nan  # every comparison with NaN is False
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:  # an integer above every float
            seconds = math.inf
    is_enough = seconds >= 0 if allow_zero else seconds > 0
    if is_enough and (allow_infinite or seconds <= most_s):
        return
    if is_enough and seconds < math.inf:
        raise ConfigurationError(f"{name}={value!r} must be at most {most_s:g} seconds")
    kind = "number of seconds" if allow_infinite else "finite number of seconds"
    least = ", 0 or more" if allow_zero else " above 0"
    raise ConfigurationError(f"{name}={value!r} must be a {kind}{least}")


class Group(enum.StrEnum):
    """Groups of options, in the order of a command's ``--help`` and of the reference."""

    ENVIRONMENT = "Environment"
    POLICY = "Policy"
    EPISODES = "Episodes"
    SERVING = "Serving"
    LIMITS = "Limits"
    CONNECTION = "Connection"
    SECURITY = "Security"
    POOL = "Pool"
    OUTPUT = "Output and logging"


@dataclass(frozen=True, slots=True)
class Option:
    """What an option is, besides its name and type.

    It stands in a ``TypedDict`` with ``total=False``, the only place that names the option::

        num_envs: Annotated[int, Option("Lanes of each session.", Group.ENVIRONMENT, 1)]

    Signatures, docstrings, checks and flags are made from that; see ``takes_options``.
    """

    help: str
    """What it does; a command's ``--help`` shows the first sentence."""
    group: Group
    default: Any = None
    check: Callable[[str, Any], object] | None = None
    """Raises ConfigurationError, given the option's name and a value that is wrong."""
    choices: tuple[str, ...] = ()
    """The values that there are; those of each item, where the option takes several."""
    has_flag: bool = True
    """Whether commands have a flag that is made from this."""
    flag_help: str = ""
    """Where the first sentence of ``help`` does not suit a command."""
    metavar: str = ""
    """Name of the flag's value."""
    shown_default: str | bool = True
    """What ``--help`` shows in place of the default; False: nothing."""

    def require(self, name: str, value: object) -> None:
        """Require a possible value; None is possible where it is the default."""
        if value is None and self.default is None:
            return
        if self.check is not None:
            self.check(name, value)
        elif self.choices and value not in self.choices:
            raise ConfigurationError(
                f"{name}={value!r:.40} is not one of {', '.join(self.choices)}"
            )


_DIAL_OPENPI = (
    "serve-model serves no policy of another server again; have clients dial openpi://HOST:PORT"
)
_REMOVED = {
    "spin": "set the environment variable RLMESH_RAY_SPIN=0 instead",
    "data_advertise": "give both ports as data_address of ListenOptions (--data-address), "
    "HOST:PORT/ADVERTISED",
    "speaks": "give dialects (--dialect)",
    "speak": "give dialects (--dialect)",
    "generation": "give dialects (--dialect)",
    "open_to_strangers": "give token=False (--no-token)",
    "shared_memory": 'give transport="auto", "shared_memory", "tcp" or "grpc" (--transport)',
    "threads": "give --torch-threads",
    "model_token_file": _DIAL_OPENPI,
    "model_tls_ca": _DIAL_OPENPI,
    "env_timeout_s": "give step_timeout_s (--step-timeout), for environments and for policies",
    "model_timeout_s": "give step_timeout_s (--step-timeout), for environments and for policies",
    "no_token": "give a server token=False; a client without a token needs no option",
    "step_grace_s": "a step that is late has 5 s more, and then its worker is killed",
    "stuck_after_s": "a policy that takes more than 5 s for a batch is called stuck",
    "endpoint_id": "an endpoint draws its name in the log; an actor, a fleet and a pool have ids",
    "max_interruptions": "an evaluation ends when an episode is interrupted more than 5 times",
}
"""What to do instead of giving an option that has left, by its name in Python."""
_REMOVED_FROM_CALLS = {
    "connect_timeout_s": "give the address as a ConnectOptions(address, timeout_s=...)",
    "edition_text": "give the address as a ConnectOptions(address, edition_text=...)",
    "model_token": "give the model as a ConnectOptions(address, token)",
}
"""The same where commands have nothing instead, or a flag."""
_LISTENING = {
    "data_address": "EnvServer",
    "openpi": "ModelServer",
    "accept_edition_texts": "the server, actor or fleet",
    "idle_timeout_s": "the server, actor or fleet",
}
"""Who takes the fields of ``ListenOptions``, which were options; their flags have stayed."""
OptionsT = TypeVar("OptionsT", bound=Mapping[str, Any])
_TakerT = TypeVar("_TakerT", bound=Callable[..., Any])


def declared(table: type[Any]) -> dict[str, tuple[Any, Option]]:
    """Return type and ``Option`` of each option of a ``TypedDict`` or data class, in groups.

    A type whose module is not to be loaded for that stays a text.
    """
    found = {
        name: (getattr(each.__origin__, "__forward_arg__", each.__origin__), each.__metadata__[0])
        for name, each in table.__annotations__.items()
    }
    order = list(Group)
    return dict(sorted(found.items(), key=lambda each: order.index(each[1][1].group)))


def takes_several(kind: object) -> bool:
    return "Collection" in str(kind)


def flag_name(name: str, kind: object, option: Option) -> str:
    """Return the flag of an option: ``--num-envs`` for ``num_envs``.

    ``idle_timeout_s`` has ``--idle-timeout``, ``allow_calls``, which takes several, has
    ``--allow-call``, and ``observers``, which is True by default, has ``--no-observers``.
    """
    name = name.removesuffix("s" if takes_several(kind) else "_s").replace("_", "-")
    return f"--no-{name}" if option.default is True else f"--{name}"


def completed(owner: str, table: type[OptionsT], given: Mapping[str, Any]) -> OptionsT:
    """Return the options of a ``TypedDict``: those given, and the defaults of the others.

    Raises:
        TypeError: ``given`` names an option that there is not; the message names the nearest one,
            or what to do instead of giving one that has left.
        ConfigurationError: A value is not possible.
    """
    known = {name: option for name, (_, option) in declared(table).items()}
    for name, value in given.items():
        if name not in known:
            raise TypeError(f"{owner}() {_unknown(name, known)}")
        known[name].require(name, value)
    return cast(OptionsT, {name: each.default for name, each in known.items()} | {**given})


def _unknown(name: str, known: Iterable[str]) -> str:
    instead = _REMOVED_FROM_CALLS.get(name) or removed_option(name)
    if name in _LISTENING:
        instead = f"give {_LISTENING[name]} address=ListenOptions(..., {name}=...)"
    if instead:
        return f"takes no {name!r} any more: {instead}"
    nearest = get_close_matches(name, known, 1)
    return f"got an unexpected keyword argument {name!r}" + (
        f"; did you mean {nearest[0]!r}?" if nearest else ""
    )


def removed_option(name: str) -> str:
    """Return what to do instead of giving an option or flag that has left; empty: it has not."""
    name = name.removeprefix("--").removeprefix("no-").replace("-", "_")
    return _REMOVED.get(name) or _REMOVED.get(f"{name}_s", "")


def takes_no_more(**instead: str) -> Callable[[_TakerT], _TakerT]:
    """Have a function without ``**options`` say what to do instead of giving one that has left."""
    reasons = {name: f"takes no {name!r} any more: {each}" for name, each in instead.items()}

    def decorate(function: _TakerT) -> _TakerT:
        owner = function.__qualname__.removesuffix(".__init__")
        return _refusing(function, owner, lambda name: reasons.get(name, ""))

    return decorate


def _refusing(function: _TakerT, owner: str, reason_for: Callable[[str], str]) -> _TakerT:
    """Have a function refuse each keyword argument for which there is a reason."""

    @functools.wraps(function)
    def checked(*arguments: Any, **given: Any) -> Any:
        for name in given:
            if reason := reason_for(name):
                raise TypeError(f"{owner}() {reason}")
        return function(*arguments, **given)

    return cast(_TakerT, checked)


def takes_options(
    table: type[Any], *, without: Collection[str] = (), **changed: Option
) -> Callable[[_TakerT], _TakerT]:
    """Show the options of a ``TypedDict`` where a function or class takes ``**options``.

    ``inspect.signature``, ``help`` and the reference then have each of them with its default, and
    the docstring's line ``**options: ...`` becomes an entry for each. The caller cannot give those
    in ``without``; those in ``changed`` are something else there. A data class shows its fields.
    """
    shown = {
        name: (kind, changed.get(name, option))
        for name, (kind, option) in declared(table).items()
        if name not in without
    }

    def decorate(taker: _TakerT) -> _TakerT:
        function: Any = vars(taker)["__init__"] if isinstance(taker, type) else taker
        signature = inspect.signature(function)
        own = [
            each.replace(annotation=shown[each.name][0]) if each.name in shown else each
            for each in signature.parameters.values()
            if each.kind is not each.VAR_KEYWORD and not each.name.startswith("_")
        ]
        options = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=kind
            )
            for name, (kind, option) in shown.items()
            if name not in signature.parameters  # as those of a data class
        ]
        function.__signature__ = signature.replace(parameters=[*own, *options])
        if taker is table:  # a data class, whose options do not come to ``completed``
            made: Any = taker
            made.__init__ = _refusing(
                function,
                table.__name__,
                lambda name: "" if name in shown else _unknown(name, shown),
            )
        entries = "\n".join(
            textwrap.fill(f"{name}: {option.help}", 88, subsequent_indent="    ")
            for name, (_, option) in shown.items()
        )
        taker.__doc__ = _OPTIONS_LINE.sub(
            lambda found: textwrap.indent(entries, found[1]), taker.__doc__ or ""
        )
        return taker

    return decorate


_OPTIONS_LINE = re.compile(r"^( +)\*\*options: .*$", re.MULTILINE)
