"""The options of EnvServer, each declared once.

The actor, fleets, ``configure`` and the command take them whole, and show what stands here. It
loads neither gRPC nor NumPy, since a command's ``--help`` is made from it.
"""

import keyword
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

from rlmesh_ray.dialects import registry
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import (
    TRANSPORTS,
    Group,
    Option,
    as_names,
    require_count,
    require_flag,
)
from rlmesh_ray.server.endpoint.endpoint_options import EndpointOptions

if TYPE_CHECKING:
    from rlmesh_ray.recording.options import RecordOptions

DEFAULT_MAX_SESSIONS = 16
DEFAULT_STEP_GRACE_S = 5.0
"""How long an environment may continue after a request was answered with TIMEOUT; its result is
dropped. If it finishes in time, its process serves the next Reset; if not, it is killed."""
ERROR, TRUNCATE = ON_BAD_VALUES = ("error", "truncate")
NEXT_STEP, DISABLED = AUTORESETS = ("next_step", "disabled")

_LONGEST_NAME = 200
# Only the session's own requests may do these.
_RESERVED = frozenset({"reset", "step", "close"})


def checked_names(names: Collection[str]) -> tuple[str, ...]:
    """Return ``names``, each once, if clients may be allowed to call them.

    Raises:
        ConfigurationError: A name is private, not an attribute name, or reserved for the session.
    """
    checked = as_names("allow_calls", names)
    for name in checked:
        is_attribute = name.isidentifier() and not keyword.iskeyword(name)
        if not is_attribute or name.startswith("_") or len(name) > _LONGEST_NAME:
            raise ConfigurationError(
                f"allow_calls (--allow-call) names {name!r}, which is not a public "
                "attribute; give names such as 'set_task', without underscore, dots or brackets"
            )
        if name in _RESERVED:
            raise ConfigurationError(
                f"allow_calls (--allow-call) names {name!r}, which belongs to the "
                "session; clients have it already"
            )
    return checked


class EnvOptions(TypedDict, total=False):
    """What an endpoint of an environment takes, alone or in a fleet."""

    num_envs: Annotated[
        int,
        Option(
            "Lanes of each session. One lane resets only when told to (autoreset mode DISABLED), "
            "several as ``autoreset`` says; a VectorEnv keeps its own width and mode.",
            Group.ENVIRONMENT,
            1,
            require_count,
        ),
    ]
    env_kwargs: Annotated[
        Mapping[str, object] | None,
        Option(
            "Keyword arguments of ``gymnasium.make``, or of the factory.",
            Group.ENVIRONMENT,
            has_flag=False,  # a JSON object, which other commands take, too
        ),
    ]
    autoreset: Annotated[
        str,
        Option(
            "Autoreset mode of several lanes. What they do on the step after an episode's end, "
            'where they are single environments: ``"next_step"``, they reset; ``"disabled"``, '
            "nothing by themselves. Then clients that know how (rlmesh 0.1.0) may step each of "
            "them alone.",
            Group.ENVIRONMENT,
            NEXT_STEP,
            choices=AUTORESETS,
        ),
    ]
    validation: Annotated[
        str,
        Option(
            'How to treat values out of range. ``"warn"``, ``"strict"`` or ``"off"`` (edition '
            '2026.06, "Range conformance"). So it is with rewards that are not finite.',
            Group.ENVIRONMENT,
            "warn",
            choices=("warn", "strict", "off"),
        ),
    ]
    on_bad_value: Annotated[
        str,
        Option(
            "What happens where an observation would be refused (NaN, an element outside its "
            'domain; with ``validation="strict"`` also one out of range) or a reward is not '
            'finite. ``"error"``: what the edition says; the former costs a client its session. '
            '``"truncate"``: the episode ends in that lane, truncated, with its last good '
            "observation, a reward of 0 in place of one that is not finite, and the cause under "
            '``"rlmesh_ray.bad_value"`` in the info. For single environments, whose observations '
            "are then checked one by one.",
            Group.ENVIRONMENT,
            ERROR,
            choices=ON_BAD_VALUES,
            flag_help="On NaN: fail (the default), or end the episode.",
            shown_default=False,
        ),
    ]
    reset_threads: Annotated[
        int,
        Option(
            "How many of a session's lanes are reset at the same time, each in a thread of the "
            "worker; for single environments that are slow to reset and do not depend on the "
            "thread that uses them. Results are those of resets one after the other.",
            Group.ENVIRONMENT,
            1,
            require_count,
            flag_help="Lanes that reset at the same time.",
        ),
    ]
    allow_calls: Annotated[
        Collection[str],
        Option(
            "Names of methods and attributes of the environment, or of its wrappers, that clients "
            'may call and read in the lanes of their own sessions, such as ``("set_task",)`` for a '
            "curriculum; see ``EnvClient.call``. Every client of the endpoint may use them.",
            Group.ENVIRONMENT,
            (),
            lambda _, names: checked_names(names),
            flag_help="Method or attribute that clients may use; repeatable.",
            metavar="NAME",
        ),
    ]
    dialects: Annotated[
        Collection[str] | None,
        Option(
            'Names of the dialects to enable: ``"rlmesh.protocol.v1"``, ``"rlmesh-wire-v1"`` (the '
            'released rlmesh 0.1.0), ``"dm_env_rpc.v1"``. Default: all that are installed.',
            Group.SERVING,
            None,
            lambda _, names: registry.enabled_dialects(names, registry.env_dialects()),
            choices=registry.env_dialects(),
            flag_help=f"Dialect to enable: {', '.join(registry.env_dialects())}; repeatable.",
            metavar="DIALECT",
            shown_default="all that are installed",
        ),
    ]
    transport: Annotated[
        str,
        Option(
            "Transport of steps. What they may travel by, besides gRPC messages, which are slower: "
            '``"shared_memory"`` (clients on this machine, on Linux), ``"tcp"`` (a connection of '
            'their own, without TLS), ``"auto"`` (both) or ``"grpc"`` (nothing). Where spaces hold '
            "text it is messages.",
            Group.SERVING,
            "auto",
            choices=TRANSPORTS,
            shown_default=False,
        ),
    ]
    max_sessions: Annotated[
        int | None,
        Option(
            "Most sessions at a time. Default: 16, or 1 for an instance, which cannot be made "
            "twice.",
            Group.LIMITS,
            None,
            require_count,
            shown_default=str(DEFAULT_MAX_SESSIONS),
        ),
    ]
    sessions_per_worker: Annotated[
        int,
        Option(
            "Sessions that share a worker's process. With 1 they step at the same time, each on "
            "its own processor. A runner with several sessions gains from one process for all "
            "of them where a step takes less time than the runner's own work, or processors are "
            "few. A crash, or a step that is killed because it is late, then interrupts the "
            "episodes of all sessions of the process.",
            Group.LIMITS,
            1,
            require_count,
        ),
    ]
    observers: Annotated[
        bool,
        Option(
            "Whether a client with any token of the endpoint may observe its sessions, with "
            "pictures of their lanes, and read its statistics; see "
            "``client.observer.EndpointObserver``.",
            Group.SECURITY,
            True,
            require_flag,
            flag_help="Refuse observers of sessions (see inspect --sessions).",
        ),
    ]
    record: Annotated[
        "str | Path | RecordOptions | None",
        Option(
            "Folder for the episodes of all sessions, or ``RecordOptions``; None: they are not "
            "recorded.",
            Group.OUTPUT,
            has_flag=False,  # with three more, which other commands take, too
        ),
    ]


class EnvServerOptions(EndpointOptions, EnvOptions, total=False):
    """What an ``EnvServer`` takes."""
