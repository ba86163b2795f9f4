"""What Ray 2.60 speaks: msgpack, with arrays as msgpack-numpy writes them; both ends.

Episodes are the states of RLlib's SingleAgentEpisode. Of these, only numbers are taken over: no
space, no info, no class of RLlib's is made of what a client has sent.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlmesh_ray.dialects.rllink.wire import fields
from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire import msgpack_values

_FIRST_BYTES = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})
"""Of a map in msgpack."""
_MOST_VALUES = 2**20
"""Of a message. A step has some thirty: numbers and arrays are maps."""
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248])")


def begins(body: bytes) -> bool:
    """Tell whether ``body`` may be of this dialect, from its first byte."""
    return bool(body) and body[0] in _FIRST_BYTES


# --- the server's end --------------------------------------------------------------------


def parse_request(body: bytes) -> m.Request:
    """Read what a client says.

    Raises:
        CodecError: It is not msgpack, or no request, or a field is not what it should be.
        MissingPackageError: The package msgpack is not installed.
    """
    message = _map(body)
    match fields.required_text(message, "type"):
        case "PING":
            return m.Ping(fields.text(message, "token"))
        case "GET_CONFIG":
            return m.GetConfig()
        case "GET_STATE":
            return m.GetState()
        case "EPISODES" | "EPISODES_AND_GET_STATE" as kind:
            states = fields.episodes(message)
            chunks = tuple(chunk for state in states for chunk in _chunks(state))
            number = fields.count(message, "weights_seq_no")
            return m.Episodes(chunks, kind == "EPISODES_AND_GET_STATE", number)
        case kind:
            raise CodecError(f"{kind[:40]!r} is no request of RLlink in Ray's dialect")


def pack_reply(reply: m.Reply) -> bytes:
    """Write what a server answers.

    Raises:
        CodecError: Ray's dialect has no such reply.
    """
    match reply:
        case m.Pong():
            return _packed("PONG")
        case m.SetConfig():
            told: dict[str, Any] = {
                "env_steps_per_sample": reply.env_steps_per_sample,
                "force_on_policy": reply.force_on_policy,
                **reply.extras,
            }
            if reply.pickled_config:
                told["config"] = reply.pickled_config
            return _packed("SET_CONFIG", **told)
        case m.SetState():
            state = {"rl_module": dict(reply.weights), "weights_seq_no": reply.weights_seq_no}
            return _packed("SET_STATE", state=state)
        case m.Failed():
            return _packed("ERROR", message=reply.message)
        case _:
            raise CodecError(f"Ray's dialect has no {type(reply).__name__}")


def _chunks(state: Any) -> list[m.Chunk]:
    """Return the steps of an episode's state: one chunk, or none if nothing has happened in it."""
    if not isinstance(state, dict):
        raise CodecError("an episode must be a map")
    lookback, obs = _buffer(state, "observations")
    # Without a step, what it would begin with comes again in its next chunk.
    if len(obs) - lookback <= 1:
        return []
    outputs = state.get("extra_model_outputs")
    if outputs is None:
        outputs = {}
    if not isinstance(outputs, dict):
        raise CodecError("extra_model_outputs must be a map")
    return [
        fields.checked(
            m.Chunk(
                obs[lookback:],
                _since(lookback, *_buffer(state, "actions"), "actions"),
                _since(lookback, *_buffer(state, "rewards"), "rewards").astype(np.float64),
                fields.flag(state, "is_terminated"),
                fields.flag(state, "is_truncated"),
                fields.required_text(state, "id_"),
                {
                    name: _since(lookback, *_buffer(outputs, name), name)
                    for name in m.MODEL_OUTPUTS
                    if outputs.get(name) is not None
                },
            )
        )
    ]


def _buffer(state: Mapping[Any, Any], name: str) -> tuple[int, m.Array]:
    """Return how many of a buffer's values belong to earlier chunks, and all of them."""
    buffer = state.get(name)
    if not isinstance(buffer, dict):
        raise CodecError(f"{name} must be the state of a buffer")
    lookback = fields.count(buffer, "lookback") or 0
    values = buffer.get("data")
    return lookback, fields.stacked([] if values is None else values, name)


def _since(expected: int, lookback: int, values: m.Array, name: str) -> m.Array:
    if lookback != expected:
        raise CodecError(
            f"{name} look back {lookback} steps where observations look back {expected}"
        )
    return values[lookback:]


# --- the client's end --------------------------------------------------------------------


def pack_request(request: m.Request) -> bytes:
    """Write what a client says.

    Raises:
        CodecError: Ray's dialect has no such request.
    """
    match request:
        case m.Ping(None):
            return _packed("PING")
        case m.Ping(token):
            return _packed("PING", token=token)
        case m.GetConfig():
            return _packed("GET_CONFIG")
        case m.GetState():
            return _packed("GET_STATE")
        case m.Episodes():
            kind = "EPISODES_AND_GET_STATE" if request.wants_state else "EPISODES"
            return _packed(
                kind,
                episodes=[_state(chunk) for chunk in request.chunks],
                timesteps=sum(map(len, request.chunks)),
                **(
                    {}
                    if request.weights_seq_no is None
                    else {"weights_seq_no": request.weights_seq_no}
                ),
            )
        case _:
            raise CodecError(f"Ray's dialect has no {type(request).__name__}")


def parse_reply(body: bytes) -> m.Reply:
    """Read what a server answers; a pickled config stays bytes.

    Raises:
        CodecError: It is not msgpack, or no reply, or a field is not what it should be.
        MissingPackageError: The package msgpack is not installed.
    """
    message = _map(body)
    match fields.required_text(message, "type"):
        case "PONG":
            return m.Pong()
        case "SET_CONFIG":
            pickled = message.get("config", b"")
            if not isinstance(pickled, bytes):
                raise CodecError("config must be bytes")
            return m.SetConfig(
                fields.count(message, "env_steps_per_sample") or 0,
                fields.flag(message, "force_on_policy"),
                pickled_config=pickled,
            )
        case "SET_STATE":
            return _set_state(message.get("state"))
        case "ERROR":
            return m.Failed(str(message.get("message", ""))[:2000])
        case kind:
            raise CodecError(f"{kind[:40]!r} is no reply of RLlink in Ray's dialect")


def _set_state(state: Any) -> m.SetState:
    weights = state.get("rl_module") if isinstance(state, dict) else None
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(value, np.ndarray) for name, value in weights.items()
    ):
        raise CodecError("state must hold arrays by name under rl_module")
    return m.SetState(fields.count(state, "weights_seq_no") or 0, weights=weights)


def _state(chunk: m.Chunk) -> dict[str, Any]:
    """Return a chunk as the state of a SingleAgentEpisode, with all the keys that RLlib reads."""
    num_steps = len(chunk)
    return {
        "id_": chunk.episode_id or "episode",
        "agent_id": None,
        "module_id": None,
        "multi_agent_episode_id": None,
        "observations": _listed(chunk.obs),
        "actions": _listed(chunk.actions),
        "rewards": _listed(chunk.rewards),
        "infos": {
            "data": [{} for _ in range(num_steps + 1)],
            "lookback": 0,
            "finalized": False,
            "space": None,
        },
        "extra_model_outputs": {
            name: _listed(values) for name, values in chunk.model_outputs.items()
        }
        or None,
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


def _listed(values: m.Array) -> dict[str, Any]:
    return {"data": list(values), "lookback": 0, "finalized": False, "space": None}


# --- both --------------------------------------------------------------------------------


def _packed(kind: str, **values: Any) -> bytes:
    return msgpack_values.pack({"type": kind, **values}, encode_array)


def _map(body: bytes) -> dict[Any, Any]:
    decoded = msgpack_values.unpack(
        body, max_items=_MOST_VALUES, max_values=_MOST_VALUES, read_map=decode_array
    )
    if not isinstance(decoded, dict):
        raise CodecError("a message must be a map")
    return decoded


# --- arrays, in the form of the package msgpack-numpy --------------------------------------


def encode_array(value: Any) -> Any:
    """Return a map that stands for an array or a NumPy number: ``default`` of msgpack's packer.

    Raises:
        TypeError: ``value`` is something else, or an array of something else.
    """
    if isinstance(value, np.ndarray) and m.is_plain(value):
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
    marker = found.get(b"nd", found.get("nd"))
    if marker is None:
        if b"complex" in found or "complex" in found:
            raise CodecError("complex numbers have no place in a message of RLlink")
        return found
    kind = _field(found, "kind", default=b"")
    # What stands there may itself be an array, and compares as one.
    if not isinstance(kind, bytes | str) or kind:
        raise CodecError(f"an array of kind {kind!r}; only plain numbers are read")
    dtype = _dtype(_field(found, "type"))
    axes = _field(found, "shape") if marker is True else ()
    array = msgpack_values.array_of(dtype, axes, _field(found, "data"))
    return array if marker is True else array[()]


def _field(found: dict[Any, Any], name: str, default: Any = None) -> Any:
    return found.get(name.encode(), found.get(name, default))


def _dtype(text: Any) -> np.dtype[Any]:
    if isinstance(text, bytes):
        text = text.decode("ascii", "replace")
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise CodecError(f"an array of type {str(text)[:40]!r}; only plain numbers are read")
    return np.dtype(text)
