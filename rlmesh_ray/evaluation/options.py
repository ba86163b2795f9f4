"""The options of an evaluation, each declared once.

``evaluate``, ``evaluate_on_ray`` and the command take them whole. It loads neither gRPC nor NumPy,
since a command's ``--help`` is made from it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import (
    DEFAULT_RESET_TIMEOUT_S,
    DEFAULT_STEP_TIMEOUT_S,
    Group,
    Option,
    as_int,
    require_count,
    require_seconds,
)

if TYPE_CHECKING:
    from rlmesh_ray.evaluation.result import EpisodeResult, Loss
    from rlmesh_ray.recording.options import RecordOptions
    from rlmesh_ray.spaces.images import Resize
    from rlmesh_ray.spaces.observation_map import ObservationMap


_LAST_SEED = 2**63 - 1


def _require_callable(name: str, value: Any) -> None:
    if not callable(value):
        raise ConfigurationError(f"{name}={value!r:.40} cannot be called")


def _require_codec(_: str, codec: Any) -> None:
    from rlmesh_ray.spaces.images import ImageCodec  # loads NumPy

    ImageCodec.from_option(codec)


class EvaluationOptions(TypedDict, total=False):
    """What ``evaluate`` and ``evaluate_on_ray`` take."""

    seed: Annotated[
        int | None,
        Option(
            "Seed of the first episode, 0 or more. None lets the environment seed itself.",
            Group.EPISODES,
            None,
            as_int,
            flag_help="Seed of the first episode, 0 or more; episode i starts with seed + i.",
            metavar="SEED",
        ),
    ]
    token: Annotated[
        TokenSource | None,
        Option(
            "Token for addresses, of environments and of models; fleets have their own, and a "
            "``ConnectOptions`` has one. On Ray a ``TokenFile`` must be on the workers' nodes.",
            Group.SECURITY,
            has_flag=False,
        ),
    ]
    on_episode: Annotated[
        "Callable[[EpisodeResult], None] | None",
        Option(
            "Called with each episode, in the caller's thread, soon after it has ended.",
            Group.EPISODES,
            None,
            _require_callable,
            has_flag=False,
        ),
    ]
    on_loss: Annotated[
        "Callable[[Loss], None] | None",
        Option(
            "Called in the caller's thread when an endpoint fails, unless its error is raised.",
            Group.EPISODES,
            None,
            _require_callable,
            has_flag=False,
        ),
    ]
    step_timeout_s: Annotated[
        float,
        Option(
            "Longest wait for a step of an environment, and for an answer of a model, whose "
            "session this opens; then the endpoint counts as lost.",
            Group.EPISODES,
            DEFAULT_STEP_TIMEOUT_S,
            require_seconds,
            flag_help="Longest wait for a step, or for a policy; then the endpoint is lost.",
        ),
    ]
    reset_timeout_s: Annotated[
        float,
        Option(
            "Longest wait for the answer to a reset, or to a step that contains one.",
            Group.ENVIRONMENT,
            DEFAULT_RESET_TIMEOUT_S,
            require_seconds,
            flag_help="Longest wait for a reset of all lanes.",
        ),
    ]
    reconnect_timeout_s: Annotated[
        float,
        Option(
            "How long to wait for an endpoint when none is left; on Ray for each worker and its "
            "endpoints.",
            Group.EPISODES,
            30.0,
            partial(require_seconds, allow_zero=True),
            flag_help="Longest wait for an endpoint while all are lost.",
        ),
    ]
    observation_map: Annotated[
        "ObservationMap | Sequence[str] | Mapping[str, str] | None",
        Option(
            "Makes the model's observations from those of the environment: an "
            "``ObservationMap``, or its entries. The model gets its keys alone.",
            Group.POLICY,
            has_flag=False,  # --map, which other commands take, too
        ),
    ]
    execution_horizon: Annotated[
        int,
        Option(
            "How many actions of each chunk are played, for policies that choose several at once. "
            "Each lane asks for its next chunk when these are used up, and when its episode "
            "begins.",
            Group.POLICY,
            1,
            require_count,
            metavar="STEPS",
        ),
    ]
    image_codec: Annotated[
        str | None,
        Option(
            "See ``RemoteVectorEnv``; for environments whose session this opens.",
            Group.ENVIRONMENT,
            None,
            _require_codec,
            flag_help="Have images travel compressed, such as jpeg:95.",
            metavar="CODEC",
        ),
    ]
    resize: Annotated[
        "Resize | None",
        Option(
            "See ``RemoteVectorEnv``. The model gets such images, and they are recorded.",
            Group.ENVIRONMENT,
            has_flag=False,  # HEIGHTxWIDTH, which is no value in Python
        ),
    ]


class RecordedEvaluationOptions(EvaluationOptions, total=False):
    """What ``evaluate`` takes."""

    record: Annotated[
        "str | Path | RecordOptions | None",
        Option(
            "Folder for the episodes, or ``RecordOptions``; None: they are not recorded.",
            Group.OUTPUT,
            has_flag=False,  # with two more, which other commands take, too
        ),
    ]


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
