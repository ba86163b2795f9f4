"""The options of ModelServer, each declared once.

Actors, fleets and the command take them whole, and show what stands here. It loads neither gRPC nor
NumPy, since a command's ``--help`` is made from it.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypedDict

from rlmesh_ray.dialects import registry
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import (
    CHUNK_REPLAYS,
    FIRST,
    INFERENCES,
    MAX_BATCH_DELAY_S,
    Group,
    Option,
    as_horizon,
    as_int,
    require_count,
    require_flag,
    require_seconds,
)
from rlmesh_ray.server.endpoint.endpoint_options import EndpointOptions

if TYPE_CHECKING:
    from rlmesh_ray.spaces.observation_map import ObservationMap

DEFAULT_MAX_ROWS = 1024
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
    from rlmesh_ray.wire.rlmesh_v1.limits import MAX_MESSAGE_BYTES  # loads NumPy

    size = as_int("max_message_bytes", max_message_bytes)
    if not _LEAST_MESSAGE_BYTES <= size <= MAX_MESSAGE_BYTES:
        raise ConfigurationError(
            f"max_message_bytes={size} must be from {_LEAST_MESSAGE_BYTES}, which handshakes and "
            f"contracts need, to {MAX_MESSAGE_BYTES}, which is the most that a message can have"
        )
    return size


class ModuleOptions(TypedDict, total=False):
    """How a policy is run."""

    inference: Annotated[
        str,
        Option(
            'For a ``torch.nn.Module``: ``"torch"``, ``"compiled"`` or ``"auto"``; see '
            "``TorchPolicy``.",
            Group.POLICY,
            "auto",
            choices=INFERENCES,
            flag_help="Run the module in torch, or compiled; auto compiles it where it then gives "
            "the same.",
        ),
    ]
    horizon: Annotated[
        int | None,
        Option(
            "How many actions the module or function chooses at once for each row: its output is "
            "``(rows, horizon, *action)``. Default: its attribute ``horizon``, or 1, without that "
            "axis.",
            Group.POLICY,
            None,
            lambda _, horizon: as_horizon(horizon),
            flag_help="How many actions the policy chooses at once: its output is "
            "(rows, ACTIONS, ...).",
            metavar="ACTIONS",
            shown_default="what the policy says, or 1",
        ),
    ]


class PolicyOptions(ModuleOptions, total=False):
    """How an actor loads its policy, and where it runs."""

    explore: Annotated[
        bool,
        Option(
            "For an RLlib checkpoint: sample actions instead of taking the most likely one.",
            Group.POLICY,
            False,
            has_flag=False,
        ),
    ]
    device: Annotated[
        str,
        Option(
            'Device of a checkpoint or a torch module, as torch names it; "auto": the GPU that Ray '
            "assigned to the actor, if it assigned one.",
            Group.POLICY,
            "auto",
            has_flag=False,
        ),
    ]
    buckets: Annotated[
        Sequence[int],
        Option(
            "Sizes to which batches are padded, so that the device sees few; for checkpoints and "
            "torch modules.",
            Group.POLICY,
            (),
            has_flag=False,
        ),
    ]


class ModelOptions(TypedDict, total=False):
    """What an endpoint of a policy takes, alone or in a fleet."""

    chunk_replay: Annotated[
        str,
        Option(
            "What a client gets that takes one action of a policy with a horizon above 1: "
            '``"first"``: the first action of a new chunk at each request; ``"kept"``: the actions '
            "of one chunk after the other, which the endpoint keeps for each lane until it is used "
            "up or the lane begins another episode.",
            Group.POLICY,
            FIRST,
            choices=CHUNK_REPLAYS,
            flag_help="For clients that take one action: the first of a new chunk each time, or "
            "all of a chunk that is kept.",
        ),
    ]
    observation_map: Annotated[
        "ObservationMap | Sequence[str] | Mapping[str, str] | None",
        Option(
            "Makes the policy's observations from those that clients send: an ``ObservationMap``, "
            "or its entries, whose files are on the endpoint's node. Routes that it does not fit "
            "are refused.",
            Group.POLICY,
            has_flag=False,  # --map, which other commands take, too
        ),
    ]
    torch_threads: Annotated[
        int,
        Option(
            "How many threads torch uses for a batch. More than one pays for large modules only: "
            "on two cores, two of them were seen to be forty times as slow for small ones.",
            Group.POLICY,
            1,
            require_count,
            flag_help="Threads of torch; more pay for large modules only.",
        ),
    ]
    dialects: Annotated[
        Collection[str] | None,
        Option(
            'Names of the dialects to enable: ``"rlmesh.protocol.v1"``, ``"rlmesh-wire-v1"`` (the '
            "released rlmesh 0.1.0). Default: both.",
            Group.SERVING,
            None,
            lambda _, names: registry.enabled_dialects(names, registry.model_dialects()),
            choices=registry.model_dialects(),
            flag_help=f"Dialect to enable: {', '.join(registry.model_dialects())}; repeatable.",
            metavar="DIALECT",
            shown_default="all",
        ),
    ]
    max_batch_rows: Annotated[
        int,
        Option(
            "Most rows in a batch that joins the requests of several routes.",
            Group.LIMITS,
            DEFAULT_MAX_ROWS,
            require_count,
            flag_help="Most rows in a batch that joins requests.",
        ),
    ]
    max_delay_s: Annotated[
        float,
        Option(
            "Longest time for which a batch waits for further requests, from the moment at which "
            "it could run, up to 60 s. It does not wait when it has ``max_batch_rows`` rows, or a "
            "request of each open route. Default: a batch takes the requests that have come.",
            Group.LIMITS,
            0.0,
            partial(require_seconds, allow_zero=True, most_s=MAX_BATCH_DELAY_S),
            flag_help=f"Longest wait for more requests, up to {MAX_BATCH_DELAY_S:g}.",
        ),
    ]
    max_message_bytes: Annotated[
        int | None,
        Option(
            "Size of the largest message to accept, from 65,536 to 2**31 - 1; a larger one ends "
            "its session with a size error. Default: what ``max_batch_rows`` observations need "
            "where the policy's observation space is known (as of RLlib checkpoints), 32 MiB where "
            "it is not. For a moment, gRPC takes three times as much memory as a message has "
            "bytes.",
            Group.LIMITS,
            None,
            lambda _, size: checked_message_bytes(size),
            flag_help="Largest message to accept.",
            shown_default="what the policy's batches need, or 32 MiB",
        ),
    ]


class ModelFleetOptions(PolicyOptions, ModelOptions, total=False):
    """What a ``ModelFleet`` takes, for each replica."""


class ModelActorOptions(PolicyOptions, EndpointOptions, ModelOptions, total=False):
    """What a ``ModelServiceActor`` takes."""


class ModelServerOptions(ModuleOptions, EndpointOptions, ModelOptions, total=False):
    """What a ``ModelServer`` takes."""

    stop_on_close: Annotated[
        bool,
        Option(
            "Whether a client's Close stops the server after that client's session. By default it "
            "ends the session only: other clients may be at work.",
            Group.SERVING,
            False,
            require_flag,
            flag_help="Stop when the first client closes its session.",
        ),
    ]
    openpi_env: Annotated[
        object,
        Option(
            "An environment (or its contract) with the spaces of openpi clients, which send none; "
            "needed where the policy's traits do not name them.",
            Group.SERVING,
            has_flag=False,  # the command makes the environment
        ),
    ]
