"""Frames with everything in order: protobuf leaves that of fields and of maps to who writes."""

from typing import Any

from google.protobuf.message import Message

from rlmesh_ray.wire._pb.rlmesh.env.v1 import interaction_pb2 as env_v1
from rlmesh_ray.wire._pb.rlmesh.env.v1 import service_pb2 as env_service_v1
from rlmesh_ray.wire._pb.rlmesh.model.v1 import interaction_pb2 as model_v1
from rlmesh_ray.wire._pb.rlmesh.model.v1 import service_pb2 as model_service_v1
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import interaction_pb2 as wire_env
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import service_pb2 as wire_env_service
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import interaction_pb2 as wire_model
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import service_pb2 as wire_model_service
from tests.golden.corpus import Frame

_SCHEMAS = {
    ("rlmesh_v1", "env"): (env_v1, env_service_v1),
    ("rlmesh_v1", "model"): (model_v1, model_service_v1),
    ("rlmesh_wire_v1", "env"): (wire_env, wire_env_service),
    ("rlmesh_wire_v1", "model"): (wire_model, wire_model_service),
}


def canonical(generation: str, frame: Frame) -> bytes:
    """Return the bytes of ``frame`` with its fields in ascending order and its maps sorted.

    What the schema does not know is kept, at the end of its message. The version of Python, which
    the released rlmesh's handshakes say, is left out: it is that of the recording.
    """
    service, method = frame.call.split("/")
    interaction, rest = _SCHEMAS[generation, service]
    name = method + ("Request" if frame.way == ">" else "Response")
    kind: type[Message] = getattr(interaction if method == "Join" else rest, name)
    message: Any = kind.FromString(frame.data)
    if generation == "rlmesh_wire_v1" and method == "Handshake":
        message.base.peer_info.ClearField("language_version")
    data: bytes = message.SerializeToString(deterministic=True)
    return data
