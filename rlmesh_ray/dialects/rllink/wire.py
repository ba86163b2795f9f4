"""RLlink on the wire: its messages, frames, and the two encodings of the bodies of frames.

A frame is eight ASCII digits that say how long the body is, and the body: a map with the name of
the message as ``type``. Both encodings have the same maps, but for three things: how episodes and
weights are written, and that Ray's has no requests for single actions.

* ``JSON``: that of RLlink's description. What follows is ours: ``token`` in PING; an ``id``,
  ``action_logp`` and ``action_dist_inputs`` of an episode; everything in SET_CONFIG and SET_STATE
  that tells how to turn the model's output into actions; the requests for single actions. Two
  spellings are read where clients differ: ``is_terminated`` and ``terminateds``, ``is_truncated``
  and ``truncateds``. A model is always ONNX, in ``onnx_file``, gzip in base64; ``mlir_file`` is not
  provided.
* ``RAY``: that of Ray 2.60, msgpack with arrays as msgpack-numpy writes them. Episodes are the
  states of RLlib's SingleAgentEpisode. Of these, only numbers are taken over: no space, no info, no
  class of RLlib's is made of what a client has sent.

In messages, arrays have plain numbers and booleans. Messages are checked for their form only; the
receiver checks them against spaces.
"""

import base64
import binascii
import gzip
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire import msgpack_values

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


# --- frames ------------------------------------------------------------------------------

HEADER_BYTES = 8
MOST_BODY_BYTES = 99_999_999
"""The largest number of eight digits; Ray's own sender writes a ninth, which breaks the stream."""
MOST_JSON_VALUES = 2**18
"""Of a message. Python parses JSON in one call that blocks all threads: 50 ms for numbers."""
MOST_RAY_VALUES = 2**20
"""Of a message. A step has some thirty: numbers and arrays are maps."""
_MOST_SEQ_NO = 2**53
_MOST_EPISODES = 2**14
_MOST_MODEL_BYTES = 2**30
_MOST_MESSAGE_CHARACTERS = 2000
_MAP_BYTES = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})
"""First bytes of a map in msgpack."""
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248])")

Body = Mapping[Any, Any]
_Reader = Callable[[Body, str], Any]
_Messages = Mapping[str, tuple[Callable[..., Any], Mapping[str, _Reader]]]


def framed(body: bytes) -> bytes:
    """Return ``body`` behind its header.

    Raises:
        CodecError: It is too long for the header.
    """
    if len(body) > MOST_BODY_BYTES:
        raise CodecError(
            f"a message of {len(body)} bytes does not fit RLlink's header of eight digits; "
            "send fewer steps at once"
        )
    return b"%08d" % len(body) + body


def body_bytes(header: bytes, limit: int = MOST_BODY_BYTES) -> int:
    """Return how long the body behind ``header`` is.

    Args:
        header: Eight bytes.
        limit: Most bytes that are accepted.

    Raises:
        CodecError: They are not eight digits, or the body would be empty or above ``limit``.
    """
    # ``int`` would take signs, spaces, underscores, and digits of other alphabets, too. Of bytes,
    # isdigit knows the ASCII digits alone.
    if len(header) != HEADER_BYTES or not header.isdigit():
        raise CodecError(f"{header[:HEADER_BYTES]!r} is no header of RLlink: eight digits")
    size = int(header)
    if not 0 < size <= limit:
        raise CodecError(f"a message of {size} bytes, where 1 to {limit} are accepted")
    return size


# --- fields ------------------------------------------------------------------------------


def _text(body: Body, name: str) -> str | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_TEXT:
        raise CodecError(f"{name} must be a text of 1 to {LONGEST_TEXT} characters")
    return value


def _required_text(body: Body, name: str) -> str:
    value = _text(body, name)
    if value is None:
        raise CodecError(f"{name} is missing")
    return value


def _reason(body: Body, name: str) -> str:
    return str(body.get(name, ""))[:_MOST_MESSAGE_CHARACTERS]


def _optional_count(body: Body, name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_SEQ_NO:
        raise CodecError(f"{name} must be an integer from 0 to 2**53")
    return value


def _count(body: Body, name: str) -> int:
    return _optional_count(body, name) or 0


def _flag(body: Body, *names: str) -> bool:
    """Return a truth value, under the first of ``names`` that is there; False if none is."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, list) and value:
            value = value[-1]  # one for each step: older clients
        if isinstance(value, bool | np.bool_):
            return bool(value)
        raise CodecError(f"{name} must be true or false")
    return False


def _number(body: Body, name: str) -> float:
    """Return a finite number; 0.0 where there is none."""
    value = body.get(name)
    if value is None:
        return 0.0
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    try:
        converted = float(value) if is_number else np.nan
    except (OverflowError, TypeError):  # an integer beyond all floats; a complex number
        converted = np.nan
    if not np.isfinite(converted):
        raise CodecError(f"{name} must be a finite number")
    return converted


def _array(body: Body, name: str) -> Array:
    """Return what may be numbers in lists of any depth, or an array, as an array."""
    value = body.get(name)
    try:
        made = np.asarray(value) if msgpack_values.holds_numbers(value) else None
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise CodecError(f"{name} cannot be an array: {first_line}") from error
    if made is None or not is_plain(made):
        raise CodecError(f"{name} must hold numbers in lists of equal lengths")
    return made


def _stacked(body: Body, name: str) -> Array:
    """Return a list of numbers or arrays as one array, with a first axis."""
    made = _array(body, name)
    if made.ndim == 0:
        raise CodecError(f"{name} must be a list")
    return made


# --- the table of messages ---------------------------------------------------------------

_STEP = {"episode_id": _required_text, "obs": _array, "reward": _number}
_REQUESTS: _Messages = {
    "PING": (Ping, {"token": _text}),
    "GET_CONFIG": (GetConfig, {}),
    "GET_STATE": (GetState, {}),
}
_REQUESTS_FOR_ACTIONS: _Messages = {
    "START_EPISODE": (StartEpisode, {"episode_id": _text}),
    "GET_ACTION": (GetAction, _STEP),
    "LOG_RETURNS": (LogReturns, {"episode_id": _required_text, "reward": _number}),
    "END_EPISODE": (EndEpisode, {**_STEP, "is_truncated": _flag}),
}
_REPLIES: _Messages = {"PONG": (Pong, {}), "ERROR": (Failed, {"message": _reason})}
_REPLIES_WITH_ACTIONS: _Messages = {
    "START_EPISODE": (EpisodeStarted, {"episode_id": _required_text}),
    "GET_ACTION": (
        Action,
        {"episode_id": _required_text, "action": _array, "weights_seq_no": _count},
    ),
}
"""The class of each message, and how its fields are read. The others are written out below."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """How messages are written, by either end."""

    name: str
    loads: Callable[[bytes], Body]
    dumps: Callable[[Body], bytes]
    requests: _Messages
    replies: _Messages
    read_chunk: Callable[[Any], Chunk | None]
    """Reads an episode; None: nothing has happened in it yet."""
    write_chunk: Callable[[Chunk], Body]
    read_state: Callable[[Body], SetState]
    write_state: Callable[[SetState], Body]
    num_steps_name: str
    has_pickled_config: bool
    """Whether SET_CONFIG has a pickle and nothing of ours; else it never has a pickle."""

    def parse_request(self, body: bytes) -> Request:
        """Read what a client says.

        Raises:
            CodecError: It is of another encoding, or no request, or a field is not what it should
                be.
            MissingPackageError: The package msgpack is not installed.
        """
        found = self.loads(body)
        name = _required_text(found, "type")
        if name not in ("EPISODES", "EPISODES_AND_GET_STATE"):
            request: Request = self._parsed(self.requests, name, found, "request")
            return request
        episodes = found.get("episodes")
        if not isinstance(episodes, list):
            raise CodecError("episodes must be a list")
        if len(episodes) > _MOST_EPISODES:
            raise CodecError(f"{len(episodes)} episodes at once; send at most {_MOST_EPISODES}")
        chunks = tuple(chunk for each in episodes if (chunk := self.read_chunk(each)) is not None)
        number = _optional_count(found, "weights_seq_no")
        return Episodes(chunks, name == "EPISODES_AND_GET_STATE", number)

    def pack_request(self, request: Request) -> bytes:
        """Write what a client says.

        Raises:
            CodecError: The encoding has no such request, or every server would refuse it.
        """
        if not isinstance(request, Episodes):
            return self._packed(self.requests, request)
        fields: dict[str, Any] = {
            "type": "EPISODES_AND_GET_STATE" if request.wants_state else "EPISODES",
            "episodes": [self.write_chunk(_checked(chunk)) for chunk in request.chunks],
            self.num_steps_name: sum(map(len, request.chunks)),
        }
        if request.weights_seq_no is not None:
            fields["weights_seq_no"] = request.weights_seq_no
        return self.dumps(fields)

    def parse_reply(self, body: bytes) -> Reply:
        """Read what a server answers; a pickled config stays bytes.

        Raises:
            CodecError: It is of another encoding, or no reply, or a field is not what it should be.
            MissingPackageError: The package msgpack is not installed.
        """
        found = self.loads(body)
        name = _required_text(found, "type")
        if name == "SET_STATE":
            return self.read_state(found)
        if name != "SET_CONFIG":
            reply: Reply = self._parsed(self.replies, name, found, "reply")
            return reply
        num_steps = _count(found, "env_steps_per_sample")
        is_on_policy = _flag(found, "force_on_policy")
        if not self.has_pickled_config:
            return SetConfig(num_steps, is_on_policy, _others(found, CONFIG_FIELDS))
        pickled = found.get("config", b"")
        if not isinstance(pickled, bytes):
            raise CodecError("config must be bytes")
        return SetConfig(num_steps, is_on_policy, pickled_config=pickled)

    def pack_reply(self, reply: Reply) -> bytes:
        """Write what a server answers.

        Raises:
            CodecError: The encoding has no such reply.
        """
        if isinstance(reply, SetState):
            return self.dumps({"type": "SET_STATE", **self.write_state(reply)})
        if not isinstance(reply, SetConfig):
            return self._packed(self.replies, reply)
        fields: dict[str, Any] = {
            "type": "SET_CONFIG",
            "env_steps_per_sample": reply.env_steps_per_sample,
            "force_on_policy": reply.force_on_policy,
            **reply.extras,
        }
        if self.has_pickled_config and reply.pickled_config:
            fields["config"] = reply.pickled_config
        return self.dumps(fields)

    def _parsed(self, table: _Messages, name: str, body: Body, what: str) -> Any:
        if name not in table:
            raise CodecError(f"{name[:40]!r} is no {what} of RLlink in {self.name}'s dialect")
        kind, fields = table[name]
        return kind(**{field: read(body, field) for field, read in fields.items()})

    def _packed(self, table: _Messages, message: Request | Reply) -> bytes:
        for name, (kind, fields) in table.items():
            if kind is type(message):
                # What the other end would refuse is refused here.
                values = {field: read(vars(message), field) for field, read in fields.items()}
                given = {field: value for field, value in values.items() if value is not None}
                return self.dumps({"type": name, **given})
        raise CodecError(f"{self.name}'s dialect has no {type(message).__name__}")


def encoding_of(body: bytes) -> Encoding:
    """Return the encoding of a body, from its first byte.

    Raises:
        CodecError: It is neither.
    """
    if body[:1] == b"{":
        return JSON
    if body and body[0] in _MAP_BYTES:
        return RAY
    raise CodecError(f"a message that begins with {body[:1]!r} is of no dialect of RLlink")


def _others(body: Body, names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in names}


def _checked(chunk: Chunk) -> Chunk:
    """Return a chunk with arrays in place of lists; as both ends have it.

    Raises:
        CodecError: It contradicts itself, or has something else than numbers.
    """
    given = {"obs": chunk.obs, "actions": chunk.actions, "rewards": chunk.rewards}
    obs, actions, rewards = (_stacked(given, name) for name in given)
    outputs = {name: _stacked(chunk.model_outputs, name) for name in chunk.model_outputs}
    num_steps = len(rewards)
    if rewards.ndim != 1:
        raise CodecError(f"rewards of shape {rewards.shape}; one number a step is expected")
    if num_steps == 0:
        raise CodecError("an episode without a step")
    if len(obs) != num_steps + 1 or len(actions) != num_steps:
        raise CodecError(
            f"{len(obs)} observations, {len(actions)} actions and {num_steps} "
            "rewards; there must be as many actions as rewards, and one more observation"
        )
    for name, values in outputs.items():
        if len(values) != num_steps:
            raise CodecError(f"{len(values)} values of {name} for {num_steps} steps")
    if not np.isfinite(rewards).all():
        raise CodecError("a reward that is not a finite number")
    return Chunk(
        obs,
        actions,
        rewards.astype(np.float64),
        chunk.is_terminated,
        chunk.is_truncated,
        _text({"episode_id": chunk.episode_id}, "episode_id"),
        outputs,
    )


# --- JSON --------------------------------------------------------------------------------


def _from_json(body: bytes) -> Body:
    # Brackets and commas in texts count, too; simulators send few of them.
    if sum(map(body.count, (b",", b"[", b"{"))) > MOST_JSON_VALUES:
        raise CodecError(
            f"a message of more than {MOST_JSON_VALUES} values in JSON; send fewer steps at a "
            "time, or in Ray's dialect, which has arrays"
        )
    try:
        decoded = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CodecError(f"this is not JSON: {str(error)[:200]}") from error
    if not isinstance(decoded, dict):
        raise CodecError("a message must be a JSON object")
    return decoded


def _to_json(body: Body) -> bytes:
    return json.dumps(body, default=_as_lists).encode("ascii")


def _as_lists(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no place in a message of RLlink")


def _chunk_of_object(episode: Any) -> Chunk | None:
    if not isinstance(episode, dict):
        raise CodecError("an episode must be an object")
    obs = episode.get("obs")
    is_terminated = _flag(episode, "is_terminated", "terminateds")
    is_truncated = _flag(episode, "is_truncated", "truncateds")
    has_no_step = episode.get("actions") == episode.get("rewards") == []
    has_only_begun = has_no_step and isinstance(obs, list) and len(obs) == 1
    if has_only_begun and not is_terminated and not is_truncated:
        # What it begins with comes again in its next chunk.
        return None
    return _checked(
        Chunk(
            episode.get("obs"),  # type: ignore[arg-type]  # it is checked
            episode.get("actions"),  # type: ignore[arg-type]
            episode.get("rewards"),  # type: ignore[arg-type]
            is_terminated,
            is_truncated,
            episode.get("id", episode.get("episode_id")),
            {name: episode[name] for name in MODEL_OUTPUTS if episode.get(name) is not None},
        )
    )


def _object_of_chunk(chunk: Chunk) -> Body:
    return {
        "obs": chunk.obs,
        "actions": chunk.actions,
        "rewards": chunk.rewards,
        "is_terminated": chunk.is_terminated,
        "is_truncated": chunk.is_truncated,
        **({} if chunk.episode_id is None else {"id": chunk.episode_id}),
        **chunk.model_outputs,
    }


def _onnx_of(body: Body) -> SetState:
    encoded = body.get("onnx_file")
    if not isinstance(encoded, str):
        raise CodecError("onnx_file must be a text")
    try:
        compressed = base64.b64decode(encoded, validate=True)
        # A limit, since a kilobyte can stand for a gigabyte.
        unpacking = zlib.decompressobj(wbits=31)
        model = unpacking.decompress(compressed, _MOST_MODEL_BYTES)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise CodecError(f"onnx_file is not gzip in base64: {error}") from error
    if not unpacking.eof:
        raise CodecError("onnx_file ends too early, or is larger than a gigabyte")
    extras = _others(body, STATE_FIELDS)
    return SetState(_count(body, "weights_seq_no"), model, extras=extras)


def _with_onnx(state: SetState) -> Body:
    compressed = gzip.compress(state.onnx, compresslevel=1, mtime=0)
    return {
        "weights_seq_no": state.weights_seq_no,
        "onnx_file": base64.b64encode(compressed).decode("ascii"),
        **state.extras,
    }


# --- Ray's msgpack -----------------------------------------------------------------------


def _from_msgpack(body: bytes) -> Body:
    decoded = msgpack_values.unpack(
        body, max_items=MOST_RAY_VALUES, max_values=MOST_RAY_VALUES, read_map=decode_array
    )
    if not isinstance(decoded, dict):
        raise CodecError("a message must be a map")
    return decoded


def _to_msgpack(body: Body) -> bytes:
    return msgpack_values.pack(body, encode_array)


def _chunk_of_state(state: Any) -> Chunk | None:
    if not isinstance(state, dict):
        raise CodecError("an episode must be a map")
    lookback, obs = _buffer(state, "observations")
    # Without a step, what it would begin with comes again in its next chunk.
    if len(obs) - lookback <= 1:
        return None
    outputs = state.get("extra_model_outputs")
    if outputs is None:
        outputs = {}
    if not isinstance(outputs, dict):
        raise CodecError("extra_model_outputs must be a map")
    return _checked(
        Chunk(
            obs[lookback:],
            _since(lookback, state, "actions"),
            _since(lookback, state, "rewards"),
            _flag(state, "is_terminated"),
            _flag(state, "is_truncated"),
            _required_text(state, "id_"),
            {
                name: _since(lookback, outputs, name)
                for name in MODEL_OUTPUTS
                if outputs.get(name) is not None
            },
        )
    )


def _buffer(state: Body, name: str) -> tuple[int, Array]:
    buffer = state.get(name)
    if not isinstance(buffer, dict):
        raise CodecError(f"{name} must be the state of a buffer")
    values = buffer.get("data")
    return _count(buffer, "lookback"), _stacked({name: [] if values is None else values}, name)


def _since(expected: int, state: Body, name: str) -> Array:
    lookback, values = _buffer(state, name)
    if lookback != expected:
        raise CodecError(
            f"{name} look back {lookback} steps where observations look back {expected}"
        )
    return values[lookback:]


def _state_of_chunk(chunk: Chunk) -> Body:
    """Return a chunk as the state of a SingleAgentEpisode, with all the keys that RLlib reads."""
    num_steps = len(chunk)
    outputs = {name: _buffer_of(list(values)) for name, values in chunk.model_outputs.items()}
    return {
        "id_": chunk.episode_id or "episode",
        "agent_id": None,
        "module_id": None,
        "multi_agent_episode_id": None,
        "observations": _buffer_of(list(chunk.obs)),
        "actions": _buffer_of(list(chunk.actions)),
        "rewards": _buffer_of(list(chunk.rewards)),
        "infos": _buffer_of([{} for _ in range(num_steps + 1)]),
        "extra_model_outputs": outputs or None,
        "is_terminated": chunk.is_terminated,
        "is_truncated": chunk.is_truncated,
        "t_started": 0,
        "t": num_steps,
        "_observation_space": None,
        "_action_space": None,
        "_start_time": None,
        "_last_step_time": None,
        "custom_data": {},
    }


def _buffer_of(values: list[Any]) -> dict[str, Any]:
    return {"data": values, "lookback": 0, "finalized": False, "space": None}


def _weights_of(body: Body) -> SetState:
    state = body.get("state")
    if not isinstance(state, dict):
        state = {}
    weights = state.get("rl_module")
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(value, np.ndarray) for name, value in weights.items()
    ):
        raise CodecError("state must hold arrays by name under rl_module")
    return SetState(_count(state, "weights_seq_no"), weights=weights)


def _with_weights(state: SetState) -> Body:
    weights = dict(state.weights)
    return {"state": {"rl_module": weights, "weights_seq_no": state.weights_seq_no}}


def encode_array(value: Any) -> Any:
    """Return a map that stands for an array or a NumPy number: ``default`` of msgpack's packer.

    Raises:
        TypeError: ``value`` is something else, or an array of something else.
    """
    if isinstance(value, np.ndarray) and is_plain(value):
        return {
            b"nd": True,
            b"type": value.dtype.str,
            b"kind": b"",
            b"shape": value.shape,
            b"data": value.tobytes(),
        }
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    raise TypeError(f"{type(value).__name__} has no place in a message of RLlink")


def decode_array(found: dict[Any, Any]) -> Any:
    """Return what a map stands for, or the map: ``object_hook`` of msgpack's unpacker.

    Raises:
        CodecError: It stands for an array that is not of plain numbers, or contradicts itself.
    """
    if b"nd" not in found and "nd" not in found:
        if b"complex" in found or "complex" in found:
            raise CodecError("complex numbers have no place in a message of RLlink")
        return found
    fields = {key.decode() if isinstance(key, bytes) else key: each for key, each in found.items()}
    kind, dtype = fields.get("kind", b""), fields.get("type")
    # What stands there may itself be an array, and compares as one.
    if not isinstance(kind, bytes | str) or kind:
        raise CodecError(f"an array of kind {kind!r}; only plain numbers are read")
    if isinstance(dtype, bytes):
        dtype = dtype.decode("ascii", "replace")
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise CodecError(f"an array of type {str(dtype)[:40]!r}; only plain numbers are read")
    is_array = fields["nd"] is True
    axes = fields.get("shape") if is_array else ()
    array = msgpack_values.array_of(np.dtype(dtype), axes, fields.get("data"))
    return array if is_array else array[()]


JSON = Encoding(
    name="JSON",
    loads=_from_json,
    dumps=_to_json,
    requests={**_REQUESTS, **_REQUESTS_FOR_ACTIONS},
    replies={**_REPLIES, **_REPLIES_WITH_ACTIONS},
    read_chunk=_chunk_of_object,
    write_chunk=_object_of_chunk,
    read_state=_onnx_of,
    write_state=_with_onnx,
    num_steps_name="env_steps",
    has_pickled_config=False,
)
RAY = Encoding(
    name="Ray",
    loads=_from_msgpack,
    dumps=_to_msgpack,
    requests=_REQUESTS,
    replies=_REPLIES,
    read_chunk=_chunk_of_state,
    write_chunk=_state_of_chunk,
    read_state=_weights_of,
    write_state=_with_weights,
    num_steps_name="timesteps",
    has_pickled_config=True,
)
