"""The JSON of RLlink's description, with optional fields of ours; both ends.

Beside what the description names: ``token`` in PING; an ``id``, ``action_logp`` and
``action_dist_inputs`` of an episode; everything in SET_CONFIG and SET_STATE that tells how to turn
the model's output into actions; the requests for single actions. Two spellings are read where
clients differ: ``is_terminated`` and ``terminateds``, ``is_truncated`` and ``truncateds``. A model
is always ONNX, in ``onnx_file``, gzip in base64; ``mlir_file`` is not provided.
"""

import base64
import binascii
import gzip
import json
import zlib
from typing import Any

from rlmesh_ray.dialects.rllink.wire import fields
from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.errors import CodecError

_MOST_MODEL_BYTES = 2**30
_MOST_VALUES = 2**18
"""Of a message. Python parses JSON in one call that blocks all threads: 50 ms for numbers."""
_STATE_FIELDS = {"type", "weights_seq_no", "onnx_file"}
_CONFIG_FIELDS = {"type", "env_steps_per_sample", "force_on_policy"}


# --- the server's end --------------------------------------------------------------------


def parse_request(body: bytes) -> m.Request:
    """Read what a client says.

    Raises:
        CodecError: It is not JSON, or no request, or a field is not what it should be.
    """
    fields_ = _object(body)
    match fields.required_text(fields_, "type"):
        case "PING":
            return m.Ping(fields.text(fields_, "token"))
        case "GET_CONFIG":
            return m.GetConfig()
        case "GET_STATE":
            return m.GetState()
        case "EPISODES" | "EPISODES_AND_GET_STATE" as kind:
            return _episodes(fields_, wants_state=kind == "EPISODES_AND_GET_STATE")
        case "START_EPISODE":
            return m.StartEpisode(fields.text(fields_, "episode_id"))
        case "GET_ACTION":
            return m.GetAction(
                fields.required_text(fields_, "episode_id"),
                fields.array(fields_.get("obs"), "obs"),
                fields.number(fields_, "reward"),
            )
        case "LOG_RETURNS":
            return m.LogReturns(
                fields.required_text(fields_, "episode_id"), fields.number(fields_, "reward")
            )
        case "END_EPISODE":
            return m.EndEpisode(
                fields.required_text(fields_, "episode_id"),
                fields.array(fields_.get("obs"), "obs"),
                fields.number(fields_, "reward"),
                fields.flag(fields_, "is_truncated"),
            )
        case kind:
            raise CodecError(f"{kind[:40]!r} is no request of RLlink")


def pack_reply(reply: m.Reply) -> bytes:
    """Write what a server answers."""
    match reply:
        case m.Pong():
            return _packed("PONG")
        case m.SetConfig():
            return _packed(
                "SET_CONFIG",
                env_steps_per_sample=reply.env_steps_per_sample,
                force_on_policy=reply.force_on_policy,
                **reply.extras,
            )
        case m.SetState():
            compressed = gzip.compress(reply.onnx, compresslevel=1, mtime=0)
            return _packed(
                "SET_STATE",
                weights_seq_no=reply.weights_seq_no,
                onnx_file=base64.b64encode(compressed).decode("ascii"),
                **reply.extras,
            )
        case m.EpisodeStarted():
            return _packed("START_EPISODE", episode_id=reply.episode_id)
        case m.Action():
            return _packed(
                "GET_ACTION",
                episode_id=reply.episode_id,
                action=reply.action.tolist(),
                weights_seq_no=reply.weights_seq_no,
            )
        case m.Failed():
            return _packed("ERROR", message=reply.message)


def _episodes(body: dict[str, Any], *, wants_state: bool) -> m.Episodes:
    listed = fields.episodes(body)
    chunks = tuple(_chunk(episode) for episode in listed if not _is_without_step(episode))
    return m.Episodes(chunks, wants_state, fields.count(body, "weights_seq_no"))


def _is_without_step(episode: Any) -> bool:
    """Tell whether an episode has only begun: what it begins with comes again in its next chunk."""
    if not isinstance(episode, dict):
        raise CodecError("an episode must be an object")
    obs = episode.get("obs")
    return (
        isinstance(obs, list)
        and len(obs) == 1
        and episode.get("actions") == episode.get("rewards") == []
        and not fields.flag(episode, "is_terminated", "terminateds")
        and not fields.flag(episode, "is_truncated", "truncateds")
    )


def _chunk(episode: dict[str, Any]) -> m.Chunk:
    name = "id" if "id" in episode else "episode_id"
    return fields.checked(
        m.Chunk(
            fields.stacked(episode.get("obs"), "obs"),
            fields.stacked(episode.get("actions"), "actions"),
            fields.rewards(episode.get("rewards")),
            fields.flag(episode, "is_terminated", "terminateds"),
            fields.flag(episode, "is_truncated", "truncateds"),
            fields.text(episode, name),
            {
                output: fields.stacked(episode[output], output)
                for output in m.MODEL_OUTPUTS
                if episode.get(output) is not None
            },
        )
    )


# --- the client's end --------------------------------------------------------------------


def pack_request(request: m.Request) -> bytes:
    """Write what a client says."""
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
            numbered = {"weights_seq_no": request.weights_seq_no}
            return _packed(
                kind,
                episodes=[_listed(chunk) for chunk in request.chunks],
                env_steps=sum(map(len, request.chunks)),
                **(numbered if request.weights_seq_no is not None else {}),
            )
        case m.StartEpisode(episode_id):
            return _packed("START_EPISODE", **({"episode_id": episode_id} if episode_id else {}))
        case m.GetAction():
            return _packed(
                "GET_ACTION",
                episode_id=request.episode_id,
                obs=request.obs.tolist(),
                reward=request.reward,
            )
        case m.LogReturns(episode_id, reward):
            return _packed("LOG_RETURNS", episode_id=episode_id, reward=reward)
        case m.EndEpisode():
            return _packed(
                "END_EPISODE",
                episode_id=request.episode_id,
                obs=request.obs.tolist(),
                reward=request.reward,
                is_truncated=request.is_truncated,
            )


def parse_reply(body: bytes) -> m.Reply:
    """Read what a server answers.

    Raises:
        CodecError: It is not JSON, or no reply, or a field is not what it should be.
    """
    fields_ = _object(body)
    match fields.required_text(fields_, "type"):
        case "PONG":
            return m.Pong()
        case "SET_CONFIG":
            return m.SetConfig(
                fields.count(fields_, "env_steps_per_sample") or 0,
                fields.flag(fields_, "force_on_policy"),
                {name: value for name, value in fields_.items() if name not in _CONFIG_FIELDS},
            )
        case "SET_STATE":
            return m.SetState(
                fields.count(fields_, "weights_seq_no") or 0,
                _model(fields_.get("onnx_file")),
                extras={
                    name: value for name, value in fields_.items() if name not in _STATE_FIELDS
                },
            )
        case "START_EPISODE":
            return m.EpisodeStarted(fields.required_text(fields_, "episode_id"))
        case "GET_ACTION":
            return m.Action(
                fields.required_text(fields_, "episode_id"),
                fields.array(fields_.get("action"), "action"),
                fields.count(fields_, "weights_seq_no") or 0,
            )
        case "ERROR":
            return m.Failed(str(fields_.get("message", ""))[:2000])
        case kind:
            raise CodecError(f"{kind[:40]!r} is no reply of RLlink")


def _listed(chunk: m.Chunk) -> dict[str, Any]:
    return {
        "obs": chunk.obs.tolist(),
        "actions": chunk.actions.tolist(),
        "rewards": chunk.rewards.tolist(),
        "is_terminated": chunk.is_terminated,
        "is_truncated": chunk.is_truncated,
        **({} if chunk.episode_id is None else {"id": chunk.episode_id}),
        **{name: values.tolist() for name, values in chunk.model_outputs.items()},
    }


def _model(encoded: Any) -> bytes:
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
    return model


# --- both --------------------------------------------------------------------------------


def _packed(kind: str, **values: Any) -> bytes:
    return json.dumps({"type": kind, **values}).encode("ascii")


def _object(body: bytes) -> dict[str, Any]:
    # Brackets and commas in texts count, too; simulators send few of them.
    if sum(map(body.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise CodecError(
            f"a message of more than {_MOST_VALUES} values in JSON; send fewer steps at a time, or "
            "in Ray's dialect, which has arrays"
        )
    try:
        decoded = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CodecError(f"this is not JSON: {str(error)[:200]}") from error
    if not isinstance(decoded, dict):
        raise CodecError("a message must be a JSON object")
    return decoded
