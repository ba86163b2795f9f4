"""Where a request of a model session belongs, to its message and back."""

from rlmesh_ray.protocol.adapter_messages import AdapterContext
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import interaction_pb2 as pb


def context_from_proto(message: pb.AdapterContext) -> AdapterContext:
    """Return the context in ``message``."""
    return AdapterContext(message.session_id, message.env_id, message.request_id)


def context_to_proto(context: AdapterContext) -> pb.AdapterContext:
    """Return the message of ``context``."""
    return pb.AdapterContext(
        session_id=context.session_id, env_id=context.env_id, request_id=context.request_id
    )
