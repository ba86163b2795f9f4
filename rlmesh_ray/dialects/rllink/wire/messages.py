"""Messages of RLlink, in any encoding.

Arrays have plain numbers and booleans. Messages are checked for their form only; the caller checks
them against spaces.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Extras = dict[str, Any]
"""Fields that the description of RLlink does not have; plain JSON values."""

ACTION_DIST_INPUTS = "action_dist_inputs"
ACTION_LOGP = "action_logp"
MODEL_OUTPUTS = (ACTION_DIST_INPUTS, ACTION_LOGP)
"""What a client may tell of its policy, beside the actions."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Successive steps of one episode."""

    obs: Array
    """(n + 1, *shape); the last one is what the last action led to."""
    actions: Array
    """(n, *shape), as the policy's distribution gave them."""
    rewards: Array
    """(n,) float64."""
    is_terminated: bool
    is_truncated: bool
    episode_id: str | None = None
    """The client's own; None where it names none."""
    model_outputs: Mapping[str, Array] = field(default_factory=dict)
    """(n, ...) each; keys are among ``MODEL_OUTPUTS``."""

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def is_done(self) -> bool:
        return self.is_terminated or self.is_truncated

    def part(self, begin: int, end: int) -> "Chunk":
        """Return its steps from ``begin`` to ``end``, without the one at ``end``."""
        is_last = end == len(self)
        return Chunk(
            self.obs[begin : end + 1],
            self.actions[begin:end],
            self.rewards[begin:end],
            self.is_terminated and is_last,
            self.is_truncated and is_last,
            self.episode_id,
            {name: values[begin:end] for name, values in self.model_outputs.items()},
        )


def joined(parts: Sequence[Chunk]) -> Chunk:
    *_, last = parts
    if len(parts) == 1:
        return last
    return Chunk(
        np.concatenate([*(part.obs[:-1] for part in parts[:-1]), last.obs]),
        np.concatenate([part.actions for part in parts]),
        np.concatenate([part.rewards for part in parts]),
        last.is_terminated,
        last.is_truncated,
        last.episode_id,
        {
            name: np.concatenate([part.model_outputs[name] for part in parts])
            for name in last.model_outputs
        },
    )


# --- requests ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ping:
    """The first message; shows the token where one is wanted."""

    token: str | None = None


@dataclass(frozen=True)
class GetConfig:
    """Asks how to sample."""


@dataclass(frozen=True)
class GetState:
    """Asks for the present weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Episodes:
    """Brings samples."""

    chunks: tuple[Chunk, ...]
    wants_state: bool
    """Whether the client waits for the weights to go on with."""
    weights_seq_no: int | None = None
    """Of the weights that have acted; None where the client does not say."""


@dataclass(frozen=True)
class StartEpisode:
    """Begins an episode whose actions are asked for one by one."""

    episode_id: str | None = None


@dataclass(frozen=True, eq=False)
class GetAction:
    """Asks for the next action of such an episode; tells what the last one led to."""

    episode_id: str
    obs: Array
    reward: float = 0.0
    """Since the last action, beside what LogReturns has told."""


@dataclass(frozen=True)
class LogReturns:
    """Tells of a reward between two actions."""

    episode_id: str
    reward: float


@dataclass(frozen=True, eq=False)
class EndEpisode:
    """Ends such an episode."""

    episode_id: str
    obs: Array
    reward: float = 0.0
    is_truncated: bool = False
    """Cut off by a limit, rather than at its end."""


Request = (
    Ping | GetConfig | GetState | Episodes | StartEpisode | GetAction | LogReturns | EndEpisode
)


# --- replies -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Pong:
    """Answers Ping."""


@dataclass(frozen=True, slots=True)
class SetConfig:
    """Says how to sample."""

    env_steps_per_sample: int
    force_on_policy: bool
    extras: Extras = field(default_factory=dict)
    pickled_config: bytes = b""
    """For Ray's clients, which execute it; nothing here ever reads it."""


@dataclass(frozen=True, slots=True, eq=False)
class SetState:
    """Brings weights: a model for clients of JSON, arrays for Ray's."""

    weights_seq_no: int
    onnx: bytes = b""
    """The model, neither compressed nor encoded."""
    weights: Mapping[str, Array] = field(default_factory=dict)
    extras: Extras = field(default_factory=dict)


@dataclass(frozen=True)
class EpisodeStarted:
    """Answers StartEpisode."""

    episode_id: str


@dataclass(frozen=True, eq=False)
class Action:
    """Answers GetAction."""

    episode_id: str
    action: Array
    """As the environment takes it: within the action space's bounds."""
    weights_seq_no: int


@dataclass(frozen=True)
class Failed:
    """Says what is wrong, before the connection is closed."""

    message: str


CONFIG_FIELDS = frozenset({"type", "env_steps_per_sample", "force_on_policy"})
STATE_FIELDS = frozenset({"type", "weights_seq_no", "onnx_file"})
"""Fields of a body that are not extras."""
Reply = Pong | SetConfig | SetState | EpisodeStarted | Action | Failed


# --- forms -------------------------------------------------------------------------------


LONGEST_TEXT = 256
"""Most characters of an id."""


def is_plain(array: Array | np.generic) -> bool:
    return array.dtype.kind in "biuf" and array.itemsize <= 8


def request_fault(request: Request) -> str:
    """Return why a server with any spaces refuses a request; empty if it does not."""
    for chunk in request.chunks if isinstance(request, Episodes) else ():
        arrays = {"obs": chunk.obs, "actions": chunk.actions, "rewards": chunk.rewards}
        fault = _array_fault({**arrays, **chunk.model_outputs}) or _id_fault(chunk.episode_id)
        if fault := fault or shape_fault(chunk):
            return fault
    reward = getattr(request, "reward", 0.0)
    is_number = isinstance(reward, (int, float)) and not isinstance(reward, bool)
    if not is_number or not abs(reward) <= sys.float_info.max:
        return f"the reward {reward!r:.40}; give a finite int or float"
    arrays = {"obs": request.obs} if isinstance(request, (GetAction, EndEpisode)) else {}
    return _array_fault(arrays) or _id_fault(getattr(request, "episode_id", None))


def _array_fault(arrays: Mapping[str, Any]) -> str:
    for name, array in arrays.items():
        if not (isinstance(array, (np.ndarray, np.generic)) and is_plain(array)):
            kind = getattr(array, "dtype", type(array).__name__)
            return f"{name} of {kind}; give an array of numbers of at most 64 bits"
    return ""


def _id_fault(episode_id: str | None) -> str:
    if episode_id is None or (isinstance(episode_id, str) and 0 < len(episode_id) <= LONGEST_TEXT):
        return ""
    return f"the episode id {episode_id!r:.40}; give a text of 1 to {LONGEST_TEXT} characters"


def shape_fault(chunk: Chunk) -> str:
    num_steps = len(chunk)
    if chunk.rewards.ndim != 1:
        return f"rewards of shape {chunk.rewards.shape}; one number a step is expected"
    if num_steps == 0:
        return "an episode without a step"
    if len(chunk.obs) != num_steps + 1 or len(chunk.actions) != num_steps:
        return (
            f"{len(chunk.obs)} observations, {len(chunk.actions)} actions and {num_steps} "
            "rewards; there must be as many actions as rewards, and one more observation"
        )
    for name, values in chunk.model_outputs.items():
        if len(values) != num_steps:
            return f"{len(values)} values of {name} for {num_steps} steps"
    if not np.isfinite(chunk.rewards).all():
        return "a reward that is not a finite number"
    return ""
